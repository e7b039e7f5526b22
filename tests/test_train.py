"""train.py run the way a user runs it: resume, ranks and micro-steps, what it logs, and what it answers to mistakes.

    python -m pytest tests/test_train.py
"""
import fcntl
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
from safetensors.torch import load_file, save_file

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


SEVERAL = """import sys
sys.path.insert(0, {root!r})
import torch.distributed as dist
import train
train.FSDP_UNIT = 1  # single layers: one unit would hold these models whole
dist.init_process_group("gloo")
dist.init_process_group = dist.destroy_process_group = lambda *args, **kwargs: None  # one meeting of the ranks serves all the runs
for sys.argv in {runs!r}:
    train.main()
"""


def torchrun(ranks, commands, dataset, tmp_path):
    """Several runs of train.py, one after another, in one start of torchrun: [flags of run 1, flags of run 2, ...]"""
    runs = [["train.py", *{f.split("=")[0]: f for f in [*TINY, f"--dataset={dataset}", "--device=cpu", *flags]}.values()] for flags in commands]
    script = tmp_path / "several.py"
    script.write_text(SEVERAL.format(root=str(ROOT), runs=runs))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", script]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-6000:]


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


def test_resume_into_a_new_folder(dataset, tmp_path):
    """--resume=PATH branches off a run: the new folder has the old one's past, and a log line cut off in mid-write does not matter."""
    run(f"--out_dir={tmp_path}/a", dataset=dataset)
    with open(tmp_path / "a/log.jsonl", "a") as f:
        f.write('{"event": "tra')
    run(f"--out_dir={tmp_path}/b", f"--resume={tmp_path}/a/step_00000006", dataset=dataset)
    with open(tmp_path / "a/log.jsonl") as f:
        lines = f.read().splitlines()[:-1]
    (tmp_path / "a/log.jsonl").write_text("\n".join(lines) + "\n")
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")
    wrong(["holds a run already", "--out_dir="], f"--out_dir={tmp_path}/b", f"--resume={tmp_path}/a/step_00000006", dataset=dataset)


def test_finished_run_says_so(dataset, tmp_path, capsys):
    run("--max_steps=2", f"--out_dir={tmp_path}/a", dataset=dataset)
    before = (tmp_path / "a/log.jsonl").read_text()
    run("--max_steps=2", f"--out_dir={tmp_path}/a", dataset=dataset)
    assert "is finished: 2 of 2 steps" in capsys.readouterr().out
    assert (tmp_path / "a/log.jsonl").read_text() == before


