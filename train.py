"""Train a Transformer with any residual method: on a CPU, one GPU, or many under torchrun.

    python train.py                                                          # config/demo.py: minutes on a laptop
    python train.py config/mhar_100m.py --residual=baseline                  # one GPU
    torchrun --nproc_per_node=8 train.py config/mhar_1b.py                   # eight GPUs, the same optimizer steps
    python train.py config/mhar_100m.py                                      # the same command again resumes

An optimizer step sees the same windows in the same order whatever the number of ranks, the micro-batch or the residual method.
"""
import fcntl
import json
import math
import os
import re
import shutil
import signal
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal, get_type_hints

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # CPU threads that wait sleep: spinning, they slow a busy machine tenfold
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from configurator import UserError, cli, configure, convert, describe
from model import GPT, GPTConfig, assign, choose_kernel, peak_flops
from prepare_data import TrainWindows, ValWindows, find_dataset, open_bin

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # said of every checkpoint of a single process


@dataclass
class TrainConfig:
    # where
    dataset: str = "stdlib"  # a name under data/, or a folder that prepare_data.py made
    out_dir: str | None = None  # checkpoints and log.jsonl; None: out/<config file>_<residual>
    resume: str = "auto"  # auto: go on from out_dir's newest checkpoint, if any | never | a checkpoint folder
    init_from: str | None = None  # a checkpoint whose weights to start from, at step 0
    seed: int = 42  # fixes initial weights and data order
    # batch
    batch_size: int = 8  # sequences per device and micro-step
    global_batch_size: int = 64  # sequences per optimizer step, over all devices and micro-steps
    # optimizer
    max_steps: int = 20_000  # optimizer steps
    warmup_steps: int = 1_000  # linear, from zero
    learning_rate: float = 5e-4  # peak
    min_lr_ratio: float = 0.1  # the schedule ends at this share of the peak
    lr_schedule: Literal["cosine", "linear", "wsd"] = "cosine"  # wsd: constant, then linear over the last fifth
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95  # AdamW
    adam_eps: float = 1e-8  # AdamW
    weight_decay: float = 0.1  # on every parameter, as in the paper, but for what the next flags except
    decay_norms: bool = True  # decay RMSNorm weights
    decay_embeddings: bool = True  # decay the embedding and an untied output head
    decay_hc_static: bool = False  # decay static hyper-connections, as the paper did: it pulls the identity mixing to zero
    route_weight_decay: float | None = None  # for parameters of the residual method; None: weight_decay
    route_lr_scale: float = 1.0  # learning rate of the residual method's parameters, as a multiple
    grad_clip: float = 1.0  # global norm; 0 turns clipping off
    z_loss: float = 0.0  # weight of mean(logsumexp(logits)^2) in the objective; the logged loss is without it
    ema_decay: float = 0.0  # running average of the weights, evaluated and saved beside them; 0: none, 0.999 is usual
    # machine
    device: str = "auto"  # auto | cpu | cuda | cuda:1 | mps
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of activations; auto: bfloat16 on CUDA, else float32
    param_dtype: Literal["float32", "bfloat16"] = "float32"  # of weights and optimizer state; bfloat16 is the paper's, see README
    kernel: Literal["auto", "triton", "torch"] = "auto"  # depth routing; auto: triton on CUDA, else torch
    compile: bool | None = None  # torch.compile of the whole model with its loss; none: on CUDA only
    cuda_graph: bool | None = None  # replay forward and backward as one CUDA graph, which saves launching their kernels; none: on CUDA
    grad_checkpoint: bool = False  # recompute sublayers in backward to save memory
    parallel: Literal["ddp", "fsdp"] = "ddp"  # under torchrun: every rank holds the model, or a share of it (FSDP2)
    fsdp_accumulate: Literal["whole", "sharded"] = "whole"  # gradients between micro-steps: whole (4 bytes a parameter) and summed once, or shares, summed every time
    # intervals, in optimizer steps
    eval_interval: int = 500  # validation; the last step is always evaluated
    eval_windows: int = 200  # fixed validation windows, spread evenly over val.bin
    save_interval: int = 500  # checkpoints; the last step is always saved
    keep_checkpoints: int = 2  # the newest so many stay
    log_interval: int = 10  # train lines in log.jsonl; also how soon a non-finite number is noticed, and a SIGTERM where that takes under 5 seconds
    tensorboard: bool = False  # also write out_dir/tensorboard
    wandb: str | None = None  # also log to this Weights & Biases project

    def __post_init__(self):
        for name in ("batch_size", "global_batch_size", "max_steps", "eval_interval", "eval_windows", "save_interval", "keep_checkpoints", "log_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("warmup_steps", "weight_decay", "route_weight_decay", "grad_clip", "z_loss", "route_lr_scale", "adam_eps", "learning_rate", "seed"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) < (2**63 if name == "seed" else math.inf):
                raise ValueError(f"{name}={getattr(self, name)} must be 0 or more" + ", and under 2^63" * (name == "seed"))
        for name in ("beta1", "beta2", "ema_decay", "min_lr_ratio"):
            if not 0 <= getattr(self, name) <= 1 or (name != "min_lr_ratio" and getattr(self, name) == 1):
                raise ValueError(f"{name}={getattr(self, name)} must lie between 0 and 1")


# What may change between two starts of one run: none of it moves a training loss beyond rounding. The data's checksums are compared, not its place.
FREE = {"dataset", "out_dir", "resume", "batch_size", "device", "kernel", "compile", "cuda_graph", "grad_checkpoint", "parallel", "fsdp_accumulate", "eval_interval", "eval_windows", "save_interval",
        "keep_checkpoints", "log_interval", "tensorboard", "wandb"}  # fmt: skip


def learning_rate(cfg, step):
    """The rate of optimizer step `step` (0-based): a pure function, so that it cannot differ after a resume."""
    if step < cfg.warmup_steps:
        return cfg.learning_rate * (step + 1) / cfg.warmup_steps
    done = (step - cfg.warmup_steps) / max(1, cfg.max_steps - cfg.warmup_steps)
    if cfg.lr_schedule == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * done))
    elif cfg.lr_schedule == "linear":
        share = 1 - done
    else:
        share = min(1.0, (1 - done) / 0.2)
    return cfg.learning_rate * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * share)


