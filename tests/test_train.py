"""train.py run the way a user runs it: resume, ranks and micro-steps, what it logs, and what it answers to mistakes.

    python -m pytest tests/test_train.py
"""
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import train
from configurator import UserError

METHODS = {
    "baseline": ["--residual=baseline"], "hc static": ["--residual=hc", "--hc_dynamic=false"], "hc": ["--residual=hc"], "attnres": ["--residual=attnres"],
    "mhar": ["--residual=mhar"], "delta": ["--residual=delta", "--delta_blocks=2"], "delta recursive": ["--residual=delta", "--delta_recursive=true"],
}  # fmt: skip
TINY = ["--n_layer=2", "--n_embd=32", "--n_head=4", "--n_kv_head=2", "--ffn_dim=48", "--route_heads=4", "--block_size=32", "--batch_size=4", "--global_batch_size=8",
        "--max_steps=12", "--warmup_steps=8", "--learning_rate=3e-3", "--eval_interval=6", "--eval_windows=7", "--save_interval=6", "--log_interval=1", "--keep_checkpoints=9"]  # fmt: skip


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """A few hundred small documents of made-up words, prepared by the command line."""
    folder = tmp_path_factory.mktemp("data")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 7))) for _ in range(60)]
    with open(folder / "text.jsonl", "w") as f:
        for _ in range(300):
            f.write(json.dumps({"text": " ".join(draw.choices(words, k=draw.randint(5, 60)))}) + "\n")
    command = [sys.executable, ROOT / "prepare_data.py", f"--source={folder}/text.jsonl", f"--out_dir={folder}/set", "--val_fraction=0.1", "--workers=1"]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "set"


def run(*flags, dataset):
    """train.py in this process; a later flag replaces an earlier one of the same name."""
    merged = {f.split("=")[0]: f for f in [*TINY, f"--dataset={dataset}", "--device=cpu", *flags]}
    handlers = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    argv, sys.argv = sys.argv, ["train.py", *merged.values()]
    try:
        train.main()
    finally:
        sys.argv = argv
        for s, handler in zip((signal.SIGTERM, signal.SIGINT), handlers):
            signal.signal(s, handler)


SEVERAL = """import os, sys
sys.path.insert(0, {root!r})
import train
for i, sys.argv in enumerate({runs!r}):
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(i)  # each run meets under keys of its own
    train.main()
"""


def torchrun(ranks, commands, dataset, tmp_path):
    """Several runs of train.py, one after another, in one start of torchrun: [flags of run 1, flags of run 2, ...]"""
    runs = [["train.py", *{f.split("=")[0]: f for f in [*TINY, f"--dataset={dataset}", "--device=cpu", *flags]}.values()] for flags in commands]
    script = tmp_path / "several.py"
    script.write_text(SEVERAL.format(root=str(ROOT), runs=runs))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", script]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]


def events(out_dir, kind):
    return [e for e in map(json.loads, (Path(out_dir) / "log.jsonl").read_text().splitlines()) if e["event"] == kind]


def numbers(out_dir):
    """What must not depend on how a run was cut or spread: [(step, loss, lr, gradient norm)] and [(step, validation loss)]."""
    return [(e["step"], e["loss"], e["lr"], e["grad_norm"]) for e in events(out_dir, "train")], [(e["step"], e["loss"]) for e in events(out_dir, "val")]


def weights(out_dir):
    return load_file(train.find_checkpoint(out_dir) / "model.safetensors")


# ---- resume -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", METHODS)
def test_resume_is_exact(method, dataset, tmp_path):
    """12 steps straight equal 6 + 6, bitwise: losses, rates, gradient norms, validation, final weights and optimizer state."""
    run(*METHODS[method], f"--out_dir={tmp_path}/a", dataset=dataset)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "b/step_00000012")  # as if it had died after step 6, with lines of later steps in its log
    (tmp_path / "b/latest").write_text("step_00000006\n")
    run(*METHODS[method], f"--out_dir={tmp_path}/b", dataset=dataset)
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")
    a, b = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
    state_a, state_b = (load_file(next((tmp_path / x / "step_00000012/optimizer").glob("*.safetensors"))) for x in "ab")
    assert state_a.keys() == state_b.keys() and all(torch.equal(state_a[n], state_b[n]) for n in state_a)
    assert events(tmp_path / "a", "end")[0]["val_tail_mean"] == events(tmp_path / "b", "end")[0]["val_tail_mean"]


