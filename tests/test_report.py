"""report.py on planted logs: hand-computed intervals and gains, and what it refuses to pair."""

import json
import os
import subprocess
import sys
from pathlib import Path

from configurator import UserError

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure
from test_probe import dataset  # noqa: F401

import report

MODEL = dict(  # in the order of GPTConfig: the settings of residual methods come last
    block_size=64, n_kv_head=2, residual="baseline", route_heads=8, hc_form="dynamic", route_init="zero"
)  # fmt: skip
TRAIN = dict(seed=1, max_steps=1000, warmup_steps=100, learning_rate=1e-3, weight_decay=0.1, init_from=None)
TRAIN |= dict(route_lr_scale=1.0)
ROUTED = ("attnres", "mhar", "delta", "block")  # their logs have entropies
FREE = dict(dataset="data/stdlib", eval_windows=64, out_dir="out/x", batch_size=8)  # not in "defaults"
EVENT = dict(dtype="float32", flops_per_token=300_000, tokens_per_step=512, sha="abc")


@pytest.fixture
def plant(tmp_path):
    """plant(name, loss, **settings): a run whose loss at step 50, 100 ... is loss(step), or the constant."""

    def make(name, loss, steps=None, lacks=(), new={}, own={}, **changes):  # noqa: B006
        parts = MODEL, TRAIN | FREE, EVENT
        model, train, event = ({k: changes.get(k, v) for k, v in part.items()} for part in parts)
        defaults = MODEL | TRAIN | dict.fromkeys(new, 0)
        train, defaults = ({k: v for k, v in d.items() if k not in lacks} for d in (train | new, defaults))
        model, defaults = model | own, defaults | dict.fromkeys(own, 0)
        data, params = {"sha256": event.pop("sha"), "val_sha256": "def"}, {"total": 36032, "routing": 0}
        start = {"event": "start", "config": train, "model_config": model, "params": params, "data": data}
        events = [start | event | {"defaults": defaults}, {"event": "train", "step": 10, "loss": 5.0}]
        for step in steps or range(50, train["max_steps"] + 1, 50):
            entropy = {"route_entropy": 2 - step / 1000} if model["residual"] in ROUTED else {}
            events.append({"event": "train", "step": step, "loss": 5.0} | entropy)
            events.append({"event": "val", "step": step, "loss": loss(step) if callable(loss) else loss})
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        return tmp_path / name

    return make


def cells_of(*folders, best=False, budgets=()):
    runs = [report.load(folder) for folder in folders]
    report.name_methods(runs)
    return report.compare(runs, "baseline", best, list(budgets))


def mistake(*folders, **kwargs):
    with pytest.raises(UserError) as caught:
        cells_of(*folders, **kwargs)
    return str(caught.value)


