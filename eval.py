"""Held-out loss, the paper's zero-shot protocol and lm-evaluation-harness tasks, of checkpoints compared.

    python eval.py out/demo_baseline out/demo_mhar             # loss, bits per byte, and their difference
    python eval.py out/demo_mhar --windows=documents           # each held-out document from its beginning
    python eval.py out/a out/b --protocol=paper                # WikiText-2, LAMBADA, HellaSwag as in Table 2
    python eval.py out/a out/b --weights=ema --tasks=mmlu,gpqa_main_zeroshot,gsm8k,minerva_math
    python eval.py out/a --tasks=mine --include_path=tasks/    # a task of your own, offline

Checkpoints are compared with the first, item by item: 0/1 outcomes by McNemar's exact test, all else by a
paired bootstrap. Numbers and the outcome of every item go to a new JSON file.
"""

import glob
import json
import logging
import math
import os
import random
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from configurator import Parser, UserError, cli, output_folder, table

import numpy as np
import torch
from tqdm import tqdm

from checkpoint import load_model, read_meta, reason
from data import ValWindows, find_dataset, open_bin
from parallel import choose_device
from sample import load_text, write
from tokenizer import load_tokenizer

try:  # only --tasks and --protocol=full need it
    from lm_eval.api.model import TemplateLM
except ImportError:
    TemplateLM = object

# task: (shots, the metric of the paper's Table 3); its shots of MMLU are not stated, five is the custom
PAPER = {"mmlu": (5, "acc,none"), "gpqa_main_zeroshot": (0, "acc,none"),
         "gsm8k": (5, "exact_match,strict-match"), "minerva_math": (4, "math_verify,none"),
         "humaneval": (0, "pass@1,create_test"), "mbpp": (3, "pass_at_1,none")}  # fmt: skip
FULL = ["wikitext", "lambada_openai", "hellaswag"]  # --protocol=full: Table 2's tasks as the harness has them
CUT, FEWER = "inputs cut at the left", "texts allowed fewer new tokens"  # counted for every checkpoint
HUB = {  # --protocol=paper: dataset, configuration, split, columns
    "wikitext": ("Salesforce/wikitext", "wikitext-2-raw-v1", "test", ["text"]),
    "lambada": ("cimec/lambada", "plain_text", "test", ["text"]),
    "hellaswag": ("Rowan/hellaswag", "default", "validation", ["ctx", "endings", "label"]),
}


# ---- Measures and their comparison ----
@dataclass
class Measure:
    """A number and its items {key: (value, weight)}: sum(value) / sum(weight), unless `value` is given."""

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

    def __str__(self):
        return f"{self.value:.4f}" + (f" ± {self.stderr:.4f}" if self.stderr is not None else "")


def perplexity(loss):
    return Measure({}, math.inf if loss.value > 709 else math.exp(loss.value))


def accuracy(right):
    return Measure({i: (float(r), 1) for i, r in enumerate(right)})


def mcnemar(only_a, only_b):
    """Two-sided p of McNemar's exact test, for only_a items right by a alone and only_b by b alone."""
    n = only_a + only_b
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(min(only_a, only_b) + 1)) / 2**n)


def bootstrap(difference, weight, seed=0, draws=10_000):
    """95% interval of sum(difference) / sum(weight), both [items], over items drawn with replacement."""
    rng, n = np.random.default_rng(seed), len(weight)
    drawn = (rng.integers(0, n, n) for _ in range(draws))
    return np.quantile([difference[d].sum() / weight[d].sum() for d in drawn], [0.025, 0.975]).tolist()


def compare(a, b):
    """The paired comparison of Measure b with Measure a, numbers and words."""
    va, vb = (np.array([m.items[key][0] for key in a.items], float) for m in (a, b))
    weight, n = np.array([w for _, w in a.items.values()], float), len(va)
    if {*va, *vb} <= {0.0, 1.0} and set(weight) == {1.0}:
        only_a, only_b = int((va > vb).sum()), int((vb > va).sum())
        p = mcnemar(only_a, only_b)
        words = f"{only_b} of {n} right here alone, {only_a} there alone: p = {p:.2g} (McNemar, exact)"
        return {"only_first": only_a, "only_this": only_b, "p": p, "words": words}
    mean, (low, high) = (vb - va).sum() / weight.sum(), bootstrap(vb - va, weight)
    words = f"{mean:+.4f} {a.unit}, 95% interval {low:+.4f} to {high:+.4f} (paired bootstrap over {n} items)"
    return {"mean_difference": mean, "low": low, "high": high, "words": words}


