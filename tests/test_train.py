"""train.py run the way a user runs it: resume, ranks and micro-steps, faults, what it logs and answers to
mistakes.

python -m pytest tests/test_train.py
"""

import builtins
import errno
import fcntl
import gc
import json
import os
import random
import re
import runpy
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from configurator import UserError

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import checkpoint
import data
import train
from model import GPT, GPTConfig

ROOT = Path(__file__).parent.parent
METHODS = {
    "baseline": ["--residual=baseline"],
    "hc static": ["--residual=hc", "--hc_form=static"],
    "hc": ["--residual=hc"],
    "hc paper": ["--residual=hc", "--hc_form=paper"],
    "hc manifold": ["--residual=hc", "--hc_form=manifold"],
    "attnres": ["--residual=attnres"],
    "mhar": ["--residual=mhar"],
    "mhar_hw": ["--residual=mhar_hw"],
    "block": ["--residual=block", "--depth_blocks=3"],
    "delta": ["--residual=delta", "--delta_blocks=2"],
    "delta recursive": ["--residual=delta", "--delta_recursive=true"],
}
TINY = """--n_layer=2 --n_embd=32 --n_head=4 --n_kv_head=2 --ffn_dim=48 --route_heads=4 --block_size=32
--batch_size=4 --global_batch_size=8 --max_steps=12 --warmup_steps=8 --learning_rate=3e-3 --eval_interval=6
--eval_windows=7 --save_interval=6 --log_interval=1 --keep_checkpoints=9 --device=cpu""".split()


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """A few hundred small documents of made-up words."""
    from prepare_data import Settings, prepare

    folder = tmp_path_factory.mktemp("data")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 7))) for _ in range(60)]
    lines = [json.dumps({"text": " ".join(draw.choices(words, k=draw.randint(5, 60)))}) for _ in range(300)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    source, out_dir = f"{folder}/text.jsonl", f"{folder}/set"
    return prepare(Settings(source=source, out_dir=out_dir, val_fraction=0.1, workers=1))


def arguments(flags, dataset):
    """A later flag replaces an earlier one of the same name."""
    return list({f.split("=")[0]: f for f in [*TINY, f"--dataset={dataset}", *flags]}.values())


def run(*flags, dataset):
    """train.py in this process."""
    handlers = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    argv, sys.argv = sys.argv, ["train.py", *arguments(flags, dataset)]
    try:
        train.main()
    finally:
        sys.argv = argv
        for s, handler in zip((signal.SIGTERM, signal.SIGINT), handlers):
            signal.signal(s, handler)


SEVERAL = """import sys
sys.path.insert(0, {root!r})
import torch.distributed as dist
import parallel, train
shard = parallel.shard
train.shard = lambda *args: shard(*args, unit=1)  # layers one by one: one unit would hold all
dist.init_process_group("gloo")
dist.destroy_process_group = lambda: None  # one process group serves all the runs
for sys.argv in {runs!r}:
    train.main()
"""


def torchrun(ranks, commands, dataset, tmp_path):
    """Several runs of train.py, one after another, in one start of torchrun: [flags of run 1, flags of run 2,
    ...]"""
    script = tmp_path / "several.py"
    runs = [["train.py", *arguments(flags, dataset)] for flags in commands]
    script.write_text(SEVERAL.format(root=str(ROOT), runs=runs))
    launched(ranks, script)


def launched(ranks, script):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={ranks}",
        script,
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-6000:]


def events(out_dir, kind):
    return [e for e in train.read_log(Path(out_dir) / "log.jsonl") if e["event"] == kind]


def numbers(out_dir):
    """What must not depend on how a run was interrupted or spread out."""
    steps = [(e["step"], e["loss"], e["lr"], e["grad_norm"]) for e in events(out_dir, "train")]
    return steps, [(e["step"], e["loss"]) for e in events(out_dir, "val")]


def weights(out_dir, name="model"):
    return load_file(checkpoint.find_checkpoint(out_dir) / f"{name}.safetensors")


def moments(out_dir):
    return load_file(next((checkpoint.find_checkpoint(out_dir) / "optimizer").iterdir()))


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


# ---- resume ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", METHODS)
def test_resume_is_exact(method, dataset, tmp_path):
    """12 steps equal 6 + 6 to the last bit, with the log cut off in a line of a step that the checkpoint has
    not seen; losses are means over 4 steps, or over 2 where a save cut them."""
    flags = [*METHODS[method], "--ema_decay=0.9", "--batch_size=2", "--log_interval=4"]
    run(*flags, f"--out_dir={tmp_path}/a", dataset=dataset)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "b/step_00000012")
    log = tmp_path / "b/log.jsonl"
    log.write_text(log.read_text().rpartition('{"event": "end"')[0] + '{"event": "tra')
    run(*flags, f"--out_dir={tmp_path}/b", dataset=dataset)
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")
    for read in (weights, moments, lambda path: weights(path, "ema")):
        assert same(read(tmp_path / "a"), read(tmp_path / "b"))
    ends = [events(tmp_path / x, "end")[0] for x in "ab"]
    assert ends[0]["val_tail_mean"] == ends[1]["val_tail_mean"]


def test_a_finished_run_says_so(dataset, tmp_path, capsys):
    """Also where its checkpoints were removed; but not of settings that are another run's."""
    run("--max_steps=2", f"--out_dir={tmp_path}/a", dataset=dataset)
    before = (tmp_path / "a/log.jsonl").read_text()
    for _ in range(2):
        run("--max_steps=2", f"--out_dir={tmp_path}/a", dataset=dataset)
        assert "is finished: all of its 2 steps" in capsys.readouterr().out
        shutil.rmtree(tmp_path / "a/step_00000002", ignore_errors=True)
    for flag in ("max_steps=1", "learning_rate=0.001", "lr_schedule=linear"):
        flags = ["--max_steps=2", f"--{flag}", f"--out_dir={tmp_path}/a"]
        wrong(["a holds another run", f"{flag.split('=')[1]} here"], *flags, dataset=dataset)
    assert (tmp_path / "a/log.jsonl").read_text() == before


