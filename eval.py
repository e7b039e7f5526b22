"""How good is a checkpoint, and is another one better: held-out loss, the paper's zero-shot protocol, lm-evaluation-harness tasks.

    python eval.py out/demo_baseline out/demo_mhar                            # held-out loss, perplexity, bits per byte, and their difference
    python eval.py out/demo_mhar --windows=documents                          # every held-out document from its own beginning
    python eval.py out/mhar_1b_baseline out/mhar_1b_mhar --protocol=paper     # WikiText-2, LAMBADA, HellaSwag as in the paper's Table 2
    python eval.py out/marin_8b_plain out/marin_8b_delta --weights=ema --tasks=mmlu,gpqa_main_zeroshot,gsm8k,minerva_math
    python eval.py out/demo_mhar --tasks=my_task --include_path=tasks/        # a task of your own, offline

Everything is a sum of log-probabilities of token ids, or greedy generation, so there is one function for each: Checkpoint.score and
Checkpoint.generate. Several checkpoints are compared item by item with the first: 0/1 outcomes by McNemar's exact test, all else by
a paired bootstrap. Results and single outcomes go to a JSON file, which is never one that is there already.
"""
import difflib
import importlib.metadata
import json
import logging
import math
import os
import random
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

try:  # only --tasks and --protocol=full need it
    from lm_eval.api.model import TemplateLM
except ImportError:
    TemplateLM = object

from configurator import Parser, UserError, cli
from prepare_data import ValWindows, find_dataset, first_line, load_tokenizer, open_bin, rank_file
from report import table
from sample import generate, load_for_inference, load_text
from train import check_device, read_meta, the_checkpoint

# task: (shots, the metric that the paper's Table 3 reports). It does not say how many shots MMLU had; five is the custom.
PAPER = {"mmlu": (5, "acc,none"), "gpqa_main_zeroshot": (0, "acc,none"), "gsm8k": (5, "exact_match,strict-match"), "minerva_math": (4, "math_verify,none"),
         "humaneval": (0, "pass@1,create_test"), "mbpp": (3, "pass_at_1,none")}  # fmt: skip
FULL = ["wikitext", "lambada_openai", "hellaswag"]  # --protocol=full: Table 2's tasks as the harness defines them, whole
HUB = {  # --protocol=paper: dataset, configuration, split, columns
    "wikitext": ("Salesforce/wikitext", "wikitext-2-raw-v1", "test", ["text"]),
    "lambada": ("cimec/lambada", "plain_text", "test", ["text"]),
    "hellaswag": ("Rowan/hellaswag", "default", "validation", ["ctx", "endings", "label"]),
}


# ---- Measures and their comparison -----------------------------------------------------------------------------------------------------------------
@dataclass
class Measure:
    """A number and the items behind it: items {key: (value, weight)}, of which it is sum(value) / sum(weight) unless `value` says otherwise."""

    items: dict
    value: float | None = None
    stderr: float | None = None
    unit: str = ""

    def __post_init__(self):
        if self.value is None:
            v, w = np.array(list(self.items.values()), float).T
            self.value = v.sum() / w.sum()
            if len(v) > 1:  # of a ratio of sums, to first order
                self.stderr = math.sqrt(((v - self.value * w) ** 2).sum() * len(v) / (len(v) - 1)) / w.sum()


def mcnemar(only_a, only_b):
    """Two-sided p of McNemar's exact test: only_a items right by a alone, only_b by b alone; a fair coin would have thrown them."""
    n = only_a + only_b
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(min(only_a, only_b) + 1)) / 2**n)


def bootstrap(difference, weight, seed, draws=10_000):
    """95% interval of sum(difference) / sum(weight), both [items], when the items are drawn anew with replacement."""
    rng, n = np.random.default_rng(seed), len(weight)
    drawn = (rng.integers(0, n, n) for _ in range(draws))
    return np.quantile([difference[d].sum() / weight[d].sum() for d in drawn], [0.025, 0.975]).tolist()


