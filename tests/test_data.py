"""data.py, tokenizer.py, prepare_data.py: the format, the windows, the ids, and what becomes of any source.

python -m pytest tests/test_data.py
"""

import gzip
import json
import os
import random
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

from configurator import UserError, configure

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest

import data
import prepare_data
import tokenizer
from prepare_data import Settings, prepare
from tokenizer import load_tokenizer

ROOT = Path(data.__file__).parent
MESSY = [
    "e\u0301cole \u212b nai\u0308ve",  # not NFC
    "emoji \U0001f468\u200d\U0001f469\u200d\U0001f467 \u4e2d\u6587 \u0e55",
    "a\r\nb\r\n\r\n  c\t\ttabs   spaces  ",
    "x <|im_end|> y <|endoftext|>",
    "I'LL don't 12345 3.14",
    "\u2028\x1c\x85odd breaks",
]


def articles(n, length=50):
    """n different documents of real text, of about as many characters as `length`."""
    text = Path(os.__file__).read_text()
    return [f"{i}: {text[i * length % 30000 :][: length + i % 7]}" for i in range(n)]


def jsonl(path, texts):
    """A table of `texts`, whose rows differ in the type of another column. Returns its path."""
    rows = [{"text": text, "id": i if i % 2 else {"a": str(i)}} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make(source, out, **settings):
    return prepare(Settings(str(source), out_dir=str(out), **settings))


def refused(match, source, out, **settings):
    with pytest.raises(UserError, match=match):
        make(source, out, **settings)
    assert not list(Path(out).glob("*.bin"))


def make_bin(path, tokens):
    path.write_bytes(bytes(data.HEADER_BYTES) + np.asarray(tokens, "<u4").tobytes())
    data.seal(path, dict(tokenizer="bytes", vocab=320, eot=256))
    return data.open_bin(path)


def documents(path):
    """The decoded documents of a .bin file."""
    bin = data.open_bin(path)
    ends = np.flatnonzero(bin.tokens == bin.header["eot"])
    assert ends[-1] == len(bin.tokens) - 1
    decode = load_tokenizer(bin.header["tokenizer"]).decode
    return [decode(bin.tokens[a:b]) for a, b in zip([0, *ends + 1], ends)]


def splits(folder):
    return [documents(folder / f"{split}.bin") for split in ("train", "val")]


def content(folder):
    return [(folder / f"{split}.bin").read_bytes()[4096:] for split in ("train", "val")]


def library(step):
    """The text of every so many-th file of Python's library."""
    return [Path(path).read_bytes().decode() for path, *_ in prepare_data.find_files("stdlib")[::step]]


# ---- windows and format


def test_permutation_is_exact():
    for seed in (0, 42, 2**64 - 1, -1):
        for n in [*range(1, 130), 255, 256, 257, 4095, 4096, 4097, 65537]:
            x = np.arange(n)
            orders = [data.permute(x, n, seed, np.full(n, epoch)) for epoch in (0, 1)]
            assert all(np.array_equal(np.sort(order), x) for order in orders)
            if n > 16:
                assert not np.array_equal(*orders) and abs(np.corrcoef(x, orders[0])[0, 1]) < 4 / n**0.5
    n = 10**12 // 1024  # a trillion tokens cost nothing
    places = data.permute(np.arange(n - 1000, n), n, 1, np.full(1000, 3))
    assert len(set(places)) == 1000 and places.min() >= 0 and places.max() < n


def test_epochs_visit_every_window_once(tmp_path):
    bin = make_bin(tmp_path / "train.bin", np.arange(100 * 8 + 5))
    windows = data.TrainWindows(bin, 8, seed=3)
    epochs = [windows.batch(epoch * 100, 100) for epoch in range(3)]
    assert windows.n == 100 and epochs[0].shape == (100, 9) and epochs[0].dtype == np.int64
    for batch in epochs:
        assert sorted(batch[:, 0]) == list(range(0, 800, 8))
        assert np.array_equal(batch, batch[:, :1] + np.arange(9))
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[0], data.TrainWindows(bin, 8, seed=4).batch(0, 100))
    for size in (1, 3, 8, 12):  # of a rank's micro-step, over the end of an epoch
        parts = [data.TrainWindows(bin, 8, seed=3).batch(90 + i, size) for i in range(0, 24, size)]
        assert np.array_equal(np.concatenate(parts), np.concatenate(epochs)[90:114])