def test_a_setting_that_an_older_checkpoint_lacks_has_its_default(dataset, tmp_path):
    run(f"--out_dir={tmp_path}/a", dataset=dataset)
    shutil.rmtree(tmp_path / "a/step_00000012")
    meta, log = tmp_path / "a/step_00000006/meta.json", tmp_path / "a/log.jsonl"
    log.write_text(log.read_text().rpartition('{"event": "end"')[0])
    older = json.loads(meta.read_text())
    del older["train_config"]["z_loss"], older["model_config"]["norm_eps"]
    meta.write_text(json.dumps(older))
    wrong(["z_loss=0.0 there, 0.1 here"], "--z_loss=0.1", f"--out_dir={tmp_path}/a", dataset=dataset)
    run(f"--out_dir={tmp_path}/a", dataset=dataset)
    assert events(tmp_path / "a", "end")


def test_a_stable_phase_goes_on(dataset, tmp_path):
    """Ten steps of wsd's stable phase, continued by a decay in another folder or by more of the stable phase,
    equal runs without a stop to the last bit; once the rate has fallen, neither is possible."""
    wsd = ["--lr_schedule=wsd", "--warmup_steps=2", "--lr_decay_ratio=0"]
    decay = [*wsd, "--max_steps=20", "--lr_decay_ratio=0.5"]
    run(*wsd, "--max_steps=10", f"--out_dir={tmp_path}/stable", dataset=dataset)
    run(*decay, "--keep_checkpoints=1", f"--out_dir={tmp_path}/whole", dataset=dataset)
    assert sorted(p.name for p in (tmp_path / "whole").glob("step*")) == ["step_00000010", "step_00000020"]
    shutil.copytree(tmp_path / "stable/step_00000010", tmp_path / "branch[1]/step_00000010")
    run(*decay, f"--out_dir={tmp_path}/branch[1]", dataset=dataset)
    steps, losses = numbers(tmp_path / "whole")
    assert numbers(tmp_path / "branch[1]") == (steps[10:], losses[1:])
    run(*wsd, "--max_steps=12", f"--out_dir={tmp_path}/stable", dataset=dataset)
    run(*wsd, "--max_steps=12", f"--out_dir={tmp_path}/longer", dataset=dataset)
    assert numbers(tmp_path / "stable")[0] == numbers(tmp_path / "longer")[0]
    for a, b in (("whole", "branch[1]"), ("longer", "stable")):
        assert same(weights(tmp_path / a), weights(tmp_path / b))
        assert same(moments(tmp_path / a), moments(tmp_path / b))
    words = ["another run (max_steps=20 there, 30 here; other learning rates up to step 20)"]
    wrong(words, *decay, "--max_steps=30", f"--out_dir={tmp_path}/branch[1]", dataset=dataset)
    flags = ["--max_steps=12", "--learning_rate=1e-3", f"--out_dir={tmp_path}/stable"]
    wrong(["learning_rate=0.003 there, 0.001 here"], *wsd, *flags, dataset=dataset)