def compare(a, b, seed):
    """The paired comparison of Measure b with Measure a: a dict that ends in words."""
    va, vb = (np.array([m.items[key][0] for key in a.items], float) for m in (a, b))
    n, weight = len(va), np.array([w for _, w in a.items.values()], float)
    found = {"items": n, "difference": b.value - a.value}
    if set(va) | set(vb) <= {0.0, 1.0} and set(weight) == {1.0}:
        only_a, only_b = int((va > vb).sum()), int((vb > va).sum())
        p = mcnemar(only_a, only_b)
        words = f"{only_b} of {n} right here alone, {only_a} there alone: p = {p:.2g} (McNemar, exact)"
        return found | {"test": "McNemar, exact", "only_first": only_a, "only_this": only_b, "p": p, "words": words}
    mean, (low, high) = (vb - va).sum() / weight.sum(), bootstrap(vb - va, weight, seed)
    words = f"{mean:+.4f} {a.unit}, 95% interval {low:+.4f} to {high:+.4f} (paired bootstrap over {n} items)"
    return found | {"test": "paired bootstrap", "mean_difference": mean, "low": low, "high": high, "seed": seed, "words": words}


def token_bytes(tokenizer):
    """int64 [rows]: how many bytes of text an id spells; 0 for special tokens and padding."""
    t = load_tokenizer(tokenizer)
    lengths = np.zeros(t.vocab, np.int64)
    if tokenizer == "bytes":
        lengths[: t.n_text] = 1
    else:
        from tiktoken.load import load_tiktoken_bpe

        for token, id in load_tiktoken_bpe(str(rank_file(tokenizer))).items():
            lengths[id] = len(token)
    return lengths


# ---- A checkpoint that scores and generates --------------------------------------------------------------------------------------------------------
def answer_head(n_ids, x, weight, targets, z_loss):
    """In place of the model's loss: log-probabilities of single ids among the n_ids that mean something, fp32, and whether each is the
    likeliest. targets: int64 [3, N], rows, positions and ids -> two [N]. Logits are made for these positions alone, 2,048 at a time."""
    logp, greedy = [], []
    for row, position, id in (part.unbind() for part in targets.split(2048, 1)):
        logits = F.linear(x[row, position], weight[:n_ids]).float()
        logp.append(logits.gather(1, id[:, None])[:, 0] - logits.logsumexp(-1))
        greedy.append(logits.argmax(-1) == id)
    return torch.cat(logp), torch.cat(greedy)


