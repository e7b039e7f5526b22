"""Text -> data/<name>/{train,val}.bin, uint32 token ids behind a header (the format is data.py's).

    python prepare_data.py                                 # data/stdlib: Python's own library as bytes
    python prepare_data.py --source='my/*.jsonl,notes' --tokenizer=qwen3 --out_dir=data/mine
    python prepare_data.py config/data_fineweb_edu.py      # FineWeb-Edu's 10 billion tokens, from the hub
    python prepare_data.py --inspect=data/stdlib/train.bin

Sources are read one after another, tokenized on all cores and appended to the splits; a hash of its text says
which split a document belongs to. The files of a source, large ones in parts, are read in a seeded order, so
that a size is a sample of all of it. Documents are not shuffled: training permutes windows. The same command
continues after an interruption, with the source that was not finished.
"""

import fcntl
import glob
import hashlib
import io
import json
import os
import random
import re
import shutil
import sys
import sysconfig
import unicodedata
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Literal

from configurator import UserError, cli, configure, output_folder

import numpy as np
from tqdm import tqdm

from data import HEADER_BYTES, HERE, open_bin, pack_header, seal
from tokenizer import TOKENIZERS, load_tokenizer


@dataclass
class Settings:
    source: str = "stdlib"  # comma list of files, folders, globs, `stdlib`, hub:NAME[:CONFIG or GLOB]
    shares: dict = field(default_factory=dict)  # a mix, instead of source: {source: share of the train split}
    share_of: Literal["tokens", "bytes"] = "tokens"  # what shares and size count
    size: float | None = None  # tokens (or bytes of text) of the train split; default: all there is
    tokenizer: Literal["bytes", *TOKENIZERS] = "bytes"
    out_dir: str | None = None  # where {train,val}.bin go; default, for stdlib: data/stdlib
    val_fraction: float = 0.05  # share of the documents in val, decided by a hash of the text
    val_protocol: Literal["held_out", "paper"] = "held_out"  # paper: val documents are trained on too
    text_column: str = "text"  # of jsonl and parquet
    workers: int = 0  # threads; 0: one per core
    inspect: str | None = None  # show a .bin file and verify its checksum, and make nothing

    def __post_init__(self):
        if not all(isinstance(share, int | float) and share > 0 for share in self.shares.values()):
            raise ValueError(f"shares={self.shares}: needs numbers above 0, like {{'stdlib': 60, 'my/': 40}}")
        if self.size is not None and self.size <= 0 or not 0 < self.val_fraction <= 1 or self.workers < 0:
            raise ValueError("needs size above 0, val_fraction above 0 and at most 1, workers 0 or more")
        if self.shares and self.source != "stdlib":
            raise ValueError(f"source={self.source} and shares: give one of them")
        if (self.shares or self.source != "stdlib") and self.out_dir is self.inspect is None:
            raise ValueError("name the folder of the dataset: --out_dir=data/NAME")


# ---- sources -> files -> documents

TEXT = (".txt", ".md", ".rst", ".py")  # a file is a document; in the others, a row is one
READABLE = (*TEXT, ".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst", ".parquet")


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def find_files(source):
    """[(path or URL, bytes, time of change)] of a comma list's files, sorted; UserError if there are none."""
    import fsspec

    files = {}
    for name in source.split(","):
        path = os.path.expanduser(name.strip())
        if path.startswith("hub:"):
            found = visible = hub_urls(path)
        elif path == "stdlib":
            root = sysconfig.get_paths()["stdlib"]
            skip = re.compile(r"/(site-packages|dist-packages|test[^/]*|idle_test)/")
            found = glob.glob(f"{glob.escape(root)}/**/*.py", recursive=True)
            found = visible = [path for path in found if not skip.search(path, len(root))]
        else:
            pattern = glob.escape(path) if os.path.exists(path) else path
            pattern += "/**" if os.path.isdir(path) else ""
            visible, found = (
                list(filter(os.path.isfile, glob.glob(pattern, recursive=True, include_hidden=hidden)))
                for hidden in (False, True)
            )
        readable = [path for path in visible if path.endswith(READABLE)]
        if not readable:
            raise UserError(f"source {name!r}: no file found that ends in {' '.join(READABLE)}")
        if left_out := len(found) - len(readable):
            print(f"{name}: {left_out:,} files left out, hidden or not ending in {' '.join(READABLE)}")
        for path in readable:
            system, inner = fsspec.url_to_fs(path)
            info = system.info(inner)
            files[os.path.realpath(path)] = path, info["size"], info.get("mtime")  # a URL holds its commit
    return sorted(files.values())


