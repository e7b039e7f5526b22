"""Strict settings: dataclass defaults, then config files in their order, then flags, which always win.

    python train.py                                          # the default config file
    python train.py config/mhar_100m.py --residual=attnres   # a file and a flag
    python train.py -h                                       # every key with its choices, default and meaning

A schema is a dataclass whose lines read `name: type = default  # meaning`; a type is int, float, bool, str,
dict, Literal[...] or one of these `| None`. A config file is Python, `name = value  # why`. Names that start
with `_` are the file's own, except `_base = "other.py"`: a file beside it to start from.
"""

import argparse
import ast
import contextlib
import dataclasses
import difflib
import errno
import inspect
import os
import re
import runpy
import signal
import sys
import tempfile
import textwrap
import time
import typing
from pathlib import Path
from types import NoneType

# CPU threads that wait sleep: spinning, they slow a busy machine tenfold. Read when torch is imported
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


class UserError(Exception):
    """A user's mistake; its message says what is wrong and what to type instead."""

    exit_code = 2


class RunError(UserError):
    """What ends a run, in one line, without a mistake of the user's."""

    exit_code = 1


class Parser(argparse.ArgumentParser):
    """argparse for the scripts that take few flags; a mistake is a UserError."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs)
        self.register("type", None, os.path.expanduser)  # where no type is given: no shell expands --out=~/x

    def error(self, message):
        raise UserError(f"{message} ({self.prog} -h lists the options)")


def cli(main):
    """Call main(). What the user can mend ends in one line on stderr: exit code 2 for a mistake, 1 for a full
    disk or a missing compiler. Under torchrun, where the first exit ends all, a node's first rank says it."""
    try:
        main()
    except Exception as error:
        if "RANK" in os.environ and os.environ.get("LOCAL_RANK", "0") != "0":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun sends it when the first rank has ended
            time.sleep(10)
        full = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.ENAMETOOLONG
        if getattr(error, "errno", None) in full:
            error = RunError(f"{error}: make room, or choose another folder")
        elif re.search(r"(No working|Failed to find) C(\+\+)? compiler|Python\.h: No such", str(error)):
            error = RunError(
                "no C++ compiler: apt install g++ python3-dev, or --compile=false --kernel=torch"
            )
        elif not isinstance(error, UserError):
            raise
        print("error: " + str(error).replace("\n", " "), file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.tracebacklimit = 0
        raise KeyboardInterrupt("interrupted") from None


def configure(argv, *schemas, doc=None, default_file=None):
    """Instances of the schemas, made from the arguments.

    argv: config files (names that end in .py), --key=value and --key value; `-` and `_` are alike in a key.
    default_file: the config file that applies when argv names none.
    Returns (*instances, origins); origins[name] is 'default', 'flag' or the config file as it was named.
    Raises UserError. With `-h` or `--help` prints `doc` and all keys, and exits with 0.
    """
    types = {name: kind for schema in schemas for name, kind in typing.get_type_hints(schema).items()}
    if "-h" in argv or "--help" in argv:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `-h | head` ends in silence
        print(help_text(schemas, types, doc, default_file))
        sys.exit(0)

    files, flags, arguments = [], {}, iter(argv)
    for argument in arguments:
        if argument.startswith("--"):
            key, equals, text = argument.partition("=")
            name = key[2:].replace("-", "_")
            check_name(name, types, repr(argument))
            text = text if equals else next(arguments, "--")
            if not equals and text.startswith("--"):
                raise UserError(f"{key} needs a value: write {key}=VALUE")
            if name in flags:
                raise UserError(f"{key}={text}: {name} is given twice; give it once")
            flags[name] = convert(text, types[name], f"{key}={text}"), "flag"
        elif argument.endswith(".py"):
            files.append(argument)
        else:
            raise UserError(f"{argument!r} is neither a config file (PATH.py) nor --key=value; see -h")

    settings = {}  # name -> (value, origin)
    for path in files or ([default_file] if default_file else []):
        settings |= {name: (value, str(path)) for name, value in read_file(path, types).items()}
    settings |= flags
    own = [[field.name for field in dataclasses.fields(schema)] for schema in schemas]
    try:
        configs = [
            schema(**{n: settings[n][0] for n in names if n in settings})
            for schema, names in zip(schemas, own)
        ]
    except ValueError as error:  # the schema's own check in __post_init__
        raise UserError(error) from error
    return *configs, {name: settings[name][1] if name in settings else "default" for name in types}


def describe(*configs_and_origins):
    """What configure returns, to print back: `where: name=value name=value` for each file, and for flags."""
    *configs, origins = configs_and_origins
    lines = {}
    for config in configs:
        for name, value in vars(config).items():
            lines.setdefault(origins[name], []).append(f"{name}={value}")
    wrap = textwrap.TextWrapper(80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrap.fill(f"{o}: " + " ".join(lines[o])) for o in lines if o != "default")


def check_name(name, types, where):
    if name not in types:
        near = difflib.get_close_matches(name, types, 1, 0.5)
        raise UserError(
            f"{where}: no such key; " + (f"did you mean {near[0]!r}?" if near else "-h lists them")
        )


def read_file(path, types, above=()):
    """The settings of a config file, relative to the cwd or this folder. above: whose _base it is."""
    found = next((p.resolve() for p in (Path(path), Path(__file__).parent / path) if p.is_file()), None)
    if found is None:
        raise UserError(f"{str(path)!r}: no such config file, here or in {Path(__file__).parent}")
    if found in above:
        raise UserError(f"{path}: its _base leads back to itself; name another file there, or none")
    try:
        namespace = runpy.run_path(str(found))
    except Exception as error:
        raise UserError(f"{path}: {type(error).__name__}: {error}") from error
    base = namespace.get("_base")
    settings = read_file(found.parent / str(base), types, (*above, found)) if base else {}
    for name, value in namespace.items():
        if not name.startswith("_"):
            check_name(name, types, f"{path}: {name} (a name of the file's own begins with _)")
            settings[name] = convert(value, types[name], f"{path}: {name} = {value!r}")
    return settings


def convert(value, kind, where):
    """`value`, text or a Python value, as `kind`; the UserError says where, and what is accepted."""
    options = typing.get_args(kind)
    optional = NoneType in options
    if optional and value in (None, "None", "none"):
        return None
    core = options[0] if optional else kind
    if core is str and isinstance(value, str):
        return os.path.expanduser(value)
    if value in typing.get_args(core):  # of a Literal
        return value
    if isinstance(value, str):
        with contextlib.suppress(ValueError, SyntaxError, TypeError):  # what is no literal stays text
            text = {"true": "True", "false": "False"}.get(value, value.strip())
            value = ast.literal_eval(text)
            if isinstance(value, dict) and len(ast.parse(text, mode="eval").body.keys) > len(value):
                raise UserError(f"{where}: a name is given twice; give it once")
    if core in (bool, dict) and isinstance(value, core):
        return value
    if core is float and type(value) in (int, float) and value == value:  # nan is never meant
        return float(value)
    if core is int and type(value) in (int, float) and float(value).is_integer():
        return int(value)
    raise UserError(f"{where}: needs {type_name(kind)}")


def type_name(kind):
    options = typing.get_args(kind)
    if NoneType in options:
        return f"{type_name(options[0])} | none"
    return " | ".join(map(str, options)) or ("true | false" if kind is bool else kind.__name__)


def help_text(schemas, types, doc, default_file):
    lines = [doc.strip(), ""] if doc else []
    lines += ["Arguments: config files (PATH.py, applied in order) and --key=value, which wins over files."]
    lines += [f"Without a file, {default_file} applies."] if default_file else []
    for schema in schemas:
        lines += ["", schema.__name__]
        meaning = dict(re.findall(r"^ +(\w+): .*?  # (.*)$", inspect.getsource(schema), re.M))
        for field in dataclasses.fields(schema):
            default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
            key = f"--{field.name}={type_name(types[field.name])}"
            lines += [f"  {key:<44} {meaning.get(field.name, '')} [{default!r}]"]
    return "\n".join(lines)


def output_folder(path, flag):
    """The folder for results, made if need be; UserError if it cannot be written. Ask before the work."""
    path = Path(path)
    if re.search(r"^\w\w+:/|^~|\$", str(path)):
        raise UserError(f"{flag}={path} is a URL, or holds a ~ or $ that nothing expands: give a folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise UserError(f"{flag}={path} cannot be written to ({error.strerror}): give another") from error
    return path


def table(head, rows):
    """A markdown table."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)
