"""A Qwen3-style Transformer whose sublayers read and write a depth memory, and the residual methods, each
such a memory.

    from model import GPT, GPTConfig
    model = GPT(GPTConfig(vocab_size=320, residual="mhar", route_heads=8))
    loss, _ = model(idx, targets)                     # nats per token; model(idx) gives the logits

Shape letters, everywhere in this repository: B batch, T time, M = B*T tokens, D width (n_embd), H routing
heads, K = D // H, S depth sources and sites (2 * n_layer + 1), L layers, n streams of hyper-connections, V
vocabulary rows.
"""

import math
import re
from dataclasses import dataclass
from functools import partial, reduce
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

import routing_kernels
from routing_kernels import route_reference


# ----------------------------------------------------------------------------------------------------------
# The residual methods. Each is a module with its parameters; start(x) opens a depth memory for one pass:
#     memory = residual.start(x)        x [B, T, D], the token embedding
#     h = memory.read()                 what the next sublayer reads [B, T, D]
#     memory.write(f)                   that sublayer's raw output [B, T, D]
#     h = memory.output()               what the final norm reads [B, T, D], like read() in the dtype of x
# Parameters of all sites are stacked, [S, D]: one optimizer entry each, with a gradient at every step.
# ----------------------------------------------------------------------------------------------------------
class Additive(nn.Module):
    """The standard residual stream: x += f. Also what every other method falls back on."""

    routes = False  # True: it mixes N sources, and start(x, record=[]) records the weights [N, B, T, H], fp32
    never_decay = ()  # names of its parameters that weight decay spares
    compiled = ()  # names of its methods that are worth a compiled graph of their own, see compile_model

    def __init__(self, config):
        super().__init__()
        self.kernel = "torch"  # what runs the routing, see choose_kernel

    def init_weights(self, config, generator):
        """Fills the parameters; `generator` is the method's own, the trunk's weights do not depend on it."""

    def start(self, x, record=None):
        return AdditiveMemory(x)

    def flops(self, config):
        """Multiply-adds, as 2 FLOPs each, that the method adds to a token's forward pass."""
        return 0

    @staticmethod
    def kernel_obstacle(config, device, dtype):
        """Why the fused kernels cannot run this method there, in one line; None where they can."""
        return f"residual={config.residual} has no fused kernels"


class AdditiveMemory:
    def __init__(self, x):
        self.x = x

    def read(self):
        return self.x

    def write(self, f):
        self.x = self.x + f

    def output(self):
        return self.x


class HyperConnections(Additive):
    """n parallel streams, mixed around every sublayer (Zhu et al. 2024, arXiv 2409.19606, section 2); static.

    A sublayer reads h = sum_j c[0, j] x_j of streams x_1..x_n, writes x_i <- sum_j c[i, j] x_j + c[n+1, i] f;
    the output is their sum. Coefficients c are fp32. Start: c[0] one-hot (stream k mod n at sublayer k), the
    identity, and ones: every stream is the baseline's.
    """

    compiled = ("connect", "spread", "collect")
    never_decay = ("static",)  # decay would pull the identity to zero

    def __init__(self, config):
        super().__init__(config)
        self.n, self.sub, self.eps = config.hc_streams, 2 * config.n_layer, config.norm_eps
        self.static = nn.Parameter(torch.empty(self.sub, self.n + 2, self.n))  # c of every sublayer

    def identity(self):
        sub, n = self.sub, self.n
        read, mix = F.one_hot(torch.arange(sub) % n, n), torch.eye(n)
        return torch.cat([read[:, None].float(), mix.expand(sub, n, n), torch.ones(sub, 1, n)], 1)

    def init_weights(self, config, generator):
        assign(self.static, self.identity())

    def per_site(self, dtype):
        """What `coefficients` takes, for all sublayers: tensors [sub, ...]."""
        return (self.static.float(),)

    def coefficients(self, streams, static):
        """c [n + 2, n, B, T, 1]. A token's are its own even if all are equal: their gradients are then sums
        over D, which the compiler takes in the pass that it makes over the streams anyway."""
        return static[..., None, None, None].expand(-1, -1, *streams[0].shape[:2], 1)

    def start(self, x, record=None):
        return HyperMemory(self, x, list(zip(*(p.unbind(0) for p in self.per_site(x.dtype)))))

    # Streams are n tensors [B, T, D]. Stacked in one, they would cost a kernel more and fp32 copies.
    def connect(self, streams, *site):
        """-> what a sublayer reads [B, T, D], and c[1:], which links the streams to those after it."""
        c = self.coefficients(streams, *site)
        return weighted_sum(c[0].unbind(0), streams).to(streams[0].dtype), c[1:]

    def spread(self, streams, f, links, *site):
        """-> the streams after a sublayer wrote f, and `connect` of them to the next: one pass for both."""
        *mix, write = links.unbind(0)
        old = [*streams, f]
        new = [weighted_sum([*m.unbind(0), w], old).to(f.dtype) for m, w in zip(mix, write.unbind(0))]
        return new, *HyperConnections.connect(self, new, *site)

    def collect(self, streams, f, links):
        """-> the sum of the streams after the last sublayer wrote f."""
        *mix, write = links.unbind(0)
        weights = *total(mix).unbind(0), total(write.unbind(0))
        return weighted_sum(weights, [*streams, f]).to(f.dtype)

    def flops(self, config):
        return 2 * self.sub * config.n_embd * self.n * (self.n + 2)


