"""report.py on planted logs: hand-computed intervals and gains, and what it refuses to pair."""

import json
import sys

from configurator import UserError

import matplotlib.image
import numpy as np
import pytest

import report

MODEL = dict(
    block_size=64, n_kv_head=2, residual="baseline", route_heads=8, hc_dynamic=True, route_init="zero"
)
TRAIN = dict(seed=1, max_steps=1000, warmup_steps=100, learning_rate=1e-3, weight_decay=0.1, init_from=None)
FREE = dict(dataset="data/stdlib", eval_windows=64, out_dir="out/x", batch_size=8)  # not in "defaults"
EVENT = dict(dtype="float32", flops_per_token=300_000, tokens_per_step=512, sha="abc")


@pytest.fixture
def plant(tmp_path):
    """plant(name, loss, **settings): a run whose loss at step 50, 100 ... is loss(step), or the constant."""

    def make(name, loss, steps=None, lacks=(), new={}, **changes):  # noqa: B006
        parts = MODEL, TRAIN | FREE, EVENT
        model, train, event = ({k: changes.get(k, v) for k, v in part.items()} for part in parts)
        defaults = MODEL | TRAIN | dict.fromkeys(new, 0)
        train, defaults = ({k: v for k, v in d.items() if k not in lacks} for d in (train | new, defaults))
        data, params = {"sha256": event.pop("sha"), "val_sha256": "def"}, {"total": 36032, "routing": 0}
        start = {"event": "start", "config": train, "model_config": model, "params": params, "data": data}
        events = [start | event | {"defaults": defaults}, {"event": "train", "step": 10, "loss": 5.0}]
        for step in steps or range(50, train["max_steps"] + 1, 50):
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
    assert report.score_table(cell, False, [0.15]).splitlines()[2:] == [
        "| baseline | 36,032 | 4 | 3.0000 ± 0.2041 |  |  |  |",
        "| mhar-h8 | 36,032 | 3 | 2.9500 ± 0.2771 | -0.0500 ± 0.0115 | -0.0997 to -0.0003 | 1.12x |",
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
    assert "-0.1000 | -0.0636 | one seed" in text
    lines = report.step_table(cell).splitlines()
    assert lines[0] == "| step | baseline | Δ mhar-h8 |"
    assert lines[2] == "| 100 | 3.0000 | -0.1000 |" and lines[-1] == "| 1,000 | 3.0000 | -0.0500 |"


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
    own = dict(residual="gated", new={"gated_start": 0.5})
    assert len(cells_of(base, plant("m", 2.9, residual="mhar"), plant("g", 2.8, **own))[0].rows) == 3
    other = plant("n", 2.9, residual="mhar", weight_decay=0.2)
    assert "weight_decay (0.2 against 0.1)" in mistake(base, other)


def test_unfinished_twins_and_other_steps_are_refused(plant):
    base, half = plant("b", 3.0), plant("half", 2.9, steps=[50, 100, 150], residual="mhar")
    assert "no evaluation at step 1000: resume it, or give --budgets=150" in mistake(base, half)
    assert len(cells_of(base, half, budgets=[150])[0].rows) == 2
    assert "twin are both baseline, seed 1: omit one" in mistake(base, plant("twin", 3.0))
    assert "evaluated at other steps" in mistake(base, plant("odd", 2.9, steps=[100, 1000], residual="mhar"))


def test_method_names(plant):
    variants = [dict(), dict(residual="attnres"), dict(residual="delta"), dict(residual="hc")]
    variants += [dict(residual="hc", hc_dynamic=False), dict(residual="mhar", route_heads=4)]
    variants += [dict(residual="mhar", route_heads=4, route_init="normal")]
    (cell,) = cells_of(*(plant(str(i), 3, **variant) for i, variant in enumerate(variants)))
    names = ["baseline", "attnres", "delta-h8", "hc-dynamic", "hc-static", "mhar-h4 route_init=normal"]
    assert [row.method for row in cell.rows][:6] == names


def test_best_learning_rate_per_method(plant):
    """Paired by seed across rates. The extra seed of one rate does not decide the choice."""
    runs = [plant("1", 3.0), plant("2", 3.2, learning_rate=5e-4), plant("3", 3.3, residual="attnres")]
    runs.append(plant("4", 3.1, residual="attnres", learning_rate=5e-4))
    (cell,) = cells_of(*runs, plant("extra", 2.0, learning_rate=5e-4, seed=2), best=True)
    line = "| attnres | 36,032 | 1 | 3.1000 | 0.0005 | +0.1000 | one seed |  |"
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
    for image in ("curves_1.png", "curves_2.png", "heads.png"):
        assert f"({image})" in text
        pixels = matplotlib.image.imread(tmp_path / "report" / image)
        assert pixels.shape[1] > 700 and pixels[..., :3].std() > 0.05


def test_one_run_and_a_folder_that_is_none(plant, tmp_path, monkeypatch, capsys):
    run = plant("m", lambda step: 3 + 10 / step, residual="mhar", init_from="out/base")
    main(monkeypatch, run, tmp_path, f"--out_dir={tmp_path}/r")
    said = capsys.readouterr().out
    assert f"{tmp_path} is skipped: it has no log.jsonl" in said and f"{run} started from out/base" in said
    assert "| 1,000 | 3.0100 |" in said and "| method | parameters | seeds | loss |" in said
    assert matplotlib.image.imread(tmp_path / "r/curves.png").shape[1] > 700


def test_mistakes(plant, tmp_path, monkeypatch):
    base, mhar, hc = plant("b", 3.0), plant("m", 2.9, residual="mhar"), plant("h", 3.0, residual="hc")
    cut, empty, old = (plant(name, 3.0) / "log.jsonl" for name in ("cut", "empty", "old"))
    cut.write_text(cut.read_text() + '{"event": "val", "st')
    empty.write_text(empty.read_text().splitlines()[0])
    old.write_text(old.read_text().replace('"defaults"', '"other"'))
    for argv, words in {
        (tmp_path,): "none of these is a run",
        (mhar, hc): "one of hc-dynamic, mhar-h8",
        (cut.parent, mhar): "log.jsonl:23 is cut",
        (empty.parent, mhar): "no evaluation yet",
        (old.parent, mhar): "another version",
        (base, mhar, "--budgets=1k"): "--budgets",
    }.items():
        with pytest.raises(UserError, match=words):
            main(monkeypatch, *argv, f"--out_dir={tmp_path}/r")
    assert not (tmp_path / "r").exists()
    main(monkeypatch, base, mhar, f"--baseline={mhar}", f"--out_dir={tmp_path}/r")
    assert "Δ to mhar-h8" in (tmp_path / "r/report.md").read_text()