def test_finished_run_says_so(dataset, tmp_path, capsys):
    run("--max_steps=2", f"--out_dir={tmp_path}/a", dataset=dataset)
    before = (tmp_path / "a/log.jsonl").read_text()
    run("--max_steps=2", f"--out_dir={tmp_path}/a", dataset=dataset)
    assert "is finished: 2 of 2 steps" in capsys.readouterr().out
    assert (tmp_path / "a/log.jsonl").read_text() == before


def test_sigterm_saves_and_the_same_command_goes_on(dataset, tmp_path):
    flags = ["--max_steps=2000", "--eval_interval=1000", "--save_interval=1000", "--keep_checkpoints=1"]
    command = [sys.executable, ROOT / "train.py", *{f.split("=")[0]: f for f in [*TINY, f"--dataset={dataset}", "--device=cpu", f"--out_dir={tmp_path}/a", *flags]}.values()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    while not (tmp_path / "a/log.jsonl").exists() or not events(tmp_path / "a", "train"):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and "stopped by a signal after step" in out
    step = train.read_meta(train.find_checkpoint(tmp_path / "a"))["step"]
    assert 0 < step < 2000 and events(tmp_path / "a", "train")[-1]["step"] == step


def test_keeps_the_newest_and_starts_from_weights(dataset, tmp_path):
    run("--save_interval=2", "--keep_checkpoints=3", f"--out_dir={tmp_path}/a", dataset=dataset)
    assert sorted(p.name for p in (tmp_path / "a").glob("*step*")) == ["step_00000008", "step_00000010", "step_00000012"]
    meta = train.read_meta(tmp_path / "a/step_00000008")
    assert meta["data"]["epoch"] * train.TrainWindows(train.open_bin(dataset / "train.bin"), 32, 42).n + meta["data"]["window"] == 8 * 8
    run(f"--init_from={tmp_path}/a", "--max_steps=1", "--learning_rate=1e-12", f"--out_dir={tmp_path}/b", dataset=dataset)
    for n, w in weights(tmp_path / "b").items():
        torch.testing.assert_close(w, weights(tmp_path / "a")[n], atol=1e-6, rtol=0)
    assert events(tmp_path / "b", "train")[0]["step"] == 1


# ---- ranks, micro-steps, precision ------------------------------------------------------------------------------------------
def test_any_split_gives_the_same_losses(dataset, tmp_path):
    """One process and two, however the batch is cut into micro-steps; every method, under DDP without find_unused_parameters."""
    two = [[*flags, f"--out_dir={tmp_path}/{m} 2x4", "--max_steps=6"] for m, flags in METHODS.items()]
    two += [["--residual=mhar", "--batch_size=1", f"--out_dir={tmp_path}/mhar 2x(4x1)", "--max_steps=6"]]
    torchrun(2, two, dataset, tmp_path)
    for m, flags in METHODS.items():
        run(*flags, "--batch_size=8", "--max_steps=6", f"--out_dir={tmp_path}/{m} 1x8", dataset=dataset)
    run("--batch_size=2", "--max_steps=6", f"--out_dir={tmp_path}/mhar 1x(4x2)", dataset=dataset)
    for m in METHODS:
        for other in [f"{m} 2x4"] + ["mhar 2x(4x1)", "mhar 1x(4x2)"] * (m == "mhar"):
            for a, b in zip(numbers(tmp_path / f"{m} 1x8"), numbers(tmp_path / other)):
                np.testing.assert_allclose(a, b, rtol=2e-5, err_msg=other)


def test_two_ranks_resume_on_one(dataset, tmp_path):
    torchrun(2, [["--max_steps=12", f"--out_dir={tmp_path}/a"]], dataset, tmp_path)
    shutil.rmtree(tmp_path / "a/step_00000012")
    (tmp_path / "a/latest").write_text("step_00000006\n")
    before = numbers(tmp_path / "a")
    run(f"--out_dir={tmp_path}/a", dataset=dataset)
    for a, b in zip(before, numbers(tmp_path / "a")):
        np.testing.assert_allclose(a, b, rtol=2e-5)


def test_evaluation_is_fixed_and_leaves_training_alone(dataset, tmp_path):
    run("--eval_interval=2", f"--out_dir={tmp_path}/a", dataset=dataset)
    run("--eval_interval=12", f"--out_dir={tmp_path}/b", dataset=dataset)
    run("--eval_interval=12", "--batch_size=8", f"--out_dir={tmp_path}/c", dataset=dataset)
    assert numbers(tmp_path / "a")[0] == numbers(tmp_path / "b")[0]
    assert numbers(tmp_path / "a")[1][-1] == numbers(tmp_path / "b")[1][-1]
    np.testing.assert_allclose(numbers(tmp_path / "a")[1][-1], numbers(tmp_path / "c")[1][-1], rtol=1e-5)


def test_methods_see_the_same_data_and_start_alike(dataset, tmp_path):
    """delta with its gates closed is the baseline: the first losses are equal to the bit, so data and trunk are."""
    for m in ("baseline", "delta"):
        run(*METHODS[m], "--max_steps=1", f"--out_dir={tmp_path}/{m}", dataset=dataset)
    a, b = (events(tmp_path / m, "train")[0]["loss"] for m in ("baseline", "delta"))
    assert a == b


def test_pure_bfloat16(dataset, tmp_path):
    run("--param_dtype=bfloat16", f"--out_dir={tmp_path}/a", dataset=dataset)
    assert {w.dtype for w in weights(tmp_path / "a").values()} == {torch.bfloat16}
    losses = [e["loss"] for e in events(tmp_path / "a", "train")]
    assert losses[-1] < losses[0] - 0.1


# ---- what is logged -----------------------------------------------------------------------------------------------------------
def test_log(dataset, tmp_path, capsys):
    run("--residual=delta", "--tensorboard=true", f"--out_dir={tmp_path}/a", dataset=dataset)
    kinds = [e["event"] for e in map(json.loads, (tmp_path / "a/log.jsonl").read_text().splitlines())]
    assert kinds == ["start"] + ["train"] * 6 + ["val"] + ["train"] * 6 + ["val", "end"]
    start, last, val, end = (events(tmp_path / "a", k)[-1] for k in ("start", "train", "val", "end"))
    assert start["tokens_per_step"] == 8 * 32 and start["kernel"] == "torch" and start["params"]["routing"] == 4 * (3 * 32 + 1)
    assert last["tokens"] == 12 * 8 * 32 and last["mfu"] is None and last["lr"] == pytest.approx(3e-3 * (0.1 + 0.9 * (1 + np.cos(0.75 * np.pi)) / 2))
    assert last["gate_grad_norm"] > 0 and last["query_grad_norm"] > 0 and 0 < last["route_entropy"] < np.log(10)
    assert end == {"event": "end", "step": 12, "val_tail_mean": pytest.approx(np.mean([e["loss"] for e in events(tmp_path / "a", "val")])), "val_tail_count": 2}
    assert list((tmp_path / "a/tensorboard").iterdir())
    said = capsys.readouterr().out
    for words in ("parameters ", "388 of them for residual=delta", "not decayed 0", "256 tokens per step", "device      cpu (asked for)", "routing     torch"):
        assert words in said, words


def test_schedules():
    for kind, middle, late in (("cosine", 0.55, 0.1220), ("linear", 0.55, 0.19), ("wsd", 1.0, 0.55)):
        cfg = train.TrainConfig(lr_schedule=kind, warmup_steps=10, max_steps=110, learning_rate=1.0)
        assert train.learning_rate(cfg, 0) == 0.1 and train.learning_rate(cfg, 10) == pytest.approx(1.0)
        assert train.learning_rate(cfg, 60) == pytest.approx(middle) and train.learning_rate(cfg, 100) == pytest.approx(late, abs=1e-3)


# ---- mistakes -----------------------------------------------------------------------------------------------------------------
def header_changed(dataset, folder, **changes):
    """A copy of the data set whose train.bin says something else in its header."""
    shutil.copytree(dataset, folder)
    raw = (folder / "train.bin").read_bytes()
    import prepare_data

    header = prepare_data.open_bin(folder / "train.bin").header | changes
    (folder / "train.bin").write_bytes(prepare_data.pack_header(header) + raw[prepare_data.HEADER_BYTES :])
    return folder


def wrong(words, *flags, dataset):
    with pytest.raises(UserError) as error:
        run(*flags, dataset=dataset)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value), f"{word!r} not in {error.value}"