class DynamicConnections(HyperConnections):
    """DHC: each token adds s * tanh(RMSNorm(x_j) W) to the coefficients of x_j. Start: W = 0, s = 0.01."""

    def __init__(self, config):
        super().__init__(config)
        self.norm_weight = nn.Parameter(torch.empty(self.sub, config.n_embd))
        self.proj = nn.Parameter(torch.empty(self.sub, self.n + 2, config.n_embd))  # W, transposed
        self.scale = nn.Parameter(torch.empty(self.sub, 2))  # s of reads and of the mix; of writes

    def init_weights(self, config, generator):
        super().init_weights(config, generator)
        self.norm_weight.fill_(1.0)
        self.proj.zero_()
        self.scale.fill_(0.01)

    def per_site(self, dtype):
        proj = self.proj.float() * self.norm_weight[:, None].float()
        alpha, beta = self.scale.float().unbind(1)
        scale = torch.stack([alpha] * (self.n + 1) + [beta], 1)  # [sub, n + 2]
        return *super().per_site(dtype), proj.to(dtype), scale[..., None].expand(-1, -1, self.n)

    def coefficients(self, streams, static, proj, scale):
        rstd = [(mean_square(x) + self.eps).rsqrt() for x in streams]  # [B, T]
        dynamic = torch.stack([torch.tanh(r * project(x, proj)) for r, x in zip(rstd, streams)], 1)
        return (static[..., None, None] + scale[..., None, None] * dynamic).unsqueeze(-1)

    def flops(self, config):
        return 2 * super().flops(config)


class PaperConnections(HyperConnections):
    """The MHAR paper's column, by its released code: static, reads are softmax(c[0]), the output is the
    streams' mean, all of it decays. Start: c[0] = 0, the identity and (1, 0, .., 0), with noise of 0.02."""

    never_decay = ()

    def init_weights(self, config, generator):
        start = self.identity()
        start[:, 0] = 0.0
        start[:, -1, 1:] = 0.0
        assign(self.static, start + torch.empty(start.shape).normal_(0, 0.02, generator=generator))

    def per_site(self, dtype):
        static = self.static.float()
        return (torch.cat([static[:, :1].softmax(-1), static[:, 1:]], 1),)

    def collect(self, streams, f, links):
        return super().collect(streams, f, links) / self.n


class ManifoldConnections(HyperConnections):
    """mHC (arXiv 2512.24880, section 4): z = alpha * (RMSNorm(x_1..x_n) phi) + b, of all streams of a token;
    reads are sigmoid(z), writes 2 sigmoid(z), and the mix is Sinkhorn(z), doubly stochastic.

    phi includes the norm's weight. Start: alpha = 0.01 is published; phi = 0, b = 3 for ones of the identity,
    -3 for its zeros and 0 for writes are ours: every stream is the baseline's. Nearer to the identity sigmoid
    and Sinkhorn are flat and nothing would learn; with equal b the streams would stay equal.
    """

    def __init__(self, config):
        super().__init__(config)
        n = self.n
        self.proj = nn.Parameter(torch.empty(self.sub, (n + 2) * n, n * config.n_embd))  # phi, transposed
        self.scale = nn.Parameter(torch.empty(self.sub, 3))  # alpha of reads, mix and writes

    def init_weights(self, config, generator):
        start = 6 * self.identity() - 3
        start[:, -1] = 0.0
        assign(self.static, start)
        self.proj.zero_()
        self.scale.fill_(0.01)

    def per_site(self, dtype):
        read, mix, write = self.scale.float().unbind(1)
        scale = torch.stack([read, *[mix] * self.n, write], 1)  # [sub, n + 2]
        return *super().per_site(dtype), self.proj.to(dtype), scale[..., None].expand(-1, -1, self.n)

    def coefficients(self, streams, static, proj, scale):
        n = self.n
        rstd = (total(mean_square(x) for x in streams) / n + self.eps).rsqrt()  # [B, T]
        z = rstd * total(project(x, phi) for x, phi in zip(streams, proj.chunk(n, 1)))
        z = static[..., None, None] + scale[..., None, None] * z.unflatten(0, (n + 2, n))
        largest = reduce(torch.maximum, z[1:-1].unbind(0))  # of a column: Sinkhorn's first step undoes it
        mix = (z[1:-1] - largest.detach()).exp() + 1e-9  # or a row could underflow
        for _ in range(4):
            mix = sinkhorn(mix)  # 20 steps in all
        return torch.cat([z[:1].sigmoid(), mix, 2 * z[-1:].sigmoid()]).unsqueeze(-1)

    def flops(self, config):
        return (1 + self.n) * super().flops(config)


