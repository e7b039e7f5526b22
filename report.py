"""Runs -> paired tables with intervals, compute-equivalent gain, curves over steps and heads: a Markdown report and PNGs.

    python report.py out/demo_baseline out/demo_mhar       # paired same-step differences of two runs
    python report.py out/study/*                           # methods x seeds x H x n_kv_head, sorted out by what their logs say
    python report.py out/sweep/* --best                    # each method at its own best learning rate (the paper's Table 11)
    python report.py out/long/* --budgets=20000,60000      # the gap at two budgets, read within the same runs

The score of a run is its tail mean: the mean of its last eleven validation losses, in nats per token (the paper's metric, section
3.1). A run is compared to the baseline run of the same seed, which saw the same batches in the same order, and to no other: runs
that differ in data, order, steps, batch, trunk or recipe are not paired, and report.py says in what they differ.
"""

import json
import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import matplotlib

matplotlib.use("Agg")  # no display is needed
import matplotlib.pyplot as plt
import numpy as np

from configurator import Parser, UserError, cli, output_folder

TAIL = 11  # evaluations in a tail mean
# What two runs must share to be paired ...
SHARED = """data seed max_steps tokens_per_step block_size eval_windows n_layer n_embd n_head n_kv_head head_dim ffn_dim vocab_size tie_embeddings qk_norm
    rope_theta norm_eps learning_rate lr_schedule warmup_steps min_lr_ratio beta1 beta2 adam_eps weight_decay decay_norms decay_embeddings grad_clip z_loss
    dtype param_dtype init_from""".split()
# ... and what makes two variants of one method, where its runs differ in it.
ROUTE = ["route_init", "route_lr_scale", "route_weight_decay"]
VARIANT = {"attnres": ROUTE, "mhar": ROUTE, "delta": [*ROUTE, "delta_blocks", "delta_recursive"], "hc": ["hc_streams", "decay_hc_static"]}
COLORS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#7F7F7F")  # told apart by colour-blind readers


