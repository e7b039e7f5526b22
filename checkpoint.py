"""Checkpoints: out_dir/step_00000500/{model.safetensors, ema.safetensors, optimizer/, meta.json}. Nothing is
pickled.

A checkpoint is written as .step_00000500.part and renamed when it is on disk, so every step_* folder is whole
and a run goes on from the newest one. CKPT, in every script, is such a folder or the run's folder around it.
"""

import json
import os
import shutil
import warnings
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

from configurator import UserError

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from model import GPT, GPTConfig, assign, choose_kernel
from parallel import barrier, full, rank

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # in a single process
STEPS = "step_" + 8 * "[0-9]"  # a folder of another name, step_00000500_best say, is the user's
FAILURES = OSError, SafetensorError, dcp.CheckpointException  # the last, of all ranks, is no Exception


def find_checkpoint(path):
    """The checkpoint folder that CKPT means, or None."""
    path = Path(path)
    return path if (path / "meta.json").is_file() else max(path.glob(STEPS), default=None)


def reason(error):
    """What went wrong, in one line; torch wraps the errors of all ranks in one."""
    if isinstance(error, dcp.CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


@contextmanager
def readable(ckpt):
    """Turns what a damaged file raises into one line that names the checkpoint."""
    try:
        yield
    except (*FAILURES, ValueError, KeyError) as error:
        remedy = "if it is damaged, remove that folder to go on from the one before"
        raise UserError(f"{ckpt} cannot be read ({reason(error)}): {remedy}") from error


def read_meta(path):
    """(checkpoint folder, its meta.json) of a CKPT; UserError if it is none."""
    ckpt = find_checkpoint(path)
    if ckpt is None:
        raise UserError(f"{path} is not a checkpoint: give a folder with meta.json, or a run's folder")
    with readable(ckpt):
        meta = json.loads((ckpt / "meta.json").read_text())
        meta = {key: meta[key] for key in ("step", "model_config", "train_config", "data")} | meta
    if unknown := meta["model_config"].keys() - {f.name for f in fields(GPTConfig)}:
        raise UserError(f"{ckpt} has settings that this version does not know: {sorted(unknown)}")
    return ckpt, meta


def load_weights(own, ckpt, name="model.safetensors"):
    """Copy a file's tensors (or those of its shards) into `own` {name: tensor}, whole or sharded, one by one.
    Strict: UserError with up to five names that only one side has, or in other shapes."""
    files, index = [name], ckpt / f"{name}.index.json"
    with readable(ckpt), torch.no_grad():
        if index.exists():
            files = set(json.loads(index.read_text())["weight_map"].values())
        stored = {key: file for file in [safe_open(ckpt / f, "pt") for f in files] for key in file.keys()}
        odd, what = sorted(own.keys() ^ stored.keys()), "names"
        if not odd:
            odd = [k for k, t in own.items() if stored[k].get_slice(k).get_shape() != list(t.shape)]
            what = "shapes"
        if odd:
            advice = "give the flags it was trained with"
            raise UserError(f"{ckpt} does not fit this model (other {what}: {odd[:5]}): {advice}")
        for key, tensor in own.items():
            assign(tensor, stored[key].get_tensor(key))


def load_model(path, device, weights="raw", dtype=None, kernel="auto"):
    """(model, meta) of a CKPT, ready for inference.

    weights: raw | ema. dtype: what it computes in; None: bfloat16 on CUDA, else float32. Matrices are cast to
    it once; norms and routing are held in float32, in which they compute, so that the numbers are those of
    train.py's evaluation. UserError for a CKPT without such weights.
    """
    ckpt, meta = read_meta(path)
    name = {"raw": "model.safetensors", "ema": "ema.safetensors"}[weights]
    if weights == "ema" and not (ckpt / name).exists():
        raise UserError(f"{ckpt} has no {name}: it was trained without --ema_decay=, use --weights=raw")
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    config = GPTConfig(**meta["model_config"])
    with torch.device("meta"):
        model = cast_matrices(GPT(config, choose_kernel(kernel, config, device, dtype)[0]), dtype)
    model.to_empty(device=device)
    load_weights(dict(model.named_parameters()), ckpt, name)
    return model.eval().requires_grad_(False), meta


def cast_matrices(model, dtype):
    """The model with its matrices in dtype; in float32 everything is."""
    for module in model.modules():
        if dtype == torch.float32 or isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            module.to(dtype)
    return model


def optimizer_tensors(model, optimizer):
    """AdamW's state {"exp_avg.layers.0...": tensor}, zeros where there is none yet."""
    tensors = {}
    for name, p in model.named_parameters():
        if not (state := optimizer.state[p]):
            zeros = torch.zeros_like
            state.update(step=torch.zeros((), device=p.device), exp_avg=zeros(p), exp_avg_sq=zeros(p))
        tensors |= {f"{key}.{name}": value for key, value in state.items()}
    return tensors


def load_optimizer(ckpt, meta, model, optimizer):
    """Fill in AdamW's state, whatever number of ranks saved it. All ranks call this together."""
    reader = HuggingFaceStorageReader(str(ckpt / "optimizer"))
    with readable(ckpt):
        files = len(list((ckpt / "optimizer").glob("*.safetensors")))
        if files != meta["optimizer_files"]:  # else zeros would stand in for what is missing
            raise FileNotFoundError(f"{files} of {meta['optimizer_files']} files of the optimizer are there")
        dcp.load(
            optimizer_tensors(model, optimizer), storage_reader=reader, no_dist=not dist.is_initialized()
        )


def save_checkpoint(out_dir, meta, model, ema, optimizer, keep, spared):
    """All ranks call this together. The first one gathers the weights one by one and writes them; AdamW's
    moments, the largest part, are written by all ranks, each its share. The newest `keep` checkpoints stay,
    and that of step `spared`.
    """
    name = f"step_{meta['step']:08d}"
    part = out_dir / f".{name}.part"
    if rank == 0:
        part.mkdir()
    barrier()
    for file, tensors in {"model": dict(model.named_parameters()), "ema": ema}.items():
        copies = {}
        for key, tensor in tensors.items():
            tensor = full(tensor.detach())
            if rank == 0:
                copies[key] = tensor.cpu().contiguous()
        if copies:
            save_file(copies, part / f"{file}.safetensors")
    writer = HuggingFaceStorageWriter(str(part / "optimizer"), save_distributed=True)
    dcp.save(optimizer_tensors(model, optimizer), storage_writer=writer, no_dist=not dist.is_initialized())
    barrier()
    if rank == 0:
        meta = meta | {"optimizer_files": len(list((part / "optimizer").glob("*.safetensors")))}
        (part / "meta.json").write_text(json.dumps(meta, indent=1))
        for file in filter(Path.is_file, part.rglob("*")):
            file.chmod((part / "meta.json").stat().st_mode)  # safetensors keeps its files to the owner
            with open(file, "rb") as f:
                os.fsync(f.fileno())
        shutil.rmtree(out_dir / name, ignore_errors=True)
        os.replace(part, out_dir / name)
        for old in sorted(out_dir.glob(STEPS))[:-keep]:
            if old.name != f"step_{spared:08d}":
                shutil.rmtree(old, ignore_errors=True)
    barrier()