@torch.compiler.nested_compile_region  # compiled once for all of its calls
def sinkhorn(m, steps=5):
    """Scales columns, then rows of m [n, n, ...] to sums of 1 (eq. 9). An entry is a tensor of its own, which
    the compiler keeps in registers."""
    m = [row.unbind(0) for row in m.unbind(0)]
    for _ in range(steps):
        scales = [1 / total(column) for column in zip(*m)]
        m = [[entry * scale for entry, scale in zip(row, scales)] for row in m]
        scales = [1 / total(row) for row in m]
        m = [[entry * scale for entry in row] for row, scale in zip(m, scales)]
    return torch.stack([torch.stack(row) for row in m])


def total(terms):
    """Their sum, written out: torch 2.11's compiler fails on reductions over four streams."""
    return reduce(torch.add, terms)


def weighted_sum(weights, tensors):
    return total(w * x.float() for w, x in zip(weights, tensors))


def mean_square(x):
    return x.float().square().mean(-1)


def project(x, weight):
    """x [B, T, D], weight [c, D] -> [c, B, T] in fp32. Tokens come last: rows of c would be misaligned."""
    return (weight @ x.flatten(0, 1).mT).float().unflatten(1, x.shape[:2])


class HyperMemory:
    def __init__(self, residual, x, sites):
        self.residual, self.sites, self.site = residual, sites, 0
        self.streams = [x, *(x.clone() for _ in range(residual.n - 1))]  # one tensor n times: another graph
        self.f = self.links = self.h = None

    def read(self):
        if self.h is None:
            residual, site = self.residual, self.sites[self.site]
            if self.site == 0:
                self.h, self.links = residual.connect(self.streams, *site)
            else:
                self.streams, self.h, self.links = residual.spread(self.streams, self.f, self.links, *site)
        return self.h

    def write(self, f):
        self.read()
        self.f, self.h, self.site = f, None, self.site + 1

    def output(self):
        return self.residual.collect(self.streams, self.f, self.links)


HC_FORMS = {"static": HyperConnections, "dynamic": DynamicConnections, "paper": PaperConnections,
            "manifold": ManifoldConnections}  # fmt: skip


class Routed(Additive):
    """Attention residuals (H = 1), and with heads: a softmax mixture of all earlier outputs (eqs. 2 and 3).

    Site s, counted by the writes so far, reads sources 0..s: the embedding and the raw sublayer outputs. The
    output is routed too, by a query of its own. With zero queries every read is the mean of its sources.
    """

    routes = True

    def __init__(self, config):
        super().__init__(config)
        self.n_heads, self.eps = config.route_heads, config.norm_eps
        self.query = nn.Parameter(torch.empty(config.sites, config.n_embd))  # [S, D]
        self.key_norm = nn.Parameter(torch.empty(config.sites, config.n_embd))  # [S, D]

    def init_weights(self, config, generator):
        init_query(self.query, config, generator)
        self.key_norm.fill_(1.0)

    def queries(self):
        return self.query.unbind(0)

    def start(self, x, record=None):
        if self.kernel == "triton" and record is None:  # the kernels never form the weights
            return routing_kernels.FusedRouter(x, self.query, self.key_norm, self.n_heads, self.eps)
        return RoutedMemory(self, x, record)

    def mix(self, sources, query, key_norm):
        return route_reference(sources, query, key_norm, self.n_heads, self.eps)

    def flops(self, config):
        pairs = config.sites * (config.sites + 1) // 2  # of a source and a site: a dot and a mix each
        return pairs * 4 * config.n_embd

    @staticmethod
    def kernel_obstacle(config, device, dtype):
        return routing_kernels.kernel_support(device, dtype, config.n_embd, config.route_heads, config.sites)


class RoutedMemory:
    def __init__(self, residual, x, record):
        self.residual, self.sources, self.site, self.record = residual, [x], 0, record
        self.parameters = list(zip(residual.queries(), residual.key_norm.unbind(0)))

    def read(self):
        h, alpha = self.residual.mix(self.sources, *self.parameters[self.site])
        if self.record is not None:
            self.record.append(alpha)
        return h

    def write(self, f):
        self.sources.append(f)
        self.site += 1

    def output(self):
        return self.read()


