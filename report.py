"""Runs -> paired differences with intervals, compute-equivalent gain, curves: a Markdown report with PNGs.

    python report.py out/demo_mhar                      # one run: its curve and its losses
    python report.py out/demo_baseline out/demo_mhar    # the difference of two runs, step by step
    python report.py out/study/*                        # methods, head counts, seeds
    python report.py out/sweep/* --best                 # each method at its own best learning rate
    python report.py out/long/* --budgets=20000,60000   # the difference at two budgets, within the same runs

The score of a run is its tail mean: the mean of its last eleven validation losses, in nats per token (paper,
section 3.1). A run is paired with the baseline run of the same seed, which saw the same batches in the same
order. The two must agree in data and in every setting but the residual method and its own.
"""

import json
import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

from configurator import Parser, UserError, cli, output_folder, table

import matplotlib
import numpy as np
from matplotlib.figure import Figure

matplotlib.rcParams |= {"axes.grid": True, "grid.alpha": 0.25, "savefig.dpi": 150}
matplotlib.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}

TAIL = 11  # evaluations in a tail mean
T95 = 12.706, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281  # Student's t, 95%
COLORS = "#000000 #D55E00 #0072B2 #009E73 #CC79A7 #E69F00 #56B4E9 #8C564B #7F7F7F".split()


# ---- Runs, and which of them may be paired -------------------------------------------------------
def load(folder):
    """A run, from its log.jsonl: name, settings (of training and model), defaults, val {step: loss}."""
    path, start, val = Path(folder) / "log.jsonl", {}, {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            event = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number} is cut short: resume the run, which repairs its log") from error
        if event["event"] == "start":
            start = event
        elif event["event"] == "val":
            val[event["step"]] = event["loss"]
    if "defaults" not in start or not val:
        raise UserError(f"{path} has no evaluation yet, or another version wrote it: omit it")
    settings = start["config"] | start["model_config"]
    settings |= {key: start[key] for key in ("params", "tokens_per_step", "flops_per_token", "dtype")}
    data, name = start["data"], Path(settings["dataset"]).name
    settings["data"] = f"{name} {data['sha256'][:8]} {data['val_sha256'][:8]}"
    return SimpleNamespace(name=str(folder), settings=settings, defaults=start["defaults"], val=val)


def name_methods(runs):
    """Complete each run's settings with the defaults of what its log lacks, and add:

    shared: {setting: text} in which runs that are compared agree. method: its residual and the settings of it
    in which runs differ. heads: its place in a sweep over H (attnres is H = 1), or None.
    """
    defaults = {key: value for run in runs for key, value in run.defaults.items()}
    prefixes = "route_", *(run.settings["residual"] + "_" for run in runs)
    own = [key for key in defaults if key.startswith(prefixes)]  # the settings of residual methods
    compared = [key for key in ("data", "eval_windows", "dtype", *defaults) if key not in ("residual", *own)]
    for run in runs:
        run.settings = s = defaults | run.settings
        run.seed, run.rate, run.residual = s["seed"], s["learning_rate"], s["residual"]
        run.shared = {key: str(s[key]) for key in compared}
        # Each method has its own import of a base: their folders differ, and report.md names them
        run.shared["init_from"] = "a checkpoint" if s["init_from"] else "None"
    for run in runs:
        s, same = run.settings, [r.settings for r in runs if r.residual == run.residual != "baseline"]
        heads = f"-h{s['route_heads']}"
        named = {"mhar": heads, "delta": heads, "hc": "-dynamic" if s["hc_dynamic"] else "-static"}
        varied = [key for key in own if key not in ("route_heads", "hc_dynamic")]
        varied = [key for key in varied if len({str(other[key]) for other in same}) > 1]
        run.method = run.residual + named.get(run.residual, "") + "".join(f" {k}={s[k]}" for k in varied)
        run.heads = None if varied else {"attnres": 1, "mhar": s["route_heads"]}.get(run.residual)