def test_validation_windows_are_fixed_and_spread(tmp_path):
    bin = make_bin(tmp_path / "val.bin", np.arange(1001))
    val = data.ValWindows(bin, 10, 8)
    assert val.n == 8 and list(val.batch(range(8))[:, 0]) == [i * 100 // 8 * 10 for i in range(8)]
    assert np.array_equal(val.batch([5, 2]), val.batch(range(8))[[5, 2]])
    assert data.ValWindows(bin, 10, 1000).n == 100 == data.ValWindows(bin, 10, 100).n
    for reader in (data.TrainWindows, data.ValWindows):  # one window is the least
        assert reader(make_bin(tmp_path / "val.bin", np.zeros(65)), 64, 4).n == 1
        with pytest.raises(UserError, match="val split .* 64 tokens.* 65"):
            reader(make_bin(tmp_path / "val.bin", np.zeros(64)), 64, 4)


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


def test_files_that_are_not_whole_or_not_ours(tmp_path, capsys):
    path = tmp_path / "train.bin"

    def unreadable(match, content=None):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UserError, match=match) as error:
            data.open_bin(path)
        assert str(path) in str(error.value) and "python prepare_data.py" in str(error.value)

    unreadable("no such file")
    ids = [0, 65_534, 65_535, 65_536, 151_645, 2**32 - 1]
    bin = make_bin(path, ids)
    whole = path.read_bytes()
    assert bin.tokens.tolist() == ids and bin.header["largest_id"] == 2**32 - 1
    assert whole[4096:] == np.array(ids, "<u4").tobytes()
    for cut in (whole[:100], whole[:-4], whole + b"1234", whole.replace(b'"version": 1', b'"version": 9')):
        unreadable("truncated, or of another format", cut)
    for other in (b"", np.arange(5000, dtype=np.uint16).tobytes(), b"x" + whole[1:]):
        unreadable("not a token file", other)
    prepare_data.inspect(make_bin(path, [*b"hello", 256]).path)
    assert "hello" in capsys.readouterr().out
    path.write_bytes(path.read_bytes().replace(b"h\0\0\0", b"j\0\0\0"))
    with pytest.raises(UserError, match="checksum"):
        prepare_data.inspect(path)
    with pytest.raises(UserError, match="do not fit"):
        data.pack_header({"sources": {f"folder/{i}.txt": [1, 2, 3] for i in range(500)}})


# ---- tokenizers


def test_bytes_and_qwen3():
    t, qwen = load_tokenizer("bytes"), load_tokenizer("qwen3")
    assert (t.n_text, t.n_ids, t.vocab, t.eot) == (256, 257, 320, 256)
    assert (qwen.n_text, qwen.n_ids, qwen.vocab, qwen.eot) == (151_643, 151_669, 151_936, 151_645)
    assert qwen.encode("Hello world").tolist() == [9707, 1879]
    for text in MESSY:
        ids = t.encode(text)
        assert ids.dtype == np.uint32 and bytes(ids.astype(np.uint8)) == text.encode()
        assert t.decode([*ids, 256, 300]) == text == qwen.decode(qwen.encode(text))
        assert qwen.encode(text).max() < 151_643  # text that spells a special token stays text
    assert qwen.decode([9707, 151_700]) == "Hello" and qwen.decode([151_645]) == "<|im_end|>"


def test_qwen3_equals_huggingface_tokenizers():
    tokenizers = pytest.importorskip("tokenizers")
    from transformers.convert_slow_tokenizer import TikTokenConverter

    path = str(tokenizer.rank_file("qwen3"))
    reference = TikTokenConverter(path, pattern=tokenizer.TOKENIZERS["qwen3"][0]).converted()
    reference.normalizer = tokenizers.normalizers.NFC()
    for text in [*MESSY, *library(20)]:
        ids = load_tokenizer("qwen3").encode(unicodedata.normalize("NFC", text)).tolist()
        assert ids == reference.encode(text, add_special_tokens=False).ids


