"""A Qwen3-style Transformer whose sublayers read and write a depth memory, and every residual method as such a memory.

    from model import GPT, GPTConfig
    model = GPT(GPTConfig(vocab_size=320, residual="mhar", route_heads=8))
    loss = model(idx, targets)                                  # nats per token; model(idx) gives the logits

Shape letters, everywhere in this repository: B batch, T time, M = B*T tokens, D width (n_embd), H routing heads, K = D // H,
S depth sources and sites (2 * n_layer + 1), L layers, n streams of the hyper-connections, V rows of the vocabulary.
"""
import math
import re
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

import routing_kernels
from routing_kernels import route_reference


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
    residual: Literal["baseline", "hc", "attnres", "mhar", "delta"] = "mhar"  # how a sublayer reads the depth before it
    route_heads: int = 8  # H of mhar and delta; attnres is mhar with one head
    hc_streams: int = 4  # n of the hyper-connections
    hc_dynamic: bool = True  # hyper-connections: coefficients from the streams (DHC), or parameters alone (SHC)
    delta_blocks: int = 8  # delta: the layers are cut into this many blocks, the last may be short
    delta_recursive: bool = False  # delta: the publicly released difference and its late first site, instead of true block deltas
    route_init: Literal["zero", "normal"] = "zero"  # routing queries at start: zero reads the mean of the sources; normal is N(0, 0.02)

    def __post_init__(self):
        for name in ("block_size", "n_layer", "n_head", "n_kv_head", "n_embd", "ffn_dim", "route_heads", "hc_streams", "delta_blocks", "head_dim", "vocab_size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.rope_theta <= 0 or self.norm_eps < 0:
            raise ValueError(f"rope_theta={self.rope_theta} must be over 0, norm_eps={self.norm_eps} at least 0")
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        if self.residual == "attnres":
            self.route_heads = 1
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head={self.n_head} is not a multiple of n_kv_head={self.n_kv_head}: choose n_kv_head among its divisors")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even (rotary pairs); without head_dim= it is n_embd // n_head")
        if self.residual in ("mhar", "delta") and self.n_embd % self.route_heads:
            raise ValueError(f"n_embd={self.n_embd} is not a multiple of route_heads={self.route_heads}: choose route_heads among its divisors")
        if self.rope_scaling is not None:
            needs = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
            if self.rope_scaling.get("rope_type") != "llama3" or not needs <= self.rope_scaling.keys():
                raise ValueError(f"rope_scaling={self.rope_scaling} is not understood: only rope_type 'llama3' with {', '.join(sorted(needs))} is, or None")

    @property
    def sites(self):
        """S: the embedding and 2 n_layer sublayer outputs are sources; as many sites read them (the last feeds the final norm)."""
        return 2 * self.n_layer + 1


# ----------------------------------------------------------------------------------------------------------------------
# The residual methods. Each is a module holding the method's parameters; start(x) opens a depth memory for one forward pass:
#     memory = residual.start(x)        x [B, T, D], the token embedding
#     h = memory.read()                 what the next sublayer reads [B, T, D]
#     memory.write(f)                   that sublayer's raw output [B, T, D]
#     h = memory.output()               what the final norm reads [B, T, D]
# With start(x, record=[]) each routed read appends its weights to that list, alpha [N, B, T, H] fp32 over its N sources.
# Parameters of all sites are stacked, [S, D]: one optimizer entry each, and every one has a gradient at every step.
# ----------------------------------------------------------------------------------------------------------------------
class Additive(nn.Module):
    """The standard residual stream: x += f."""

    def __init__(self, config):
        super().__init__()

    def init_weights(self, config, generator):
        """Nothing to initialise: the baseline has no parameters of its own."""

    def start(self, x, record=None):
        return AdditiveMemory(x)


class AdditiveMemory:
    def __init__(self, x):
        self.x = x

    def read(self):
        return self.x

    def write(self, f):
        self.x = self.x + f

    def output(self):
        return self.x


