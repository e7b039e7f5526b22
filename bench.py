"""What depth routing costs on your GPU: alone and in a whole training step (Tables 4 and 5 of the paper), and in generation.

    python bench.py                                            # everything; compiles for long, so parts can be run one by one:
    python bench.py --part=routing --scale=350M                # routing of one micro-batch: eager, torch.compile, the paper's algorithm, ours, peers
    python bench.py --part=step --scale=1B --method=baseline,mhar
    python bench.py --part=step --scale=100M --batch=fill      # the fastest batch that fits, instead of the paper's
    python bench.py --part=decode --scale=100M                 # milliseconds per new token
    python bench.py --scale=toy                                # on a CPU: does it run?

One GPU, the first that CUDA_VISIBLE_DEVICES leaves. Results are kept in --out (default out/bench.json); runs on the same GPU merge there, and the tables show
all of them. H = 8 but for attnres and the peers (H = 1); `-torch` is the reference routing in place of the kernels.
Routing: milliseconds of all sites of one micro-batch, forward + backward, bf16. Methods that work site by site (all but ours) are timed at some
numbers of sources N and summed over N = 1..S by linear interpolation; `+ adds` is what autograd then needs to add up their source gradients,
one tensor per source and site. Floor: the bytes that our scheme has to move, at the bandwidth that a large elementwise kernel reaches.
Step: forward, backward, clipping and fused AdamW of the whole compiled model, forward and backward replayed as one CUDA graph; `without graph`
is the rate in tokens per second when every kernel is launched by itself.
Decode: sample.py's own loop with random weights, greedy, each step a replayed CUDA graph. The matrices are bf16, norms and routing fp32, as eval.py has them.
From a prompt of 16 and of 1,024 tokens 64 new ones are made, with a cache of just that length; the first four are not timed, of the others the median over
windows of 12.
"""
from __future__ import annotations

import bisect
import functools
import gc
import itertools
import json
import math
import os
import statistics
import sys
import time

import torch
import torch.nn.functional as F

import routing_kernels as rk
from configurator import Parser, UserError, cli, output_folder
from model import GPT, GPTConfig, choose_kernel, peak_flops
from routing_kernels import FusedDeltaRouter, FusedRouter, route_reference, tl, triton
from sample import cast_matrices, generate

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32
EPS = 1e-6
SCALES = {  # layers, width, heads, kv heads, ffn; context and the paper's sequences per GPU; the paper's tokens in Table 5
    "100M": (12, 512, 8, 4, 1536, 2048, 8, 4096),
    "350M": (24, 1024, 16, 8, 4096, 1024, 4, 1024),
    "1B": (36, 1280, 16, 8, 5120, 1024, 4, 1024),
    "8B": (32, 4096, 32, 8, 14336, 4096, 2, 8192),  # delta routing, routing part only
    "toy": (5, 32, 2, 1, 48, 16, 1, 4),
}
PER_SITE, FLOOR = "the paper's algorithm", "floor of our scheme"
PAPER_ROUTING = {"torch.compile": {"100M": 30.2, "350M": 53.1, "1B": 153.2, "8B": 651}, PER_SITE: {"100M": 5.7, "350M": 11.4, "1B": 42.4, "8B": 323}}
PAPER_STEP = {  # ratio to the baseline's tokens per second, peak GB; an H100, uncompiled baseline at 113.9k / 45.0k / 19.7k tokens per second
    "baseline": {"100M": (1.0, 41.5), "350M": (1.0, 19.4), "1B": (1.0, 19.0)},
    "mhar-torch": {"100M": (0.54, 52.4), "350M": (0.32, 40.1), "1B": (0.23, 47.5)},
    "mhar": {"100M": (0.88, 42.0), "350M": (0.71, 20.0), "1B": (0.55, 20.1)},
}
METHODS = {
    "routing": ["eager", "torch.compile", PER_SITE, "fla (H=1)", "liger (H=1)", "ours"],
    "step": ["baseline", "hc", "mhar-torch", "mhar", "attnres"],
    "decode": ["baseline", "hc", "mhar-torch", "mhar", "attnres", "delta"],
}
DECODE_BATCHES, DECODE_CONTEXTS = (1, 32), (16, 1024)


