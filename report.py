"""Runs -> paired differences with intervals, compute-equivalent gain, curves: a Markdown report with PNGs.

    python report.py out/demo_mhar                      # one run: its curve and its losses
    python report.py out/demo_baseline out/demo_mhar    # the difference of two runs, step by step
    python report.py out/study_long/*                   # methods, head counts, seeds
    python report.py out/sweep/* --best                 # each method at its own best learning rate
    python report.py out/long/* --budgets=20000,60000   # the difference at two budgets, within the same runs

It reads each folder's log.jsonl, and no checkpoint. The score of a run is its tail mean: the mean of its last
eleven validation losses, in nats per token (paper, section 3.1). A run is paired with the baseline run of the
same seed, which saw the same batches in the same order. The two must agree in data and in every setting but
the residual method and its own: those that follow `residual` in GPTConfig, and route_lr_scale.
"""

import contextlib
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
PLOTS = {  # of a row's arrays
    "losses": "validation loss (nats per token)",
    "deltas": "difference in loss to {}, same step",
    "entropy": "entropy of the routing weights (nats)",
}
LEGEND = f"""Final loss: the last evaluation's; tail mean: of the last {TAIL}; nats per token. ±: a standard
error over seeds; bands: 95% intervals. Δ: of tail means, paired by seed, negative is better. Compute gain:
the factor on the baseline's compute that takes it to the method's loss, if L = A C^-α, for α fitted to its
curves and for 0.15.
"""


# ---- Runs, and which of them may be paired -------------------------------------------------------
def load(folder):
    """A run, from its log.jsonl: name, settings (of training and model), own (those of residual methods),
    defaults, val and entropy {step: value}. None, and a printed line, if it has no evaluation."""
    path, start, val, entropy = Path(folder) / "log.jsonl", {}, {}, {}
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        with contextlib.suppress(
            ValueError
        ):  # cut short by a kill; what it held is missed where it is needed
            event = json.loads(line)
            start = event if event["event"] == "start" else start
            if event["event"] == "val":
                val[event["step"]] = event["loss"]
            if "route_entropy" in event:
                entropy[event["step"]] = event["route_entropy"]
    if "defaults" not in start or not val:
        print(f"{folder} is skipped: no evaluation of this version in its log.jsonl")
        return None
    settings, data = start["config"] | start["model_config"], start["data"]
    settings |= {key: start[key] for key in ("params", "tokens_per_step", "flops_per_token", "dtype")}
    settings["data"] = " ".join([Path(settings["dataset"]).name, data["sha256"][:8], data["val_sha256"][:8]])
    names = list(start["model_config"])
    own = {"route_lr_scale", *names[names.index("residual") + 1 :]}
    facts = dict(settings=settings, own=own, defaults=start["defaults"], val=val, entropy=entropy)
    return SimpleNamespace(name=str(Path(folder)), **facts)


def name_methods(runs):
    """Complete each run's settings with the defaults of what its log lacks, and add:

    shared: {setting: text} in which runs that are compared agree. method: its residual, with the H of what
    routes (and so logs entropies) or the form of hc, xN for route_lr_scale=N, and its own settings that vary.
    heads: its place in a sweep over H (attnres is H = 1), or None.
    """
    defaults = {key: value for run in runs for key, value in run.defaults.items()}
    own = set.union(*(run.own for run in runs))
    compared = [key for key in ("data", "eval_windows", "dtype", *defaults) if key not in {"residual", *own}]
    for run in runs:
        run.settings = s = defaults | run.settings
        run.seed, run.rate, run.residual = s["seed"], s["learning_rate"], s["residual"]
        run.shared = {key: str(s[key]) for key in compared}
        # Each method has its own import of a base: their folders differ, and report.md names them
        run.shared["init_from"] = "a checkpoint" if s["init_from"] else "None"
    for run in runs:
        s, same = run.settings, [r.settings for r in runs if r.residual == run.residual != "baseline"]
        heads, scale = s["route_heads"], s["route_lr_scale"]
        routes = run.entropy and run.residual != "attnres"
        form = f"-h{heads}" if routes else f"-{s['hc_form']}" if run.residual == "hc" else ""
        varied = [f" x{scale:g}"] if same and scale != 1 else []
        for key in sorted(own - {"route_heads", "hc_form", "route_lr_scale"}):
            varied += [f" {key}={s[key]}"] if len({str(other[key]) for other in same}) > 1 else []
        run.method = run.residual + form + "".join(varied)
        run.heads = None if varied else {"attnres": 1, "mhar": heads}.get(run.residual)