def test_sigterm_saves(dataset, tmp_path):
    flags = [
        "--max_steps=1000000",
        "--eval_interval=1000000",
        "--save_interval=1000000",
        f"--out_dir={tmp_path}/a",
    ]
    command = [sys.executable, ROOT / "train.py", *arguments(flags, dataset)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    while not events(tmp_path / "a", "train"):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and "stopped by a signal after step" in out
    step = checkpoint.read_meta(tmp_path / "a")[1]["step"]
    assert 0 < step < 1000000 and events(tmp_path / "a", "train")[-1]["step"] == step


def test_keeps_the_newest_and_starts_from_weights(dataset, tmp_path):
    """Folders of other names are the user's; a start from weights keeps their origin, also after a resume."""
    (tmp_path / "a/step_00000004_best").mkdir(parents=True)
    run("--save_interval=2", "--keep_checkpoints=2", f"--out_dir={tmp_path}/a", dataset=dataset)
    kept = ["step_00000004_best", "step_00000010", "step_00000012"]
    assert sorted(p.name for p in (tmp_path / "a").glob("*step*")) == kept
    meta = tmp_path / "a/step_00000012/meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"origin": {"source": "somewhere"}}))
    flags = [f"--init_from={tmp_path}/a", "--max_steps=2", "--learning_rate=1e-12", "--save_interval=1"]
    flags += [f"--out_dir={tmp_path}/b"]
    run(*flags, dataset=dataset)
    for n, w in weights(tmp_path / "b").items():
        torch.testing.assert_close(w, weights(tmp_path / "a")[n], atol=1e-6, rtol=0)
    shutil.rmtree(tmp_path / "b/step_00000002")
    (tmp_path / "b/log.jsonl").unlink()
    run(*flags, dataset=dataset)
    assert checkpoint.read_meta(tmp_path / "b/step_00000002")[1]["origin"] == {"source": "somewhere"}


# ---- ranks, micro-steps, precision -----------------------------------------------------------------------
def test_a_part_of_torchrun_s_variables_counts_for_nothing(monkeypatch):
    """Left over from a cluster, say: one process is one process, and trains on the whole batch."""
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for left_out in [None, *variables]:
        for name, value in variables.items():
            monkeypatch.delenv(name, raising=False)
            if name != left_out:
                monkeypatch.setenv(name, value)
        found = runpy.run_path(str(ROOT / "parallel.py"))
        assert (found["rank"], found["world"]) == ((0, 1) if left_out else (1, 2)), left_out


def test_any_split_gives_the_same_losses(dataset, tmp_path):
    """One process and two, averaging and FSDP, however the batch is cut into micro-steps; every method."""
    two = {f"{m} ddp 2x4": flags for m, flags in METHODS.items()}
    two |= {f"{m} fsdp 2x4": [*METHODS[m], "--parallel=fsdp"] for m in ("baseline", "hc", "mhar_hw", "delta")}
    two |= {f"mhar {p} 2x(4x1)": [f"--parallel={p}", "--batch_size=1"] for p in ("ddp", "fsdp")}
    commands = [[*flags, f"--out_dir={tmp_path}/{name}", "--max_steps=6"] for name, flags in two.items()]
    torchrun(2, commands, dataset, tmp_path)
    for m, flags in METHODS.items():
        run(*flags, "--batch_size=8", "--max_steps=6", f"--out_dir={tmp_path}/{m} 1x8", dataset=dataset)
    run("--batch_size=2", "--max_steps=6", f"--out_dir={tmp_path}/mhar 1x(4x2)", dataset=dataset)
    for name in [*two, "mhar 1x(4x2)"]:
        one = next(f"{m} 1x8" for m in sorted(METHODS, key=len, reverse=True) if name.startswith(m))
        for a, b in zip(numbers(tmp_path / one), numbers(tmp_path / name), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, err_msg=name)


def test_average_gradients(tmp_path):
    """Of large and small parameters, on two ranks, where they lie."""
    script = tmp_path / "average.py"
    script.write_text(f"""import sys
sys.path.insert(0, {str(ROOT)!r})
import torch, torch.distributed as dist, parallel
parallel.choose_device("cpu")
generator = lambda rank: torch.Generator().manual_seed(rank)
draw = lambda rank: [torch.randn(n, 2, generator=generator(rank)) for n in (3, 1 << 20, 5, 1 << 19, 1)]
parameters = [torch.nn.Parameter(torch.empty_like(x)) for x in draw(0)]
for p, x in zip(parameters, draw(parallel.rank)):
    p.grad = x
places = [p.grad.data_ptr() for p in parameters]
parallel.average_gradients(parameters)
for p, a, b in zip(parameters, draw(0), draw(1)):
    torch.testing.assert_close(p.grad, (a + b) / 2)
assert places == [p.grad.data_ptr() for p in parameters]
assert parallel.same_on_all_ranks("x", torch.device("cpu"))
assert not parallel.same_on_all_ranks(str(parallel.rank), torch.device("cpu"))
parallel.barrier()
parallel.leave()
""")
    launched(2, script)


def test_resume_on_other_ranks(dataset, tmp_path):
    """12 steps on two ranks; 6 of them continued on one, two and four, EMA and micro-steps on; exact on as
    many ranks."""
    flags = ["--ema_decay=0.9", "--batch_size=2", "--log_interval=4"]
    fsdp = "--parallel=fsdp"

    def cut(source, target, *more):
        shutil.copytree(tmp_path / source, tmp_path / target)
        shutil.rmtree(tmp_path / target / "step_00000012")
        log = tmp_path / target / "log.jsonl"
        log.write_text(log.read_text().rpartition('{"event": "end"')[0])
        return [*flags, f"--out_dir={tmp_path / target}", *more]

    torchrun(
        2,
        [[*flags, f"--out_dir={tmp_path}/ddp"], [*flags, f"--out_dir={tmp_path}/fsdp", fsdp]],
        dataset,
        tmp_path,
    )
    again = [cut("ddp", "ddp to ddp"), cut("ddp", "ddp to fsdp", fsdp)]
    again += [cut("fsdp", "fsdp to ddp"), cut("fsdp", "fsdp to fsdp", fsdp)]
    torchrun(2, again, dataset, tmp_path)
    run(*cut("fsdp", "fsdp to one"), dataset=dataset)
    four = [cut("fsdp", "fsdp to ddp on four"), cut("ddp", "ddp to fsdp on four", fsdp)]
    torchrun(4, four, dataset, tmp_path)
    names = [p.name for p in tmp_path.glob("* to *")] + ["fsdp"]
    average = [e["loss_ema"] for e in events(tmp_path / "ddp", "val")]
    for name in names:
        for a, b in zip(numbers(tmp_path / "ddp"), numbers(tmp_path / name), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, err_msg=name)
        losses = [e["loss_ema"] for e in events(tmp_path / name, "val")]
        np.testing.assert_allclose(average, losses, rtol=2e-5, err_msg=name)
    assert len(names) == 8
    for kind in ("ddp", "fsdp"):
        assert numbers(tmp_path / kind) == numbers(tmp_path / f"{kind} to {kind}")
        for name in ("model", "ema"):
            assert same(weights(tmp_path / kind, name), weights(tmp_path / f"{kind} to {kind}", name))


def test_ema(dataset, tmp_path):
    """The running average is of the weights, starts at the initial ones, and is what loss_ema evaluates."""
    run("--ema_decay=0.75", "--save_interval=1", "--max_steps=3", f"--out_dir={tmp_path}/a", dataset=dataset)
    config = GPTConfig(**checkpoint.read_meta(tmp_path / "a")[1]["model_config"])
    for n, average in GPT(config, seed=42).named_parameters():
        for step in (1, 2, 3):
            average = 0.75 * average.detach() + 0.25 * weights(tmp_path / f"a/step_0000000{step}")[n]
        torch.testing.assert_close(weights(tmp_path / "a", "ema")[n], average)
    model, _ = checkpoint.load_model(tmp_path / "a", torch.device("cpu"), weights="ema")
    windows = data.ValWindows(data.open_bin(dataset / "val.bin"), 32, 7)
    tokens = torch.from_numpy(windows.batch(range(windows.n)))
    loss = model(tokens[:, :-1], tokens[:, 1:].contiguous())[1].item()
    assert loss == pytest.approx(events(tmp_path / "a", "val")[-1]["loss_ema"], rel=1e-5)


def test_evaluation_is_fixed_and_leaves_training_alone(dataset, tmp_path):
    run("--eval_interval=2", f"--out_dir={tmp_path}/a", dataset=dataset)
    run("--eval_interval=12", "--batch_size=8", f"--out_dir={tmp_path}/b", dataset=dataset)
    for a, b in zip(numbers(tmp_path / "a")[0], numbers(tmp_path / "b")[0]):
        np.testing.assert_allclose(a, b, rtol=2e-5)
    np.testing.assert_allclose(numbers(tmp_path / "a")[1][-1], numbers(tmp_path / "b")[1][-1], rtol=1e-5)


def test_methods_see_the_same_data_and_trunk(dataset, tmp_path):
    """delta with its gates closed is the baseline: the first losses are equal to the bit."""
    for m in ("baseline", "delta"):
        run(*METHODS[m], "--max_steps=1", f"--out_dir={tmp_path}/{m}", dataset=dataset)
    a, b = (events(tmp_path / m, "train")[0]["loss"] for m in ("baseline", "delta"))
    assert a == b


def test_pure_bfloat16(dataset, tmp_path):
    run("--param_dtype=bfloat16", f"--out_dir={tmp_path}/a", dataset=dataset)
    assert {w.dtype for w in weights(tmp_path / "a").values()} == {torch.bfloat16}
    losses = [e["loss"] for e in events(tmp_path / "a", "train")]
    assert losses[-1] < losses[0] - 0.1


# ---- faults ----------------------------------------------------------------------------------------------
def test_kill_and_start_again(dataset, tmp_path):
    """kill -9 at random moments and, every other time, amid a save: the same command always goes on, and ends
    as an undisturbed run. KILLS=20 python -m pytest tests/test_train.py -k kill   (two are enough for every
    day)
    """
    wanted = int(os.environ.get("KILLS", 2))
    flags = [f"--max_steps={30 * wanted}", "--save_interval=1", "--keep_checkpoints=2", "--eval_interval=10"]
    run(*flags, f"--out_dir={tmp_path}/a", dataset=dataset)
    command = [sys.executable, ROOT / "train.py", *arguments([*flags, f"--out_dir={tmp_path}/b"], dataset)]
    draw, kills, log = random.Random(1), 0, tmp_path / "b/log.jsonl"
    while True:
        started = time.time()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and kills < wanted:
            if log.exists() and log.stat().st_mtime > started:  # it has read its checkpoint and steps
                time.sleep(draw.uniform(0, 0.4))
                while kills % 2 and not list((tmp_path / "b").glob(".*.part")) and process.poll() is None:
                    time.sleep(0)  # until a save has begun
                process.kill()
                kills += process.wait() == -signal.SIGKILL
            time.sleep(0.02)
        if process.wait() == 0:
            break
        assert process.returncode == -signal.SIGKILL
    assert kills == wanted, "the run ended before it could be killed"
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b")) and same(
        moments(tmp_path / "a"), moments(tmp_path / "b")
    )
    assert not list((tmp_path / "b").glob(".*.part"))