# ----------------------------------------------------------------------------------------------------------------------
# The paper's kernels (its appendix E, own code): every site reads all its sources, keeps fp32 weights, and in backward reads
# the sources twice and adds to one fp32 gradient row per source.
# ----------------------------------------------------------------------------------------------------------------------
@rk.jit
def per_site_forward(V, QUERY, NORM, OUT, WEIGHTS, M, N, eps, H: tl.constexpr, HP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    h, k = tl.arange(0, HP), tl.arange(0, KP)
    ok = (h < H)[:, None] & (k < K)[None, :]
    col = h[:, None] * K + k[None, :]
    u = tl.load(QUERY + col, mask=ok, other=0.0).to(tl.float32) * tl.load(NORM + col, mask=ok, other=0.0).to(tl.float32)
    top = tl.full([HP], float("-inf"), tl.float32)
    den = tl.zeros([HP], tl.float32)
    acc = tl.zeros([HP, KP], tl.float32)
    for i in range(N):
        v = tl.load(V + (i * M + m) * H * K + col, mask=ok, other=0.0).to(tl.float32)
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
        tl.store(at, tl.exp(tl.load(at, mask=h < H, other=0.0) - top) / den, mask=h < H)


@rk.jit
def per_site_backward(V, WEIGHTS, DOUT, QUERY, NORM, DV, DQUERY, DNORM, M, N, eps, FRESH, H: tl.constexpr, HP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    h, k = tl.arange(0, HP), tl.arange(0, KP)
    ok = (h < H)[:, None] & (k < K)[None, :]
    col = h[:, None] * K + k[None, :]
    query = tl.load(QUERY + col, mask=ok, other=0.0).to(tl.float32)
    norm = tl.load(NORM + col, mask=ok, other=0.0).to(tl.float32)
    dout = tl.load(DOUT + m * H * K + col, mask=ok, other=0.0).to(tl.float32)
    mean = tl.zeros([HP], tl.float32)
    for i in range(N):
        v = tl.load(V + (i * M + m) * H * K + col, mask=ok, other=0.0).to(tl.float32)
        mean += tl.load(WEIGHTS + (i * M + m) * H + h, mask=h < H, other=0.0) * tl.sum(dout * v, 1)
    du = tl.zeros([HP, KP], tl.float32)
    for i in range(N):
        v = tl.load(V + (i * M + m) * H * K + col, mask=ok, other=0.0).to(tl.float32)
        p = tl.load(WEIGHTS + (i * M + m) * H + h, mask=h < H, other=0.0)
        r = tl.rsqrt(tl.sum(v * v) / (H * K) + eps)
        ds = p * (tl.sum(dout * v, 1) - mean)
        dkey = ds[:, None] * query * norm
        dv = p[:, None] * dout + r * dkey - r * r * r / (H * K) * tl.sum(dkey * v) * v
        du += ds[:, None] * v * r
        at = DV + (i * M + m) * H * K + col
        if i < N - FRESH:  # the newest source has no gradient of later sites yet when this is the chain's last site
            dv += tl.load(at, mask=ok, other=0.0)
        tl.store(at, dv, mask=ok)
    tl.store(DQUERY + m * H * K + col, du * norm, mask=ok)
    tl.store(DNORM + m * H * K + col, du * query, mask=ok)


class PerSite:
    """The paper's algorithm over one stack of sources [S, M, D]."""

    def __init__(self, v, H):
        (S, self.M, self.D), self.v, self.H = v.shape, v, H
        new = lambda *shape: torch.zeros(shape, device=v.device)
        self.weights, self.dv, self.dquery, self.dnorm = new(S, self.M, H), new(S, self.M, self.D), new(self.M, self.D), new(self.M, self.D)
        self.config = dict(H=H, HP=triton.next_power_of_2(H), K=self.D // H, KP=triton.next_power_of_2(self.D // H))
        self.config["num_warps"] = min(8, max(2, self.config["HP"] * self.config["KP"] // 512))

    def forward(self, n, query, norm):
        out = torch.empty_like(self.v[0])
        per_site_forward[(self.M,)](self.v, query, norm, out, self.weights, self.M, n, EPS, **self.config)
        return out

    def backward(self, n, query, norm, dout, fresh=0):
        per_site_backward[(self.M,)](self.v, self.weights, dout, query, norm, self.dv, self.dquery, self.dnorm, self.M, n, EPS, fresh, **self.config)
        return self.dquery.sum(0), self.dnorm.sum(0), self.dv[n - 1].to(self.v.dtype)

    def check(self):
        """Against the reference, before anything is timed."""
        n = min(5, len(self.v))
        query, norm, dout = torch.randn(self.D, device=self.v.device) / 8, 1 + 0.1 * torch.randn(self.D, device=self.v.device), torch.randn_like(self.v[0])
        leaves = [*(x.double().requires_grad_() for x in self.v[:n]), query.double().requires_grad_(), norm.double().requires_grad_()]
        out = route_reference(leaves[:n], *leaves[n:], self.H, EPS)[0]
        *dv, dquery, dnorm = torch.autograd.grad(out, leaves, dout.double())
        ours = [self.forward(n, query, norm), *self.backward(n, query, norm, dout, fresh=n)[:2], self.dv[:n]]
        for a, b in zip(ours, [out, dquery, dnorm, torch.stack(dv)]):
            error = ((a.double() - b).norm() / b.norm()).item()
            assert error < (1e-2 if self.v.dtype == torch.bfloat16 else 1e-4), f"the per-site kernels err by {error:.1e}"


# ----------------------------------------------------------------------------------------------------------------------
# Timing.
# ----------------------------------------------------------------------------------------------------------------------
say = functools.partial(print, file=sys.stderr, flush=True)
synchronize = torch.cuda.synchronize if CUDA else lambda: None
randn, ones = (functools.partial(make, device=DEVICE, dtype=DTYPE) for make in (torch.randn, torch.ones))


def release_memory():
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
        torch._dynamo.reset()


def attempt(measure, *args):
    """What measure returns, or a note; the GPU is left empty."""
    try:
        return measure(*args) or dict(note="out of memory")
    except ImportError as error:
        return dict(note=f"not run: {error}")
    except torch.cuda.OutOfMemoryError:
        return dict(note="out of memory")
    finally:
        release_memory()


def milliseconds(call, repeats=7):
    """Median over repeats of a CUDA-graph replay (on a CPU: of the call itself), in ms."""
    if not CUDA:
        call()
        times = []
        for _ in range(3):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        return statistics.median(times)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(), call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        keep = call()
    times = []
    for _ in range(repeats + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        synchronize()
        times.append(begin.elapsed_time(end))
    del keep
    return statistics.median(times[1:])


def bandwidth():
    """Bytes per ms, read plus written, of a large elementwise kernel; a copy recorded in a CUDA graph is no kernel, and reached 2.75 of an H200's 4.3 TB/s."""
    x = torch.zeros(1 << (28 if CUDA else 20), device=DEVICE, dtype=torch.float32)
    y = torch.empty_like(x)
    return 2 * x.numel() * 4 / milliseconds(lambda: torch.neg(x, out=y))


def floor_rows(S):
    """Rows [M, D] that the two-phase scheme moves for S sites with groups of G, forward and backward, statistics left out."""
    G, groups = rk.G, range(0, S, rk.G)
    size = {s0: min(G, S - s0) for s0 in groups}
    inside = sum(n * (n - 1) // 2 for n in size.values())
    forward = sum(groups) + 2 * (S - size[0]) + 3 * S + inside  # older sources, partials written and read, source in and stored, h out
    later = [s0 for s0 in groups if s0 + G < S]
    backward = sum(S - s0 - G for s0 in later) + 3 * G * len(later) + 5 * S + inside + S  # later dh, sources, partials; dh in and kept, h, v, dv; du
    return forward, backward


def interpolated(points, S):
    """Sum over N = 1..S of the piecewise linear function through {N: ms}, which has S among its points."""
    xs, total = sorted(points), 0.0
    for n in range(1, S + 1):
        i = max(1, bisect.bisect_left(xs, n))
        a, b = xs[i - 1], xs[i]
        total += points[a] + (points[b] - points[a]) * (n - a) / (b - a)
    return total


# ----------------------------------------------------------------------------------------------------------------------
# Routing alone.
# ----------------------------------------------------------------------------------------------------------------------
def leaf(*shape, scale=1.0):
    return (randn(*shape) * scale).requires_grad_()


def eager_route(sources, query, norm, H):
    v = torch.stack(sources)
    keys = F.rms_norm(v, v.shape[-1:], norm, EPS).unflatten(-1, (H, -1))
    weights = torch.einsum("hk,nmhk->nmh", query.view(H, -1), keys).softmax(0, dtype=torch.float32).to(v.dtype)
    return torch.einsum("nmh,nmhk->mhk", weights, v.unflatten(-1, (H, -1))).flatten(-2)


def peer(method):
    if method == "eager":
        return eager_route
    if method == "torch.compile":
        torch._dynamo.config.recompile_limit = 64
        return torch.compile(eager_route, dynamic=False, fullgraph=True)
    if method.startswith("fla"):
        os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")  # otherwise its entry point breaks graphs
        from fla.ops.attnres import fused_attnres
        return lambda sources, query, norm, H: fused_attnres(query, list(sources), norm, rms_eps=EPS)
    from liger_kernel.ops.attn_res import LigerAttnResFunction
    return lambda sources, query, norm, H: LigerAttnResFunction.apply(torch.stack(sources), query, norm, EPS)


def time_peer(method, S, M, D, H):
    """{"forward", "backward", "adds"} in ms of one micro-batch."""
    route = peer(method)
    sources, query, norm = [leaf(M, D) for _ in range(S)], leaf(D, scale=1 / 8), ones(D).requires_grad_()
    dout, forward, both = randn(M, D), {}, {}
    counts = (1, 2, 4, 8, 16, 32, 48) if method == "eager" else (2, S // 2)  # the others compile or tune for every number of sources
    for n in [*(n for n in counts if n < S), S]:
        forward[n] = milliseconds(lambda: route(sources[:n], query, norm, H))
        both[n] = milliseconds(lambda: torch.autograd.grad(route(sources[:n], query, norm, H), [*sources[:n], query, norm], dout))
    gradients = [torch.zeros_like(dout) for _ in range(min(S, 16))]
    add = milliseconds(lambda: [g.add_(s) for g, s in zip(gradients, sources)]) / len(gradients)
    return dict(forward=interpolated(forward, S), backward=interpolated(both, S) - interpolated(forward, S), adds=add * S * (S - 1) / 2)


def time_per_site(S, M, D, H):
    chain = PerSite(randn(S, M, D), H)
    chain.check()
    query, norm, dout, source = randn(D) / 8, ones(D), randn(M, D), randn(M, D)

    def forward():
        for s in range(S):
            chain.v[s].copy_(source)  # into the shared buffer
            chain.forward(s + 1, query, norm)

    def backward():
        for s in reversed(range(S)):
            chain.backward(s + 1, query, norm, dout, fresh=S if s == S - 1 else 0)

    return dict(forward=milliseconds(forward), backward=milliseconds(backward))


def time_ours(S, M, D, H):
    sources, query, norm = [leaf(M, D) for _ in range(S)], leaf(S, D, scale=1 / 8), leaf(S, D)
    douts = [randn(M, D) for _ in range(S)]

    def forward():
        router = FusedRouter(sources[0], query, norm, H, EPS)
        reads = [router.read()]
        for f in sources[1:]:
            router.write(f)
            reads.append(router.read())
        return reads

    with torch.no_grad():
        alone = milliseconds(forward)
    both = milliseconds(lambda: torch.autograd.grad(forward(), [*sources, query, norm], douts))
    return dict(forward=alone, backward=both - alone)


def time_delta(fused, S, M, D, H):
    """Delta routing over the whole depth, sublayers replaced by the identity on a detached read; the stream's additions included."""
    block = S // 8
    x, query, norm, null, gate = leaf(M, D), leaf(S, D, scale=D**-0.5), leaf(S, D), leaf(S, D), leaf(S)
    f, dout = randn(M, D), randn(M, D)
    mix = lambda query, norm, *sources: eager_route(sources, query, norm, H)
    route = lambda *a: torch.utils.checkpoint.checkpoint(mix, *a, use_reentrant=False)

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

    with torch.no_grad():
        alone = milliseconds(forward, repeats=3)
    both = milliseconds(lambda: torch.autograd.grad(forward(), [x, query, norm, null, gate], [dout] * S), repeats=3)
    return dict(forward=alone, backward=both - alone)


def routing(scale, method, S, M, D, H):
    """{"forward", "backward", ...} in ms of one micro-batch."""
    if method in (PER_SITE, "ours") and (obstacle := rk.kernel_support(DEVICE, DTYPE, D, H, S, blocks=8 if scale == "8B" else 0)):
        raise ImportError(obstacle)
    if scale == "8B":
        return time_delta(method == "ours", S, M, D, H)
    if method == FLOOR:
        speed = bandwidth()
        forward, backward = (rows * M * D * DTYPE.itemsize / speed for rows in floor_rows(S))
        return dict(forward=forward, backward=backward)
    if method == "ours":
        return time_ours(S, M, D, H)
    if method == PER_SITE:
        return time_per_site(S, M, D, H)
    return time_peer(method, S, M, D, 1 if "H=1" in method else H)


# ----------------------------------------------------------------------------------------------------------------------
# Whole models.
# ----------------------------------------------------------------------------------------------------------------------
def build(scale, method, block_size, param_dtype):
    """A GPT of random weights; ImportError where a method that names the fused kernels cannot have them."""
    layers, D, heads, kv, ffn, *_ = SCALES[scale]
    config = GPTConfig(block_size=block_size, vocab_size=320 if scale == "toy" else 151936, n_layer=layers, n_embd=D, n_head=heads, n_kv_head=kv, ffn_dim=ffn,
                       residual=method.removesuffix("-torch"), route_heads=min(8, D // 16))
    kernel, why = choose_kernel("torch" if method.endswith("-torch") else "auto", config, torch.device(DEVICE), DTYPE)
    if kernel == "torch" and method in ("mhar", "attnres", "delta") and CUDA:
        raise ImportError(why)
    return GPT(config, kernel=kernel).to(DEVICE, param_dtype)


def step(scale, method, param_dtype, B):
    """{"tokens_per_second", "ms", "peak_gb", "mfu", "batch"} of training at one scale with B sequences."""
    T = SCALES[scale][5]
    model = build(scale, method, T, param_dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    forward = torch.compile(model, fullgraph=True, dynamic=False) if CUDA else model
    idx, targets = (torch.randint(0, model.config.vocab_size, (B, T), device=DEVICE) for _ in range(2))
    autocast = torch.autocast(DEVICE, DTYPE, enabled=CUDA and param_dtype == torch.float32)

    def forward_backward():
        with autocast:
            loss = forward(idx, targets)[0]
        loss.backward()
        return loss

    def update():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    launched = None
    if CUDA:
        for i in range(13):  # compiles, makes the optimizer's state, and times steps whose kernels are launched one by one
            if i == 3:
                synchronize()
                start = time.perf_counter()
            forward_backward()
            update()
            optimizer.zero_grad(set_to_none=True)
        synchronize()
        launched = (time.perf_counter() - start) * 1e3 / 10
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                forward_backward()
                optimizer.zero_grad(set_to_none=True)
        torch.cuda.current_stream().wait_stream(stream)
        synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = forward_backward()
    times = []
    for _ in range(14 if CUDA else 5):
        synchronize()
        start = time.perf_counter()
        if CUDA:
            graph.replay()
        else:
            optimizer.zero_grad(set_to_none=True)
            loss = forward_backward()
        update()
        synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    ms, peak = statistics.median(times[2:]), peak_flops(DEVICE)
    speed = B * T / ms * 1e3
    if not math.isfinite(loss.item()):
        raise FloatingPointError(f"{method} at {scale}: the loss is {loss.item()}")
    return dict(ms=ms, tokens_per_second=speed, without_graph=B * T / launched * 1e3 if launched else None, batch=B,
                peak_gb=torch.cuda.max_memory_allocated() / 1e9 if CUDA else None, mfu=speed * model.flops_per_token(T) / peak if peak else None)


def fastest_step(scale, method, param_dtype, B):
    """The best of step's results with B sequences, 2 * B, ... until memory is full or it gets no faster; None where not even B fit."""
    best = None
    while True:
        say(f"  {B} sequences ...")
        try:
            result = step(scale, method, param_dtype, B)
        except torch.cuda.OutOfMemoryError:
            return best
        finally:
            release_memory()
        if best is not None and result["tokens_per_second"] < 1.01 * best["tokens_per_second"] or not CUDA:
            return max(filter(None, (best, result)), key=lambda r: r["tokens_per_second"])
        best, B = result, 2 * B


def decode(scale, method, warm=4, windows=5, size=12):
    """{"1 x 16": milliseconds per step of generation at batch 1 from 16 tokens of context, ...}"""
    new, ms = warm + windows * size, {}
    model = cast_matrices(build(scale, method, max(DECODE_CONTEXTS) + new, torch.float32).eval().requires_grad_(False), DTYPE)
    n_ids = model.config.vocab_size
    for B, context in itertools.product(DECODE_BATCHES, DECODE_CONTEXTS):
        with torch.autocast(DEVICE, DTYPE, enabled=CUDA):
            tokens, times = generate(model, torch.randint(0, n_ids, (B, context), device=DEVICE), new, n_ids, temperature=0), []
            for _ in range(warm):  # the prompt, and the recording of the graph
                next(tokens)
            for _ in range(windows):
                synchronize()
                start = time.perf_counter()
                for _ in range(size):
                    next(tokens)
                synchronize()
                times.append((time.perf_counter() - start) * 1e3 / size)
        ms[f"{B} x {context}"] = statistics.median(times)
    return ms


# ----------------------------------------------------------------------------------------------------------------------
# Tables.
# ----------------------------------------------------------------------------------------------------------------------
def table(title, rows):
    """Print rows of cells, the first of them the head; a short row is filled up."""
    rows = [[str(cell) for cell in row] + [""] * (len(rows[0]) - len(row)) for row in rows]
    first, *others = (max(map(len, column)) for column in zip(*rows))
    print("\n" + title)
    for name, *cells in rows:
        print("  ".join([name.ljust(first), *map(str.rjust, cells, others)]).rstrip())


def routing_table(results, scale, batch):
    rows = [["ms", "forward", "backward", "+ adds", "total", "of the floor", f"vs {PER_SITE}", "paper (H100)"]]
    total = lambda r: r["forward"] + r["backward"] + r.get("adds", 0.0)
    base, floor = results.get(PER_SITE, {}), results.get(FLOOR, {})
    for method in [m for m in METHODS["routing"] + [FLOOR] if m in results]:
        r, share, times, paper = results[method], "", "", ""
        if batch == "paper":
            paper = PAPER_ROUTING.get(PER_SITE if scale == "8B" and method == "ours" else method, {}).get(scale, "")
        if "note" in r:
            rows.append([method, r["note"], *[""] * 5, paper])
            continue
        if method == "ours" and "forward" in floor:
            share = f"{floor['forward'] / r['forward']:.0%} + {floor['backward'] / r['backward']:.0%}"
        if "forward" in base:
            times = f"{total(base) / total(r):.1f}x"
        rows.append([method, f"{r['forward']:.2f}", f"{r['backward']:.2f}", f"{r['adds']:.2f}" if "adds" in r else "", f"{total(r):.2f}", share, times, paper])
    shape = " ".join(f"{name}={size}" for name, size in results["shape"].items())
    table(f"Routing, {scale}{' (delta)' if scale == '8B' else ''}: {shape}   [Table 5]", rows)


def step_table(results, scale, batch, precision):
    rows = [["", "tokens/s", "ms", "vs baseline", "peak GB", "vs baseline", "MFU", "without graph", "sequences", "paper: vs baseline", "peak GB"]]
    base = results.get("baseline", {})
    for method in [m for m in METHODS["step"] if m in results]:
        r = results[method]
        if "note" in r:
            rows.append([method, r["note"]])
            continue
        ratio = lambda field: f"{r[field] / base[field]:.3f}" if base.get(field) and r[field] else ""
        paper = PAPER_STEP.get(method, {}).get(scale, ()) if batch == "paper" else ()
        rows.append([method, f"{r['tokens_per_second']:,.0f}", f"{r['ms']:.2f}", ratio("tokens_per_second"), f"{r['peak_gb']:.2f}" if r["peak_gb"] else "", ratio("peak_gb"),
                     f"{r['mfu']:.3f}" if r["mfu"] else "n/a", f"{r['without_graph']:,.0f}" if r["without_graph"] else "", r["batch"], *paper])
    sequences = {"paper": "the paper's batch", "fill": "the batch that fills the GPU"}[batch]
    table(f"Training step, {scale}, {sequences}, {precision} parameters   [Table 4]", rows)


def decode_table(results, scale):
    short, long = DECODE_CONTEXTS
    rows = [["", "batch", f"ms per step after {short}", f"after {long:,}", "growth", f"tokens/s after {short}", f"after {long:,}", f"vs baseline after {short}", f"after {long:,}"]]
    base = results.get("baseline", {})
    for B, method in itertools.product(DECODE_BATCHES, [m for m in METHODS["decode"] if m in results]):
        r, keys = results[method], [f"{B} x {context}" for context in DECODE_CONTEXTS]
        if "note" in r:
            rows.append([method, B, r["note"]])
            continue
        a, b = (r[key] for key in keys)
        versus = [f"{base[key] / r[key]:.3f}" for key in keys if key in base]
        rows.append([method, B, f"{a:.3f}", f"{b:.3f}", f"{b / a - 1:+.1%}", f"{B / a * 1e3:,.0f}", f"{B / b * 1e3:,.0f}", *versus])
    table(f"Generation, {scale}, {'bf16' if CUDA else 'fp32'}: a step makes one token of each sequence of the batch", rows)


def report(results):
    """Print a table for each key of the results: `routing SCALE BATCH`, `step SCALE BATCH PRECISION` or `decode SCALE`."""
    for part, show in (("routing", routing_table), ("step", step_table), ("decode", decode_table)):
        for key in sorted(key for key in results if key.startswith(part + " ")):
            show(results[key], *key.split()[1:])


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("--part", default="routing,step,decode", help="comma list of routing, step and decode (default: all)")
    parser.add_argument("--scale", default="100M,350M,1B,8B" if CUDA else "toy", help=f"comma list of {', '.join(SCALES)}; 8B is delta routing, alone")
    parser.add_argument("--method", help="comma list; " + "; ".join(f"{part}: {', '.join(methods)}" for part, methods in METHODS.items()))
    parser.add_argument("--batch", default="paper", choices=["paper", "fill"], help="paper: its tokens per GPU; fill: the training step's tokens for routing, the fastest batch that fits for steps")
    parser.add_argument("--param_dtype", default="bfloat16", choices=["bfloat16", "float32"], help="float32: master weights with bf16 autocast, train.py's default")
    parser.add_argument("--out", default="out/bench.json", help="results are merged into this file")
    args = parser.parse_args()
    every = list(dict.fromkeys(sum(METHODS.values(), [])))
    parts, scales, methods = args.part.split(","), args.scale.split(","), every if args.method is None else args.method.split(",")
    for name, words, allowed in (("part", parts, METHODS), ("scale", scales, SCALES), ("method", methods, every)):
        if unknown := [word for word in words if word not in allowed]:
            raise UserError(f"--{name}={unknown[0]} is not known: choose among {', '.join(allowed)}")
    if not CUDA and args.scale != "toy":
        raise UserError(f"--scale={args.scale} needs a CUDA GPU, torch sees none; on a CPU there is --scale=toy, which shows that everything runs")
    absent = () if CUDA else ("torch.compile", "mhar-torch")  # not on a CPU, where mhar has the reference routing anyway
    wanted = {part: [m for m in names if part in parts and m in methods and m not in absent] for part, names in METHODS.items()}
    if not any(wanted.values()):
        raise UserError(f"--method={args.method} has nothing to measure in --part={args.part}: " + "; ".join(f"{part} has {', '.join(METHODS[part])}" for part in parts))
    if "routing" in parts:
        wanted["routing"].append(FLOOR)
    gpu = torch.cuda.get_device_name() if CUDA else "CPU"
    where = f"{gpu}, torch {torch.__version__}, triton {triton.__version__ if triton else 'not installed'}"
    if os.path.isdir(args.out) or not os.path.basename(args.out):
        raise UserError(f"--out={args.out} names no file: give one, --out=out/bench.json")
    output_folder(os.path.dirname(args.out) or ".", "--out")
    results = {"where": where}
    if os.path.exists(args.out):
        try:
            with open(args.out) as f:
                results = json.load(f)
            there = results.get("where")
        except (OSError, ValueError, AttributeError):
            raise UserError(f"--out={args.out} is not a file of this script: give another name") from None
        if there != where:
            raise UserError(f"{args.out} holds results of {there}, this is {where}: give another --out")
    say(where + (f"; one of {torch.cuda.device_count()} GPUs is used" if torch.cuda.device_count() > 1 else ""))
    torch.set_float32_matmul_precision("high")

    def measure(key, method, call, *arguments, **also):
        say(f"{key}, {method} ...")
        results.setdefault(key, {}).update(also | {method: attempt(call, *arguments)})
        with open(args.out + ".new", "w") as f:
            json.dump(results, f, indent=1)
        os.replace(args.out + ".new", args.out)

    param_dtype = args.param_dtype if CUDA else "float32"
    for scale in scales:
        layers, D, *_, T, B, M = SCALES[scale]
        shape = dict(S=2 * layers + (scale != "8B"), M=B * T if args.batch == "fill" else M, D=D, H=min(8, D // 16))
        for method in [m for m in wanted["routing"] if scale != "8B" or m in ("eager", "ours")]:
            measure(f"routing {scale} {args.batch}", method, routing, scale, method, *shape.values(), shape=shape)
        for method in wanted["step"] if scale != "8B" else []:
            measure(f"step {scale} {args.batch} {param_dtype}", method, fastest_step if args.batch == "fill" else step, scale, method, getattr(torch, param_dtype), B)
        for method in wanted["decode"] if scale != "8B" else []:
            measure(f"decode {scale}", method, decode, scale, method)
    print(where)
    report(results)


if __name__ == "__main__":
    cli(main)
