"""Depth routing: the fp32 reference, the Triton kernels, and the autograd around them.

`route_reference` is the specification. `FusedRouter` computes the same for a whole chain of sites and moves
few bytes: the queries are parameters, so the sites of a group read all older sources in one pass, and the
backward mirrors that. Checked in test_kernels.py, timed in bench.py.

Legend: B batch, T time, M = B*T tokens, D width, H routing heads, K = D // H, S depth sources / sites, G
sites per group; the group of site s is s0..s1-1. Site s (0-based) reads sources 0..s. Source 0 is the
embedding, source s + 1 was computed from what site s returned.

    alpha[s, i, h] = softmax_i <query[s, h], (RMSNorm_D(source_i) * key_norm[s])[h]>
    read[s, h] = sum_i alpha[s, i, h] source_i[h]

Forward. Fold u = query * key_norm once: logit_si = rstd_i <u_s, v_i>, and no key is ever formed. Per token
and head a site is attention with one static query, and keys = values = the sources. At the first site of a
group, `forward_inter` lets all G sites of the group read the sources of the earlier groups in one pass;
`forward_intra`, once per site, adds the sources of its own group by online softmax.

Backward, mirrored. Site s runs after all later sites (source s + 1 depends on what site s returned), so the
gradient of source i can be pulled from all sites j >= i at once. With Delta_j = <dh_j, h_j> per head
(FlashAttention's trick) and lse_j saved by the forward:

    p_ji = exp(logit_ji - lse_j)      ds_ji = p_ji (<dh_j, v_i> - Delta_j)      c_i = sum_{j,h} ds_ji logit_ji
    dv_i = sum_j p_ji dh_j + rstd_i sum_j ds_ji u_j - (rstd_i^2 / D) c_i v_i
    du_j = sum_{i, tokens} ds_ji rstd_i v_i

At the last site of a group `backward_inter` pulls from all later groups into the G sources of the group;
`backward_intra`, once per site, adds the group's own sites; `backward_query` forms du, once per group, in a
fixed order. Only the sources, rstd, lse and h are saved."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton import jit
    from triton.language import constexpr
except ImportError:  # the reference works without triton; kernel_support says why the kernels do not
    triton = tl = constexpr = None
    jit = lambda function=None, **options: function or (lambda f: f)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # the kernels run on the CPU, slowly: for tests
G = 8  # sites per group
MAX_HEADS, MAX_SITES, MAX_BLOCKS = 64, 257, 16


def route_reference(sources, query: Tensor, key_norm: Tensor, n_heads: int, eps: float = 1e-6):
    """Multi-head attention over depth at one site (the formula above), in fp32 (fp64 inputs: in fp64).

    The norm runs over the whole width D, then heads are slices of K = D // H channels; there is no 1/sqrt(K);
    values are not normalised. sources: N tensors [..., D], or one tensor [N, ..., D]; query, key_norm: [D].
    Returns the mix [..., D] in the sources' dtype and the weights [N, ..., H] in fp32 (fp64)."""
    values = sources if isinstance(sources, Tensor) else torch.stack(tuple(sources))  # [N, ..., D]
    if values.shape[-1] % n_heads:
        raise ValueError(f"n_heads={n_heads} does not divide the width {values.shape[-1]}")
    dtype = torch.promote_types(values.dtype, torch.float32)
    v = values.to(dtype)
    rstd = (v.square().mean(-1, keepdim=True) + eps).rsqrt()  # [N, ..., 1]
    v = v.unflatten(-1, (n_heads, -1))  # [N, ..., H, K]
    u = (query.to(dtype) * key_norm.to(dtype)).view(n_heads, -1)  # [H, K]
    weights = ((v * u).sum(-1) * rstd).softmax(0)  # [N, ..., H]
    mix = (weights[..., None] * v).sum(0).flatten(-2)
    return mix.to(values.dtype), weights


# -------------------- Shared by the kernels of full and of delta routing
#
# A width such as 160 is no power of two, so a row is a tuple of narrow tiles (5 x 32) and whatever runs over
# columns is a static loop over the tuple. In the inter and delta kernels a tile is [CH, 16, W]: CH chunks of
# W columns, one warp each, and 16 rows for the tensor cores: (token, source) or (token, site) of two tokens,
# or (part, site). Products of different tokens are masked. The parts are hi and lo: in 16-bit types u enters
# the products as its rounded value plus what rounding lost. Sums, logits and softmax are fp32.
_RUNTIME = ["M", "S", "s", "s0", "s1", "end"]  # never specialised: one binary serves all sites and sizes


@jit
def _pointers(tensors, n):
    """[1, rows, 1]: the pointer of tensor n[row]; past the end, of the last. All are aligned to 16 bytes,
    which the compiler would forget in `where`."""
    at = tensors[0] + tl.zeros(n.shape, tl.int64)
    for i in tl.static_range(1, len(tensors)):
        at = tl.where(n >= i, tensors[i] + tl.zeros(n.shape, tl.int64), at)
    return tl.multiple_of(at, 16)[None, :, None]


@jit
def _columns(CH: constexpr, W: constexpr):
    """[CH, 1, W]: 0..CH * W - 1"""
    return tl.arange(0, CH)[:, None, None] * W + tl.arange(0, W)[None, None, :]


