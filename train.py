"""Train a Transformer with any residual method: on a CPU, one GPU, or many under torchrun.

    python train.py                                                          # config/demo.py: minutes on a laptop
    python train.py config/mhar_100m.py --residual=baseline                  # one GPU
    torchrun --nproc_per_node=8 train.py config/mhar_1b.py                   # eight GPUs, the same optimizer steps
    python train.py config/mhar_100m.py                                      # the same command again resumes

An optimizer step sees the same windows in the same order whatever the number of ranks, the micro-batch or the residual method.
"""
import json
import math
import os
import shutil
import signal
import sys
import time
import warnings
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from configurator import UserError, cli, configure, describe
from model import GPT, GPTConfig, choose_kernel, peak_flops
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
    # machine
    device: str = "auto"  # auto | cpu | cuda | cuda:1 | mps
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of activations; auto: bfloat16 on CUDA, else float32
    param_dtype: Literal["float32", "bfloat16"] = "float32"  # of weights and optimizer state; bfloat16 is the paper's, see README
    kernel: Literal["auto", "triton", "torch"] = "auto"  # depth routing; auto: triton on CUDA, else torch
    compile: bool | None = None  # torch.compile of the whole model with its loss; none: on CUDA only
    cuda_graph: bool | None = None  # replay forward and backward as one CUDA graph, which saves launching their kernels; none: on CUDA
    grad_checkpoint: bool = False  # recompute sublayers in backward to save memory
    # intervals, in optimizer steps
    eval_interval: int = 500  # validation; the last step is always evaluated
    eval_windows: int = 200  # fixed validation windows, spread evenly over val.bin
    save_interval: int = 500  # checkpoints; the last step is always saved
    keep_checkpoints: int = 2  # the newest so many stay
    log_interval: int = 10  # train lines in log.jsonl; also how soon a non-finite number or a SIGTERM is noticed
    tensorboard: bool = False  # also write out_dir/tensorboard
    wandb: str | None = None  # also log to this Weights & Biases project

    def __post_init__(self):
        for name in ("batch_size", "global_batch_size", "max_steps", "eval_interval", "eval_windows", "save_interval", "keep_checkpoints", "log_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


# What may change between two starts of one run: none of it moves a loss beyond rounding.
FREE = {"out_dir", "resume", "batch_size", "device", "kernel", "compile", "cuda_graph", "grad_checkpoint", "eval_interval", "eval_windows", "save_interval",
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
# Checkpoints: out_dir/step_00000500/{model.safetensors, optimizer/, meta.json}, and out_dir/latest names the newest whole one
# ----------------------------------------------------------------------------------------------------------------------
def find_checkpoint(path):
    """CKPT, in every script: a folder with meta.json, or a run's folder with `latest` -> the folder with meta.json, or None."""
    path = Path(path)
    if (path / "latest").is_file():
        path = path / (path / "latest").read_text().strip()
    return path if (path / "meta.json").is_file() else None


def read_meta(ckpt):
    return json.loads((ckpt / "meta.json").read_text())


def load_weights(model, ckpt):
    """Strict: the checkpoint's names and shapes are the model's, or a UserError lists up to five of each that are not."""
    tensors = load_file(ckpt / "model.safetensors")
    own = dict(model.named_parameters())
    wrong = [f"missing {sorted(own.keys() - tensors.keys())[:5]}"] if own.keys() - tensors.keys() else []
    wrong += [f"unexpected {sorted(tensors.keys() - own.keys())[:5]}"] if tensors.keys() - own.keys() else []
    shapes = [f"{n} {list(tensors[n].shape)} for {list(own[n].shape)}" for n in own.keys() & tensors.keys() if own[n].shape != tensors[n].shape]
    wrong += [f"of another shape {sorted(shapes)[:5]}"] if shapes else []
    if wrong:
        raise UserError(f"{ckpt} does not fit this model: {'; '.join(wrong)}; give the model flags it was trained with")
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(tensors[name])


def optimizer_tensors(model, optimizer):
    """AdamW's state by parameter name, made (as zeros) where it is not there yet: {"exp_avg.layers.0...": tensor}."""
    tensors = {}
    for name, p in model.named_parameters():
        state = optimizer.state[p]
        if not state:
            state.update(step=torch.zeros((), device=p.device), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        tensors |= {f"{key}.{name}": value for key, value in state.items()}
    return tensors


def save_checkpoint(out_dir, model, optimizer, meta, keep, rank):
    """Written whole under another name, then renamed: a folder called step_* is a finished checkpoint. Every rank enters."""
    name = f"step_{meta['step']:08d}"
    final, part = out_dir / name, out_dir / f".{name}.part"
    if rank == 0:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        save_file({n: p.detach().contiguous() for n, p in model.named_parameters()}, part / "model.safetensors")
        (part / "meta.json").write_text(json.dumps(meta, indent=1))
    barrier()
    # Weights and optimizer state are safetensors: nothing here is pickled. Under torchrun the ranks share the writing.
    dcp.save(optimizer_tensors(model, optimizer), storage_writer=HuggingFaceStorageWriter(str(part / "optimizer"), save_distributed=True), no_dist=not dist.is_initialized())
    barrier()
    if rank == 0:
        for file in [f for f in part.rglob("*") if f.is_file()]:
            with open(file, "rb") as f:
                os.fsync(f.fileno())
        shutil.rmtree(final, ignore_errors=True)
        os.replace(part, final)
        write_atomically(out_dir / "latest", name + "\n")
        for old in sorted(out_dir.glob("step_*"))[:-keep]:
            shutil.rmtree(old)
    barrier()


def write_atomically(path, text):
    part = path.with_name(f".{path.name}.part")
    with open(part, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)


def check_same_run(out_dir, then_train, then_model, cfg, config):
    """A UserError if out_dir holds another run than the one asked for, saying in what."""
    then, now = {**then_train, **then_model}, {**asdict(cfg), **asdict(config)}
    other = [f"{k}={then.get(k)} there, {k}={now[k]} here" for k in now if k not in FREE and json.loads(json.dumps(now[k])) != then.get(k)]
    if other:
        raise UserError(f"{out_dir} holds another run ({'; '.join(other[:4])}): give --out_dir= a new folder, or the flags of that run to go on with it")


# ----------------------------------------------------------------------------------------------------------------------
# Machine
# ----------------------------------------------------------------------------------------------------------------------
def choose_device(cfg, local_rank):
    """(torch device, activation dtype, why) from what was asked for and what is there."""
    if cfg.device == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        why = "found" if kind != "cpu" else "no GPU found"
    else:
        kind, why = cfg.device, "asked for"
    try:
        device = torch.device(kind)
    except RuntimeError:
        raise UserError(f"--device={cfg.device} is not a device: auto, cpu, cuda, cuda:1 or mps") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError(f"--device={cfg.device}: torch sees no CUDA GPU here; use --device=cpu or --device=auto")
        device = torch.device("cuda", (device.index or 0) if "RANK" not in os.environ else local_rank)
        if device.index >= torch.cuda.device_count():
            raise UserError(f"{device} asked for, but there are {torch.cuda.device_count()} GPUs: give one of cuda:0..{torch.cuda.device_count() - 1}, or start fewer processes")
        why += f", {torch.cuda.get_device_name(device)}"
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": torch.bfloat16 if device.type == "cuda" else torch.float32}[cfg.dtype]
    if cfg.param_dtype == "bfloat16":
        if cfg.dtype == "float32":
            raise UserError("--param_dtype=bfloat16 computes in bfloat16; leave --dtype=float32 away")
        dtype = torch.bfloat16
    return device, dtype, why


def barrier():
    if dist.is_initialized():
        dist.barrier()


def all_reduce(values, device):
    """The sum over ranks of a list of numbers or 0-dim tensors, as floats (fp64, so that it does not depend on their order to print)."""
    total = torch.stack([torch.as_tensor(v, dtype=torch.float64, device="cpu" if device.type == "mps" else device) for v in values])
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.tolist()


class GraphedMicroStep:
    """Forward and backward of a micro-step, recorded as CUDA graphs once and replayed from then on: (x, y, first, last) -> cross_entropy.

    run(x, y, last) does the work. The first micro-step of an optimizer step writes the gradients, later ones add to them, the last one
    also sums them over the ranks: up to three graphs, which share one memory pool. Gradients then live in fixed places, so nothing
    may set them to None; the returned cross-entropy is overwritten by the next call.
    """

    def __init__(self, run, x, y, parameters, micro_steps):
        self.x, self.y, self.graphs, parameters = x.clone(), y.clone(), {}, list(parameters)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(11 if dist.is_initialized() else 3):  # compiles; DDP settles its buckets within eleven backwards
                run(self.x, self.y, True)
        torch.cuda.current_stream().wait_stream(side)
        for p in parameters:
            p.grad = None
        torch.cuda.empty_cache()  # the graphs' memory pool takes the place of what the warm-up used
        pool = torch.cuda.graph_pool_handle()
        for first, last in dict.fromkeys([(True, micro_steps == 1), (False, micro_steps == 2), (False, True)][: min(micro_steps, 3)]):
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


# ----------------------------------------------------------------------------------------------------------------------
# The run
# ----------------------------------------------------------------------------------------------------------------------
def main():
    default_config = Path(__file__).parent / "config" / "demo.py"
    cfg, config, origins = configure(sys.argv[1:], TrainConfig, GPTConfig, doc=__doc__, default_file=str(default_config))
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device, dtype, why_device = choose_device(cfg, int(os.environ.get("LOCAL_RANK", 0)))
    if cfg.global_batch_size % (cfg.batch_size * world):
        raise UserError(
            f"global_batch_size={cfg.global_batch_size} is not a multiple of batch_size={cfg.batch_size} x {world} ranks: choose --batch_size= and --global_batch_size= so that it is"
        )
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
    if config.vocab_size is None:
        config = replace(config, vocab_size=train_bin.header["vocab"])
    windows = TrainWindows(train_bin, config.block_size, cfg.seed)
    val_windows = ValWindows(val_bin, config.block_size, cfg.eval_windows)

    # where the run lives, and whether it goes on
    stem = Path(([a for a in sys.argv[1:] if not a.startswith("-")] or ["demo"])[-1]).stem
    out_dir = Path(cfg.out_dir or f"out/{stem}_{config.residual}")
    ckpt = None
    if cfg.resume not in ("auto", "never"):
        ckpt = find_checkpoint(cfg.resume)
        if ckpt is None:
            raise UserError(f"--resume={cfg.resume} is neither auto, never nor a checkpoint folder (one with meta.json, or a run's folder with `latest`)")
    elif find_checkpoint(out_dir) or (out_dir / "log.jsonl").exists():
        if cfg.resume == "never":
            raise UserError(f"{out_dir} holds a run already and --resume=never was given: give --out_dir= a new folder")
        ckpt = find_checkpoint(out_dir)
    if ckpt:
        meta = read_meta(ckpt)
        check_same_run(ckpt, meta["train_config"], meta["model_config"], cfg, config)
        if meta["data"]["sha256"] != train_bin.header["sha256"]:
            raise UserError(f"{train_bin.path} is not the file this run was trained on: its checksum differs from that in {ckpt}/meta.json; give --dataset= the old one, or a new --out_dir=")
        if meta["step"] >= cfg.max_steps:
            if rank == 0:
                print(f"{out_dir} is finished: {meta['step']} of {cfg.max_steps} steps are done")
            return
    elif (out_dir / "log.jsonl").exists():  # it died before its first checkpoint
        start = json.loads((out_dir / "log.jsonl").read_text().splitlines()[0])
        check_same_run(out_dir, start["config"], start["model_config"], cfg, config)

    # model
    try:
        kernel, why_kernel = choose_kernel(cfg.kernel, config, device, dtype)
    except ValueError as error:
        raise UserError(error) from error
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = GPT(config, kernel, cfg.seed).to(device=device, dtype=getattr(torch, cfg.param_dtype))
    model.grad_checkpoint = cfg.grad_checkpoint
    if cfg.init_from and not ckpt:
        source = find_checkpoint(cfg.init_from)
        if source is None:
            raise UserError(f"--init_from={cfg.init_from} is not a checkpoint: give a folder with meta.json, or a run's folder with `latest`")
        load_weights(model, source)
    groups = parameter_groups(model, cfg)
    optimizer = torch.optim.AdamW(groups, lr=cfg.learning_rate, betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps, fused=True)
    autocast = torch.autocast(device.type, dtype) if dtype != getattr(torch, cfg.param_dtype) else nullcontext()
    compiled = device.type == "cuda" if cfg.compile is None else cfg.compile
    forward = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
    trained = DistributedDataParallel(forward, device_ids=[device.index] if device.type == "cuda" else None) if world > 1 else forward

    graphed = device.type == "cuda" if cfg.cuda_graph is None else cfg.cuda_graph
    if graphed and device.type != "cuda":
        raise UserError(f"--cuda_graph=true needs a CUDA device, this is {device}; leave it away")

    def forward_backward(x, y, last):
        with trained.no_sync() if world > 1 and not last else nullcontext():  # gradients travel once per step
            with autocast:
                objective, cross_entropy = trained(x, y, cfg.z_loss)
            (objective / micro_steps).backward()
        return cross_entropy

    step, logged = 0, []
    if ckpt:
        load_weights(model, ckpt)
        dcp.load(optimizer_tensors(model, optimizer), storage_reader=HuggingFaceStorageReader(str(ckpt / "optimizer")), no_dist=world == 1)
        step = meta["step"]

    # what is about to happen, in words
    counts = model.parameter_counts()
    decayed = sum(p.numel() for g in groups for p in g["params"] if g["weight_decay"])
    flops, peak = model.flops_per_token(config.block_size), peak_flops(device)
    log_path = out_dir / "log.jsonl"
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
        out_dir.mkdir(parents=True, exist_ok=True)
        if log_path.exists():  # keep the start and what the checkpoint has seen
            logged = [e for e in map(json.loads, log_path.read_text().splitlines()) if e["event"] in ("train", "val") and e["step"] <= step]
        start = {"event": "start", "config": asdict(cfg) | {"out_dir": str(out_dir)}, "model_config": asdict(config), "params": counts, "device": why_device, "kernel": kernel,
                 "tokens_per_step": tokens_per_step, "data": {"dataset": str(cfg.dataset), "sha256": train_bin.header["sha256"], "val_sha256": val_bin.header["sha256"]}}  # fmt: skip
        write_atomically(log_path, "".join(json.dumps(e) + "\n" for e in [start, *logged]))
        trackers = open_trackers(cfg, out_dir, start)

    def log(event):
        if rank == 0:
            logged.append(event)
            with open(log_path, "a") as f:
                f.write(json.dumps(event) + "\n")
            for tracker in trackers:
                tracker(event)

    def to_device(tokens):
        """int64 array [sequences, block_size + 1] -> inputs and targets [sequences, block_size] on the device."""
        tokens = torch.from_numpy(tokens)
        tokens = tokens.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tokens.to(device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    @torch.no_grad()
    def evaluate():
        """Mean loss over the fixed validation windows, dealt out to the ranks; a short last batch is filled up with ignored targets."""
        mine = list(range(rank, val_windows.n, world))
        total = 0.0
        for i in range(0, len(mine), cfg.batch_size):
            part = mine[i : i + cfg.batch_size]
            x, y = to_device(val_windows.batch(part + part[:1] * (cfg.batch_size - len(part))))
            y[len(part) :] = -100
            with autocast:
                total += forward(x, y)[1].double() * len(part)
        return all_reduce([total], device)[0] / val_windows.n

    def route_entropy():
        """Mean over sites with a choice, tokens and heads of the entropy of the routing weights, in nats, on one validation window."""
        record = []
        with torch.no_grad(), autocast:
            model(to_device(val_windows.batch([0]))[0], record=record)
        per_site = [-(a * a.clamp_min(1e-30).log()).sum(0).mean() for a in record if len(a) > 1]
        return torch.stack(per_site).mean().item()

    def save():
        first = step * cfg.global_batch_size
        epoch, window = windows.position(first)
        meta = {"step": step, "model_config": asdict(config), "train_config": asdict(cfg) | {"out_dir": str(out_dir)}, "params": counts,
                "data": {"dataset": str(cfg.dataset), "sha256": train_bin.header["sha256"], "tokenizer": train_bin.header["tokenizer"], "epoch": epoch, "window": window},
                "rng": {"seed": cfg.seed, "note": "a step draws no random numbers; weights and data order follow the seed"}}  # fmt: skip
        save_checkpoint(out_dir, model, optimizer, meta, cfg.keep_checkpoints, rank)

    stop = []  # signals received; the run ends after the step at hand, with a checkpoint
    for s in (signal.SIGTERM, signal.SIGINT):
        signal.signal(s, lambda number, frame: (signal.signal(number, signal.SIG_DFL), stop.append(number)))

    progress = tqdm(total=cfg.max_steps, initial=step, disable=rank != 0, unit="step", dynamic_ncols=True, mininterval=0.5 if sys.stderr.isatty() else 30)
    bad_step = torch.zeros((), device=device)  # the first step whose loss or gradient was not finite, found out without waiting for the GPU
    micro_step = None
    saved_step, waited, since, last_log = step, 0.0, time.perf_counter(), step
    while step < cfg.max_steps:
        lr = learning_rate(cfg, step)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        loss = torch.zeros((), device=device)
        for micro in range(micro_steps):
            t = time.perf_counter()
            # step -> micro-step -> rank: together they are windows step * global_batch_size onward, in order, for any split
            x, y = to_device(windows.batch(step * cfg.global_batch_size + (micro * world + rank) * cfg.batch_size, cfg.batch_size))
            waited += time.perf_counter() - t
            first, last = micro == 0, micro == micro_steps - 1
            if graphed and micro_step is None:
                micro_step = GraphedMicroStep(forward_backward, x, y, model.parameters(), micro_steps)
                since, waited = time.perf_counter(), 0.0  # compiling is not training
            cross_entropy = micro_step(x, y, first, last) if graphed else forward_backward(x, y, last)
            loss += cross_entropy / micro_steps
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip or math.inf)
        bad_step = torch.where((bad_step == 0) & ~torch.isfinite(grad_norm + loss), step + 1, bad_step)
        evaluating = (step + 1) % cfg.eval_interval == 0 or step + 1 == cfg.max_steps
        route_norms = {f"{n}_grad_norm": getattr(model.residual, n).grad.norm() for n in ("query", "gate") if hasattr(model.residual, n)} if evaluating else {}
        optimizer.step()
        if not graphed:  # a graph's first micro-step overwrites them
            optimizer.zero_grad(set_to_none=True)
        step += 1
        progress.update()

        saving = step % cfg.save_interval == 0 or step == cfg.max_steps
        if step % cfg.log_interval == 0 or evaluating or saving:
            mean_loss, bad, signals = all_reduce([loss / world, bad_step, len(stop)], device)
            if bad:
                progress.close()
                where = f"the checkpoint of step {saved_step} in {out_dir} is untouched" if saved_step else "no checkpoint was written"
                sys.exit(f"error: step {int(bad / world)}: loss or gradient is not finite (lr {lr:.3g}, loss {mean_loss:.4g}, gradient norm {grad_norm:.4g}); {where}")
            seconds, steps = time.perf_counter() - since, step - last_log
            rate = steps * tokens_per_step / seconds
            event = {"event": "train", "step": step, "loss": mean_loss, "lr": lr, "grad_norm": grad_norm.item(), "tokens": step * tokens_per_step, "tok_per_s": rate,
                     "mfu": rate * flops / (peak * world) if peak else None, "data_wait": waited / steps, "mem_gb": torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None}  # fmt: skip
            if evaluating and hasattr(model.residual, "query"):
                event |= {k: v.item() for k, v in route_norms.items()} | {"route_entropy": route_entropy()}
            log(event)
            progress.set_postfix(loss=f"{mean_loss:.4f}", tok_per_s=f"{rate:,.0f}", epoch=windows.position(step * cfg.global_batch_size)[0])
            if evaluating:
                val = evaluate()
                log({"event": "val", "step": step, "loss": val, "loss_ema": None})
                if rank == 0:
                    progress.write(f"step {step:6d}  train {mean_loss:.4f}  val {val:.4f}  lr {lr:.2e}  {rate:,.0f} tokens/s", file=sys.stdout)
                    sys.stdout.flush()
            if saving or signals:
                save()
                saved_step = step
            if signals:
                progress.close()
                if rank == 0:
                    print(f"stopped by a signal after step {step}; saved in {out_dir}; the same command goes on from there", flush=True)
                break
            waited, since, last_log = 0.0, time.perf_counter(), step
    else:
        progress.close()
        if rank == 0:
            tail = [e["loss"] for e in logged if e["event"] == "val"][-11:]
            mean = sum(tail) / len(tail)
            log({"event": "end", "step": step, "val_tail_mean": mean, "val_tail_count": len(tail)})
            print(f"done: validation loss {mean:.4f} nats per token, mean of the last {len(tail)} evaluations; {out_dir}")
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
