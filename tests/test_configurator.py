"""Settings: what is accepted, and the one line that answers every mistake."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from configurator import Parser, UserError, cli, configure, describe, output_folder, table

METHODS = {"baseline": 1, "hc": 2, "mhar": 3}


@dataclass
class Model:
    n_layer: int = 12  # transformer layers
    n_embd: int = 64  # stream width D
    head_dim: int | None = None  # None: n_embd // 4
    rope_scaling: dict | None = None
    qk_norm: bool = True  # RMSNorm on q and k; says "a # b"
    residual: Literal[tuple(METHODS)] = "mhar"  # residual method

    def __post_init__(self):
        if self.n_embd % 4:
            raise ValueError(f"n_embd {self.n_embd} does not divide by 4")


@dataclass
class Train:
    out_dir: str = "out"  # run folder
    learning_rate: float = 1e-3  # peak
    max_steps: int = 1000  # optimizer steps
    compile: bool = False  # torch.compile
    init_from: str | None = None  # CKPT
    mix: dict = field(default_factory=dict)  # shares


@pytest.fixture
def config(tmp_path):
    def write(text, name="a.py"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def run(*argv, **kwargs):
    return configure(list(argv), Model, Train, **kwargs)


def mistake(*argv):
    with pytest.raises(UserError) as caught:
        run(*argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


GOOD = """
--max_steps=5e3  5000
--max-steps=1_000  1000
--max_steps=9007199254740993  2**53 + 1
--learning_rate=1  1.0
--learning-rate=3e-4  3e-4
--compile=true  True
--compile=False  False
--out_dir=123  "123"
--out_dir=a=b  "a=b"
--out_dir=  ""
--out_dir=a.py  "a.py"
--out_dir=~/a  os.path.expanduser("~/a")
--init_from=none  None
--mix={'a':0.5}  {"a": 0.5}
--head_dim=16  16
--residual=hc  "hc"
"""
BAD = """
--max_steps=5.5  --max_steps=5.5: needs int
--max_steps=inf  needs int
--max_steps=none  needs int
--learning_rate=nan  needs float
--compile=0  needs true | false
--head_dim=x  needs int | none
--residual=HC  needs baseline | hc | mhar
--mix={  needs dict
--mix={[]:1}  needs dict
--mix=f()  needs dict
--mix={'a':1,'a':2}  a name is given twice
--mix=[1]  needs dict
--learning_rat=1  '--learning_rat=1': no such key; did you mean 'learning_rate'?
--zzzzzz=1  no such key; -h lists them
--no-compile  did you mean 'compile'?
--compile  --compile needs a value: write --compile=VALUE
--out_dir --max_steps=3  --out_dir needs a value
n_layer=3  'n_layer=3' is neither a config file (PATH.py) nor --key=value
--max_steps=1 --max-steps=2  max_steps is given twice
no/such.py  'no/such.py': no such config file
--n_embd=66  n_embd 66 does not divide by 4
"""


def rows(text):
    return [line.split("  ", 1) for line in text.strip().splitlines()]


@pytest.mark.parametrize("flag, want", rows(GOOD))
def test_good_flags(flag, want):
    """As --key=value and as --key value."""
    key, _, text = flag.partition("=")
    name, want = key[2:].replace("-", "_"), eval(want)
    for argv in ([flag], [key, text]):
        model, train, origins = run(*argv)
        got = (vars(model) | vars(train))[name]
        assert got == want and type(got) is type(want) and origins[name] == "flag"


@pytest.mark.parametrize("argv, words", rows(BAD))
def test_bad_flags(argv, words):
    assert words in mistake(*argv.split())


def test_files_apply_in_order_and_flags_win(config):
    a = config("n_layer = 2  # small\nmax_steps = 5e3\n_half = 1 / 2\nlearning_rate = 1\nqk_norm = False")
    b = config('_n = 3\nn_layer = _n\nmix = {"x": 1.0}', "b.py")
    assert run(config('out_dir = "~/x"', "c.py"))[1].out_dir == os.path.expanduser("~/x")
    model, train, origins = run("--max_steps=7", a, b)
    assert (model.n_layer, train.max_steps, train.mix, model.qk_norm) == (3, 7, {"x": 1.0}, False)
    assert type(train.learning_rate) is float
    assert [origins[n] for n in ("n_layer", "learning_rate", "max_steps", "n_embd")] == [
        b,
        a,
        "flag",
        "default",
    ]
    assert run(b, a)[0].n_layer == 2
    lines = describe(model, train, origins).replace("\n  ", " ").split("\n")
    long = describe(Model(), Train(), {n: b if n != "mix" else "flag" for n in vars(Model()) | vars(Train())})
    assert len(long.split("\n")) > 2 and max(map(len, long.split("\n"))) <= max(80, len(b) + 20)
    assert {line.split(": ")[0] for line in lines} == {a, b, "flag"} and len(lines) == 3
    assert "flag: max_steps=7" in lines and f"{b}: n_layer=3 mix={{'x': 1.0}}" in lines


def test_where_files_are_found(config, tmp_path, monkeypatch):
    default, other = config("n_layer = 2", "default.py"), config("n_embd = 32", "other.py")
    assert run("--n_embd=16", default_file=default)[0] == Model(n_layer=2, n_embd=16)
    assert run(other, default_file=default)[0] == Model(n_embd=32)
    below = config('_base = "other.py"\nn_layer = 3', "below.py")
    model, _, origins = run(below)
    assert (model.n_layer, model.n_embd, origins["n_embd"]) == (3, 32, below)
    monkeypatch.chdir(tmp_path)
    assert run("default.py")[0].n_layer == 2
    assert "argparse" in mistake("configurator.py")  # not here, so the one in the repository: and no config


BAD_FILES = """
learning_rat = 1  did you mean 'learning_rate'?
import os  os (a name of the file's own begins with _): no such key
_base = 3  no such config file
_base = "a.py"  _base leads back to itself
max_steps = 5.5  max_steps = 5.5: needs int
n_layer = True  n_layer = True: needs int
out_dir = 123  out_dir = 123: needs str
compile = 1  needs true | false
residual = []  residual = []: needs baseline | hc | mhar
x = (  SyntaxError: '(' was never closed (a.py, line 1)
n_embd = missing  NameError: name 'missing' is not defined
"""


@pytest.mark.parametrize("text, words", rows(BAD_FILES))
def test_bad_files(config, text, words):
    assert words in mistake(config(text))


def test_help(capsys):
    with pytest.raises(SystemExit) as caught:
        run("--n_layer=oops", "--help", doc="Trains a model.", default_file="config/demo.py")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("Trains a model.") and "Without a file, config/demo.py applies." in text
    assert (
        text.index("Model") < text.index("--n_layer=int ") < text.index("Train\n") < text.index("--mix=dict ")
    )
    line = {line.split("=")[0].strip(): " ".join(line.split()) for line in text.split("\n")}
    assert line["--residual"] == "--residual=baseline | hc | mhar residual method ['mhar']"
    assert line["--qk_norm"].endswith('RMSNorm on q and k; says "a # b" [True]')
    assert line["--rope_scaling"] == "--rope_scaling=dict | none [None]" and line["--mix"].endswith(
        "shares [{}]"
    )


SCRIPT = """
import os, sys
from configurator import UserError, cli
def main():
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    if sys.argv[1:]:
        raise {"user": UserError("three\\nlines"), "bug": RuntimeError, "stop": KeyboardInterrupt,
               "full": OSError(28, "No space left"), "long": OSError(36, "Name too long"),
               "gcc": RuntimeError("Failed to find C compiler. Please specify via CC"),
        }[sys.argv[1]]
cli(main)
"""


@pytest.mark.parametrize(
    "argv, rank, code, err",
    [
        ([], {}, 0, ""),
        (["user"], {}, 2, "error: three lines\n"),
        (["user"], {"RANK": "8", "LOCAL_RANK": "0"}, 2, "error: three lines\n"),
        (["full"], {}, 1, "error: [Errno 28] No space left: make room, or choose another folder\n"),
        (["long"], {}, 1, "error: [Errno 36] Name too long: make room, or choose another folder\n"),
        (
            ["gcc"],
            {},
            1,
            "error: no C++ compiler: apt install g++ python3-dev, or --compile=false --kernel=torch\n",
        ),
        (["user"], {"LOCAL_RANK": "1"}, 2, "error: three lines\n"),  # left over, not from torchrun
        (["bug"], {}, 1, None),
        (["stop"], {}, -signal.SIGINT, "KeyboardInterrupt: interrupted\n"),
    ],
)
def test_exit_codes(argv, rank, code, err):
    env = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"} | rank
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *argv], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == code
    assert done.stderr == err if err is not None else done.stderr.startswith("Traceback")


def test_ranks_that_end_together(tmp_path):
    """The first rank's line appears, once, however late it comes."""
    script = tmp_path / "late.py"
    script.write_text(f"""import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from configurator import RunError, cli
def main():
    time.sleep(1 if os.environ["LOCAL_RANK"] == "0" else 0)
    raise RunError("loss nan")
cli(main)
""")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3", script]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("error: loss nan\n") == 1, done.stderr
    assert time.monotonic() - started < 10


def test_a_rank_that_ends_alone(monkeypatch, capsys):
    """Its line, or its traceback, appears after a wait in which the first rank could have spoken."""
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "3")

    def main():
        raise UserError("only here")

    with pytest.raises(SystemExit):
        cli(main)
    assert capsys.readouterr().err == "error: only here\n" and waits == [10]
    with pytest.raises(ZeroDivisionError):
        cli(lambda: 1 / 0)
    assert waits == [10, 10]


def test_parser_table_and_folder(tmp_path):
    parser = Parser(prog="report.py")
    parser.add_argument("--limit", type=int)
    for argv in (["--limit=x"], ["--lim=3"], ["--no-such"]):
        with pytest.raises(UserError, match="report.py -h"):
            parser.parse_args(argv)
    assert table(["a", "b"], [["x", 1]]) == "| a | b |\n| --- | ---: |\n| x | 1 |\n"
    assert output_folder(tmp_path / "a/b", "--out").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--out=.*/file/c cannot be written to"):
        output_folder(tmp_path / "file/c", "--out")
    for path in ("s3://bucket/run", "file:/x", "$HOME/run", "runs/${USER}", "~nobody-of-this-name/run"):
        with pytest.raises(UserError, match="is a URL"):
            output_folder(path, "--out")


def test_configs_are_the_paper_s():
    """The training configs, read by train.py's schemas for every method, are section 3.1 and appendix I."""
    from model import RESIDUALS, GPTConfig
    from train import TrainConfig

    shapes = {
        "100m": (512, 12, 8, 4, 1536, 64),
        "350m": (1024, 24, 16, 8, 4096, 64),
        "1b": (1280, 36, 16, 8, 5120, 80),
        "d768": (768, 12, 12, 4, 2304, 64),
    }
    files = [p for name in ("mhar_*", "fineweb_*", "width_*") for p in (ROOT / "config").glob(name + ".py")]
    assert len(files) == 7
    for path in files:
        for residual in RESIDUALS:
            t, m, _ = configure([str(path), f"--residual={residual}"], TrainConfig, GPTConfig)
        kind, scale = path.stem.split("_")
        assert (m.n_embd, m.n_layer, m.n_head, m.n_kv_head, m.ffn_dim, m.head_dim) == shapes[scale]
        batch = (64, 2048) if scale in ("100m", "d768") else (32, 1024)
        assert (t.global_batch_size, m.block_size) == batch and t.global_batch_size % t.batch_size == 0
        assert (t.max_steps, t.warmup_steps, t.eval_interval, t.seed) == (20_000, 1000, 500, 42)
        assert (t.beta1, t.beta2, t.weight_decay, t.decay) == (0.9, 0.95, 0.1, "all")
        assert (t.grad_clip, t.min_lr_ratio, t.lr_schedule) == (1.0, 0.1, "cosine")
        rate = (5e-4, "zero", "anneal") if kind == "mhar" else (1e-3, "normal", "fineweb_edu")
        assert (t.learning_rate, m.route_init, t.dataset) == rate