@pytest.mark.parametrize("log_interval", [1, 10**6])
def test_sigterm_saves(log_interval, dataset, tmp_path):
    """At the next line of the log, or after the step at hand where lines are far apart."""
    flags = ["--max_steps=1000000", "--eval_interval=1000000", "--save_interval=1000000", "--keep_checkpoints=1", f"--log_interval={log_interval}"]
    command = [sys.executable, ROOT / "train.py", *{f.split("=")[0]: f for f in [*TINY, f"--dataset={dataset}", "--device=cpu", f"--out_dir={tmp_path}/a", *flags]}.values()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    while not (tmp_path / "a/log.jsonl").exists() or not (events(tmp_path / "a", "train") or log_interval > 1):
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and "stopped by a signal after step" in out
    step = train.read_meta(train.find_checkpoint(tmp_path / "a"))["step"]
    assert 0 < step < 1000000 and events(tmp_path / "a", "train")[-1]["step"] == step


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
    """One process and two, DDP and FSDP, however the batch is cut into micro-steps; every method, without find_unused_parameters."""
    two = {f"{m} ddp 2x4": flags for m, flags in METHODS.items()}
    two |= {f"{m} fsdp 2x4": [*METHODS[m], "--parallel=fsdp"] for m in ("baseline", "hc", "mhar", "delta")}
    two |= {f"mhar {p} 2x(4x1)": ["--residual=mhar", f"--parallel={p}", "--batch_size=1"] for p in ("ddp", "fsdp")}
    two["mhar fsdp 2x(4x1), shares summed every time"] = ["--parallel=fsdp", "--batch_size=1", "--fsdp_accumulate=sharded"]
    torchrun(2, [[*flags, f"--out_dir={tmp_path}/{name}", "--max_steps=6"] for name, flags in two.items()], dataset, tmp_path)
    for m, flags in METHODS.items():
        run(*flags, "--batch_size=8", "--max_steps=6", f"--out_dir={tmp_path}/{m} 1x8", dataset=dataset)
    run("--batch_size=2", "--max_steps=6", f"--out_dir={tmp_path}/mhar 1x(4x2)", dataset=dataset)
    for name in [*two, "mhar 1x(4x2)"]:
        one = next(f"{m} 1x8" for m in sorted(METHODS, key=len, reverse=True) if name.startswith(m))
        for a, b in zip(numbers(tmp_path / one), numbers(tmp_path / name), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, err_msg=name)


def test_average_gradients(tmp_path):
    """Of large and small parameters, on two ranks; gloo cannot average, so here it sums."""
    script = tmp_path / "average.py"
    script.write_text(f"""import sys, types
sys.path.insert(0, {str(ROOT)!r})
import torch, torch.distributed as dist, train
dist.init_process_group("gloo")
train.dist.ReduceOp = types.SimpleNamespace(AVG=dist.ReduceOp.SUM)
draw = lambda rank: [torch.randn(n, generator=torch.Generator().manual_seed(rank)).view(-1, 2) for n in (6, 2 << 20, 10, 1 << 20, 2)]
parameters = [torch.nn.Parameter(torch.empty_like(x)) for x in draw(0)]
for p, x in zip(parameters, draw(dist.get_rank())):
    p.grad = x
places = [p.grad.data_ptr() for p in parameters]
train.average_gradients(parameters)
assert all(torch.equal(p.grad, a + b) for p, a, b in zip(parameters, draw(0), draw(1)))
assert places == [p.grad.data_ptr() for p in parameters]
""")
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_resume_on_other_ranks(dataset, tmp_path):
    """12 steps on two ranks; 6 of them continued on one, two and four, DDP and FSDP each from the other's checkpoint, EMA and micro-steps on."""
    flags = ["--ema_decay=0.9", "--batch_size=2"]

    def cut(source, target):
        shutil.copytree(tmp_path / source, tmp_path / target)
        shutil.rmtree(tmp_path / target / "step_00000012")
        return [*flags, f"--out_dir={tmp_path / target}"]

    torchrun(2, [[*flags, f"--out_dir={tmp_path}/ddp"], [*flags, f"--out_dir={tmp_path}/fsdp", "--parallel=fsdp"]], dataset, tmp_path)
    again = [cut("ddp", "ddp to ddp"), [*cut("ddp", "ddp to fsdp"), "--parallel=fsdp"], cut("fsdp", "fsdp to ddp"), [*cut("fsdp", "fsdp to fsdp"), "--parallel=fsdp"]]
    torchrun(2, again, dataset, tmp_path)
    run(*cut("fsdp", "fsdp to one"), dataset=dataset)
    torchrun(4, [cut("fsdp", "fsdp to ddp on four"), [*cut("ddp", "ddp to fsdp on four"), "--parallel=fsdp"]], dataset, tmp_path)
    straight, ema = numbers(tmp_path / "ddp"), [e["loss_ema"] for e in events(tmp_path / "ddp", "val")]
    for name in ("fsdp", "ddp to ddp", "ddp to fsdp", "fsdp to ddp", "fsdp to fsdp", "fsdp to one", "fsdp to ddp on four", "ddp to fsdp on four"):
        for a, b in zip(straight, numbers(tmp_path / name), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, err_msg=name)
        np.testing.assert_allclose(ema, [e["loss_ema"] for e in events(tmp_path / name, "val")], rtol=2e-5, err_msg=name)


def test_resume_is_exact_on_two_ranks(dataset, tmp_path):
    """8 steps equal 4 + 4 to the bit, for every method under DDP and FSDP, EMA and micro-steps on."""
    flags = ["--ema_decay=0.9", "--batch_size=2", "--max_steps=8", "--save_interval=4", "--eval_interval=4"]
    runs = {f"{m} {p}": [*METHODS[m], f"--parallel={p}", *flags] for m in METHODS for p in ("ddp", "fsdp")}
    torchrun(2, [[*f, f"--out_dir={tmp_path}/{name}"] for name, f in runs.items()], dataset, tmp_path)
    for name in runs:
        shutil.copytree(tmp_path / name, tmp_path / f"{name} again")
        shutil.rmtree(tmp_path / f"{name} again/step_00000008")
    torchrun(2, [[*f, f"--out_dir={tmp_path}/{name} again"] for name, f in runs.items()], dataset, tmp_path)
    for name in runs:
        assert numbers(tmp_path / name) == numbers(tmp_path / f"{name} again"), name
        for file in ("model", "ema"):
            a, b = (load_file(tmp_path / x / f"step_00000008/{file}.safetensors") for x in (name, f"{name} again"))
            assert all(torch.equal(a[n], b[n]) for n in a), name


def test_ema(dataset, tmp_path):
    """The running average is that of the weights, starts at the initial ones, and is what loss_ema evaluates."""
    run("--ema_decay=0.75", "--save_interval=1", "--max_steps=3", "--eval_interval=3", f"--out_dir={tmp_path}/a", dataset=dataset)
    config = train.GPTConfig(**train.read_meta(tmp_path / "a/step_00000003")["model_config"])
    model = train.GPT(config, seed=42)
    for n, p in model.named_parameters():
        average = p.detach().clone()
        for step in (1, 2, 3):
            average = 0.75 * average + 0.25 * load_file(tmp_path / f"a/step_0000000{step}/model.safetensors")[n]
        torch.testing.assert_close(load_file(tmp_path / "a/step_00000003/ema.safetensors")[n], average)
    train.load_weights(model, tmp_path / "a/step_00000003", "ema.safetensors")
    windows = train.ValWindows(train.open_bin(dataset / "val.bin"), 32, 7)
    tokens = torch.from_numpy(windows.batch(range(windows.n)))
    with torch.no_grad():
        assert model(tokens[:, :-1], tokens[:, 1:].contiguous())[1].item() == pytest.approx(events(tmp_path / "a", "val")[-1]["loss_ema"], rel=1e-5)


# ---- faults -----------------------------------------------------------------------------------------------------------------
def test_kill_and_start_again(dataset, tmp_path):
    """kill -9 at random moments, saves included: the same command always goes on, and ends where an undisturbed run ends.

    KILLS=20 python -m pytest tests/test_train.py -k kill   (three are enough for every day)
    """
    wanted = int(os.environ.get("KILLS", 3))
    flags = [f"--max_steps={30 * wanted}", "--save_interval=1", "--keep_checkpoints=2", "--eval_interval=10"]
    run(*flags, f"--out_dir={tmp_path}/a", dataset=dataset)
    merged = {f.split("=")[0]: f for f in [*TINY, f"--dataset={dataset}", "--device=cpu", f"--out_dir={tmp_path}/b", *flags]}
    command, draw, kills, log = [sys.executable, ROOT / "train.py", *merged.values()], random.Random(1), 0, tmp_path / "b/log.jsonl"
    while True:
        started = time.time()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and kills < wanted:
            if log.exists() and log.stat().st_mtime > started:  # it has read its checkpoint and steps
                time.sleep(draw.uniform(0, 0.4))
                process.kill()
                kills += process.wait() == -signal.SIGKILL
            time.sleep(0.02)
        if process.wait() == 0:
            break
        assert process.returncode == -signal.SIGKILL
    assert kills == wanted, "the run ended before it could be killed"
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")
    assert not list((tmp_path / "b").glob(".*.part/meta.json"))


def test_a_damaged_newest_checkpoint(dataset, tmp_path, capsys):
    run(f"--out_dir={tmp_path}/a", dataset=dataset)
    for i, damage in enumerate(["model.safetensors", "meta.json", "optimizer"]):  # auto-resume passes over it, others say so
        folder = tmp_path / f"b{i}"
        shutil.copytree(tmp_path / "a", folder)
        broken = folder / "step_00000012" / damage
        shutil.rmtree(broken) if broken.is_dir() else os.truncate(broken, broken.stat().st_size // 2)
        shutil.copytree(folder, tmp_path / f"damaged{i}")
        run(f"--out_dir={folder}", dataset=dataset)
        said = capsys.readouterr().err
        if damage != "optimizer":
            wrong(["step_00000012", "take another checkpoint"], f"--init_from={tmp_path}/damaged{i}/step_00000012", f"--out_dir={tmp_path}/c", dataset=dataset)
        assert "step_00000012" in said and "going on from" in said and "step_00000006" in said
        assert numbers(folder) == numbers(tmp_path / "a")


def test_what_is_kept_beside_damaged_checkpoints(dataset, tmp_path, capsys):
    """A run that goes on below damaged checkpoints keeps its own newest and goes on from it; folders of other names are the user's."""
    run("--max_steps=12", "--save_interval=3", f"--out_dir={tmp_path}/a", dataset=dataset)
    for step in (6, 9):
        shutil.rmtree(tmp_path / f"a/step_{step:08d}")
    (tmp_path / "a/step_00000012/model.safetensors").write_bytes(b"")
    shutil.copytree(tmp_path / "a/step_00000012", tmp_path / "a/step_00000004_best")
    (tmp_path / "a/log.jsonl").write_text('not json\n5\n' + (tmp_path / "a/log.jsonl").read_text())
    stop = train.Checkpointer.finish

    def die_at_six(self):  # as a kill just after the checkpoint of step 6
        done = self.writing and self.writing[0] == "step_00000006"
        stop(self)
        if done:
            raise SystemExit("killed")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit, match="killed"):
        patch.setattr(train.Checkpointer, "finish", die_at_six)
        run("--max_steps=12", "--keep_checkpoints=1", f"--out_dir={tmp_path}/a", dataset=dataset)
    assert train.find_checkpoint(tmp_path / "a").name == "step_00000006" and (tmp_path / "a/step_00000012").is_dir()
    run("--max_steps=12", "--keep_checkpoints=1", f"--out_dir={tmp_path}/a", dataset=dataset)
    assert "going on after step 6 from" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "a").glob("step_*")) == ["step_00000004_best", "step_00000012"]


