"""Strict settings: dataclass defaults, then config files in the order given, then --key=value flags, which always win.

    python train.py                                          # the default config file
    python train.py config/mhar_100m.py --residual=attnres   # a file and a flag
    python train.py -h                                       # every key with its choices, default and meaning

A schema is a dataclass whose source lines read `name: type = default  # meaning`, and the help is read from those lines.
Types: int, float, bool, str, dict, Literal[...], and `X | None`. A config file is Python, `name = value  # why`; names that start
with `_` are its own, but for `_base = "other.py"`: a file beside it to start from. Values from files and flags go through the same
checks. Every mistake is a UserError: one line that says what to type instead, exit code 2.
"""

import argparse
import ast
import dataclasses
import difflib
import inspect
import io
import os
import signal
import sys
import tokenize
import traceback
import typing
from pathlib import Path
from types import NoneType

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting CPU threads sleep: spinning, they slow a busy machine tenfold


class UserError(Exception):
    """A user's mistake; its message says what is wrong and what to type instead."""


class Parser(argparse.ArgumentParser):
    """argparse for the scripts that take few flags, with its mistakes told the same way: one line, exit code 2."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs)

    def error(self, message):
        raise UserError(f"{message} ({self.prog} -h lists the options)")


def cli(main):
    """Call main(); a UserError becomes one line on stderr (one per node under torchrun) and exit code 2; Ctrl-C ends in one line too, and a
    reader of the output that has seen enough (`| head`) in none."""
    try:
        try:
            main()
        finally:
            sys.stdout.flush()  # what cannot be printed shows here, not while Python shuts down
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("error: " + str(error).replace("\n", " "), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # no traceback, but the end that a shell's loop stops at
        print("interrupted", file=sys.stderr)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BrokenPipeError:
        try:
            print(flush=True)
        except BrokenPipeError:  # so it is the output's pipe, and no other, that is closed
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(128 + signal.SIGPIPE)
        raise


def output_folder(path, flag):
    """The folder for results as a Path, made where it is not there yet; a UserError that names the flag if it cannot be written to. Ask before
    the work, not after it."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{flag}={path} cannot be made ({error.strerror}): give another folder") from error
    if not os.access(path, os.W_OK):
        raise UserError(f"{flag}={path} cannot be written to: give another folder")
    return path


def configure(argv, *schemas, doc=None, default_file=None):
    """Instances of the schemas, made from the arguments.

    argv: list of config files (names that end in .py) and --key=value; `-` and `_` are alike in a key.
    default_file: the config file that applies when argv names none.
    Returns (*instances, origins), where origins[name] is 'default', 'flag' or the config file as it was named.
    Raises UserError. `-h` or `--help` prints `doc` and all keys, and exits with 0.
    """
    types = {name: kind for schema in schemas for name, kind in typing.get_type_hints(schema).items()}
    if "-h" in argv or "--help" in argv:
        print(help_text(schemas, types, doc, default_file))
        sys.exit(0)
    files, flags = [], {}
    for i, argument in enumerate(argv):
        if not argument.startswith("-") and argument.endswith(".py"):
            files.append(argument)
        else:
            name, text = split_flag(argument, argv[i + 1] if i + 1 < len(argv) else None, types)
            if name in flags:
                raise UserError(f"{argument!r}: {name} is given twice; give it once")
            flags[name] = convert(text, types[name], argument)
    values, origins = {}, dict.fromkeys(types, "default")
    for path in files or ([default_file] if default_file else []):
        for name, value in read_file(path, types).items():
            values[name], origins[name] = value, str(path)
    values.update(flags)
    origins.update(dict.fromkeys(flags, "flag"))
    try:
        configs = [schema(**{f.name: values[f.name] for f in dataclasses.fields(schema) if f.name in values}) for schema in schemas]
    except ValueError as error:  # the schema's own check in __post_init__
        raise UserError(error) from error
    return *configs, origins


def describe(*configs_and_origins):
    """The overrides, to print back: one line per config file or 'flag', `where: name=value name=value`. Takes what configure returns."""
    *configs, origins = configs_and_origins
    values = {name: value for config in configs for name, value in vars(config).items()}
    sources = dict.fromkeys(origin for origin in origins.values() if origin != "default")
    return "\n".join(f"{source}: " + " ".join(f"{name}={values[name]}" for name in origins if origins[name] == source) for source in sources)


def split_flag(argument, following, types):
    """'--key=value' -> (name, text). `following` is the next argument, which tells what `--key value` meant."""
    key, equals, text = argument.partition("=")
    name = key.lstrip("-").replace("-", "_")
    if key.startswith("--") and equals:
        known(name, types, f"{argument!r}")
        return name, text
    if name in types:
        value = text if equals else following if following and not following.startswith("-") and not following.endswith(".py") else "VALUE"
        raise UserError(f"{argument!r}: write --{name}={value}")
    if name.startswith("no_") and types.get(name[3:]) is bool:
        raise UserError(f"{argument!r}: write --{name[3:]}=false")
    if argument.startswith("-"):
        known(name, types, f"{argument!r} (the form is --key=value)")
    raise UserError(f"{argument!r} is neither a config file (PATH.py) nor a setting (--key=value); -h lists the keys")


