"""bench.py at toy size on a CPU, where it shows that everything runs; its times would mean nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from configurator import UserError

import torch

import bench

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="toy size is for a CPU")
# two sites of the paper's algorithm against the reference, then what the command line runs
INTERPRETED = """
import bench, torch
from routing_kernels import route_reference
chain, weights, douts = bench.PerSite(torch.randn(7, 3, 48), 3), torch.randn(2, 48), torch.randn(2, 3, 48)
leaves = [x.double().requires_grad_() for x in (*chain.v, *weights)]
mixes = [route_reference(leaves[:n], *leaves[7:], 3, bench.EPS)[0] for n in (7, 6)]
dv = torch.autograd.grad(mixes, leaves[:7], [*douts.double()], retain_graph=True)
dweights = torch.autograd.grad(mixes[1], leaves[7:], douts[1].double())
got = [chain.forward(7, *weights)]
chain.backward(7, *weights, douts[0], fresh=7)
got += [chain.forward(6, *weights), *chain.backward(6, *weights, douts[1])[:2], chain.dv]
for a, b in zip(got, [*mixes, *dweights, torch.stack(dv)]):
    torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-4)
bench.main()
"""


def bench_main(monkeypatch, capsys, *flags):
    monkeypatch.setattr(sys, "argv", ["bench.py", *flags])
    bench.main()
    return capsys.readouterr().out


def test_routing_with_interpreted_kernels(tmp_path):
    pytest.importorskip("triton")
    out = tmp_path / "bench.jsonl"
    flags = ["--part=routing", "--method=eager,the paper's algorithm,ours,liger (H=1)", f"--out={out}"]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, *flags], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0 and "Routing, toy: S=11 M=4 D=32 H=2" in done.stdout, done.stderr
    notes = {line["row"]: line["note"] for line in map(json.loads, open(out))}
    liger = notes.pop("liger (H=1)")
    assert liger == "runs" or liger.startswith("not run: ")
    assert notes == dict.fromkeys(["eager", bench.PER_SITE, "ours", bench.FLOOR], "runs")


def test_models_run(monkeypatch, capsys):
    monkeypatch.setattr(bench, "DECODE_CONTEXTS", (4, 20))
    out = bench_main(monkeypatch, capsys, "--part=step,decode", "--method=baseline,mhar")
    for row in ("baseline", "mhar", "baseline, batch 1", "mhar, batch 32"):
        assert f"| {row} | runs |\n" in out


def test_cells():
    """Ratios the right way round, and no trouble from a row that could not be measured."""
    results = {bench.PER_SITE: dict(forward=4.0, backward=8.0), bench.FLOOR: dict(forward=0.5, backward=1.0)}
    ours = dict(forward=1.0, backward=2.0)
    cells = bench.routing_cells("ours", ours, results)
    assert (cells["total"], cells[f"vs {bench.PER_SITE}"], cells["of the floor"]) == (
        "3.00",
        "4.0x",
        "50% + 50%",
    )
    assert "of the floor" not in bench.routing_cells("ours", ours, {bench.FLOOR: dict(note="out of memory")})
    step = dict(tokens_per_second=90.0, ms=1.0, without_graph=50.0, peak_gb=6.0, mfu=None)
    cells = bench.step_cells("mhar", step, {"baseline": step | dict(tokens_per_second=100.0, peak_gb=5.0)})
    assert (cells["vs baseline"], cells["GB vs baseline"], cells["MFU"]) == ("0.900", "1.200", "n/a")
    cells = bench.decode_cells(
        "mhar, batch 1", {16: 2.0, 1024: 3.0}, {"baseline, batch 1": {16: 1.0, 1024: 1.5}}
    )
    assert (cells["growth"], cells["vs baseline after 1,024"]) == ("+50.0%", "0.500")


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--scale=100M"], "CUDA GPU is needed"),
        (["--scale=huge"], "'huge' is none of 100M"),
        (["--part=step", "--method=ours"], "nothing to measure"),
        (["--out=README.md"], "README.md"),
    ],
)
def test_mistakes(monkeypatch, capsys, flags, words):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=words):
        bench_main(monkeypatch, capsys, *flags)