def main(monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", ["report.py", *map(str, argv)])
    report.main()


def test_tail_mean_and_paired_interval(plant):
    """Differences -0.05, -0.07, -0.03 have mean -0.05, error 0.02 / sqrt 3 = 0.0115 and, at t(2) = 4.3, the
    interval -0.05 -+ 0.049683. The baseline's fourth seed has no part in them."""
    base = {1: 3.0, 2: 3.5, 3: 2.5, 4: 3.0}
    runs = [plant(f"b{seed}", base[seed], seed=seed) for seed in base]
    for seed, delta in ((3, -0.03), (1, -0.05), (2, -0.07)):
        runs.append(plant(f"m{seed}", base[seed] + delta, seed=seed, residual="mhar"))
    (cell,) = cells_of(*runs)
    paired = "-0.0500 ± 0.0115 | -0.0997 to -0.0003 | 1.12x |"
    assert report.score_table(cell, False, [0.15]).splitlines()[2:] == [
        "| baseline | 36,032 | 4 | 3.0000 ± 0.2041 | 3.0000 ± 0.2041 |  |  |  |",
        f"| mhar-h8 | 36,032 | 3 | 2.9500 ± 0.2771 | 2.9500 ± 0.2771 | {paired}",
    ]
    for df, t in ((1, 12.7062), (10, 2.22814), (11, 2.20099), (30, 2.04227)):  # as printed in tables
        _, error, half = report.score(
            np.arange(df + 1.0)[:, None], report.SimpleNamespace(steps=np.ones(1)), 1
        )
        assert half / error == pytest.approx(t, rel=1e-3)


def test_budgets_and_the_tables_within_runs(plant):
    """At step 1,000 the tail mean is of steps 500 to 1,000: (3 * -0.1 + 8 * -0.05) / 11."""
    runs = [plant("b", 3.0), plant("m", lambda step: 2.9 if step <= 600 else 2.95, residual="mhar")]
    (cell,) = cells_of(*runs, budgets=[600, 1000])
    text = report.score_table(cell, False, [])
    assert "Δ to baseline, step 600 | Δ to baseline, step 1,000" in text
    assert "| 2.9500 | 2.9364 | -0.1000 | -0.0636 | one seed" in text  # the last evaluation's, the tail mean
    columns = {"baseline": cell.rows[0].losses, "Δ mhar-h8": cell.rows[1].deltas}
    lines = report.step_table(cell.steps, columns).splitlines()
    assert lines[0] == "| step | baseline | Δ mhar-h8 |"
    assert lines[2] == "| 100 | 3.0000 | -0.1000 |" and lines[-1] == "| 1,000 | 3.0000 | -0.0500 |"


def test_when_heads_overtake_one(plant):
    """From the first evaluation after the last at which the mean over the seeds is not below attnres's."""
    curves = {
        4: lambda step: 2.8 if step > 400 else 3,
        8: lambda step: 2.8 if 300 < step != 600 else 3,
        2: 2.9,
    }
    runs = []
    for seed in (1, 2):
        runs += [plant(f"b{seed}", 3.1, seed=seed), plant(f"a{seed}", 2.9, seed=seed, residual="attnres")]
        for heads, curve in curves.items():
            where = dict(seed=seed, residual="mhar", route_heads=heads)
            runs.append(plant(f"h{heads}-{seed}", curve, **where))
    (cell,) = cells_of(*runs)
    head, _, *lines = [line.split(" | ") for line in report.score_table(cell, False, [0.15]).splitlines()]
    column = head.index("below attnres from step")
    assert [line[column] for line in lines] == ["never", "", "never", "450", "650"]


def test_compute_equivalent_gain(plant):
    """Scales on L = 20 C^-0.08; the loss of 1.5 times the compute is a gain of 1.5. A wide model that starts
    badly lies above the narrow one's curve: only its later points count."""
    runs = []
    for width in (1, 2, 4):
        law = lambda step, k, width=width: 20 * (k * 3e5 * 512 * width**2 * step) ** -0.08
        bad = lambda step, width=width: (step <= 100) + (width == 4 and step < 500)
        size = dict(tokens_per_step=512 * width**2, block_size=width)
        runs.append(plant(f"b{width}", lambda step, law=law, bad=bad: law(step, 1) + bad(step), **size))
        runs.append(plant(f"m{width}", lambda step, law=law: law(step, 1.5), residual="mhar", **size))
    cells = cells_of(*runs)
    assert report.exponents(cells) == pytest.approx([0.08, 0.15], abs=1e-6)
    assert report.score_table(cells[0], False, [0.08, 0.15]).endswith(
        "| 1.50x / 1.24x |\n"
    )  # 1.5 ** (8 / 15)


UNEQUAL = [
    (dict(sha="xyz"), "data (stdlib abc def against stdlib xyz def)"),
    (dict(seed=2), "seed (1 against 2)"),
    (dict(block_size=9, max_steps=50), "block_size (64 against 9), max_steps (1000 against 50)"),
    (dict(eval_windows=9), "eval_windows (64 against 9)"),
    (dict(dtype="bfloat16"), "dtype (float32 against bfloat16)"),
    (dict(new={"label_smoothing": 0.1}), "label_smoothing (0 against 0.1)"),  # a setting of a later version
    (dict(init_from="out/base"), "init_from (None against a checkpoint)"),
]


@pytest.mark.parametrize("change, words", UNEQUAL)
def test_unequal_runs_are_refused(plant, change, words):
    far = plant("far", 3.0, seed=7, block_size=7, max_steps=50)  # the nearest is named, not this
    message = mistake(plant("m", 2.9, residual="mhar"), plant("b", 3.0, **change), far)
    assert "m (mhar-h8) has no baseline partner" in message and message.endswith(f"b differs in {words}")


def test_what_may_differ(plant):
    """A setting that a log lacks has its default; settings of the machine and of the methods may differ."""
    base = plant("b", 3.0, lacks=["weight_decay"], batch_size=2, route_heads=2, route_init="normal")
    own = dict(residual="gated", own={"start_at": 0.5})
    scaled = plant("m", 2.9, residual="mhar", route_lr_scale=8.0)
    assert len(cells_of(base, scaled, plant("g", 2.8, **own))[0].rows) == 3
    other = plant("n", 2.9, residual="mhar", weight_decay=0.2)
    assert "weight_decay (0.2 against 0.1)" in mistake(base, other)
    block = plant("block", 2.9, residual="block", block_size=32)  # not a setting of the method called block
    assert "block_size (32 against 64)" in mistake(base, block)


def test_unfinished_twins_and_other_steps_are_refused(plant):
    base, half = plant("b", 3.0), plant("half", 2.9, steps=[50, 100, 150], residual="mhar")
    assert "no evaluation at step 1000: resume it, or give --budgets=150" in mistake(base, half)
    assert len(cells_of(base, half, budgets=[150])[0].rows) == 2
    assert "twin are both baseline, seed 1: omit one" in mistake(base, plant("twin", 3.0))
    assert "evaluated at other steps" in mistake(base, plant("odd", 2.9, steps=[100, 1000], residual="mhar"))


def test_method_names(plant):
    variants = [dict(), dict(residual="attnres"), dict(residual="delta"), dict(residual="hc")]
    variants += [dict(residual="hc", hc_form="static"), dict(residual="mhar", route_heads=4)]
    variants += [dict(residual="mhar", route_heads=4, route_init="normal")]
    variants += [dict(residual="mhar", route_lr_scale=scale) for scale in (2.83, 8.0)]
    (cell,) = cells_of(*(plant(str(i), 3, **variant) for i, variant in enumerate(variants)))
    names = ["baseline", "attnres", "delta-h8", "hc-dynamic", "hc-static", "mhar-h4 route_init=normal"]
    names += ["mhar-h4 route_init=zero", "mhar-h8 x2.83 route_init=zero", "mhar-h8 x8 route_init=zero"]
    assert [row.method for row in cell.rows] == names
    (cell,) = cells_of(plant("b", 3), plant("x", 3, residual="mhar", route_lr_scale=8.0))
    assert [row.method for row in cell.rows] == ["baseline", "mhar-h8 x8"] and not cell.rows[1].heads


def test_best_learning_rate_per_method(plant):
    """Paired by seed across rates. The extra seed of one rate does not decide the choice."""
    runs = [plant("1", 3.0), plant("2", 3.2, learning_rate=5e-4), plant("3", 3.3, residual="attnres")]
    runs.append(plant("4", 3.1, residual="attnres", learning_rate=5e-4))
    (cell,) = cells_of(*runs, plant("extra", 2.0, learning_rate=5e-4, seed=2), best=True)
    line = "| attnres | 36,032 | 1 | 3.1000 | 3.1000 | 0.0005 |  | +0.1000 | one seed |  |"
    assert line in report.score_table(cell, True, [])
    assert len(cells_of(*runs)) == 2  # without --best: two comparisons, each at its own rate


def test_a_whole_sweep(plant, tmp_path, monkeypatch):
    """Heads x kv x seeds: the report, its curves over steps and over heads."""
    runs = []
    for kv, seed in ((1, 1), (1, 2), (2, 1), (2, 2)):
        where = dict(n_kv_head=kv, seed=seed)
        runs.append(plant(f"b-{kv}-{seed}", lambda s, seed=seed: 3.3 + 0.01 * seed + 10 / s, **where))
        for h in (1, 4, 8):
            curve = lambda s, h=h, seed=seed: 3.2 - h / 100 + 0.011 * seed + 10 / s
            runs.append(plant(f"{h}-{kv}-{seed}", curve, residual="mhar", route_heads=h, **where))
    main(monkeypatch, *runs, f"--out_dir={tmp_path}/report")
    text = (tmp_path / "report/report.md").read_text()
    assert "## stdlib, 1,000 steps of 512 tokens, n_kv_head 2" in text
    assert text.count("| mhar-h8 | 36,032 | 2 |") == 2
    for image in ("losses_1.png", "deltas_1.png", "deltas_2.png", "entropy_2.png", "heads.png"):
        assert f"({image})" in text
        pixels = matplotlib.image.imread(tmp_path / "report" / image)
        assert pixels.shape[1] > 700 and pixels[..., :3].std() > 0.05


def test_names_at_the_ends_of_curves():
    """Eleven curves that end in three places: no name touches another or the axes, all are in the picture and
    in the order of their curves. What has room stays where its curve ends."""
    figure = Figure((9, 4.8), layout="tight")
    axis = figure.subplots()
    ends = [(-0.3 + i / 1000, f"mhar-h{i} x2.83", "red") for i in range(6)]
    ends += [(-0.15, "alone", "blue"), *((i / 1000, f"hc-{i}", "green") for i in range(4))]
    for y, _, color in ends:
        axis.plot([0, 4000], [0, y], color=color)
    axis.set(ylim=(-0.3, 0.003), xmargin=0)
    report.label_ends(axis, ends)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axis.texts]
    assert [text.get_text() for text in axis.texts] == [name for _, name, _ in ends]
    assert all(below.y1 <= above.y0 for below, above in zip(boxes, boxes[1:]))
    assert all(box.x0 > axis.bbox.x1 and box.x1 < figure.bbox.x1 for box in boxes)
    assert boxes[0].y0 > 0 and boxes[-1].y1 < figure.bbox.y1
    assert axis.texts[6].get_position()[1] == pytest.approx(0.15 / 0.303)