def test_mistakes(dataset, tmp_path):
    out = f"--out_dir={tmp_path}/new"
    wrong(["n_embd=32", "route_heads=5"], out, "--route_heads=5", dataset=dataset)
    wrong(["n_kv_head=3"], out, "--n_kv_head=3", dataset=dataset)
    wrong(["learning_rat", "learning_rate"], out, "--learning_rat=1", dataset=dataset)
    wrong(["global_batch_size=8", "batch_size=3", "1 ranks"], out, "--batch_size=3", dataset=dataset)
    wrong(["nowhere", "prepare_data.py"], out, dataset="nowhere")
    wrong(["train split", "100,001"], out, "--block_size=100000", dataset=dataset)
    wrong(["val split", "20,001"], out, "--block_size=20000", dataset=dataset)
    wrong(["vocab_size=200", "320"], out, "--vocab_size=200", dataset=dataset)
    wrong(["1000 model rows"], out, "--vocab_size=320", dataset=header_changed(dataset, tmp_path / "ids", largest_id=999))
    wrong(["qwen3", "bytes"], out, dataset=header_changed(dataset, tmp_path / "other", tokenizer="qwen3"))
    wrong(["--device=gpu9"], out, "--device=gpu9", dataset=dataset)
    wrong(["kernel=triton"], out, "--kernel=triton", dataset=dataset)
    wrong(["--resume="], out, f"--resume={tmp_path}", dataset=dataset)
    wrong(["--init_from="], out, f"--init_from={tmp_path}", dataset=dataset)
    wrong(["max_steps=0"], out, "--max_steps=0", dataset=dataset)
    shutil.copytree(dataset, tmp_path / "short")
    os.truncate(tmp_path / "short/train.bin", 5000)
    wrong(["train.bin", "truncated"], out, dataset=tmp_path / "short")
    if not torch.cuda.is_available():
        wrong(["--device=cuda", "no CUDA GPU"], out, "--device=cuda", dataset=dataset)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_holds_another_run(dataset, tmp_path):
    run("--max_steps=2", f"--out_dir={tmp_path}/a", dataset=dataset)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "a").rglob("*")}
    wrong(["another run", "learning_rate=0.003 there", "--out_dir="], "--max_steps=2", "--learning_rate=1e-3", f"--out_dir={tmp_path}/a", dataset=dataset)
    wrong(["another run", "residual=mhar there, residual=hc here"], "--max_steps=2", "--residual=hc", f"--out_dir={tmp_path}/a", dataset=dataset)
    wrong(["--resume=never"], "--max_steps=2", "--resume=never", f"--out_dir={tmp_path}/a", dataset=dataset)
    wrong(["does not fit this model", "of another shape"], f"--init_from={tmp_path}/a", "--ffn_dim=64", f"--out_dir={tmp_path}/b", dataset=dataset)
    shutil.rmtree(tmp_path / "a/step_00000002")
    (tmp_path / "a/latest").unlink()  # died before its first checkpoint: the log alone says whose folder it is
    wrong(["another run", "n_layer=2 there"], "--max_steps=2", "--n_layer=3", f"--out_dir={tmp_path}/a", dataset=dataset)
    run("--max_steps=2", f"--out_dir={tmp_path}/a", dataset=dataset)
    assert len(before) == len(list((tmp_path / "a").rglob("*")))


