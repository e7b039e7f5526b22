"""How fast, and in how much memory, prepare_data.py works, beside the bare tokenizer on the same text with as many threads.

    python tests/bench_data.py --mb=300 --kind=parquet --workers=2

Prints the rate of tiktoken's encode_ordinary_batch, the rate of the whole preparation from the start of its process to its end, their ratio
(also per second of processor time, which holds on a busy machine), and the peak of anonymous memory summed over its processes. The text is
cut at random from the standard library's sources.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import tiktoken
from tiktoken.load import load_tiktoken_bpe

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import prepare_data as data


def documents(megabytes):
    text = "\n".join(Path(path).read_text() for path, _, _ in data.expand("stdlib"))
    rng, total = random.Random(0), 0
    while total < megabytes * 1e6:
        start = rng.randrange(len(text) - 50_000)
        document = text[start : start + 50 + min(int(rng.expovariate(1 / 4000)), 40_000)]
        total += len(document.encode())
        yield document


def write(path, megabytes):
    """Returns the bytes of text written."""
    total = 0
    if path.suffix == ".jsonl":
        with open(path, "w") as file:
            for document in documents(megabytes):
                file.write(json.dumps({"id": total, "text": document}) + "\n")
                total += len(document.encode())
    else:
        import pyarrow
        import pyarrow.parquet

        schema, batch = pyarrow.schema([("text", pyarrow.string())]), []
        with pyarrow.parquet.ParquetWriter(path, schema) as file:
            for document in documents(megabytes):
                batch.append(document)
                total += len(document.encode())
                if len(batch) == 2000:
                    file.write_table(pyarrow.table([batch], schema=schema))
                    batch = []
            file.write_table(pyarrow.table([batch], schema=schema))
    return total


def bare_rates(megabytes, threads):
    """MB/s, and MB per processor second, of encode_ordinary_batch over up to 100 MB of the text, 1,000 documents at a time."""
    ranks = load_tiktoken_bpe(str(data.rank_file("qwen3")))
    encoding = tiktoken.Encoding("qwen3", pat_str=data.TOKENIZERS["qwen3"][0], mergeable_ranks=ranks, special_tokens={})
    texts = list(documents(min(megabytes, 100)))
    wall, processor = time.perf_counter(), time.process_time()
    for i in range(0, len(texts), 1000):
        encoding.encode_ordinary_batch(texts[i : i + 1000], num_threads=threads)
    size = sum(len(text.encode()) for text in texts) / 1e6
    return np.array([size / (time.perf_counter() - wall), size / (time.process_time() - processor)])


def anonymous_memory(pid):
    """Bytes of anonymous memory of a process and its descendants."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended
        return 0
    own = next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon")), 0)
    return own + sum(map(anonymous_memory, children))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=300)
    parser.add_argument("--kind", choices=["jsonl", "parquet"], default="parquet")
    parser.add_argument("--workers", type=int, default=data.core_count())
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / f"text.{args.kind}"
        total = write(source, args.mb)
        bare = bare_rates(args.mb, args.workers)
        start, peak = time.perf_counter(), 0
        command = [
            sys.executable,
            ROOT / "prepare_data.py",
            f"--source={source}",
            f"--out_dir={folder}/out",
            "--tokenizer=qwen3",
            f"--workers={args.workers}",
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            peak = max(peak, anonymous_memory(process.pid))
            time.sleep(0.1)
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        rates = total / 1e6 / np.array([time.perf_counter() - start, usage.ru_utime + usage.ru_stime])
        assert process.returncode == 0
        bare = (bare + bare_rates(args.mb, args.workers)) / 2  # before and after, because a shared machine drifts
        print(f"{total / 1e6:.0f} MB of {args.kind}, {args.workers} workers, peak anonymous memory {peak / 1e9:.2f} GB")
        for what, ours, theirs in zip(["MB/s", "MB per processor second"], rates, bare):
            print(f"{what}: bare tokenizer {theirs:.1f}, whole preparation {ours:.1f} ({ours / theirs:.0%})")


if __name__ == "__main__":
    main()