@jit
def _load(base, row, row_ok, col, k, K: constexpr, CACHE: constexpr):
    """A head's K columns of the rows at the offsets `row` of base (a pointer, or one per row), as a tuple of
    tiles [CH, rows, W]. k [CH, 1, W]: the first tile's columns within the head; col: within the row."""
    STEP: constexpr = k.shape[0] * k.shape[2]
    tiles = ()
    for q in tl.static_range((K + STEP - 1) // STEP):
        ok = row_ok[None, :, None] & (q * STEP + k < K)
        at = base + row[None, :, None] + col + q * STEP
        tiles = tiles + (tl.load(at, mask=ok, other=0.0, cache_modifier=CACHE),)
    return tiles


@jit
def _store(base, row, row_ok, col, k, tiles, K: constexpr):
    STEP: constexpr = k.shape[0] * k.shape[2]
    for q in tl.static_range(len(tiles)):
        ok = row_ok[None, :, None] & (q * STEP + k < K)
        at = base + row[None, :, None] + col + q * STEP
        tl.store(at, tiles[q].to(base.dtype.element_ty), mask=ok)


@jit
def _zeros(CH: constexpr, ROWS: constexpr, K: constexpr, W: constexpr):
    tiles = ()
    for _ in tl.static_range((K + CH * W - 1) // (CH * W)):
        tiles = tiles + (tl.zeros([CH, ROWS, W], tl.float32),)
    return tiles


@jit
def _products(a, b):
    """a b^T over each chunk's columns: [CH, rows of a, rows of b]. "ieee" concerns fp32 alone: no tf32."""
    acc = tl.zeros([a[0].shape[0], a[0].shape[1], b[0].shape[1]], tl.float32)
    for q in tl.static_range(len(a)):
        acc = tl.dot(a[q], tl.permute(b[q], (0, 2, 1)), acc, input_precision="ieee")
    return acc


@jit
def _weighted(p, b, acc):
    """acc + p b, tile by tile; p [rows, rows of b] is the same for all chunks."""
    p = tl.broadcast_to(p.to(b[0].dtype)[None, :, :], [b[0].shape[0], p.shape[0], p.shape[1]])
    tiles = ()
    for q in tl.static_range(len(b)):
        tiles = tiles + (tl.dot(p, b[q], acc[q], input_precision="ieee"),)
    return tiles


@jit
def _scaled(acc, by):
    """by[row] acc, tile by tile."""
    tiles = ()
    for q in tl.static_range(len(acc)):
        tiles = tiles + (acc[q] * by[None, :, None],)
    return tiles


@jit
def _sum_chunks(x):
    """[CH, N, 8, C] -> [N, 8, C]. The chunks lie in different warps, so the sum goes through shared memory. A
    tensor core's threads hold 8 rows x 4 pairs of columns: in that order they write to different banks."""
    CH: constexpr = x.shape[0]
    N: constexpr = x.shape[1]
    C: constexpr = x.shape[3]
    if CH > 1:
        x = tl.permute(tl.reshape(x, [CH, N, 8, C // 8, 4, 2]), (0, 1, 3, 5, 2, 4))
        x = tl.reshape(tl.sum(tl.reshape(x, [CH, N * 8 * C]), 0), [N, C // 8, 2, 8, 4])
        x = tl.permute(x, (0, 3, 1, 4, 2))
    return tl.reshape(x, [N, 8, C])


@jit
def _fold(x):
    """Sum over the chunks and over the hi and lo parts: [CH, (part, site), rows] -> [site, rows]."""
    CH: constexpr = x.shape[0]
    ROWS: constexpr = x.shape[2]
    if CH == 1:
        return tl.sum(tl.reshape(x, [2, 8, ROWS]), 0)
    x = tl.reshape(tl.sum(tl.reshape(x, [CH, 2, 8, ROWS]), 1), [CH, 1, 8, ROWS])
    return tl.reshape(_sum_chunks(x), [8, ROWS])


@jit
def _repeat(x):
    """[8, rows] twice, one above the other: [16, rows]."""
    x = tl.broadcast_to(tl.reshape(x, [1, 8, x.shape[1]]), [2, 8, x.shape[1]])
    return tl.reshape(x, [16, x.shape[2]])


def _on(x: Tensor):
    """Launch on the device of x, which need not be the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


# The compiler is kept out: compiled casts do not round, and lo would be 0; and kernels that write into memory
# of the chain would be reordered. Sublayers are compiled, and the routing runs between them.
_eager = torch.compiler.disable(reason="compile the sublayers, not the model: routing runs between them")


def _split(u: Tensor, dtype) -> tuple[Tensor, Tensor]:
    """u as hi + lo in dtype."""
    hi = u.to(dtype)
    return hi, (u - hi.float()).to(dtype)


# -------------------- Full routing: kernels
@jit(do_not_specialize=_RUNTIME)
def forward_inter(
    V,
    R,
    U_HI,
    U_LO,
    PART,
    PART_STAT,
    M,
    S,
    s0,
    TB,
    H: constexpr,
    K: constexpr,
    CH: constexpr,
    W: constexpr,
    G: constexpr,
    BN: constexpr,
):
    """Sites s0..s0+G-1 attend to sources 0..s0-1. Program: one head of TB tokens. -> PART [M, G, D],
    normalised and divided by a power of two; PART_STAT [2, M, H, G]: the log-sum-exp, and that power."""
    # PART of bfloat16 sources is float16: three more bits, so that its rounding is negligible, but a narrow
    # range, so each head of a row is scaled. The 16 rows of a tile are (part, site): of u in the logits, of p
    # in the mix.
    D: constexpr = H * K
    DT: constexpr = V.dtype.element_ty
    h = tl.program_id(0) % H
    m = (tl.program_id(0) // H).to(tl.int64) * TB
    tokens = tl.minimum(M - m, TB).to(tl.int32)
    b, g, n = tl.arange(0, 2 * G), tl.arange(0, G), tl.arange(0, BN)
    k = _columns(CH, W)
    col = h * K + k
    u_at = _pointers((U_HI, U_LO), b // G)
    u = _load(u_at, (s0 + b % G) * D, s0 + b % G < S, col, k, K, "")  # [CH, (part, site), W]
    top = tl.full([G], float("-inf"), tl.float32)  # running maximum and sum of the softmax
    den = tl.zeros([G], tl.float32)
    acc = _zeros(CH, 2 * G, K, W)
    blocks = tl.cdiv(s0, BN)
    for step in range(tokens * blocks):  # all in one loop, so that the pipeline never drains
        token = m + step // blocks
        i = step % blocks * BN + n
        ok = i < s0
        v = _load(V + token * S * D, i * D, ok, col, k, K, "")  # [CH, BN, W]
        r = tl.load(R + (i // G * M + token) * G + i % G, mask=ok, other=0.0)
        logit = _fold(_products(u, v))
        logit = tl.where(ok[None, :], logit * r[None, :], float("-inf"))  # [G, BN]
        top_new = tl.maximum(top, tl.max(logit, 1))
        scale = tl.exp(top - top_new)
        p = tl.exp(logit - top_new[:, None])
        den = den * scale + tl.sum(p, 1)
        top = top_new
        p = _repeat(p)
        hi = p.to(DT)
        p = tl.where(b[:, None] < G, hi, (p - hi.to(tl.float32)).to(DT))
        scale = tl.reshape(tl.broadcast_to(scale[None, :], [2, G]), [2 * G])
        acc = _weighted(p, v, _scaled(acc, scale))
        if step % blocks == blocks - 1:
            out, size = (), tl.zeros([CH, G], tl.float32)
            for q in tl.static_range(len(acc)):
                out = out + (tl.sum(tl.reshape(acc[q], [CH, 2, G, W]), 1) * (1.0 / den)[None, :, None],)
                size = tl.maximum(size, tl.max(tl.abs(out[q]), 2))
            # The bits of a power of two that brings the largest number to 2^14..2^15, of float16's 2^16.
            size = tl.maximum(tl.max(size, 0), 1e-30)
            power = (size.to(tl.int32, bitcast=True) & 0x7F800000) - (14 << 23)
            inverse = (0x7F000000 - power).to(tl.float32, bitcast=True)
            _store(PART, (token * G + g) * D, s0 + g < S, col, k, _scaled(out, inverse), K)
            stat = PART_STAT + (token * H + h) * G + g
            tl.store(stat, top + tl.log(den), mask=s0 + g < S)
            stat = PART_STAT + ((M + token) * H + h) * G + g
            tl.store(stat, power.to(tl.float32, bitcast=True), mask=s0 + g < S)
            top = tl.full([G], float("-inf"), tl.float32)
            den = tl.zeros([G], tl.float32)
            acc = _zeros(CH, 2 * G, K, W)


@jit
def _row(base, col, k, K: constexpr, live, CACHE: constexpr):
    """A row as a tuple of tiles [HP, W]: columns q * W.. of every head. col [HP, W], k [1, W]."""
    W: constexpr = k.shape[1]
    tiles = ()
    for q in tl.static_range((K + W - 1) // W):
        ok = live & (q * W + k < K)
        tiles = tiles + (tl.load(base + col + q * W, mask=ok, other=0.0, cache_modifier=CACHE),)
    return tiles


@jit
def _heads_dot(a, b):
    """Per head, the product of two rows: [HP]."""
    z = a[0].to(tl.float32) * b[0].to(tl.float32)
    for q in tl.static_range(1, len(a)):
        z += a[q].to(tl.float32) * b[q].to(tl.float32)
    return tl.sum(z, 1)


@jit
def _pull(dh, v, u, r, lse, delta, h_ok):
    """p, ds and the logit of source v at the site of dh and u: [HP] each."""
    logit = _heads_dot(u, v) * r
    p = tl.where(h_ok, tl.exp(logit - lse), 0.0)
    return p, p * (_heads_dot(dh, v) - delta), logit


@jit
def _combine(p, a, d, b):
    """p[h] a + d[h] b, both rows; fp32."""
    out = ()
    for q in tl.static_range(len(a)):
        out = out + (p[:, None] * a[q].to(tl.float32) + d[:, None] * b[q].to(tl.float32),)
    return out


@jit
def _add(acc, p, a, d, b):
    """acc + p[h] a + d[h] b, rows; fp32."""
    out = ()
    for q in tl.static_range(len(a)):
        out = out + (acc[q] + p[:, None] * a[q].to(tl.float32) + d[:, None] * b[q].to(tl.float32),)
    return out


@jit(do_not_specialize=_RUNTIME)
def forward_intra(
    X,
    V,
    R,
    U,
    PART,
    PART_STAT,
    OUT,
    LSE,
    M,
    S,
    s,
    s0,
    eps,
    H: constexpr,
    HP: constexpr,
    K: constexpr,
    W: constexpr,
    G: constexpr,
    MERGE: constexpr,
):
    """Store source s and its rstd; site s attends to sources s0..s and, with MERGE, adds forward_inter's
    result. Program: one token. -> OUT [M, D], LSE [S / G, M, G, H]."""
    m = tl.program_id(0).to(tl.int64)
    D: constexpr = H * K
    h, k = tl.arange(0, HP), tl.arange(0, W)[None, :]
    h_ok = h < H
    live = h_ok[:, None]
    col = h[:, None] * K + k  # [HP, W]
    V += m * S * D
    R += (s0 // G * M + m) * G - s0
    x = _row(X + m * D, col, k, K, live, "")
    u = _row(U + s * D, col, k, K, live, "")
    y = _row(V + s0 * D, col, k, K, live & (s0 < s), ".cg")
    r_next = tl.load(R + s0, mask=s0 < s, other=0.0)
    if MERGE:
        lse = tl.load(PART_STAT + (m * H + h) * G + s - s0, mask=h_ok, other=0.0)
        power = tl.load(PART_STAT + ((M + m) * H + h) * G + s - s0, mask=h_ok, other=0.0)
        part = _row(PART + (m * G + s - s0) * D, col, k, K, live, ".cg")
    square = x[0].to(tl.float32) * x[0].to(tl.float32)
    for q in tl.static_range(len(x)):
        tl.store(V + s * D + col + q * W, x[q], mask=live & (q * W + k < K))
        if q > 0:
            square += x[q].to(tl.float32) * x[q].to(tl.float32)
    r = tl.rsqrt(tl.sum(square) / D + eps)
    tl.store(R + s, r)
    top = _heads_dot(x, u) * r  # [HP], the running maximum of the softmax; den is its running sum
    den = tl.full([HP], 1.0, tl.float32)
    if MERGE:
        top_new = tl.maximum(top, lse)
        p, p_part = tl.exp(top - top_new), tl.exp(lse - top_new)
        top, den = top_new, p + p_part
        acc = _combine(p, x, p_part * power, part)
    else:
        acc = _combine(den, x, den * 0.0, x)
    for i in range(s0, s):
        # The next row is fetched while this one is used; two ahead would cost more registers than they gain.
        y_next = _row(V + (i + 1) * D, col, k, K, live & (i + 1 < s), ".cg")
        r_i = r_next
        r_next = tl.load(R + i + 1, mask=i + 1 < s, other=0.0)
        logit = _heads_dot(y, u) * r_i
        top_new = tl.maximum(top, logit)
        scale, p = tl.exp(top - top_new), tl.exp(logit - top_new)
        den = den * scale + p
        top = top_new
        acc = _combine(scale, acc, p, y)
        y = y_next
    for q in tl.static_range(len(x)):
        ok, at = live & (q * W + k < K), OUT + m * D + col + q * W
        tl.store(at, (acc[q] / den[:, None]).to(OUT.dtype.element_ty), mask=ok)
    tl.store(LSE + ((s0 // G * M + m) * G + s - s0) * H + h, top + tl.log(den), mask=h_ok)


@jit(do_not_specialize=_RUNTIME)
def backward_inter(
    V,
    R,
    U_HI,
    U_LO,
    LATER,
    LSE_T,
    DELTA_T,
    PART,
    PART_C,
    DS,
    M,
    S,
    s0,
    s1,
    end,
    H: constexpr,
    K: constexpr,
    CH: constexpr,
    W: constexpr,
    G: constexpr,
):
    """Sources s0..s1-1 pull from sites s1..end-1. Program: one head of two tokens, one later group at a time.
    LATER: the DH [M, G, D] of every later group (a short last one has fewer rows), padded to one length, so
    that one binary serves all groups.
    -> PART [M, G, D]; PART_C [M, H, G]; DS [S / G, M, H, G, G], ds_ji rstd_i."""
    D: constexpr = H * K
    DT: constexpr = V.dtype.element_ty
    pairs = tl.cdiv(M, 2)
    h = tl.program_id(0) // pairs
    at = (tl.program_id(0) % pairs).to(tl.int64) * 2
    a, g, t = tl.arange(0, 2 * G), tl.arange(0, G)[None, :], tl.arange(0, 2)[:, None]
    # Of an odd number of tokens the last is done twice, with the same result.
    m, token = tl.minimum(at + a // G, M - 1), tl.minimum(at + t, M - 1)
    k = _columns(CH, W)
    col = h * K + k
    u_at = _pointers((U_HI, U_LO), a // G)
    v = _load(V, (m * S + s0 + a % G) * D, a < 2 * G, col, k, K, ".cg")  # [CH, (token, source), W]
    r = tl.load(R + (s0 // G * M + token) * G + g)[:, :, None]
    same_token = a[:, None] // G == a[None, :] // G
    c = tl.zeros([2, G], tl.float32)
    acc = _zeros(CH, 2 * G, K, W)
    for group in range(s1 // G, tl.cdiv(end, G)):
        ok, ok_g = group * G + a % G < end, group * G + g < end
        dh = LATER[0]
        for i in tl.static_range(1, len(LATER)):
            dh = tl.where(group - s1 // G >= i, LATER[i], dh)
        row = (m * tl.minimum(S - group * G, G) + a % G) * D
        dh = _load(tl.multiple_of(dh, 16), row, ok, col, k, K, "")  # [CH, (token, site), W]
        u = _load(u_at, (group * G + a % G) * D, ok, col, k, K, "")  # [CH, (part, site), W]
        logit, dp = _products(v, u), _products(v, dh)
        x = tl.join(logit, tl.where(same_token[None, :, :], dp, 0.0))  # one sum over the chunks for both
        x = tl.permute(tl.sum(tl.reshape(x, [CH, 2, G, 2, G, 2]), 3), (0, 4, 1, 2, 3))
        x = tl.reshape(_sum_chunks(tl.reshape(x, [CH, 4, G, G])), [2, 2, G, G])
        logit, dp = tl.split(tl.permute(x, (1, 2, 3, 0)))  # [token, source, site]
        stat = ((group * M + token) * H + h) * G + g
        lse = tl.load(LSE_T + stat, mask=ok_g, other=0.0)  # [token, site]
        delta = tl.load(DELTA_T + stat, mask=ok_g, other=0.0)
        logit *= r
        p = tl.where(ok_g[:, None, :], tl.exp(logit - lse[:, None, :]), 0.0)
        ds = p * (dp - delta[:, None, :])
        c += tl.sum(ds * logit, 2)
        ds = (ds * r).to(DT)
        tl.store(DS + stat[:, None, :] * G + g[:, :, None], ds, mask=ok_g[:, None, :])
        p = tl.join(tl.where(t[:, :, None] == 0, p, 0.0), tl.where(t[:, :, None] == 1, p, 0.0)).to(DT)
        p = tl.reshape(tl.permute(p, (0, 1, 3, 2)), [2 * G, 2 * G])  # [(token, source), (token, site)]
        ds = tl.broadcast_to(tl.reshape(ds, [2, G, 1, G]), [2, G, 2, G])
        ds = tl.reshape(ds, [2 * G, 2 * G])  # [(token, source), (part, site)]
        acc = _weighted(ds, u, _weighted(p, dh, acc))
    _store(PART, (m * G + a % G) * D, a < 2 * G, col, k, acc, K)
    tl.store(PART_C + (token * H + h) * G + g, c)


@jit(do_not_specialize=_RUNTIME)
def backward_intra(
    V,
    R,
    U,
    DOUT,
    HOUT,
    DH,
    LSE,
    DELTA,
    LSE_T,
    DELTA_T,
    PART,
    PART_C,
    OWN,
    DV,
    M,
    S,
    s,
    s0,
    s1,
    end,
    H: constexpr,
    HP: constexpr,
    K: constexpr,
    W: constexpr,
    G: constexpr,
    MERGE: constexpr,
):
    """The gradient of source s from sites s..min(s1, end)-1, plus, with MERGE, backward_inter's PART; PART
    may be DH, where dh_s (DOUT) then takes its place. Program: one token. -> DV [M, D]; the group's DH [M, s1
    - s0, D] and DELTA [M, G, H] at s; OWN [M, G, H, G], ds_ji rstd_i for i before j."""
    # Statistics lie in the order in which they are read. This kernel takes all heads of one site: LSE and
    # DELTA are [.., site, H]. backward_inter takes one head of many sites: LSE_T and DELTA_T are [S / G, M,
    # H, G], written by the group's first site, the last to run; site by site, every 4 bytes would cost a
    # sector of 32. OWN is small and fp32, and du takes it as hi + lo.
    m = tl.program_id(0).to(tl.int64)
    D: constexpr = H * K
    h, k = tl.arange(0, HP), tl.arange(0, W)[None, :]
    h_ok = h < H
    live = h_ok[:, None]
    col = h[:, None] * K + k  # [HP, W]
    DH += (m * (s1 - s0) - s0) * D
    LSE += ((s0 // G * M + m) * G - s0) * H + h
    DELTA += (m * G - s0) * H + h
    LSE_T += ((s0 // G * M + m) * H + h) * G - s0
    DELTA_T += ((s0 // G * M + m) * H + h) * G - s0
    OWN += ((m * G + s - s0) * H + h) * G - s0
    # All loads are issued before anything waits for them; rows past `end` hold garbage that is never used.
    # All tiles have one layout: where PART is DH, a number is overwritten by the thread that has read it.
    dh = _row(DOUT + m * D, col, k, K, live, "")
    v = _row(V + (m * S + s) * D, col, k, K, live, ".cg")
    mix = _row(HOUT + m * D, col, k, K, live, ".cg")
    u = _row(U + s * D, col, k, K, live, "")
    r = tl.load(R + (s0 // G * M + m) * G + s - s0)
    lse = tl.load(LSE + s * H, mask=h_ok, other=0.0)
    dh_next = _row(DH + (s + 1) * D, col, k, K, live & (s + 1 < s1), ".cg")
    lse_next = tl.load(LSE + (s + 1) * H, mask=h_ok & (s + 1 < s1), other=0.0)
    delta_next = tl.load(DELTA + (s + 1) * H, mask=h_ok & (s + 1 < s1), other=0.0)
    c = tl.zeros([HP], tl.float32)
    if MERGE:
        c = tl.load(PART_C + (m * H + h) * G + s - s0, mask=h_ok, other=0.0)
        part = _row(PART + (m * G + s - s0) * D, col, k, K, live, ".cg")
    last = tl.minimum(s1, end)
    delta = _heads_dot(dh, mix)
    p, ds, logit = _pull(dh, v, u, r, lse, delta, h_ok)
    c += ds * logit
    acc = _combine(p, dh, ds * r, u)
    if MERGE:
        one = tl.full([HP], 1.0, tl.float32)
        acc = _combine(one, acc, one, part)
    for q in tl.static_range(len(dh)):
        tl.store(DH + s * D + col + q * W, dh[q], mask=live & (q * W + k < K))
    tl.store(DELTA + s * H, delta, mask=h_ok)
    tl.store(OWN + s, ds * r, mask=h_ok)
    if s == s0:
        tl.store(LSE_T + s, lse, mask=h_ok)
        tl.store(DELTA_T + s, delta, mask=h_ok)
    for j in range(s + 1, last):
        dh, lse, delta = dh_next, lse_next, delta_next
        dh_next = _row(DH + (j + 1) * D, col, k, K, live & (j + 1 < s1), ".cg")
        lse_next = tl.load(LSE + (j + 1) * H, mask=h_ok & (j + 1 < s1), other=0.0)
        delta_next = tl.load(DELTA + (j + 1) * H, mask=h_ok & (j + 1 < s1), other=0.0)
        u = _row(U + j * D, col, k, K, live, "")
        p, ds, logit = _pull(dh, v, u, r, lse, delta, h_ok)
        c += ds * logit
        tl.store(OWN + j, ds * r, mask=h_ok)
        if s == s0:
            tl.store(LSE_T + j, lse, mask=h_ok)
            tl.store(DELTA_T + j, delta, mask=h_ok)
        acc = _add(acc, p, dh, ds * r, u)
    f = tl.sum(c) * r * r / D
    for q in tl.static_range(len(v)):
        ok, at = live & (q * W + k < K), DV + m * D + col + q * W
        tl.store(at, (acc[q] - f * v[q].to(tl.float32)).to(DV.dtype.element_ty), mask=ok)


@jit(do_not_specialize=_RUNTIME)
def backward_query(
    V,
    DS,
    OWN,
    DU,
    M,
    S,
    s0,
    s1,
    end,
    TB,
    H: constexpr,
    K: constexpr,
    CH: constexpr,
    W: constexpr,
    G: constexpr,
    BJ: constexpr,
    BM: constexpr,
):
    """du_j += sum over TB tokens and the sources s0..s1-1 of ds_ji rstd_i v_i. Program: one chunk of one
    head, BJ sites j >= s1 (the first program also the group's own sites). DU [M / TB, S, D]: one partial sum
    per block of tokens. The groups run one after the other, so the order is fixed."""
    D: constexpr = H * K
    STEP: constexpr = CH * W
    DT: constexpr = V.dtype.element_ty
    first = tl.program_id(0) == 0
    h = tl.program_id(1) // CH
    k = tl.program_id(1) % CH * W + tl.arange(0, W)
    col = h * K + k
    j = (s1 + tl.program_id(0) * BJ + tl.arange(0, BJ)).to(tl.int64)
    b, g = tl.arange(0, 2 * G), tl.arange(0, G)  # of the group's own sites, ds as hi + lo: (part, site)
    own = s0 + b % G
    m = tl.program_id(2).to(tl.int64) * TB
    m_end = tl.minimum(m + TB, M)
    last = tl.minimum(s1, end)  # sources from here on may not exist
    j_ok = j < end
    if first | (s1 + tl.program_id(0) * BJ < end):
        a = tl.arange(0, BM * G)
        i = s0 + a % G
        acc, acc_own = (), ()
        for _ in tl.static_range((K + STEP - 1) // STEP):
            acc = acc + (tl.zeros([BJ, W], tl.float32),)
            acc_own = acc_own + (tl.zeros([2 * G, W], tl.float32),)
        at = DS + ((j // G * M * H + h) * G + j % G)[:, None] * G + (a // G * H * G * G + a % G)[None, :]
        at_own = OWN + (h * G + b % G)[:, None] + (a * H * G)[None, :]  # [M, G, H, G]
        for t in range(m, m_end, BM):
            token = t + a // G
            t_ok = token < m_end
            v_ok = t_ok & (i < last)
            # Garbage is read, then masked: a load whose mask varies within 16 bytes would be split.
            ds = tl.load(at + t * H * G * G, mask=j_ok[:, None] & t_ok[None, :], other=0.0)  # [BJ, BM * G]
            ds = tl.where(v_ok[None, :], ds, 0.0)
            ds_own = tl.load(at_own + t * H * G * G, mask=t_ok[None, :], other=0.0)  # [2 G, BM * G]
            ok = (first & (own < last))[:, None] & v_ok[None, :] & (own[:, None] >= i[None, :])
            ds_own = tl.where(ok, ds_own, 0.0)
            hi = ds_own.to(DT)
            ds_own = tl.where(b[:, None] < G, hi, (ds_own - hi.to(tl.float32)).to(DT))
            new, new_own = (), ()
            for q in tl.static_range((K + STEP - 1) // STEP):
                ok = v_ok[:, None] & (q * STEP + k < K)[None, :]
                at_v = V + ((token * S + i) * D)[:, None] + col[None, :] + q * STEP
                v = tl.load(at_v, mask=ok, other=0.0)  # [BM * G, W]
                new = new + (tl.dot(ds, v, acc[q], input_precision="ieee"),)
                new_own = new_own + (tl.dot(ds_own, v, acc_own[q], input_precision="ieee"),)
            acc, acc_own = new, new_own
        for q in tl.static_range((K + STEP - 1) // STEP):
            live = (q * STEP + k < K)[None, :]
            du = DU + tl.program_id(2).to(tl.int64) * S * D + col[None, :] + q * STEP
            # The group's own sites start here; later ones already hold the sums over later sources.
            du_own = tl.sum(tl.reshape(acc_own[q], [2, G, W]), 0)
            tl.store(du + (s0 + g)[:, None] * D, du_own, mask=(first & (s0 + g < last))[:, None] & live)
            du += j[:, None] * D
            old = tl.load(du, mask=j_ok[:, None] & live, other=0.0)
            tl.store(du, acc[q] + old, mask=j_ok[:, None] & live)


# -------------------- Full routing: launches and autograd
#
# Launch configurations follow from the shape alone: nothing is tuned at run time.
@cache
def _inter_config(D: int, H: int, dtype) -> dict:
    K = D // H
    # One warp holds 160 columns in registers.
    CH = min(16, triton.next_power_of_2(triton.cdiv(K, 160)))
    W = next((w for w in (64, 32) if K % (CH * w) == 0), 32 if K > 16 * CH else 16)
    warps = CH if dtype != torch.float32 else min(16, 4 * CH)  # fp32 products run outside the tensor cores
    return dict(H=H, K=K, CH=CH, W=W, G=G, num_warps=warps)


@cache
def _intra_config(D: int, H: int, backward: bool) -> dict:
    K, HP = D // H, triton.next_power_of_2(H)
    # One warp holds a row of up to 1536 columns, 8 to a thread and tile. Wide rows are faster in two: on an
    # H200 forward by 3% with 1,024 columns, backward by 5% with 1,280.
    warps = min(16, triton.next_power_of_2(triton.cdiv(HP * K, 1536)))
    W = min(triton.next_power_of_2(K), max(8, 256 * warps // HP))
    if HP * K > (1024 if backward else 768):
        warps = min(16, 2 * warps)
    return dict(H=H, HP=HP, K=K, W=W, G=G, num_warps=warps, num_stages=1)


def _query_block(M: int) -> int:
    """Tokens per partial sum of du: at most 32 blocks, of at least 64 tokens."""
    return max(64, -(-M // 32))


class _Chain:
    """What the sites of one forward pass share and, while a backward pass runs, what its sites hand on. The
    kernels describe the tensors."""

    def __init__(self, x: Tensor, u: Tensor, H: int, eps: float):
        """For sources like x [M, D], and u = query * key_norm [S, D] in fp32."""
        (M, D), S, groups = x.shape, len(u), -(-len(u) // G)
        self.u, self.H, self.eps, self.device = u, H, eps, x.device
        self.u_parts = _split(u, x.dtype)
        self.v = self.new(M, S, D, dtype=x.dtype)  # the sources
        self.rstd = self.new(groups, M, G)  # theirs
        self.lse = self.new(groups, M, G, H)  # the log-sum-exp of every site
        # what forward_inter found for the sites of a group
        self.part = self.new(M, G, D, dtype=torch.float16 if x.dtype == torch.bfloat16 else x.dtype)
        self.part_stat = self.new(2, M, H, G)

    def new(self, *shape, dtype=torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def read(self, x: Tensor, s: int) -> Tensor:
        """Stores source s, x [M, D], and returns the mix [M, D] at site s."""
        (M, S, D), H = self.v.shape, self.H
        s0, out = s // G * G, torch.empty_like(x)
        with _on(x):
            if s == s0 and s > 0:
                config = _inter_config(D, H, x.dtype) | dict(BN=16, num_stages=3)
                # per program, which loads its u once; not 1, for which Triton would compile another binary
                tokens = max(2, min(8, M * H * config["CH"] // 2048))
                args = self.v, self.rstd, *self.u_parts, self.part, self.part_stat
                forward_inter[(H * -(-M // tokens),)](*args, M, S, s0, tokens, **config)
            config = _intra_config(D, H, backward=False) | dict(MERGE=s0 > 0)
            args = x, self.v, self.rstd, self.u, self.part, self.part_stat, out, self.lse
            forward_intra[(M,)](*args, M, S, s, s0, self.eps, **config)
        if s == S - 1:  # not kept while the loss is computed
            self.part = self.part_stat = None
        return out

    def start_backward(self, end: int):
        """Sites end-1..0 will call `pull`, in this order."""
        (M, S, D), H, groups = self.v.shape, self.H, len(self.lse)
        self.end = end
        self.dh = []  # [M, sites, D] of this and of every later group; grows while the activations are freed
        self.delta, self.own = self.new(M, G, H), self.new(M, G, H, G)
        self.lse_t, self.delta_t = self.new(groups, M, H, G), self.new(groups, M, H, G)
        self.ds = self.new(groups, M, H, G, G, dtype=self.v.dtype)
        self.du = self.new(-(-M // _query_block(M)), S, D)

    def pull(self, dout: Tensor, h: Tensor, s: int) -> Tensor:
        """dout, h [M, D]: gradient and result of site s -> the gradient [M, D] of source s."""
        (M, S, D), H, dtype, end = self.v.shape, self.H, self.v.dtype, self.end
        s0, s1, inter = s // G * G, min(s // G * G + G, S), _inter_config(D, H, dtype)
        dv, fp32 = torch.empty_like(dout), dtype == torch.float32
        with _on(dout):
            if s == min(s1, end) - 1:  # the first site of its group
                later, self.dh = self.dh, [self.new(M, s1 - s0, D, dtype=dtype), *self.dh]
                # Without a part of its own backward_inter writes to dh: free with rows of 2,048 and 2,560
                # bytes, and with 1,024 bytes 1.3 ms of 3.4 (H200, 16,384 tokens).
                apart = D * dtype.itemsize <= 1024 and end > s1
                self.dpart = self.new(M, G, D, dtype=dtype) if apart else self.dh[0]
                self.dpart_c = self.new(M, H, G)
                if end > s1:
                    later += later[-1:] * (len(self.lse) - 1 - len(later))
                    args = (
                        self.v,
                        self.rstd,
                        *self.u_parts,
                        tuple(later),
                        self.lse_t,
                        self.delta_t,
                        self.dpart,
                    )
                    args = *args, self.dpart_c, self.ds, M, S, s0, s1, end
                    backward_inter[(H * -(-M // 2),)](*args, **inter, num_stages=2)
            args = (
                self.v,
                self.rstd,
                self.u,
                dout,
                h,
                self.dh[0],
                self.lse,
                self.delta,
                self.lse_t,
                self.delta_t,
            )
            args = *args, self.dpart, self.dpart_c, self.own, dv, M, S, s, s0, s1, end
            config = _intra_config(D, H, backward=True) | dict(MERGE=end > s1)
            backward_intra[(M,)](*args, **config)
            if s == s0:
                BJ = 64 if S - s1 > 32 else 32
                grid = max(1, -(-(S - s1) // BJ)), H * inter["CH"], len(self.du)
                config = inter | dict(BJ=BJ, BM=4 if fp32 else 8, num_warps=4, num_stages=2 if fp32 else 3)
                args = self.v, self.ds, self.own, self.du, M, S, s0, s1, end, _query_block(M)
                backward_query[grid](*args, **config)
        return dv

    def end_backward(self) -> Tensor:
        """-> the gradient [S, D] of u, zeros at sites that never ran."""
        du = F.pad(self.du[:, : self.end].sum(0), (0, 0, 0, len(self.u) - self.end))
        self.dh = self.delta = self.own = self.lse_t = self.delta_t = self.ds = self.du = None
        self.dpart = self.dpart_c = None
        return du


class _Read(torch.autograd.Function):
    """One site. `link` leads from site to site, so that the backward of a site runs after those of all later
    ones, and runs even where a sublayer in between passes no gradient or a result was not used."""

    @staticmethod
    def forward(ctx, source, u, link, chain, s):
        ctx.set_materialize_grads(False)
        h = chain.read(source.detach().reshape(-1, source.shape[-1]).contiguous(), s)
        ctx.save_for_backward(h)
        ctx.chain, ctx.s, ctx.shape = chain, s, source.shape
        return h.view(source.shape), h.new_empty(0)

    @staticmethod
    def backward(ctx, dout, link):
        (h,), chain, s = ctx.saved_tensors, ctx.chain, ctx.s
        if link is None:  # the first site of this backward pass, which need not be the last of the chain
            chain.start_backward(end=s + 1)
        dout = torch.zeros_like(h) if dout is None else dout.reshape(h.shape).contiguous()
        dv = chain.pull(dout, h, s).view(ctx.shape)
        if s > 0:
            return dv, None, h.new_empty(0), None, None
        return dv, chain.end_backward(), None, None, None


class FusedRouter:
    """Full routing of one forward pass over the kernels: a chain of sites, each reading the sources so far.

        router = FusedRouter(x, query, key_norm, n_heads)      x [..., D]: source 0; query, key_norm [S, D]
        h = router.read()       the mix [..., D] at the current site, over sources 0..site
        router.write(f)         f [..., D] becomes the next source, and the site after it the current one

    Gradients equal route_reference's whatever is detached, unused, read twice or not read; a backward pass
    may be repeated (retain_graph). The sources share one shape, dtype (bf16, fp16, fp32) and device.
    ValueError where the kernels cannot run (see `kernel_support`)."""

    @_eager
    def __init__(self, x: Tensor, query: Tensor, key_norm: Tensor, n_heads: int, eps: float = 1e-6):
        S, D = query.shape
        _check(x, D, n_heads, S)
        if x.shape[-1] != D or key_norm.shape != query.shape:
            shapes = ", ".join(str(tuple(t.shape)) for t in (x, query, key_norm))
            raise ValueError(f"x, query and key_norm of {shapes} do not fit together")
        self.x, self.S = x, S
        self.u = query.float() * key_norm.float()  # [S, D]; its autograd gives their gradients
        self.chain = _Chain(x.detach().reshape(-1, D), self.u.detach(), n_heads, eps)
        self.source, self.site, self.mix, self.link = x, 0, None, None

    @_eager
    def read(self) -> Tensor:
        if self.mix is None:
            self.mix, self.link = _Read.apply(self.source, self.u, self.link, self.chain, self.site)
        return self.mix

    def output(self) -> Tensor:
        return self.read()

    def write(self, f: Tensor) -> None:
        x = self.x
        if self.site + 1 == self.S:
            raise ValueError(f"query has {self.S} rows, so there is no site after source {self.site}")
        if f.shape != x.shape or f.dtype != x.dtype or f.device != x.device:
            source, sources = (f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in (f, x))
            raise ValueError(f"a source of {source} cannot join sources of {sources}")
        self.read()  # a site that nobody read still stores its source
        self.source, self.site, self.mix = f, self.site + 1, None


# -------------------- Delta routing: kernels
#
# The N sources of a block are known when it starts and the same for all its sites: one kernel reads them once
# and writes what every site will add to its stream, gate * mix. One kernel does the backward, when the
# gradients of all the block's sites are there, and recomputes the weights. A site's null source has one logit
# per head, the same for all tokens: it comes in, and its gradient goes out, as a number. So does rstd. Two
# tokens at a time fill the 16 rows of the tensor cores: (token, site) against (token, source); where rows are
# sites alone, the second 8 hold the lo parts of u and null. All small arrays, logits to ds, are [site,
# (token, source)], the same in every warp.
@jit
def _weighted_hi_lo(p, b, acc):
    """acc + p b, p [rows, columns] in fp32; in 16-bit types as hi + lo."""
    hi = p.to(b[0].dtype)
    acc = _weighted(hi, b, acc)
    if hi.dtype != tl.float32:
        acc = _weighted(p - hi.to(tl.float32), b, acc)
    return acc


@jit(do_not_specialize=_RUNTIME)
def delta_forward(
    SOURCES,
    R,
    U,
    NULL,
    NULL_LOGIT,
    GATE,
    OUT,
    M,
    TB,
    J: constexpr,
    H: constexpr,
    K: constexpr,
    CH: constexpr,
    W: constexpr,
    BN: constexpr,
):
    """OUT[j] = GATE[j] * mix of [NULL[j], SOURCES] for J <= 8 sites. Program: one head of TB tokens, two at a
    time. R [N, M]; U and NULL [2, J, D] (hi and lo); NULL_LOGIT [J, H]."""
    D: constexpr = H * K
    N: constexpr = len(SOURCES)
    h = tl.program_id(0) % H
    m = (tl.program_id(0) // H).to(tl.int64) * TB
    m_end = tl.minimum(m + TB, M)
    # Rows of (token, source); of (token, site) or (part, site); of sites.
    a, b, j = tl.arange(0, 2 * BN), tl.arange(0, 16), tl.arange(0, 8)
    k = _columns(CH, W)
    col = h * K + k
    u = _load(U, (b // 8 * J + b % 8) * D, b % 8 < J, col, k, K, "")  # [CH, 16, W]
    null = _load(NULL, (b // 8 * J + b % 8) * D, b % 8 < J, col, k, K, "")
    null_logit = tl.load(NULL_LOGIT + j * H + h, mask=j < J, other=0.0)[:, None]
    gate = tl.load(GATE + j, mask=j < J, other=0.0)[:, None]
    source = _pointers(SOURCES, a % BN)
    for t in range(m, m_end, 2):
        token = t + a // BN
        ok = (a % BN < N) & (token < m_end)
        v = _load(source, token * D, ok, col, k, K, "")  # [CH, 2 BN, W]
        r = tl.load(R + a % BN * M + token, mask=ok, other=0.0)[None, :]
        logit = _fold(_products(u, v)) * r
        logit = tl.reshape(tl.where(ok[None, :], logit, float("-inf")), [8, 2, BN])
        top = tl.maximum(tl.max(logit, 2), null_logit)  # [site, token]
        p, p_null = tl.exp(logit - top[:, :, None]), tl.exp(null_logit - top)
        scale = tl.div_rn(gate, tl.sum(p, 2) + p_null)
        p = _repeat(tl.reshape(p * scale[:, :, None], [8, 2 * BN]))
        # A site's own token only: [(token, site), (token, source)].
        p = tl.where(b[:, None] // 8 == a[None, :] // BN, p, 0.0)
        p_null = tl.reshape(tl.trans(p_null * scale), [16])[:, None]
        p_null = tl.where(b[:, None] % 8 == b[None, :] % 8, p_null, 0.0)  # [(token, site), (part, site)]
        out = _weighted_hi_lo(p_null, null, _zeros(CH, 16, K, W))
        out = _weighted_hi_lo(p, v, out)
        at = t + b // 8
        _store(OUT, (b % 8 * M + at) * D, (b % 8 < J) & (at < m_end), col, k, out, K)


@jit(do_not_specialize=_RUNTIME)
def delta_backward(
    SOURCES,
    DOUT,
    R,
    U,
    NULL,
    NULL_LOGIT,
    GATE,
    DV,
    DR,
    DPARAM,
    DLOGIT,
    DGATE,
    M,
    TB,
    J: constexpr,
    H: constexpr,
    K: constexpr,
    CH: constexpr,
    W: constexpr,
    BN: constexpr,
):
    """Gradients of delta_forward's inputs. Program: one head of TB tokens, two at a time. -> DV[i] [M, D],
    without the norm's part; DR [N, M, H]; and partial sums over TB tokens: DPARAM [M / TB, 2, J, D], of u and
    null; DLOGIT and DGATE [M / TB, J, H]."""
    D: constexpr = H * K
    N: constexpr = len(SOURCES)
    h = tl.program_id(0) % H
    block = tl.program_id(0) // H
    m = block.to(tl.int64) * TB
    m_end = tl.minimum(m + TB, M)
    a, b, j = tl.arange(0, 2 * BN), tl.arange(0, 16), tl.arange(0, 8)  # as in delta_forward
    k = _columns(CH, W)
    col = h * K + k
    u = _load(U, (b // 8 * J + b % 8) * D, b % 8 < J, col, k, K, "")  # [CH, 16, W]
    null = _load(NULL, (b // 8 * J + b % 8) * D, b % 8 < J, col, k, K, "")
    null_logit = tl.load(NULL_LOGIT + j * H + h, mask=j < J, other=0.0)[:, None]
    gate = tl.load(GATE + j, mask=j < J, other=0.0)[:, None]
    source, dout = _pointers(SOURCES, a % BN), _pointers(DOUT, b % 8)
    dv_at = _pointers(DV, a % BN)
    same_token = b[:, None] // 8 == a[None, :] // BN  # [(token, site), (token, source)]
    same_site = b[:, None] % 8 == b[None, :] % 8
    acc = _zeros(CH, 16, K, W)  # du, dnull
    dlogit, dgate = tl.zeros([8], tl.float32), tl.zeros([8], tl.float32)
    for t in range(m, m_end, 2):
        token, at = t + a // BN, t + b // 8
        ok = (a % BN < N) & (token < m_end)
        v = _load(source, token * D, ok, col, k, K, "")  # [CH, 2 BN, W]
        dh = _load(dout, at * D, (b % 8 < J) & (at < m_end), col, k, K, "")  # [CH, 16, W]
        r = tl.load(R + a % BN * M + token, mask=ok, other=0.0)[None, :]
        raw, dp = _products(u, v), _products(dh, v)
        x = tl.join(raw, tl.where(same_token[None, :, :], dp, 0.0))  # one sum over the chunks for both
        x = tl.permute(tl.sum(tl.reshape(x, [CH, 2, 8, 2 * BN, 2]), 1), (0, 3, 1, 2))
        raw, dp = tl.split(tl.permute(_sum_chunks(x), (1, 2, 0)))
        dp = tl.reshape(dp, [8, 2, BN])
        dp_null = _fold(tl.where(same_site[None, :, :], _products(null, dh), 0.0))
        dp_null = tl.sum(tl.reshape(dp_null, [8, 2, 8]), 2)  # [site, token]
        logit = tl.reshape(tl.where(ok[None, :], raw * r, float("-inf")), [8, 2, BN])
        top = tl.maximum(tl.max(logit, 2), null_logit)
        p, p_null = tl.exp(logit - top[:, :, None]), tl.exp(null_logit - top)
        scale = tl.div_rn(1.0, tl.sum(p, 2) + p_null)
        p, p_null = p * scale[:, :, None], p_null * scale
        delta = tl.sum(p * dp, 2) + p_null * dp_null  # <dout_j, mix_j>
        dgate += tl.sum(delta, 1)
        p, p_null = p * gate[:, :, None], p_null * gate
        dlogit += tl.sum(p_null * (dp_null - delta), 1)
        ds = tl.reshape(p * (dp - delta[:, :, None]), [8, 2 * BN])
        tl.store(DR + (a % BN * M + token) * H + h, tl.sum(ds * raw, 0), mask=ok)
        ds = _repeat(ds * r)  # [(part, site), (token, source)]
        p = tl.where(same_token, _repeat(tl.reshape(p, [8, 2 * BN])), 0.0)  # [(token, site), (token, source)]
        p_null = tl.reshape(tl.trans(p_null), [16])[None, :]
        p_null = tl.where(same_site & (b[:, None] >= 8), p_null, 0.0)  # [(part, site), (token, site)]
        dv = _weighted(tl.trans(p), dh, _zeros(CH, 2 * BN, K, W))
        dv = _weighted(tl.trans(ds), u, dv)
        _store(dv_at, token * D, ok, col, k, dv, K)
        acc = _weighted(tl.where(b[:, None] < 8, ds, 0.0), v, acc)
        acc = _weighted(p_null, dh, acc)
    _store(DPARAM, ((block * 2 + b // 8) * J + b % 8) * D, b % 8 < J, col, k, acc, K)
    tl.store(DLOGIT + (block * J + j) * H + h, dlogit, mask=j < J)
    tl.store(DGATE + (block * J + j) * H + h, dgate, mask=j < J)


# -------------------- Delta routing: launches and autograd
@cache
def _delta_config(D: int, H: int, N: int, J: int, dtype) -> dict:
    K, fp32 = D // H, dtype == torch.float32
    CH = min(16, triton.next_power_of_2(triton.cdiv(K, 32 if fp32 else 128)))
    W = next((w for w in (64, 32, 16) if K % (CH * w) == 0), 32 if K > 16 * CH else 16)
    BN = 8 if N <= 8 else 16  # the last of 8 blocks reads 8 sources, the embedding and 7 deltas
    return dict(J=J, H=H, K=K, CH=CH, W=W, BN=BN, num_warps=CH, num_stages=2 if BN == 8 and not fp32 else 1)


def _aligned(tensors) -> tuple:
    return tuple(x if x.data_ptr() % 16 == 0 else x.clone() for x in tensors)


class _Delta(torch.autograd.Function):
    """N sources [..., D]; rstd [N, M]; u, null [J, D]; null_logit [J, H]; gate [J] -> J times gate * mix
    [..., D]."""

    @staticmethod
    def forward(ctx, H, rstd, u, null, null_logit, gate, *sources):
        ctx.set_materialize_grads(False)
        ctx.H, ctx.shape = H, sources[0].shape
        sources = [x.reshape(-1, x.shape[-1]).contiguous() for x in sources]
        ctx.save_for_backward(rstd, u, null, null_logit, gate, *sources)
        (M, D), J, dtype, tokens = sources[0].shape, len(u), sources[0].dtype, 16
        out = torch.empty(J, M, D, dtype=dtype, device=u.device)
        with _on(u):
            parts = (torch.stack(_split(x, dtype)) for x in (u, null))
            config = _delta_config(D, H, len(sources), J, dtype)
            args = _aligned(sources), rstd, *parts, null_logit, gate, out, M, tokens
            delta_forward[(H * -(-M // tokens),)](*args, **config)
        return out.view(J, *ctx.shape).unbind(0)

    @staticmethod
    def backward(ctx, *dout):
        rstd, u, null, null_logit, gate, *sources = ctx.saved_tensors
        (M, D), N, J, H, dtype = sources[0].shape, len(sources), len(u), ctx.H, sources[0].dtype
        like = sources[0]
        dout = [torch.zeros_like(like) if x is None else x.reshape(M, D).contiguous() for x in dout]
        tokens = max(16, -(-M // 256) * 2)  # even: two at a time
        blocks = -(-M // tokens)
        dv = [torch.empty_like(v) for v in sources]
        dr, dparam = u.new_empty(N, M, H), u.new_empty(blocks, 2, J, D)
        dlogit, dgate = u.new_empty(blocks, J, H), u.new_empty(blocks, J, H)
        with _on(u):
            parts = (torch.stack(_split(x, dtype)) for x in (u, null))
            args = _aligned(sources), _aligned(dout), rstd, *parts, null_logit, gate
            args = *args, tuple(dv), dr, dparam, dlogit, dgate, M, tokens
            delta_backward[(H * blocks,)](*args, **_delta_config(D, H, N, J, dtype))
        parameters = dr.sum(-1), *dparam.sum(0), dlogit.sum(0), dgate.sum((0, 2))
        return None, *parameters, *[x.view(ctx.shape) for x in dv]


class FusedDeltaRouter:
    """Delta routing of one forward pass: an additive stream, and beside it a gated mix of what blocks added.

        router = FusedDeltaRouter(x, query, key_norm, null, gate, n_heads, block_sites)
                                x [..., D]: the embedding; query, key_norm, null [S, D]; gate [S]
        h = router.read()       x + gate * mix at the current site, of the null source, the embedding and the
                                deltas of the blocks before
        router.write(f)         x becomes x + f, and the next site the current one

    A block is `block_sites` sites; its delta is the stream at its end minus the stream at its start.
    ValueError where the kernels cannot run (see `kernel_support`)."""

    @_eager
    def __init__(self, x, query, key_norm, null, gate, n_heads: int, block_sites: int, eps: float = 1e-6):
        S, D = query.shape
        _check(x, D, n_heads, S, -(-S // block_sites))
        self.H, self.eps, self.block_sites, self.S = n_heads, eps, block_sites, S
        self.u, self.null, self.gate = query.float() * key_norm.float(), null.float(), gate.float()
        null_logit = self.u * self.null * self._rstd(self.null)[:, None]
        self.null_logit = null_logit.view(S, n_heads, -1).sum(-1)  # [S, H]
        self.x = self.block_start = x
        self.sources, self.rstd = [x], [self._rstd(x)]  # [..., D] and [M] each
        self.site, self.mixes = 0, ()

    def _rstd(self, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)  # keeps no fp32 copy of x
        return (norm.square() / x.size(-1) + self.eps).rsqrt().flatten()

    @_eager
    def read(self) -> Tensor:
        if not self.mixes:  # of all sites from here on that read the same sources, up to G of them
            block_end = (self.site // self.block_sites + 1) * self.block_sites
            sites = slice(self.site, min(self.site + G, block_end, self.S))
            parameters = self.u[sites], self.null[sites], self.null_logit[sites], self.gate[sites]
            self.mixes = _Delta.apply(self.H, torch.stack(self.rstd), *parameters, *self.sources)
        return self.x + self.mixes[self.site % self.block_sites % G]

    def write(self, f: Tensor) -> None:
        self.x = self.x + f
        self.site += 1
        if self.site % self.block_sites % G == 0:
            self.mixes = ()
        if self.site % self.block_sites == 0 and self.site < self.S:
            self.sources.append(self.x - self.block_start)
            self.rstd.append(self._rstd(self.sources[-1]))
            self.block_start = self.x

    def output(self) -> Tensor:
        return self.x


# -------------------- Support: where the kernels can run
def _limits(device, dtype, D: int, H: int, S: int, blocks: int) -> str | None:
    if triton is None:
        return "triton is not installed"
    if INTERPRETED and dtype != torch.float32:
        return f"Triton's interpreter is right in float32 only, not in {dtype}"
    if not INTERPRETED and device.type != "cuda":
        return f"the kernels need a CUDA device, not {device.type}"
    if not INTERPRETED and torch.cuda.get_device_capability(device) < (8, 0):
        return f"the kernels need compute capability 8.0, {torch.cuda.get_device_name(device)} has less"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"sources are bfloat16, float16 or float32, not {dtype}"
    if H < 1 or D % H:
        return f"route_heads={H} does not divide the width {D}"
    if H > MAX_HEADS:
        return f"at most {MAX_HEADS} routing heads, not {H}"
    if S > MAX_SITES:
        return f"at most {MAX_SITES} sources, not {S}"
    if blocks > MAX_BLOCKS:
        return f"at most {MAX_BLOCKS} blocks of delta routing, not {blocks}"
    return None


def _check(x: Tensor, D: int, H: int, S: int, blocks: int = 0) -> None:
    if reason := _limits(x.device, x.dtype, D, H, S, blocks):
        raise ValueError(f"the routing kernels cannot run here: {reason}")


@cache
@torch.inference_mode(False)
def _trial(device, dtype, D: int, H: int, S: int, blocks: int) -> str | None:
    """Runs every kernel on two tokens: only Triton knows how much shared memory a wide head takes."""
    x, u = torch.zeros(2, D, dtype=dtype, device=device), torch.zeros(S, D, device=device)
    try:
        if blocks:
            rstd, null_logit = torch.zeros(blocks, 2, device=device), torch.zeros(S, H, device=device)
            parameters = rstd, u, u, null_logit, torch.zeros(S, device=device)
            mixes = _Delta.apply(H, *parameters, *[x.clone().requires_grad_() for _ in range(blocks)])
            sum(mixes).sum().backward()
        else:
            router = FusedRouter(x.requires_grad_(), u, u, H)
            for _ in range(S - 1):
                router.write(router.read())
            router.read().sum().backward()
    except triton.runtime.errors.OutOfResources as error:
        need = f"{error.required} bytes of {error.name} in {dtype}, this GPU has {error.limit}"
        return f"a routing head {D // H} wide needs {need}: take more route_heads"
    return None


def kernel_support(device, dtype, D: int, H: int, S: int, blocks: int = 0) -> str | None:
    """None where the Triton kernels can run, otherwise the reason, in one line. blocks: of delta routing, 0
    for full routing. On a GPU this compiles the kernels, which takes seconds unless Triton has them in its
    cache."""
    device = torch.device(device)
    if (reason := _limits(device, dtype, D, H, S, blocks)) or INTERPRETED:
        return reason
    return _trial(device, dtype, D, H, min(S, G) if blocks else S, blocks)
