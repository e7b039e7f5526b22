"""Generation: the KV cache against the uncached model, what is drawn, tokenizers, the command line."""

import sys

from configurator import UserError

import pytest
import torch
from test_model import METHODS, scramble, tiny, tokens
from test_probe import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import sample
from model import KVCache
from sample import choose, generate


def ids(*args, seed=0, **how):
    return torch.stack(list(generate(*args, generator=torch.Generator().manual_seed(seed), **how)), 1)


@pytest.mark.parametrize("method", METHODS)
def test_cached_generation_equals_uncached(method):
    """Token for token, from a state in which every parameter counts; alone, and padded beside another row."""
    model = tiny(method, block_size=40)
    scramble(model, 0.15)
    prompt, whole, seen = tokens(3, 9), tokens(3, 9), []
    with torch.no_grad():
        for _ in range(31):
            whole = torch.cat([whole, model(whole)[:, -1:, :50].argmax(-1)], 1)
        model.embed.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].size(1)))
        assert torch.equal(ids(model, prompt, 31, 50, temperature=0), whole[:, 9:])
        assert sum(seen) == 9 + 30  # no position is computed twice
        short = ids(model, prompt[1:2, 4:], 31, 50, temperature=0)
        start = torch.tensor([0, 4, 0])
        assert torch.equal(ids(model, prompt, 31, 50, temperature=0, start=start)[1:2], short)
        cache = KVCache(model.config, 3, 40, "cpu", torch.float32)
        pieces = [model(part, cache=cache) for part in tokens(3, 40).split([1, 20, 7, 12], 1)]
        torch.testing.assert_close(torch.cat(pieces, 1), model(tokens(3, 40)), atol=1e-5, rtol=1e-4)


def test_padding_rows_are_never_drawn_and_the_seed_decides():
    model = tiny(vocab_size=64)
    with torch.no_grad():
        model.embed.weight[40:] *= 100  # rows that no token has, made likely
    drawn = ids(model, tokens(8, 4, 40), 20, n_ids=40, temperature=2.0)
    assert drawn.max() < 40 and len(drawn.unique()) > 10
    again, other = (ids(model, tokens(8, 4, 40), 20, n_ids=40, temperature=2.0, seed=s) for s in (0, 1))
    assert torch.equal(drawn, again) and not torch.equal(drawn, other)


def test_choose():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]]).repeat(4000, 1)
    p = logits[0].softmax(-1)
    two = torch.tensor([0, p[1], 0, p[3]]) / (p[1] + p[3])
    one = torch.tensor([0.0, 1, 0, 0])
    for cut, want in [
        ((1.0, 0, 1.0), p), ((2.0, 0, 1.0), (logits[0] / 2).softmax(-1)), ((1.0, 2, 1.0), two),
        ((1.0, 0, 0.6), one), ((1.0, 0, 0.7), two), ((0, 0, 1.0), one),  # the likeliest alone has 0.64
    ]:  # fmt: skip
        drawn = choose(logits, *cut, torch.Generator().manual_seed(0))
        torch.testing.assert_close(torch.bincount(drawn, minlength=4) / 4000, want, atol=0.03, rtol=0)


@pytest.fixture
def say(monkeypatch, capsys):
    """What sample.py prints."""

    def say(*argv):
        monkeypatch.setattr(sys, "argv", ["sample.py", *map(str, argv), "--device=cpu"])
        sample.main()
        return capsys.readouterr().out

    return say


def model(seed=0):
    return tiny(seed=seed, vocab_size=320, block_size=64)


def test_command_line(tmp_path, say):
    path = save(model(), tmp_path / "run/step_00000004")
    save(model(1), tmp_path / "other")
    (tmp_path / "other/model.safetensors").rename(f"{path}/ema.safetensors")
    alone = say(tmp_path / "run", "--prompt=abc", "--max_new_tokens=40", "--seed=3")
    assert alone.startswith("abc") and len(alone) > 20
    three = say(path, "--num_samples=3", "--max_new_tokens=40")
    assert [f"--- {i}" in three for i in (1, 2, 3, 4)] == [True] * 3 + [False]
    assert say(path, "--weights=ema", "--max_new_tokens=40") != say(path, "--max_new_tokens=40")
    for flags, words in [
        ([tmp_path], "is not a checkpoint"), ([path, "--top_p=0"], "top_p"),
        ([path, "--prompt=ab", "--max_new_tokens=63"], "2 tokens and 63 new ones exceed block_size=64"),
        ([path, "--temperature=nan"], "temperature"), ([path, "--tokenizer=no"], "neither a tokenizer.json"),
    ]:  # fmt: skip
        with pytest.raises(UserError, match=words):
            say(*flags)


def test_an_imported_model(tmp_path, say):
    """Its own tokenizer counts, with bos, first spaces and every end id, until the model is trained here."""
    src, words = tmp_path / "src", ["<s>", "</s>", "▁b", *(f"▁w{i}" for i in range(317))]
    t = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="▁b"))
    t.pre_tokenizer, t.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    t.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    origin = {"source": str(src), "config": {"eos_token_id": 1}}
    path = save(model(), tmp_path / "a", tokenizer=None, origin=origin)
    run = lambda *flags: say(path, "--prompt=w1 b", "--max_new_tokens=20", *flags)
    with pytest.raises(UserError, match="names no tokenizer: give --tokenizer="):
        run()

    src.mkdir()
    t.save(str(src / "tokenizer.json"))
    path = save(model(), tmp_path / "b", tokenizer="bytes", origin=origin)  # a guess does not count
    text = sample.load_text(*sample.read_meta(path))
    assert (text.encode("w1 b"), text.encode("b", bos=False), text.eot) == ([0, 4, 2], [2], 1)
    whole = run()
    new = whole.split()[2:]
    assert whole.startswith("w1 b w") and len(new) == 20 and run(f"--tokenizer={src}") == whole
    ends = [300, words.index("▁" + new[5])]
    origin["generation_config"] = {"eos_token_id": ends}  # known wherever the model's folder is by now
    path = save(model(), tmp_path / "d", tokenizer=None, origin=origin | {"source": "moved"})
    assert run(f"--tokenizer={src}").split()[2:] == new[:5]

    trained = sample.load_text(*sample.read_meta(save(model(), tmp_path / "c", "mine", origin=origin)))
    assert (trained.name, trained.eot, trained.stops) == ("bytes", 256, [256, 1, *ends])
    assert sample.named_text("qwen3").stops == [151_645, 151_643]


def test_a_tokenizer_json(tmp_path):
    """Its file may ask for truncation and padding, put an end behind a text too, and leave out numbers."""
    t = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "far": 9}, unk_token="a"))
    t.pre_tokenizer = pre_tokenizers.Whitespace()
    t.enable_truncation(3)
    t.enable_padding(length=6)
    for template, bos in (("<s> $A </s>", 0), ("$A </s>", None), ("$A", None)):
        t.post_processor = processors.TemplateProcessing(template, None, [("<s>", 0), ("</s>", 1)])
        t.save(str(tmp_path / "tokenizer.json"))
        text = sample.json_text(tmp_path)
        assert (text.plain("a b a b far"), text.plain(""), text.plain("b")) == ([2, 3, 2, 3, 9], [], [3])
        assert (text.bos, text.n_ids) == (bos, 10)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is neither a tokenizer.json"):
        sample.json_text(tmp_path)