class HyperConnections(nn.Module):
    """n parallel streams, mixed before and after every sublayer (Zhu et al. 2024, arXiv 2409.19606, section 2).

    For sublayer k with streams x_1..x_n:  h = sum_j A_m[j] x_j is read;  x_i <- sum_j A_r[j, i] x_j + B[i] f  is written.
    Dynamic (DHC) adds to each coefficient s * tanh(RMSNorm(x_j) W), computed per token, in fp32 like all coefficients here.
    Start: A_m one-hot (stream k mod n), A_r = I, B = 1, W = 0, s = 0.01: every stream is then the baseline's stream.
    """

    def __init__(self, config):
        super().__init__()
        n, sub, D = config.hc_streams, 2 * config.n_layer, config.n_embd
        self.n, self.dynamic, self.eps = n, config.hc_dynamic, config.norm_eps
        self.read_weight = nn.Parameter(torch.empty(sub, n))  # A_m
        self.mix_weight = nn.Parameter(torch.empty(sub, n, n))  # A_r
        self.write_weight = nn.Parameter(torch.empty(sub, n))  # B
        if self.dynamic:
            self.norm_weight = nn.Parameter(torch.empty(sub, D))
            self.read_proj = nn.Parameter(torch.empty(sub, D))  # W_m
            self.mix_proj = nn.Parameter(torch.empty(sub, D, n))  # W_r
            self.write_proj = nn.Parameter(torch.empty(sub, D))  # W_beta
            self.read_scale = nn.Parameter(torch.empty(sub))  # s_alpha, shared by A_m and A_r
            self.write_scale = nn.Parameter(torch.empty(sub))  # s_beta

    def init_weights(self, config, generator):
        sub, n = self.read_weight.shape
        assign(self.read_weight, F.one_hot(torch.arange(sub) % n, n).float())
        assign(self.mix_weight, torch.eye(n).expand(sub, n, n))
        self.write_weight.fill_(1.0)
        if self.dynamic:
            for proj in (self.read_proj, self.mix_proj, self.write_proj):
                proj.zero_()
            self.norm_weight.fill_(1.0)
            self.read_scale.fill_(0.01)
            self.write_scale.fill_(0.01)

    def coefficients(self, k, streams):
        """A_m [j], A_r [j][i], B [i] of sublayer k: fp32 scalars, or [B, T, 1] each where they depend on the token."""
        a_m, a_r, b = self.read_weight[k].float(), self.mix_weight[k].float(), self.write_weight[k].float()
        if not self.dynamic:
            return a_m.unbind(0), [row.unbind(0) for row in a_r.unbind(0)], b.unbind(0)
        proj = torch.cat([self.read_proj[k, :, None], self.mix_proj[k], self.write_proj[k, :, None]], 1).float()  # [D, n + 2]
        proj = proj * self.norm_weight[k, :, None].float()
        A_m, A_r, B = [], [], []
        for j, x in enumerate(streams):
            x = x.float()
            with torch.autocast(x.device.type, enabled=False):
                dyn = torch.tanh((x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)) @ proj)  # [B, T, n + 2]
            A_m.append(a_m[j] + self.read_scale[k].float() * dyn[..., :1])
            A_r.append([a_r[j, i] + self.read_scale[k].float() * dyn[..., i + 1 : i + 2] for i in range(self.n)])
            B.append(b[j] + self.write_scale[k].float() * dyn[..., -1:])
        return A_m, A_r, B

    def start(self, x, record=None):
        return HyperMemory(self, x)


