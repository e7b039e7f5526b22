"""The probe finds what was planted, and nothing in a random query."""

import json
import sys
from dataclasses import asdict

from configurator import UserError

import matplotlib.image
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from safetensors.torch import save_file
from test_model import scramble, tiny, tokens

import probe
from data import pack_header


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """Documents of letters, as bytes with 256 at their ends: forty in val.bin, of 10 to 49 letters."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for split, count in (("train", 60), ("val", 40)):
        ids = np.concatenate([[*rng.integers(97, 107, 10 + i), 256] for i in range(count)]).astype("<u4")
        header = {"tokens": len(ids), "tokenizer": "bytes", "vocab": 320, "eot": 256, "largest_id": 256}
        (folder / f"{split}.bin").write_bytes(pack_header(header | {"sha256": split}) + ids.tobytes())
    return folder


def save(model, folder, dataset=None, tokenizer="bytes", **meta):
    """A checkpoint as train.py leaves it; returns its path."""
    folder.mkdir(parents=True)
    save_file({name: p.detach() for name, p in model.named_parameters()}, folder / "model.safetensors")
    data = {"dataset": dataset and str(dataset), "sha256": dataset and "train", "tokenizer": tokenizer}
    meta |= {"step": 7, "model_config": asdict(model.config), "train_config": {"param_dtype": "float32"}}
    (folder / "meta.json").write_text(json.dumps(meta | {"data": data}))
    return str(folder)


def test_disagreement_by_hand():
    """Two sources and slices: a_1 = softmax(1, 0), a_2 = softmax(0, 1), alpha uniform; then a_1 = a_2, where
    alpha = softmax(2, 0) differs from them all the same."""
    keys, two = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]), torch.ones(2)  # [N, M, D]
    p = 1 / (1 + np.exp(-1))
    expected = np.log(2) + p * np.log(p) + (1 - p) * np.log(1 - p)
    assert probe.disagreement(keys, two, 2) == pytest.approx((expected, expected), abs=1e-6)
    assert probe.disagreement(keys, two, 1) == pytest.approx((0, 0), abs=1e-7)
    kl, between = probe.disagreement(torch.tensor([[[1.0, 1.0]], [[0.0, 0.0]]]), two, 2)
    assert kl > 0.05 and between == pytest.approx(0, abs=1e-7)
    assert probe.collinearity(torch.tensor([[[1.0, 0]], [[1.0, 0]], [[0, 2.0]]])) == pytest.approx(1 / 3)


@pytest.mark.parametrize("method", ["attnres", "mhar", "delta", "delta recursive"])
def test_reads_are_the_model_s(method):
    """At every site the probe's sources and keys give the weights that the model records."""
    model, record = tiny(method), []
    scramble(model)
    query, H = model.residual.query, model.residual.n_heads
    with torch.no_grad():
        model(tokens(), record=record)
    found, record = list(probe.reads(model, tokens())), [alpha for alpha in record if len(alpha) > 1]
    assert len(found) == len(record) > 1
    for (site, _, keys), alpha in zip(found, record):
        torch.testing.assert_close(probe.weights_of(keys, query[site], H), alpha.flatten(1, 2))


def test_random_and_zero_queries():
    """A random query has what random queries have. Interleaved slices are every n-th channel."""
    model = tiny("attnres", n_layer=4, n_embd=64)
    query = model.residual.query.detach().normal_(0, 0.5, generator=torch.Generator().manual_seed(3))
    rows = probe.measure(model, [tokens(4)], 2)
    assert 0.5 < np.mean([row["kl"] for row in rows]) / np.mean([row["null"] for row in rows]) < 2
    *_, (site, _, keys) = probe.reads(model, tokens(4))
    parts = torch.stack([(keys * query[site])[..., s::2].sum(-1) for s in (0, 1)])  # [2, N, M]
    a, alpha = parts.softmax(1), parts.sum(0).softmax(0)
    kl = (a * (a / alpha).log()).sum(1).mean().item()
    assert rows[-1]["interleaved"] == pytest.approx(kl, rel=1e-4)
    for row in probe.measure(tiny("attnres"), [tokens(4)], 4):
        assert row["kl"] < 1e-6 and row["entropy"] == pytest.approx(row["uniform"], abs=1e-5)


def test_planted_heads_are_found_and_replicate():
    """Head h of the last site wants source h: its deviation is largest there, on other text too. Heads with
    nothing in common correlate by -1 / (H - 1)."""
    model = tiny("mhar", n_layer=4)
    H, query = model.residual.n_heads, model.residual.query
    with torch.no_grad():
        query.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
        *_, (site, _, keys) = probe.reads(model, tokens(4))
        own = keys.mean(1).unflatten(-1, (H, -1))  # [N, H, K]
        wanted = [torch.nn.functional.normalize(own[h, h] - own[:, h].mean(0), dim=0) for h in range(H)]
        query[site] = 40 * torch.cat(wanted)
    rows, other = (probe.measure(model, [tokens(4, seed=s)], 4) for s in (0, 1))
    planted = rows[-1]["deviation"]
    assert [planted[:, h].argmax() for h in range(H)] == list(range(H)) and planted.diagonal().min() > 0.1
    assert np.corrcoef(probe.flat(rows, "deviation"), probe.flat(other, "deviation"))[0, 1] > 0.8
    assert probe.between_heads([{"deviation": np.eye(4) - 0.25}] * 2) == pytest.approx(-1 / 3)


def test_legends_are_clear_of_the_curves(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(
        probe, "Figure", lambda *args, **kw: figures.append(Figure(*args, **kw)) or figures[-1]
    )
    sites = [dict(site=i, kl=0.3, null=0.1, entropy=i / 9, uniform=i / 8) for i in range(1, 8)]
    probe.plot_sites(sites, tmp_path / "sites.png")
    for axis in figures[0].axes:
        box = axis.get_legend().get_window_extent()
        assert box.y0 >= axis.bbox.y1 and box.y1 <= figures[0].bbox.y1
        assert axis.bbox.x0 <= box.x0 and box.x1 <= axis.bbox.x1


def test_command_line(dataset, tmp_path, monkeypatch, capsys):
    def run(*flags):
        monkeypatch.setattr(sys, "argv", ["probe.py", *flags, "--device=cpu", f"--out_dir={tmp_path}/p"])
        probe.main()

    shape = dict(vocab_size=320, block_size=32)
    m = save(tiny("mhar", **shape), tmp_path / "m", dataset)
    b = save(tiny("baseline", **shape), tmp_path / "b", dataset)
    imported = save(tiny("delta", **shape), tmp_path / "i")
    run(m, "--windows=2")
    assert "| learned excess |" in capsys.readouterr().out
    assert {file.name for file in (tmp_path / "p").iterdir()} == {"probe.json", "sites.png", "perhead.png"}
    for name in ("sites.png", "perhead.png"):
        pixels = matplotlib.image.imread(tmp_path / "p" / name)
        assert pixels.shape[1] > 700 and pixels[..., :3].std() > 0.05
    assert json.loads((tmp_path / "p/probe.json").read_text())["summary"]["sources at the last site"] == 7
    (tmp_path / "text").write_text("some text " * 20)
    run(imported, f"--text={tmp_path}/text")
    wrong = {b: "does not route", f"{tmp_path}": "not a checkpoint", imported: "--text="}
    wrong |= {f"{m} --slices=5": "slices=5", f"{m} --text=no": "--text=no", f"{m} --windows=0": "--windows"}
    for flags, words in wrong.items():
        with pytest.raises(UserError, match=words):
            run(*flags.split())