@pytest.mark.parametrize("limit", [60_000, 150_000])  # the weights are 118 kB, the optimizer's state twice that
def test_a_full_disk(limit, dataset, tmp_path):
    """Files beyond a limit cannot be written (which is how a disk fills up within a save): one line, exit code 1, the run so far is kept."""
    flags = {f.split("=")[0]: f for f in [*TINY, f"--dataset={dataset}", "--device=cpu", f"--out_dir={tmp_path}/a"]}
    script = f"import resource, sys; sys.path.insert(0, {str(ROOT)!r}); resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\nimport train; train.cli(train.main)"
    done = subprocess.run([sys.executable, "-c", script, *flags.values()], capture_output=True, text=True)
    assert done.returncode == 1 and "could not be written" in done.stderr and "make room" in done.stderr and "Traceback" not in done.stderr
    assert not train.find_checkpoint(tmp_path / "a") and not list((tmp_path / "a").glob("*step_*"))
    run(f"--out_dir={tmp_path}/a", dataset=dataset)
    assert len(events(tmp_path / "a", "train")) == 12


def test_what_a_start_looks_at(dataset, tmp_path, monkeypatch, capsys):
    """What a killed save left goes; a file that a checkpoint lacks is damage; without any whole one, or beside another process, nothing is done."""
    run(f"--out_dir={tmp_path}/a", dataset=dataset)
    newest = tmp_path / "a/step_00000012"
    assert (newest / "model.safetensors").stat().st_mode == (newest / "meta.json").stat().st_mode
    (tmp_path / "a/.step_00000777.part/optimizer").mkdir(parents=True)
    meta = json.loads((newest / "meta.json").read_text())
    assert meta["files"].keys() == {f.relative_to(newest).as_posix() for f in newest.rglob("*") if f.is_file() and f.name != "meta.json"}
    meta["files"]["optimizer/shard-00002-model-00001-of-00001.safetensors"] = 5
    (newest / "meta.json").write_text(json.dumps(meta))
    with open(tmp_path / "a/.lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        wrong(["another process is training", "--out_dir="], f"--out_dir={tmp_path}/a", dataset=dataset)
    before = numbers(tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr(train.fcntl, "flock", lambda *args: os.stat(tmp_path / "missing"))  # a file system without locks
        run(f"--out_dir={tmp_path}/a", dataset=dataset)
    assert "cannot be locked" in capsys.readouterr().err
    assert numbers(tmp_path / "a") == before and train.read_meta(newest)["files"].keys() < meta["files"].keys()
    assert not list((tmp_path / "a").glob(".*.part"))
    for step in (6, 12):
        (tmp_path / f"a/step_{step:08d}/meta.json").unlink()
    log = (tmp_path / "a/log.jsonl").read_text()
    wrong(["no checkpoint of", "can be read", "remove them"], f"--out_dir={tmp_path}/a", dataset=dataset)
    assert (tmp_path / "a/log.jsonl").read_text() == log


def test_ranks_that_share_no_folder(dataset, tmp_path):
    """Every rank says so instead of writing half a checkpoint each; and ranks that would go on from different steps do."""
    script = tmp_path / "apart.py"
    flags = {f.split("=")[0]: f for f in [*TINY, f"--dataset={dataset}", "--device=cpu"]}
    script.write_text(f"""import os, sys
sys.path.insert(0, {str(ROOT)!r})
import train
train.time.sleep = lambda seconds: None
rank = int(os.environ["RANK"])
said = open(f"{tmp_path}/said{{rank}}", "w")  # a file each: in one stream the ranks' lines would mix
sys.argv = ["train.py", *{list(flags.values())!r}, f"--out_dir={tmp_path}/{{rank}}"]
try:
    train.main()
except train.UserError as error:
    print(error, file=said)
for steps in ((6, 6), (6, 12)):
    try:
        train.check_shared(train.Path("{tmp_path}/0"), steps[rank], rank, train.torch.device("cpu"))
        print(steps, "are one", file=said)
    except train.UserError:
        print(steps, "differ", file=said)
""")
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script], capture_output=True, text=True, check=True)
    for rank in (0, 1):
        refused, *others = (tmp_path / f"said{rank}").read_text().splitlines()
        assert refused.startswith(f"1 of 2 ranks do not see in {tmp_path}/{rank} what the first one sees")
        assert others == ["(6, 6) are one", "(6, 12) differ"]
    assert not list(tmp_path.glob("*/step_*"))