class HyperMemory:
    """The streams are a list and not one tensor: the compiler of torch 2.11 fails on reductions over four streams."""

    def __init__(self, residual, x):
        self.residual, self.site, self.streams, self.coefficients = residual, 0, [x] * residual.n, None

    def connections(self):
        if self.coefficients is None:
            self.coefficients = self.residual.coefficients(self.site, self.streams)
        return self.coefficients

    def read(self):
        a_m = self.connections()[0]
        return sum(a * x.float() for a, x in zip(a_m, self.streams)).to(self.streams[0].dtype)

    def write(self, f):
        _, a_r, b = self.connections()
        old = self.streams
        self.streams = [(sum(a_r[j][i] * x.float() for j, x in enumerate(old)) + b[i] * f.float()).to(f.dtype) for i in range(len(old))]
        self.site, self.coefficients = self.site + 1, None

    def output(self):
        return sum(x.float() for x in self.streams).to(self.streams[0].dtype)


class Routed(nn.Module):
    """Attention residuals (H = 1) and their multi-head form: every site reads a softmax mixture of all earlier outputs.

    Site s, counted by the writes so far, reads sources 0..s: the embedding and the raw sublayer outputs (paper eqs. 2 and 3).
    The output is routed too, by a query of its own. With zero queries every read is the mean of its sources.
    """

    def __init__(self, config):
        super().__init__()
        self.n_heads, self.eps = config.route_heads, config.norm_eps
        self.query = nn.Parameter(torch.empty(config.sites, config.n_embd))  # [S, D]
        self.key_norm = nn.Parameter(torch.empty(config.sites, config.n_embd))  # [S, D]
        self.kernel = "torch"

    def init_weights(self, config, generator):
        init_query(self.query, config, generator)
        self.key_norm.fill_(1.0)

    def start(self, x, record=None):
        if self.kernel == "triton" and record is None:  # the kernels never form the weights
            return routing_kernels.FusedRouter(x, self.query, self.key_norm, self.n_heads, self.eps)
        return RoutedMemory(self, x, record)


class RoutedMemory:
    def __init__(self, residual, x, record):
        self.residual, self.sources, self.record = residual, [x], record
        self.queries, self.key_norms = residual.query.unbind(0), residual.key_norm.unbind(0)

    def read(self):
        s = len(self.sources) - 1
        h, alpha = route_reference(self.sources, self.queries[s], self.key_norms[s], self.residual.n_heads, self.residual.eps)
        if self.record is not None:
            self.record.append(alpha)
        return h

    def write(self, f):
        self.sources.append(f)

    def output(self):
        return self.read()


class Delta(nn.Module):
    """Delta attention residuals: the stream stays additive, and a gated mixture of what whole blocks added is read beside it.

    Layers are cut into blocks. A site of block b reads a learned null source, the embedding and the deltas (stream at block end
    minus stream at block start) of blocks 0..b-1:  h = x + gate * mix. Gates start at zero, so a pretrained model is unchanged.
    recursive=True is the publicly released form instead: source k is (stream at the start of block k) - (source k-1), and it joins
    the list only after the block's first attention site, which still reads the older list (arXiv 2605.18855 and its code).
    """

    def __init__(self, config):
        super().__init__()
        self.n_heads, self.eps, self.recursive = config.route_heads, config.norm_eps, config.delta_recursive
        self.block_layers = math.ceil(config.n_layer / config.delta_blocks)
        sites, D = 2 * config.n_layer, config.n_embd
        self.query = nn.Parameter(torch.empty(sites, D))
        self.key_norm = nn.Parameter(torch.empty(sites, D))
        self.null_source = nn.Parameter(torch.empty(sites, D))
        self.gate = nn.Parameter(torch.empty(sites))
        self.kernel = "torch"

    def init_weights(self, config, generator):
        init_query(self.query, config, generator)
        self.key_norm.fill_(1.0)
        self.null_source.zero_()
        self.gate.zero_()

    def start(self, x, record=None):
        if self.kernel == "triton" and record is None:
            parameters = self.query, self.key_norm, self.null_source, self.gate
            return routing_kernels.FusedDeltaRouter(x, *parameters, self.n_heads, 2 * self.block_layers, self.eps)
        return DeltaMemory(self, x, record)


