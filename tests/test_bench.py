"""bench.py the way a user runs it, at toy size on a CPU: what it keeps, prints and refuses. Its times mean nothing here.

    python -m pytest tests/test_bench.py
"""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="toy size is for a CPU")


def run(*flags, code=0, **env):
    result = subprocess.run([sys.executable, ROOT / "bench.py", *flags], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"} | env)
    assert result.returncode == code, result.stderr
    return result.stdout if code == 0 else result.stderr


def test_parts_merge_into_one_table(tmp_path):
    pytest.importorskip("triton")
    out = tmp_path / "bench.json"
    run("--part=routing", "--method=eager,the paper's algorithm,ours,liger (H=1)", f"--out={out}", TRITON_INTERPRET="1")
    printed = run("--part=step", "--method=baseline,mhar", f"--out={out}")
    results = json.loads(out.read_text())
    rows = results["routing toy paper"]
    assert rows["shape"] == dict(S=11, M=4, D=32, H=2)
    assert all(rows[m]["forward"] > 0 for m in ("eager", "the paper's algorithm", "ours", "floor of our scheme"))
    assert "forward" in rows["liger (H=1)"] or rows["liger (H=1)"]["note"].startswith("not run")
    steps = results["step toy paper float32"]
    assert all(steps[m]["tokens_per_second"] == pytest.approx(16 / steps[m]["ms"] * 1e3) for m in ("baseline", "mhar"))
    assert "Routing, toy: S=11 M=4 D=32 H=2" in printed and "Training step, toy" in printed and f"{steps['mhar']['tokens_per_second']:,.0f}" in printed


def test_a_floor_that_could_not_be_measured(capsys):
    import bench
    bench.report({"routing toy paper": {"shape": dict(S=11, M=4, D=32, H=2), "ours": dict(forward=1.0, backward=2.0), "floor of our scheme": dict(note="out of memory")}})
    assert "out of memory" in capsys.readouterr().out


def test_without_triton(tmp_path):
    (tmp_path / "triton.py").write_text("raise ImportError('hidden by this test')")
    out = tmp_path / "bench.json"
    printed = run("--part=routing", "--method=eager,ours", f"--out={out}", PYTHONPATH=str(tmp_path))
    rows = json.loads(out.read_text())["routing toy paper"]
    assert rows["eager"]["forward"] > 0 and rows["ours"] == dict(note="not run: triton is not installed") and "not run" in printed


def test_a_model_whose_kernels_cannot_run_is_a_note(monkeypatch):
    import bench
    monkeypatch.setattr(bench, "CUDA", True)
    monkeypatch.setattr(bench, "choose_kernel", lambda *args: ("torch", "no such luck"))
    assert bench.attempt(bench.decode, "toy", "mhar") == dict(note="not run: no such luck")


@pytest.mark.parametrize("flags, words", [
    (["--scale=100M"], ["--scale=100M needs a CUDA GPU", "--scale=toy"]),
    (["--scale=huge"], ["--scale=huge is not known", "100M"]),
    (["--part=step", "--method=ours"], ["nothing to measure"]),
    (["--out="], ["--out= names no file"]),
    (["--out=README.md"], ["README.md", "give another name"]),
], ids=str)  # fmt: skip
def test_mistakes(flags, words):
    line = run(*flags, code=2)
    assert line.startswith("error: ") and line.count("\n") == 1 and all(word in line for word in words), line