def test_a_dead_rank_ends_the_others(dataset, tmp_path):
    """kill -9 of one rank under torchrun: the other leaves, torchrun says which one died, and the next start goes on."""
    flags = {f.split("=")[0]: f for f in [*TINY, f"--dataset={dataset}", "--device=cpu", f"--out_dir={tmp_path}/a", "--max_steps=3000", "--eval_interval=3000", "--save_interval=20"]}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", ROOT / "train.py", *flags.values()]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    while not list((tmp_path / "a").glob("step_*")):
        time.sleep(0.1)
        assert process.poll() is None
    children = [int(p) for p in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    os.kill(children[-1], signal.SIGKILL)
    start = time.monotonic()
    _, said = process.communicate(timeout=60)
    assert process.returncode != 0 and time.monotonic() - start < 60 and "Signal 9 (SIGKILL)" in said
    assert not [p for p in children if Path(f"/proc/{p}").exists()]
    step = train.read_meta(train.newest_whole(tmp_path / "a")[0])["step"]
    assert step >= 20


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


def test_a_damaged_meta(dataset, tmp_path):
    run("--max_steps=1", f"--out_dir={tmp_path}/a", dataset=dataset)
    file = tmp_path / "a/step_00000001/meta.json"
    whole = json.loads(file.read_text())
    wrong_kinds = [("model_config", "vocab_size", None), ("model_config", "n_layer", "2"), ("model_config", "rope_scaling", 1), ("model_config", "residual", []),
                   ("data", "dataset", 5), ("data", "tokenizer", []), ("train_config", "param_dtype", "int99"), ("train_config", "ema_decay", None)]  # fmt: skip
    changed = [whole | {section: whole[section] | {key: value}} for section, key, value in wrong_kinds] + [whole | {"step": "60"}, whole | {"step": None}]
    for damaged in ([], {}, whole | {"model_config": {"n_layers": 3}}, whole | {"train_config": {}}, whole | {"data": 5}, whole | {"origin": 5}, whole | {"origin": {"source": None}}, *changed):
        file.write_text(json.dumps(damaged))
        with pytest.raises(UserError, match="take another checkpoint"):
            train.load_model(tmp_path / "a", "cpu")


@pytest.mark.parametrize("latest", [b"", bytes(14), b"step_00000099\n", None])
def test_a_damaged_latest(dataset, tmp_path, capsys, latest):
    """Whoever is given the run's folder takes its newest whole checkpoint, as training does, and says so."""
    run("--max_steps=2", "--save_interval=1", f"--out_dir={tmp_path}/a", dataset=dataset)
    (tmp_path / "a/latest").write_bytes(latest) if latest is not None else (tmp_path / "a/latest").unlink()
    capsys.readouterr()
    assert train.the_checkpoint(tmp_path / "a") == tmp_path / "a/step_00000002" and "latest names no checkpoint: taking" in capsys.readouterr().err
    (tmp_path / "a/step_00000002/model.safetensors").write_bytes(b"")
    assert train.the_checkpoint(tmp_path / "a") == tmp_path / "a/step_00000001" and "step_00000002 is damaged" in capsys.readouterr().err


# ---- what is logged -----------------------------------------------------------------------------------------------------------
def test_log(dataset, tmp_path, capsys):
    run("--residual=delta", "--tensorboard=true", f"--out_dir={tmp_path}/a", dataset=dataset)
    kinds = [e["event"] for e in map(json.loads, (tmp_path / "a/log.jsonl").read_text().splitlines())]
    assert kinds == ["start"] + ["train"] * 6 + ["val"] + ["train"] * 6 + ["val", "end"]
    start, last, val, end = (events(tmp_path / "a", k)[-1] for k in ("start", "train", "val", "end"))
    assert start["tokens_per_step"] == 8 * 32 and start["kernel"] == "torch" and start["params"]["routing"] == 4 * (3 * 32 + 1)
    assert last["tokens"] == 12 * 8 * 32 and last["mfu"] is None and last["lr"] == pytest.approx(3e-3 * (0.1 + 0.9 * (1 + np.cos(0.75 * np.pi)) / 2))
    assert last["gate_grad_norm"] > 0 and last["query_grad_norm"] > 0 and 0 < last["route_entropy"] < np.log(10)
    assert start["time"] <= last.pop("time") <= val["time"] <= end.pop("time") < time.time() + 1
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
def header_changed(dataset, folder, file="train.bin", **changes):
    """A copy of the data set, a file of which says something else in its header."""
    shutil.copytree(dataset, folder)
    raw = (folder / file).read_bytes()
    import prepare_data

    header = prepare_data.open_bin(folder / file).header | changes
    (folder / file).write_bytes(prepare_data.pack_header(header) + raw[prepare_data.HEADER_BYTES :])
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
    wrong(["--parallel=fsdp"], out, "--fsdp_accumulate=sharded", dataset=dataset)
    wrong(["--device=gpu9"], out, "--device=gpu9", dataset=dataset)
    wrong(["kernel=triton"], out, "--kernel=triton", dataset=dataset)
    wrong(["--resume="], out, f"--resume={tmp_path}", dataset=dataset)
    wrong(["--init_from="], out, f"--init_from={tmp_path}", dataset=dataset)
    for flag in ("max_steps=0", "n_head=0", "head_dim=-2", "learning_rate=-1.0", "beta1=1.5", "ema_decay=2.0", "warmup_steps=-5", "seed=99999999999999999999", "rope_theta=0.0"):
        wrong([flag], out, f"--{flag}", dataset=dataset)
    wrong(["rope_scaling", "factor"], out, "--rope_scaling={'rope_type': 'llama3'}", dataset=dataset)
    (tmp_path / "file").write_text("mine")
    wrong(["--out_dir", "another folder"], f"--out_dir={tmp_path}/file/x", dataset=dataset)
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
    wrong(["is another model", "ffn_dim=64 (flag), 48 in"], f"--init_from={tmp_path}/a", "--ffn_dim=64", f"--out_dir={tmp_path}/b", dataset=dataset)
    shutil.rmtree(tmp_path / "a/step_00000002")
    (tmp_path / "a/latest").unlink()  # died before its first checkpoint: the log alone says whose folder it is
    wrong(["another run", "n_layer=2 there"], "--max_steps=2", "--n_layer=3", f"--out_dir={tmp_path}/a", dataset=dataset)
    (tmp_path / "a/log.jsonl").write_text('{"event": "sta')  # and not even that is whole
    run("--max_steps=2", f"--out_dir={tmp_path}/a", dataset=dataset)
    assert len(before) == len(list((tmp_path / "a").rglob("*")))


def test_data_that_changed_under_a_run(dataset, tmp_path):
    shutil.copytree(dataset, tmp_path / "set")
    run("--max_steps=6", f"--out_dir={tmp_path}/a", dataset=tmp_path / "set")
    shutil.copytree(header_changed(dataset, tmp_path / "x", sha256="0" * 64), tmp_path / "set", dirs_exist_ok=True)
    run("--max_steps=6", f"--out_dir={tmp_path}/a", dataset=dataset)  # the same data elsewhere
    wrong(["train.bin is not the file of this run"], "--max_steps=6", f"--out_dir={tmp_path}/a", dataset=tmp_path / "set")
    shutil.copytree(header_changed(dataset, tmp_path / "y", file="val.bin", sha256="0" * 64), tmp_path / "set", dirs_exist_ok=True)
    wrong(["val.bin is not the file of this run"], "--max_steps=6", f"--out_dir={tmp_path}/a", dataset=tmp_path / "set")


def test_exit_codes(dataset, tmp_path):
    """The whole way out: 2 and one line for a mistake, 1 for numbers that are not finite, whose checkpoint stays as it was."""
    command = [sys.executable, ROOT / "train.py", *TINY, f"--dataset={dataset}", "--device=cpu"]
    done = subprocess.run([*command, "--n_layre=3"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1 and "n_layer" in done.stderr and not os.listdir(tmp_path)
    flags = {f.split("=")[0]: f for f in [*TINY, f"--dataset={dataset}", "--device=cpu", f"--out_dir={tmp_path}/a", "--learning_rate=1e30", "--warmup_steps=0", "--save_interval=1", "--grad_clip=0"]}
    done = subprocess.run([sys.executable, ROOT / "train.py", *flags.values()], capture_output=True, text=True)
    assert done.returncode == 1 and "are not finite" in done.stderr and "Traceback" not in done.stderr
    flags |= {"--out_dir": f"--out_dir={tmp_path}/b", "--max_steps": "--max_steps=1", "--learning_rate": "--learning_rate=1e38"}
    last = subprocess.run([sys.executable, ROOT / "train.py", *flags.values()], capture_output=True, text=True)
    assert last.returncode == 1 and "step 1: loss, gradient or weights are not finite" in last.stderr and not list((tmp_path / "b").glob("*step_*"))
    assert not list((tmp_path / "a").glob("*step_*"))
    run(f"--out_dir={tmp_path}/c", dataset=dataset)  # a run with a good checkpoint, of which one tensor then turns infinite
    shutil.rmtree(tmp_path / "c/step_00000012")
    saved = tmp_path / "c/step_00000006/model.safetensors"
    tensors = load_file(saved)
    tensors["layers.1.mlp.down_proj.weight"][:] = float("inf")
    save_file(tensors, saved)
    before = saved.read_bytes()
    with pytest.raises(SystemExit, match=r"step 7: loss, gradient or weights are not finite .* the checkpoint of step 6 in .* is untouched"):
        run(f"--out_dir={tmp_path}/c", dataset=dataset)
    assert saved.read_bytes() == before and [p.name for p in (tmp_path / "c").glob("*step_*")] == ["step_00000006"]