class DeltaMemory:
    def __init__(self, residual, x, record):
        self.residual, self.record, self.site, self.x, self.block_start = residual, record, 0, x, x
        self.sources = [] if residual.recursive else [x]
        self.parameters = [p.unbind(0) for p in (residual.query, residual.key_norm, residual.null_source, residual.gate)]

    def read(self):
        r, x = self.residual, self.x
        query, key_norm, null, gate = (p[self.site] for p in self.parameters)
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


RESIDUALS = {"baseline": Additive, "hc": HyperConnections, "attnres": Routed, "mhar": Routed, "delta": Delta}


def choose_kernel(kernel, config, device, dtype):
    """Which code routes: kernel "auto" | "triton" | "torch" -> ("triton" | "torch", the reason in words).

    auto takes Triton on CUDA where it supports the shape, and torch elsewhere. ValueError if triton is asked for and cannot run.
    """
    if config.residual in ("baseline", "hc"):
        if kernel == "triton":
            raise ValueError(f"kernel=triton: residual={config.residual} has nothing to route; leave kernel=auto")
        return "torch", f"residual={config.residual} does not route"
    if kernel == "torch":
        return "torch", "asked for"
    if kernel == "auto" and torch.device(device).type != "cuda":
        return "torch", "the fused kernels need a CUDA device"
    blocks = config.delta_blocks if config.residual == "delta" else 0
    obstacle = routing_kernels.kernel_support(device, dtype, config.n_embd, config.route_heads, config.sites, blocks)
    if config.residual == "delta" and config.delta_recursive:
        obstacle = "the released recursive form of delta has no fused kernel"
    elif config.residual == "delta" and config.delta_blocks > routing_kernels.MAX_BLOCKS:
        obstacle = f"delta_blocks={config.delta_blocks} is over the kernels' limit of {routing_kernels.MAX_BLOCKS}"
    if kernel == "triton" and obstacle:
        raise ValueError(f"kernel=triton cannot run: {obstacle}; use kernel=auto or kernel=torch")
    return ("torch", obstacle) if obstacle else ("triton", "asked for" if kernel == "triton" else "CUDA device")


# ----------------------------------------------------------------------------------------------------------------------
# The Transformer
# ----------------------------------------------------------------------------------------------------------------------
class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32 whatever comes in, so that fp32 weights count in full."""

    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(width)), eps

    def forward(self, x):
        return F.rms_norm(x.float(), (x.size(-1),), self.weight.float(), self.eps).to(x.dtype)


def rope_tables(config, T, device):
    """cos and sin [T, head_dim / 2] of positions 0..T-1, fp32 whatever the model's dtype."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    freq = 1.0 / config.rope_theta ** (half / config.head_dim)
    if scaling := config.rope_scaling:  # Llama 3: long wavelengths are stretched, short ones kept, those between interpolated
        factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * freq / (2 * math.pi)
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        freq = (1 - smooth) * freq / factor + smooth * freq
    angle = torch.arange(T, dtype=torch.float32, device=device)[:, None] * freq
    return angle.cos(), angle.sin()