class Checkpoint:
    """A checkpoint and how its model, which load() brings, is asked. text: its Text (None: it is given ids alone); cut: how many inputs lost
    something at the left; shortened: how many were allowed fewer new tokens than they asked for."""

    def __init__(self, path, args):
        self.path, self.folder = path, the_checkpoint(path)  # from now on the folder: a run that is still training has a newer one by then
        if args.weights == "ema" and not any(self.folder.glob("ema.safetensors*")):
            raise UserError(f"{self.folder} has no ema.safetensors: it was trained without --ema_decay=, use --weights=raw")
        self.meta = read_meta(self.folder)
        self.tokenizer, self.dataset = args.tokenizer or self.meta["data"]["tokenizer"], args.dataset or self.meta["data"]["dataset"]
        own = self.meta["model_config"]["block_size"]
        if args.block_size is not None and not 1 <= args.block_size <= own:
            raise UserError(f"--block_size={args.block_size}: the checkpoint's context is {own}; give at most that")
        self.block_size, self.batch_size, self.device = args.block_size or own, args.batch_size, check_device(args.device)
        self.text, self.cut, self.shortened, self.first_ids = None, 0, 0, None

    def load(self, args):
        """Take the model to the device."""
        self.model, _, self.autocast = load_for_inference(self.folder, self.device, args.weights, args.dtype)

    @torch.no_grad()
    def score(self, pairs, what, n_ids=None):
        """[(log-probabilities of the answer's tokens, fp32 [n], whether it is what greedy decoding would say)] of pairs of lists of ids
        (context, answer); an empty context is the prefix. Pairs that give the model the same input share a pass. What does not fit into
        block_size is cut off at the left and counted in self.cut; UserError where an answer alone does not fit."""
        asked = {}  # input: [(which pair, answer)]
        for i, (context, answer) in enumerate(pairs):
            if len(answer) > self.block_size:
                raise UserError(f"{what}: an answer of {len(answer)} tokens does not fit into the context of {self.block_size}; leave this task out")
            ids = [*(context or [self.text.prefix]), *answer]
            self.first_ids = self.first_ids or ids[:5]
            self.cut += len(ids) > self.block_size + 1
            asked.setdefault(tuple(ids[-self.block_size - 1 : -1]), []).append((i, answer))
        order, scored = sorted(asked, key=len, reverse=True), [None] * len(pairs)
        self.model.loss_head = partial(answer_head, n_ids or self.text.n_ids)
        with progress(len(order), what, "inputs") as bar:
            for first in range(0, len(order), self.batch_size):
                batch = order[first : first + self.batch_size]
                width = max(1, len(batch[0]))
                idx = torch.tensor([ids + (0,) * (width - len(ids)) for ids in batch], device=self.device)
                answers = [(i, row, len(ids) - len(answer), answer) for row, ids in enumerate(batch) for i, answer in asked[ids]]
                targets = [(row, begin + j, id) for _, row, begin, answer in answers for j, id in enumerate(answer)]
                with self.autocast():
                    logp, greedy = self.model(idx, torch.tensor(targets, dtype=torch.int64, device=self.device).view(-1, 3).T)
                sizes = [len(answer) for *_, answer in answers]
                for (i, *_), p, g in zip(answers, logp.cpu().split(sizes), greedy.cpu().split(sizes)):
                    scored[i] = p.numpy(), bool(g.all())
                bar.update(len(batch))
        return scored

    @torch.no_grad()
    def generate(self, prompts, stops, new, *how, generator=None):
        """Texts that go on from prompts (lists of ids), at most `new` tokens long, ending before the first of the stop strings or at the end
        of text. how: temperature, top_k, top_p of sample.py's generate. Prompt and `new` together fit into block_size."""
        longest, tail = max(map(len, prompts)), 4 + max([len(s.encode()) for s in stops], default=0)  # a token is a byte or more
        start = torch.tensor([longest - len(p) for p in prompts])
        idx = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=self.device)
        texts, running = [[] for _ in prompts], [True] * len(prompts)
        with self.autocast():
            for token in generate(self.model, idx, new, self.text.n_ids, *how, generator, start):
                for row, id in enumerate(token.tolist()):
                    running[row] &= id != self.text.eot
                    if running[row]:
                        texts[row].append(id)
                        end = self.text.decode(texts[row][-tail:])
                        running[row] = not any(s in end for s in stops)
                if not any(running):
                    break
        texts = [self.text.decode(ids) for ids in texts]
        return [text[: min([text.find(s) for s in stops if s in text], default=len(text))] for text in texts]


def progress(total, what, unit):
    return tqdm(total=total, desc=what, unit=unit, dynamic_ncols=True, mininterval=0.5 if sys.stderr.isatty() else 30)


# ---- (a) Held-out loss -----------------------------------------------------------------------------------------------------------------------------
def held_out(ckpt, val, windows, limit):
    """{measure: Measure} on a val.bin. windows: how many of train.py's fixed windows, or "all" of them; or "documents", each read from its
    beginning after the eot before it, a long one in windows of the context. Loss counts every token, bits per byte those that spell text."""
    name, eot, T = val.header["tokenizer"], val.header["eot"], ckpt.block_size
    if windows == "documents":
        pairs, ends = [], np.flatnonzero(val.tokens == eot)[:limit]  # (document, its part after what came before)
        for d, (begin, end) in enumerate(zip([-1, *ends], ends)):
            ids = [eot, *val.tokens[begin + 1 : end + 1].tolist()]
            pairs += [(d, ids[i : i + T + 1]) for i in range(0, len(ids) - 1, T)]
    else:
        reader = ValWindows(val, T, sys.maxsize if windows == "all" else int(windows))
        pairs = [(i, reader.batch([i])[0].tolist()) for i in range(reader.n)][:limit]
    scored, size, sums = ckpt.score([(ids[:1], ids[1:]) for _, ids in pairs], "held out", load_tokenizer(name).n_ids), token_bytes(name), []
    for (_, ids), (logp, _) in zip(pairs, scored):
        spelt = size[ids[1:]]
        sums.append((-logp.sum(dtype=float), len(logp), -logp[spelt > 0].sum(dtype=float) / math.log(2), spelt.sum()))
    nats, tokens, bits, bytes_ = (np.bincount([key for key, _ in pairs], column).tolist() for column in zip(*sums))  # of a window or document
    loss, bits = Measure(dict(enumerate(zip(nats, tokens))), unit="nats per token"), Measure(dict(enumerate(zip(bits, bytes_))), unit="bits per byte")
    return {"loss": loss, "perplexity": Measure({}, math.exp(loss.value)), "bits per byte": bits}