def compare(runs, baseline, best, budgets):
    """Cells of runs that share everything but method and seed, and learning rate for `best`.

    A cell: settings, shared, budgets, steps [E] of its evaluations, rows, baseline first. A row: method,
    heads, run (any of its runs), and arrays [seeds, E]: losses, deltas, paired by seed and step, and entropy,
    None where it does not route.
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
    array = lambda runs, name: np.array([[getattr(r, name)[step] for step in r.steps] for r in runs])
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
            own, partners = by_seed.values(), [references[seed] for seed in by_seed]
            row = dict(method=method, heads=run.heads, run=run, losses=array(own, "val"))
            routes = all(r.entropy.keys() >= set(r.steps) for r in own)
            row |= dict(entropy=array(own, "entropy") if routes else None)
            rows.append(SimpleNamespace(**row, deltas=row["losses"] - array(partners, "val")))
        order = lambda s: (s["residual"], s["route_heads"], s["route_lr_scale"])
        rows.sort(key=lambda row: (row.method != baseline, *order(row.run.settings), row.method))
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
def interval(values):
    """values [seeds, ...] -> mean, standard error and half width of the 95% interval, the latter two None of
    one seed."""
    mean, df = values.mean(0), len(values) - 1
    if df == 0:
        return mean, None, None
    error = values.std(0, ddof=1) / math.sqrt(len(values))
    t = T95[df - 1] if df <= len(T95) else 1.96 + 2.372 / df + 2.823 / df**2  # Cornish-Fisher, to 0.1%
    return mean, error, t * error


def score(values, cell, budget):
    """`interval` of the tail means up to step `budget`. values [seeds, E]."""
    return interval(values[:, cell.steps <= budget][:, -TAIL:].mean(1))


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
    """A row per method: losses, the step from which on its mean loss stays below that of one routing head,
    difference to the baseline, its interval, and by each exponent the factor on the baseline's compute that
    would take it to the method's loss."""
    (baseline, *others), last = cell.rows, cell.budgets[-1]
    single = next((row for row in cell.rows if row.heads == 1), None)
    head, lines = ["method", "parameters", "seeds", "final loss", "tail mean"] + ["best rate"] * best, []
    head += [f"below {single.method} from step"] if single and others else []
    if others:
        head += [f"Δ to {baseline.method}, step {budget:,}" for budget in cell.budgets] + ["95% interval"]
        head += ["compute gain at α = " + " / ".join(f"{alpha:.3f}" for alpha in alphas)]
    for row in cell.rows:
        line = [row.method, f"{row.run.settings['params']['total']:,}", len(row.losses)]
        line += [show(*interval(row.losses[:, -1])), show(*score(row.losses, cell, last))]
        line += [f"{row.run.rate:g}"] * best
        if single and others:
            behind = cell.steps[row.deltas.mean(0) >= single.deltas.mean(0)]
            ahead = cell.steps[cell.steps > max(behind, default=0)]
            line += ["" if row is single else f"{ahead[0]:,}" if len(ahead) else "never"]
        if row is not baseline:
            mean, _, half = score(row.deltas, cell, last)
            gain = 1 - mean / score(row.losses, cell, last)[0]  # baseline / method, over the method's seeds
            line += [show(*score(row.deltas, cell, budget), "+") for budget in cell.budgets]
            line += ["one seed" if half is None else f"{mean - half:+.4f} to {mean + half:+.4f}"]
            line += [" / ".join(f"{gain ** (1 / alpha):.2f}x" for alpha in alphas)]
        lines.append(line + [""] * (len(head) - len(line)))
    return table(head, lines)


def step_table(steps, columns, most=12):
    """Means over the seeds of columns {name: array [seeds, E]} at about a dozen evenly spaced evaluations."""
    lines = []
    for i in range(len(steps) - 1, -1, -math.ceil(len(steps) / most))[::-1]:
        means = [f"{array[:, i].mean():{'+' * (name[0] == 'Δ')}.4f}" for name, array in columns.items()]
        lines.append([f"{steps[i]:,}", *means])
    return table(["step", *columns], lines)


def plot_curves(cell, rows, name, path):
    """The array `name` of rows over steps: means over the seeds, and bands of their 95% intervals."""
    figure = Figure((9, 4.8), layout="tight")
    axis, ends, styles = figure.subplots(), [], defaultdict(lambda: iter(["-", "--", ":", "-."] * len(rows)))
    family = lambda row: row.method.split()[0]  # a method's variants share its color and differ in style
    colors = dict(zip(dict.fromkeys(map(family, cell.rows)), COLORS * len(cell.rows)))
    late = cell.steps >= cell.steps[-1] / 10  # the beginning would flatten the rest
    for row in rows:
        color, (mean, _, half) = colors[family(row)], interval(getattr(row, name)[:, late])
        axis.plot(cell.steps[late], mean, next(styles[color]), color=color, lw=1.6)
        if half is not None and name != "losses":  # which the seed moves more than the method
            axis.fill_between(cell.steps[late], mean - half, mean + half, color=color, alpha=0.1, lw=0)
        ends.append((mean[-1], row.method, color))
    title = PLOTS[name].format(cell.rows[0].method)
    axis.set(xlabel="optimizer step", ylabel=title, title=cell.title, xmargin=0)
    label_ends(axis, sorted(ends))
    figure.savefig(path)


