"""report.py on planted logs: hand-computed intervals and gains, and what it refuses.  pytest tests/test_report.py"""

import ast
import json
import math
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import report
from configurator import UserError

MODEL = dict(
    block_size=64, vocab_size=320, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, head_dim=8, ffn_dim=64, rope_theta=1e4, norm_eps=1e-6, qk_norm=True
)
MODEL |= dict(
    tie_embeddings=True, residual="baseline", route_heads=8, hc_streams=4, hc_dynamic=True, delta_blocks=8, delta_recursive=False, route_init="zero"
)
TRAIN = dict(
    dataset="stdlib", seed=1, max_steps=1000, warmup_steps=100, learning_rate=1e-3, min_lr_ratio=0.1, lr_schedule="cosine", beta1=0.9, beta2=0.95
)
TRAIN |= dict(
    adam_eps=1e-8, weight_decay=0.1, decay_norms=True, decay_embeddings=True, decay_hc_static=False, route_weight_decay=None, route_lr_scale=1.0
)
TRAIN |= dict(grad_clip=1.0, z_loss=0.0, dtype="auto", param_dtype="float32", init_from=None, eval_windows=64)


@pytest.fixture
def plant(tmp_path):
    """plant(name, loss, **settings): a run folder whose loss at step 50, 100 ... max_steps is loss(step), or the constant."""

    def make(name, loss, steps=None, sha="abc", **settings):
        model = {key: settings.get(key, value) for key, value in MODEL.items()}
        train = {key: settings.get(key, value) for key, value in TRAIN.items()}
        start = {
            "event": "start",
            "config": train,
            "model_config": model,
            "params": {"total": 36032, "routing": 0},
            "device": "cpu",
            "kernel": "torch",
        }
        start |= {"dtype": settings.get("dtype", "float32"), "flops_per_token": settings.get("flops_per_token", 300_000)}
        start |= {"tokens_per_step": settings.get("tokens_per_step", 512), "data": {"dataset": train["dataset"], "sha256": sha, "val_sha256": "def"}}
        events = [start, {"event": "train", "step": 10, "loss": 5.0}]
        value = loss if callable(loss) else lambda step: loss
        events += [{"event": "val", "step": s, "loss": value(s), "loss_ema": None} for s in steps or range(50, train["max_steps"] + 1, 50)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        return tmp_path / name

    return make


def cells_of(*folders, baseline="baseline", best=False, budgets=()):
    runs = [report.load(folder) for folder in folders]
    report.name_methods(runs)
    return report.compare(runs, baseline, best, list(budgets))


def mistake(*folders, **kwargs):
    with pytest.raises(UserError) as caught:
        cells_of(*folders, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_settings_are_train_py_s():
    """The planted logs, and the fields that decide on pairing, have the names of the real dataclasses."""
    fields = set()
    for file, schema in (("train.py", "TrainConfig"), ("model.py", "GPTConfig")):
        body = next(n.body for n in ast.parse((ROOT / file).read_text()).body if isinstance(n, ast.ClassDef) and n.name == schema)
        fields |= {node.target.id for node in body if isinstance(node, ast.AnnAssign)}
    assert MODEL.keys() | TRAIN.keys() <= fields
    assert set(report.SHARED) - {"data", "tokens_per_step"} <= fields
    assert {field for variant in report.VARIANT.values() for field in variant} <= fields


def test_t_quantiles():
    """Two-sided 95% points as every table prints them."""
    for df, t in ((1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (5, 2.57058), (9, 2.26216), (10, 2.22814), (30, 2.04227), (120, 1.97993)):
        assert report.t_critical(df) == pytest.approx(t, abs=1e-4)
    assert report.t_critical(4, 0.99) == pytest.approx(4.60409, abs=1e-4)


def test_tail_mean_and_paired_interval(plant):
    """Seeds differ by far more than methods do; differences -0.05, -0.07, -0.03 have mean -0.05, deviation 0.02, standard error
    0.02 / sqrt 3 = 0.011547 and, at t(2) = 4.30265, the interval -0.05 -+ 0.049683."""
    base = {1: 3.0, 2: 3.5, 3: 2.5}
    runs = [plant(f"b{seed}", base[seed], seed=seed) for seed in base]
    runs += [plant(f"m{seed}", base[seed] + d, seed=seed, residual="mhar") for seed, d in ((3, -0.03), (1, -0.05), (2, -0.07))]
    (cell,) = cells_of(*runs)
    baseline, mhar = cell.rows
    assert (baseline.method, mhar.method, mhar.heads) == ("baseline", "mhar-h8", 8)
    mean, error, half = report.score(mhar.deltas, cell, 1000)
    assert (mean, error, half) == pytest.approx((-0.05, 0.0115470, 0.0496828), abs=1e-6)
    assert report.score(baseline.losses, cell, 1000)[:2] == pytest.approx((3.0, 0.5 / math.sqrt(3)))
    assert report.score_table(cell, False, {"assumed": 0.15}).splitlines()[2:] == [
        "| baseline | 36,032 | 3 | 3.0000 ± 0.2887 |  |  |  |",
        "| mhar-h8 | 36,032 | 3 | 2.9500 ± 0.2771 | -0.0500 ± 0.0115 | -0.0997 to -0.0003 | 1.12x |",
    ]


def test_a_baseline_with_more_seeds(plant):
    """Seeds 2 and 3 of the method meet seeds 2 and 3 of the baseline, in the difference and in the gain: 3.0 / 2.0 each."""
    runs = [plant(f"b{seed}", loss, seed=seed) for seed, loss in ((1, 9.0), (2, 3.0), (3, 6.0))]
    runs += [plant("m3", 4.0, seed=3, residual="mhar"), plant("m2", 2.0, seed=2, residual="mhar")]
    (cell,) = cells_of(*runs)
    assert cell.rows[1].deltas[:, 0].tolist() == [-1.0, -2.0]
    assert report.score_table(cell, False, {"assumed": 0.5}).endswith("| 2.25x |\n")  # (4.5 / 3.0) ** 2


def test_tail_is_the_last_eleven(plant):
    falling = plant("a", lambda step: 4 - step / 1000)  # evaluations at 500, 550 ... 1000: mean 3.25
    short = plant("b", lambda step: 4 - step / 1000, max_steps=200)  # 50, 100, 150, 200: all there are
    cells = cells_of(falling, short)
    assert [report.score(cell.rows[0].losses, cell, cell.budgets[-1])[0] for cell in cells] == pytest.approx([3.25, 3.875])


def test_two_budgets_within_runs(plant):
    runs = [plant("b", 3.0), plant("m", lambda step: 2.9 if step <= 600 else 2.95, residual="mhar")]
    (cell,) = cells_of(*runs, budgets=[600, 1000])
    gaps = [report.score(cell.rows[1].deltas, cell, budget)[0] for budget in (600, 1000)]
    assert gaps == pytest.approx([-0.1, (3 * -0.1 + 8 * -0.05) / 11])
    assert "Δ to baseline, step 600 | Δ to baseline, step 1,000" in report.score_table(cell, False, {})
    assert "-0.1000 | -0.0636 | one seed" in report.score_table(cell, False, {})


def test_same_step_table(plant):
    (cell,) = cells_of(plant("b", lambda s: 3 + s / 1e4), plant("m", lambda s: 3, residual="mhar"), plant("a", lambda s: 3.1, residual="attnres"))
    lines = report.step_table(cell).splitlines()
    assert lines[0] == "| step | baseline | Δ attnres | Δ mhar-h8 |" and len(lines) == 2 + 10
    assert lines[2] == "| 100 | 3.0100 | +0.0900 | -0.0100 |" and lines[-1] == "| 1,000 | 3.1000 | +0.0000 | -0.1000 |"


def test_compute_equivalent_gain(plant):
    """Three scales on L = 20 C^-0.08; a method whose loss is that of 1.5 times the compute has a gain of 1.5."""
    runs = []
    for width in (32, 64, 128):
        per_token = 300_000
        law = lambda step, per_token=per_token, width=width, k=1.0: 20 * (k * per_token * 512 * (width / 32) ** 2 * step) ** -0.08
        size = dict(n_embd=width, tokens_per_step=512 * (width // 32) ** 2)
        runs += [plant(f"b{width}", law, **size), plant(f"m{width}", lambda s, law=law: law(s, k=1.5), residual="mhar", **size)]
    cells = cells_of(*runs)
    assert report.exponents(cells)["envelope"] == pytest.approx(0.08, abs=1e-6)
    finals = report.exponents(cells)["final points"]
    assert finals == pytest.approx(0.08, abs=1e-6)  # tail means are the same multiple of the last point at each scale
    for cell in cells:
        text = report.score_table(cell, False, report.exponents(cells))
        assert "compute gain at α = 0.080 / 0.080 / 0.150 |" in text and text.endswith("| 1.50x / 1.50x / 1.24x |\n")  # 1.5 ** (0.08 / 0.15) = 1.241
    assert report.exponents(cells[:1]).keys() == {"envelope", "assumed"}


def test_envelope_leaves_out_what_more_compute_did_worse(plant):
    """A wide model that starts badly lies above the narrow one's curve at the same compute: only its later points count."""
    narrow = plant("n", lambda s: 10 * (s * 512) ** -0.1 if s > 100 else 9.0 - s / 100)  # and warm-up is no power law
    wide = plant("w", lambda s: 10 * (s * 5120) ** -0.1 + (1 if s < 500 else 0), n_embd=64, tokens_per_step=5120)
    assert report.exponents(cells_of(narrow, wide))["envelope"] == pytest.approx(0.1, abs=1e-6)


def test_paper_s_gains():
    """The paper's losses and exponents give the paper's factors (section 3.2): 1.3, 1.8 and 1.7 at 0.089, 1.15 to 1.4 at 0.15."""
    pairs = ((3.031, 2.969), (2.997, 2.848), (2.894, 2.754))
    assert [round((b / m) ** (1 / 0.089), 1) for b, m in pairs] == [1.3, 1.8, 1.7]


@pytest.mark.parametrize("change, words", [
    (dict(sha="xyz"), "data (stdlib abc def against stdlib xyz def)"), (dict(seed=2), "seed (1 against 2)"), (dict(max_steps=500), "max_steps (1000 against 500)"),
    (dict(tokens_per_step=1024), "tokens_per_step (512 against 1024)"), (dict(block_size=32, n_layer=3), "block_size (64 against 32), n_layer (2 against 3)"),
    (dict(learning_rate=5e-4), "learning_rate (0.001 against 0.0005)"), (dict(weight_decay=0.0), "weight_decay")])  # fmt: skip
def test_unequal_runs_are_refused(plant, change, words):
    message = mistake(plant("m", 2.9, residual="mhar"), plant("b", 3.0, **change))
    assert "m (mhar-h8) has no baseline run to be paired with" in message and words in message


def test_the_nearest_partner_is_named(plant):
    far, near = plant("far", 3.0, seed=2, max_steps=500), plant("near", 3.0, seed=3)
    message = mistake(far, near, plant("m", 2.9, residual="mhar"))
    assert "near, differs in seed (1 against 3)" in message


def test_unfinished_twins_and_other_steps_are_refused(plant):
    base, half = plant("b", 3.0), plant("half", 2.9, steps=[50, 100, 150], residual="mhar")
    assert "no evaluation at step 1000, its last is at 150: resume it, or give --budgets=150" in mistake(base, half)
    assert "no evaluation at step 130, the nearest is at 150: give --budgets=150" in mistake(base, half, budgets=[130])
    assert report.score(cells_of(base, half, budgets=[150])[0].rows[1].deltas, cells_of(base, half, budgets=[150])[0], 150)[0] == pytest.approx(-0.1)
    twin = plant("twin", 3.0)
    assert "b and" in mistake(base, twin) and "twin are both baseline with seed 1" in mistake(base, twin)
    assert "evaluated at other steps" in mistake(base, plant("odd", 2.9, steps=[100, 1000], residual="mhar"))


def test_method_names(plant):
    runs = [plant("a", 3, residual="attnres"), plant("m4", 3, residual="mhar", route_heads=4), plant("n4", 3, residual="mhar", route_heads=4, route_init="normal"),
            plant("b", 3, route_init="normal"), plant("hs", 3, residual="hc", hc_dynamic=False), plant("hd", 3, residual="hc"), plant("d", 3, residual="delta")]  # fmt: skip
    (cell,) = cells_of(*runs)
    assert [row.method for row in cell.rows] == [
        "baseline",
        "attnres",
        "delta-h8",
        "hc-dynamic",
        "hc-static",
        "mhar-h4 route_init=normal",
        "mhar-h4 route_init=zero",
    ]


def test_best_learning_rate_per_method(plant):
    """Baseline best at 1e-3, attnres at 5e-4: paired by seed across rates. The extra seed of one rate does not decide the choice."""
    losses = {("baseline", 1e-3): 3.0, ("baseline", 5e-4): 3.2, ("attnres", 1e-3): 3.3, ("attnres", 5e-4): 3.1}
    runs = [plant(f"{r}-{lr}", loss, residual=r, learning_rate=lr) for (r, lr), loss in losses.items()]
    runs.append(plant("extra", 2.0, residual="baseline", learning_rate=5e-4, seed=2))
    (cell,) = cells_of(*runs, best=True)
    assert [(row.method, row.run.rate) for row in cell.rows] == [("baseline", 1e-3), ("attnres", 5e-4)]
    assert report.score(cell.rows[1].deltas, cell, 1000)[0] == pytest.approx(0.1)
    assert "| attnres | 36,032 | 1 | 3.1000 | 0.0005 | +0.1000 | one seed |  |" in report.score_table(cell, True, {})
    assert "no seed that was run at each" in mistake(runs[0], plant("lone", 3.0, learning_rate=2e-3, seed=9), best=True)
    assert len(cells_of(*runs[:4])) == 2  # without --best: two comparisons, each at its own rate


def test_cli_on_a_whole_sweep(plant, tmp_path):
    """Heads x kv x seeds: the report, its U-curve and its grid; PNGs that are not empty."""
    loss = {1: 3.27, 4: 3.13, 8: 3.12, 16: 3.17}
    runs = []
    for kv in (1, 2):
        for seed in (1, 2):
            noise = 0.01 * seed
            runs.append(plant(f"b-{kv}-{seed}", lambda s, n=noise: 3.3 + n + 10 / s, n_kv_head=kv, seed=seed))
            for h in loss:
                kind = dict(residual="attnres") if h == 1 else dict(residual="mhar", route_heads=h)
                runs.append(plant(f"{h}-{kv}-{seed}", lambda s, h=h, n=noise: loss[h] + n * 1.1 + 10 / s, n_kv_head=kv, seed=seed, **kind))
    out = tmp_path / "report"
    done = subprocess.run([sys.executable, ROOT / "report.py", *runs, f"--out_dir={out}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = (out / "report.md").read_text()
    assert text.count("## stdlib d32 L2 kv") == 2 and "| mhar-h16 | 36,032 | 2 |" in text and "mhar-h8" in done.stdout
    grid = [line for line in text.splitlines() if line.startswith("| 1 |") or line.startswith("| n_kv")]
    assert grid[0] == "| n_kv_head | H = 1 | H = 4 | H = 8 | H = 16 |"
    assert grid[1].split(" | ")[3].startswith("**3.1") and grid[1].split(" | ")[3].endswith("(-0.1785)**")  # 3.12 - 3.3 + 0.1 x 0.015
    for image in ("curves_1.png", "curves_2.png", "grid.png", "heads.png"):
        assert f"({image})" in text
        pixels = matplotlib.image.imread(out / image)
        assert pixels.shape[1] > 700 and pixels[..., :3].std() > 0.05


def test_cli_mistakes(plant, tmp_path):
    base, mhar = plant("b", 3.0), plant("m", 2.9, residual="mhar")
    broken = plant("broken", 3.0)
    with open(broken / "log.jsonl", "a") as f:
        f.write('{"event": "val", "st')
    empty = plant("empty", 3.0)
    (empty / "log.jsonl").write_text((empty / "log.jsonl").read_text().splitlines()[0] + "\n")
    damaged = {}
    for name, old, new in (("headless", '"event": "start"', '"event": "train"'), ("list", '{"event": "train"', '[{"event": "train"'), ("nan", '"loss": 3.0', '"loss": NaN'), ("other", '"grad_clip"', '"clip"')):
        damaged[name] = plant(name, 3.0)
        text = (damaged[name] / "log.jsonl").read_text()
        assert old in text
        (damaged[name] / "log.jsonl").write_text("\n".join((line + "]" if name == "list" and line[0] == "[" else line) for line in text.replace(old, new, 1).splitlines()))
    cases = {(damaged["headless"],): "has no start line", (damaged["list"],): "log.jsonl:2 is no line", (damaged["nan"],): "loss of step 50 is nan", (damaged["other"],): "says nothing of grad_clip"}
    cases |= {(tmp_path,): "holds no log.jsonl", (base,): "all of these runs are baseline", (mhar,): "none of these runs is a baseline", (broken, mhar): "log.jsonl:23 is no line",
             (empty, mhar): "no evaluation yet", (base, mhar, "--baseline=mhar"): "give --baseline= one of baseline, mhar-h8", (base, mhar, "--budgets=1k"): "--budgets=20000,60000", (base, mhar, "--budgets=50,"): "is no list of steps",
             (base, mhar, "--best=1"): "report.py -h", (): "report.py -h"}  # fmt: skip
    for argv, words in cases.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["report.py", *map(str, argv), f"--out_dir={tmp_path / 'out'}"])
            with pytest.raises(UserError) as caught:
                report.main()
        assert words in str(caught.value), argv
    assert not (tmp_path / "out").exists()
    done = subprocess.run([sys.executable, ROOT / "report.py", tmp_path], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    done = subprocess.run(
        [sys.executable, ROOT / "report.py", base, mhar, f"--baseline={mhar}", f"--out_dir={tmp_path / 'out'}"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "Δ to mhar-h8" in done.stdout and (tmp_path / "out/curves.png").stat().st_size > 10_000