def known(name, types, where):
    if name not in types:
        near = difflib.get_close_matches(name, types, 1, 0.5)
        raise UserError(f"{where}: no such key {name!r}; " + (f"did you mean {near[0]!r}?" if near else "-h lists the keys"))


def read_file(path, types, above=()):
    """The settings of one config file, checked and converted; the path is relative to the cwd or else to this folder. above: the files that
    have it as their _base."""
    found = next((p for p in (Path(path), Path(__file__).parent / path) if p.is_file()), None)
    if found is None:
        raise UserError(f"{str(path)!r}: no such config file, here or in {Path(__file__).parent}")
    if found.resolve() in above:
        raise UserError(f"{path}: its _base leads back to itself; name another file there, or none")
    namespace = {}
    try:
        exec(compile(found.read_bytes(), str(found), "exec"), namespace)
    except Exception as error:
        lines = [error.lineno] if isinstance(error, SyntaxError) else []
        lines += [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(found)]
        raise UserError(f"{path}:{lines[-1] if lines else 1}: {type(error).__name__}: {getattr(error, 'msg', error)}") from error
    base = namespace.get("_base")
    if not isinstance(base, str | None):
        raise UserError(f"{path}: _base = {base!r}: needs the name of a config file beside it, as text")
    settings = read_file(found.parent / base, types, (*above, found.resolve())) if base is not None else {}
    for name, value in namespace.items():
        if not name.startswith("_"):
            if name not in types and not isinstance(value, (int, float, str, dict, NoneType)):
                raise UserError(f"{path}: {name} is a {type(value).__name__} and no setting; begin its name with _, as in _{name}, to keep it to the file")
            known(name, types, path)
            settings[name] = convert(value, types[name], f"{path}: {name} = {value!r}")
    return settings


def convert(value, kind, where):
    """`value`, text or a Python value, as `kind`; a UserError that starts with `where` says what is accepted."""
    text = value.strip() if isinstance(value, str) else None
    if optional(kind) and (value is None or text in ("None", "none")):
        return None
    core = next(option for option in typing.get_args(kind) if option is not NoneType) if optional(kind) else kind
    if core is str and isinstance(value, str):
        return value
    if typing.get_origin(core) is typing.Literal:
        for choice in typing.get_args(core):
            if text == str(choice) or (type(value) is type(choice) and value == choice):
                return choice
    if core is bool:
        if isinstance(value, bool):
            return value
        if text in ("true", "True", "false", "False"):
            return text in ("true", "True")
    if core in (int, float, dict):
        if text is not None:
            value = number(text) if core is not dict else literal(text)
        if core is dict and isinstance(value, dict):
            return value
        if core is float and type(value) in (int, float) and value == value:  # nan is never meant
            return float(value)
        if core is int and (type(value) is int or type(value) is float and value.is_integer()):
            return int(value)
    raise UserError(f"{where}: needs {kind_name(kind)}")


def number(text):
    for kind in (int, float):  # int first: a float holds 53 bits
        try:
            return kind(text)
        except ValueError:
            pass


def literal(text):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None


def optional(kind):
    return NoneType in typing.get_args(kind)


def kind_name(kind):
    if optional(kind):
        return " | ".join([kind_name(option) for option in typing.get_args(kind) if option is not NoneType] + ["none"])
    if typing.get_origin(kind) is typing.Literal:
        return " | ".join(map(str, typing.get_args(kind)))
    return "true | false" if kind is bool else kind.__name__


def comments(schema):
    """{field: the comment that ends its source line}"""
    source = inspect.cleandoc("\n" + inspect.getsource(schema))  # a schema may stand indented, in a function
    by_line = {token.start[0]: token.string for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.COMMENT}
    return {
        node.target.id: by_line.get(node.end_lineno, "").lstrip("# ") for node in ast.parse(source).body[0].body if isinstance(node, ast.AnnAssign)
    }


def help_text(schemas, types, doc, default_file):
    lines = [doc.strip(), ""] if doc else []
    lines += ["Arguments: config files (PATH.py, applied in order) and --key=value, which wins over files."]
    lines += [f"Without a file, {default_file} applies."] if default_file else []
    for schema in schemas:
        lines += ["", schema.__name__]
        meaning = comments(schema)
        for field in dataclasses.fields(schema):
            default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
            lines += [f"  {f'--{field.name}={kind_name(types[field.name])}':<44} {meaning[field.name]} [{default!r}]"]
    return "\n".join(lines)