class BlockRouted(Routed):
    """Block attention residuals (arXiv 2603.15031, eq. 6; theirs have one head). Sources: the embedding, the
    sums of finished blocks of sublayers and, past a block's first sublayer, its sum so far."""

    compiled = ("mix",)  # a graph for each number of sources, depth_blocks + 1 in all
    kernel_obstacle = staticmethod(Additive.kernel_obstacle)

    def __init__(self, config):
        super().__init__(config)
        self.block_sites = math.ceil(2 * config.n_layer / config.depth_blocks)

    def start(self, x, record=None):
        return BlockMemory(self, x, record)

    def flops(self, config):
        sources = sum(1 + math.ceil(site / self.block_sites) for site in range(config.sites))
        return sources * 4 * config.n_embd


class BlockMemory(RoutedMemory):
    def write(self, f):
        if self.site % self.residual.block_sites == 0:
            self.sources.append(f)
        else:
            self.sources = [*self.sources[:-1], self.sources[-1] + f]
        self.site += 1


class HeadAligned(Routed):
    """MHAR-HW (Table 7): each KV head's group of attention heads has a query over the whole width (H = 1) and
    projects what it reads to its own q, k and v. MLP sites and output are MHAR's, in Table 7 with as many
    heads as there are groups. The groups share the norms of keys and of the sublayer (the authors' code)."""

    def __init__(self, config):
        super().__init__(config)
        L, D = config.n_layer, config.n_embd
        self.query = nn.Parameter(torch.empty(L + 1, D))  # of the MLPs and the output
        self.group_query = nn.Parameter(torch.empty(L, config.n_kv_head, D))

    def init_weights(self, config, generator):
        super().init_weights(config, generator)
        init_query(self.group_query, config, generator)

    def queries(self):
        """Of every site: [n_kv_head, D] for attention, [D] for others."""
        *mlp, output = self.query.unbind(0)
        return [query for pair in zip(self.group_query.unbind(0), mlp) for query in pair] + [output]

    def start(self, x, record=None):
        fused = self.kernel == "triton" and record is None
        return FusedGroups(self, x) if fused else RoutedMemory(self, x, record)

    def mix(self, sources, query, key_norm):
        if query.dim() == 1:
            return super().mix(sources, query, key_norm)
        mixes, alphas = zip(*(route_reference(sources, q, key_norm, 1, self.eps) for q in query.unbind(0)))
        return torch.stack(mixes), torch.cat(alphas, -1)  # [groups, B, T, D], [N, B, T, groups]

    def flops(self, config):
        attention = config.n_layer**2  # pairs of a source and an attention site
        return super().flops(config) + (config.n_kv_head - 1) * attention * 4 * config.n_embd

    @staticmethod
    def kernel_obstacle(config, device, dtype):
        support = partial(routing_kernels.kernel_support, device, dtype, config.n_embd)
        return support(1, config.sites) or support(config.route_heads, config.sites)


class FusedGroups:
    """The fused kernels for mhar_hw: a chain for each group and one for the other sites. All chains have all
    sources and sites; where a chain does not serve a site, its query is zero and the read is not used."""

    def __init__(self, residual, x):
        self.queries, self.site = residual.queries(), 0
        zeros = torch.zeros_like(self.queries[0])  # [groups, D]
        rows = [torch.cat([q, zeros[:1]] if q.dim() == 2 else [zeros, q[None]]) for q in self.queries]
        heads = [1] * len(zeros) + [residual.n_heads]
        router = lambda query, H: routing_kernels.FusedRouter(x, query, residual.key_norm, H, residual.eps)
        self.routers = [router(query, H) for query, H in zip(torch.stack(rows, 1), heads)]

    def read(self):
        *groups, others = self.routers
        grouped = self.queries[self.site].dim() == 2
        return torch.stack([group.read() for group in groups]) if grouped else others.read()

    def write(self, f):
        for router in self.routers:
            router.write(f)
        self.site += 1

    def output(self):
        return self.read()