def hub_urls(source):
    """The URLs, with their commit, of hub:NAME[:CONFIG or GLOB]; NAME may be the folder of a local copy."""
    from datasets import load_dataset_builder
    from huggingface_hub import HfApi

    name, _, config = source.removeprefix("hub:").partition(":")
    name = os.path.expanduser(name)
    try:
        if not os.path.isdir(name):
            HfApi().auth_check(name, repo_type="dataset")  # fails at once where the next call would retry
        choice = {"data_files": config} if "*" in config else {"name": config or None}
        return list(map(str, load_dataset_builder(name, **choice).config.data_files["train"]))
    except Exception as error:  # no such name, gated, offline, timed out: whatever the clients raise
        raise UserError(
            f"{source}: not available from the hub ({first_line(error)}); check its name and the network; if "
            "it is gated, accept the terms on its page and log in: hf auth login"
        ) from error


def reading_order(files):
    """[(path, part, parts)]: all files, large tables in equal parts, in a seeded order."""
    most = min(max(sum(size for _, size, _ in files) // 64, 1 << 18), 1 << 26)  # bytes of a part
    order = []
    for path, size, _ in files:
        parts = -(-size // most) if path.endswith((".jsonl", ".parquet")) else 1
        order += [(path, part, parts) for part in range(parts)]
    random.Random(0).shuffle(order)
    return order


def documents(path, part, parts, column):
    """Yields the documents in a part of a file. Whatever is wrong with it is a UserError that names it."""
    import fsspec

    try:
        with fsspec.open(path, "rb") as file:
            if path.endswith(TEXT):
                data = file.read()
                yield "" if b"\0" in data else data.decode("utf-8", "replace")  # zeros: a binary file
                return
            if path.endswith(".parquet"):
                rows = parquet_rows(file, part, parts, column)
            else:
                rows = json_rows(file, path, part, parts)
            for row in rows:
                if column not in row:
                    raise ValueError(f"no column {column!r}: choose one of {list(row)} with --text_column=")
                if not isinstance(row[column], str | None):
                    raise ValueError(f"{column!r} holds {row[column]!r}: choose another --text_column=")
                # JSON can spell half a surrogate pair, UTF-8 cannot
                yield (row[column] or "").encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    except Exception as error:  # whatever json, pyarrow and fsspec raise
        raise UserError(f"{path}: cannot be read ({first_line(error)}); repair it, or omit it") from error


def parquet_rows(file, part, parts, column):
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)  # row groups can be huge
    columns = [column] if column in table.schema_arrow.names else None  # all, for the line that names them
    groups = range(table.num_row_groups * part // parts, table.num_row_groups * (part + 1) // parts)
    for batch in table.iter_batches(256, row_groups=groups, columns=columns, use_threads=False):
        yield from batch.to_pylist()


def json_rows(file, path, part, parts):
    import pyarrow

    if path.endswith((".gz", ".zst")):
        stream = pyarrow.CompressedInputStream(file, "gzip" if path.endswith(".gz") else "zstd")
        file = io.BufferedReader(stream, 1 << 20)
    place, stop = 0, np.inf  # a line belongs to the part in which it starts
    if parts > 1:
        size = file.seek(0, os.SEEK_END)
        place, stop = size * part // parts, size * (part + 1) // parts
        file.seek(max(place - 1, 0))
        place += len(file.readline()) - 1 if place else 0
    while place < stop and (line := file.readline()):
        try:
            if line.strip():
                yield json.loads(line.decode("utf-8-sig", "replace"))
        except ValueError as error:
            raise ValueError(f"line at byte {place:,}: {error}") from error
        place += len(line)


# ---- documents -> ids


def is_val(document, fraction):
    """The side of a document (the UTF-8 of its NFC) is a function of its text alone, so that equal documents
    share a side in every corpus. White space does not count: a copy with other line ends is still a copy."""
    letters = document.translate(None, b" \t\n\r\v\f")
    digest = hashlib.blake2b(letters, digest_size=8, person=b"mhar-val-split").digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def encode(texts, settings):
    """[(ids with an eot, is it val, bytes of text, does it hold U+FFFD)] of documents."""
    tokenizer, encoded = load_tokenizer(settings.tokenizer), []
    for text in texts:
        text = text.removeprefix("\ufeff")  # a byte-order mark, of a file or of a row
        composed = unicodedata.normalize("NFC", text)
        ids = np.append(tokenizer.encode(composed if tokenizer.nfc else text), np.uint32(tokenizer.eot))
        document = composed.encode()
        encoded.append((ids, is_val(document, settings.val_fraction), len(document), "\ufffd" in text))
    return encoded


def encode_source(files, settings):
    """Yields what `encode` returns for each document of a source. The cores work a few batches ahead."""
    workers = settings.workers or os.cpu_count()
    batch, size, waiting = [], 0, deque()
    with ThreadPoolExecutor(workers) as pool:  # tiktoken releases Python's lock
        for part in reading_order(files):
            for text in documents(*part, settings.text_column):
                batch.append(text)
                size += len(text)
                if size > 1 << 18:
                    waiting.append(pool.submit(encode, batch, settings))
                    batch, size = [], 0
                if len(waiting) > 2 * workers:
                    yield from waiting.popleft().result()
        waiting.append(pool.submit(encode, batch, settings))
        for future in waiting:
            yield from future.result()


# ---- the dataset

SPLITS = ("train", "val")
COLUMNS = ["documents", "tokens", "bytes"]  # of a count


def prepare(settings):
    """Make {train,val}.bin as `settings` say, or find them made of the same files by the same settings.
    Returns their folder. Waits for a process that makes them; UserError rather than overwrite anything."""
    shares = settings.shares or {settings.source: 1}
    pack_header({"sources": dict.fromkeys(shares, [10**12] * 3), "others": "x" * 400})  # their names must fit
    sources = {name: find_files(name) for name in shares}
    paths = [os.path.realpath(path) for files in sources.values() for path, _, _ in files]
    if len(set(paths)) < len(paths):
        raise UserError(f"two sources of the mix share a file: {max(paths, key=paths.count)}")
    recipe = asdict(settings) | {"out_dir": None, "workers": 0, "files": sources}
    recipe = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()
    out = output_folder(settings.out_dir or HERE / "data" / "stdlib", "--out_dir")
    splits = [out / f"{split}.bin" for split in SPLITS]
    with open(out / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        there = [path for path in splits if path.exists()]
        if any(open_bin(path).header.get("recipe") != recipe for path in there):
            raise UserError(f"{out} holds a dataset of other settings or files: give another --out_dir")
        if there != splits:
            make(sources, shares, recipe, settings, out)
        for path in splits:
            print(f"{path}: {open_bin(path).header['tokens']:,} tokens")
    return out


def make(sources, shares, recipe, settings, out):
    tokenizer = load_tokenizer(settings.tokenizer)  # now, or each thread would load it
    column = COLUMNS.index(settings.share_of)
    unit = (settings.size or np.inf) / sum(shares.values())  # of text, for a share of 1
    if settings.shares and not settings.size:  # the scarcest source decides how large the mix is: count first
        with open(os.devnull, "wb") as nowhere:
            for name, share in shares.items():
                train, _ = append(name, sources[name], unit * share, [nowhere] * 2, settings)
                unit = min(unit, train[column] / share)

    # keep the sources that an interrupted run of the same recipe has finished
    folder = out / "prepare_data.unfinished"
    folder.mkdir(exist_ok=True)
    record = folder / "finished.json"  # {recipe: {source: a count for each split}}
    counts = json.loads(record.read_text()).get(recipe, {}) if record.exists() else {}
    files = [open(folder / f"{split}.bin", "ab") for split in SPLITS]
    for i, file in enumerate(files):
        file.truncate(HEADER_BYTES + 4 * sum(count[i][1] for count in counts.values()))
    scarcest = ""
    for name, share in shares.items():
        target = np.floor(unit * share)  # rounding must not ask for more than there is
        if name not in counts:
            counts[name] = append(name, sources[name], target, files, settings)
            for file in files:
                file.flush()
                os.fsync(file.fileno())
            record.with_suffix(".tmp").write_text(json.dumps({recipe: counts}))
            os.replace(record.with_suffix(".tmp"), record)
        if (amount := counts[name][0][column]) < target < np.inf:
            unit = amount / share  # the others are read as far as it takes to find the scarcest
            scarcest = f"{name} has only {amount:,} {settings.share_of} for the train split"
    if scarcest:
        raise UserError(f"{scarcest}: lower --size to {int(unit * sum(shares.values()))}, or omit it")
    if not any(val[0] for _, val in counts.values()):
        raise UserError(
            f"the val split would be empty at val_fraction={settings.val_fraction}: give more documents, or "
            "--val_protocol=paper --val_fraction=1 (val = train)"
        )
    for i, file in enumerate(files):
        file.close()
        header = dict(tokenizer=settings.tokenizer, vocab=tokenizer.vocab, eot=tokenizer.eot, recipe=recipe)
        seal(file.name, header | {"sources": {name: count[i] for name, count in counts.items()}})
    record.unlink()  # of files that are moved now
    for split in SPLITS:
        os.replace(folder / f"{split}.bin", out / f"{split}.bin")
    shutil.rmtree(folder)


def append(name, files, target, outputs, settings):
    """Append the documents of a source to train's and val's file, until its train text reaches the target.
    Returns what was appended to each: [documents, tokens, bytes of text]."""
    counts, column = np.zeros((2, 3), np.int64), COLUMNS.index(settings.share_of)
    left_out = replaced = 0
    how = dict(file=sys.stdout, mininterval=1, unit=f" {settings.share_of}", unit_scale=True)
    with tqdm(None, name[-40:], target, **how) as bar:
        for ids, val, size, has_replacement in encode_source(files, settings):
            if counts[0, column] >= target:
                break
            left_out += size == 0
            replaced += has_replacement
            for i in (0, 1) if val and settings.val_protocol == "paper" else (int(val),):
                if size > 0:
                    outputs[i].write(ids)
                    counts[i] += 1, len(ids), size
            bar.update(min(counts[0, column], target) - bar.n)
    amount = counts[0, column]
    if left_out:
        print(f"{name}: {left_out:,} empty or binary documents left out")
    if replaced:
        print(f"{name}: {replaced:,} documents hold U+FFFD, as where bytes are not UTF-8")
    if not amount:
        raise UserError(f"{name} has no text for the train split: omit it")
    if amount > 1.01 * target:
        print(f"{name}: {amount:,} {settings.share_of} instead of {target:,.0f}: its last document is long")
    return counts.tolist()


def inspect(path):
    """Print the header and the first tokens as text, and verify the checksum."""
    bin = open_bin(path)
    print(json.dumps(bin.header, indent=1, ensure_ascii=False))
    print(load_tokenizer(bin.header["tokenizer"]).decode(bin.tokens[:300]))
    if hashlib.sha256(bin.tokens).hexdigest() != bin.header["sha256"]:
        raise UserError(f"{path}: damaged, its checksum differs from the header's; copy it or make it again")
    print("checksum: good")


def main():
    settings, _ = configure(sys.argv[1:], Settings, doc=__doc__)
    prepare(settings) if settings.inspect is None else inspect(settings.inspect)


if __name__ == "__main__":
    cli(main)
