"""Checkpoints: out_dir/step_00000500/{model.safetensors, ema.safetensors, optimizer/, meta.json}. Nothing is pickled.

A checkpoint is written as .step_00000500.part and renamed when all of it is there, so every step_* folder is whole
and the newest one is where a run goes on. CKPT, in every script, is such a folder or the run's folder around it.
"""
import json
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from configurator import UserError
from model import GPT, GPTConfig, assign, choose_kernel
from parallel import barrier, full, is_first


def find_checkpoint(path):
    """The checkpoint folder that CKPT means, or None."""
    path = Path(path)
    if (path / "meta.json").is_file():
        return path
    return max(path.glob("step_" + 8 * "[0-9]"), default=None)


def read_meta(path):
    """(checkpoint folder, its meta.json) of a CKPT that must be one."""
    ckpt = find_checkpoint(path)
    if ckpt is None:
        raise UserError(f"{path} is not a checkpoint: give a folder with meta.json, or a run's folder")
    return ckpt, json.loads((ckpt / "meta.json").read_text())


def load_weights(own, ckpt, name="model.safetensors"):
    """Copy the file's (or its shards') tensors into `own` {name: tensor}, which may be sharded. Strict."""
    index = ckpt / f"{name}.index.json"
    files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else [name]
    stored = {key: file for file in [safe_open(ckpt / f, "pt") for f in files] for key in file.keys()}
    if odd := sorted(own.keys() ^ stored.keys()):
        raise UserError(f"{ckpt} does not fit this model, it differs in {odd[:5]}: use the flags it was trained with")
    with torch.no_grad():
        for key, tensor in own.items():
            assign(tensor, stored[key].get_tensor(key))


def load_model(path, device, weights="raw", dtype=None, kernel="auto"):
    """(model, meta) of a CKPT, ready for inference.

    weights: raw | ema. dtype: what it computes in; None: bfloat16 on CUDA, else float32. Matrices are cast to it once
    and norms and routing keep the file's precision, so that the numbers are those of train.py's evaluation; in
    float32 everything is cast. UserError for a CKPT without such weights.
    """
    ckpt, meta = read_meta(path)
    name = {"raw": "model.safetensors", "ema": "ema.safetensors"}[weights]
    if weights == "ema" and not (ckpt / name).exists():
        raise UserError(f"{ckpt} has no {name}: it was trained without --ema_decay=, use --weights=raw")
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    config = GPTConfig(**meta["model_config"])
    with torch.device("meta"):
        model = GPT(config, choose_kernel(kernel, config, device, dtype)[0])
        cast_matrices(model.to(getattr(torch, meta["train_config"]["param_dtype"])), dtype)
    model.to_empty(device=device)
    load_weights(dict(model.named_parameters()), ckpt, name)
    return model.eval().requires_grad_(False), meta


def cast_matrices(model, dtype):
    """The model with its matrices in dtype; in float32 everything."""
    for module in model.modules():
        if dtype == torch.float32 or isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            module.to(dtype)
    return model


def optimizer_tensors(model, optimizer):
    """AdamW's state by parameter name, made (as zeros) where it is not there yet: {"exp_avg.layers.0...": tensor}."""
    tensors = {}
    for name, p in model.named_parameters():
        if not (state := optimizer.state[p]):
            zeros = torch.zeros_like
            state.update(step=torch.zeros((), device=p.device), exp_avg=zeros(p), exp_avg_sq=zeros(p))
        tensors |= {f"{key}.{name}": value for key, value in state.items()}
    return tensors


def load_optimizer(ckpt, model, optimizer):
    dcp.load(optimizer_tensors(model, optimizer), storage_reader=HuggingFaceStorageReader(str(ckpt / "optimizer")),
             no_dist=not dist.is_initialized())  # fmt: skip


def save_checkpoint(out_dir, meta, model, ema, optimizer, keep):
    """All ranks call this together. Tensors are gathered one by one, and written by the first rank; AdamW's moments,
    the largest part, are written by all ranks, each its share."""
    name = f"step_{meta['step']:08d}"
    part = out_dir / f".{name}.part"
    if is_first():
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    barrier()
    for file, tensors in {"model": dict(model.named_parameters()), "ema": ema}.items():
        copies = {}
        for key, tensor in tensors.items():
            tensor = full(tensor.detach())
            if is_first():
                copies[key] = tensor.cpu().contiguous()
        if copies:
            save_file(copies, part / f"{file}.safetensors")
    writer = HuggingFaceStorageWriter(str(part / "optimizer"), save_distributed=True)
    dcp.save(optimizer_tensors(model, optimizer), storage_writer=writer, no_dist=not dist.is_initialized())
    barrier()
    if is_first():
        (part / "meta.json").write_text(json.dumps(meta, indent=1))
        for file in filter(Path.is_file, part.rglob("*")):
            with open(file, "rb") as f:
                os.fsync(f.fileno())
        shutil.rmtree(out_dir / name, ignore_errors=True)
        os.replace(part, out_dir / name)
        for old in sorted(out_dir.glob("step_" + 8 * "[0-9]"))[:-keep]:
            shutil.rmtree(old)
    barrier()