@pytest.mark.parametrize("damage", ["model.safetensors", "meta.json", "optimizer"])
def test_a_damaged_checkpoint_is_named(damage, dataset, tmp_path):
    """In one line; removed, the run goes on from the one before it."""
    run(f"--out_dir={tmp_path}/a", dataset=dataset)
    before = numbers(tmp_path / "a")
    log = tmp_path / "a/log.jsonl"
    log.write_text(log.read_text().rpartition('{"event": "end"')[0])
    broken = tmp_path / "a/step_00000012" / damage
    if broken.is_dir():
        next(broken.iterdir()).unlink()
    else:
        os.truncate(broken, broken.stat().st_size // 2)
    if damage != "meta.json":  # a step of 12 would be taken for a finished run
        meta = tmp_path / "a/step_00000012/meta.json"
        meta.write_text(json.dumps(json.loads(meta.read_text()) | {"step": 11}))
    wrong(["step_00000012 cannot be read", "remove that folder"], f"--out_dir={tmp_path}/a", dataset=dataset)
    shutil.rmtree(tmp_path / "a/step_00000012")
    run(f"--out_dir={tmp_path}/a", dataset=dataset)
    assert numbers(tmp_path / "a") == before


def test_a_full_disk_wherever_it_is_met(dataset, tmp_path, capsys, monkeypatch):
    """The lock, the log, a checkpoint's folder, its last file and its rename: one line, exit code 1; the
    checkpoint before stays, and the same command goes on from it."""
    run(f"--out_dir={tmp_path}/a", dataset=dataset)
    before, log = numbers(tmp_path / "a"), tmp_path / "a/log.jsonl"
    shutil.rmtree(tmp_path / "a/step_00000012")
    log.write_text(log.read_text().rpartition('{"event": "end"')[0])

    def fails():
        with pytest.raises(SystemExit) as caught:
            train.cli(lambda: run(f"--out_dir={tmp_path}/a", dataset=dataset))
        assert caught.value.code == 1
        del caught
        gc.collect()  # the frames in its traceback hold the lock on out_dir
        assert re.search("^error: .*No space left on device", capsys.readouterr().err, re.M)
        assert [p.name for p in (tmp_path / "a").glob("step*")] == ["step_00000006"]

    for file in (".lock", "log.part"):
        (tmp_path / "a" / file).unlink(missing_ok=True)
        (tmp_path / "a" / file).symlink_to("/dev/full")
        fails()
        (tmp_path / "a" / file).unlink()
    places = (builtins, "open", "log.jsonl"), (Path, "mkdir", ".part"), (Path, "write_text", "meta.json")
    for owner, name, file in (*places, (os, "replace", ".part")):
        real = getattr(owner, name)

        def full(path, *args, real=real, file=file, **kwargs):
            if str(path).endswith(file):
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(path, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            fails()
    run(f"--out_dir={tmp_path}/a", dataset=dataset)
    assert numbers(tmp_path / "a") == before


def test_no_compiler(dataset, tmp_path):
    """One line that says what to install, instead of torch's hundred."""
    (tmp_path / "python").symlink_to(sys.executable)
    command = [sys.executable, ROOT / "train.py", *arguments(["--compile=true"], dataset)]
    env = {"PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, f"--out_dir={tmp_path}/a"], env=os.environ | env, capture_output=True, text=True
    )
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "apt install g++" in done.stderr and "--compile=false" in done.stderr


def test_a_log_without_its_checkpoints(dataset, tmp_path):
    """A run that died before its first save begins again; one that had saved is not overwritten."""
    run("--max_steps=6", f"--out_dir={tmp_path}/a", dataset=dataset)
    shutil.rmtree(tmp_path / "a/step_00000006")
    log = tmp_path / "a/log.jsonl"
    text = log.read_text().rpartition('{"event": "end"')[0]
    log.write_text(text)
    wrong(
        ["its checkpoints are not", "start over"], "--max_steps=6", f"--out_dir={tmp_path}/a", dataset=dataset
    )
    wrong(
        ["another run", "n_layer=2 there, 3 here"],
        "--max_steps=6",
        "--n_layer=3",
        f"--out_dir={tmp_path}/a",
        dataset=dataset,
    )
    assert log.read_text() == text
    log.write_text(text.rpartition('{"event": "save"')[0])
    run("--max_steps=6", f"--out_dir={tmp_path}/a", dataset=dataset)
    assert len(events(tmp_path / "a", "train")) == 6
    shutil.rmtree(tmp_path / "a/step_00000006")
    log.write_text('{"event": "sta')
    wrong(["log.jsonl"], "--max_steps=6", f"--out_dir={tmp_path}/a", dataset=dataset)


@pytest.mark.parametrize(
    "limit", [60_000, 150_000]
)  # the weights are 118 kB, the optimizer's state twice that
def test_a_full_disk(limit, dataset, tmp_path):
    """Files beyond a limit cannot be written: one line, exit code 1, no checkpoint; then the same command
    goes on."""
    script = f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    script += f"; sys.path.insert(0, {str(ROOT)!r}); import train; train.cli(train.main)"
    command = [sys.executable, "-c", script, *arguments([f"--out_dir={tmp_path}/a"], dataset)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (
        done.returncode == 1
        and "error: saving step 6 failed" in done.stderr
        and "Traceback" not in done.stderr
    )
    assert not checkpoint.find_checkpoint(tmp_path / "a")
    run(f"--out_dir={tmp_path}/a", dataset=dataset)
    assert len(events(tmp_path / "a", "train")) == 12 and not list((tmp_path / "a").glob(".*.part"))


def test_a_checkpoint_of_another_model_is_refused(dataset, tmp_path):
    """Also where shapes differ in a way that copying would broadcast, or a field is not known here."""
    run("--max_steps=2", f"--out_dir={tmp_path}/a", dataset=dataset)
    saved, meta = (tmp_path / "a/step_00000002" / name for name in ("model.safetensors", "meta.json"))
    tensors = load_file(saved)
    save_file(tensors | {"residual.query": tensors["residual.query"][:1].clone()}, saved)
    flags = [f"--init_from={tmp_path}/a", f"--out_dir={tmp_path}/b"]
    wrong(["does not fit this model", "residual.query"], *flags, dataset=dataset)
    older = json.loads(meta.read_text())
    older["model_config"]["depth_of_field"] = 3
    meta.write_text(json.dumps(older))
    wrong(["does not know: ['depth_of_field']"], *flags, dataset=dataset)


def test_a_damaged_log_keeps_its_other_lines(dataset, tmp_path):
    """And where the newest checkpoint of a finished run was removed, the run goes on from the one before."""
    run(f"--out_dir={tmp_path}/a", dataset=dataset)
    before, log = numbers(tmp_path / "a"), tmp_path / "a/log.jsonl"
    lines = log.read_text().splitlines()
    damaged = [lines[3][:40], "\0\0\0", "5", "[1]", '"step"', "null", "{}", '{"event": "train"}', "NaN"]
    log.write_text("\n".join([*lines[:3], *damaged, *lines[4:]]) + "\n")
    shutil.rmtree(tmp_path / "a/step_00000012")
    run(f"--out_dir={tmp_path}/a", dataset=dataset)
    steps, losses = numbers(tmp_path / "a")
    assert steps == before[0][:2] + before[0][3:] and losses == before[1]


def test_one_process_at_a_time(dataset, tmp_path):
    (tmp_path / "a").mkdir()
    with open(tmp_path / "a/.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        wrong(["another process trains in", "--out_dir="], f"--out_dir={tmp_path}/a", dataset=dataset)


def test_ranks_that_share_no_folder(dataset, tmp_path):
    """Every rank says so instead of writing half a checkpoint each; so do ranks that start from different
    steps."""
    flags = ["--save_interval=1", "--batch_size=2"]
    run(*flags, "--max_steps=3", f"--out_dir={tmp_path}/0", dataset=dataset)
    shutil.rmtree(tmp_path / "0/step_00000003")
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    shutil.rmtree(tmp_path / "1/step_00000002")
    for rank in (0, 1):
        (tmp_path / f"{rank}/log.jsonl").unlink()
    commands = [
        arguments([*flags, f"--out_dir={tmp_path}/new"], dataset),
        arguments([*flags, "--max_steps=3", f"--out_dir={tmp_path}/"], dataset),
    ]
    script = tmp_path / "apart.py"
    script.write_text(f"""import sys
sys.path.insert(0, {str(ROOT)!r})
import parallel, train
train.time.sleep = lambda seconds: None
for flags in {commands!r}:
    sys.argv = ["train.py", *flags[:-1], flags[-1] + str(parallel.rank)]
    try:
        train.main()
        raise SystemExit("it trained")
    except train.UserError as error:
        assert "the ranks do not see the same" in str(error), error
parallel.leave()
""")
    launched(2, script)
    assert not list(tmp_path.glob("new*/step_*"))


def test_a_dead_rank_ends_the_others(dataset, tmp_path):
    """kill -9 of one rank under torchrun: the other ends, torchrun says which one died, a checkpoint is
    there."""
    flags = [f"--out_dir={tmp_path}/a", "--max_steps=3000", "--eval_interval=3000", "--save_interval=20"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [ROOT / "train.py", *arguments(flags, dataset)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env)
    while not list((tmp_path / "a").glob("step_*")):
        time.sleep(0.1)
        assert process.poll() is None
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    start = time.monotonic()
    _, said = process.communicate(timeout=60)
    assert process.returncode != 0 and time.monotonic() - start < 60 and "Signal 9 (SIGKILL)" in said
    assert not [p for p in children if Path(f"/proc/{p}").exists()]
    assert checkpoint.read_meta(tmp_path / "a")[1]["step"] >= 20


# ---- what is logged --------------------------------------------------------------------------------------
def test_train_losses_are_means(dataset, tmp_path, capsys):
    """Since the line before, whatever the micro-step; final loss and tail mean are named."""
    run(
        "--max_steps=7", "--eval_interval=5", "--save_interval=99", f"--out_dir={tmp_path}/a", dataset=dataset
    )
    said = capsys.readouterr().out
    val = [e["loss"] for e in events(tmp_path / "a", "val")]
    end = f"done: final val {val[1]:.4f}, tail mean {np.mean(val):.4f} (last 2 evaluations)"
    assert end in said and f" over 1 steps  val {val[0]:.4f} " in said
    flags = ["--batch_size=2", "--eval_interval=5", "--save_interval=99", "--log_interval=3"]
    run(*flags, "--max_steps=7", f"--out_dir={tmp_path}/b", dataset=dataset)
    losses = [e["loss"] for e in events(tmp_path / "a", "train")]
    want = {3: losses[:3], 5: losses[3:5], 6: losses[5:6], 7: losses[6:]}
    got = {e["step"]: e["loss"] for e in events(tmp_path / "b", "train")}
    assert got == pytest.approx({step: np.mean(part) for step, part in want.items()}, rel=1e-5)
    assert f"train {np.mean(losses[3:5]):.4f} over 2 steps  val" in capsys.readouterr().out


def test_gradient_norms_are_those_before_clipping(dataset, tmp_path):
    for clip in (0, 0.01):
        flags = ["--max_steps=1", f"--grad_clip={clip}", f"--out_dir={tmp_path}/{clip}"]
        run(*flags, dataset=dataset)
    free, clipped = (events(tmp_path / clip, "train")[0] for clip in ("0", "0.01"))
    for name in ("grad_norm", "query_grad_norm"):
        assert free[name] == pytest.approx(clipped[name]) and free[name] > 0.01


def test_80_columns(dataset, tmp_path, capsys, monkeypatch):
    """Neither the header wraps nor the bar shrinks."""
    terminal, end = os.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    monkeypatch.setattr(sys, "stderr", open(end, "w", encoding="utf-8"))
    run("--max_steps=2", f"--out_dir={tmp_path}/a", dataset=dataset)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 10 and not [
        x for x in lines if len(x) > 80 and not re.search("dataset=|out_dir=|run  ", x)
    ]
    said = os.read(terminal, 4096)
    while not said.endswith(b"\n"):
        said += os.read(terminal, 4096)
    bar = said.decode().split("\r")[-2]
    assert "2/2" in bar and "tok/s]" in bar and len(bar) <= 80 and len(bar.split("|")[1]) > 20, bar


def test_log(dataset, tmp_path, capsys):
    run("--residual=delta", f"--out_dir={tmp_path}/a", dataset=dataset)
    kinds = [e["event"] for e in train.read_log(tmp_path / "a/log.jsonl")]
    assert kinds == ["start"] + 2 * (["train"] * 6 + ["val", "save"]) + ["end"]
    start, last, val, end = (events(tmp_path / "a", k)[-1] for k in ("start", "train", "val", "end"))
    assert start["tokens_per_step"] == 8 * 32 and start["kernel"] == "torch"
    assert start["params"]["routing"] == 4 * (3 * 32 + 1)
    assert start["defaults"]["learning_rate"] == 5e-4 and "batch_size" not in start["defaults"]
    assert start["defaults"].keys() | train.FREE == start["config"].keys() | start["model_config"].keys()
    assert last["tokens"] == 12 * 8 * 32 and last["mfu"] is None
    assert last["lr"] == pytest.approx(3e-3 * (0.1 + 0.9 * (1 + np.cos(0.75 * np.pi)) / 2))
    assert (
        last["gate_grad_norm"] > 0 and last["query_grad_norm"] > 0 and 0 < last["route_entropy"] < np.log(10)
    )
    losses = [e["loss"] for e in events(tmp_path / "a", "val")]
    assert end["val_tail_mean"] == pytest.approx(np.mean(losses)) and end["val_tail_count"] == 2
    said = capsys.readouterr().out
    for words in (
        "with the 388 of residual=delta",
        "tokens of bytes, an epoch is",
        "256 tokens = 1 ranks",
        "routing     torch (",
        "weight decay 0.1",
    ):
        assert words in said, words


def test_weights_and_biases(dataset, tmp_path, monkeypatch):
    """A restart goes on with its run there; what wandb refuses, or a missing package, is one line."""
    begun, flags = [], ["--wandb=project", f"--out_dir={tmp_path}/a"]

    class Error(Exception):
        pass

    def init(**kwargs):
        begun.append(kwargs)
        if len(begun) == 3:
            raise Error("api_key not configured")
        return SimpleNamespace(id=kwargs["id"] or "chosen by wandb")

    fake = SimpleNamespace(init=init, log=lambda numbers, step: None, Error=Error)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run(*flags, dataset=dataset)
    for _ in range(2):
        shutil.rmtree(tmp_path / "a/step_00000012", ignore_errors=True)
        log = tmp_path / "a/log.jsonl"
        log.write_text(log.read_text().rpartition('{"event": "end"')[0])
        if len(begun) == 1:
            run(*flags, dataset=dataset)
        else:
            wrong(["api_key not configured", "wandb login"], *flags, dataset=dataset)
    assert [b["id"] for b in begun] == [None, "chosen by wandb", "chosen by wandb"]
    assert {(b["resume"], b["project"]) for b in begun} == {("allow", "project")}
    monkeypatch.setitem(sys.modules, "wandb", None)
    wrong(["pip install wandb"], *flags, dataset=dataset)


def test_schedules():
    for kind, middle, late in (("cosine", 0.55, 0.1220), ("linear", 0.55, 0.19), ("wsd", 1.0, 0.5091)):
        cfg = train.TrainConfig(lr_schedule=kind, warmup_steps=10, max_steps=110, learning_rate=1.0)
        rates = [train.learning_rate(cfg, step) for step in (0, 10, 60, 100)]
        assert rates == pytest.approx([0.1, 1.0, middle, late], abs=1e-3)
    for ratio, begins in ((0.2, 88), (0.5, 55), (0.0, 110), (1.0, 10)):  # wsd: the share of max_steps
        cfg = replace(cfg, lr_decay_ratio=ratio)
        assert train.decay_start(cfg) == begins
        rates = [train.learning_rate(cfg, step) for step in range(10, 110)]
        assert [i + 10 for i, rate in enumerate(rates) if rate < 1] == list(range(begins + 1, 110))


def test_weight_decay_groups():
    """By what the settings and the residual method say, not by names or shapes elsewhere."""
    tiny = dict(vocab_size=64, n_layer=2, n_embd=32, n_head=4, n_kv_head=2, ffn_dim=48, route_heads=4)
    for residual, spared in (("mhar", []), ("hc", ["residual.static"]), ("delta", [])):
        model = GPT(GPTConfig(**tiny, residual=residual))
        name = {p: n for n, p in model.named_parameters()}
        for decay in ("all", "matrices"):
            groups = train.parameter_groups(model, train.TrainConfig(decay=decay, route_lr_scale=3.0))
            assert sum(len(g["params"]) for g in groups) == len(name)
            for group in groups:
                for n in map(name.get, group["params"]):
                    matrix = n.startswith("layers.") and n.endswith("proj.weight")
                    assert (group["weight_decay"] == 0.1) == (
                        matrix if decay == "matrices" else n not in spared
                    )
                    assert group["lr_scale"] == (3.0 if n.startswith("residual.") else 1.0)


# ---- mistakes --------------------------------------------------------------------------------------------
def header_changed(dataset, folder, file="train.bin", **changes):
    """A copy of the data set, a file of which says something else in its header."""
    shutil.copytree(dataset, folder)
    raw = (folder / file).read_bytes()
    header = data.open_bin(folder / file).header | changes
    (folder / file).write_bytes(data.pack_header(header) + raw[data.HEADER_BYTES :])
    return folder


def wrong(words, *flags, dataset):
    with pytest.raises(UserError) as error:
        run(*flags, dataset=dataset)
    said = str(error.value)
    del error
    gc.collect()  # the frames in its traceback hold the lock on out_dir
    assert "\n" not in said
    for word in words:
        assert word in said, f"{word!r} not in {said}"
    return said


def test_mistakes(dataset, tmp_path, monkeypatch):
    out = f"--out_dir={tmp_path}/new"
    ids = header_changed(dataset, tmp_path / "ids", largest_id=999)
    qwen = header_changed(dataset, tmp_path / "other", tokenizer="qwen3")
    (tmp_path / "file").write_text("mine")
    for flags, words in {
        "--route_heads=5": ["n_embd=32", "route_heads=5"],
        "--n_kv_head=3": ["n_kv_head=3"],
        "--learning_rat=1": ["learning_rat", "learning_rate"],
        "--batch_size=3": ["global_batch_size=8", "batch_size=3", "1 ranks"],
        "--dataset=nowhere": ["nowhere", "prepare_data.py"],
        "--block_size=100000": ["train", "100,001"],
        "--block_size=20000": ["val", "20,001"],
        "--vocab_size=200": ["vocab_size=320 at least, not 200"],
        f"--dataset={ids} --vocab_size=320": ["vocab_size=1000 at least"],
        f"--dataset={qwen}": ["qwen3", "bytes"],
        "--parallel=fsdp": ["--parallel=fsdp", "torchrun"],
        "--device=gpu9": ["--device=gpu9"],
        "--device=cuda:99": ["--device=cuda:99"],
        "--device=cpu:x": ["--device=cpu:x"],
        "--cuda_graph=true": ["--cuda_graph=true"],
        "--kernel=triton": ["kernel=triton"],
        f"--init_from={tmp_path}": ["is not a checkpoint"],
        "--param_dtype=bfloat16 --dtype=float32": ["param_dtype=bfloat16"],
        f"--out_dir={tmp_path}/file/x": ["--out_dir", "cannot be written to"],
        "--out_dir=s3://bucket/a": ["--out_dir=s3:", "is a URL"],
        "--rope_scaling={'rope_type':'llama3'}": ["rope_scaling", "factor"],
    }.items():
        wrong(words, out, *flags.split(), dataset=dataset)
    for flag in ("max_steps=0", "batch_size=0", "n_head=0", "head_dim=-2", "learning_rate=-1.0", "beta1=1.5"):
        wrong([flag], out, f"--{flag}", dataset=dataset)
    for flag in ("ema_decay=2.0", "warmup_steps=-5", "seed=99999999999999999999", "rope_theta=0.0"):
        wrong([flag], out, f"--{flag}", dataset=dataset)
    shutil.copytree(dataset, tmp_path / "short")
    os.truncate(tmp_path / "short/train.bin", 5000)
    wrong(["train.bin", "truncated"], out, dataset=tmp_path / "short")
    assert not (tmp_path / "new").exists() and not Path("s3:").exists()


def test_a_folder_that_holds_another_run(dataset, tmp_path):
    """What differs, the data first and then the model, and a flag that starts the new run."""
    run("--max_steps=2", f"--out_dir={tmp_path}/a", dataset=dataset)
    here, other = ["--max_steps=2", f"--out_dir={tmp_path}/a"], tmp_path / "set"
    words = "a holds another run (learning_rate=0.003 there, 0.001 here; other learning rates up to step 2)"
    wrong(
        [words, f"--out_dir={tmp_path}/a_learning_rate=0.001"], *here, "--learning_rate=1e-3", dataset=dataset
    )
    wrong(["another run (eval_windows=7 there, 3 here)"], *here, "--eval_windows=3", dataset=dataset)
    words = "another run (residual=mhar there, hc here; n_layer=2 there, 3 here; seed=42 there, 1 here)"
    wrong([words], *here, "--seed=1", "--n_layer=3", "--residual=hc", dataset=dataset)
    wrong(["is another model", "ffn_dim=48 there, 64 here"], f"--init_from={tmp_path}/a", "--ffn_dim=64",
          f"--out_dir={tmp_path}/b", dataset=dataset)  # fmt: skip
    for file in ("train.bin", "val.bin"):
        shutil.copytree(
            header_changed(dataset, tmp_path / file, file, sha256="0" * 64), other, dirs_exist_ok=True
        )
        words = (
            f"another run (dataset={dataset} (other data) there, {other} here; residual=mhar there, hc here"
        )
        said = wrong([words], *here, "--residual=hc", dataset=other)
    run("--residual=hc", "--max_steps=2", said.rpartition(" ")[2], dataset=other)  # as it proposes
    shutil.copytree(dataset, tmp_path / "moved")  # the same data elsewhere are the same run
    run(*here, dataset=tmp_path / "moved")
    meta = tmp_path / "a/step_00000002/meta.json"  # as convert_8b.py imports a model: of no data, at step 0
    imported = json.loads(meta.read_text()) | {"step": 0, "data": {"dataset": None, "tokenizer": None}}
    shutil.copytree(meta.parent, tmp_path / "imported/step_00000000")
    (tmp_path / "imported/step_00000000/meta.json").write_text(json.dumps(imported))
    wrong(["another run (dataset=None"], f"--out_dir={tmp_path}/imported", dataset=dataset)
    wrong(["is a checkpoint"], f"--out_dir={tmp_path}/a/step_00000002", dataset=dataset)
    qwen = [header_changed(tmp_path / "moved", tmp_path / "q", tokenizer="qwen3")]
    qwen += [header_changed(qwen[0], tmp_path / "qq", "val.bin", tokenizer="qwen3", sha256="1")]
    wrong([f"another run (dataset={dataset} (other data) there"], *here, dataset=qwen[1])
    flags = [f"--init_from={tmp_path}/a", f"--out_dir={tmp_path}/b"]
    wrong(["is of tokenizer bytes", "--dataset= must be of bytes"], *flags, dataset=qwen[1])


def test_the_default_folder(dataset, tmp_path, monkeypatch):
    """A flag that makes another run has a folder of its own; one that does not goes on in the same."""
    monkeypatch.chdir(tmp_path)
    lines = [
        flag[2:].replace("=", " = ") for flag in TINY if "device" not in flag and "max_steps" not in flag
    ]
    Path("tiny.py").write_text("\n".join([*lines, "device = 'cpu'", "max_steps = 1"]))
    shutil.copytree(dataset, "my data")
    monkeypatch.setattr(sys.modules[__name__], "TINY", [])

    def made(*flags, dataset="my data"):
        before = set(os.listdir("out") if os.path.exists("out") else [])
        run("tiny.py", *flags, dataset=dataset)
        return sorted(set(os.listdir("out")) - before)

    assert made() == ["tiny_mhar_dataset=my-data"]
    assert made("--batch_size=2", "--eval_interval=1", "--compile=false") == []
    assert made("--residual=baseline") == ["tiny_baseline_dataset=my-data"]
    assert made("--max_steps=2", "--seed=1") == ["tiny_mhar_dataset=my-data_seed=1_max_steps=2"]
    start = "--init_from=out/tiny_baseline_dataset=my-data/step_00000001"
    name = "tiny_baseline_dataset=my-data_init_from=out-tiny_baseline_dataset-my-data-step_00000001"
    assert made(start, "--residual=baseline") == [name]
    assert made(start, "--residual=baseline", "--eval_interval=1") == []
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    long = made(
        f"--rope_scaling={scaling}", *(f"--{k}=0.5" for k in ("beta1", "beta2", "z_loss", "grad_clip"))
    )
    assert re.fullmatch(r"[\w.=+-]{100,200}", long[0])


def test_exit_codes(dataset, tmp_path):
    """2 and one line for a mistake, 1 for numbers that are not finite, whose checkpoint stays as it was."""
    command = [sys.executable, ROOT / "train.py", *TINY, f"--dataset={dataset}"]
    done = subprocess.run([*command, "--n_layre=3"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1 and "n_layer" in done.stderr
    assert not os.listdir(tmp_path)
    run(f"--out_dir={tmp_path}/a", dataset=dataset)
    shutil.rmtree(tmp_path / "a/step_00000012")
    (tmp_path / "a/log.jsonl").unlink()
    saved = tmp_path / "a/step_00000006/model.safetensors"
    tensors = load_file(saved)
    tensors["layers.1.mlp.down_proj.weight"][:] = float("inf")
    save_file(tensors, saved)
    with pytest.raises(train.RunError, match="step 7: loss nan.* those of earlier steps"):
        run("--save_interval=1", f"--out_dir={tmp_path}/a", dataset=dataset)
    assert [p.name for p in (tmp_path / "a").glob("*step_*")] == ["step_00000006"]