def rotate(x, rope):
    """Rotary embedding in the half-split layout of Llama and Qwen: x [B, T, heads, head_dim], channel i pairs with i + head_dim / 2."""
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

    def forward(self, h, rope, cached=None):
        B, T, _ = h.shape
        x = self.norm(h)
        q = self.q_proj(x).view(B, T, self.n_head, self.head_dim)
        k = self.k_proj(x).view(B, T, self.n_kv_head, self.head_dim)
        v = self.v_proj(x).view(B, T, self.n_kv_head, self.head_dim)
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, heads, T, head_dim]
        mask = None
        if cached:
            past_k, past_v, positions, mask = cached  # [B, n_kv_head, length, head_dim] twice, [T], [T, length]
            k, v = past_k.index_copy_(2, positions, k), past_v.index_copy_(2, positions, v)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=self.n_head != self.n_kv_head)
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
    """Keys and values of the tokens seen, for generation: model(idx, cache=cache) reads on from where it stopped.

    Only attention looks back in time; a depth memory concerns the tokens at hand alone. All shapes are fixed from the start, with the
    position in a tensor, so that a step can be replayed as a CUDA graph. It holds `length` tokens; beyond that the result is undefined.
    """

    def __init__(self, config, B, length, device, dtype):
        shape = config.n_layer, B, config.n_kv_head, length, config.head_dim
        self.k, self.v = torch.zeros(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype)
        self.position = torch.zeros((), dtype=torch.int64, device=device)  # tokens seen
        self.rope = rope_tables(config, length, device)

    def open(self, T):
        """For the next T tokens: their rotary tables, and each layer's (keys, values, positions [T], mask [T, length])."""
        positions = self.position + torch.arange(T, device=self.position.device)
        mask = torch.arange(self.k.size(3), device=positions.device) <= positions[:, None]
        self.position += T
        return tuple(table[positions] for table in self.rope), [(k, v, positions, mask) for k, v in zip(self.k, self.v)]


class GPT(nn.Module):
    """The Transformer. It never asks which residual method it has: it reads from and writes to a depth memory.

    kernel: "torch" or "triton", see choose_kernel. seed fixes the weights: those of the trunk are the same for every residual method.
    ValueError for a config without vocab_size, and where a forward pass is longer than block_size.
    """

    def __init__(self, config, kernel="torch", seed=0):
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("vocab_size is not set: take it from the dataset's header, or give --vocab_size=")
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.head = None if config.tie_embeddings else nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.residual = RESIDUALS[config.residual](config)
        self.residual.kernel = kernel
        self.grad_checkpoint = False  # recompute the sublayers in backward instead of keeping their activations
        self.loss_head = loss_head  # where the model is compiled in parts, train.py puts the compiled one here
        self.init_weights(seed)
        self.rope = rope_tables(config, config.block_size, self.embed.weight.device)

    def _apply(self, fn, recurse=True):
        """What .to(), .cuda(), .bfloat16() and to_empty() go through. The rotary tables follow the weights' device, but stay fp32: so they are
        no buffer. They are made here and not in forward, where the compiler would compute their sines again in every layer."""
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
        hyper-connections                    the identity, see HyperConnections
        Drawn on the CPU, trunk first and routing from a generator of its own: one seed gives one trunk, on any device, for any method.
        """
        trunk, routing = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1)
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.weight.fill_(1.0)
            elif isinstance(module, (nn.Linear, nn.Embedding)):
                assign(module.weight, torch.empty(module.weight.shape).normal_(0, 0.02, generator=trunk))
        self.residual.init_weights(self.config, routing)

    def forward(self, idx, targets=None, z_loss=0.0, record=None, cache=None):
        """idx [B, T] token ids -> logits [B, T, V] in the compute dtype.

        record: a list to which every routed read appends its weights. cache: a KVCache with what came before idx.

        With targets [B, T] (-100 is left out): (loss, cross_entropy), both fp32 scalars, means over the targets in nats per token;
        loss = cross_entropy + z_loss * mean(logsumexp(logits)^2) is what to differentiate, cross_entropy is detached.
        """
        B, T = idx.shape
        if T > self.config.block_size:
            raise ValueError(f"{T} tokens do not fit into block_size={self.config.block_size}")
        x = self.embed(idx)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        rope, cached = cache.open(T) if cache else (tuple(table[:T] for table in self.rope), [None] * self.config.n_layer)
        # nothing in a sublayer is random, and the generator's state cannot be asked for while a CUDA graph is recorded
        run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False) if self.grad_checkpoint and self.training else call

        memory = self.residual.start(x, record)
        for layer, past in zip(self.layers, cached):
            memory.write(run(layer.attn, memory.read(), rope, past))
            memory.write(run(layer.mlp, memory.read()))
        x = self.norm(memory.output())

        weight = self.embed.weight if self.head is None else self.head.weight
        return F.linear(x, weight) if targets is None else self.loss_head(x, weight, targets, z_loss)

    def parameter_counts(self):
        """{"total", "routing"}: parameters of the model, and those that the residual method adds to the trunk."""
        return {"total": sum(p.numel() for p in self.parameters()), "routing": sum(p.numel() for p in self.residual.parameters())}

    def flops_per_token(self, T):
        """Training FLOPs per token at context T: 3x the forward's multiply-adds (2 FLOPs each) of the projections, the output head,
        causal attention (half of T on average) and the routing (a dot and a mix per source and site: 4D). Norms and softmax are left out."""
        c = self.config
        linear = sum(2 * p.numel() for name, p in self.layers.named_parameters() if p.dim() == 2) + 2 * c.vocab_size * c.n_embd
        attention = c.n_layer * 2 * T * c.n_head * c.head_dim
        if c.residual in ("attnres", "mhar"):
            pairs = c.sites * (c.sites + 1) // 2
        elif c.residual == "delta":
            pairs = sum(2 + layer // self.residual.block_layers for layer in range(c.n_layer)) * 2
        else:
            pairs = 0
        mixing = 2 * c.n_layer * 2 * c.n_embd * c.hc_streams * (c.hc_streams + 2 + (c.hc_streams + 2) * c.hc_dynamic) if c.residual == "hc" else 0
        return 3 * (linear + attention + 4 * c.n_embd * pairs + mixing)


def call(f, *args):
    return f(*args)


def assign(parameter, value):
    """Copy a full tensor into a parameter, or this rank's part of it into a sharded one."""
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)