def test_pieces_do_not_change_the_ids():
    text, encode = "\n\n".join(library(60)), load_tokenizer("qwen3").encode
    parts = list(tokenizer.pieces(text, 1000))
    assert "".join(parts) == text and len(parts) > 50
    assert np.array_equal(encode(text), np.concatenate([encode(part) for part in parts]))
    for monster in (" " * 1_000_000, "\n" * 1_000_000 + "x", "a" * 1_000_000):
        assert load_tokenizer("qwen3").decode(encode(monster)) == monster


def test_a_rank_file_that_is_missing_or_another(tmp_path, monkeypatch):
    (tmp_path / "whisper.py").write_text("")  # a module of the name of the package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(tokenizer, "HERE", tmp_path)
    with pytest.raises(UserError, match="gpt2 is not installed.*pip install --no-deps openai-whisper"):
        tokenizer.rank_file("gpt2")
    (tmp_path / "data/tokenizers").mkdir(parents=True)
    (tmp_path / "data/tokenizers/gpt2.tiktoken").write_text("IQ== 0\n")
    with pytest.raises(UserError, match="sha256 differs"):
        tokenizer.rank_file("gpt2")
    with pytest.raises(UserError, match="unknown tokenizer 'gpt9'"):
        load_tokenizer("gpt9")


# ---- documents in, documents out


def test_round_trip(tmp_path):
    texts = MESSY + articles(40)
    composed = [unicodedata.normalize("NFC", text) for text in texts]
    source = jsonl(tmp_path / "a.jsonl", texts)
    for name, expected in (("bytes", texts), ("qwen3", composed)):
        out = make(source, tmp_path / name, tokenizer=name, val_fraction=0.3)
        train, val = splits(out)
        assert sorted(train + val) == sorted(expected) and not set(train) & set(val)
        header = data.open_bin(out / "train.bin").header
        size = sum(len(unicodedata.normalize("NFC", text).encode()) for text in train)
        assert header["sources"] == {source: [len(train), header["tokens"], size]}


def test_the_split_is_a_function_of_the_text(tmp_path):
    texts, sides = articles(60), {}
    reflowed = [text.replace("\n", "\r\n") + "\n" for text in texts]
    for name, corpus in {"few": texts[:30], "many": texts[::-1] * 2, "reflowed": reflowed}.items():
        out = make(jsonl(tmp_path / f"{name}.jsonl", corpus), tmp_path / name, val_fraction=0.3)
        for side, found in enumerate(splits(out)):
            for text in found:
                assert sides.setdefault("".join(text.split()), side) == side
    assert len(sides) == 60 and 8 < sum(sides.values()) < 30


def test_formats_and_workers_give_the_same_documents(tmp_path):
    texts = MESSY + articles(1000, 800)  # enough that tables are read in parts
    lines = Path(jsonl(tmp_path / "a.jsonl", texts)).read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines[:5000]) + gzip.compress(lines[5000:]))
    (tmp_path / "c.jsonl.zst").write_bytes(pyarrow.Codec("zstd").compress(lines, asbytes=True))
    table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
    parquet.write_table(table, tmp_path / "d.parquet", row_group_size=170, compression="none")
    table = table.set_column(1, "text", table["text"].dictionary_encode())
    parquet.write_table(table, tmp_path / "e.parquet")
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / f"texts/{i}.txt").write_bytes(text.encode())
    hub = tmp_path / "hub"  # a local copy of a dataset of the hub
    (hub / "sample").mkdir(parents=True)
    (hub / "sample/a.jsonl.zst").write_bytes((tmp_path / "c.jsonl.zst").read_bytes())
    config = "- config_name: small\n  data_files:\n  - split: train\n    path: sample/*\n"
    (hub / "README.md").write_text(f"---\nconfigs:\n{config}---\n")

    sources = [str(path) for path in tmp_path.iterdir() if path != hub]
    for i, source in enumerate([*sources, f"hub:{hub}:small", f"hub:{hub}:sam*/*.jsonl.zst"]):
        out = make(source, tmp_path / f"{i} out", val_fraction=0.1, workers=1)
        train, val = splits(out)
        assert sorted(train + val) == sorted(texts), source
        assert content(make(source, tmp_path / f"{i} again", val_fraction=0.1, workers=5)) == content(out)
    refused("nope", f"hub:{hub}:nope", tmp_path / "no")
    for name in ("b.jsonl.gz", "c.jsonl.zst"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-500])
        refused(f"{name}: cannot be read .*[Tt]runcated", tmp_path / name, tmp_path / "no")