def test_one_run_and_a_folder_that_is_none(plant, tmp_path, monkeypatch, capsys):
    run = plant("m", lambda step: 3 + 10 / step, residual="mhar", init_from="out/base")
    main(monkeypatch, run, tmp_path, f"--out_dir={tmp_path}/r")
    said = capsys.readouterr().out
    assert f"{tmp_path} is skipped: " in said and f"{run} started from out/base" in said
    assert "| 1,000 | 3.0100 |" in said and "| 1,000 | 1.0000 |" in said  # loss, entropy
    assert "| method | parameters | seeds | final loss | tail mean |" in said
    assert {path.name for path in (tmp_path / "r").iterdir()} == {"report.md", "losses.png", "entropy.png"}
    assert matplotlib.image.imread(tmp_path / "r/losses.png").shape[1] > 700


def test_mistakes(plant, tmp_path, monkeypatch):
    base, mhar, hc = plant("b", 3.0), plant("m", 2.9, residual="mhar"), plant("h", 3.0, residual="hc")
    cut, empty, old = (plant(name, 3.0) / "log.jsonl" for name in ("cut", "empty", "old"))
    cut.write_text(cut.read_text()[:-20])
    empty.write_text(empty.read_text().splitlines()[0])
    old.write_text(old.read_text().replace('"defaults"', '"other"'))
    for argv, words in {
        (tmp_path,): "none of these is a run",
        (mhar, hc): "one of hc-dynamic, mhar-h8",
        (cut.parent, mhar): "no evaluation at step 1000",
        (empty.parent, old.parent): "none of these is a run",
        (base, mhar, "--budgets=1k"): "--budgets",
    }.items():
        with pytest.raises(UserError, match=words):
            main(monkeypatch, *argv, f"--out_dir={tmp_path}/r")
    assert not (tmp_path / "r").exists()
    main(monkeypatch, base, mhar, f"--baseline={mhar}", f"--out_dir={tmp_path}/r")
    assert "Δ to mhar-h8" in (tmp_path / "r/report.md").read_text()


