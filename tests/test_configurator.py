"""Settings: what is accepted, and the one line that answers every mistake.  pytest tests/test_configurator.py"""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
from configurator import Parser, UserError, configure, describe


@dataclass
class Model:
    n_layer: int = 12  # transformer layers
    n_embd: int = 64  # stream width D
    head_dim: int | None = None  # None: n_embd // 4
    rope_scaling: dict | None = None  # long-context rule, a dict
    qk_norm: bool = True  # RMSNorm on q and k; says "a # b"
    residual: Literal["baseline", "hc", "mhar"] = "mhar"  # residual method

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
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


def run(*argv, **kwargs):
    return configure(list(argv), Model, Train, **kwargs)


def mistake(*argv, **kwargs):
    with pytest.raises(UserError) as caught:
        run(*argv, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults():
    model, train, origins = run()
    assert (model, train) == (Model(), Train())
    assert set(origins.values()) == {"default"} and len(origins) == 12


@pytest.mark.parametrize(
    "flag, name, want",
    [
        ("--max_steps=5e3", "max_steps", 5000),
        ("--max-steps=1_000", "max_steps", 1000),
        ("--max_steps=-3", "max_steps", -3),
        ("--max_steps=9007199254740993", "max_steps", 2**53 + 1),
        ("--learning_rate=1", "learning_rate", 1.0),
        ("--learning-rate=3e-4", "learning_rate", 3e-4),
        ("--compile=true", "compile", True),
        ("--compile=False", "compile", False),
        ("--out_dir=123", "out_dir", "123"),
        ("--out_dir=a=b", "out_dir", "a=b"),
        ("--out_dir=", "out_dir", ""),
        ("--out_dir=none", "out_dir", "none"),
        ("--out_dir=a.py", "out_dir", "a.py"),
        ("--init_from=none", "init_from", None),
        ("--init_from=out/x-y", "init_from", "out/x-y"),
        ("--mix={'a': 0.5}", "mix", {"a": 0.5}),
    ],
)
def test_flag_values(flag, name, want):
    _, train, origins = run(flag)
    got = getattr(train, name)
    assert got == want and type(got) is type(want)
    assert origins[name] == "flag"


def test_optional_and_literal():
    model = run("--head_dim=16", "--rope_scaling={'factor': 8.0}", "--residual=hc")[0]
    assert (model.head_dim, model.rope_scaling, model.residual) == (16, {"factor": 8.0}, "hc")
    assert run("--head_dim=None", "--rope-scaling=none")[0].rope_scaling is None


@pytest.mark.parametrize(
    "flag, needs",
    [
        ("--max_steps=5.5", "int"),
        ("--max_steps=", "int"),
        ("--max_steps=many", "int"),
        ("--max_steps=inf", "int"),
        ("--max_steps=true", "int"),
        ("--learning_rate=fast", "float"),
        ("--learning_rate=nan", "float"),
        ("--compile=0", "true | false"),
        ("--compile=yes", "true | false"),
        ("--head_dim=x", "int | none"),
        ("--max_steps=none", "int"),
        ("--residual=HC", "baseline | hc | mhar"),
        ("--residual=none", "baseline | hc | mhar"),
        ("--mix=[1]", "dict"),
        ("--mix={", "dict"),
        ("--mix=f()", "dict"),
    ],
)
def test_bad_values(flag, needs):
    message = mistake(flag)
    assert message.startswith(flag) and message.endswith("needs " + needs)


@pytest.mark.parametrize(
    "argv, parts",
    [
        (["--learning_rat=1"], ["'learning_rat'", "did you mean 'learning_rate'?"]),
        (["--zzzzzz=1"], ["'zzzzzz'", "-h"]),
        (["--compile", "False"], ["'--compile'", "write --compile=False"]),
        (["--compile"], ["write --compile=VALUE"]),
        (["--out-dir", "a"], ["'--out-dir'", "write --out_dir=a"]),
        (["--compile", "--max_steps=3"], ["write --compile=VALUE"]),
        (["--no-compile"], ["write --compile=false"]),
        (["--no-such"], ["'--no-such'", "--key=value", "no such key"]),
        (["-n_layer=3"], ["write --n_layer=3"]),
        (["n_layer=3"], ["write --n_layer=3"]),
        (["mhar"], ["'mhar'", "PATH.py", "--key=value"]),
        ([""], ["''", "--key=value"]),
        (["--"], ["'--'"]),
        (["--=3"], ["'--=3'"]),
        (["--max_steps=1", "--max-steps=2"], ["'--max-steps=2'", "twice"]),
        (["no/such.py"], ["'no/such.py'", "no such config file"]),
        (["--n_embd=66"], ["n_embd 66 does not divide by 4"]),
    ],
)
def test_bad_arguments(argv, parts):
    message = mistake(*argv)
    assert all(part in message for part in parts), message


def test_files_apply_in_order_and_flags_win(config):
    a = config("n_layer = 2  # small\nmax_steps = 5e3\n_half = 1 / 2\nlearning_rate = 1\nhead_dim = None\nqk_norm = False", "a.py")
    b = config('_n = 3\nn_layer = _n\nmix = {"x": 1.0}', "b.py")
    model, train, origins = run("--max_steps=7", a, b)
    assert (model.n_layer, train.max_steps, train.learning_rate, train.mix, model.qk_norm) == (3, 7, 1.0, {"x": 1.0}, False)
    assert type(train.learning_rate) is float
    assert (origins["n_layer"], origins["learning_rate"], origins["max_steps"], origins["n_embd"]) == (b, a, "flag", "default")
    assert run(b, a)[0].n_layer == 2
    lines = describe(model, train, origins).split("\n")
    assert sorted(line.split(": ")[0] for line in lines) == sorted([a, b, "flag"])
    assert "flag: max_steps=7" in lines and f"{b}: n_layer=3 mix={{'x': 1.0}}" in lines


def test_default_file_only_without_files(config):
    default, other = config("n_layer = 2", "default.py"), config("n_embd = 32", "other.py")
    assert run("--n_embd=16", default_file=default)[0] == Model(n_layer=2, n_embd=16)
    assert run(other, default_file=default)[0] == Model(n_embd=32)


def test_base_file_is_read_first(config):
    config("n_layer = 2\nn_embd = 32", "a.py")
    b = config('_base = "a.py"\nn_layer = 3', "b.py")
    model, _, origins = run(b)
    assert (model.n_layer, model.n_embd, origins["n_embd"]) == (3, 32, b)
    assert "no such config file" in mistake(config('_base = "none.py"', "c.py"))
    config('_base = "e.py"', "d.py")
    assert "e.py: its _base leads back to itself" in mistake(config('_base = "d.py"', "e.py"))


def test_file_is_found_from_any_folder(config, tmp_path, monkeypatch):
    config("n_layer = 2", "here.py")
    monkeypatch.chdir(tmp_path)
    assert run("here.py")[0].n_layer == 2
    assert "is a module and no setting" in mistake("configurator.py")  # not here, so the one beside configurator.py: read, and not a config


@pytest.mark.parametrize(
    "text, parts",
    [
        ("learning_rat = 1", ["learning_rat", "did you mean 'learning_rate'?"]),
        ("import os", ["os is a module and no setting", "as in _os"]),
        ("layers = [1, 2]", ["layers is a list and no setting", "as in _layers"]),
        ("_base = 3", ["_base = 3", "needs the name of a config file"]),
        ('_base = "a.py"', ["_base leads back to itself"]),
        ("max_steps = 5.5", ["max_steps = 5.5", "needs int"]),
        ("n_layer = True", ["n_layer = True", "needs int"]),
        ("out_dir = 123", ["out_dir = 123", "needs str"]),
        ("compile = 1", ["needs true | false"]),
        ('residual = "hcc"', ["residual = 'hcc'", "baseline | hc | mhar"]),
        ("n_layer = None", ["needs int"]),
        ("n_layer = 2\nx = (", [":2: SyntaxError"]),
        ("n_layer = 2\n\nn_embd = 1 / 0", [":3: ZeroDivisionError"]),
        ("n_embd = missing", [":1: NameError", "missing"]),
        (b'n_layer = "\xff"', ["SyntaxError"]),
    ],
)
def test_bad_files(config, text, parts):
    path = config(text)
    message = mistake(path)
    assert message.startswith(path) and all(part in message for part in parts), message


def test_help(capsys):
    with pytest.raises(SystemExit) as caught:
        run("--n_layer=oops", "--help", doc="Trains a model.", default_file="config/demo.py")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("Trains a model.") and "Without a file, config/demo.py applies." in text
    assert text.index("Model") < text.index("--n_layer=int ") < text.index("Train\n") < text.index("--mix=dict ")
    line = {line.split("=")[0].strip(): line for line in text.split("\n")}
    assert line["--residual"].split() == "--residual=baseline | hc | mhar residual method ['mhar']".split()
    assert line["--qk_norm"].endswith('RMSNorm on q and k; says "a # b" [True]')
    assert "--head_dim=int | none" in line["--head_dim"] and line["--mix"].endswith("shares [{}]")


SCRIPT = """
import sys
from dataclasses import dataclass
from configurator import UserError, cli, configure
@dataclass
class Settings:
    n: int = 1  # how many
def main():
    settings, origins = configure(sys.argv[1:], Settings, doc='Counts.')
    if settings.n == 3:
        raise UserError('three\\nlines')
    if settings.n == 4:
        raise ValueError('a bug')
    if settings.n == 5:
        raise KeyboardInterrupt
    print('n', settings.n)
cli(main)
"""


@pytest.mark.parametrize(
    "argv, env, code, out, err",
    [
        (["--n=2"], {}, 0, "n 2\n", ""),
        (["-h"], {}, 0, "how many [1]", ""),
        (["--n", "2"], {}, 2, "", "error: '--n': write --n=2\n"),
        (["--n=3"], {}, 2, "", "error: three lines\n"),
        (["--n=3"], {"RANK": "0", "LOCAL_RANK": "0"}, 2, "", "error: three lines\n"),
        (["--n=3"], {"RANK": "1", "LOCAL_RANK": "1"}, 2, "", ""),
        (["--n=4"], {}, 1, "", "Traceback"),
        (["--n=5"], {}, -2, "", "interrupted\n"),
    ],
)
def test_exit_codes(tmp_path, argv, env, code, out, err):
    (tmp_path / "script.py").write_text(SCRIPT)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)} | env
    done = subprocess.run([sys.executable, tmp_path / "script.py", *argv], env=env, capture_output=True, text=True)
    assert done.returncode == code
    assert out in done.stdout and (err in done.stderr if code in (1, -2) else err == done.stderr)