# ----------------------------------------------------------------------------------------------------------------------
# Runs, and which may be compared to which
# ----------------------------------------------------------------------------------------------------------------------
def load(folder):
    """A run from its log.jsonl: name, settings (its train and model config in one dict), val {step: loss}."""
    path = Path(folder) / "log.jsonl"
    if not path.is_file():
        raise UserError(f"{folder} holds no log.jsonl: RUN is a folder that train.py wrote, its out_dir")
    settings, val = None, {}
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        try:
            event = json.loads(line)
            if event["event"] == "start":
                settings = event["config"] | event["model_config"] | {key: event[key] for key in ("params", "tokens_per_step", "flops_per_token", "dtype", "data")}
            elif event["event"] == "val":
                val[event["step"]] = float(event["loss"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}:{number} is no line that train.py wrote whole ({error!r}): resume the run, which cuts its log back to the last checkpoint") from error
    if settings is None or (missing := [key for key in SHARED if key not in settings]):
        raise UserError(f"{path} {f'says nothing of {missing[0]}' if settings else 'has no start line'}: it is not whole, or another version's; train the run again")
    if not val:
        raise UserError(f"{path} has no evaluation yet: let the run go on")
    if broken := [step for step, loss in val.items() if not math.isfinite(loss)]:
        raise UserError(f"{path}: the validation loss of step {broken[0]} is {val[broken[0]]}: leave this run out")
    settings["dataset"] = Path(settings["dataset"]).name
    settings["data"] = " ".join([settings["dataset"], *(settings["data"][key][:8] for key in ("sha256", "val_sha256"))])
    return SimpleNamespace(name=str(folder), settings=settings, val=val, seed=settings["seed"], rate=settings["learning_rate"])


def name_methods(runs):
    """Sets run.method, the residual method with its H or kind and the variant fields in which its runs differ, and run.heads, its
    place in a sweep over H (attnres is H = 1), None outside one."""
    for run in runs:
        residual, heads = run.settings["residual"], run.settings["route_heads"]
        kind = {"mhar": f"-h{heads}", "delta": f"-h{heads}", "hc": "-dynamic" if run.settings["hc_dynamic"] else "-static"}.get(residual, "")
        alike = [r.settings for r in runs if r.settings["residual"] == residual]
        varied = [field for field in VARIANT.get(residual, []) if len({s[field] for s in alike}) > 1]
        run.method = residual + kind + "".join(f" {field}={run.settings[field]}" for field in varied)
        run.heads = None if varied else {"attnres": 1, "mhar": heads}.get(residual)


def shared(run, *without):
    return tuple((field, str(run.settings[field])) for field in SHARED if field not in without)


def compare(runs, baseline, best, budgets):
    """The cells of the comparison: runs that share everything but method and seed (and learning rate, for `best`).

    A cell: settings; budgets, the steps at which scores are read; steps [E] of the evaluations up to the last budget; rows, one per
    method, the baseline first. A row: method, heads, run (one of its runs), losses and deltas [seeds, E], paired by seed and step.
    UserError where a run has no partner, stands twice, or has not reached a budget.
    """
    free = ("seed", "learning_rate") if best else ("seed",)
    groups = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        run.budgets = budgets or [run.settings["max_steps"]]
        if missing := [step for step in run.budgets if step not in run.val]:
            last = max(run.val)
            near = min(run.val, key=lambda step: abs(step - missing[0]))
            what = f"its last is at {last}: resume it, or give --budgets={last} to compare there" if missing[0] > last else f"the nearest is at {near}: give --budgets={near}"
            raise UserError(f"{run.name} has no evaluation at step {missing[0]}, {what}")
        run.steps = [step for step in sorted(run.val) if step <= run.budgets[-1]]
        twin = groups[shared(run, *free)][run.method].setdefault((run.rate, run.seed), run)
        if twin is not run:
            raise UserError(f"{twin.name} and {run.name} are both {run.method} with seed {run.seed}: leave one out")
    cells = []
    for methods in groups.values():
        chosen = {method: choose(method, by_rate_and_seed) for method, by_rate_and_seed in methods.items()}
        references, rows = chosen.get(baseline, {}), []
        for method, by_seed in chosen.items():
            for seed, run in by_seed.items():
                if seed not in references:
                    refuse(run, list(references.values()) or [r for r in runs if r.method == baseline])
                if run.steps != references[seed].steps:
                    raise UserError(f"{run.name} was evaluated at other steps than {references[seed].name}: not paired")
            losses = np.array([[run.val[step] for step in run.steps] for run in by_seed.values()])
            deltas = losses - np.array([[references[seed].val[step] for step in run.steps] for seed, run in by_seed.items()])
            rows.append(SimpleNamespace(method=method, heads=run.heads, run=run, losses=losses, deltas=deltas))
        rows.sort(key=lambda row: (row.method != baseline, row.run.settings["residual"], row.heads or 0, row.method))
        cells.append(SimpleNamespace(settings=run.settings, budgets=run.budgets, steps=np.array(run.steps), rows=rows))
    return cells


def choose(method, by_rate_and_seed):
    """{seed: run} at the learning rate with the lowest mean score; the rates are compared over the seeds that each of them has."""
    rates = sorted({rate for rate, _ in by_rate_and_seed})
    common = set.intersection(*({seed for r, seed in by_rate_and_seed if r == rate} for rate in rates))
    if not common:
        raise UserError(f"--best: {method} has no seed that was run at each of its rates {rates}: add one, or leave a rate out")
    tails = {key: np.mean([run.val[step] for step in run.steps[-TAIL:]]) for key, run in by_rate_and_seed.items()}
    best = min(rates, key=lambda rate: np.mean([tails[rate, seed] for seed in common]))
    return {seed: run for (rate, seed), run in sorted(by_rate_and_seed.items()) if rate == best}


def refuse(run, references):
    """Say in what `run` differs from the nearest of the runs that it might have been paired with."""
    differences = {r.name: [key for key in SHARED if str(run.settings[key]) != str(r.settings[key])] for r in references}
    near = min(references, key=lambda r: len(differences[r.name]))
    text = ", ".join(f"{key} ({run.settings[key]} against {near.settings[key]})" for key in differences[near.name])
    raise UserError(f"{run.name} ({run.method}) has no {near.method} run to be paired with: the nearest, {near.name}, differs in {text}")


# ----------------------------------------------------------------------------------------------------------------------
# Numbers
# ----------------------------------------------------------------------------------------------------------------------
def t_inside(t, df):
    """P(|T| < t) of Student's t with df degrees of freedom (Abramowitz & Stegun 26.7.3 and 26.7.4)."""
    theta, odd = math.atan(t / math.sqrt(df)), df % 2
    term, total = math.cos(theta) if odd else 1.0, 0.0
    for k in range(df // 2):
        total += term
        term *= math.cos(theta) ** 2 * ((2 * k + 2) / (2 * k + 3) if odd else (2 * k + 1) / (2 * k + 2))
    return 2 / math.pi * (theta + math.sin(theta) * total) if odd else math.sin(theta) * total


def t_critical(df, level=0.95):
    low, high = 0.0, 1000.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if t_inside(middle, df) < level else (low, middle)
    return high


def score(values, cell, budget):
    """(mean, standard error over the seeds, half width of the 95% t interval) of tail means; values [seeds, E], the last two None for one seed."""
    tails = values[:, cell.steps <= budget][:, -TAIL:].mean(1)
    error = tails.std(ddof=1) / math.sqrt(len(tails)) if len(tails) > 1 else None
    return tails.mean(), error, error and t_critical(len(tails) - 1) * error


def compute_curve(cell):
    """The baseline's training FLOPs, as its log counts them per token, and mean losses after warm-up, [E, 2]."""
    s, baseline = cell.settings, cell.rows[0]
    points = np.stack([baseline.run.settings["flops_per_token"] * s["tokens_per_step"] * cell.steps, baseline.losses.mean(0)], 1)
    return points[cell.steps > s["warmup_steps"]]


def exponents(cells):
    """The ways to read alpha in L = A C^-alpha off the baseline (paper, section 3.2): {name: alpha}. The lower envelope of all its
    curves; the final points of the scales, if there are several; and 0.15, assumed, as steep as Chinchilla's."""
    curves = [compute_curve(cell) for cell in cells]
    points = sorted(tuple(point) for curve in curves for point in curve)
    envelope = [p for i, p in enumerate(points) if all(p[1] < before[1] for before in points[:i])]
    finals = [(curve[-1, 0], score(cell.rows[0].losses, cell, cell.budgets[-1])[0]) for cell, curve in zip(cells, curves) if len(curve)]
    fits = {name: -np.polyfit(*np.log(p).T, 1)[0] for name, p in (("envelope", envelope), ("final points", finals)) if len({c for c, _ in p}) > 1}
    return {name: alpha for name, alpha in fits.items() if alpha > 0} | {"assumed": 0.15}


# ----------------------------------------------------------------------------------------------------------------------
# Tables and plots, the latter to be read at the width of a README
# ----------------------------------------------------------------------------------------------------------------------
def table(head, rows):
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in [head, ["---"] + ["---:"] * (len(head) - 1), *rows])


def show(mean, error, half, sign=""):
    return f"{mean:{sign}.4f}" + (f" ± {error:.4f}" if error is not None else "")


def score_table(cell, best, alphas):
    """One row per method: tail mean, paired difference (at each budget) with its interval, and compute-equivalent gain: the factor on
    the baseline's training FLOPs that would take it to the method's loss, by each of the exponents `alphas`."""
    (baseline, *_), last, lines = cell.rows, cell.budgets[-1], []
    for row in cell.rows:
        line = [row.method, f"{row.run.settings['params']['total']:,}", len(row.losses), show(*score(row.losses, cell, last))] + [
            f"{row.run.rate:g}"
        ] * best
        if row is not baseline:
            mean, _, half = score(row.deltas, cell, last)
            gain = 1 - mean / score(row.losses, cell, last)[0]  # baseline / method, over the seeds of the method
            line += [show(*score(row.deltas, cell, budget), "+") for budget in cell.budgets]
            line += [f"{mean - half:+.4f} to {mean + half:+.4f}" if half is not None else "one seed"]
            line += [" / ".join(f"{gain ** (1 / alpha):.2f}x" for alpha in alphas.values())]
        lines.append(line + [""] * (len(cell.budgets) + 2) * (row is baseline))
    deltas = [f"Δ to {baseline.method}" + f", step {budget:,}" * (len(cell.budgets) > 1) for budget in cell.budgets]
    gains = "compute gain at α = " + " / ".join(f"{alpha:.3f}" for alpha in alphas.values())
    return table(["method", "parameters", "seeds", "loss"] + ["best rate"] * best + [*deltas, "95% interval", gains], lines)


def step_table(cell, most=12):
    """Same-step losses and differences, means over the seeds, at about a dozen evenly spaced evaluations."""
    baseline, *others = cell.rows
    lines = []
    for i in range(len(cell.steps) - 1, -1, -math.ceil(len(cell.steps) / most))[::-1]:
        lines.append([f"{cell.steps[i]:,}", f"{baseline.losses[:, i].mean():.4f}"] + [f"{row.deltas[:, i].mean():+.4f}" for row in others])
    return table(["step", baseline.method] + [f"Δ {row.method}" for row in others], lines)


def grid_table(grid):
    """grid {n_kv_head: {H: (loss, Δ)}}, each row's lowest loss in bold."""
    heads, lines = sorted({h for row in grid.values() for h in row}), []
    for kv, row in sorted(grid.items()):
        low = min(row, key=row.get)
        text = {h: f"{loss:.4f} ({delta:+.4f})" if h != low else f"**{loss:.4f} ({delta:+.4f})**" for h, (loss, delta) in row.items()}
        lines.append([kv] + [text.get(h, "") for h in heads])
    return table(["n_kv_head"] + [f"H = {h}" for h in heads], lines)


def axes(n=1, **size):
    figure, made = plt.subplots(1, n, squeeze=False, **size)
    for axis in made[0]:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, made[0]


def save(figure, path):
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_curves(cell, path):
    """Left the losses over steps, right the same-step differences; means over the seeds, and the single seeds thin behind them."""
    figure, panels = axes(2, figsize=(11, 4.2))
    colors = dict(zip([row.method for row in cell.rows], COLORS * len(cell.rows)))
    late = cell.steps >= cell.steps[-1] / 5  # the first fifth would flatten the rest
    for axis, name in zip(panels, ("losses", "deltas")):
        curves = {row.method: getattr(row, name) for row in cell.rows}
        axis.set_xlim(cell.steps[late][0], cell.steps[-1])
        low, high = (f([f(c.mean(0)[late]) for c in curves.values()]) for f in (min, max))
        gap = (high - low or 1) * 0.07
        axis.set_ylim(low - gap, high + gap)
        for method, curve in curves.items():
            axis.plot(cell.steps, curve.mean(0), color=colors[method], lw=1.8)
            if len(curve) > 1 and name == "deltas":
                axis.plot(cell.steps, curve.T, color=colors[method], lw=0.7, alpha=0.4)
        ends, names = zip(*sorted((curve[:, -1].mean(), method) for method, curve in curves.items()))
        spread = gap * np.arange(len(ends))
        places = np.maximum.accumulate(ends - spread) + spread  # a name at each line's end, apart from its neighbours
        places -= np.mean(places - ends)
        for y, method in zip(places + max(0, low - places[0]), names):
            axis.annotate(f" {method}", (1, y), xycoords=("axes fraction", "data"), color=colors[method], va="center")
        axis.set_xlabel("optimizer step")
    panels[0].set_ylabel("validation loss (nats per token)")
    panels[1].set_ylabel(f"difference to {cell.rows[0].method}, same step")
    figure.suptitle(cell.title, fontsize=11)
    save(figure, path)


def plot_heads(cells, path):
    """The difference to the baseline over the number of routing heads, with standard errors: one U-curve per cell (per n_kv_head)."""
    figure, (axis,) = axes(figsize=(7, 4.2))
    for cell, color in zip(cells, COLORS[1:] * len(cells)):
        heads, deltas = zip(*((row.heads, score(row.deltas, cell, cell.budgets[-1])) for row in cell.rows if row.heads))
        means, errors = [delta[0] for delta in deltas], [delta[1] or 0 for delta in deltas]
        axis.errorbar(heads, means, errors, color=color, marker="o", capsize=3, label=cell.title)
        axis.set_xscale("log", base=2)
        axis.set_xticks(heads, heads)
    axis.set(xlabel="routing heads H", ylabel=f"difference to {cells[0].rows[0].method} (nats per token)", title="How many heads? Mean and standard error over seeds")
    axis.legend(frameon=False, fontsize=9)
    save(figure, path)


def plot_grid(grid, baseline, path):
    """The grid of grid_table as a heat map: colour is the difference to the baseline of the same n_kv_head, blue is better."""
    kvs, heads = sorted(grid), sorted({h for row in grid.values() for h in row})
    deltas = np.array([[grid[kv].get(h, (np.nan, np.nan))[1] for h in heads] for kv in kvs])
    limit = np.nanmax(np.abs(deltas)) or 1.0
    figure, axis = plt.subplots(figsize=(1.1 * len(heads) + 2.6, 0.75 * len(kvs) + 1.6))
    image = axis.imshow(deltas, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
    for (row, column), delta in np.ndenumerate(deltas):
        if not np.isnan(delta):
            axis.text(column, row, f"{delta:+.4f}", ha="center", va="center", color="white" if abs(delta) > 0.6 * limit else "black")
    axis.set_xticks(range(len(heads)), heads)
    axis.set_yticks(range(len(kvs)), kvs)
    axis.set(xlabel="routing heads H", ylabel="KV heads", title=f"Difference to {baseline} (nats per token)")
    figure.colorbar(image)
    save(figure, path)


def title(cell, cells):
    """Data, shape, length, rate, and whatever else tells this cell from the others."""
    s = cell.settings
    told = {"data": s["dataset"], "n_embd": f"d{s['n_embd']}", "n_layer": f"L{s['n_layer']}", "n_kv_head": f"kv{s['n_kv_head']}",
            "max_steps": f"{s['max_steps']:,} steps", "tokens_per_step": f"of {s['tokens_per_step']:,} tokens", "learning_rate": f"lr {s['learning_rate']:g}"}  # fmt: skip
    more = [f"{key} {s[key]}" for key in SHARED if key not in (*told, "seed") and len({str(c.settings[key]) for c in cells}) > 1]
    return " ".join([*told.values(), *more])


def write(cells, best, out):
    """report.md and its PNGs in folder `out`; returns the Markdown."""
    out.mkdir(parents=True, exist_ok=True)
    parts = [
        f"Loss: the mean of the last {TAIL} evaluations, nats per token. Δ is paired by seed, negative is better. ±: a standard error over seeds.",
        "Compute gain: how much more compute the baseline would need for the same loss, if L = A C^-α; α is fitted to the lower envelope of its",
        "curves, then to the final points of its scales where there are several; the last, 0.150, is assumed (as steep as Chinchilla's).\n",
    ]
    pool = lambda cell: (cell.settings["data"], best or cell.settings["learning_rate"])
    grids = defaultdict(dict)
    for i, cell in enumerate(cells, 1):
        alphas = exponents([c for c in cells if pool(c) == pool(cell)])
        cell.title = title(cell, cells)
        image = f"curves_{i}.png" if len(cells) > 1 else "curves.png"
        plot_curves(cell, out / image)
        parts += [f"## {cell.title}\n", f"![{cell.title}]({image})\n", step_table(cell), score_table(cell, best, alphas)]
        by_heads = {r.heads: tuple(score(x, cell, cell.budgets[-1])[0] for x in (r.losses, r.deltas)) for r in cell.rows if r.heads}
        grids[shared(cell, "seed", "n_kv_head", "learning_rate" * best)][cell.settings["n_kv_head"]] = by_heads
    wide = [grid for grid in grids.values() if len(grid) > 1 and max(map(len, grid.values())) > 1]
    for i, grid in enumerate(wide, 1):
        image = f"grid_{i}.png" if len(wide) > 1 else "grid.png"
        plot_grid(grid, cells[0].rows[0].method, out / image)
        parts += ["Loss (Δ) over n_kv_head and routing heads H:\n", grid_table(grid), f"![KV heads and routing heads]({image})\n"]
    if swept := [cell for cell in cells if len([row for row in cell.rows if row.heads]) > 2]:
        plot_heads(swept, out / "heads.png")
        parts += ["![How many heads?](heads.png)\n"]
    (out / "report.md").write_text("\n".join(parts), encoding="utf-8")
    return "\n".join(part for part in parts if not part.startswith("!["))


def main():
    parser = Parser(prog="report.py", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a folder that train.py wrote")
    parser.add_argument("--baseline", default="baseline", help="the method to compare to (attnres, mhar-h8, hc-static ...), or a RUN of it")
    parser.add_argument("--best", action="store_true", help="each method at the learning rate where its loss is lowest")
    parser.add_argument("--budgets", default="", help="steps, with commas, at which to read the tail means; default: the end")
    parser.add_argument("--out_dir", default="report", help="where report.md and the PNGs go")
    args = parser.parse_args()
    if args.budgets and not all(step.isdecimal() for step in args.budgets.split(",")):
        raise UserError(f"--budgets={args.budgets} is no list of steps: write them with commas and without spaces, as in --budgets=20000,60000")
    runs = [load(folder) for folder in dict.fromkeys(Path(folder) for folder in args.runs)]
    name_methods(runs)
    methods = {run.name: run.method for run in runs}
    baseline = methods.get(str(Path(args.baseline)), args.baseline)
    if baseline not in methods.values():
        names = ", ".join(sorted(set(methods.values())))
        raise UserError(f"none of these runs is a {baseline} to compare to: add one, or give --baseline= one of {names}")
    if set(methods.values()) == {baseline}:
        raise UserError(f"all of these runs are {baseline}: name a run of another method to compare")
    cells = compare(runs, baseline, args.best, sorted({int(step) for step in args.budgets.split(",") if args.budgets}))
    print(write(cells, args.best, output_folder(args.out_dir, "--out_dir")))
    print(f"{args.out_dir}/report.md holds these tables and the plots beside it")


if __name__ == "__main__":
    cli(main)
