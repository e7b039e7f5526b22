"""The rate of prepare_data.py beside that of the bare tokenizer (tiktoken's encode_ordinary_batch) on the same text.

python tests/bench_data.py [jsonl | parquet] [megabytes]
"""

import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from prepare_data import Settings, documents, find_files, prepare
from tokenizer import TOKENIZERS, rank_file

import pyarrow
import pyarrow.parquet
import tiktoken
from tiktoken.load import load_tiktoken_bpe

THREADS = 2
kind = sys.argv[1] if len(sys.argv) > 1 else "jsonl"
megabytes = float(sys.argv[2]) if len(sys.argv) > 2 else 100
library = "".join(text for path, *_ in find_files("stdlib") for text in documents(path, 0, 1, "text"))
texts = [library[i % len(library) :][:4000] for i in range(0, int(megabytes * 1e6), 4000)]
ranks = load_tiktoken_bpe(str(rank_file("qwen3")))
bare = tiktoken.Encoding("bare", pat_str=TOKENIZERS["qwen3"][0], mergeable_ranks=ranks, special_tokens={})

with tempfile.TemporaryDirectory() as folder:
    source = Path(folder) / f"text.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), source, row_group_size=1000)
    else:
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for turn in range(3):
        settings = Settings(str(source), tokenizer="qwen3", out_dir=f"{folder}/{turn}", workers=THREADS)
        for what, work in (
            ("bare tokenizer", lambda: bare.encode_ordinary_batch(texts, num_threads=THREADS)),
            ("prepare_data", lambda: prepare(settings)),
        ):
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            rates = (
                megabytes / (now - then)
                for now, then in ((time.perf_counter(), wall), (time.process_time(), cpu))
            )
            print("{}: {:.1f} MB/s, {:.1f} MB per CPU second".format(what, *rates))
