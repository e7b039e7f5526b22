"""A run's folder, out_dir: its name, its log, and the lock that makes it one process's alone."""

import fcntl
import json
import os
import re
import shutil
import sys
import time

from configurator import UserError, output_folder

from parallel import from_first_rank, rank, same_on_all_ranks


def read_log(path):
    """The events of a log.jsonl, without lines that a kill or a power failure damaged."""
    events = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            events.append({"event": None, "step": float("inf")} | json.loads(line))
        except (ValueError, TypeError):  # no JSON, or no object
            continue
    return events


def differences(there, here, names):
    """Those of `names` whose settings differ between two dicts, and the first of them in words."""
    other = [k for k in names if there[k] != here[k]]
    return other, "; ".join(f"{k}={there[k]} there, {here[k]} here" for k in other[:4])


def folder_name(name, settings):
    """A folder's name with settings in it, in characters that neither a file system nor a shell minds."""
    safe = {k: re.sub(r"[^\w.+-]+", "-", str(v)).strip("-") for k, v in settings.items()}
    return "_".join([name, *(f"{k}={v}" for k, v in safe.items())])[:200]


def check_same_run(out_dir, there, here, names, note):
    """UserError if the settings called `names`, or the data, are not those of the run that out_dir holds."""
    if any(there.get(k) != here[k] for k in ("sha256", "val_sha256")):
        names, there = ["dataset", *names], there | {"dataset": f"{there.get('dataset')} (other data)"}
    other, words = differences(there, here, names)
    if other:
        new = out_dir.parent / folder_name(out_dir.name, {k: here[k] for k in other[:4]})
        raise UserError(f"{out_dir} holds another run ({words}{note}): start this one with --out_dir={new}")


def claim(out_dir, state, device):
    """Make out_dir this run's alone, and check that all ranks start from the same `state` there. Returns its
    lock, which the system releases however the process ends. UserError, on all ranks."""
    lock, problem = None, ""
    if rank == 0:
        try:
            lock = open(output_folder(out_dir, "--out_dir") / ".lock", "w")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except UserError as error:
            problem = str(error)
        except BlockingIOError:
            problem = f"another process trains in {out_dir}: wait for it, or give a new --out_dir="
        except OSError as error:
            if lock is None:
                raise
            print(f"warning: {out_dir} cannot be locked ({error}): start no other run there", file=sys.stderr)
    if problem := from_first_rank(problem, device):
        raise UserError(problem)
    if rank == 0:
        for part in out_dir.glob(".step_*.part"):  # of a save that did not end
            shutil.rmtree(part)
        print(time.time_ns(), file=lock, flush=True)
        os.fsync(lock.fileno())
    for _ in range(60):  # a network file system may show it late
        seen = (out_dir / ".lock").read_text() if (out_dir / ".lock").exists() else ""
        if same_on_all_ranks(f"{state} {seen}", device):
            return lock
        time.sleep(0.5)
    raise UserError(f"the ranks do not see the same {out_dir}: give an --out_dir= that all nodes share")