def parameter_groups(model, cfg):
    """AdamW's groups, by name and not by shape: [{"params", "weight_decay", "lr_scale"}]."""
    groups = {}
    for name, p in model.named_parameters():
        routing = name.startswith("residual.")
        decay = cfg.weight_decay if not routing or cfg.route_weight_decay is None else cfg.route_weight_decay
        if ("norm" in name and not cfg.decay_norms) or (name.startswith(("embed.", "head.")) and not cfg.decay_embeddings):
            decay = 0.0
        if name in ("residual.read_weight", "residual.mix_weight", "residual.write_weight") and not cfg.decay_hc_static:
            decay = 0.0
        scale = cfg.route_lr_scale if routing else 1.0
        groups.setdefault((decay, scale), []).append(p)
    return [{"params": params, "weight_decay": decay, "lr_scale": scale} for (decay, scale), params in groups.items()]


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints: out_dir/step_00000500/{model.safetensors, ema.safetensors, optimizer/, meta.json}; out_dir/latest names the newest.
# All tensors are safetensors and the rest is JSON: nothing is pickled.
# ----------------------------------------------------------------------------------------------------------------------
def find_checkpoint(path):
    """CKPT, in every script: a folder with meta.json, or a run's folder with `latest` -> the folder with meta.json, or None. Where `latest` names
    no checkpoint (empty after a crash, say), it is the newest whole one, with a warning."""
    path = Path(path)
    latest = path / "latest"
    named = path / latest.read_text(errors="replace").strip() if latest.is_file() else path
    if (named / "meta.json").is_file():
        return named
    ckpt, damage = newest_whole(path)
    if ckpt:
        print(f"warning: {'; '.join([f'{latest} names no checkpoint', *damage])}: taking {ckpt}", file=sys.stderr)
    return ckpt


def the_checkpoint(path, flag=""):
    """find_checkpoint of a path that must be one, given by `flag`; UserError where it is not."""
    ckpt = find_checkpoint(path)
    if ckpt is None:
        raise UserError(f"{flag}{path} is not a checkpoint: give a folder with meta.json, or a run's folder with `latest` (convert_8b.py import makes one of a Hugging Face model)")
    return ckpt


def checkpoints(out_dir):
    """The checkpoints of a run, {step: folder}, by step. Folders of other names, step_00000500_best say, are the user's."""
    return {int(path.name[5:]): path for path in sorted(out_dir.glob("step_" + 8 * "[0-9]"))}


def newest_whole(out_dir):
    """The newest checkpoint of a run that can be read: (its folder or None, what is wrong with newer ones in words). What lies beyond `latest` was
    given up when the run went on from an earlier one, and comes last."""
    damage, there, latest = [], checkpoints(out_dir), out_dir / "latest"
    end = int(match[1]) if latest.is_file() and (match := re.match(rb"step_(\d{8})", latest.read_bytes())) else math.inf
    for step in sorted(there, key=lambda step: (step <= end, step), reverse=True):
        ckpt = there[step]
        try:
            meta = read_meta(ckpt)
            for name, size in meta.get("files", {}).items():
                if (ckpt / name).stat().st_size != size:
                    raise UserError(f"{name} is not as long as it was")
            for file in [ckpt / "model.safetensors", *[ckpt / "ema.safetensors"] * bool(meta["train_config"]["ema_decay"]), *(ckpt / "optimizer").glob("*.safetensors")]:
                with safe_open(file, "pt"):  # reads the header and compares it with the file's length
                    pass
            if any((ckpt / "optimizer").glob("*.safetensors")):
                return ckpt, damage
            damage.append(f"{ckpt} has no optimizer state")
        except (OSError, KeyError, SafetensorError, UserError) as error:
            damage.append(f"{ckpt} is damaged ({error})")
    return None, damage


