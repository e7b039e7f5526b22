"""The probe finds what was planted, and nothing in a random query.

    python -m pytest tests/test_probe.py
"""
import json
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import probe
from test_model import tiny, tokens
from test_train import dataset, run  # noqa: F401  (dataset is a fixture)


def test_disagreement_by_hand():
    """Two sources, two slices, one token: a_1 = softmax(1, 0), a_2 = softmax(0, 1), alpha = (1/2, 1/2): KL = ln 2 - H(0.731)."""
    keys = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])  # [N, M, D]
    p = 1 / (1 + np.exp(-1))
    expected = np.log(2) + p * np.log(p) + (1 - p) * np.log(1 - p)
    assert probe.disagreement(keys, torch.ones(2), 2) == pytest.approx((expected, expected), abs=1e-6)  # their mean is alpha here
    assert probe.disagreement(keys, torch.ones(2), 1) == pytest.approx((0, 0), abs=1e-7)
    four = torch.tensor([[[1.0, 0, 0, 0]], [[0, 1.0, 0, 0]]])
    assert probe.disagreement(four, torch.ones(4), 2, interleaved=True) == pytest.approx((expected, expected), abs=1e-6)
    assert probe.collinearity(torch.tensor([[[1.0, 0]], [[1.0, 0]], [[0, 2.0]]])) == pytest.approx(1 / 3)


def test_reads_are_the_model_s():
    """At every site the probe's sources and keys give the weights that the model records."""
    for method in ("attnres", "mhar", "delta"):
        model, record = tiny(method, route_init="normal"), []
        with torch.no_grad():
            model.residual.query.mul_(20)
            model(tokens(), record=record)
        got = list(probe.reads(model, tokens()))
        record = [a for a in record if len(a) > 1]
        assert len(got) == len(record)
        for (site, v, keys), alpha in zip(got, record):
            torch.testing.assert_close(probe.weights_of(keys, model.residual.query[site].float(), model.residual.n_heads), alpha.flatten(1, 2), atol=1e-5, rtol=1e-4)


def test_planted_disagreement_is_found():
    """Queries built so that their slices all want one source, or each another one, beside random ones of the same norm."""
    g = torch.Generator().manual_seed(0)
    N, M, D, S = 8, 200, 256, 4
    own = torch.randn(N, 1, D, generator=g)  # a direction of its own for every source, and tokens around it
    keys = torch.nn.functional.rms_norm(own + 0.5 * torch.randn(N, M, D, generator=g), (D,))
    slices = (own[:, 0] - own[:, 0].mean(0)).unflatten(-1, (S, -1))  # [N, S, D / S]
    build = lambda wanted: 0.3 * torch.cat([slices[n, s] / slices[n, s].norm() for s, n in enumerate(wanted)])
    apart, together = build([0, 2, 4, 6]), build([5, 5, 5, 5])
    norm = apart.norm()
    chance = np.mean([probe.disagreement(keys, q * norm / q.norm(), S) for q in torch.randn(10, D, generator=g)], axis=0)
    assert probe.disagreement(keys, apart, S)[0] > 5 * chance[0]
    assert probe.disagreement(keys, apart, S)[1] > 5 * max(chance[1], probe.disagreement(keys, together, S)[1])
    another = torch.randn(D, generator=g)
    np.testing.assert_allclose(probe.disagreement(keys, another * norm / another.norm(), S), chance, rtol=0.7)


def test_nothing_in_a_random_query():
    model = tiny("attnres", n_layer=4, n_embd=64)
    with torch.no_grad():
        model.residual.query.normal_(0, 0.5, generator=torch.Generator().manual_seed(3))
    rows = probe.measure(model, [tokens(4)], 4)["sites"]
    kl, null = np.mean([r["kl"] for r in rows]), np.mean([r["null"] for r in rows])
    assert 0.5 < kl / null < 2
    zero = probe.measure(tiny("attnres"), [tokens(4)], 4)["sites"]
    assert all(r["kl"] == pytest.approx(0, abs=1e-6) and r["entropy"] == pytest.approx(np.log(r["sources"]), abs=1e-5) for r in zero)


def test_heads_replicate_on_other_text():
    model = tiny("mhar", n_layer=4)
    with torch.no_grad():
        model.residual.query.normal_(0, 1, generator=torch.Generator().manual_seed(3))
    a, b = (probe.measure(model, [tokens(2, seed=s) for s in seeds], 4)["deviation"] for seeds in ((1, 2), (3, 4)))
    assert np.corrcoef(probe.flat(a), probe.flat(b))[0, 1] > 0.8
    assert all(np.abs(d.mean(1)).max() < 1e-6 for d in a.values())


def test_planted_heads_are_found():
    """Head h of the last site wants source h alone: its deviation is largest there, and the heads have nothing else in common."""
    model = tiny("mhar", n_layer=4)
    H = model.residual.n_heads
    with torch.no_grad():
        model.residual.query.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))  # so that sources differ
        *_, (site, v, keys) = probe.reads(model, tokens(4))
        own = keys.mean(1).unflatten(-1, (H, -1))  # [N, H, K]
        model.residual.query[site] = 40 * torch.cat([torch.nn.functional.normalize(own[h, h] - own[:, h].mean(0), dim=0) for h in range(H)])
    planted = probe.measure(model, [tokens(4)], 4)["deviation"][site]
    assert [planted[:, h].argmax() for h in range(H)] == list(range(H)) and planted[:H].diagonal().min() > 0.1


def test_correlation_between_heads():
    """Heads with a source each: deviations that sum to zero correlate by -1 / (H - 1). Two pairs of like heads: +1 within, -1 across."""
    apart = np.eye(4) - 0.25
    assert probe.between_heads({0: apart, 1: apart}) == pytest.approx(-1 / 3)
    pairs = np.array([[0.1, 0.1, -0.1, -0.1], [-0.1, -0.1, 0.1, 0.1]])
    assert probe.between_heads({0: pairs}) == pytest.approx((1 - 1 - 1) / 3)


def test_command_line(dataset, tmp_path):  # noqa: F811
    run("--max_steps=4", "--residual=mhar", f"--out_dir={tmp_path}/m", dataset=dataset)
    run("--max_steps=2", "--residual=baseline", f"--out_dir={tmp_path}/b", dataset=dataset)
    go = lambda *flags: subprocess.run([sys.executable, ROOT / "probe.py", *flags, "--device=cpu", f"--out_dir={tmp_path}/p"], capture_output=True, text=True)
    done = go(f"{tmp_path}/m", "--windows=2")
    assert done.returncode == 0, done.stderr
    assert "| learned excess |" in done.stdout and {p.name for p in (tmp_path / "p").iterdir()} == {"probe.json", "sites.png", "perhead.png"}
    for name in ("sites.png", "perhead.png"):
        pixels = matplotlib.image.imread(tmp_path / "p" / name)
        assert pixels.shape[1] > 700 and pixels[..., :3].std() > 0.05
    assert json.loads((tmp_path / "p/probe.json").read_text())["summary"]["sources at the last site"] == 5
    for flags, words in [([f"{tmp_path}/b"], "routes nothing"), ([f"{tmp_path}"], "not a checkpoint"), ([f"{tmp_path}/m", "--slices=5"], "--slices=5"), ([f"{tmp_path}/m", "--text=no"], "--text=no")]:
        done = go(*flags)
        assert done.returncode == 2 and words in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
