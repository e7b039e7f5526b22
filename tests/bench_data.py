"""The rate of prepare_data.py beside the bare tokenizer's, tiktoken's encode_ordinary_batch, on one text.

python tests/bench_data.py [jsonl | parquet] [megabytes]
"""

import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import configurator  # noqa: F401

import pyarrow
import pyarrow.parquet
import tiktoken
from tiktoken.load import load_tiktoken_bpe

from prepare_data import Settings, documents, find_files, prepare
from tokenizer import TOKENIZERS, load_tokenizer, rank_file

THREADS = 2
kind = sys.argv[1] if len(sys.argv) > 1 else "jsonl"
megabytes = float(sys.argv[2]) if len(sys.argv) > 2 else 100
library = "".join(text for path, *_ in find_files("stdlib") for text in documents(path, 0, 1, "text"))
texts = [library[i % len(library) :][:4000] for i in range(0, int(megabytes * 1e6), 4000)]
ranks = load_tiktoken_bpe(str(rank_file("qwen3")))
bare = tiktoken.Encoding("bare", pat_str=TOKENIZERS["qwen3"][0], mergeable_ranks=ranks, special_tokens={})
load_tokenizer("qwen3")


def measure(what, work):
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{what}: {megabytes / wall:.1f} MB/s, {megabytes / cpu:.1f} MB per CPU second")


with tempfile.TemporaryDirectory() as folder:
    source = Path(folder) / f"text.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), source, row_group_size=1000)
    else:
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for turn in range(3):
        settings = Settings(str(source), tokenizer="qwen3", out_dir=f"{folder}/{turn}", workers=THREADS)
        measure("bare tokenizer", lambda: bare.encode_ordinary_batch(texts, num_threads=THREADS))
        measure("prepare_data", lambda settings=settings: prepare(settings))