# ---- (b) The protocol behind the paper's Table 2: samples of the tasks, scored as the authors' script does -----------------------------------------
def protocol_data(folder):
    """{"wikitext", "lambada", "hellaswag": lists of rows} from a folder's jsonl or parquet files of these names, or from the hub."""
    from datasets import load_dataset

    rows = {}
    for name, (hub, config, split, columns) in HUB.items():
        how = {"path": hub, "name": config, "split": split}
        if folder:
            kind = next((kind for kind in ("jsonl", "parquet") if Path(folder, f"{name}.{kind}").is_file()), None)
            if kind is None:
                raise UserError(f"--protocol_data={folder} has no {name}.jsonl or {name}.parquet: put it there, or leave the flag away to take all from the hub")
            how = {"path": kind.removesuffix("l"), "data_files": f"{folder}/{name}.{kind}", "split": "train"}
        try:
            rows[name] = load_dataset(**how).select_columns(columns).to_list()
        except Exception as error:  # no network, a damaged file, another column: one remedy
            raise UserError(f"{name} cannot be read from {folder or hub} ({first_line(error)}): give --protocol_data= a folder with wikitext, lambada and hellaswag as .jsonl or .parquet") from error
    return rows


def paper_protocol(ckpt, rows, limit):
    """{measure: Measure}. WikiText-2: the test text joined by blank lines, its first 200 windows of the context (of T tokens, T - 1 of which are
    predicted), no overlap. LAMBADA: first 500; right if the first token of the last word is the likeliest. HellaSwag: first 200; the ending
    with the highest mean log-probability per token, at most 512 tokens in all."""
    T, most = ckpt.block_size, lambda n: min(n, limit or n)
    ids = ckpt.text.encode("\n\n".join(row["text"] for row in rows["wikitext"]), bos=False)
    windows = [ids[i : i + T] for i in range(0, len(ids), T)][: most(200)]
    scored = ckpt.score([(w[:1], w[1:]) for w in windows if len(w) > 1], "paper protocol: WikiText-2")
    wikitext = Measure({i: (-logp.sum(dtype=float), len(logp)) for i, (logp, _) in enumerate(scored)}, unit="nats per token")

    pairs = []
    for row in rows["lambada"][: most(500)]:
        context, _, word = row["text"].strip().rpartition(" ")
        pairs.append((ckpt.text.encode(context), ckpt.text.encode(f" {word}", bos=False)[:1]))
    lambada = Measure({i: (float(right), 1) for i, (_, right) in enumerate(ckpt.score(pairs, "paper protocol: LAMBADA"))})

    items = rows["hellaswag"][: most(200)]
    pairs = [(ckpt.text.encode(item["ctx"]), ckpt.text.encode(f" {ending}", bos=False)) for item in items for ending in item["endings"]]
    pairs = [(context[-max(1, 512 - len(answer)) :], answer) for context, answer in pairs]
    means = (logp.mean() for logp, _ in ckpt.score(pairs, "paper protocol: HellaSwag"))
    right = [np.argmax([next(means) for _ in item["endings"]]) == int(item["label"]) for item in items]
    hellaswag = Measure({i: (float(r), 1) for i, r in enumerate(right)})
    return {"WikiText-2 loss": wikitext, "WikiText-2 perplexity": Measure({}, math.exp(wikitext.value)), "LAMBADA accuracy": lambada, "HellaSwag accuracy": hellaswag}