def read_meta(ckpt):
    """The dict in a checkpoint's meta.json; UserError if it is none that train.py or convert_8b.py could have written."""
    try:
        meta = json.loads((ckpt / "meta.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{ckpt / 'meta.json'} cannot be read ({error}): take another checkpoint") from error
    sections = {"model_config": {"block_size", "vocab_size"}, "train_config": {"param_dtype"}, "data": {"dataset", "tokenizer"}}
    if not isinstance(meta, dict) or "step" not in meta or any(not isinstance(meta.get(key), dict) or not needs <= meta[key].keys() for key, needs in sections.items()):
        raise UserError(f"{ckpt / 'meta.json'} is not what train.py or convert_8b.py writes: take another checkpoint")
    data, origin = meta["data"], meta.get("origin") or {}
    known = isinstance(origin, dict) and isinstance(origin.get("config"), dict | None) and isinstance(origin.get("source", ""), str)
    if not known or not all(isinstance(data.get(key), str | None) for key in ("dataset", "tokenizer", "sha256")) or not isinstance(meta.get("files", {}), dict):
        raise UserError(f"{ckpt / 'meta.json'} does not say what data or model it is from: take another checkpoint")
    for values, kinds in ((meta, {"step": int}), (meta["model_config"], get_type_hints(GPTConfig) | {"vocab_size": int}),
                          (meta["train_config"], {"param_dtype": Literal["float32", "bfloat16", "float16"], "ema_decay": float})):  # fmt: skip
        for key in kinds.keys() & values.keys():
            where = f"{ckpt / 'meta.json'} is damaged, take another checkpoint: {key} = {values[key]!r}"
            value = convert(values[key], kinds[key], where)
            if value != values[key]:
                raise UserError(f"{where}: is text where none belongs")
            values[key] = value  # a whole number may be written as 12.0
    try:
        GPTConfig(**meta["model_config"])
    except (TypeError, ValueError) as error:
        raise UserError(f"{ckpt / 'meta.json'} describes no model of this version ({error}): take another checkpoint") from error
    return meta


def load_weights(model, ckpt, name="model.safetensors", into=None):
    """Copy a checkpoint's weights into the model's parameters (or into tensors named alike), whole or sharded, file by file.

    Strict: UserError with up to five missing, unexpected or differently shaped names.
    """
    own = into or dict(model.named_parameters())
    index = ckpt / f"{name}.index.json"
    files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else [name]
    try:
        stored = {key: file for file in [safe_open(ckpt / f, "pt") for f in files] for key in file.keys()}
    except (OSError, SafetensorError) as error:
        raise UserError(f"the weights in {ckpt} cannot be read ({error}): take another checkpoint") from error
    shapes = {key: stored[key].get_slice(key).get_shape() for key in own.keys() & stored.keys()}
    wrong = {
        "missing": own.keys() - stored.keys(),
        "unexpected": stored.keys() - own.keys(),
        "of another shape": {f"{key} {shape} for {list(own[key].shape)}" for key, shape in shapes.items() if shape != list(own[key].shape)},
    }
    if any(wrong.values()):
        raise UserError(f"{ckpt} does not fit this model: {'; '.join(f'{what} {sorted(keys)[:5]}' for what, keys in wrong.items() if keys)}; give the model flags it was trained with")
    with torch.no_grad():
        for key, tensor in own.items():
            assign(tensor, stored[key].get_tensor(key))


def load_model(path, device, dtype=None, weights="raw", kernel="auto"):
    """(model, meta) of a checkpoint, ready for inference. path: CKPT; dtype: of the weights, None for that in the file; weights: raw | ema."""
    ckpt, name = the_checkpoint(path), {"raw": "model.safetensors", "ema": "ema.safetensors"}[weights]
    if not (ckpt / name).exists() and not (ckpt / f"{name}.index.json").exists():
        raise UserError(f"{ckpt} has no {name}" + ("; it was trained without --ema_decay=, use --weights=raw" if weights == "ema" else ""))
    meta = read_meta(ckpt)
    config = GPTConfig(**meta["model_config"])
    dtype = dtype or getattr(torch, meta["train_config"]["param_dtype"])
    with torch.device("meta"):
        model = GPT(config, choose_kernel(kernel, config, device, dtype)[0]).to(dtype)
    model.to_empty(device=device)
    load_weights(model, ckpt, name)
    return model.eval().requires_grad_(False), meta


def start_from(path, config, origins):
    """(checkpoint, its meta, the GPTConfig that continues it) for --init_from. What no config file and no flag sets is the checkpoint's, and what
    they set must be what it has, or a model of the same shapes would compute something else; but for the context and the initialisation."""
    ckpt = the_checkpoint(path, "--init_from=")
    meta = read_meta(ckpt)
    then = {k: v for k, v in meta["model_config"].items() if k not in ("block_size", "route_init") or origins[k] == "default"}
    other = [f"{k}={getattr(config, k)} ({origins[k]}), {v} in {ckpt}" for k, v in then.items() if origins[k] != "default" and getattr(config, k) != v]
    if other:
        remedy = "leave these settings away, they come with the checkpoint" if any(a.endswith(".py") for a in sys.argv[1:]) else "name a config file of yours, without one config/demo.py applies"
        raise UserError(f"--init_from={path} is another model: {'; '.join(other[:4])}; {remedy}")
    return ckpt, meta, replace(config, **then)


def optimizer_tensors(model, optimizer):
    """AdamW's state by parameter name, made (as zeros) where it is not there yet: {"exp_avg.layers.0...": tensor}."""
    tensors = {}
    for name, p in model.named_parameters():
        state = optimizer.state[p]
        if not state:
            state.update(step=torch.zeros((), device=p.device), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        tensors |= {f"{key}.{name}": value for key, value in state.items()}
    return tensors


class Checkpointer:
    """Writes checkpoints while training goes on. All ranks call save and finish together.

    save copies everything to host memory and leaves the writing to a thread, under the name .step_*.part; finish waits for the
    threads of all ranks and renames. So a folder called step_* is whole, and until then the one before it is the newest.
    """

    def __init__(self, out_dir, keep, rank):
        self.out_dir, self.keep, self.rank, self.writing = out_dir, keep, rank, None
        self.thread = ThreadPoolExecutor(1)
        # the thread's own, apart from training's; a slow disk may take long
        self.group = dist.new_group(backend="gloo", timeout=timedelta(hours=4)) if dist.is_initialized() else None
        if rank == 0:  # what a killed process had begun to write
            for part in out_dir.glob(".step_" + 8 * "[0-9]" + ".part"):
                shutil.rmtree(part, ignore_errors=True)

    def barrier(self):
        if self.group:
            dist.barrier(self.group)

    def save(self, meta, model, ema, optimizer):
        self.finish()
        name = f"step_{meta['step']:08d}"
        part = self.out_dir / f".{name}.part"
        if self.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        self.barrier()
        jobs = []
        for file, tensors in {"model": dict(model.named_parameters()), "ema": ema}.items():
            copies = {}
            for key, tensor in tensors.items():  # one at a time: a sharded one is gathered on every rank and kept by the first
                tensor = full(tensor.detach())
                if self.rank == 0:
                    copies[key] = tensor.to("cpu", copy=True).contiguous()
            if copies:
                jobs.append(self.thread.submit(save_file, copies, part / f"{file}.safetensors"))
        writer = HuggingFaceStorageWriter(str(part / "optimizer"), save_distributed=True)
        jobs.append(dcp.async_save(optimizer_tensors(model, optimizer), storage_writer=writer, process_group=self.group, no_dist=self.group is None))
        self.writing = name, part, jobs, meta

    def written(self):
        """Whether this rank's part of a checkpoint under way is on disk."""
        return self.writing is not None and all(job.done() for job in self.writing[2])

    def finish(self):
        if self.writing is None:
            return
        name, part, jobs, meta = self.writing
        self.writing = None
        try:
            for job in jobs:
                job.result()
            self.barrier()
            if self.rank == 0:
                files = sorted(f for f in part.rglob("*") if f.is_file())
                own = part / "meta.json"  # the last file, with the sizes of the others
                own.write_text(json.dumps(meta | {"files": {f.relative_to(part).as_posix(): f.stat().st_size for f in files}}, indent=1))
                for file in [*files, own]:
                    file.chmod(own.stat().st_mode)  # safetensors keeps its files to the owner
                    with open(file, "rb") as f:
                        os.fsync(f.fileno())
        except (Exception, dcp.CheckpointException) as error:  # a full disk comes as OSError, SafetensorError or torch's, of every rank: the run cannot be saved
            shutil.rmtree(part, ignore_errors=True)
            if isinstance(error, dcp.CheckpointException):
                if self.rank > 0:  # the first one has it, too, and speaks
                    sys.exit(1)
                error = next(iter(error.failures.values()))[0]
            before = find_checkpoint(self.out_dir)
            sys.exit(f"error: the checkpoint {self.out_dir / name} could not be written ({' '.join(str(error).split())[:300]}); {f'{before} is untouched' if before else 'there is none before it'}: make room and start again")
        self.barrier()
        if self.rank == 0:
            shutil.rmtree(self.out_dir / name, ignore_errors=True)
            os.replace(part, self.out_dir / name)
            write_atomically(self.out_dir / "latest", name + "\n")
            for old in [path for step, path in checkpoints(self.out_dir).items() if step <= int(name[5:])][: -self.keep]:
                shutil.rmtree(old)
        self.barrier()


def write_atomically(path, text):
    part = path.with_name(f".{path.name}.part")
    with open(part, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)


def read_log(folder):
    """The events of a run's log.jsonl. Damaged lines, cut off by a power failure say, are left out."""
    events = []
    for line in (folder / "log.jsonl").read_text(errors="replace").splitlines() if (folder / "log.jsonl").exists() else []:
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [e for e in events if isinstance(e, dict) and "event" in e]


def check_same_run(out_dir, then_train, then_model, cfg, config):
    """A UserError if out_dir holds another run than the one asked for, saying in what."""
    then, now = {**then_train, **then_model}, {**asdict(cfg), **asdict(config)}
    other = [f"{k}={then.get(k)} there, {k}={now[k]} here" for k in now if k not in FREE and json.loads(json.dumps(now[k])) != then.get(k)]
    if other:
        raise UserError(f"{out_dir} holds another run ({'; '.join(other[:4])}): give --out_dir= a new folder, or the flags of that run to go on with it")


def check_same_data(where, known, train_bin, val_bin):
    """A UserError if the run was trained or evaluated on other files, by the checksums that `where` knows."""
    for b, key in ((train_bin, "sha256"), (val_bin, "val_sha256")):
        if known.get(key, b.header["sha256"]) != b.header["sha256"]:
            raise UserError(f"{b.path} is not the file of this run: its checksum differs from that in {where}; give --dataset= the old one, or a new --out_dir=")


# ----------------------------------------------------------------------------------------------------------------------
# Machine
# ----------------------------------------------------------------------------------------------------------------------
def check_device(name):
    """The torch device called `name`, if there is one here."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"--device={name} is not a device: cpu, cuda, cuda:1 or mps") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device={name}: torch sees no CUDA GPU here; use --device=cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device={name}: there are {torch.cuda.device_count()} GPUs: give one of cuda:0..{torch.cuda.device_count() - 1}, or start fewer processes")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError(f"--device={name}: torch sees no Apple GPU here; use --device=cpu")
    return device


def choose_device(cfg, local_rank):
    """(torch device, activation dtype, why) from what was asked for and what is there."""
    if cfg.device == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        why = "found" if kind != "cpu" else "no GPU found"
    else:
        kind, why = cfg.device, "asked for"
    device = check_device(kind)
    if device.type == "cuda":
        check_device(f"cuda:{int(os.environ.get('LOCAL_WORLD_SIZE', 1)) - 1}")  # on every rank, so that the one which speaks knows
        device = check_device(f"cuda:{local_rank if 'RANK' in os.environ else device.index or 0}")
        why += f", {torch.cuda.get_device_name(device)}"
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": torch.bfloat16 if device.type == "cuda" else torch.float32}[cfg.dtype]
    if cfg.param_dtype == "bfloat16":
        if cfg.dtype == "float32":
            raise UserError("--param_dtype=bfloat16 computes in bfloat16; leave --dtype=float32 away")
        dtype = torch.bfloat16
    return device, dtype, why


def full(tensor):
    """A sharded tensor whole, on every rank (all of them must ask); any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


FSDP_UNIT = 100_000_000  # parameters gathered at once; without a CUDA graph every unit costs the host 3 ms a step, more than a small layer's work hides


def shard(model, dtype):
    """FSDP2: layers of up to FSDP_UNIT parameters together, at least one, are gathered when they run, in `dtype`; gradients are summed and
    weights kept in their own precision (fp32).

    A layer is named by its sublayers because the Transformer calls those. The residual method's parameters stay fp32 in compute, as under
    DDP, and are gathered once per pass, when its depth memory is opened.
    """
    half = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)  # rotary tables stay fp32
    layers = max(1, FSDP_UNIT // sum(p.numel() for p in model.layers[0].parameters()))
    for i in range(0, len(model.layers), layers):
        fully_shard([sublayer for layer in model.layers[i : i + layers] for sublayer in (layer.attn, layer.mlp)], mp_policy=half)
    if next(model.residual.parameters(), None) is not None:
        fully_shard(model.residual, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32), reshard_after_forward=False)
        register_fsdp_forward_method(model.residual, "start")
    fully_shard(model, mp_policy=half)


def reshard(model):
    """After a pass without a backward FSDP's outermost groups stay gathered; give them back, or the next pass would read old weights."""
    for module in (model, model.residual):
        if isinstance(module, FSDPModule):
            module.reshard()


def lock(out_dir):
    """The file by which one run at a time is in out_dir, locked for as long as it is open."""
    file = open(out_dir / ".lock", "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another process is training in {out_dir}: wait for it to end, or give --out_dir= another folder") from None
    except OSError as error:
        print(f"warning: {out_dir} cannot be locked ({error}): see to it that no other process trains there", file=sys.stderr)
    return file


def check_shared(out_dir, step, rank, device):
    """UserError, on all ranks, unless they go on from one step and see one out_dir: what the first writes into its lock the others find."""
    first = torch.tensor([time.time_ns(), step], device=device)
    dist.broadcast(first, src=0)
    mark, first_step = first.tolist()
    file, tries = out_dir / ".lock", 60
    if rank == 0:
        file.write_text(str(mark))
    dist.barrier()
    while not (found := file.is_file() and file.read_text() == str(mark)) and (tries := tries - 1):
        time.sleep(0.5)  # a network file system may be late
    if apart := all_reduce([not found or step != first_step], device)[0]:
        raise UserError(f"{apart:.0f} of {dist.get_world_size()} ranks do not see in {out_dir} what the first one sees: give --out_dir= a folder on a file system that all nodes share")


def all_reduce(values, device):
    """The sum over ranks of a list of numbers or 0-dim tensors, as floats (fp64, so that it does not depend on their order to print)."""
    total = torch.tensor([float(v) for v in values], dtype=torch.float64, device="cpu" if device.type == "mps" else device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.tolist()


class GraphedMicroStep:
    """Forward and backward of a micro-step, recorded as CUDA graphs once and replayed from then on: (x, y, first, last) -> cross_entropy.

    run(x, y, last) does the work; kinds are the (first, last) of an optimizer step's micro-steps. The first one writes the gradients, later ones add
    to them, and with the last one FSDP sums them: a graph each, which share one memory pool. Gradients then live in fixed places, so nothing may
    set them to None; the returned cross-entropy is overwritten by the next call.
    """

    def __init__(self, run, x, y, parameters, kinds):
        self.x, self.y, self.graphs, parameters = x.clone(), y.clone(), {}, list(parameters)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # compiles
                run(self.x, self.y, True)
        torch.cuda.current_stream().wait_stream(side)
        for p in parameters:
            p.grad = None
        torch.cuda.empty_cache()  # the graphs' memory pool takes the place of what the warm-up used
        pool = torch.cuda.graph_pool_handle()
        for first, last in dict.fromkeys(kinds):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # NCCL's watchdog may go on meanwhile
                cross_entropy = run(self.x, self.y, last)
            self.graphs[first, last] = graph, cross_entropy

    def __call__(self, x, y, first, last):
        self.x.copy_(x)
        self.y.copy_(y)
        graph, cross_entropy = self.graphs[first, last]
        graph.replay()
        return cross_entropy


def average_gradients(parameters):
    """What DDP does during a backward, done after one that a CUDA graph replayed: NCCL takes the gradients of all ranks as one group, the large ones
    where they lie, the small ones, each of which would cost it 4 us, joined in one tensor. Every parameter has a gradient."""
    large, small = [], []
    for p in parameters:
        (large if p.numel() >= 1 << 20 else small).append(p.grad)
    together = torch.cat([grad.flatten() for grad in small])
    with dist._coalescing_manager():
        for grad in [together, *large]:
            dist.all_reduce(grad, op=dist.ReduceOp.AVG)
    torch._foreach_copy_(small, [part.view_as(grad) for part, grad in zip(together.split([grad.numel() for grad in small]), small)])


# ----------------------------------------------------------------------------------------------------------------------
# The run
# ----------------------------------------------------------------------------------------------------------------------
def main():
    cfg, config, origins = configure(sys.argv[1:], TrainConfig, GPTConfig, doc=__doc__, default_file="config/demo.py")
    rank, world, distributed = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), "RANK" in os.environ
    device, dtype, why_device = choose_device(cfg, int(os.environ.get("LOCAL_RANK", 0)))
    if cfg.global_batch_size % (cfg.batch_size * world):
        raise UserError(
            f"global_batch_size={cfg.global_batch_size} is not a multiple of batch_size={cfg.batch_size} x {world} ranks: choose --batch_size= and --global_batch_size= so that it is"
        )
    if cfg.parallel == "fsdp" and not distributed:
        raise UserError("--parallel=fsdp shares the model out to the ranks of torchrun: start it with torchrun --nproc_per_node=GPUS train.py ..., or leave it away")
    if cfg.fsdp_accumulate == "sharded" and cfg.parallel != "fsdp":
        raise UserError("--fsdp_accumulate=sharded is for --parallel=fsdp: leave it away, or say --fsdp_accumulate=whole")
    base, base_meta, config = start_from(cfg.init_from, config, origins) if cfg.init_from else (None, {}, config)
    try:
        kernel, why_kernel = choose_kernel(cfg.kernel, config, device, dtype)
    except ValueError as error:
        raise UserError(error) from error
    graphed = device.type == "cuda" if cfg.cuda_graph is None else cfg.cuda_graph
    if graphed and device.type != "cuda":
        raise UserError(f"--cuda_graph=true needs a CUDA device, this is {device}; leave it away")
    averaging = graphed and distributed and cfg.parallel == "ddp"  # after the replay: DistributedDataParallel's hooks would not be in the graph
    micro_steps = cfg.global_batch_size // (cfg.batch_size * world)
    tokens_per_step = cfg.global_batch_size * config.block_size

    # data
    folder = find_dataset(cfg.dataset)
    train_bin, val_bin = open_bin(folder / "train.bin"), open_bin(folder / "val.bin")
    for b in (train_bin, val_bin):
        if b.header["tokenizer"] != train_bin.header["tokenizer"]:
            raise UserError(f"{b.path} was made with tokenizer {b.header['tokenizer']}, {train_bin.path} with {train_bin.header['tokenizer']}: make both anew with prepare_data.py")
        needed = max(b.header["vocab"], b.header["largest_id"] + 1)
        if config.vocab_size is not None and config.vocab_size < needed:
            raise UserError(f"{b.path} has token ids that need {needed} model rows, vocab_size={config.vocab_size}: leave --vocab_size away or raise it")
    if base and base_meta["data"]["tokenizer"] not in (None, train_bin.header["tokenizer"]):
        raise UserError(f"{base} knows the ids of tokenizer {base_meta['data']['tokenizer']}, {train_bin.path} has those of {train_bin.header['tokenizer']}: make the dataset with --tokenizer={base_meta['data']['tokenizer']}")
    if config.vocab_size is None:
        config = replace(config, vocab_size=train_bin.header["vocab"])
    windows = TrainWindows(train_bin, config.block_size, cfg.seed)
    val_windows = ValWindows(val_bin, config.block_size, cfg.eval_windows)

    # where the run lives, and whether it goes on
    stem = Path(([a for a in sys.argv[1:] if not a.startswith("-")] or ["demo"])[-1]).stem
    out_dir = Path(cfg.out_dir or f"out/{stem}_{config.residual}")
    log_path = out_dir / "log.jsonl"
    ckpt = None
    if cfg.resume not in ("auto", "never"):
        ckpt = find_checkpoint(cfg.resume)
        if ckpt is None:
            raise UserError(f"--resume={cfg.resume} is neither auto, never nor a checkpoint folder (one with meta.json, or a run's folder with `latest`)")
        if ckpt.resolve().parent != out_dir.resolve() and (checkpoints(out_dir) or (out_dir / "log.jsonl").exists()):
            raise UserError(f"{out_dir} holds a run already, and --resume={cfg.resume} is not of it: give --out_dir= a new folder, or that of the checkpoint")
    elif checkpoints(out_dir) or (out_dir / "log.jsonl").exists():
        if cfg.resume == "never":
            raise UserError(f"{out_dir} holds a run already and --resume=never was given: give --out_dir= a new folder")
        ckpt, damage = newest_whole(out_dir)
        if damage and not ckpt:
            raise UserError(f"no checkpoint of {out_dir} can be read: {'; '.join(damage)}; give --out_dir= a new folder, or remove them to start over")
        if damage and rank == 0:
            print(f"warning: {'; '.join(damage)}: going on from {ckpt}", file=sys.stderr)
    if ckpt:
        meta = read_meta(ckpt)
        check_same_run(ckpt, meta["train_config"], meta["model_config"], cfg, config)
        check_same_data(ckpt, meta["data"], train_bin, val_bin)
        if meta["step"] >= cfg.max_steps:
            if rank == 0:
                print(f"{out_dir} is finished: {meta['step']} of {cfg.max_steps} steps are done")
            return
    elif start := next((e for e in read_log(out_dir) if e["event"] == "start"), None):  # it died before its first checkpoint
        check_same_run(out_dir, start["config"], start["model_config"], cfg, config)
        check_same_data(log_path, start["data"], train_bin, val_bin)

    if rank == 0:
        try:
            out_dir.mkdir(parents=True, exist_ok=True)
            locked = lock(out_dir)  # noqa: F841, held until main ends
        except OSError as error:
            raise UserError(f"--out_dir={out_dir} cannot be written to ({error}): make room, or give another folder") from error
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if distributed:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        check_shared(out_dir, meta["step"] if ckpt else 0, rank, device)

    # model
    param_dtype = getattr(torch, cfg.param_dtype)
    with torch.device("meta"):  # no memory yet: shard first, then let every rank fill in its part
        model = GPT(config, kernel).to(param_dtype)
    if cfg.parallel == "fsdp":
        shard(model, dtype)
    model.to_empty(device=device)
    model.grad_checkpoint = cfg.grad_checkpoint
    if ckpt or base:
        load_weights(model, ckpt or base)
    else:
        model.init_weights(cfg.seed)
    if averaging:  # one seed gives one model, but perhaps not on two kinds of CPU; DDP, too, begins with the first rank's
        for p in model.parameters():
            dist.broadcast(p.detach(), src=0)
    ema = {name: p.detach().float().clone() for name, p in model.named_parameters()} if cfg.ema_decay else {}
    groups = parameter_groups(model, cfg)
    optimizer = torch.optim.AdamW(groups, lr=cfg.learning_rate, betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps, fused=True)
    autocast = torch.autocast(device.type, dtype) if dtype != param_dtype and cfg.parallel == "ddp" else nullcontext()  # FSDP casts by itself

    compiled = device.type == "cuda" if cfg.compile is None else cfg.compile
    compiler = partial(torch.compile, fullgraph=True, dynamic=False)
    if compiled and cfg.parallel == "fsdp":  # in parts: FSDP's gathering goes on between them
        for layer in model.layers:
            layer.attn.forward, layer.mlp.forward = compiler(layer.attn.forward), compiler(layer.mlp.forward)
        model.loss_head = compiler(model.loss_head)
    forward = compiler(model) if compiled and cfg.parallel == "ddp" else model
    trained = forward
    if distributed and cfg.parallel == "ddp" and not graphed:
        torch._dynamo.config.optimize_ddp = kernel != "triton"  # the compiler cuts the model at DDP's buckets, which a routing chain does not bear
        trained = DistributedDataParallel(forward, device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True)

    def forward_backward(x, y, last):
        """One micro-step: adds its share to the gradients, which are summed up over the ranks if it is the `last` one."""
        if cfg.parallel == "fsdp":
            model.set_requires_gradient_sync(last)
        with trained.no_sync() if trained is not forward and not last else nullcontext():
            with autocast:
                objective, cross_entropy = trained(x, y, cfg.z_loss)
            (objective / micro_steps).backward()
        return cross_entropy

    step, logged, moments = 0, [], optimizer_tensors(model, optimizer)  # made here, so that the peak of memory counts them
    if ckpt:
        if ema:
            load_weights(model, ckpt, "ema.safetensors", into=ema)
        dcp.load(moments, storage_reader=HuggingFaceStorageReader(str(ckpt / "optimizer")), no_dist=not distributed)
        step = meta["step"]

    # what is about to happen, in words
    counts = model.parameter_counts()
    decayed = sum(p.numel() for g in groups for p in g["params"] if g["weight_decay"])
    flops, peak = model.flops_per_token(config.block_size), peak_flops(device)
    if rank == 0:
        print(describe(cfg, config, origins))
        print(f"parameters  {counts['total']:,} in all, {counts['routing']:,} of them for residual={config.residual}; decayed {decayed:,}, not decayed {counts['total'] - decayed:,}")
        for g in groups:
            print(f"  group     {sum(p.numel() for p in g['params']):,} parameters in {len(g['params'])} tensors, weight decay {g['weight_decay']}, learning rate x{g['lr_scale']}")
        print(f"batch       {tokens_per_step:,} tokens per step = {world} ranks x {micro_steps} micro-steps x {cfg.batch_size} sequences x {config.block_size}")
        print(f"data        {folder}: {len(train_bin.tokens):,} training tokens, {windows.n:,} windows; an epoch is {windows.n / cfg.global_batch_size:,.1f} steps")
        print(f"device      {device} ({why_device}); activations {dtype}, weights {cfg.param_dtype}; compile {'on' if compiled else 'off'}, CUDA graph {'on' if graphed else 'off'}".replace("torch.", ""))
        print(f"routing     {kernel} ({why_kernel})")
        print(f"run         {out_dir}, {f'going on after step {step} from {ckpt}' if ckpt else 'from the start'}", flush=True)
        if ckpt:  # keep what the checkpoint has seen
            logged = [e for e in read_log(ckpt.parent) if e["event"] in ("train", "val") and e["step"] <= step]
        start = {"event": "start", "time": round(time.time(), 3), "config": asdict(cfg) | {"out_dir": str(out_dir)}, "model_config": asdict(config), "params": counts, "device": why_device, "dtype": str(dtype).removeprefix("torch."),
                 "kernel": kernel, "tokens_per_step": tokens_per_step, "flops_per_token": flops, "data": {"dataset": str(cfg.dataset), "sha256": train_bin.header["sha256"], "val_sha256": val_bin.header["sha256"]}}  # fmt: skip
        try:
            trackers = open_trackers(cfg, out_dir, start)
            write_atomically(log_path, "".join(json.dumps(e) + "\n" for e in [start, *logged]))
        except OSError as error:
            raise UserError(f"--out_dir={out_dir} cannot be written to ({error}): make room, or give another folder") from error

    def log(event):
        if rank == 0:
            logged.append(event | {"time": round(time.time(), 3)})
            try:
                with open(log_path, "a") as f:
                    f.write(json.dumps(logged[-1]) + "\n")
            except OSError as error:
                sys.exit(f"error: {log_path} cannot be written ({error}): make room and start again")
            for tracker in trackers:
                tracker(event)

    def to_device(tokens):
        """int64 array [sequences, block_size + 1] -> inputs and targets [sequences, block_size] on the device."""
        tokens = torch.from_numpy(tokens)
        tokens = tokens.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tokens.to(device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    @torch.no_grad()
    def evaluate(n=val_windows.n):
        """Mean loss over the (first n) fixed validation windows, dealt out to the ranks; batches are filled up with ignored targets, so that
        all ranks run equally many of one size."""
        mine, losses = list(range(rank, n, world)), []
        for i in range(0, math.ceil(n / world), cfg.batch_size):
            part = mine[i : i + cfg.batch_size]
            x, y = to_device(val_windows.batch(part + [0] * (cfg.batch_size - len(part))))
            y = torch.cat([y[: len(part)], torch.full_like(y[len(part) :], -100)])
            with autocast:
                cross_entropy = forward(x, y)[1]
            if part:
                losses.append(cross_entropy * len(part))
        reshard(model)
        return all_reduce([sum(loss.item() for loss in losses)], device)[0] / n

    @torch.no_grad()
    def evaluate_ema():
        parameters, raw = dict(model.named_parameters()), {}
        for name, p in parameters.items():  # the weights wait where a CUDA graph has its gradients, which the next step overwrites: no memory of their own
            raw[name] = p.detach().clone() if p.grad is None else p.grad.copy_(p)
            p.copy_(ema[name])
        loss = evaluate()
        for name, p in parameters.items():
            p.copy_(raw[name])
        return loss

    def route_entropy():
        """Mean over sites with a choice, tokens and heads of the entropy of the routing weights, in nats, on one validation window."""
        record = []
        with torch.no_grad(), autocast:
            model(to_device(val_windows.batch([0]))[0], record=record)
        reshard(model)
        per_site = [-(a * a.clamp_min(1e-30).log()).sum(0).mean() for a in record if len(a) > 1]
        return torch.stack(per_site).mean().item()

    def save():
        first = step * cfg.global_batch_size
        epoch, window = windows.position(first)
        meta = {"step": step, "model_config": asdict(config), "train_config": asdict(cfg) | {"out_dir": str(out_dir)}, "params": counts,
                "data": {"dataset": str(cfg.dataset), "sha256": train_bin.header["sha256"], "val_sha256": val_bin.header["sha256"], "tokenizer": train_bin.header["tokenizer"], "epoch": epoch, "window": window},
                "rng": {"seed": cfg.seed, "note": "a step draws no random numbers; weights and data order follow the seed"},
                "origin": base_meta.get("origin")}  # fmt: skip
        checkpointer.save(meta, model, ema, optimizer)

    # (first, last) of every micro-step; a graph without FSDP, and FSDP that keeps shares, do the same in the last as in those before
    alike = graphed and cfg.parallel == "ddp" or cfg.fsdp_accumulate == "sharded"
    kinds = [(micro == 0, micro == micro_steps - 1 or alike) for micro in range(micro_steps)]
    micro_step = None
    if compiled or graphed:  # before the first step: a signal that comes later need not wait for a compiler
        began = time.perf_counter()
        if rank == 0:
            print(f"{'compiling  ' if compiled else 'recording  '} the training step and the evaluation ...", end=" ", flush=True)
        x, y = to_device(windows.batch(0, cfg.batch_size))
        if graphed:
            micro_step = GraphedMicroStep(forward_backward, x, y, model.parameters(), kinds)
        else:
            forward_backward(x, y, True)
            optimizer.zero_grad(set_to_none=True)
        evaluate(1)
        if hasattr(model.residual, "query"):
            route_entropy()  # now rather than at the first evaluation: what is too large for the memory should say so at once
        if rank == 0:
            print(f"{time.perf_counter() - began:.0f} s", flush=True)

    stop = []  # signals received; the run ends after the step at hand, with a checkpoint
    for s in (signal.SIGTERM, signal.SIGINT):
        signal.signal(s, lambda number, frame: (stop.append(number), [signal.signal(s, signal.SIG_DFL) for s in (signal.SIGTERM, signal.SIGINT)]))

    checkpointer = Checkpointer(out_dir, cfg.keep_checkpoints, rank)
    progress = tqdm(total=cfg.max_steps, initial=step, disable=rank != 0, unit="step", dynamic_ncols=True, mininterval=0.5 if sys.stderr.isatty() else 30)
    bad_step = torch.zeros((), device=device)  # the first step whose loss or gradient was not finite, found out without waiting for the GPU
    saved_step, waited, since, last_log = step, 0.0, time.perf_counter(), step
    slow = True  # a log interval takes over 5 seconds, or nobody knows yet: the ranks ask each other for signals after every step
    while step < cfg.max_steps:
        lr = learning_rate(cfg, step)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        loss = torch.zeros((), device=device)
        for micro, (first, last) in enumerate(kinds):
            t = time.perf_counter()
            # step -> micro-step -> rank: together they are windows step * global_batch_size onward, in order, for any split
            x, y = to_device(windows.batch(step * cfg.global_batch_size + (micro * world + rank) * cfg.batch_size, cfg.batch_size))
            waited += time.perf_counter() - t
            cross_entropy = micro_step(x, y, first, last) if graphed else forward_backward(x, y, last)
            loss += cross_entropy / micro_steps
        if averaging:
            average_gradients(model.parameters())
        grad_norm = full(torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip or math.inf))
        bad_step = torch.where((bad_step == 0) & ~torch.isfinite(grad_norm + loss), step + 1, bad_step)
        evaluating = (step + 1) % cfg.eval_interval == 0 or step + 1 == cfg.max_steps
        route_norms = {f"{n}_grad_norm": full(getattr(model.residual, n).grad.norm()) for n in ("query", "null_source", "gate") if hasattr(model.residual, n)} if evaluating else {}
        optimizer.step()
        if not graphed:  # a graph's first micro-step overwrites them
            optimizer.zero_grad(set_to_none=True)
        if ema:
            torch._foreach_lerp_([local(e) for e in ema.values()], [local(p.detach()).float() for p in model.parameters()], 1 - cfg.ema_decay)
        step += 1
        progress.update()

        saving = step % cfg.save_interval == 0 or step == cfg.max_steps
        signalled = slow and all_reduce([len(stop)], device)[0] > 0
        if step % cfg.log_interval == 0 or evaluating or saving or signalled:
            if evaluating or saving:  # the weights themselves: what the update made of a finite gradient
                size = torch.stack(torch._foreach_norm([local(p.detach()) for p in model.parameters()])).sum()
                bad_step = torch.where((bad_step == 0) & ~torch.isfinite(size), step, bad_step)
            mean_loss, bad, signals, written = all_reduce([loss / world, bad_step > 0, len(stop), checkpointer.written()], device)
            if written == world:
                checkpointer.finish()
            if bad:
                progress.close()
                checkpointer.finish()
                where = f"the checkpoint of step {saved_step} in {out_dir} is untouched" if saved_step else "no checkpoint was written"
                if rank > 0:
                    sys.exit(1)
                sys.exit(f"error: step {int(bad_step) or step}: loss, gradient or weights are not finite (lr {lr:.3g}, loss {mean_loss:.4g}, gradient norm {grad_norm:.4g}); {where}")
            seconds, steps = time.perf_counter() - since, step - last_log
            slow = all_reduce([seconds > 5], device)[0] > 0
            rate = steps * tokens_per_step / seconds
            event = {"event": "train", "step": step, "loss": mean_loss, "lr": lr, "grad_norm": grad_norm.item(), "tokens": step * tokens_per_step, "tok_per_s": rate,
                     "mfu": rate * flops / (peak * world) if peak else None, "data_wait": waited / steps, "mem_gb": torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None}  # fmt: skip
            if evaluating and hasattr(model.residual, "query"):
                event |= {k: v.item() for k, v in route_norms.items()} | {"route_entropy": route_entropy()}
            log(event)
            progress.set_postfix(loss=f"{mean_loss:.4f}", tok_per_s=f"{rate:,.0f}", epoch=windows.position(step * cfg.global_batch_size)[0])
            if evaluating:
                val = evaluate()
                log({"event": "val", "step": step, "loss": val, "loss_ema": evaluate_ema() if ema else None})
                if rank == 0:
                    progress.write(f"step {step:6d}  train {mean_loss:.4f}  val {val:.4f}  lr {lr:.2e}  {rate:,.0f} tokens/s", file=sys.stdout)
                    sys.stdout.flush()
            if saving or signals:
                save()
                saved_step = step
            if signals:
                progress.close()
                checkpointer.finish()
                if rank == 0:
                    print(f"stopped by a signal after step {step}; saved in {out_dir}; the same command goes on from there", flush=True)
                break
            waited, since, last_log = 0.0, time.perf_counter(), step
    else:
        progress.close()
        checkpointer.finish()
        if rank == 0:
            tail = [e["loss"] for e in logged if e["event"] == "val"][-11:]
            mean = sum(tail) / len(tail)
            log({"event": "end", "step": step, "val_tail_mean": mean, "val_tail_count": len(tail)})
            print(f"done: validation loss {mean:.4f} nats per token, mean of the last {len(tail)} evaluations; {out_dir}")
    micro_step = None  # lets go of the graphs: NCCL would wait for those that hold calls of its own
    if dist.is_initialized():
        dist.destroy_process_group()


def open_trackers(cfg, out_dir, start):
    """Functions that take a logged event: TensorBoard and Weights & Biases, where asked for."""
    trackers = []
    if cfg.tensorboard:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("--tensorboard=true needs a package that is not installed: pip install tensorboard") from None
        writer = SummaryWriter(out_dir / "tensorboard")
        trackers.append(lambda e: [writer.add_scalar(f"{e['event']}/{k}", v, e["step"]) for k, v in e.items() if isinstance(v, float)])
    if cfg.wandb:
        try:
            import wandb
        except ImportError:
            raise UserError(f"--wandb={cfg.wandb} needs a package that is not installed: pip install wandb") from None
        run = wandb.init(project=cfg.wandb, dir=out_dir, config=start)
        trackers.append(lambda e: run.log({f"{e['event']}/{k}": v for k, v in e.items() if isinstance(v, float)}, step=e["step"]))
    return trackers


if __name__ == "__main__":
    cli(main)