def compare(runs, baseline, best, budgets):
    """Cells of runs that share everything but method and seed, and learning rate for `best`.

    A cell: settings, shared, budgets, steps [E] of its evaluations, rows, baseline first. A row: method,
    heads, run (any of its runs), losses and deltas [seeds, E], paired by seed and step.
    """
    free = ("seed", "learning_rate") if best else ("seed",)
    groups = defaultdict(lambda: defaultdict(dict))  # shared settings -> method -> (rate, seed) -> run
    for run in runs:
        run.budgets = budgets or [run.settings["max_steps"]]
        for budget in run.budgets:
            if budget not in run.val:
                near = min(run.val, key=lambda step, budget=budget: abs(step - budget))
                todo = f"resume it, or give --budgets={near}"
                raise UserError(f"{run.name} has no evaluation at step {budget}: {todo}")
        run.steps = [step for step in sorted(run.val) if step <= run.budgets[-1]]
        key = tuple(item for item in run.shared.items() if item[0] not in free)
        twin = groups[key][run.method].setdefault((run.rate, run.seed), run)
        if twin is not run:
            raise UserError(f"{twin.name} and {run.name} are both {run.method}, seed {run.seed}: omit one")
    losses = lambda runs: np.array([[run.val[step] for step in run.steps] for run in runs])
    cells = []
    for methods in groups.values():
        chosen = {method: choose(method, by_rate_and_seed) for method, by_rate_and_seed in methods.items()}
        references, rows = chosen.get(baseline, {}), []
        for method, by_seed in chosen.items():
            for seed, run in by_seed.items():
                if seed not in references:
                    refuse(run, list(references.values()) or [r for r in runs if r.method == baseline])
                if run.steps != references[seed].steps:
                    raise UserError(f"{run.name} was evaluated at other steps than {references[seed].name}")
            own, partners = losses(by_seed.values()), losses(references[seed] for seed in by_seed)
            row = dict(method=method, heads=run.heads, run=run, losses=own, deltas=own - partners)
            rows.append(SimpleNamespace(**row))
        rows.sort(key=lambda row: (row.method != baseline, row.run.residual, row.heads or 0, row.method))
        cell = dict(settings=run.settings, shared=run.shared, budgets=run.budgets, steps=np.array(run.steps))
        cells.append(SimpleNamespace(rows=rows, **cell))
    return cells


def choose(method, by_rate_and_seed):
    """{seed: run} at the learning rate with the lowest mean score over the seeds that every rate has."""
    rates = sorted({rate for rate, _ in by_rate_and_seed})
    seeds = set.intersection(*({s for r, s in by_rate_and_seed if r == rate} for rate in rates))
    if not seeds:
        raise UserError(f"--best: {method} has no seed with each of its rates {rates}: omit a rate")
    tails = {key: np.mean([run.val[s] for s in run.steps[-TAIL:]]) for key, run in by_rate_and_seed.items()}
    best = min(rates, key=lambda rate: np.mean([tails[rate, seed] for seed in seeds]))
    return {seed: run for (rate, seed), run in sorted(by_rate_and_seed.items()) if rate == best}


def refuse(run, references):
    """Say in what `run` differs from the nearest of the runs that it might have been paired with."""
    differing = lambda other: [key for key in run.shared if run.shared[key] != other.shared[key]]
    near = min(references, key=lambda other: len(differing(other)))
    text = ", ".join(f"{key} ({run.shared[key]} against {near.shared[key]})" for key in differing(near))
    raise UserError(f"{run.name} ({run.method}) has no {near.method} partner: {near.name} differs in {text}")


# ---- Numbers -------------------------------------------------------------------------------------
def score(values, cell, budget):
    """Mean, standard error and half width of the 95% interval of tail means; the latter two None of one seed.
    values [seeds, E]."""
    tails = values[:, cell.steps <= budget][:, -TAIL:].mean(1)
    df = len(tails) - 1
    if df == 0:
        return tails.mean(), None, None
    error = tails.std(ddof=1) / math.sqrt(len(tails))
    t = T95[df - 1] if df <= len(T95) else 1.96 + 2.372 / df + 2.823 / df**2  # Cornish-Fisher, to 0.1%
    return tails.mean(), error, t * error