def label_ends(axis, ends):
    """Names beside the ends of curves, [(y, name, color)] in ascending order, moved apart where too close."""
    (low, high), n = axis.get_ylim(), len(ends)
    ys = (np.array([y for y, *_ in ends]) - low) / (high - low)  # in heights of the axis
    room = 0.05 * np.arange(n)  # a name is 0.04 high
    free = ys - room  # isotonic regression: the nearest numbers that ascend
    free = [max(min(free[j : k + 1].mean() for k in range(i, n)) for j in range(i + 1)) for i in range(n)]
    for y, at, (_, name, color) in zip(ys, np.clip(free, 0, 1 - room[-1]) + room, ends):
        axis.plot([1, 1.02], [y, at], color=color, lw=0.8, transform=axis.transAxes, clip_on=False)
        axis.text(1.025, at, name, color=color, fontsize=9, va="center", transform=axis.transAxes)


def plot_heads(cells, path):
    """The difference to the baseline over the number of routing heads, with standard errors, by cell."""
    figure = Figure((7, 4.2), layout="tight")
    axis = figure.subplots()
    for cell, color in zip(cells, COLORS[1:] * len(cells)):
        rows = [row for row in cell.rows if row.heads]
        heads, scores = (
            [row.heads for row in rows],
            [score(row.deltas, cell, cell.budgets[-1]) for row in rows],
        )
        means, errors, _ = np.array(scores, float).T  # None becomes NaN: no bar
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
    parts = [LEGEND]
    bases = {row.run.name: row.run.settings["init_from"] for cell in cells for row in cell.rows}
    parts += [f"{name} started from {base}.\n" for name, base in bases.items() if base]
    for i, cell in enumerate(cells, 1):
        s, number = cell.settings, f"_{i}" if len(cells) > 1 else ""
        differing = [key for key in cell.shared if len({c.shared[key] for c in cells}) > 1 and key != "seed"]
        cell.title = f"{s['data'].split()[0]}, {s['max_steps']:,} steps of {s['tokens_per_step']:,} tokens"
        cell.title += "".join(f", {key} {cell.shared[key]}" for key in differing)
        parts += [f"## {cell.title}\n"]
        for name in PLOTS if len(cell.rows) > 1 else ("losses", "entropy"):
            if rows := [row for row in cell.rows if getattr(row, name) is not None]:
                plot_curves(cell, rows, name, out / f"{name}{number}.png")
                parts += [f"![{name}]({name}{number}.png)\n"]
        alphas = exponents([c for c in cells if c.shared["data"] == cell.shared["data"]])
        baseline, *others = cell.rows
        columns = {baseline.method: baseline.losses} | {f"Δ {row.method}": row.deltas for row in others}
        parts += [step_table(cell.steps, columns), score_table(cell, best, alphas)]
        if columns := {row.method: row.entropy for row in cell.rows if row.entropy is not None}:
            parts += [f"The {PLOTS['entropy']}:\n", step_table(cell.steps, columns)]
    if swept := [cell for cell in cells if len([row for row in cell.rows if row.heads]) > 2]:
        plot_heads(swept, out / "heads.png")
        parts += ["![How many heads?](heads.png)\n"]
    (out / "report.md").write_text("\n".join(parts), encoding="utf-8")
    return "\n".join(part for part in parts if not part.startswith("!["))


def main():
    parser = Parser(prog="report.py", description=__doc__)
    add, steps = parser.add_argument, lambda text: sorted({int(step) for step in text.split(",")})
    add("runs", nargs="+", metavar="RUN", help="a folder that train.py wrote, its out_dir")
    add("--baseline", default="baseline", help="a method (attnres, mhar-h8 ...) or its RUN [%(default)s]")
    add("--best", action="store_true", help="each method at its best learning rate")
    add("--budgets", type=steps, help="steps to read scores at, with commas [the end]")
    add("--out_dir", default="report", help="for report.md and its PNGs, over older ones [%(default)s]")
    args = parser.parse_args()
    if not (runs := [run for run in map(load, args.runs) if run]):
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
