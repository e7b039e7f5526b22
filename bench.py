"""What depth routing costs on your GPU: alone and in a training step (Tables 5 and 4), and in generation.

    python bench.py                                    # everything, which compiles for long; or parts:
    python bench.py --part=routing --scale=350M
    python bench.py --part=step --scale=1B --method=baseline,mhar
    python bench.py --part=decode --scale=100M
    python bench.py --scale=toy                        # on a CPU: does everything run?

On one GPU. H = 8 heads, but for attnres and the peers (H = 1); `-torch` is the reference routing.
Routing: milliseconds of all sites of one micro-batch, bf16. Methods that work site by site (all but ours) are
timed at some numbers of sources N and summed over N = 1..S by linear interpolation; `+ adds` is what autograd
needs to add up their source gradients, a tensor per source and site. Floor: the bytes that our scheme has to
move, at the bandwidth that a large elementwise kernel reaches.
Step: forward, backward, clipping and fused AdamW of the compiled model, forward and backward replayed as the
CUDA graph of train.py; `without graph`: every kernel launched by itself.
Decode: sample.py's generation, greedy, random bf16 matrices, a replayed CUDA graph per step: 64 tokens after
a prompt, in a cache of just that length; the first four are not timed.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import statistics
import sys
import time
from functools import partial

from configurator import Parser, UserError, cli, table

import numpy as np
import torch
import torch.nn.functional as F

import routing_kernels as rk
from checkpoint import cast_matrices
from model import GPT, HC_FORMS, GPTConfig, choose_kernel, compile_model, peak_flops
from parallel import GraphedMicroStep
from routing_kernels import FusedDeltaRouter, FusedRouter, tl, triton
from sample import generate

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32
EPS = 1e-6
SCALES = {  # layers, width, heads, kv heads, ffn; the paper's context, sequences per GPU, tokens in Table 5
    "100M": (12, 512, 8, 4, 1536, 2048, 8, 4096),
    "350M": (24, 1024, 16, 8, 4096, 1024, 4, 1024),
    "1B": (36, 1280, 16, 8, 5120, 1024, 4, 1024),
    "8B": (32, 4096, 32, 8, 14336, 4096, 2, 8192),  # delta routing, routing part only
    "toy": (5, 32, 2, 1, 48, 16, 1, 4),
}
PER_SITE, FLOOR = "the paper's algorithm", "floor of our scheme"
METHODS = {
    "routing": ["eager", "torch.compile", PER_SITE, "fla (H=1)", "liger (H=1)", "ours"],
    "step": [
        "baseline",
        *(f"hc_{form}" for form in HC_FORMS),
        "block",
        "mhar_hw",
        "mhar-torch",
        "mhar",
        "attnres",
    ],
    "decode": ["baseline", "hc_dynamic", "mhar-torch", "mhar", "attnres", "delta"],
}
DECODE_BATCHES, DECODE_CONTEXTS = (1, 32), (16, 1024)


# ----------------------------------------------------------------------------------------------------------
# The paper's kernels (its appendix E, own code): every site reads all its sources, keeps fp32 weights, and
# in backward reads the sources twice and adds to one fp32 gradient row per source.
# ----------------------------------------------------------------------------------------------------------
@rk.jit
def load(at, ok):
    return tl.load(at, mask=ok, other=0.0).to(tl.float32)


@rk.jit
def per_site_forward(
    V,
    QUERY,
    NORM,
    OUT,
    WEIGHTS,
    M,
    N,
    eps,
    H: tl.constexpr,
    HP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64)
    h, k = tl.arange(0, HP), tl.arange(0, KP)
    ok = (h < H)[:, None] & (k < K)[None, :]
    col = h[:, None] * K + k[None, :]
    query = load(QUERY + col, ok)
    u = query * load(NORM + col, ok)
    top = tl.full([HP], float("-inf"), tl.float32)
    den = tl.zeros([HP], tl.float32)
    acc = tl.zeros([HP, KP], tl.float32)
    for i in range(N):
        v = load(V + (i * M + m) * H * K + col, ok)
        logit = tl.sum(v * u, 1) * tl.rsqrt(tl.sum(v * v) / (H * K) + eps)
        tl.store(WEIGHTS + (i * M + m) * H + h, logit, mask=h < H)
        new = tl.maximum(top, logit)
        scale, p = tl.exp(top - new), tl.exp(logit - new)
        acc = acc * scale[:, None] + p[:, None] * v
        den = den * scale + p
        top = new
    tl.store(OUT + m * H * K + col, (acc / den[:, None]).to(OUT.dtype.element_ty), mask=ok)
    for i in range(N):
        at = WEIGHTS + (i * M + m) * H + h
        tl.store(at, tl.exp(load(at, h < H) - top) / den, mask=h < H)


@rk.jit
def per_site_backward(
    V,
    WEIGHTS,
    DOUT,
    QUERY,
    NORM,
    DV,
    DQUERY,
    DNORM,
    M,
    N,
    eps,
    FRESH,
    H: tl.constexpr,
    HP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64)
    h, k = tl.arange(0, HP), tl.arange(0, KP)
    ok = (h < H)[:, None] & (k < K)[None, :]
    col = h[:, None] * K + k[None, :]
    query = load(QUERY + col, ok)
    norm = load(NORM + col, ok)
    dout = load(DOUT + m * H * K + col, ok)
    mean = tl.zeros([HP], tl.float32)
    for i in range(N):
        v = load(V + (i * M + m) * H * K + col, ok)
        mean += load(WEIGHTS + (i * M + m) * H + h, h < H) * tl.sum(dout * v, 1)
    du = tl.zeros([HP, KP], tl.float32)
    for i in range(N):
        v = load(V + (i * M + m) * H * K + col, ok)
        p = load(WEIGHTS + (i * M + m) * H + h, h < H)
        r = tl.rsqrt(tl.sum(v * v) / (H * K) + eps)
        ds = p * (tl.sum(dout * v, 1) - mean)
        dkey = ds[:, None] * query * norm
        dv = p[:, None] * dout + r * dkey - r * r * r / (H * K) * tl.sum(dkey * v) * v
        du += ds[:, None] * v * r
        at = DV + (i * M + m) * H * K + col
        if i < N - FRESH:  # the last FRESH sources have no gradient of later sites yet
            dv += load(at, ok)
        tl.store(at, dv, mask=ok)
    tl.store(DQUERY + m * H * K + col, du * norm, mask=ok)
    tl.store(DNORM + m * H * K + col, du * query, mask=ok)


class PerSite:
    """The paper's algorithm over one stack of sources [S, M, D]."""

    def __init__(self, v, H):
        (S, self.M, self.D), self.v, self.H = v.shape, v, H
        new = partial(torch.zeros, device=v.device)
        self.weights, self.dv = new(S, self.M, H), new(S, self.M, self.D)
        self.dquery, self.dnorm = new(self.M, self.D), new(self.M, self.D)
        K = self.D // H
        HP, KP = triton.next_power_of_2(H), triton.next_power_of_2(K)
        self.config = dict(H=H, HP=HP, K=K, KP=KP, num_warps=min(8, max(2, HP * KP // 512)))

    def forward(self, n, query, norm):
        out = torch.empty_like(self.v[0])
        tensors = self.v, query, norm, out, self.weights
        per_site_forward[(self.M,)](*tensors, self.M, n, EPS, **self.config)
        return out

    def backward(self, n, query, norm, dout, fresh=0):
        tensors = self.v, self.weights, dout, query, norm, self.dv, self.dquery, self.dnorm
        per_site_backward[(self.M,)](*tensors, self.M, n, EPS, fresh, **self.config)
        return self.dquery.sum(0), self.dnorm.sum(0), self.dv[n - 1].to(self.v.dtype)


# ----------------------------------------------------------------------------------------------------------
# Timing
# ----------------------------------------------------------------------------------------------------------
randn, ones = (partial(make, device=DEVICE, dtype=DTYPE) for make in (torch.randn, torch.ones))


def attempt(measure):
    """What measure() returns, or a note; the GPU is left empty."""
    try:
        result = measure()
        return result if CUDA else dict(note="runs")  # times on a CPU mean nothing
    except ImportError as error:
        return dict(note=f"not run: {error}")
    except torch.cuda.OutOfMemoryError:
        return dict(note="out of memory")
    finally:
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()


def milliseconds(call):
    """Median time of replays of one call as a CUDA graph, on the caches that the replay before left. NaN on a
    CPU, where the call is only run."""
    if not CUDA:
        call()
        return math.nan
    from triton.testing import do_bench_cudagraph

    torch.cuda.synchronize()  # it works on a stream of its own
    return do_bench_cudagraph(call, rep=0, return_mode="median")  # rep=0: one call per graph


def wall_milliseconds(call):
    """Time of one call, with what it does on the GPU."""
    torch.cuda.synchronize() if CUDA else None
    start = time.perf_counter()
    call()
    torch.cuda.synchronize() if CUDA else None
    return (time.perf_counter() - start) * 1e3


def bandwidth():
    """Bytes per ms, read plus written, of a large elementwise kernel; a copy in a CUDA graph is slower."""
    x = torch.zeros(1 << (28 if CUDA else 20), device=DEVICE, dtype=torch.float32)
    y = torch.empty_like(x)
    return 2 * x.numel() * 4 / milliseconds(lambda: torch.neg(x, out=y))


def floor_rows(S):
    """Rows [M, D] that our scheme moves for S sites in groups of G, forward and backward, but statistics."""
    G, groups = rk.G, range(0, S, rk.G)
    size = {s0: min(G, S - s0) for s0 in groups}
    inside = sum(n * (n - 1) // 2 for n in size.values())
    # older sources, partials written and read, source in and stored, h out
    forward = sum(groups) + 2 * (S - size[0]) + 3 * S + inside
    # later dh, sources, partials; dh in and kept, h, v, dv; du
    later = [s0 for s0 in groups if s0 + G < S]
    backward = sum(S - s0 - G for s0 in later) + 3 * G * len(later) + 5 * S + inside + S
    return forward, backward


# ----------------------------------------------------------------------------------------------------------
# Routing alone
# ----------------------------------------------------------------------------------------------------------
def leaf(*shape, scale=1.0):
    return (randn(*shape) * scale).requires_grad_()


def eager_route(sources, query, norm, H):
    v = torch.stack(sources)
    keys = F.rms_norm(v, v.shape[-1:], norm, EPS).unflatten(-1, (H, -1))
    logits = torch.einsum("hk,nmhk->nmh", query.view(H, -1), keys)
    weights = logits.softmax(0, dtype=torch.float32).to(v.dtype)
    return torch.einsum("nmh,nmhk->mhk", weights, v.unflatten(-1, (H, -1))).flatten(-2)


def peer(method):
    """route(sources, query, norm, H) -> mix, of a method that works site by site."""
    if method == "eager":
        return eager_route
    if method == "torch.compile":
        torch._dynamo.config.recompile_limit = 64
        return torch.compile(eager_route, dynamic=False, fullgraph=True)
    if method.startswith("fla"):
        os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")  # or its entry point breaks graphs
        from fla.ops.attnres import fused_attnres

        return lambda sources, query, norm, H: fused_attnres(query, list(sources), norm, rms_eps=EPS)
    from liger_kernel.ops.attn_res import LigerAttnResFunction

    return lambda sources, query, norm, H: LigerAttnResFunction.apply(torch.stack(sources), query, norm, EPS)


def time_peer(method, S, M, D, H):
    """{"forward", "backward", "adds"} in ms of one micro-batch."""
    sources, query, norm = [leaf(M, D) for _ in range(S)], leaf(D, scale=1 / 8), ones(D).requires_grad_()
    dout, route = randn(M, D), peer(method)

    def forward_and_both(n):
        mix, inputs = partial(route, sources[:n], query, norm, H), [*sources[:n], query, norm]
        return milliseconds(mix), milliseconds(lambda: torch.autograd.grad(mix(), inputs, dout))

    # all but eager compile or tune for every number of sources
    counts = (1, 2, 4, 8, 16, 32, 48) if method == "eager" else (2, S // 2)
    points = {n: forward_and_both(n) for n in [*(n for n in counts if n < S), S]}
    columns = zip(*points.values())
    forward, both = (np.interp(range(1, S + 1), list(points), column).sum() for column in columns)
    sums = [torch.zeros_like(dout) for _ in range(min(S, 16))]
    add = milliseconds(lambda: [total.add_(s) for total, s in zip(sums, sources)]) / len(sums)
    return dict(forward=forward, backward=both - forward, adds=add * S * (S - 1) / 2)


def time_per_site(S, M, D, H):
    chain = PerSite(randn(S, M, D), H)
    query, norm, dout, source = randn(D) / 8, ones(D), randn(M, D), randn(M, D)

    def forward():
        for s in range(S):
            chain.v[s].copy_(source)  # into the shared buffer
            chain.forward(s + 1, query, norm)

    def backward():
        for s in reversed(range(S)):
            chain.backward(s + 1, query, norm, dout, fresh=S if s == S - 1 else 0)

    return dict(forward=milliseconds(forward), backward=milliseconds(backward))


def time_chain(forward, inputs, douts):
    with torch.no_grad():
        alone = milliseconds(forward)
    both = milliseconds(lambda: torch.autograd.grad(forward(), inputs, douts))
    return dict(forward=alone, backward=both - alone)


def time_ours(S, M, D, H):
    sources, query, norm = [leaf(M, D) for _ in range(S)], leaf(S, D, scale=1 / 8), leaf(S, D)

    def forward():
        router = FusedRouter(sources[0], query, norm, H, EPS)
        reads = [router.read()]
        for f in sources[1:]:
            router.write(f)
            reads.append(router.read())
        return reads

    return time_chain(forward, [*sources, query, norm], [randn(M, D) for _ in range(S)])


def time_delta(fused, S, M, D, H):
    """Delta routing over the whole depth, sublayers replaced by the identity on a detached read; the stream's
    additions included."""
    block = S // 8
    x, query, norm, null, gate = leaf(M, D), leaf(S, D, scale=D**-0.5), leaf(S, D), leaf(S, D), leaf(S)
    f, dout = randn(M, D), randn(M, D)
    mix = lambda query, norm, *sources: eager_route(sources, query, norm, H)
    route = partial(torch.utils.checkpoint.checkpoint, mix, use_reentrant=False)

    def forward():
        reads = []
        if fused:
            router = FusedDeltaRouter(x, query, norm, null, gate, H, block, EPS)
            for _ in range(S):
                reads.append(router.read())
                router.write(f)
            return reads
        y, start, sources = x, x, [x]
        for s in range(S):
            reads.append(y + gate[s] * route(query[s], norm[s], null[s].expand_as(y), *sources))
            y = y + f
            if (s + 1) % block == 0:
                sources, start = [*sources, y - start], y
        return reads

    return time_chain(forward, [x, query, norm, null, gate], [dout] * S)


def time_routing(scale, method, S, M, D, H):
    """{"forward", "backward", ...} in ms of one micro-batch."""
    if method in (PER_SITE, "ours"):
        if obstacle := rk.kernel_support(DEVICE, DTYPE, D, H, S, blocks=8 if scale == "8B" else 0):
            raise ImportError(obstacle)
    if scale == "8B":
        return time_delta(method == "ours", S, M, D, H)
    if method == FLOOR:
        row = M * D * DTYPE.itemsize / bandwidth()  # ms
        return dict(zip(("forward", "backward"), (rows * row for rows in floor_rows(S))))
    if method == "ours":
        return time_ours(S, M, D, H)
    if method == PER_SITE:
        return time_per_site(S, M, D, H)
    return time_peer(method, S, M, D, 1 if "H=1" in method else H)


# ----------------------------------------------------------------------------------------------------------
# Whole models
# ----------------------------------------------------------------------------------------------------------
def build(scale, method, block_size, param_dtype):
    """A GPT of random weights; ImportError where a method that names the fused kernels cannot have them."""
    layers, D, heads, kv, ffn, *_ = SCALES[scale]
    shape = dict(n_layer=layers, n_embd=D, n_head=heads, n_kv_head=kv, ffn_dim=ffn, block_size=block_size)
    vocab, residual = 320 if scale == "toy" else 151936, method.removesuffix("-torch")
    if method.startswith("hc_"):
        residual, shape["hc_form"] = "hc", method.removeprefix("hc_")
    config = GPTConfig(**shape, vocab_size=vocab, residual=residual, route_heads=min(8, D // 16))
    wanted = "torch" if method.endswith("-torch") else "auto"
    kernel, why = choose_kernel(wanted, config, torch.device(DEVICE), DTYPE)
    if kernel == "torch" and method in ("mhar", "mhar_hw", "attnres", "delta") and CUDA:
        raise ImportError(why)
    return GPT(config, kernel=kernel).to(DEVICE, param_dtype)


def time_step(scale, method, param_dtype):
    """{"tokens_per_second", "ms", "without_graph", "peak_gb", "mfu"} of training with the paper's batch."""
    *_, T, B, _ = SCALES[scale]
    model = build(scale, method, T, param_dtype)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    forward = compile_model(model) if CUDA else model
    x, y = (torch.randint(0, model.config.vocab_size, (B, T), device=DEVICE) for _ in range(2))
    autocast = torch.autocast(DEVICE, DTYPE, enabled=CUDA and param_dtype == torch.float32)

    def micro_step(x, y):
        if CUDA and torch.cuda.is_current_stream_capturing():
            torch.cuda.reset_peak_memory_stats()  # what came before holds more than a step does
        with autocast:
            loss = forward(x, y)[0]
        loss.backward()
        return loss.detach()

    def update():
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    def launched_step():
        micro_step(x, y)
        update()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(3):  # compiles, and makes the optimizer's state
        launched_step()
    if not CUDA:
        return {}
    launched = wall_milliseconds(lambda: [launched_step() for _ in range(10)]) / 10
    graphed = GraphedMicroStep(micro_step, x, y, parameters, [True])
    times = [wall_milliseconds(lambda: (graphed(x, y, True), update())) for _ in range(14)]
    if not math.isfinite(loss := graphed(x, y, True).item()):
        raise FloatingPointError(f"{method} at {scale}: the loss is {loss}")
    ms, peak = statistics.median(times[2:]), peak_flops(DEVICE)
    speed = B * T / ms * 1e3
    memory, mfu = torch.cuda.max_memory_allocated() / 1e9, peak and speed * model.flops_per_token(T) / peak
    without_graph = B * T / launched * 1e3
    return dict(tokens_per_second=speed, ms=ms, without_graph=without_graph, peak_gb=memory, mfu=mfu)


def time_decode(scale, method, B, warm=4, windows=5, size=12):
    """{context: milliseconds per step of generation after so many tokens}, medians over windows of steps."""
    new, ms = warm + windows * size, {}
    model = build(scale, method, max(DECODE_CONTEXTS) + new, torch.float32)
    model = cast_matrices(model, DTYPE).eval().requires_grad_(False)
    n_ids = model.config.vocab_size
    for context in DECODE_CONTEXTS:
        tokens = generate(model, torch.randint(n_ids, (B, context), device=DEVICE), new, n_ids, temperature=0)
        list(itertools.islice(tokens, warm))  # the prompt, and the recording of the graph
        steps = [partial(list, itertools.islice(tokens, size)) for _ in range(windows)]
        ms[context] = statistics.median(map(wall_milliseconds, steps)) / size
    return ms


# ----------------------------------------------------------------------------------------------------------
# Tables: {column: cell} of a result, and of all results of its table
# ----------------------------------------------------------------------------------------------------------
def routing_cells(method, r, results):
    total = lambda r: r["forward"] + r["backward"] + r.get("adds", 0.0)
    base, floor = results.get(PER_SITE, {}), results.get(FLOOR, {})
    cells = {"forward, ms": f"{r['forward']:.2f}", "backward": f"{r['backward']:.2f}"}
    cells |= {"+ adds": f"{r['adds']:.2f}" if "adds" in r else "", "total": f"{total(r):.2f}"}
    if "forward" in base:
        cells[f"vs {PER_SITE}"] = f"{total(base) / total(r):.1f}x"
    if method == "ours" and "forward" in floor:
        shares = (f"{floor[way] / r[way]:.0%}" for way in ("forward", "backward"))
        cells["of the floor"] = " + ".join(shares)
    return cells


def step_cells(method, r, results):
    base = results.get("baseline", {})
    ratio = lambda key: f"{r[key] / base[key]:.3f}" if key in base else ""
    cells = {"tokens/s": f"{r['tokens_per_second']:,.0f}", "ms": f"{r['ms']:.2f}"}
    cells |= {"vs baseline": ratio("tokens_per_second"), "peak GB": f"{r['peak_gb']:.2f}"}
    cells |= {"GB vs baseline": ratio("peak_gb"), "MFU": f"{r['mfu']:.3f}" if r["mfu"] else "n/a"}
    return cells | {"without graph, tokens/s": f"{r['without_graph']:,.0f}"}


def decode_cells(label, r, results):
    base, (short, long) = results.get("baseline, " + label.split(", ")[1], {}), r.values()
    cells = {f"ms after {context:,}": f"{ms:.3f}" for context, ms in r.items()}
    cells["growth"] = f"{long / short - 1:+.1%}"
    return cells | {f"vs baseline after {n:,}": f"{base[n] / ms:.3f}" for n, ms in r.items() if n in base}


def comma_list(allowed):
    def parse(text):
        for word in text.split(","):
            if word not in allowed:
                raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(allowed)}")
        return text.split(",")

    return parse


def main():
    parser = Parser(description=__doc__)
    add, every = parser.add_argument, dict.fromkeys(itertools.chain(*METHODS.values()))
    add("--part", type=comma_list(METHODS), default=list(METHODS), help="comma list of " + ", ".join(METHODS))
    scales = ["100M", "350M", "1B", "8B"] if CUDA else ["toy"]
    scale_help = f"comma list of {', '.join(SCALES)}; 8B: delta routing alone"
    add("--scale", type=comma_list(SCALES), default=scales, help=scale_help)
    add("--method", type=comma_list(every), default=list(every), help="comma list of " + ", ".join(every))
    batch_help = "tokens of the routing part; paper: its Table 5's; fill: a training step's [%(default)s]"
    add("--batch", default="paper", choices=["paper", "fill"], help=batch_help)
    dtype_help = "float32: master weights with bf16 autocast, train.py's default [%(default)s]"
    add("--param_dtype", default="bfloat16", choices=["bfloat16", "float32"], help=dtype_help)
    add("--out", help="a new file for the results too, a line of JSON each")
    args = parser.parse_args()
    if not CUDA and args.scale != ["toy"]:
        raise UserError("a CUDA GPU is needed, torch sees none; --scale=toy shows on a CPU whether all runs")
    # on a CPU mhar has the reference routing anyway
    methods = [m for m in args.method if CUDA or m not in ("torch.compile", "mhar-torch")]
    wanted = {part: [m for m in METHODS[part] if m in methods and part in args.part] for part in METHODS}
    if not any(wanted.values()):
        raise UserError(f"nothing to measure: none of these methods is in {', '.join(args.part)}")
    try:
        out = open(args.out, "x") if args.out else None
    except OSError as error:
        raise UserError(f"--out={args.out}: {error.strerror}; give another name") from error

    gpu = torch.cuda.get_device_name() if CUDA else "CPU"
    print(f"{gpu}, torch {torch.__version__}, triton {triton.__version__ if triton else 'not installed'}")
    torch.set_float32_matmul_precision("high")

    def measure(title, cases, cells):
        """Run {label: measurement} and print the table; cells(label, result, results) -> {column: cell}."""
        results = {}
        for label, case in cases.items():
            print(f"{title}, {label} ...", file=sys.stderr, flush=True)
            results[label] = attempt(case)
            if out:
                line = {"on": gpu, "table": title, "row": label} | results[label]
                print(json.dumps(line), file=out, flush=True)
        rows = {label: r if "note" in r else cells(label, r, results) for label, r in results.items()}
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        lines = [[label, *(row.get(column, "") for column in columns)] for label, row in rows.items()]
        print(f"\n{title}\n\n{table(['', *columns], lines)}", flush=True)

    param_dtype = args.param_dtype if CUDA else "float32"
    for scale in args.scale:
        layers, D, *_, T, B, M = SCALES[scale]
        delta = scale == "8B"
        M = B * T if args.batch == "fill" else M
        shape = dict(S=2 * layers + (not delta), M=M, D=D, H=min(8, D // 16))
        if names := [m for m in wanted["routing"] if not delta or m in ("eager", "ours")]:
            cases = {m: partial(time_routing, scale, m, **shape) for m in names + [FLOOR] * (not delta)}
            title = f"Routing, {scale}: " + " ".join(f"{name}={size}" for name, size in shape.items())
            measure(title, cases, routing_cells)
        if wanted["step"] and not delta:
            cases = {m: partial(time_step, scale, m, getattr(torch, param_dtype)) for m in wanted["step"]}
            measure(f"Training step, {scale}: {B} x {T} tokens, {param_dtype} weights", cases, step_cells)
        if wanted["decode"] and not delta:
            pairs = itertools.product(DECODE_BATCHES, wanted["decode"])
            cases = {f"{m}, batch {batch}": partial(time_decode, scale, m, batch) for batch, m in pairs}
            measure(f"Generation, {scale}: a step makes one token of each sequence", cases, decode_cells)


if __name__ == "__main__":
    cli(main)