class Project(torch.autograd.Function):
    """F.linear, x [M, D] and weight [V, D] -> logits [M, V], whose weight gradient stays a product of its own. The compiler would merge it with that of a
    tied embedding's other use, at the end of the backward, and the gradient of the logits, the largest tensor of a step, would live until then."""

    @staticmethod
    def forward(ctx, x, weight):
        logits = F.linear(x, weight)
        ctx.save_for_backward(x.to(logits.dtype), weight.to(logits.dtype))  # what autocast made of them
        return logits

    @staticmethod
    def backward(ctx, dlogits):
        x, weight = ctx.saved_tensors
        return dlogits @ weight, torch.addmm(weight, dlogits.t(), x, beta=0)  # mm, which this is, would be merged


def loss_head(x, weight, targets, z_loss):
    """(loss, cross_entropy) of GPT.forward from the final stream x [B, T, D] and the output projection's weight [V, D]."""
    x, weight = x.flatten(0, 1), weight.to(x.dtype)
    early = len(x) >= 8 * x.size(1)  # the logits' gradient [M, V] is far larger than the weight's [V, D], which then has to wait
    logits = (Project.apply(x, weight) if early else F.linear(x, weight)).float()  # [M, V]
    targets = targets.flatten()
    loss = F.cross_entropy(logits, targets, ignore_index=-100)
    cross_entropy = loss.detach()
    if z_loss:
        counted = targets != -100
        loss = loss + z_loss * (logits.logsumexp(-1).pow(2) * counted).sum() / counted.sum()
    return loss, cross_entropy


PEAK_FLOPS = {  # dense bf16 FLOP/s by a word of the name the driver gives, from the vendors' data sheets; the first match counts
    "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "H800": 989e12, "GH200": 989e12, "B200": 2250e12, "GB200": 2500e12,
    "A100": 312e12, "A800": 312e12, "A40": 149.7e12, "A10": 125e12, "L40S": 362e12, "L4": 121e12, "4090": 165.2e12, "5090": 209.5e12, "3090": 71e12,
}  # fmt: skip


def peak_flops(device):
    """Dense bf16 peak of a device in FLOP/s, or None where the table does not know it: better no MFU than a wrong one."""
    if torch.device(device).type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if re.search(rf"\b{key}\b", name)), None)