def test_a_line_is_in_one_part(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ["", "a", "bb", ""] * 5)
    for parts in range(1, 200):
        with open(path, "rb") as file:
            rows = [row for part in range(parts) for row in prepare_data.json_rows(file, path, part, parts)]
        assert [row["text"] for row in rows] == ["", "a", "bb", ""] * 5


def test_what_is_in_a_folder(tmp_path, capsys):
    """Hidden files, other kinds, binary ones, links, brackets, byte-order marks, bytes that are not UTF-8."""
    folder = tmp_path / "my[1]"
    for name in (".git/a.txt", ".hid.txt", "sub/.check/b.md", "__MACOSX/._c.txt", "d.docx", "e.TXT"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("left out")
    (folder / "plain[2].txt").write_text("one")
    (folder / "sub/mark.md").write_bytes(b"\xef\xbb\xbftwo")
    (folder / "link.md").symlink_to(folder / "sub/mark.md")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "binary.txt").write_text("utf-16", "utf-16-le")
    (folder / "empty.txt").touch()
    rows = b'{"text": "\\ufeffthree"}\n\n{"text": "caf\xe9"}\r\n{"text": null}\n{"text": "\\ud83d", "id": 1}'
    (folder / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + rows)
    everything = dict(val_protocol="paper", val_fraction=1)
    expected = ["caf\ufffd", "caf\ufffd", "one", "three", "two", "\ufffd\ufffd\ufffd"]
    assert [sorted(split) for split in splits(make(folder, tmp_path / "out", **everything))] == [expected] * 2
    said = capsys.readouterr().out
    assert "6 files left out" in said and "3 empty or binary" in said and "3 documents hold U+FFFD" in said
    for i, name in enumerate(("my[1]/plain[2].txt", "my*/plain*.txt", "my[1]/.hid.txt")):
        assert len(documents(make(tmp_path / name, tmp_path / f"{i}", **everything) / "train.bin")) == 1
    refused("'.*docx': no file found that ends in .txt", folder / "d.docx", tmp_path / "no")
    refused("'nowhere': no file found", f"{tmp_path}/my*/*,nowhere", tmp_path / "no")
    refused("has no text.*omit it", folder / "binary.txt", tmp_path / "no")


