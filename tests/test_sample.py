"""Generation: the KV cache against the uncached model, what is drawn, and the command line.

    python -m pytest tests/test_sample.py
"""
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from model import KVCache
from sample import choose, generate
from test_model import METHODS, scramble, tiny, tokens
from test_train import dataset, run  # noqa: F401  (dataset is a fixture)


def uncached(model, prompt, new, n_ids):
    ids = prompt
    for _ in range(new):
        ids = torch.cat([ids, model(ids)[:, -1:, :n_ids].argmax(-1)], 1)
    return ids[:, prompt.size(1) :]


@pytest.mark.parametrize("method", METHODS)
def test_cached_generation_equals_uncached(method):
    """Token for token, fp32, from a state in which every parameter counts; and logits in two pieces are those in one."""
    model = tiny(method, block_size=40)
    scramble(model, 0.15)
    prompt = tokens(3, 9)
    with torch.no_grad():
        assert torch.equal(torch.stack(list(generate(model, prompt, 31, 50, temperature=0)), 1), uncached(model, prompt, 31, 50))
        cache = KVCache(model.config, 3, 40, "cpu", torch.float32)
        pieces = torch.cat([model(part, cache=cache) for part in tokens(3, 40).split([1, 20, 7, 12], 1)], 1)
        torch.testing.assert_close(pieces, model(tokens(3, 40)), atol=1e-5, rtol=1e-4)


def test_padding_rows_are_never_drawn():
    model = tiny(vocab_size=64)
    with torch.no_grad():
        model.embed.weight[40:] *= 100  # rows that no token has, made likely
    drawn = torch.stack(list(generate(model, tokens(8, 4, 40), 20, n_ids=40, temperature=2.0)))
    assert drawn.max() < 40 and len(drawn.unique()) > 10


def test_choose():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]]).repeat(4000, 1)
    draw = lambda *cut: torch.bincount(choose(logits, *cut, torch.Generator().manual_seed(0)), minlength=4) / 4000
    p = logits[0].softmax(-1)
    torch.testing.assert_close(draw(1.0, 0, 1.0), p, atol=0.03, rtol=0)
    torch.testing.assert_close(draw(2.0, 0, 1.0), (logits[0] / 2).softmax(-1), atol=0.03, rtol=0)
    torch.testing.assert_close(draw(1.0, 2, 1.0), torch.tensor([0, p[1], 0, p[3]]) / (p[1] + p[3]), atol=0.03, rtol=0)
    torch.testing.assert_close(draw(1.0, 0, 0.6), torch.tensor([0.0, 1, 0, 0]))  # the likeliest alone has 0.64
    torch.testing.assert_close(draw(1.0, 0, 0.7), torch.tensor([0, p[1], 0, p[3]]) / (p[1] + p[3]), atol=0.03, rtol=0)
    assert draw(0, 0, 1.0)[1] == 1


def test_the_seed_decides():
    model = tiny()
    first, again, other = (torch.stack(list(generate(model, tokens(2, 4), 15, 50, generator=torch.Generator().manual_seed(s)))) for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_ten_times_faster_than_uncached():
    """64 new tokens after a prompt of 1,024, in seconds of the processor, which others on the machine do not change."""
    model = tiny("mhar", block_size=1088, n_layer=6, n_embd=512, n_head=8, ffn_dim=1536)
    prompt = tokens(1, 1024)
    with torch.no_grad():
        start = time.process_time()
        list(generate(model, prompt, 64, 50, temperature=0))
        cached = time.process_time() - start
        start = time.process_time()
        for i in range(4):
            model(torch.cat([prompt, tokens(1, 16 * i + 8)], 1))
        assert 16 * (time.process_time() - start) > 10 * cached  # some 30 times on a quiet machine


def test_command_line(dataset, tmp_path):  # noqa: F811
    run("--max_steps=4", "--block_size=64", "--ema_decay=0.5", f"--out_dir={tmp_path}/a", dataset=dataset)
    sample = lambda *flags: subprocess.run([sys.executable, ROOT / "sample.py", *flags], capture_output=True, text=True)
    done = sample(f"{tmp_path}/a", "--prompt=abc", "--max_new_tokens=40", "--seed=3", "--device=cpu")
    assert done.returncode == 0 and done.stdout.startswith("abc") and len(done.stdout) > 20, done.stderr
    done = sample(f"{tmp_path}/a/step_00000004", "--num_samples=3", "--weights=ema", "--top_k=5", "--device=cpu", "--max_new_tokens=10")
    assert done.returncode == 0 and [f"--- {i}" in done.stdout for i in (1, 2, 3)] == [True] * 3
    (tmp_path / "a/latest").write_text("")
    again = sample(f"{tmp_path}/a", "--num_samples=3", "--weights=ema", "--top_k=5", "--device=cpu", "--max_new_tokens=10")
    assert again.stdout == done.stdout and again.stderr.startswith("warning: ") and len(again.stderr.splitlines()) == 1, again.stderr
    for flags, words in [
        ([f"{tmp_path}"], "not a checkpoint"), ([f"{tmp_path}/a", "--max_new_tokens=64"], "--max_new_tokens=63"), ([f"{tmp_path}/a", "--top_p=0"], "--top_p"),
        ([f"{tmp_path}/a", "--device=cuda"], "no CUDA GPU"),
    ]:  # fmt: skip
        done = sample("--prompt=", *flags)
        assert done.returncode == 2 and words in done.stderr and len([line for line in done.stderr.splitlines() if line.startswith("error: ")]) == 1, done.stderr


def test_an_imported_model_with_its_own_tokenizer(dataset, tmp_path):  # noqa: F811
    """Where no tokenizer is known it says what to give; a tokenizer.json, given or beside the source, is read, bos and all."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    run("--max_steps=1", "--block_size=64", f"--out_dir={tmp_path}/a", dataset=dataset)
    ckpt = shutil.copytree(tmp_path / "a/step_00000001", tmp_path / "b")
    meta = json.loads((ckpt / "meta.json").read_text())
    meta |= {"data": {"dataset": None, "tokenizer": None}, "origin": {"source": str(tmp_path / "src"), "config": {}}}
    (ckpt / "meta.json").write_text(json.dumps(meta))
    (tmp_path / "tok").mkdir()
    t = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, **{w: i for i, w in enumerate("abcdefgh", 2)}}, unk_token="a"))
    t.pre_tokenizer, t.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    t.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    t.save(str(tmp_path / "tok/tokenizer.json"))
    (tmp_path / "tok/tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    sample = lambda *flags: subprocess.run([sys.executable, ROOT / "sample.py", ckpt, "--device=cpu", "--prompt=ab", "--max_new_tokens=61", *flags], capture_output=True, text=True)
    done = sample()
    assert done.returncode == 2 and "names no tokenizer: give --tokenizer=" in done.stderr and "tokenizer.json" in done.stderr and len(done.stderr.splitlines()) == 1
    given = sample(f"--tokenizer={tmp_path}/tok/tokenizer.json")
    assert given.returncode == 0 and len(given.stdout) > 2 and set(given.stdout.strip()) <= set("abcdefgh"), given.stderr
    done = sample(f"--tokenizer={tmp_path}/tok", "--max_new_tokens=62")
    assert done.returncode == 2 and "prompt's 3 tokens" in done.stderr  # <s> stands before them
    shutil.copytree(tmp_path / "tok", tmp_path / "src")
    assert sample().stdout == given.stdout
