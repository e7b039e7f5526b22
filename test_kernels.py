"""Numerics of routing_kernels.py against route_reference in fp64.

    python test_kernels.py          a table of errors, fused beside eager torch: on a GPU in three dtypes, on a CPU in fp32 through Triton's interpreter
    pytest test_kernels.py          the assertions; without a GPU also the compilation of every kernel for GPUs that are not there

Shape letters as in routing_kernels.py: M tokens, D width, H routing heads, S sources and sites.
"""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
import routing_kernels as rk  # noqa: E402
from routing_kernels import FusedDeltaRouter, FusedRouter, kernel_support, route_reference  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
torch.backends.cuda.matmul.allow_tf32 = False
gpu = pytest.mark.skipif(not GPU, reason="needs a GPU: the interpreter is right in fp32 only, and slow")


@pytest.fixture(autouse=True)
def memory_starts_as_nan():
    """Every torch.empty of a test is filled with NaN: whoever reads what was never written gives himself away."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # together with torch.utils.deterministic.fill_uninitialized_memory, on by default
    yield
    torch.use_deterministic_algorithms(False)


class ReferenceRouter:
    """FusedRouter's interface over route_reference, or over what one writes in bf16 torch without thinking of rounding (eager=True)."""

    def __init__(self, x, query, key_norm, n_heads, eager=False):
        self.sources, self.query, self.key_norm, self.H, self.eager = [x], query, key_norm, n_heads, eager

    def read(self):
        s = len(self.sources) - 1
        if not self.eager:
            return route_reference(self.sources, self.query[s], self.key_norm[s], self.H)[0]
        v = torch.stack(self.sources)  # [N, M, D]
        keys = F.rms_norm(v, v.shape[-1:], self.key_norm[s], 1e-6).unflatten(-1, (self.H, -1))
        weights = torch.einsum("hk,nmhk->nmh", self.query[s].view(self.H, -1), keys).softmax(0)
        return torch.einsum("nmh,nmhk->mhk", weights, v.unflatten(-1, (self.H, -1))).flatten(-2)

    def write(self, f):
        self.sources.append(f)


def inputs(S, M, D, H, dtype, seed=0, query_scale=1.0, source_scale=1.0):
    """Source 0, query, key_norm and the sublayers' weights, as leaves; the same numbers in any dtype after rounding to `dtype[0]`."""
    rounded, wanted = dtype if isinstance(dtype, tuple) else (dtype, dtype)
    g = torch.Generator().manual_seed(seed)
    leaf = lambda *shape, scale=1.0, shift=0.0: (torch.randn(*shape, generator=g) * scale + shift).to(rounded).to(DEVICE, wanted).requires_grad_()
    return [leaf(M, D, scale=source_scale), leaf(S, D, scale=query_scale * (H / D) ** 0.5), leaf(S, D, scale=0.2, shift=1.0), *(leaf(D, D, scale=D**-0.5) for _ in range(S - 1))]