def exponents(cells):
    """Values of alpha in L = A C^-alpha (paper, section 3.2): fitted to the lower envelope of the baseline's
    curves after their warm-up, C being FLOPs as the log counts them; and 0.15, assumed."""
    points = []
    for cell in cells:
        s, losses = cell.rows[0].run.settings, cell.rows[0].losses.mean(0)
        per_step = s["flops_per_token"] * s["tokens_per_step"]
        points += [(per_step * n, loss) for n, loss in zip(cell.steps, losses) if n > s["warmup_steps"]]
    points.sort()
    envelope = [p for i, p in enumerate(points) if all(p[1] < before[1] for before in points[:i])]
    return [-np.polyfit(*np.log(envelope).T, 1)[0], 0.15] if len(envelope) > 1 else [0.15]


# ---- Tables and plots ----------------------------------------------------------------------------
def show(mean, error, half, sign=""):
    return f"{mean:{sign}.4f}" + (f" ± {error:.4f}" if error is not None else "")


def score_table(cell, best, alphas):
    """A row per method: tail mean, difference to the baseline, its interval, and by each of the exponents the
    factor on the baseline's compute that would take it to the method's loss."""
    (baseline, *others), last = cell.rows, cell.budgets[-1]
    head, lines = ["method", "parameters", "seeds", "loss"] + ["best rate"] * best, []
    if others:
        head += [f"Δ to {baseline.method}, step {budget:,}" for budget in cell.budgets] + ["95% interval"]
        head += ["compute gain at α = " + " / ".join(f"{alpha:.3f}" for alpha in alphas)]
    for row in cell.rows:
        total = row.run.settings["params"]["total"]
        line = [row.method, f"{total:,}", len(row.losses), show(*score(row.losses, cell, last))]
        line += [f"{row.run.rate:g}"] * best
        if row is not baseline:
            mean, _, half = score(row.deltas, cell, last)
            gain = 1 - mean / score(row.losses, cell, last)[0]  # baseline / method, over the method's seeds
            line += [show(*score(row.deltas, cell, budget), "+") for budget in cell.budgets]
            line += ["one seed" if half is None else f"{mean - half:+.4f} to {mean + half:+.4f}"]
            line += [" / ".join(f"{gain ** (1 / alpha):.2f}x" for alpha in alphas)]
        lines.append(line + [""] * (len(head) - len(line)))
    return table(head, lines)


def step_table(cell, most=12):
    """Same-step losses and differences, means over the seeds, at about a dozen evenly spaced evaluations."""
    (baseline, *others), lines = cell.rows, []
    for i in range(len(cell.steps) - 1, -1, -math.ceil(len(cell.steps) / most))[::-1]:
        deltas = [f"{row.deltas[:, i].mean():+.4f}" for row in others]
        lines.append([f"{cell.steps[i]:,}", f"{baseline.losses[:, i].mean():.4f}", *deltas])
    return table(["step", baseline.method, *(f"Δ {row.method}" for row in others)], lines)