def test_make_study(dataset, tmp_path):  # noqa: F811
    """Two tiny runs, a probe and the report. Without their checkpoints they still count as finished."""
    tiny = (
        "--n_layer=2 --n_embd=32 --n_head=2 --ffn_dim=32 --block_size=16 --batch_size=2 --global_batch_size=2"
    )
    tiny += f" --max_steps=4 --warmup_steps=1 --eval_interval=2 --eval_windows=2 --dataset={dataset}"
    lists = dict(METHODS="baseline mhar", HEADS="2_x8", KV=1, SEEDS=1, EXTRA=tiny, OUT=tmp_path)
    variables = [f"{name}={value}" for name, value in lists.items()]
    root, here = Path(report.__file__).parent, Path(sys.executable).parent
    command = ["make", "-C", root, "study", *variables, f"BIN={here}", "-o", ".venv/ready"]

    def study():
        env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = study()
    assert "| baseline | Δ mhar-h2 x8 |" in said and "learned excess" in said
    logs = {path: path.read_text() for path in tmp_path.glob("*_kv1_lr5e-4_s1/log.jsonl")}
    assert len(logs) == 2 and (tmp_path / "report/deltas.png").exists()
    for step in tmp_path.glob("*/step_*"):
        step.rename(tmp_path / f"lost_{step.parent.name}")
    again = study()
    assert again.count("is finished") == 2 and "learned excess" not in again
    assert again[again.index("Final loss") :] == said[said.index("Final loss") :]
    assert logs == {path: path.read_text() for path in logs}