def test_data_that_changed_under_a_run(dataset, tmp_path):
    shutil.copytree(dataset, tmp_path / "set")
    run("--max_steps=6", f"--out_dir={tmp_path}/a", dataset=tmp_path / "set")
    shutil.copytree(header_changed(dataset, tmp_path / "x", sha256="0" * 64), tmp_path / "set", dirs_exist_ok=True)
    wrong(["not the file this run was trained on"], "--max_steps=6", f"--out_dir={tmp_path}/a", dataset=tmp_path / "set")


def test_exit_codes(dataset, tmp_path):
    """The whole way out: 2 and one line for a mistake, 1 for numbers that are not finite, whose checkpoint stays as it was."""
    command = [sys.executable, ROOT / "train.py", *TINY, f"--dataset={dataset}", "--device=cpu"]
    done = subprocess.run([*command, "--n_layre=3"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1 and "n_layer" in done.stderr and not os.listdir(tmp_path)
    flags = {f.split("=")[0]: f for f in [*TINY, f"--dataset={dataset}", "--device=cpu", f"--out_dir={tmp_path}/a", "--learning_rate=1e30", "--warmup_steps=0", "--save_interval=1", "--grad_clip=0"]}
    done = subprocess.run([sys.executable, ROOT / "train.py", *flags.values()], capture_output=True, text=True)
    assert done.returncode == 1 and "loss or gradient is not finite" in done.stderr and "Traceback" not in done.stderr
    saved = train.find_checkpoint(tmp_path / "a")
    assert all(torch.isfinite(w).all() for w in load_file(saved / "model.safetensors").values())
    assert f"checkpoint of step {train.read_meta(saved)['step']}" in done.stderr