def plot_curves(cell, path):
    """Left losses over steps, right same-step differences: means over the seeds, single seeds thin behind."""
    names = ("losses", "deltas")[: len(cell.rows)]
    figure = Figure((12, 4.2), layout="tight")
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    colors = dict(zip([row.method for row in cell.rows], COLORS * len(cell.rows)))
    rows = sorted(cell.rows, key=lambda row: -row.losses[:, -1].mean())  # as the curves end, for the legend
    late = cell.steps >= cell.steps[-1] / 5  # the first fifth would flatten the rest
    for axis, name in zip(panels, names):
        for row in rows:
            curve, color = getattr(row, name)[:, late], colors[row.method]  # [seeds, E]
            axis.plot(cell.steps[late], curve.mean(0), color=color, lw=1.8, label=row.method)
            if len(curve) > 1 and name == "deltas":
                axis.plot(cell.steps[late], curve.T, color=color, lw=0.7, alpha=0.4)
        axis.set_xlabel("optimizer step")
    panels[-1].set_ylabel(f"difference to {cell.rows[0].method}, same step")
    panels[0].set_ylabel("validation loss (nats per token)")
    panels[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(cell.title, fontsize=11)
    figure.savefig(path)


def plot_heads(cells, path):
    """The difference to the baseline over the number of routing heads, with standard errors, by cell."""
    figure = Figure((7, 4.2), layout="tight")
    axis = figure.subplots()
    for cell, color in zip(cells, COLORS[1:] * len(cells)):
        rows = [row for row in cell.rows if row.heads]
        means, errors, _ = zip(*(score(row.deltas, cell, cell.budgets[-1]) for row in rows))
        heads, errors = [row.heads for row in rows], [error or 0 for error in errors]
        axis.errorbar(heads, means, errors, color=color, marker="o", capsize=3, label=cell.title)
        axis.set_xscale("log", base=2)
        axis.set_xticks(heads, heads)
    axis.set(xlabel="routing heads H", ylabel=f"difference to {cells[0].rows[0].method} (nats per token)")
    axis.set_title("How many heads? Mean and standard error over seeds")
    axis.legend(fontsize=9)
    figure.savefig(path)


# ---- The report ----------------------------------------------------------------------------------
def write(cells, best, out):
    """report.md and its PNGs in folder `out`; returns the Markdown."""
    parts = [f"Loss: mean of the last {TAIL} evaluations, nats per token. ±: a standard error over seeds."]
    parts += ["Δ: paired by seed, negative is better. Compute gain: the factor on the baseline's compute"]
    parts += ["that takes it to the method's loss, if L = A C^-α, for α fitted to its curves and for 0.15.\n"]
    bases = {row.run.name: row.run.settings["init_from"] for cell in cells for row in cell.rows}
    parts += [f"{name} started from {base}.\n" for name, base in bases.items() if base]
    for i, cell in enumerate(cells, 1):
        s, image = cell.settings, f"curves_{i}.png" if len(cells) > 1 else "curves.png"
        differing = [key for key in cell.shared if len({c.shared[key] for c in cells}) > 1 and key != "seed"]
        cell.title = f"{s['data'].split()[0]}, {s['max_steps']:,} steps of {s['tokens_per_step']:,} tokens"
        cell.title += "".join(f", {key} {cell.shared[key]}" for key in differing)
        plot_curves(cell, out / image)
        alphas = exponents([c for c in cells if c.shared["data"] == cell.shared["data"]])
        parts += [f"## {cell.title}\n", f"![{cell.title}]({image})\n", step_table(cell)]
        parts += [score_table(cell, best, alphas)]
    if swept := [cell for cell in cells if len([row for row in cell.rows if row.heads]) > 2]:
        plot_heads(swept, out / "heads.png")
        parts += ["![How many heads?](heads.png)\n"]
    (out / "report.md").write_text("\n".join(parts), encoding="utf-8")
    return "\n".join(part for part in parts if not part.startswith("!["))


def main():
    parser = Parser(prog="report.py", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a folder that train.py wrote, its out_dir")
    parser.add_argument("--baseline", default="baseline", help="a method (attnres, mhar-h8 ...) or its RUN")
    parser.add_argument("--best", action="store_true", help="each method at its best learning rate")
    steps = lambda text: sorted({int(step) for step in text.split(",")})
    parser.add_argument(
        "--budgets", type=steps, help="steps to read scores at, with commas; default: the end"
    )
    parser.add_argument("--out_dir", default="report", help="where report.md and the PNGs go")
    args = parser.parse_args()
    runs = []
    for folder in map(Path, args.runs):
        if (folder / "log.jsonl").is_file():
            runs.append(load(folder))
        else:
            print(f"{folder} is skipped: it has no log.jsonl")
    if not runs:
        raise UserError("none of these is a run: give a folder that train.py wrote")
    name_methods(runs)
    methods = {run.name: run.method for run in runs}
    names = sorted(set(methods.values()))
    baseline = methods.get(str(Path(args.baseline)), args.baseline)
    baseline = names[0] if len(names) == 1 else baseline  # nothing to compare: curves and losses
    if baseline not in names:
        names = ", ".join(names)
        raise UserError(f"none of these runs is {baseline}: add one, or give --baseline= one of {names}")
    cells = compare(runs, baseline, args.best, args.budgets)
    print(write(cells, args.best, output_folder(args.out_dir, "--out_dir")))
    print(f"{args.out_dir}/report.md holds these tables, with the plots beside it")


if __name__ == "__main__":
    cli(main)