# ---- A checkpoint that scores and generates ----
class Checkpoint(TemplateLM):
    """A checkpoint, with the methods that lm-evaluation-harness calls. notes: what a reader must know."""

    def __init__(self, path, args):
        super().__init__()
        self.path, (self.folder, self.meta) = path, read_meta(path)  # now: a running run moves on
        data, own = self.meta["data"], self.meta["model_config"]["block_size"]
        self.tokenizer, self.dataset = args.tokenizer or data["tokenizer"], args.dataset or data["dataset"]
        self.block_size, self.batch_size = args.block_size or own, args.batch_size
        if self.block_size > own:
            raise UserError(f"--block_size={self.block_size}: that of {path} is {own}; give at most that")
        self.notes = {"context": self.block_size, CUT: 0, FEWER: 0}
        if args.tasks or args.protocol:
            self.text = t = load_text(self.folder, self.meta, args.tokenizer, args.prefix_token)
            self.notes |= {"tokenizer": t.name, "prefix": t.prefix, "before every prompt": t.prefix == t.bos}

    def batches(self, items, what):
        """Of items [(ids, more)], the longest ids first: tuples of ids and of more, with a progress bar."""
        items = sorted(items, key=lambda item: -len(item[0]))
        for first in tqdm(range(0, len(items), self.batch_size), what, disable=None):
            yield zip(*items[first : first + self.batch_size])

    @torch.no_grad()
    def score(self, pairs, what, n_ids=None):
        """[(log-probabilities of the answer's tokens, fp32 [n], whether greedy decoding gives them)] of pairs
        (context, answer) of lists of ids, among the first n_ids rows. Pairs with the same input share a pass.
        What does not fit into block_size is cut off at the left."""
        T, n_ids, scored = self.block_size, n_ids or self.text.n_ids, [None] * len(pairs)
        asked = defaultdict(list)  # input: the numbers of its pairs
        for i, (context, answer) in enumerate(pairs):
            if not 0 < len(answer) <= T:
                item = f"an answer of {len(answer)} tokens to {self.text.decode(context[-50:])!r}"
                raise UserError(f"{what}: {item}, not 1 to block_size={T}: omit it")
            ids = (*context, *answer)
            self.notes[CUT] += len(ids) > T + 1
            asked[ids[-T - 1 : -1]].append(i)
        device = self.model.embed.weight.device
        for batch, numbers in self.batches(asked.items(), what):
            idx = torch.tensor([ids + (0,) * (len(batch[0]) - len(ids)) for ids in batch], device=device)
            for ids, own, x in zip(batch, numbers, self.model.features(idx)):  # x [T, D]
                for i in own:
                    answer = torch.tensor(pairs[i][1], device=device)
                    logits = self.model.logits(x[len(ids) - len(answer) : len(ids)])[:, :n_ids].float()
                    logp = logits.gather(1, answer[:, None])[:, 0] - logits.logsumexp(1)
                    scored[i] = logp.cpu().numpy(), bool((logits.argmax(1) == answer).all())
        return scored

    # what follows has the names of the harness
    eot_token_id = property(lambda self: self.text.eot)
    prefix_token_id = property(lambda self: self.text.prefix)

    def tok_encode(self, string, add_special_tokens=None, **_):
        return self.text.encode(string, add_special_tokens)

    def _encode_pair(self, context, continuation):
        """(context, answer) as ids, encoded together, as the harness's own `hf` model does."""
        whole, context = self.text.encode(context + continuation), self.text.encode(context.rstrip())
        return context or [self.text.prefix], whole[len(context) :]

    def _loglikelihood_tokens(self, requests, **_):
        scored = self.score([(context, answer) for _, context, answer in requests], "log-likelihoods")
        return [(float(logp.sum(dtype=float)), greedy) for logp, greedy in scored]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        texts = []
        for request in requests:
            ids = self.text.encode(request.args[0], bos=False)
            windows = get_rolling_token_windows(ids, self.text.prefix, self.block_size, 1)
            texts.append([*map(make_disjoint_window, windows)])
        scored = iter(self.score([pair for windows in texts for pair in windows], "whole texts"))
        return [sum(float(next(scored)[0].sum(dtype=float)) for _ in windows) for windows in texts]

    def generate_until(self, requests, disable_tqdm=False):
        from lm_eval.models.utils import normalize_gen_kwargs

        asked, texts = defaultdict(list), [None] * len(requests)  # (stops, new): [(prompt, request)]
        for i, (context, how) in enumerate(request.args for request in requests):
            how = dict(normalize_gen_kwargs(how))
            known = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}
            if how["do_sample"] or how.keys() - known:
                raise UserError(f"a task generates by {how}, eval.py only greedily: omit this task")
            new = min(how["max_gen_toks"], self.block_size // 2)
            prompt, room = self.text.encode(context) or [self.text.prefix], self.block_size - new
            self.notes[FEWER] += new < how["max_gen_toks"]
            self.notes[CUT] += len(prompt) > room
            asked[tuple(filter(None, how["until"])), new].append((prompt[-room:], i))
        for (stops, new), group in asked.items():
            for prompts, numbers in self.batches(group, "generation"):
                *_, drawn = write(self.model, self.text, prompts, new, stops, temperature=0)
                for i, prompt, ids in zip(numbers, prompts, drawn):
                    text = self.text.continuation(prompt, ids)
                    texts[i] = text[: min([text.find(s) for s in stops if s in text], default=len(text))]
        return texts


# ---- Held-out loss ----
def held_out(ckpt, val, windows, limit):
    """{title: Measure} on a val.bin. windows: how many of train.py's, or "all"; or "documents", each from the
    eot before it, in as many windows as it takes. Loss counts every token, bits per byte those of text."""
    name, eot, T = val.header["tokenizer"], val.header["eot"], ckpt.block_size
    if windows == "documents":
        ends = np.flatnonzero(val.tokens == eot)[:limit]
        texts = [[eot, *val.tokens[i + 1 : end + 1].tolist()] for i, end in zip([-1, *ends], ends)]
        items = [[ids[i : i + T + 1] for i in range(0, len(ids) - 1, T)] for ids in texts]
    else:
        reader = ValWindows(val, T, sys.maxsize if windows == "all" else windows)
        items = [[ids] for ids in reader.batch(range(reader.n)[:limit]).tolist()]
    pairs = [(ids[:1], ids[1:]) for item in items for ids in item]
    scored = iter(ckpt.score(pairs, "held out", load_tokenizer(name).n_ids))
    nats, bits, size = {}, {}, token_bytes(name)
    for i, item in enumerate(items):
        logp = np.concatenate([next(scored)[0] for _ in item]).astype(float)
        spelt = np.concatenate([size[ids[1:]] for ids in item])
        nats[i] = -logp.sum(), len(logp)
        bits[i] = -logp[spelt > 0].sum() / math.log(2), int(spelt.sum())
    loss, bits = Measure(nats, unit="nats per token"), Measure(bits, unit="bits per byte")
    found = {"loss": loss, "perplexity": perplexity(loss), "bits per byte": bits}
    title = f"held out, {windows}" + " windows" * (windows != "documents")
    return {f"{title}: {key}": measure for key, measure in found.items()}


def token_bytes(name):
    """int64 [rows]: how many bytes of text an id spells; 0 for special tokens and padding."""
    t = load_tokenizer(name)
    return np.array([len(t.spell(id)) if id < t.n_text else 0 for id in range(t.vocab)])


# ---- The protocol of the paper's Table 2 ----
def protocol_data(folder):
    """{"wikitext", "lambada", "hellaswag": rows}, from files of these names or from the hub."""
    from datasets import load_dataset

    rows = {}
    for name, (hub, config, split, columns) in HUB.items():
        how = {"path": hub, "name": config, "split": split}
        if folder:
            kind = "parquet" if Path(folder, f"{name}.parquet").is_file() else "json"
            how = {"path": kind, "data_files": f"{glob.escape(folder)}/{name}.*", "split": "train"}
        try:
            rows[name] = load_dataset(**how).select_columns(columns).to_list()
        except Exception as error:  # no network, no such file, another column: one remedy
            need = "give --protocol_data= a folder with wikitext, lambada and hellaswag (.jsonl, .parquet)"
            raise UserError(f"{name} cannot be read ({reason(error)}): {need}") from error
    return rows


def paper_protocol(ckpt, rows, limit):
    """{title: Measure}. WikiText-2: the text joined by blank lines, its first 200 windows of T tokens, T - 1
    of them predicted. LAMBADA: first 500, right if the last word's first token is the likeliest. HellaSwag:
    first 200, the ending of highest mean log-probability per token, at most 512 tokens in all."""
    ids = ckpt.text.encode("\n\n".join(row["text"] for row in rows["wikitext"]), bos=False)
    windows = [ids[i : i + ckpt.block_size] for i in range(0, len(ids), ckpt.block_size)][:200]
    scored = ckpt.score([(w[:1], w[1:]) for w in windows[:limit] if len(w) > 1], "WikiText-2")
    losses = {i: (-logp.sum(dtype=float), len(logp)) for i, (logp, _) in enumerate(scored)}
    wikitext = Measure(losses, unit="nats per token")

    stories = [row["text"].strip().rpartition(" ") for row in rows["lambada"][:500][:limit]]
    pairs = [ckpt._encode_pair(context, f" {word}") for context, _, word in stories]
    scored = ckpt.score([(context, answer[:1]) for context, answer in pairs], "LAMBADA")
    lambada = [right for _, right in scored]

    items = rows["hellaswag"][:200][:limit]
    pairs = [ckpt._encode_pair(item["ctx"], f" {ending}") for item in items for ending in item["endings"]]
    pairs = [(context[-max(1, 512 - len(answer)) :], answer) for context, answer in pairs]
    means = iter([logp.mean() for logp, _ in ckpt.score(pairs, "HellaSwag")])
    hellaswag = [np.argmax([next(means) for _ in item["endings"]]) == int(item["label"]) for item in items]
    found = {"WikiText-2 loss": wikitext, "WikiText-2 perplexity": perplexity(wikitext)}
    found |= {"LAMBADA accuracy": accuracy(lambada), "HellaSwag accuracy": accuracy(hellaswag)}
    return {f"paper's protocol: {key}": measure for key, measure in found.items()}


# ---- lm-evaluation-harness ----
def load_tasks(names, args):
    """{name: the harness's objects behind it}; UserError where one is unknown, cannot be loaded, or would run
    code without consent."""
    if TemplateLM is object:
        packages = "lm-eval math-verify antlr4-python3-runtime==4.11.0"
        raise UserError(f"lm-evaluation-harness is not installed: pip install {packages}")
    from lm_eval.tasks import TaskManager

    if args.run_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(include_path=args.include_path, include_defaults=False)
    if not set(names) <= set(manager.all_tasks):  # reading the harness's own 14,000 takes seconds
        manager = TaskManager(include_path=args.include_path)
    tasks = {}
    for name in names:
        if name not in manager.all_tasks:
            raise UserError(f"--tasks={name}: no such task; lm-eval ls tasks lists them")
        if (manager.task_index[name].cfg or {}).get("unsafe_code") and not args.run_code:
            why = "runs code that the model wrote, on this machine and with your rights"
            raise UserError(f"{name} {why}: if you want that, in a container say, add --run_code")
        random.seed(0)  # as the harness does: gpqa shuffles its answers while it is loaded
        try:
            found = manager.load([name])
        except Exception as error:  # no network, gated data, a package or a file that is missing
            raise UserError(f"{name} cannot be loaded ({reason(error)})") from error
        tasks[name] = [found["groups"][name]] if name in found["groups"] else list(found["tasks"].values())
    return tasks


def run_task(ckpt, name, tasks, args):
    """({title: Measure}, the harness's results with every outcome) of one task, group or tag."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    shots, papers = PAPER.get(name, (None, None))
    shots = shots if args.num_fewshot is None else args.num_fewshot
    how = dict(num_fewshot=shots, limit=args.limit, confirm_run_unsafe_code=args.run_code)
    manager = TaskManager(include_defaults=False)
    done = simple_evaluate(ckpt, tasks=tasks, bootstrap_iters=1000, task_manager=manager, **how)
    results, ran = done["results"], "/".join(map(str, sorted(set(done["n-shot"].values()))))
    whole = any("," in key for key in results.get(name, ()))  # else a tag, or a group without an aggregate
    items = defaultdict(dict)  # (row of results, metric): items
    for task, samples in done["samples"].items():
        for s in samples:
            s |= dict.fromkeys(("doc", "arguments", "resps"))  # the largest part, and in the data
            for metric in s["metrics"]:
                pair = s[metric] if np.size(s[metric]) == 2 else (s[metric], 1)
                if all(isinstance(x, (int, float, np.number)) for x in pair):  # others only as the aggregate
                    key = name if whole else task, f"{metric},{s['filter']}"
                    items[key][task, s["doc_id"], s["prompt_hash"]] = tuple(map(float, pair))
    measures = {}
    for row in [name] if whole else results:
        for metric, value in results[row].items():
            if "," in metric and "_stderr," not in metric:
                error = results[row].get(metric.replace(",", "_stderr,"))
                unit = "of log-likelihood" * ("perplexity" in metric or "bits_per_byte" in metric)
                title = f"harness, {row}, {ran}-shot: {metric}" + " (the paper's)" * (metric == papers)
                error = error if isinstance(error, float) else None
                measures[title] = Measure(items.get((row, metric), {}), float(value), error, unit)
    return measures, done


# ---- All of it ----
def open_val(ckpts):
    """The val.bin of --dataset=, or of what the checkpoints were trained on."""
    first = ckpts[0]
    if first.dataset is None:
        raise UserError(f"{first.path} was imported and knows no dataset: give --dataset= a name or a folder")
    folder = find_dataset(first.dataset)
    val, train = (open_bin(folder / f"{split}.bin") for split in ("val", "train"))
    name, rows = val.header["tokenizer"], val.header["vocab"]
    for ckpt in ckpts:
        if ckpt.tokenizer != name or ckpt.meta["model_config"]["vocab_size"] < rows:
            other = f"{folder} holds {name} tokens, {ckpt.path} takes those of {ckpt.tokenizer or 'its own'}"
            raise UserError(f"{other}: give another --dataset=, or --tokenizer={name} if that is its own")
        if ckpt.meta["data"].get("sha256") not in (None, train.header["sha256"]):
            print(f"note: {ckpt.path} was trained on other data than {folder}: it may have seen val.bin")
    return val


def number(text):
    if int(text) < 1:
        raise ValueError
    return int(text)


def windows(text):
    return text if text in ("all", "documents") else number(text)


def arguments():
    parser = Parser(prog="eval.py", description=__doc__)
    add = parser.add_argument
    add("ckpts", nargs="+", metavar="CKPT", help="a checkpoint, or a run's folder")
    add("--windows", type=windows, help="held-out loss on so many windows, on `all` or on `documents` [200]")
    add("--dataset", help="a name under data/ or a folder [what the checkpoint was trained on]")
    add("--protocol", choices=["paper", "full"], help="Table 2: the paper's samples, or the harness's tasks")
    add("--protocol_data", help="a folder with wikitext, lambada, hellaswag (.jsonl, .parquet) [the hub]")
    add("--tasks", default="", help=f"of the harness, with commas; the paper's shots for {', '.join(PAPER)}")
    add("--num_fewshot", type=int, help="shots for all tasks [the paper's, or the task's own]")
    add("--include_path", help="a folder with task files of your own")
    add("--run_code", action="store_true", help="consent to run code that the model wrote (humaneval, mbpp)")
    add("--limit", type=number, help="only so many items of each, to try things out")
    add("--batch_size", type=number, default=16, help="sequences at a time; changes no score [%(default)s]")
    add("--block_size", type=number, help="context to use [the model's]")
    add("--tokenizer", help="bytes, qwen3, llama3, gpt2 or a tokenizer.json [the checkpoint's]")
    add("--prefix_token", default="auto", help="bos, before all prompts; eot or an id, before empty ones")
    add("--weights", choices=["raw", "ema"], default="raw", help="ema: the running average [%(default)s]")
    add("--out", help="the JSON file to write, a new one [out/eval/<time>.json]")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps [%(default)s]")
    add("--dtype", choices=["float32", "bfloat16"], help="of compute [bfloat16 on CUDA, else float32]")
    args = parser.parse_args()
    args.tasks = [*filter(None, args.tasks.split(",")), *FULL * (args.protocol == "full")]
    if not args.tasks and not args.protocol:
        args.windows = args.windows or 200
    args.out = Path(args.out or f"out/eval/{time.strftime('%Y-%m-%d_%H-%M-%S')}_{os.getpid()}.json")
    output_folder(args.out.parent, "--out")
    if args.out.exists():
        raise UserError(f"--out={args.out} is there already: give another name")
    return args


def main():
    # what can be wrong is found before anything is computed
    args = arguments()
    device, dtype = choose_device(args.device), getattr(torch, args.dtype) if args.dtype else None
    ckpts = [Checkpoint(path, args) for path in args.ckpts]
    compared = ["tokenizer", "block_size"] * bool(args.windows or args.protocol)
    for what in compared + ["dataset"] * bool(args.windows):
        values = {str(getattr(ckpt, what)): ckpt.path for ckpt in ckpts}
        if len(values) > 1:
            raise UserError(f"losses do not compare between {what}s {values}: give --{what}= or omit some")
    val = open_val(ckpts) if args.windows else None
    texts = protocol_data(args.protocol_data) if args.protocol == "paper" else None
    tasks = load_tasks(args.tasks, args) if args.tasks else {}

    report = {"settings": vars(args), "torch": torch.__version__, "checkpoints": {}, "comparisons": []}
    measures, first = {}, ckpts[0].path
    for ckpt in ckpts:
        ckpt.model, _ = load_model(ckpt.folder, device, args.weights, dtype)
        found, details = {}, {}
        if val:
            found |= held_out(ckpt, val, args.windows, args.limit)
        if texts:
            found |= paper_protocol(ckpt, texts, args.limit)
        for name in tasks:
            result, details[name] = run_task(ckpt, name, tasks[name], args)
            found |= result
        ckpt.model = None  # the next one needs its memory

        measures[ckpt.path] = found
        print(f"{ckpt.path}: " + ", ".join(f"{key} {value}" for key, value in ckpt.notes.items()))
        its = ckpt.notes | {"step": ckpt.meta["step"], "model_config": ckpt.meta["model_config"]}
        listed = {key: vars(m) | {"items": [*m.items.items()]} for key, m in found.items()}
        report["checkpoints"][ckpt.path] = its | {"harness": details, "measures": listed}
        for key, m in found.items():
            other = measures[first][key]
            if m is not other and m.items and m.items.keys() == other.items.keys():
                pair = {"first": first, "this": ckpt.path, "measure": key}
                report["comparisons"].append(pair | compare(other, m))
        part = args.out.with_suffix(".part")
        part.write_text(json.dumps(report, default=str))  # after each: hours are not lost
        part.replace(args.out)

    found = measures.values()
    rows = [[key, len(m.items) or "", *(its[key] for its in found)] for key, m in measures[first].items()]
    print("\n" + table(["", "items", *measures], rows))
    for c in report["comparisons"]:
        print(f"{c['this']} against {first}, {c['measure']}: {c['words']}")
    print(f"\n{args.out} holds these numbers and the outcome of every item")


if __name__ == "__main__":
    cli(main)