class Delta(Additive):
    """Delta attention residuals: an additive stream, and a gated mixture of what whole blocks added.

    Layers are cut into blocks. A site of block b reads a learned null source, the embedding and the deltas
    (stream at block end minus stream at block start) of blocks 0..b-1:  h = x + gate * mix. Gates start at
    zero, so a pretrained model is unchanged. delta_recursive is the publicly released form instead: source k
    is (stream at the start of block k) - (source k-1), and it joins the list only after the block's first
    attention site, which still reads the older list (arXiv 2605.18855 and its code).
    """

    routes = True

    def __init__(self, config):
        super().__init__(config)
        self.n_heads, self.eps, self.recursive = config.route_heads, config.norm_eps, config.delta_recursive
        self.block_layers = math.ceil(config.n_layer / config.delta_blocks)
        sites, D = 2 * config.n_layer, config.n_embd
        self.query = nn.Parameter(torch.empty(sites, D))
        self.key_norm = nn.Parameter(torch.empty(sites, D))
        self.null_source = nn.Parameter(torch.empty(sites, D))
        self.gate = nn.Parameter(torch.empty(sites))

    def init_weights(self, config, generator):
        init_query(self.query, config, generator)
        self.key_norm.fill_(1.0)
        self.null_source.zero_()
        self.gate.zero_()

    def per_site(self):
        return self.query, self.key_norm, self.null_source, self.gate

    def start(self, x, record=None):
        if self.kernel == "triton" and record is None:
            shape = self.n_heads, 2 * self.block_layers, self.eps
            return routing_kernels.FusedDeltaRouter(x, *self.per_site(), *shape)
        return DeltaMemory(self, x, record)

    def flops(self, config):
        pairs = sum(2 + layer // self.block_layers for layer in range(config.n_layer)) * 2
        return pairs * 4 * config.n_embd

    @staticmethod
    def kernel_obstacle(config, device, dtype):
        if config.delta_recursive:
            return "the released recursive form of delta has no fused kernels"
        shape = config.n_embd, config.route_heads, config.sites, config.delta_blocks
        return routing_kernels.kernel_support(device, dtype, *shape)


class DeltaMemory:
    def __init__(self, residual, x, record):
        self.residual, self.record, self.site, self.x, self.block_start = residual, record, 0, x, x
        self.sources = [] if residual.recursive else [x]
        self.parameters = list(zip(*(p.unbind(0) for p in residual.per_site())))

    def read(self):
        r, x = self.residual, self.x
        query, key_norm, null, gate = self.parameters[self.site]
        sources = [null.to(x.dtype).expand_as(x), *self.sources]
        mix, alpha = route_reference(sources, query, key_norm, r.n_heads, r.eps)
        if self.record is not None:
            self.record.append(alpha)
        return x + gate.to(x.dtype) * mix

    def write(self, f):
        before, self.x = self.x, self.x + f
        self.site += 1
        site_in_block = self.site % (2 * self.residual.block_layers)
        if self.residual.recursive and site_in_block == 1:  # just past the attention of a block's first layer
            self.sources.append(before - self.sources[-1] if self.sources else before)
        elif not self.residual.recursive and site_in_block == 0:
            self.sources.append(self.x - self.block_start)
            self.block_start = self.x

    def output(self):
        return self.x


def init_query(query, config, generator):
    if config.route_init == "zero":
        query.zero_()
    else:
        assign(query, torch.empty(query.shape).normal_(0, 0.02, generator=generator))


RESIDUALS = {"baseline": Additive, "hc": HyperConnections, "attnres": Routed, "mhar": Routed,
             "mhar_hw": HeadAligned, "block": BlockRouted, "delta": Delta}  # fmt: skip


def residual_class(config):
    return HC_FORMS[config.hc_form] if config.residual == "hc" else RESIDUALS[config.residual]


POSITIVE = ("block_size", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd", "head_dim", "ffn_dim",
            "route_heads", "depth_blocks", "hc_streams", "delta_blocks")  # fmt: skip


@dataclass
class GPTConfig:
    block_size: int = 1024  # tokens of context
    vocab_size: int | None = None  # rows of the embedding; None takes what the dataset asks for
    n_layer: int = 12  # each layer is two sublayers, attention and MLP
    n_head: int = 8  # query heads
    n_kv_head: int = 4  # key and value heads (grouped-query attention)
    n_embd: int = 512  # width D of the stream
    head_dim: int | None = None  # width of an attention head; None: n_embd // n_head
    ffn_dim: int = 1536  # hidden width of the SwiGLU MLP
    rope_theta: float = 1e4  # base of the rotary frequencies
    rope_scaling: dict | None = None  # Llama-3 frequency scaling as config.json writes it; None: plain rotary
    norm_eps: float = 1e-6  # inside every RMSNorm, the routing keys' included
    qk_norm: bool = True  # RMSNorm over head_dim on queries and keys (Qwen3 has it, Llama has not)
    tie_embeddings: bool = True  # the output projection is the embedding
    residual: Literal[tuple(RESIDUALS)] = "mhar"  # how a sublayer reads the depth before it
    # settings of residual methods, and no others: report.py lets runs that it compares differ in these
    route_heads: int = 8  # H of mhar, mhar_hw, block and delta; attnres is mhar with one head
    depth_blocks: int = 8  # block: the sublayers are cut into this many, the last may be short
    hc_streams: int = 4  # n of the hyper-connections
    hc_form: Literal[tuple(HC_FORMS)] = "dynamic"  # Zhu's two, the MHAR paper's, and mHC (manifold)
    delta_blocks: int = 8  # delta: the layers are cut into this many blocks, the last may be short
    delta_recursive: bool = False  # the publicly released recursive difference, not true block deltas
    route_init: Literal["zero", "normal"] = "zero"  # queries: zero reads the sources' mean; N(0, 0.02)

    def __post_init__(self):
        """ValueError, in one line, for values that fit no model."""
        for name in POSITIVE:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.rope_theta <= 0 or self.norm_eps < 0:
            raise ValueError(
                f"rope_theta={self.rope_theta} must be over 0, norm_eps={self.norm_eps} 0 or more"
            )
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even; its default is n_embd // n_head")
        if self.residual == "attnres":
            self.route_heads = 1
        parts = {"n_head": "n_kv_head"} | ({"n_embd": "route_heads"} if residual_class(self).routes else {})
        for whole, part in parts.items():
            if getattr(self, whole) % getattr(self, part):
                raise ValueError(
                    f"{part}={getattr(self, part)} does not divide {whole}={getattr(self, whole)}"
                )
        if (scaling := self.rope_scaling) is not None:
            needs = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
            if scaling.get("rope_type") != "llama3" or not needs <= scaling.keys():
                raise ValueError(f"rope_scaling={scaling}: needs rope_type 'llama3' with {sorted(needs)}")

    @property
    def sites(self):
        """S sources (the embedding, 2 n_layer outputs) and S sites (each sublayer, the final norm)."""
        return 2 * self.n_layer + 1


def choose_kernel(kernel, config, device, dtype):
    """What runs the routing: kernel "auto" | "triton" | "torch" -> ("triton" | "torch", the reason in words).

    auto takes Triton on CUDA where it supports the method and its shape, and torch elsewhere. ValueError if
    triton is requested and cannot run.
    """
    obstacle = residual_class(config).kernel_obstacle(config, device, dtype)
    if kernel == "triton" and obstacle:
        raise ValueError(f"kernel=triton cannot run: {obstacle}; use kernel=auto or kernel=torch")
    if kernel == "torch":
        return "torch", "requested"
    if obstacle:
        return "torch", obstacle
    return "triton", "requested" if kernel == "triton" else "CUDA device"


# ----------------------------------------------------------------------------------------------------------
# The Transformer
# ----------------------------------------------------------------------------------------------------------
class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32 whatever the dtype of x."""

    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(width)), eps

    def forward(self, x):
        return F.rms_norm(x.float(), (x.size(-1),), self.weight.float(), self.eps).to(x.dtype)


def rope_tables(config, T, device):
    """cos and sin [T, head_dim / 2] of positions 0..T-1, fp32 whatever the model's dtype."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    freq = 1.0 / config.rope_theta ** (half / config.head_dim)
    if scaling := config.rope_scaling:  # Llama 3: long wavelengths are stretched, short ones kept
        factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * freq / (2 * math.pi)
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        freq = (1 - smooth) * freq / factor + smooth * freq
    angle = torch.arange(T, dtype=torch.float32, device=device)[:, None] * freq
    return angle.cos(), angle.sin()


def rotate(x, rope):
    """Rotary embedding of x [B, T, heads, head_dim], channels i and i + head_dim / 2 as in Llama and Qwen."""
    cos, sin = (table[:, None, :] for table in rope)  # [T, 1, head_dim / 2]
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        D, hd = config.n_embd, config.head_dim
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, hd
        self.norm = RMSNorm(D, config.norm_eps)
        self.q_proj = nn.Linear(D, config.n_head * hd, bias=False)
        self.k_proj = nn.Linear(D, config.n_kv_head * hd, bias=False)
        self.v_proj = nn.Linear(D, config.n_kv_head * hd, bias=False)
        self.o_proj = nn.Linear(config.n_head * hd, D, bias=False)
        if config.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(hd, config.norm_eps), RMSNorm(hd, config.norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def project(self, linear, x):
        """[B, T, heads, head_dim] of x [B, T, D], or of one for each KV head's group [groups, B, T, D]."""
        if x.dim() == 3:
            y = linear(x)
        else:
            weight = linear.weight.unflatten(0, (self.n_kv_head, -1))  # [groups, channels, D]
            y = torch.einsum("gbtd,gcd->btgc", x, weight).flatten(2)
        return y.unflatten(-1, (-1, self.head_dim))

    def forward(self, h, rope, cached=None):
        B, T, _ = h.shape[-3:]
        x = self.norm(h)
        q, k, v = (self.project(linear, x) for linear in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, heads, T, head_dim]
        mask = None
        if cached:  # [B, n_kv_head, length, head_dim] twice, [T], [T, length]
            past_k, past_v, positions, mask = cached
            k, v = past_k.index_copy_(2, positions, k), past_v.index_copy_(2, positions, v)
        grouped = self.n_head != self.n_kv_head
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.gate_proj = nn.Linear(config.n_embd, config.ffn_dim, bias=False)
        self.up_proj = nn.Linear(config.n_embd, config.ffn_dim, bias=False)
        self.down_proj = nn.Linear(config.ffn_dim, config.n_embd, bias=False)

    def forward(self, h):
        x = self.norm(h)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attn, self.mlp = Attention(config), MLP(config)


class KVCache:
    """Keys and values of the tokens seen, for generation: model(idx, cache=cache) continues where it stopped.

    Only attention looks back in time; a depth memory holds the current tokens alone. All shapes are fixed,
    with the position in a tensor, so that a step can be replayed as a CUDA graph. Beyond `length` tokens the
    result is undefined.
    """

    def __init__(self, config, B, length, device, dtype):
        shape = config.n_layer, B, config.n_kv_head, length, config.head_dim
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.position = torch.zeros((), dtype=torch.int64, device=device)  # tokens seen
        self.rope = rope_tables(config, length, device)

    def open(self, T):
        """The next T tokens' rotary tables, and per layer (keys, values, positions [T], mask [T, length])."""
        positions = self.position + torch.arange(T, device=self.position.device)
        mask = torch.arange(self.k.size(3), device=positions.device) <= positions[:, None]
        self.position += T
        layers = [(k, v, positions, mask) for k, v in zip(self.k, self.v)]
        return tuple(table[positions] for table in self.rope), layers


class GPT(nn.Module):
    """The Transformer. It never asks which residual method it has: it reads and writes a depth memory.

    kernel: "torch" or "triton", see choose_kernel. seed fixes the weights; the trunk's are the same for every
    method. ValueError for a config without vocab_size, and where a forward pass is longer than block_size.
    """

    def __init__(self, config, kernel="torch", seed=0):
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("vocab_size is not set: it is the dataset's, or given as --vocab_size=")
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.head = None if config.tie_embeddings else nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.residual = residual_class(config)(config)
        self.residual.kernel = kernel
        self.grad_checkpoint = False  # recompute sublayers in backward instead of keeping activations
        self.init_weights(seed)
        self.rope = rope_tables(config, config.block_size, self.embed.weight.device)

    def _apply(self, fn, recurse=True):
        """What .to(), .cuda(), .bfloat16() and to_empty() call. The rotary tables follow the weights' device
        but stay fp32, so they are no buffer; made in forward, the compiler would recompute their sines in
        every layer."""
        super()._apply(fn, recurse)
        self.rope = rope_tables(self.config, self.config.block_size, self.embed.weight.device)
        return self

    @torch.no_grad()
    def init_weights(self, seed):
        """
        embedding, every projection, head    normal, std 0.02
        every RMSNorm weight, key norms      ones
        routing queries                      zeros, or normal 0.02 (route_init)
        null sources, gates                  zeros
        hyper-connections                    near the identity, see their classes
        Drawn on the CPU, the residual method's from their own generator: one seed, one trunk, on any device.
        """
        trunk, routing = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1)
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.weight.fill_(1.0)
            elif isinstance(module, (nn.Linear, nn.Embedding)):
                assign(module.weight, torch.empty(module.weight.shape).normal_(0, 0.02, generator=trunk))
        self.residual.init_weights(self.config, routing)

    def forward(self, idx, targets=None, z_loss=0.0, record=None, cache=None):
        """idx [B, T] token ids -> logits [B, T, V] in the compute dtype; record and cache: see `features`.

        With targets [B, T] (-100 is ignored): (loss, cross_entropy), fp32, means in nats per token. loss =
        cross_entropy + z_loss * mean(logsumexp(logits)^2) is to be differentiated; the other is detached.
        """
        x = self.features(idx, record, cache)
        return self.logits(x) if targets is None else self.loss(x, targets, z_loss)

    def features(self, idx, record=None, cache=None):
        """idx [B, T] token ids -> what the final norm reads [B, T, D].

        record: a list to which every routed read appends its weights. cache: a KVCache of earlier tokens.
        """
        B, T = idx.shape
        if T > self.config.block_size:
            raise ValueError(f"{T} tokens do not fit into block_size={self.config.block_size}")
        x = self.embed(idx)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        rope, cached = tuple(table[:T] for table in self.rope), [None] * self.config.n_layer
        if cache:
            rope, cached = cache.open(T)
        run = call
        if self.grad_checkpoint and self.training:  # nothing is random: no generator state to preserve
            run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)

        memory = self.residual.start(x, record)
        for layer, past in zip(self.layers, cached):
            memory.write(run(layer.attn, memory.read(), rope, past))
            memory.write(run(layer.mlp, memory.read()))
        return memory.output()

    def logits(self, x):
        return F.linear(self.norm(x), self.embed.weight if self.head is None else self.head.weight)

    def loss(self, x, targets, z_loss):
        weight = self.embed.weight if self.head is None else self.head.weight
        return loss_head(self.norm(x), weight, targets, z_loss)

    def parameter_counts(self):
        """{"total", "routing"}: parameters of the model, and those that the residual method adds."""
        parts = {"total": self, "routing": self.residual}
        return {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()}

    def flops_per_token(self, T):
        """Training FLOPs per token at context T: 3x forward's multiply-adds (2 FLOPs each): projections,
        head, causal attention (half of T on average) and residual method; norms and softmax are left out."""
        c = self.config
        matrices = [self.embed.weight] + [p for p in self.layers.parameters() if p.dim() == 2]
        linear = sum(2 * p.numel() for p in matrices)
        attention = c.n_layer * 2 * T * c.n_head * c.head_dim
        return 3 * (linear + attention + self.residual.flops(c))