def chain(make, tensors, H, sites=None, quirk=None):
    """A stack of tanh sublayers over a router -> everything that reached a loss. `quirk` (name, site) bends the chain at one site."""
    x, query, key_norm, *weights = tensors
    router, outs = make(x, query, key_norm, H), []
    name, at = quirk or (None, None)
    for s in range(sites or len(query)):
        h = outs[-1] if (name, at) == ("unread", s) else router.read()
        if (name, at) == ("read twice", s):
            h = h + router.read()
        outs.append(h)
        if s + 1 < (sites or len(query)):
            f = torch.tanh((h.detach() if (name, at) == ("detached input", s) else h) @ weights[s])
            router.write(f.detach() if (name, at) == ("detached source", s) else f)
    return [outs[len(outs) // 2], outs[-1]] if name == "two losses" else [outs[-1]]


def gradients(make, tensors, H, **kw):
    """The loss and the gradient of every tensor (zeros where there is none)."""
    outs = chain(make, tensors, H, **kw)
    g = torch.Generator().manual_seed(1)
    loss = sum((out * torch.randn(out.shape, generator=g).to(out)).sum() for out in outs)
    grads = torch.autograd.grad(loss, tensors, allow_unused=True)
    return [loss.detach(), *(torch.zeros_like(t) if grad is None else grad for t, grad in zip(tensors, grads))]


def worst(a, b):
    """max |a - b| / max |b|, the largest over the tensors; a tensor that is zero must be zero."""
    return max((((x.double() - y).abs().max() / y.abs().max()) if y.abs().max() > 0 else x.abs().max()).item() for x, y in zip(a, b))


def assert_like_reference(S, M, D, H, dtype=torch.float32, scales={}, **kw):
    fused = gradients(FusedRouter, inputs(S, M, D, H, dtype, **scales), H, **kw)
    truth = gradients(ReferenceRouter, inputs(S, M, D, H, (dtype, torch.float64), **scales), H, **kw)
    reference = gradients(ReferenceRouter, inputs(S, M, D, H, dtype, **scales), H, **kw)
    error, bound = worst(fused[1:], truth[1:]), max(2.5e-6, 2 * worst(reference[1:], truth[1:]))
    assert all(x.isfinite().all() for x in fused)
    assert error <= bound, f"gradients err by {error:.1e}, allowed {bound:.1e}"


# one site; less, just and more than a group; one head, an odd number of heads, single channels, heads wider than a warp holds; one token
SHAPES = [(1, 3, 32, 2), (2, 1, 32, 2), (8, 2, 32, 4), (9, 3, 48, 3), (17, 2, 40, 1), (10, 1, 8, 8), (10, 1, 352, 1), (10, 2, 336, 2), (18, 1, 80, 1)]
if GPU:
    SHAPES += [(25, 257, 512, 8), (49, 65, 1024, 16), (73, 63, 1280, 8), (19, 63, 640, 1), (19, 31, 1280, 4), (12, 5, 96 * 5, 5), (257, 2, 64, 64), (20, 1, 512 * 4, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chain_fp32(shape):
    assert_like_reference(*shape)


@pytest.mark.parametrize("quirk", [("detached input", 3), ("detached input", 9), ("detached source", 3), ("unread", 4), ("read twice", 7), ("read twice", 10), ("two losses", None)], ids=str)
def test_bent_chain(quirk):
    assert_like_reference(11, 2, 32, 2, quirk=quirk)


@pytest.mark.parametrize("sites", [1, 5, 8, 9, 16])
def test_forward_that_stops_early(sites):
    assert_like_reference(18, 2, 32, 2, sites=sites)  # the sources of the sites that never ran are NaN


def errors(S, M, D, H, dtype, **scales):
    """Relative error (norm) against fp64 of [reads, source gradients, query, key_norm gradients]: fused, eager, of rounding the exact ones to dtype; and
    whether two runs agree."""
    g = torch.Generator().manual_seed(0)
    sizes = scales.get("source_scale", (1.0,))  # in turn
    data = [torch.randn(M, D, generator=g) * sizes[i % len(sizes)] for i in range(S)]
    data += [torch.randn(S, D, generator=g) * scales.get("query_scale", 1.0) / 8, 1 + 0.2 * torch.randn(S, D, generator=g)]
    upstream = [torch.randn(M, D, generator=g).to(dtype).to(DEVICE) for _ in range(S)]

    def run(make, wanted):
        *sources, query, key_norm = leaves = [t.to(dtype).to(DEVICE, wanted).requires_grad_() for t in data]
        router = make(sources[0], query, key_norm, H)
        reads = [router.read()]
        for f in sources[1:]:
            router.write(f)
            reads.append(router.read())
        *dv, dq, dk = torch.autograd.grad(reads, leaves, [d.to(wanted) for d in upstream])
        return [torch.stack(reads), torch.stack(dv), dq, dk]

    fused, again, truth = run(FusedRouter, dtype), run(FusedRouter, dtype), run(ReferenceRouter, torch.float64)
    eager = run(lambda *a: ReferenceRouter(*a, eager=True), dtype)
    relative = lambda a: [((x.double() - y).norm() / (y.norm() or 1.0)).item() for x, y in zip(a, truth)]
    return relative(fused), relative(eager), relative([x.to(dtype) for x in truth]), all(torch.equal(a, b) for a, b in zip(fused, again))


EXTREMES = [dict(query_scale=100.0), dict(source_scale=(1e-4,)), dict(source_scale=(1e4,)), dict(source_scale=(1e4, 1e-4, 1.0)), dict(source_scale=(0.0,))]


@pytest.mark.parametrize("scales", EXTREMES, ids=str)
def test_extremes_fp32(scales):
    fused, eager, _, same = errors(10, 3, 32, 2, torch.float32, **scales)
    assert same and all(a <= max(2.5e-6, 2 * b) for a, b in zip(fused, eager)), (fused, eager)


@pytest.mark.parametrize("channel", [1.0, 1e6])
def test_partial_results_in_float16(channel, monkeypatch):
    """What bf16 sources make of them, here with fp32 ones: a channel far larger than the rest of its head costs the rest nothing."""
    buffers = rk._forward_buffers
    monkeypatch.setattr(rk, "_forward_buffers", lambda *args: [x.half() if i == 3 else x for i, x in enumerate(buffers(*args))])
    sources, query = torch.randn(10, 2, 80, generator=torch.Generator().manual_seed(0)).to(DEVICE), torch.randn(10, 80, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    sources[:, :, 3] *= channel
    query[:, 3] = 0
    reads = []
    for make in (FusedRouter, ReferenceRouter):
        router = make(sources[0], query, torch.ones_like(query), 2)
        for f in sources[1:]:
            router.write(f)
        reads.append(router.read().double())
    others = torch.arange(80) != 3
    error = (reads[0] - reads[1])[:, others].norm() / reads[1][:, others].norm()
    assert reads[0].isfinite().all() and error < 4e-4, error


@pytest.mark.parametrize("upstream", ["sum", "mean", "cat", "strided"])
def test_upstream_gradients_that_are_not_contiguous(upstream):
    use = {"sum": torch.sum, "mean": torch.mean, "cat": lambda h: torch.cat([h, h[:, :3]], 1).square().sum(), "strided": lambda h: h.transpose(0, 1)[::2].square().sum()}[upstream]
    grads = []
    for make, dtype in ((FusedRouter, torch.float32), (ReferenceRouter, (torch.float32, torch.float64))):
        tensors = inputs(10, 3, 32, 2, dtype)
        grads.append(torch.autograd.grad(use(chain(make, tensors, 2)[0]), tensors))
    assert worst(*grads) < 2e-5


def test_sources_that_are_views():
    """Slices of one bank, an expanded row, and the same tensor twice: gradients add up in the base."""
    grads = []
    for make, dtype in ((FusedRouter, torch.float32), (ReferenceRouter, torch.float64)):
        _, query, key_norm, bank = inputs(6, 4, 32, 2, (torch.float32, dtype))[:4]
        tensors = [query, key_norm, bank]
        sources = [bank[:4], bank[::8], bank[5:6].expand(4, 32), bank[:4], bank.T[:4], bank.view(4, 8, 32)[:, 3]]
        router = make(sources[0], query, key_norm, 2)
        for f in sources[1:]:
            router.read()
            router.write(f)
        grads.append(torch.autograd.grad(router.read().square().sum(), tensors))
    assert worst(*grads) < 1e-5


def test_repeated_interleaved_and_interrupted_passes():
    """retain_graph, a backward from the middle and then from the end, a second forward before the first backward, another batch size, inference in
    between, and a forward that an exception ended: all bitwise equal to a pass alone."""
    tensors, other = inputs(10, 2, 32, 2, torch.float32), inputs(9, 1, 48, 3, torch.float32, seed=5)
    alone, other_alone = gradients(FusedRouter, tensors, 2), gradients(FusedRouter, other, 3)
    g = torch.Generator().manual_seed(1)
    middle, last = chain(FusedRouter, tensors, 2, quirk=("two losses", None))
    loss = (last * torch.randn(last.shape, generator=g).to(last)).sum()
    other_out, = chain(FusedRouter, other, 3)
    with torch.no_grad():
        chain(FusedRouter, [t[:1] if t is tensors[0] else t for t in tensors], 2)
    with torch.inference_mode():
        assert torch.equal(chain(FusedRouter, tensors, 2)[0], last)
    with pytest.raises(ZeroDivisionError):
        router = FusedRouter(*tensors[:3], 2)
        router.write(router.read() * (1 / 0))
    torch.autograd.grad(middle.sum(), tensors, retain_graph=True, allow_unused=True)
    for retain in (True, True, False):
        assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(loss, tensors, retain_graph=retain), alone[1:]))
    g = torch.Generator().manual_seed(1)
    grads = torch.autograd.grad((other_out * torch.randn(other_out.shape, generator=g).to(other_out)).sum(), other)
    assert all(torch.equal(a, b) for a, b in zip(grads, other_alone[1:]))


def test_limits_are_named():
    x, q = torch.randn(2, 32, device=DEVICE), torch.randn(3, 32, device=DEVICE)
    for heads, text in ((3, "route_heads=3 does not divide"), (0, "route_heads=0")):
        with pytest.raises(ValueError, match=text):
            FusedRouter(x, q, q, heads)
    with pytest.raises(ValueError, match="at most 257 sources, not 258"):
        FusedRouter(x, q[:1].expand(258, 32), q[:1].expand(258, 32), 2)
    with pytest.raises(ValueError, match="at most 64 routing heads, not 128"):
        FusedRouter(x.repeat(1, 4), q.repeat(1, 4), q.repeat(1, 4), 128)
    with pytest.raises(ValueError, match="do not fit together"):
        FusedRouter(x, q, q[:2], 2)
    router = FusedRouter(x, q, q, 2)
    with pytest.raises(ValueError, match="cannot join"):
        router.write(x.double())
    router.write(x), router.write(x)
    with pytest.raises(ValueError, match="query has 3 rows"):
        router.write(x)
    assert "not_a" not in (kernel_support(DEVICE, torch.float64, 32, 2, 3) or "not_a"), "fp64 has to be refused"


def test_import_without_triton():
    """The module, and so the model, imports; the reason is there to be shown; an explicit request is an error."""
    code = """if True:
        import sys; sys.modules["triton"] = None
        import torch, routing_kernels as rk
        assert rk.kernel_support("cuda", torch.bfloat16, 32, 2, 3) == "triton is not installed"
        rk.route_reference([torch.randn(2, 32)], torch.randn(32), torch.ones(32), 2)
        try: rk.FusedRouter(torch.randn(2, 32), torch.randn(3, 32), torch.ones(3, 32), 2)
        except ValueError as e: assert "triton is not installed" in str(e); print("fine")"""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent, env=env)
    assert out.stdout == "fine\n", out.stderr


def test_opcheck():
    S, M, D, H = 10, 2, 16, 2
    x, u = torch.randn(M, D, device=DEVICE), torch.randn(S, D, device=DEVICE)
    forward = [t.normal_() for t in rk._forward_buffers(x, S, H)]
    back = [torch.randn(size, device=DEVICE).to(dtype) for size, dtype, *_ in rk._backward_buffers(M, D, S, H, x.dtype)]
    end = torch.full((1,), float(S), device=DEVICE)
    small = [torch.rand(2, M, device=DEVICE), u[:3].clone(), torch.randn(3, D, device=DEVICE), torch.randn(3, H, device=DEVICE), torch.randn(3, device=DEVICE)]
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    for s in (0, 8):
        torch.library.opcheck(rk.read_op, (x, u, u, u, *forward, s, H, 1e-6), test_utils=tests)
        torch.library.opcheck(rk.read_backward_op, (x, x, end, u, u, u, *forward[:3], *back[:8], back[8 + s // 8], back[9 + s // 8:], s, H), test_utils=tests)
    torch.library.opcheck(rk.split_op, (u, torch.bfloat16), test_utils=tests)
    torch.library.opcheck(rk.scratch_op, (x, [3, 4], torch.float32, 0), test_utils=("test_schema", "test_autograd_registration"))
    torch.library.opcheck(rk.delta_op, ([x, x.clone()], *small, H), test_utils=tests)
    for later in ([], [x, x.clone()]):
        torch.library.opcheck(rk.delta_backward_op, ([x.clone() for _ in range(3)], [x, x.clone()], later, *small, H), test_utils=tests)
    for start in (None, x.clone()):
        torch.library.opcheck(rk.delta_source_op, (x, start, 1e-6), test_utils=tests)
        torch.library.opcheck(rk.delta_source_backward_op, (x, small[0][0], small[0][1], x.clone(), start is not None), test_utils=tests)


# rows of more than 1,024 bytes, too: partial results of the backward lie elsewhere
@pytest.mark.parametrize("delta, D, batches", [(False, 16, (2, 1, 2)), (False, 272, (2,)), (True, 16, (2, 1, 2))])
def test_one_compiled_graph(delta, D, batches):
    """fullgraph=True, forward and backward, compiled once per shape."""
    graphs = []

    def backend(module, example):
        graphs.append(module)
        from torch._dynamo.backends.debugging import aot_eager
        return aot_eager(module, example)

    tensors = delta_inputs(5, 2, D, torch.float32) if delta else inputs(9, 2, D, 2, torch.float32)
    run = (lambda *t: delta_chain(True, t, 2, 2)) if delta else (lambda *t: chain(FusedRouter, t, 2)[0])
    compiled = torch.compile(run, backend=backend, fullgraph=True, dynamic=False)
    for batch in batches:
        t = [tensors[0][:batch].detach().requires_grad_(), *tensors[1:]]
        a, b = (torch.autograd.grad(f(*t).square().sum(), t) for f in (compiled, run))
        assert worst(a, [x.double() for x in b]) < 1e-5
    assert len(graphs) == len(set(batches)), f"{len(graphs)} graphs for {len(set(batches))} shapes"


@pytest.mark.parametrize("delta", [False, True])
def test_compiled_in_pieces(delta):
    """As DDP's buckets or a print in a sublayer cut a model. Delta routing does not mind; full routing, whose sources lie in one buffer, says so."""
    x, query, key_norm, *weights = tensors = delta_inputs(6, 2, 16, torch.float32) if delta else inputs(7, 2, 16, 2, torch.float32)

    def run(compiler):
        router, sublayers = (FusedDeltaRouter(x, query, key_norm, *weights[:2], 2, 2), weights[2:]) if delta else (FusedRouter(x, query, key_norm, 2), weights)

        def piece(h, *weights):
            for w in weights:
                router.write(torch.tanh(h @ w))
                h = router.read() if router.site < len(query) else router.output()
            return h

        h = router.read()
        for at in (0, 3):
            h = compiler(piece)(h, *sublayers[at : at + 3])
        return torch.autograd.grad(h.square().sum(), tensors)

    compiler = lambda f: torch.compile(f, backend="aot_eager", dynamic=False)
    if delta:
        assert worst(run(compiler), [g.double() for g in run(lambda f: f)]) < 1e-5
    else:
        with pytest.raises(RuntimeError, match="cut into several compiled graphs"):
            run(compiler)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiled_hi_and_lo(dtype):
    """The compiler keeps more digits than a cast does; here the digits that the cast drops are wanted."""
    x, query, key_norm = torch.zeros(2, 16, dtype=dtype, device=DEVICE), torch.randn(3, 16, device=DEVICE), torch.ones(3, 16, device=DEVICE)
    hi, lo = torch.compile(lambda *t: [*FusedRouter(*t, 2).u_hi_lo], fullgraph=True)(x, query, key_norm)
    assert torch.equal(hi, query.to(dtype))
    assert (hi.double() + lo.double() - query.double()).abs().max() < 4 * torch.finfo(dtype).eps ** 2


def test_compiled_backward_makes_each_buffer_once():
    """Not as zeros, and not one that is copied for another: the compiler has to see what eager torch does."""
    from functorch.compile import nop
    from torch._dynamo.backends.common import aot_autograd
    nodes = []

    def record(module, example):
        nodes.extend(module.graph.nodes)
        return nop(module, example)

    tensors = inputs(9, 2, 16, 2, torch.float32)
    compiled = torch.compile(lambda *t: chain(FusedRouter, t, 2)[0], backend=aot_autograd(fw_compiler=nop, bw_compiler=record), fullgraph=True, dynamic=False)
    compiled(*tensors).square().sum().backward()
    made = [n.args[1] for n in nodes if n.target is torch.ops.depth_routing.scratch.default]
    assert sorted(map(list, made)) == sorted(list(size) for size, *_ in rk._backward_buffers(2, 16, 9, 2, torch.float32))
    assert not [n for n in nodes if n.target is torch.ops.aten.full.default and list(n.args[0]) in made]


# ---------------------------------------------------------------------------------------------------------------------------------------------
# Delta routing.

def delta_inputs(S, M, D, dtype, gate=1.0):
    """As `inputs`, and null sources and gates. The sublayers' weights have norm 1, not 2: a chain of 18 sites with norm 2 makes 3 to 15 last bits of a
    gradient out of one last bit of a mix (with norm 1: 1 to 3), and a GPU's exp is good to two; a test of such a chain tests luck."""
    rounded, wanted = dtype if isinstance(dtype, tuple) else (dtype, dtype)
    g = torch.Generator().manual_seed(0)
    leaf = lambda *shape, scale=1.0, shift=0.0: (torch.randn(*shape, generator=g) * scale + shift).to(rounded).to(DEVICE, wanted).requires_grad_()
    return [leaf(M, D), leaf(S, D, scale=D**-0.5), leaf(S, D, scale=0.2, shift=1.0), leaf(S, D, scale=0.5), leaf(S, scale=gate), *(leaf(D, D, scale=D**-0.5 / 2) for _ in range(S))]


def delta_chain(fused, tensors, H, block, checkpointed=False):
    x, query, key_norm, null, gate, *weights = tensors
    f = lambda h, w: torch.tanh(h @ w)
    run = (lambda *a: torch.utils.checkpoint.checkpoint(f, *a, use_reentrant=False)) if checkpointed else f
    if fused:
        router = FusedDeltaRouter(x, query, key_norm, null, gate, H, block)
        for w in weights:
            router.write(run(router.read(), w))
        return router.output()
    start, sources = x, [x]
    for s, w in enumerate(weights):
        x_s = x + gate[s] * route_reference([null[s].expand_as(x), *sources], query[s], key_norm[s], H)[0]
        x = x + run(x_s, w)
        if (s + 1) % block == 0:
            sources, start = [*sources, x - start], x
    return x


@pytest.mark.parametrize("shape", [(4, 2, 3, 32, 2), (10, 4, 2, 40, 1), (18, 9, 2, 32, 2), (6, 1, 1, 96, 3)] + [(64, 8, 33, 1024, 8), (8, 2, 5, 4096, 8)] * GPU, ids=str)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_delta_fp32(shape, checkpointed):
    S, block, M, D, H = shape
    grads = []
    for fused, dtype in ((True, torch.float32), (False, torch.float32), (False, (torch.float32, torch.float64))):
        tensors = delta_inputs(S, M, D, dtype)
        grads.append(torch.autograd.grad(delta_chain(fused, tensors, H, block, checkpointed).square().sum(), tensors))
    fused, reference, truth = grads
    assert worst(fused, truth) <= max(2.5e-6, 2 * worst(reference, truth))


def test_delta_with_closed_gates_changes_nothing():
    tensors = delta_inputs(6, 2, 32, torch.float32, gate=0.0)
    closed = delta_chain(True, tensors, 2, 2)
    x = tensors[0]
    for w in tensors[5:]:
        x = x + torch.tanh(x @ w)
    assert torch.equal(closed, x)
    grads = torch.autograd.grad(closed.sum(), tensors)
    assert grads[4].abs().min() > 0, "gates have to learn from the first step on"
    with pytest.raises(ValueError, match="more than 16 blocks"):
        FusedDeltaRouter(tensors[0], *[t[:1].expand(17, *t.shape[1:]) for t in tensors[1:5]], 2, 1)


# ---------------------------------------------------------------------------------------------------------------------------------------------
# Compilation for GPUs that are not there, with the launch configurations that would be used.

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
KERNELS = ["forward_inter", "forward_intra", "backward_inter", "backward_intra", "backward_query", "delta_forward", "delta_backward", "delta_source",
           "delta_source_backward"]


class Recorder:
    """Stands in for a kernel: notes what it would be compiled for, and launches nothing."""

    def __init__(self, kernel, seen):
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid):
        def launch(*args, num_warps, num_stages, **constants):
            kind = lambda x: tuple(map(kind, x)) if isinstance(x, tuple) else TYPES[x.dtype] if torch.is_tensor(x) else "fp32" if isinstance(x, float) else "i32"
            signature = {**{name: kind(x) for name, x in zip(self.kernel.arg_names, args)}, **dict.fromkeys(constants, "constexpr")}
            self.seen[str((self.kernel.arg_names, signature, constants, num_warps, num_stages))] = self.kernel, signature, constants, dict(num_warps=num_warps, num_stages=num_stages)
        return launch


def launches(D, H, dtype, S=10, M=64):
    """Every distinct launch of a chain and of a delta block: (kernel, signature, constants, options)."""
    seen, kernels = {}, {name: getattr(rk, name) for name in KERNELS}
    try:
        for name, kernel in kernels.items():
            setattr(rk, name, Recorder(kernel, seen))
        x, u, end = torch.zeros(M, D, dtype=dtype), torch.zeros(S, D), torch.zeros(1)
        u_hi, u_lo = rk.split_op(u, dtype)
        forward = rk._forward_buffers(x, S, H)
        back = [torch.zeros(size, dtype=dtype) for size, dtype, *_ in rk._backward_buffers(M, D, S, H, dtype)]
        for s in range(S):
            rk.read_op(x, u, u_hi, u_lo, *forward, s, H, 1e-6)
            rk.read_backward_op(x, x, end, u, u_hi, u_lo, *forward[:3], *back[:8], back[8 + s // 8], back[9 + s // 8:], s, H)
        small = torch.zeros(3, M), torch.zeros(8, D), torch.zeros(8, D), torch.zeros(8, H), torch.zeros(8)
        sources = [x.clone() for _ in range(3)]
        rk.delta_op(sources, *small, H)
        rk.delta_backward_op([x.clone() for _ in range(8)], sources, sources, *small, H)
        for start in (None, x):
            rk.delta_source_op(x, start, 1e-6)
            rk.delta_source_backward_op(x, small[0][0], small[0][0], x, start is not None)
    finally:
        for name, kernel in kernels.items():
            setattr(rk, name, kernel)
    return list(seen.values())


def compile_all(D, H, dtype, capability):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    for kernel, signature, constants, options in launches(D, H, dtype):
        places = [(i,) if isinstance(t, str) else (i, e) for i, t in enumerate(signature.values()) if t[0][0] == "*" for e in range(1 if isinstance(t, str) else len(t))]
        aligned = {place: [["tt.divisibility", 16]] for place in places}
        compiled = triton.compile(ASTSource(kernel, signature, constants, aligned), target=GPUTarget("cuda", capability, 32), options=options)
        told = rk._shared_memory(D, H, dtype, 3 if kernel.fn.__name__.startswith("delta") else 0)
        assert compiled.metadata.shared <= told, f"{kernel.fn.__name__} wants {compiled.metadata.shared} bytes of shared memory, kernel_support thinks of {told}"


@pytest.mark.parametrize("case", [(512, 8, "float16", 80), (1280, 1, "bfloat16", 90), (1280, 8, "bfloat16", 100), (640, 4, "float32", 89)], ids=str)
def test_compiles_without_a_gpu(case):
    D, H, dtype, capability = case
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    code = f"import test_kernels as t; t.rk._on = lambda x: t.rk.nullcontext(); t.compile_all({D}, {H}, t.torch.{dtype}, {capability})"
    # a process of its own, since triton is in this one as an interpreter
    out = subprocess.run([sys.executable, "-c", f"import os, torch; torch.cuda.is_available = lambda: True; {code}"], capture_output=True, text=True, cwd=Path(__file__).parent, env=env)
    assert out.returncode == 0, out.stderr[-2000:]


# ---------------------------------------------------------------------------------------------------------------------------------------------
# GPU only.

@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(73, 33, 1280, 8), (49, 65, 1024, 8), (49, 17, 1024, 16), (25, 64, 512, 8), (25, 64, 512, 16), (49, 17, 1280, 1), (49, 17, 1280, 4), (49, 17, 1280, 16)], ids=str)
def test_16_bit_beats_eager(shape, dtype):
    fused, eager, rounded, same = errors(*shape, dtype)
    assert same, "two runs differ"
    extra = 1.01 if dtype == torch.bfloat16 else 1.25  # float16's partial results of older groups are rounded as its reads are
    assert all(a <= max(0.6 * b, extra * c) for a, b, c in zip(fused, eager, rounded)), (fused, eager, rounded)


def delta_errors(N, J, M, D, H, dtype):
    """Relative error (norm) against fp64 of a block's [mixes, source, query, norm, null, gate gradients]: fused, eager; and whether two runs agree.
    The stream is left out: its rounding is the baseline's own."""
    g = torch.Generator().manual_seed(0)
    rand = lambda *shape, scale=1.0, shift=0.0: (torch.randn(*shape, generator=g) * scale + shift).to(dtype)
    data = [rand(N, M, D), rand(J, D, scale=(H / D) ** 0.5), rand(J, D, scale=0.2, shift=1.0), rand(J, D, scale=0.5), rand(J)]
    upstream = rand(J, M, D).to(DEVICE)

    def run(kind, wanted):
        v, query, key_norm, null, gate = leaves = [t.to(DEVICE, wanted).requires_grad_() for t in data]
        sources = v.unbind(0)
        if kind == "fused":
            u, n = query.float() * key_norm.float(), null.float()
            logit = (u * n * (n.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).view(J, H, -1).sum(-1)
            made = [rk._Source(x, x.new_zeros(x.shape), 1e-6) for x in sources]
            mixes = rk._Delta(torch.stack([rstd for _, rstd, _ in made]), u, n, logit, gate.float(), H, N, *(x for x, _, _ in made), *(link for *_, link in made))[:J]
        elif kind == "truth":
            mixes = [gate[j] * route_reference([null[j].expand_as(sources[0]), *sources], query[j], key_norm[j], H)[0] for j in range(J)]
        else:
            routers = [ReferenceRouter(null[j].expand_as(sources[0]), query[j].expand(N + 1, -1), key_norm[j].expand(N + 1, -1), H, eager=True) for j in range(J)]
            for router in routers:
                router.sources += sources
            mixes = [gate[j] * router.read() for j, router in enumerate(routers)]
        return [torch.stack(list(mixes)), *torch.autograd.grad(mixes, leaves, list(upstream.to(wanted)))]

    fused, again, truth, eager = run("fused", dtype), run("fused", dtype), run("truth", torch.float64), run("eager", dtype)
    relative = lambda a: [((x.double() - y).norm() / y.norm()).item() for x, y in zip(a, truth)]
    return relative(fused), relative(eager), all(torch.equal(a, b) for a, b in zip(fused, again))


def test_delta_block_fp32():
    fused, eager, same = delta_errors(3, 5, 3, 32, 2, torch.float32)
    assert same and all(a <= max(1e-6, 2 * b) for a, b in zip(fused, eager)), (fused, eager)


@gpu
@pytest.mark.parametrize("shape", [(1, 8, 33, 4096, 8), (8, 8, 33, 4096, 8), (9, 3, 17, 1280, 8), (4, 8, 65, 1024, 1)], ids=str)
def test_delta_16_bit_beats_eager(shape):
    fused, eager, same = delta_errors(*shape, torch.bfloat16)
    assert same and all(a <= 0.6 * b for a, b in zip(fused, eager)), (fused, eager)


@gpu
@pytest.mark.parametrize("scales", EXTREMES[:4], ids=str)
def test_16_bit_extremes(scales):
    fused, eager, _, same = errors(25, 33, 512, 8, torch.bfloat16, **scales)
    assert same and all(a <= b for a, b in zip(fused, eager)), (fused, eager)


@gpu
def test_more_than_2_to_31_elements():
    """V has 2.2e9 elements; a few tokens at the far end are checked."""
    S, D, H = 33, 1024, 8
    M = 2**31 // (S * D) + 1024
    query = torch.randn(S, D, device=DEVICE) / 8
    results = []
    for tokens in (slice(0, M), slice(M - 8, M)):
        x = torch.empty(M, D, device=DEVICE, dtype=torch.bfloat16).normal_(generator=torch.Generator(DEVICE).manual_seed(0))[tokens].requires_grad_()
        router = FusedRouter(x, query, torch.ones_like(query), H)
        for _ in range(S - 1):
            router.write(router.read() * 1.01)
        out = router.read()
        results.append((out[-8:].detach(), torch.autograd.grad(out[-8:].float().square().sum(), x)[0][-8:]))
    assert all(torch.equal(a, b) for a, b in zip(*results))


@gpu
def test_other_device_than_the_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors = [t.detach().to("cuda:1").requires_grad_() for t in inputs(10, 3, 32, 2, torch.float32)]
    here = gradients(FusedRouter, inputs(10, 3, 32, 2, torch.float32), 2)
    assert all(torch.equal(a.to(b), b) for a, b in zip(gradients(FusedRouter, tensors, 2), here))


if __name__ == "__main__":
    print(f"relative error against fp64, fused (eager) on {torch.cuda.get_device_name() if GPU else 'the CPU, through Triton interpreter'}")
    print(f"{'':44s}{'reads':>20s}{'source grads':>20s}{'query grad':>20s}{'norm grad':>20s}  two runs")
    cases = [(25, 64, 512, 8), (49, 64, 1024, 8), (73, 64, 1280, 1), (73, 64, 1280, 4), (73, 64, 1280, 8), (73, 64, 1280, 16)] if GPU else [(9, 3, 32, 2), (18, 2, 80, 1)]
    for dtype in [torch.bfloat16, torch.float16, torch.float32] if GPU else [torch.float32]:
        for case in cases:
            fused, eager, _, same = errors(*case, dtype)
            cells = "".join(f"{f'{a:.1e} ({b:.1e})':>20s}" for a, b in zip(fused, eager))
            print(f"{str(dtype)[6:]:10s} S={case[0]:<3d} M={case[1]:<3d} D={case[2]:<5d} H={case[3]:<9d}{cells}  {'equal' if same else 'DIFFER'}", flush=True)