def test_bad_tables(tmp_path):
    def bad(name, content, match):
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
        else:
            parquet.write_table(pyarrow.table(content), tmp_path / name, use_dictionary=False)
        refused(f"{name}: cannot be read .*{match}", tmp_path / name, tmp_path / "out")

    missing = r"no column 'text': choose one of \['body', 'id'\] with --text_column="
    bad("a.jsonl", b'{"text": "a"}\n{"text": "b\n', "line at byte 14: ")
    bad("a.jsonl", b'{"text": "a"}\n[1]\n', r"no column 'text': choose one of \[1\]")
    bad("a.jsonl", b'{"text": "a"}\n{"text": 5}\n', "'text' holds 5: choose another --text_column")
    bad("a.jsonl", b'{"body": "a", "id": 1}\n', missing)
    bad("a.jsonl", b'{"text": "a", "id": ' + b"1" * 5000 + b"}\n", "line at byte 0: .*4300 digits")
    bad("a.parquet", {"body": ["x"], "id": [1]}, missing)
    bad("a.parquet", {"text": [1, 2]}, "'text' holds 1: choose another")
    parquet.write_table(pyarrow.table({"text": articles(3000)}), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    bad("a.parquet", whole[:-100], "magic bytes")
    bad("a.parquet", whole[:3000] + bytes(2000) + whole[5000:], "")


def test_small_corpora_and_the_papers_validation(tmp_path):
    texts = articles(3)
    make(jsonl(tmp_path / "three.jsonl", texts), tmp_path / "three", val_fraction=0.5)
    one = jsonl(tmp_path / "one.jsonl", texts[:1])
    refused("val split would be empty.*val_protocol=paper", one, tmp_path / "one", val_fraction=1e-9)
    refused("has no text for the train split", one, tmp_path / "all", val_fraction=1)
    out = make(one, tmp_path / "same", val_fraction=1, val_protocol="paper")
    assert splits(out) == [texts[:1], texts[:1]]
    many, outs = jsonl(tmp_path / "many.jsonl", articles(200)), []
    for protocol in ("held_out", "paper"):
        outs.append(splits(make(many, tmp_path / protocol, val_fraction=0.2, val_protocol=protocol)))
    (_, held), (train, val) = outs
    assert sorted(train) == sorted(articles(200)) and val == held and len(val) > 20


# ---- size and shares


def test_a_size_is_spread_over_the_source(tmp_path):
    draw = random.Random(0)
    texts = [f"{i:05}" + draw.randbytes(2000).hex() for i in range(1000)]
    jsonl(tmp_path / "a.jsonl", texts)
    table = pyarrow.table({"text": texts})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=50, compression="none")
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(texts[:200]):
        (tmp_path / f"texts/{i:05}.txt").write_text(text)
    for source, n in (("a.jsonl", 1000), ("a.parquet", 1000), ("texts", 200)):
        train, val = splits(make(tmp_path / source, f"{tmp_path}/{source} out", size=n * 2000))
        all_train, all_val = splits(make(tmp_path / source, f"{tmp_path}/{source} all"))
        places = np.array([int(text[:5]) / n for text in train])
        assert len(train) == -(-n * 2000 // 4006)
        assert (np.histogram(places, 4, (0, 1))[0] > len(train) / 16).all()  # some from every quarter
        assert train == all_train[: len(train)] and val == all_val[: len(val)] and len(val) < len(all_val)


@pytest.mark.parametrize("share_of", ["tokens", "bytes"])
@pytest.mark.parametrize("size", [None, 60_000])
def test_mix(tmp_path, share_of, size):
    corpora = {"a": articles(4000, 40), "b": articles(2000, 60), "c": articles(900, 80)}
    sources = [jsonl(tmp_path / f"{name}.jsonl", texts) for name, texts in corpora.items()]
    column = 1 if share_of == "tokens" else 2

    def amount(out, name):
        return data.open_bin(out / "train.bin").header["sources"][name][column]

    shares = dict(zip(sources, (70, 20, 10)))
    out = prepare(Settings(shares=shares, size=size, share_of=share_of, out_dir=f"{tmp_path}/out"))
    found = np.array([amount(out, source) for source in sources])
    assert (np.abs(found - found.sum() * np.array([0.7, 0.2, 0.1])) < 100).all()  # a document
    if size:
        assert 0 <= found.sum() - size < 300
    else:  # a is the scarcest, and is used whole
        assert found[0] == amount(make(sources[0], tmp_path / "a", share_of=share_of), sources[0])


def test_rounding_asks_for_no_more_than_there_is(tmp_path):
    sources = [jsonl(tmp_path / f"{name}.jsonl", articles(50)) for name in "ab"]
    whole = data.open_bin(make(sources[0], tmp_path / "a") / "train.bin").header["tokens"]
    share = next(n / 10 for n in range(1, 1000) if whole / (n / 10) * (n / 10) > whole)
    out = prepare(Settings(shares=dict.fromkeys(sources, share), out_dir=f"{tmp_path}/out"))
    assert data.open_bin(out / "train.bin").header["tokens"] == 2 * whole


def test_shares_that_cannot_be_met(tmp_path, capsys):
    a, b = (jsonl(tmp_path / f"{name}.jsonl", articles(300)) for name in "ab")
    long = jsonl(tmp_path / "long.jsonl", articles(20, 20_000))
    empty = jsonl(tmp_path / "empty.jsonl", ["", ""])

    def mix(*sources, **settings):
        prepare(Settings(shares=dict.fromkeys(sources, 0.5), out_dir=f"{tmp_path}/out", **settings))

    with pytest.raises(
        UserError, match=r"a.jsonl has only 1\d,\d+ tokens .* lower --size to 3\d{4}, or omit"
    ):
        mix(a, b, size=1e6)
    with pytest.raises(UserError, match="share a file: .*a.jsonl"):
        mix(a, f"{tmp_path}/[ab].jsonl")
    with pytest.raises(UserError, match="empty.jsonl has no text"):
        mix(a, empty)
    mix(a, long, size=10_000)
    assert "instead of 5,000: its last document is long" in capsys.readouterr().out


def test_the_scarcest_source_decides(tmp_path):
    """Wherever it stands in a mix, in any unit and when asked again, the advice holds for all sources."""
    lengths = {"plenty": 3000, "scarcest": 200, "scarce": 500}
    sources = {name: jsonl(tmp_path / f"{name}.jsonl", articles(n)) for name, n in lengths.items()}
    for share_of, order in (("tokens", "plenty scarcest scarce"), ("bytes", "scarce plenty scarcest")):
        shares = {sources[name]: {"plenty": 1, "scarcest": 1.5, "scarce": 3}[name] for name in order.split()}
        how = dict(shares=shares, share_of=share_of, out_dir=f"{tmp_path}/{share_of}")
        for _ in range(2):
            with pytest.raises(UserError, match=f"scarcest.jsonl has only .* {share_of} ") as said:
                prepare(Settings(size=1e6, **how))
        size = int(re.search(r"lower --size to (\d+)", str(said.value))[1])
        with pytest.raises(UserError, match="scarcest.jsonl has only"):
            prepare(Settings(size=size * 1.01, **how))
        assert not list(Path(how["out_dir"]).glob("*.bin"))
        assert (
            data.open_bin(prepare(Settings(size=size, **how)) / "train.bin").header["sources"].keys()
            == shares.keys()
        )


def test_a_full_disk(tmp_path):
    """One line; no dataset is there; and with room again the same command goes on."""
    source = jsonl(tmp_path / "a.jsonl", articles(3000))
    command = [sys.executable, ROOT / "prepare_data.py", f"--source={source}", f"--out_dir={tmp_path}/out"]
    shell = ["bash", "-c", 'ulimit -f 100; exec "$@"', "bash", *map(str, command)]  # KiB of a file
    done = subprocess.run(shell, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert "make room" in done.stderr and not list((tmp_path / "out").glob("*.bin"))
    again = make(source, tmp_path / "out")
    assert content(again) == content(make(source, tmp_path / "new")) and len(os.listdir(again)) == 3


def test_wrong_settings():
    for flags, match in (
        ("--source=a.txt", "--out_dir="),
        ("--size=0", "above 0"),
        ("--val_fraction=1.1", "at most 1"),
        ("--tokenizer=gpt9", "gpt9.*bytes | qwen3"),
        ("--shares={'a.txt':'100'} --out_dir=o", "numbers above 0"),
        ("--shares={'a.txt':0} --out_dir=o", "numbers above 0"),
        ("--shares={'a.txt':1} --source=b.txt --out_dir=o", "one of them"),
    ):
        with pytest.raises(UserError, match=match):
            configure(flags.split(), Settings)


@pytest.mark.parametrize("name", ["anneal", "fineweb_edu"])
def test_shipped_configs(name, monkeypatch):
    settings, _ = configure([str(ROOT / f"config/data_{name}.py")], Settings)
    sources = list(settings.shares) or [settings.source]
    assert all(source.startswith("hub:") for source in sources)
    assert settings.out_dir == f"data/{name}" and settings.tokenizer == "qwen3"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=f"{sources[0]}: not available from the hub .*hf auth login"):
        prepare(settings)


# ---- again, interrupted, at the same time


def test_nothing_is_overwritten(tmp_path):
    source, out = jsonl(tmp_path / "a.jsonl", articles(100)), tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    make(source, out)
    before = content(out), os.stat(out / "train.bin")
    make(source, out, workers=3)  # found there
    for change in ({"val_fraction": 0.3}, {"tokenizer": "qwen3"}, {}):
        if not change:
            jsonl(tmp_path / "a.jsonl", articles(61))
        with pytest.raises(UserError, match="of other settings or files: give another --out_dir"):
            make(source, out, **change)
    assert (content(out), os.stat(out / "train.bin")) == before
    assert sorted(os.listdir(out)) == [".lock", "notes.txt", "train.bin", "val.bin"]
    (out / "train.bin").write_text("mine")
    with pytest.raises(UserError, match="not a token file"):
        make(source, out)
    assert (out / "train.bin").read_text() == "mine"


def test_finished_sources_are_kept(tmp_path, monkeypatch):
    """By a run that is stopped in its third source, there again, and then between its last two steps."""
    sources = [jsonl(tmp_path / f"{name}.jsonl", articles(200, 30 + i)) for i, name in enumerate("abcd")]
    settings = dict(shares=dict.fromkeys(sources, 1), size=20_000)
    whole = content(prepare(Settings(out_dir=f"{tmp_path}/whole", **settings)))
    stopped, read = Settings(out_dir=f"{tmp_path}/out", **settings), []
    encode_source, replace = prepare_data.encode_source, os.replace

    def stop_in_the_third(files, settings):
        read.append(files[0][0])
        for i, row in enumerate(encode_source(files, settings)):
            if read[-1] == sources[2] and i == 50:
                raise KeyboardInterrupt
            yield row

    def stop_before_val(path, target):
        if target == tmp_path / "out/val.bin":
            raise KeyboardInterrupt
        replace(path, target)

    for name, where in (("encode_source", stop_in_the_third),) * 2 + (("os.replace", stop_before_val),):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(f"prepare_data.{name}", where)
            prepare(stopped)
    assert read == [*sources[:3], sources[2]]
    assert content(prepare(stopped)) == whole
    assert sorted(os.listdir(tmp_path / "out")) == [".lock", "train.bin", "val.bin"]


def test_the_default_dataset_and_two_processes_that_want_it(tmp_path):
    """One makes it, the other waits and finds it."""
    code = f"""
import data, prepare_data, pathlib
data.HERE = prepare_data.HERE = pathlib.Path({str(tmp_path)!r})
print("folder", data.find_dataset("stdlib"))"""
    command = [sys.executable, "-c", code]
    where = dict(cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **where) for _ in range(2)]
    said, out = [process.communicate()[0] for process in processes], tmp_path / "data/stdlib"
    assert [process.returncode for process in processes] == [0, 0]
    assert all(f"folder {out}" in text for text in said) and sum("left out" in text for text in said) == 1
    assert sorted(sum(splits(out), [])) == sorted(filter(None, library(1)))


def test_find_dataset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(data, "HERE", tmp_path / "elsewhere")  # a dataset beside the scripts would come first
    (tmp_path / "elsewhere/config").mkdir(parents=True)
    (tmp_path / "elsewhere/config/data_anneal.py").touch()
    with pytest.raises(UserError, match="prepare_data.py --source=... --out_dir=data/nowhere"):
        data.find_dataset("nowhere")
    with pytest.raises(UserError, match="make it with: python prepare_data.py config/data_anneal.py"):
        data.find_dataset("anneal")
    jsonl(tmp_path / "a.jsonl", articles(100))
    out = make("~/a.jsonl, *.jsonl", tmp_path / "data/mine")
    assert (
        out == tmp_path / "data/mine" and len(sum(splits(out), [])) == 100
    )  # a file named twice counts once
    assert data.find_dataset("mine") == Path("data/mine") == data.find_dataset("data/mine")