def compile_model(model, in_parts=False):
    """torch.compile -> the forward function for training: the model as one graph, or in parts, where routing
    kernels or FSDP come between them or the residual method names some. One graph each of attention, MLP and
    loss then serves all layers, and what runs between them is not traced; a deep model starts sooner."""
    compiler = partial(torch.compile, fullgraph=True, dynamic=False)
    if not (in_parts or model.residual.kernel == "triton" or model.residual.compiled):
        return compiler(model)
    torch._dynamo.config.recompile_limit = 256  # of block's mix: one for each number of sources
    parts = [(model, "loss"), *((model.residual, name) for name in model.residual.compiled)]
    parts += [(part, "forward") for layer in model.layers for part in (layer.attn, layer.mlp)]
    for module, name in parts:
        setattr(module, name, compiler(getattr(module, name)))
    return model


def call(f, *args):
    return f(*args)


def assign(parameter, value):
    """Copy a full tensor into a parameter, or this rank's part of it into a sharded one."""
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        value = distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)
    parameter.copy_(value)


class Project(torch.autograd.Function):
    """F.linear, x [M, D] and weight [V, D] -> logits [M, V], whose weight gradient stays a product of its
    own. The compiler would merge it with the embedding's at the end of the backward, and keep the logits'
    gradient, the largest tensor of a step, until then."""

    @staticmethod
    def forward(ctx, x, weight):
        logits = F.linear(x, weight)
        ctx.save_for_backward(x.to(logits.dtype), weight.to(logits.dtype))  # what autocast made of them
        return logits

    @staticmethod
    def backward(ctx, dlogits):
        x, weight = ctx.saved_tensors
        return dlogits @ weight, torch.addmm(weight, dlogits.t(), x, beta=0)  # a plain mm would be merged