# ---- (c) lm-evaluation-harness ---------------------------------------------------------------------------------------------------------------------
class Harness(TemplateLM):
    """A Checkpoint as the harness wants it."""

    def __init__(self, ckpt):
        super().__init__()
        self.ckpt = ckpt

    eot_token_id = property(lambda self: self.ckpt.text.eot)
    prefix_token_id = property(lambda self: self.ckpt.text.prefix)

    def tok_encode(self, string, add_special_tokens=None, **_):
        return self.ckpt.text.encode(string, add_special_tokens)

    def _loglikelihood_tokens(self, requests, **_):
        return [(float(logp.sum(dtype=float)), greedy) for logp, greedy in self.ckpt.score([(c, a) for _, c, a in requests], "log-likelihoods")]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        pairs, owner = [], []
        for i, request in enumerate(requests):
            ids = self.ckpt.text.encode(request.args[0], bos=False)
            pairs += map(make_disjoint_window, get_rolling_token_windows(ids, self.ckpt.text.prefix, self.ckpt.block_size, 1))
            owner += [i] * (len(pairs) - len(owner))
        sums = [float(logp.sum(dtype=float)) for logp, _ in self.ckpt.score(pairs, "whole texts")]
        return np.bincount(np.array(owner, int), sums, len(requests)).tolist()

    def generate_until(self, requests, disable_tqdm=False):
        from lm_eval.models.utils import normalize_gen_kwargs

        ckpt, T = self.ckpt, self.ckpt.block_size
        asked, texts = {}, [None] * len(requests)  # (what Checkpoint.generate takes): [(request, prompt)]
        for i, (context, how) in enumerate(request.args for request in requests):
            how = dict(normalize_gen_kwargs(how))
            if other := how.keys() - {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}:
                raise UserError(f"this task generates with {', '.join(sorted(other))}, which eval.py does not know: leave the task out")
            new = min(how["max_gen_toks"], T // 2)
            ckpt.shortened += new < how["max_gen_toks"]
            prompt = ckpt.text.encode(context) or [ckpt.text.prefix]
            ckpt.first_ids = ckpt.first_ids or prompt[:5]
            ckpt.cut += len(prompt) > T - new
            temperature = (how.get("temperature") or 1.0) if how["do_sample"] else 0
            asked.setdefault((tuple(filter(None, how["until"])), new, temperature, how.get("top_k", 0), how.get("top_p", 1.0)), []).append((i, prompt[new - T :]))
        generator = torch.Generator(ckpt.device).manual_seed(0)
        with progress(len(requests), "generation", "texts") as bar:
            for how, group in asked.items():
                group.sort(key=lambda one: -len(one[1]))
                for first in range(0, len(group), ckpt.batch_size):
                    where, prompts = zip(*group[first : first + ckpt.batch_size])
                    for i, text in zip(where, ckpt.generate(prompts, *how, generator=generator)):
                        texts[i] = text
                    bar.update(len(where))
        return texts


def load_tasks(names, args):
    """{name: the harness's objects behind it}; UserError where a name is unknown, a task cannot be loaded, or would run code unasked."""
    if TemplateLM is object:
        raise UserError("lm-evaluation-harness is not installed: pip install lm-eval math-verify antlr4-python3-runtime==4.11.0")
    from lm_eval.tasks import TaskManager

    def consent(task, unsafe):
        if unsafe and not args.run_code:
            raise UserError(f"{task} runs code that the model wrote, on this machine and with your rights: if you want that, in a container say, add --run_code")

    if args.run_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if args.include_path and not Path(args.include_path).is_dir():
        raise UserError(f"--include_path={args.include_path} is no folder: give one with task files (.yaml)")
    manager = TaskManager(include_path=args.include_path, include_defaults=False)
    if any(name not in manager.all_tasks for name in names):  # reading the harness's own 14,000 takes seconds
        manager = TaskManager(include_path=args.include_path)
    if unknown := [name for name in names if name not in manager.all_tasks]:
        near = difflib.get_close_matches(unknown[0], manager.all_tasks, 3, 0.5)
        raise UserError(f"--tasks={unknown[0]}: no such task; " + (f"did you mean {', '.join(near)}?" if near else "lm-eval ls tasks lists them"))
    tasks = {}
    for name in names:
        consent(name, (manager.task_index[name].cfg or {}).get("unsafe_code"))  # before its data is fetched
        random.seed(0)  # as the harness does: gpqa shuffles its answers while it is loaded
        try:
            found = manager.load([name])
        except Exception as error:  # no network, gated data, a package or a file that is missing: whatever the task needs
            raise UserError(f"{name} cannot be loaded ({type(error).__name__}: {first_line(error)[:300]}): see to that, or give files of your own with --include_path=") from error
        for task, its in found["tasks"].items():
            consent(task, getattr(its, "UNSAFE_CODE", False))
        tasks[name] = [found["groups"][name]] if name in found["groups"] else list(found["tasks"].values())
    return tasks


def run_task(ckpt, name, tasks, args):
    """({title: Measure}, the harness's own results with every outcome, for the JSON) of one task, group or tag."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    shots, papers = PAPER.get(name, (None, None))
    shots = shots if args.num_fewshot is None else args.num_fewshot
    done = simple_evaluate(Harness(ckpt), tasks=tasks, num_fewshot=shots, limit=args.limit, bootstrap_iters=1000, confirm_run_unsafe_code=args.run_code,
                           task_manager=TaskManager(include_defaults=False))  # fmt: skip
    results, had = done["results"], sorted(set(done["n-shot"].values()))
    if shots is not None and had != [shots]:
        print(f"note: {name} ran with {', '.join(map(str, had))} shots, not {shots}: its own definition fixes them")
    whole = any("," in key for key in results.get(name, ()))  # else a tag, or a group without an aggregate: its tasks one by one
    items, outcomes = {}, {}  # items by (row of results, metric)
    for task, samples in done["samples"].items():
        outcomes[task] = [{key: s[key] for key in ("doc_id", "doc_hash", "prompt_hash", "target", "filter", "filtered_resps", *s["metrics"])} for s in samples]
        for s in samples:
            for metric in s["metrics"]:
                value, weight = s[metric] if isinstance(s[metric], (tuple, list)) and len(s[metric]) == 2 else (s[metric], 1)
                if all(isinstance(x, (int, float, np.number)) for x in (value, weight)):  # others make sense in the aggregate alone
                    items.setdefault((name if whole else task, f"{metric},{s['filter']}"), {})[task, s["doc_id"], s["prompt_hash"]] = float(value), float(weight)
    measures = {}
    for row in [name] if whole else results:
        for metric, value in results[row].items():
            if "," in metric and "_stderr," not in metric:
                error = results[row].get(metric.replace(",", "_stderr,"))
                unit = "of log-likelihood" if any(word in metric for word in ("perplexity", "bits_per_byte")) else ""
                title = f"{row}, {'/'.join(map(str, had))}-shot: {metric}" + " (the paper's)" * (metric == papers)
                measures[title] = Measure(items.get((row, metric), {}), float(value), error if isinstance(error, float) else None, unit)
    return measures, {"results": results, "n-shot": done["n-shot"], "versions": done["versions"], "outcomes": outcomes}


# ---- All of it -------------------------------------------------------------------------------------------------------------------------------------
def comparable(ckpts, args):
    """UserError unless losses per token of these checkpoints mean the same."""
    first, *others = ckpts
    smallest = min(ckpt.block_size for ckpt in ckpts)
    for other in others:
        for what, a, b, remedy in [
            ("tokenizer", first.tokenizer, other.tokenizer, "evaluate them one by one"),
            ("context", first.block_size, other.block_size, f"give --block_size={smallest}"),
            ("dataset", first.dataset, other.dataset, "give --dataset= one for all"),
        ]:
            if a != b and (args.windows or what != "dataset"):
                raise UserError(f"{first.path} and {other.path} differ in their {what} ({a}, {b}), their losses do not compare: {remedy}")


def open_val(ckpts):
    """The val.bin to evaluate on: --dataset=, or the one that the checkpoints were trained on."""
    if ckpts[0].dataset is None:
        raise UserError(f"{ckpts[0].path} was imported and knows no dataset: give --dataset= a name under data/ or a folder of prepare_data.py")
    folder = find_dataset(ckpts[0].dataset)
    val, train = (open_bin(folder / f"{split}.bin") for split in ("val", "train"))
    for ckpt in ckpts:
        if ckpt.tokenizer not in (None, val.header["tokenizer"]) or ckpt.meta["model_config"]["vocab_size"] < val.header["vocab"]:
            raise UserError(f"{folder} holds {val.header['tokenizer']} tokens, which are not those of {ckpt.path} ({ckpt.tokenizer}): give --dataset= another")
        if ckpt.meta["data"].get("sha256") not in (None, train.header["sha256"]):
            print(f"note: {ckpt.path} was trained on other data than {folder}/train.bin: whether val.bin is new to it, you must know")
    return val


def arguments():
    parser = Parser(prog="eval.py", description=__doc__)
    parser.add_argument("ckpts", nargs="+", metavar="CKPT", help="a checkpoint, or a run's folder; several are compared with the first")
    parser.add_argument("--windows", help="held-out loss on so many fixed windows (default 200), on `all`, or on `documents` from their beginning")
    parser.add_argument("--dataset", help="a name under data/ or a folder; default: what the checkpoint was trained on")
    parser.add_argument("--protocol", choices=["paper", "full"], help="WikiText-2, LAMBADA, HellaSwag: the paper's samples, or the whole of the harness's")
    parser.add_argument("--protocol_data", help="a folder with wikitext, lambada and hellaswag as .jsonl or .parquet, instead of the hub")
    parser.add_argument("--tasks", default="", help=f"names of lm-evaluation-harness, with commas; these have the paper's shots: {', '.join(PAPER)}")
    parser.add_argument("--num_fewshot", type=int, help="shots for all tasks, instead of the paper's or their own")
    parser.add_argument("--include_path", help="a folder with task files of your own")
    parser.add_argument("--run_code", action="store_true", help="consent to run code that the model wrote (humaneval, mbpp)")
    parser.add_argument("--limit", type=int, help="only so many documents or items of each, to try things out")
    parser.add_argument("--batch_size", type=int, default=16, help="sequences at a time (default 16); changes no score")
    parser.add_argument("--block_size", type=int, help="context to use, at most the model's")
    parser.add_argument("--tokenizer", help="bytes, qwen3, llama3, gpt2 or the path of a tokenizer.json; default: the checkpoint's")
    parser.add_argument("--prefix_token", default="auto", help="bos, before every prompt; or eot or an id, before an empty one and a whole text; auto: bos for imported models that have one, else eot")
    parser.add_argument("--weights", choices=["raw", "ema"], default="raw", help="ema: the running average, of a run with --ema_decay=")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap (default 0); the harness keeps its own seeds")
    parser.add_argument("--out", help="the JSON file to write, which must not exist; default: out/eval/<time>.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of compute; default: bfloat16 on CUDA, else float32")
    args = parser.parse_args()
    places = [os.path.realpath(path) for path in args.ckpts]
    if twice := [path for path, place in zip(args.ckpts, places) if places.count(place) > 1]:
        raise UserError(f"{twice[0]} is given twice: leave one out")
    if args.windows not in (None, "all", "documents") and not (args.windows.isdecimal() and int(args.windows)):
        raise UserError(f"--windows={args.windows} is none of a number, all and documents")
    if args.batch_size < 1 or args.limit is not None and args.limit < 1 or args.seed < 0 or (args.num_fewshot or 0) < 0:
        raise UserError("--batch_size and --limit are 1 or more, --seed and --num_fewshot 0 or more")
    names = [name.strip() for name in args.tasks.split(",") if name.strip()] + FULL * (args.protocol == "full")
    args.tasks = list(dict.fromkeys(names))
    if not args.tasks and not args.protocol:
        args.windows = args.windows or "200"
        if args.prefix_token != "auto":
            raise UserError(f"--prefix_token={args.prefix_token} is for --tasks and --protocol: give one of them, or leave it out")
    return args


def new_file(path):
    """The path of a file that does not exist, in a folder that can be written to: found out now, not after an hour."""
    out = Path(path or f"out/eval/{time.strftime('%Y-%m-%d_%H-%M-%S')}_{os.getpid()}.json")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.touch(exist_ok=False)
        out.unlink()
    except OSError as error:
        raise UserError(f"--out={out} cannot be made ({error.strerror}): give another name") from error
    return out


def evaluate(ckpt, val, rows, tasks, args):
    """({title: Measure}, {task: the harness's own results}) of all that was asked for."""
    found, details = {}, {}
    if val:
        title = args.windows + " windows" * (args.windows != "documents")
        found |= {f"held out, {title}: {k}": m for k, m in held_out(ckpt, val, args.windows, args.limit).items()}
        ckpt.first_ids = None
    if rows:
        found |= {f"paper's protocol: {k}": m for k, m in paper_protocol(ckpt, rows, args.limit).items()}
    for name in tasks:
        result, details[name] = run_task(ckpt, name, tasks[name], args)
        found |= {f"harness, {k}": m for k, m in result.items()}
    return found, details


def main():
    args = arguments()  # what can be wrong is found out before anything is computed
    out, ckpts = new_file(args.out), [Checkpoint(path, args) for path in args.ckpts]
    if args.windows or args.protocol:
        comparable(ckpts, args)
    if args.tasks or args.protocol:
        for ckpt in ckpts:
            ckpt.text = load_text(ckpt.path, ckpt.meta, args)
    val = open_val(ckpts) if args.windows else None
    rows = protocol_data(args.protocol_data) if args.protocol == "paper" else None
    tasks = load_tasks(args.tasks, args) if args.tasks else {}

    report = {"command": sys.argv[1:], "torch": torch.__version__, "lm_eval": importlib.metadata.version("lm_eval") if tasks else None, "checkpoints": {}, "comparisons": []}
    measures, first = {}, args.ckpts[0]
    for ckpt in ckpts:
        path, text = ckpt.path, ckpt.text
        ckpt.load(args)
        found, details = evaluate(ckpt, val, rows, tasks, args)
        measures[path] = found
        report["checkpoints"][path] = {
            "step": ckpt.meta["step"], "weights": args.weights, "residual": ckpt.model.config.residual, "route_heads": ckpt.model.config.route_heads,
            "device": str(ckpt.device), "dtype": str(ckpt.model.embed.weight.dtype), "kernel": ckpt.model.residual.kernel, "context": ckpt.block_size, "batch_size": ckpt.batch_size,
            "cut_at_left": ckpt.cut, "fewer_new_tokens": ckpt.shortened, "first_ids_of_request_0": ckpt.first_ids,
            "tokenizer": text and text.name, "prefix_token": text and text.prefix, "prefix_before_every_prompt": text and text.prefix == text.bos,
            "measures": {k: {"value": m.value, "stderr": m.stderr, "items": len(m.items)} for k, m in found.items()}, "harness": details,
            "items": {k: [[key, *item] for key, item in m.items.items()] for k, m in found.items() if not k.startswith("harness")},
        }  # fmt: skip
        if text:
            print(f"{path}: prefix token {text.prefix}{' before every prompt' * (text.prefix == text.bos)}, request 0 begins with {ckpt.first_ids}; "
                  f"{ckpt.cut} inputs cut at the left, {ckpt.shortened} allowed fewer new tokens than their task asks for, to fit into {ckpt.block_size}")  # fmt: skip
        for k, m in found.items():
            if path != first and m.items and m.items.keys() == measures[first][k].items.keys():
                report["comparisons"].append({"first": first, "this": path, "measure": k} | compare(measures[first][k], m, args.seed))
        out.write_text(json.dumps(report, indent=1, default=str))  # after each checkpoint: an hour's work is not lost with the next one's
        ckpt.model = None  # the next one needs its memory

    show = lambda m: f"{m.value:.4f}" + (f" ± {m.stderr:.4f}" if m.stderr is not None else "")
    print("\n" + table(["", "items", *args.ckpts], [[k, len(m.items) or "", *(show(measures[p][k]) for p in args.ckpts)] for k, m in measures[first].items()]))
    for c in report["comparisons"]:
        print(f"{c['this']} against {first}, {c['measure']}: {c['words']}")
    print(f"\n{out} holds these numbers and the outcome of every item")


if __name__ == "__main__":
    cli(main)