def test_parser_mistakes_are_user_errors():
    parser = Parser(prog="report.py")
    parser.add_argument("--limit", type=int)
    assert parser.parse_args(["--limit=3"]).limit == 3
    for argv in (["--limit=x"], ["--lim=3"], ["--no-such"]):
        with pytest.raises(UserError, match="report.py -h"):
            parser.parse_args(argv)


def test_configs_are_the_paper_s():
    """Every training config is read by train.py's own schemas, for every method, and says what section 3.1 and appendix I say."""
    from model import GPTConfig
    from train import TrainConfig

    shapes = {
        "100m": (512, 12, 8, 4, 1536, 64),
        "350m": (1024, 24, 16, 8, 4096, 64),
        "1b": (1280, 36, 16, 8, 5120, 80),
        "d768": (768, 12, 12, 4, 2304, 64),
    }
    files = [
        path for name in ("demo", "mhar_*", "fineweb_*", "width_*") for path in sorted((Path(__file__).parent.parent / "config").glob(name + ".py"))
    ]
    assert len(files) == 8
    for path in files:
        for residual in ("baseline", "hc", "attnres", "mhar", "delta"):
            train, model, _ = configure([str(path), f"--residual={residual}"], TrainConfig, GPTConfig)
            assert train.global_batch_size % train.batch_size == 0
        kind, scale = path.stem.split("_") if "_" in path.stem else (path.stem, None)
        if scale:
            assert (model.n_embd, model.n_layer, model.n_head, model.n_kv_head, model.ffn_dim, model.head_dim) == shapes[scale]
            tokens = (64, 2048) if scale in ("100m", "d768") else (32, 1024)
            assert (train.global_batch_size, model.block_size, train.max_steps, train.warmup_steps, train.eval_interval) == (
                *tokens,
                20_000,
                1000,
                500,
            )
            assert (train.beta1, train.beta2, train.adam_eps, train.weight_decay, train.grad_clip, train.min_lr_ratio) == (
                0.9,
                0.95,
                1e-8,
                0.1,
                1.0,
                0.1,
            )
            assert (train.decay_norms, train.decay_embeddings, train.route_weight_decay, train.seed) == (True, True, None, 42)
            web = (1e-3, "normal", "fineweb_edu")
            assert (train.learning_rate, model.route_init, train.dataset) == (web if kind != "mhar" else (5e-4, "zero", "anneal"))