def loss_head(x, weight, targets, z_loss):
    """(loss, cross_entropy) of GPT.forward from the final x [B, T, D] and the output weight [V, D]."""
    x, weight = x.flatten(0, 1), weight.to(x.dtype)
    early = len(x) >= 8 * x.size(1)  # the logits' gradient [M, V] is far larger than the weight's [V, D]
    logits = (Project.apply(x, weight) if early else F.linear(x, weight)).float()  # [M, V]
    targets = targets.flatten()
    loss = F.cross_entropy(logits, targets, ignore_index=-100)
    cross_entropy = loss.detach()
    if z_loss:
        counted = targets != -100
        loss = loss + z_loss * (logits.logsumexp(-1).pow(2) * counted).sum() / counted.sum()
    return loss, cross_entropy


PEAK_FLOPS = {  # dense bf16 FLOP/s by a word of the device's name, from data sheets; the first match counts
    "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "H800": 989e12, "GH200": 989e12, "B200": 2250e12,
    "GB200": 2500e12, "A100": 312e12, "A800": 312e12, "A40": 149.7e12, "A10": 125e12, "L40S": 362e12,
    "L4": 121e12, "4090": 165.2e12, "5090": 209.5e12, "3090": 71e12,
}  # fmt: skip


def peak_flops(device):
    """Dense bf16 peak of a device in FLOP/s, or None where unknown: better no MFU than a wrong one."""
    if torch.device(device).type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if re.search(rf"\b{key}\b", name)), None)
