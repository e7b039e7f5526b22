"""Depth routing: the fp32 reference, the Triton kernels, and the autograd around them.

`route_reference` is the specification and the oracle. `FusedRouter` computes the same thing for a whole chain of sites in a few bytes per
element: the queries are parameters, so the sites of a group can read the older sources together, and the backward can mirror that.
Checked in test_kernels.py, timed in bench.py.

Legend: B batch, T time, M = B*T tokens, D width, H routing heads, K = D // H, S depth sources / sites, G sites per group.
Site s (0-based) reads sources 0..s. Source 0 is the embedding, source s + 1 was computed from what site s returned.

    alpha[s, i, h] = softmax_i <query[s, h], (RMSNorm_D(source_i) * key_norm[s])[h]>        read[s, h] = sum_i alpha[s, i, h] source_i[h]

Forward. Fold u = query * key_norm once: logit_si = rstd_i <u_s, v_i>, and no key is ever formed. Per token and head a site is attention with
one static query, and keys = values = the sources. At the first site of a group, `forward_inter` lets all G sites of the group read the sources
of the earlier groups in one pass; `forward_intra`, once per site, adds the sources of its own group by online softmax.

Backward, mirrored. Site s runs after all later sites (source s + 1 hangs on what it returned), so the gradient of source i can be pulled from
all sites j >= i in one go. With Delta_j = <dh_j, h_j> per head (FlashAttention's trick) and lse_j saved by the forward:

    p_ji = exp(logit_ji - lse_j)        ds_ji = p_ji (<dh_j, v_i> - Delta_j)
    dv_i = sum_j p_ji dh_j + rstd_i sum_j ds_ji u_j - (rstd_i^2 / D) (sum_{j,h} ds_ji logit_ji) v_i
    du_j = sum_{i, tokens} ds_ji rstd_i v_i

At the last site of a group `backward_inter` pulls from all later groups into the G sources of the group; `backward_intra`, once per site, adds
the group's own sites; `backward_query` forms du, once per group, in a fixed order. Nothing is saved but the sources, rstd, lse and h.
"""
from __future__ import annotations

import os
from contextlib import nullcontext
from functools import cache

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without triton: the reference works, and kernel_support says why the kernels do not
    triton = tl = None

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # the kernels below run on the CPU, slowly: for tests
G = 8  # sites per group
MAX_HEADS, MAX_SITES, MAX_BLOCKS = 64, 257, 16


def route_reference(sources, query: Tensor, key_norm: Tensor, n_heads: int, eps: float = 1e-6):
    """Multi-head attention over depth at one site, in fp32 (fp64 inputs: in fp64), whatever the dtype of the sources.

        alpha[i, h] = softmax_i <query[h], (RMSNorm_D(source_i) * key_norm)[h]>        mix[h] = sum_i alpha[i, h] source_i[h]

    The norm runs over the whole width D, then heads are slices of K = D // H channels; there is no 1/sqrt(K); values are raw.
    sources: N tensors [..., D], or one stacked tensor [N, ..., D]; query, key_norm: [D].
    Returns mix [..., D] in the sources' dtype and the weights [N, ..., H] in fp32 (fp64).
    """
    values = sources if isinstance(sources, Tensor) else torch.stack(tuple(sources))  # [N, ..., D]
    if values.shape[-1] % n_heads:
        raise ValueError(f"n_heads={n_heads} does not divide the width {values.shape[-1]}")
    dtype = torch.promote_types(values.dtype, torch.float32)
    v = values.to(dtype)
    rstd = (v.square().mean(-1, keepdim=True) + eps).rsqrt()  # [N, ..., 1]
    v = v.unflatten(-1, (n_heads, -1))  # [N, ..., H, K]
    u = (query.to(dtype) * key_norm.to(dtype)).view(n_heads, -1)  # the norm's weight folded into the query: no key is ever formed
    weights = ((v * u).sum(-1) * rstd).softmax(0)  # [N, ..., H]
    mix = (weights[..., None] * v).sum(0).flatten(-2)
    return mix.to(values.dtype), weights


# ---------------------------------------------------------------------------------------------------------------------------------------------
# Kernels. Widths such as 160 are no power of two, so a row is a tuple of narrow tiles (5 x 32), and whatever runs over columns is a static loop
# over the tuple. In the inter kernels a tile is CH chunks of W columns, one warp each, and rows come in sixteens, as tensor cores take them:
# the G sources of a group for two tokens, (token, source), likewise (token, site), or (part, site): in 16-bit types u enters the products as hi + lo.
# Where rows of two tokens meet, what belongs to different tokens is masked. Sums, logits and softmax are fp32.

def jit(function=None, **options):
    """triton.jit, or nothing where there is no triton."""
    if function is None:
        return lambda f: jit(f, **options)
    return triton.jit(function, **options) if triton else function


_RUNTIME = ["M", "S", "s", "s0", "e0"]  # never specialised: one binary serves all sites, all depths and all batch sizes


@jit
def _tiles(base, row, row_ok, col, k, K: tl.constexpr, STEP: tl.constexpr, CACHE: tl.constexpr):
    """A head's K columns of the rows at the offsets `row`, as a tuple of tiles [CH, rows, W]. Of the first tile: k [CH, 1, W], its columns among the
    head's, 0..STEP-1, and col, among the row's."""
    tiles = ()
    for q in tl.static_range((K + STEP - 1) // STEP):
        tiles = tiles + (tl.load(base + row[None, :, None] + col + q * STEP, mask=row_ok[None, :, None] & (q * STEP + k < K), other=0.0, cache_modifier=CACHE),)
    return tiles


@jit
def _pointers(tensors, n, ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    """Row n's pointer is that of tensor n (the last one's past the end). ALIGNED: all are multiples of 16 bytes, which the compiler loses in `where`."""
    at = tensors[0] + tl.zeros([ROWS], tl.int64)
    for i in tl.static_range(1, len(tensors)):
        at = tl.where(n >= i, tensors[i] + tl.zeros([ROWS], tl.int64), at)
    if ALIGNED:
        at = tl.multiple_of(at, 16)
    return at


@jit
def _rows(pointers, offset, row_ok, col, k, K: tl.constexpr, STEP: tl.constexpr):
    """_tiles, with a pointer per row."""
    tiles = ()
    for q in tl.static_range((K + STEP - 1) // STEP):
        tiles = tiles + (tl.load((pointers + offset)[None, :, None] + col + q * STEP, mask=row_ok[None, :, None] & (q * STEP + k < K), other=0.0),)
    return tiles


@jit
def _empty(CH: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, W: tl.constexpr):
    tiles = ()
    for q in tl.static_range((K + CH * W - 1) // (CH * W)):
        tiles = tiles + (tl.zeros([CH, ROWS, W], tl.float32),)
    return tiles


@jit
def _dot_t(a, b, acc):
    """acc + a b^T over a chunk's columns: [CH, rows of a, rows of b]. "ieee" concerns fp32 alone: no tf32."""
    for q in tl.static_range(len(a)):
        acc = tl.dot(a[q], tl.permute(b[q], (0, 2, 1)), acc, input_precision="ieee")
    return acc


@jit
def _dot_add(p, b, acc):
    """acc + p b, tile by tile."""
    tiles = ()
    for q in tl.static_range(len(b)):
        tiles = tiles + (tl.dot(p, b[q], acc[q], input_precision="ieee"),)
    return tiles


@jit
def _chunks(x, CH: tl.constexpr, dtype: tl.constexpr):
    """One matrix for all chunks: [CH, rows, columns]."""
    return tl.broadcast_to(x.to(dtype)[None, :, :], [CH, x.shape[0], x.shape[1]])


@jit
def _scale(acc, by):
    """by[row] acc, tile by tile."""
    tiles = ()
    for q in tl.static_range(len(acc)):
        tiles = tiles + (acc[q] * by[None, :, None],)
    return tiles


@jit
def _store_tiles(base, row, row_ok, col, k, tiles, K: tl.constexpr, STEP: tl.constexpr):
    for q in tl.static_range(len(tiles)):
        tl.store(base + row[None, :, None] + col + q * STEP, tiles[q].to(base.dtype.element_ty), mask=row_ok[None, :, None] & (q * STEP + k < K))


@jit
def _sum_chunks(x, CH: tl.constexpr, N: tl.constexpr, C: tl.constexpr):
    """[CH, N, 8, C] -> [N, 8, C]. The chunks lie in different warps, so the sum goes through shared memory, where all chunks of a number are neighbours.
    Threads of a tensor core hold 8 rows x 4 pairs of columns: in that order the banks they write to differ."""
    if CH > 1:
        x = tl.reshape(tl.permute(tl.reshape(x, [CH, N, 8, C // 8, 4, 2]), (0, 1, 3, 5, 2, 4)), [CH, N * 8 * C])
        x = tl.permute(tl.reshape(tl.sum(x, 0), [N, C // 8, 2, 8, 4]), (0, 3, 1, 4, 2))
    return tl.reshape(x, [N, 8, C])


@jit
def _fold(x, CH: tl.constexpr, ROWS: tl.constexpr):
    """Sum over the chunks and over the hi and lo parts: [CH, (part, site), ROWS] -> [site, ROWS]."""
    if CH == 1:
        return tl.sum(tl.reshape(x, [2, 8, ROWS]), 0)
    return tl.reshape(_sum_chunks(tl.reshape(tl.sum(tl.reshape(x, [CH, 2, 8, ROWS]), 1), [CH, 1, 8, ROWS]), CH, 1, ROWS), [8, ROWS])


@jit
def _repeat(x, ROWS: tl.constexpr):
    """[8, ROWS] twice, one above the other: [16, ROWS]."""
    return tl.reshape(tl.broadcast_to(tl.reshape(x, [1, 8, ROWS]), [2, 8, ROWS]), [16, ROWS])


@jit(do_not_specialize=_RUNTIME)
def forward_inter(V, R, UH, UL, PART, PART_STAT, M, S, s0, TB, H: tl.constexpr, K: tl.constexpr, CH: tl.constexpr, W: tl.constexpr,
                  G: tl.constexpr, BN: tl.constexpr):
    """Sites s0..s0+G-1 attend to sources 0..s0-1. Program: one head of TB tokens. -> PART [M, G, D], normalised, over a power of two; PART_STAT
    [2, M, H, G], the logarithm of the denominator and that power."""
    # PART of bfloat16 sources is float16, whose three more bits make its rounding negligible; for its narrow range each head of a row is scaled.
    # The 16 rows of a tensor-core tile are (part, site): of u in the logits, of p in the mix. So both are exact at the price of neither.
    D: tl.constexpr = H * K
    STEP: tl.constexpr = CH * W
    h = tl.program_id(0) % H
    m = (tl.program_id(0) // H).to(tl.int64) * TB
    tokens = tl.minimum(M - m, TB).to(tl.int32)
    b, g, n = tl.arange(0, 2 * G), tl.arange(0, G), tl.arange(0, BN)
    k = tl.arange(0, CH)[:, None, None] * W + tl.arange(0, W)[None, None, :]  # [CH, 1, W]
    col = h * K + k
    u = _rows(_pointers((UH, UL), b // G, 2 * G, True), (s0 + b % G) * D, s0 + b % G < S, col, k, K, STEP)  # [CH, 2 G, W], the same for all tokens
    top = tl.full([G], float("-inf"), tl.float32)  # running maximum and sum of the softmax
    den = tl.zeros([G], tl.float32)
    acc = _empty(CH, 2 * G, K, W)
    blocks = tl.cdiv(s0, BN)
    for step in range(tokens * blocks):  # all blocks of all tokens in one loop, so that the pipeline never drains
        token = m + step // blocks
        i = step % blocks * BN + n
        ok = i < s0
        v = _tiles(V + token * S * D, i * D, ok, col, k, K, STEP, "")  # [CH, BN, W]
        r = tl.load(R + (i // G * M + token) * G + i % G, mask=ok, other=0.0)
        lg = _fold(_dot_t(u, v, tl.zeros([CH, 2 * G, BN], tl.float32)), CH, BN)
        lg = tl.where(ok[None, :], lg * r[None, :], float("-inf"))  # [G, BN]
        top_new = tl.maximum(top, tl.max(lg, 1))
        scale = tl.exp(top - top_new)
        p = tl.exp(lg - top_new[:, None])
        den = den * scale + tl.sum(p, 1)
        top = top_new
        p = _repeat(p, BN)
        hi = p.to(V.dtype.element_ty)
        p = tl.where(b[:, None] < G, hi, (p - hi.to(tl.float32)).to(V.dtype.element_ty))
        acc = _dot_add(_chunks(p, CH, V.dtype.element_ty), v, _scale(acc, tl.reshape(tl.broadcast_to(scale[None, :], [2, G]), [2 * G])))
        if step % blocks == blocks - 1:
            out, size = (), tl.zeros([CH, G], tl.float32)
            for q in tl.static_range(len(acc)):
                out = out + (tl.sum(tl.reshape(acc[q], [CH, 2, G, W]), 1) * (1.0 / den)[None, :, None],)
                size = tl.maximum(size, tl.max(tl.abs(out[q]), 2))
            exponent = (tl.maximum(tl.max(size, 0), 1e-30).to(tl.int32, bitcast=True) & 0x7F800000) - (14 << 23)  # the bits of a power of two
            by = (0x7F000000 - exponent).to(tl.float32, bitcast=True)  # one over it: the largest becomes 2^14 to 2^15, of float16's 2^16
            _store_tiles(PART, (token * G + g) * D, s0 + g < S, col, k, _scale(out, by), K, STEP)
            tl.store(PART_STAT + (token * H + h) * G + g, top + tl.log(den), mask=s0 + g < S)
            tl.store(PART_STAT + ((M + token) * H + h) * G + g, exponent.to(tl.float32, bitcast=True), mask=s0 + g < S)
            top = tl.full([G], float("-inf"), tl.float32)
            den = tl.zeros([G], tl.float32)
            acc = _empty(CH, 2 * G, K, W)


@jit(do_not_specialize=_RUNTIME)
def backward_inter(V, R, UH, UL, LATER, LSE_H, DEL_H, PART, PART_C, DS, END, M, S, s0, e0, H: tl.constexpr, K: tl.constexpr, CH: tl.constexpr,
                   W: tl.constexpr, G: tl.constexpr):
    """Sources s0..e0-1 pull from sites e0..END-1. Program: one head of two tokens, one later group at a time. LATER: the DH [M, G, D] of every later group
    (a short last one has fewer rows), padded to a power of two. -> PART [M, G, D], PART_C [M, H, G], DS [S / G, M, H, G, G]."""
    D: tl.constexpr = H * K
    STEP: tl.constexpr = CH * W
    DT: tl.constexpr = V.dtype.element_ty
    pairs = tl.cdiv(M, 2)
    h = tl.program_id(0) // pairs
    at = (tl.program_id(0) % pairs).to(tl.int64) * 2
    end = tl.load(END).to(tl.int32)
    a, g, t = tl.arange(0, 2 * G), tl.arange(0, G)[None, :], tl.arange(0, 2)[:, None]
    m, token = tl.minimum(at + a // G, M - 1), tl.minimum(at + t, M - 1)  # of an odd number of tokens the last is done twice, with the same result
    k = tl.arange(0, CH)[:, None, None] * W + tl.arange(0, W)[None, None, :]  # [CH, 1, W]
    col = h * K + k
    u_at = _pointers((UH, UL), a // G, 2 * G, True)
    v = _tiles(V, (m * S + s0 + a % G) * D, a < 2 * G, col, k, K, STEP, ".cg")  # [CH, (token, source), W]
    r = tl.load(R + (s0 // G * M + token) * G + g)[:, :, None]
    mine = a[:, None] // G == a[None, :] // G
    total = tl.zeros([2, G], tl.float32)  # sum_j ds_ji logit_ji
    acc = _empty(CH, 2 * G, K, W)
    for group in range(e0 // G, tl.cdiv(end, G)):
        ok, ok_g = group * G + a % G < end, group * G + g < end
        dh_at = LATER[0]
        for i in tl.static_range(1, len(LATER)):
            dh_at = tl.where(group - e0 // G >= i, LATER[i], dh_at)
        dh = _tiles(tl.multiple_of(dh_at, 16), (m * tl.minimum(S - group * G, G) + a % G) * D, ok, col, k, K, STEP, "")  # [CH, (token, site), W]
        u = _rows(u_at, (group * G + a % G) * D, ok, col, k, K, STEP)  # [CH, (part, site), W]
        zero = tl.zeros([CH, 2 * G, 2 * G], tl.float32)
        both = tl.join(_dot_t(v, u, zero), tl.where(mine[None, :, :], _dot_t(v, dh, zero), 0.0))  # one sum over the chunks for two products
        both = tl.permute(tl.sum(tl.reshape(both, [CH, 2, G, 2, G, 2]), 3), (0, 4, 1, 2, 3))
        both = tl.reshape(_sum_chunks(tl.reshape(both, [CH, 4, G, G]), CH, 4, G), [2, 2, G, G])
        lg, dp = tl.split(tl.permute(both, (1, 2, 3, 0)))  # [token, source, site]
        stat = ((group * M + token) * H + h) * G + g
        lse, delta = tl.load(LSE_H + stat, mask=ok_g, other=0.0), tl.load(DEL_H + stat, mask=ok_g, other=0.0)  # [token, site]
        lg *= r
        p = tl.where(ok_g[:, None, :], tl.exp(lg - lse[:, None, :]), 0.0)
        ds = p * (dp - delta[:, None, :])
        total += tl.sum(ds * lg, 2)
        ds = (ds * r).to(DT)
        tl.store(DS + stat[:, None, :] * G + g[:, :, None], ds, mask=ok_g[:, None, :])
        p = tl.join(tl.where(t[:, :, None] == 0, p, 0.0), tl.where(t[:, :, None] == 1, p, 0.0)).to(DT)
        p = tl.reshape(tl.permute(p, (0, 1, 3, 2)), [2 * G, 2 * G])  # [(token, source), (token, site)]
        ds = tl.reshape(tl.broadcast_to(tl.reshape(ds, [2, G, 1, G]), [2, G, 2, G]), [2 * G, 2 * G])  # [(token, source), (part, site)]
        acc = _dot_add(_chunks(ds, CH, DT), u, _dot_add(_chunks(p, CH, DT), dh, acc))
    _store_tiles(PART, (m * G + a % G) * D, a < 2 * G, col, k, acc, K, STEP)
    tl.store(PART_C + (token * H + h) * G + g, total)


@jit
def _row(base, col, k, K: tl.constexpr, W: tl.constexpr, live, CACHE: tl.constexpr):
    """One row as a tuple of tiles [HP, W]: columns q * W.. of every head. col [HP, 1 or W], k [1, W]."""
    tiles = ()
    for q in tl.static_range((K + W - 1) // W):
        tiles = tiles + (tl.load(base + col + q * W, mask=live & (q * W + k < K), other=0.0, cache_modifier=CACHE),)
    return tiles


@jit
def _heads_dot(a, b):
    """Per head, the product of two rows: [HP]."""
    z = a[0].to(tl.float32) * b[0].to(tl.float32)
    for q in tl.static_range(1, len(a)):
        z += a[q].to(tl.float32) * b[q].to(tl.float32)
    return tl.sum(z, 1)


@jit
def _axpy(scale, a, p, b):
    """scale[h] a + p[h] b, both rows; fp32."""
    out = ()
    for q in tl.static_range(len(a)):
        out = out + (scale[:, None] * a[q].to(tl.float32) + p[:, None] * b[q].to(tl.float32),)
    return out


@jit
def _add(acc, p, a, d, b):
    """acc + p[h] a + d[h] b, rows; fp32."""
    out = ()
    for q in tl.static_range(len(a)):
        out = out + (acc[q] + p[:, None] * a[q].to(tl.float32) + d[:, None] * b[q].to(tl.float32),)
    return out


@jit(do_not_specialize=_RUNTIME)
def forward_intra(X, V, R, U, PART, PART_STAT, OUT, LSE, M, S, s, s0, eps, H: tl.constexpr, HP: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
                  G: tl.constexpr, MERGE: tl.constexpr):
    """Store source s and its rstd; site s attends to sources s0..s and merges its partial result. Program: one token.
    -> OUT [M, D], LSE [S / G, M, G, H]."""
    m = tl.program_id(0).to(tl.int64)
    D: tl.constexpr = H * K
    h, k = tl.arange(0, HP), tl.arange(0, W)[None, :]
    h_ok = h < H
    live = h_ok[:, None]
    col = h[:, None] * K + k  # [HP, W]
    V += m * S * D
    R += (s0 // G * M + m) * G - s0
    x = _row(X + m * D, col, k, K, W, live, "")
    u = _row(U + s * D, col, k, K, W, live, "")
    y = _row(V + s0 * D, col, k, K, W, live & (s0 < s), ".cg")
    y_next = _row(V + (s0 + 1) * D, col, k, K, W, live & (s0 + 1 < s), ".cg")
    r_next = tl.load(R + s0, mask=s0 < s, other=0.0)
    if MERGE:
        lse = tl.load(PART_STAT + (m * H + h) * G + s - s0, mask=h_ok, other=0.0)
        size = tl.load(PART_STAT + ((M + m) * H + h) * G + s - s0, mask=h_ok, other=0.0)
        part = _row(PART + (m * G + s - s0) * D, col, k, K, W, live, ".cg")
    square = x[0].to(tl.float32) * x[0].to(tl.float32)
    for q in tl.static_range(len(x)):
        tl.store(V + s * D + col + q * W, x[q], mask=live & (q * W + k < K))
        if q > 0:
            square += x[q].to(tl.float32) * x[q].to(tl.float32)
    r = tl.rsqrt(tl.sum(square) / D + eps)
    tl.store(R + s, r)
    top = _heads_dot(x, u) * r  # [HP], the running maximum and sum of the softmax
    den = tl.full([HP], 1.0, tl.float32)
    if MERGE:
        both = tl.maximum(top, lse)
        keep, add = tl.exp(top - both), tl.exp(lse - both)
        top, den = both, keep + add
        acc = _axpy(keep, x, add * size, part)
    else:
        acc = _axpy(den, x, den * 0.0, x)
    for i in range(s0, s):
        y_after = _row(V + (i + 2) * D, col, k, K, W, live & (i + 2 < s), ".cg")  # the next two rows are fetched while this one is used
        r_i = r_next
        r_next = tl.load(R + i + 1, mask=i + 1 < s, other=0.0)
        lg = _heads_dot(y, u) * r_i
        top_new = tl.maximum(top, lg)
        scale, p = tl.exp(top - top_new), tl.exp(lg - top_new)
        den = den * scale + p
        top = top_new
        acc = _axpy(scale, acc, p, y)
        y, y_next = y_next, y_after
    for q in tl.static_range(len(x)):
        tl.store(OUT + m * D + col + q * W, (acc[q] / den[:, None]).to(OUT.dtype.element_ty), mask=live & (q * W + k < K))
    tl.store(LSE + ((s0 // G * M + m) * G + s - s0) * H + h, top + tl.log(den), mask=h_ok)


@jit(do_not_specialize=_RUNTIME)
def backward_intra(V, R, U, DOUT, HOUT, DH, LSE, DEL, LSE_H, DEL_H, PART, PART_C, OWN, DV, END, END_OUT, M, S, s, s0, e0,
                   H: tl.constexpr, HP: tl.constexpr, K: tl.constexpr, W: tl.constexpr, G: tl.constexpr, MERGE: tl.constexpr):
    """Store dh_s (DOUT) in the group's DH [M, e0 - s0, D], and Delta_s in its DEL [M, G, H]; the gradient of source s from sites
    s..min(e0, END)-1, plus what backward_inter found, PART, which may lie in DH, where dh_s then takes its place. Program: one token. -> DV [M, D];
    OWN [M, G, H, G]: ds_ji rstd_i, i before j."""
    # Statistics lie as they are read. Here a program takes all heads of one site: lse and Delta are [.., site, H]. backward_inter takes one head of many
    # sites: [.., H, site], which the group's first site, the last to run, writes once, LSE_H and DEL_H [S / G, M, H, G]; site by site, every 4 bytes
    # would cost a sector of 32. OWN, G^2 / 2 numbers per token and head, is fp32, and du takes it as hi + lo: exact at little cost.
    m = tl.program_id(0).to(tl.int64)
    D: tl.constexpr = H * K
    end = tl.load(END).to(tl.int32)  # one past the last site that has a gradient; 0 where this site is the first to run
    h, k = tl.arange(0, HP), tl.arange(0, W)[None, :]
    h_ok = h < H
    live = h_ok[:, None]
    col = h[:, None] * K + k  # [HP, W]
    DH += (m * (e0 - s0) - s0) * D
    LSE += ((s0 // G * M + m) * G - s0) * H + h
    DEL += (m * G - s0) * H + h
    LSE_H += ((s0 // G * M + m) * H + h) * G - s0
    DEL_H += ((s0 // G * M + m) * H + h) * G - s0
    OWN += ((m * G + s - s0) * H + h) * G - s0
    # all loads are issued before anything is waited for; rows past END hold garbage, and nobody looks at them. All tiles are laid out alike: what
    # PART holds is read, and overwritten where it is DH, by the same threads
    dh = _row(DOUT + m * D, col, k, K, W, live, "")
    v = _row(V + (m * S + s) * D, col, k, K, W, live, ".cg")
    mix = _row(HOUT + m * D, col, k, K, W, live, ".cg")
    u = _row(U + s * D, col, k, K, W, live, "")
    r = tl.load(R + (s0 // G * M + m) * G + s - s0)
    lse = tl.load(LSE + s * H, mask=h_ok, other=0.0)
    dh_next = _row(DH + (s + 1) * D, col, k, K, W, live & (s + 1 < e0), ".cg")
    dh_after = _row(DH + (s + 2) * D, col, k, K, W, live & (s + 2 < e0), ".cg")
    lse_next = tl.load(LSE + (s + 1) * H, mask=h_ok & (s + 1 < e0), other=0.0)
    delta_next = tl.load(DEL + (s + 1) * H, mask=h_ok & (s + 1 < e0), other=0.0)
    c = tl.zeros([HP], tl.float32)
    if MERGE:
        merge = end > e0  # otherwise backward_inter has not run
        c = tl.load(PART_C + (m * H + h) * G + s - s0, mask=h_ok & merge, other=0.0)
        part = _row(PART + (m * G + s - s0) * D, col, k, K, W, live & merge, ".cg")
    end = tl.where(end == 0, s + 1, end)
    last = tl.minimum(e0, end)
    if m == 0:
        tl.store(END_OUT, end.to(tl.float32))
    delta = _heads_dot(dh, mix)
    lg = _heads_dot(u, v) * r
    p = tl.where(h_ok, tl.exp(lg - lse), 0.0)
    ds = p * (_heads_dot(dh, v) - delta)
    c += ds * lg
    acc = _axpy(p, dh, ds * r, u)
    if MERGE:
        one = tl.full([HP], 1.0, tl.float32)
        acc = _axpy(one, acc, one, part)
    for q in tl.static_range(len(dh)):
        tl.store(DH + s * D + col + q * W, dh[q], mask=live & (q * W + k < K))
    tl.store(DEL + s * H, delta, mask=h_ok)
    tl.store(OWN + s, ds * r, mask=h_ok)
    if s == s0:
        tl.store(LSE_H + s, lse, mask=h_ok)
        tl.store(DEL_H + s, delta, mask=h_ok)
    for j in range(s + 1, last):
        dh, lse, delta = dh_next, lse_next, delta_next  # the next two rows are fetched while this one is used
        dh_next = dh_after
        dh_after = _row(DH + (j + 2) * D, col, k, K, W, live & (j + 2 < e0), ".cg")
        lse_next = tl.load(LSE + (j + 1) * H, mask=h_ok & (j + 1 < e0), other=0.0)
        delta_next = tl.load(DEL + (j + 1) * H, mask=h_ok & (j + 1 < e0), other=0.0)
        u = _row(U + j * D, col, k, K, W, live, "")
        lg = _heads_dot(u, v) * r
        p = tl.where(h_ok, tl.exp(lg - lse), 0.0)
        ds = p * (_heads_dot(dh, v) - delta)
        c += ds * lg
        tl.store(OWN + j, ds * r, mask=h_ok)
        if s == s0:
            tl.store(LSE_H + j, lse, mask=h_ok)
            tl.store(DEL_H + j, delta, mask=h_ok)
        acc = _add(acc, p, dh, ds * r, u)
    f = tl.sum(c) * r * r / D
    for q in tl.static_range(len(v)):
        tl.store(DV + m * D + col + q * W, (acc[q] - f * v[q].to(tl.float32)).to(DV.dtype.element_ty), mask=live & (q * W + k < K))


@jit(do_not_specialize=_RUNTIME)
def backward_query(V, DS, OWN, DU, END, M, S, s0, e0, TB, H: tl.constexpr, K: tl.constexpr, CH: tl.constexpr, W: tl.constexpr,
                   G: tl.constexpr, BJ: tl.constexpr, BM: tl.constexpr):
    """du_j += sum over TB tokens and the sources s0..e0-1 of ds_ji rstd_i v_i. Program: BJ sites j >= e0 (the first also the group's own sites), one
    chunk of one head. DU [M / TB, S, D] holds one partial sum per block of tokens; the groups run one after the other, so the order is fixed."""
    D: tl.constexpr = H * K
    STEP: tl.constexpr = CH * W
    first = tl.program_id(0) == 0
    h = tl.program_id(1) // CH
    k = tl.program_id(1) % CH * W + tl.arange(0, W)
    col = h * K + k
    j = (e0 + tl.program_id(0) * BJ + tl.arange(0, BJ)).to(tl.int64)
    b, g = tl.arange(0, 2 * G), tl.arange(0, G)  # the group's own sites, their ds as hi + lo: (part, site) are the 16 rows of a tensor-core tile
    own = s0 + b % G
    m = tl.program_id(2).to(tl.int64) * TB
    m_end = tl.minimum(m + TB, M)
    end = tl.load(END).to(tl.int32)
    last = tl.minimum(e0, end)  # sources from here on may not exist
    j_ok = j < end
    if first | (e0 + tl.program_id(0) * BJ < end):
        a = tl.arange(0, BM * G)
        i = s0 + a % G
        acc, acc_own = (), ()
        for q in tl.static_range((K + STEP - 1) // STEP):
            acc = acc + (tl.zeros([BJ, W], tl.float32),)
            acc_own = acc_own + (tl.zeros([2 * G, W], tl.float32),)
        at = DS + ((j // G * M * H + h) * G + j % G)[:, None] * G + (a // G * H * G * G + a % G)[None, :]
        at_own = OWN + (h * G + b % G)[:, None] + (a * H * G)[None, :]  # [M, G, H, G]
        for t in range(m, m_end, BM):
            token = t + a // G
            t_ok = token < m_end
            v_ok = t_ok & (i < last)
            # what was never written is read and put aside: a mask that varies within 16 bytes would make single loads of them
            ds = tl.load(at + t * H * G * G, mask=j_ok[:, None] & t_ok[None, :], other=0.0)  # [BJ, BM * G]
            ds = tl.where(v_ok[None, :], ds, 0.0)
            ds_own = tl.load(at_own + t * H * G * G, mask=t_ok[None, :], other=0.0)  # [2 G, BM * G]
            ds_own = tl.where((first & (own < last))[:, None] & v_ok[None, :] & (own[:, None] >= i[None, :]), ds_own, 0.0)
            hi = ds_own.to(V.dtype.element_ty)
            ds_own = tl.where(b[:, None] < G, hi, (ds_own - hi.to(tl.float32)).to(V.dtype.element_ty))
            new, new_own = (), ()
            for q in tl.static_range((K + STEP - 1) // STEP):
                v = tl.load(V + ((token * S + i) * D)[:, None] + col[None, :] + q * STEP, mask=v_ok[:, None] & (q * STEP + k < K)[None, :], other=0.0)
                new = new + (tl.dot(ds, v, acc[q], input_precision="ieee"),)
                new_own = new_own + (tl.dot(ds_own, v, acc_own[q], input_precision="ieee"),)
            acc, acc_own = new, new_own
        for q in tl.static_range((K + STEP - 1) // STEP):
            live = (q * STEP + k < K)[None, :]
            du = DU + tl.program_id(2).to(tl.int64) * S * D + col[None, :] + q * STEP
            # the group's own sites start here, later ones hold the sums over later sources already
            tl.store(du + (s0 + g)[:, None] * D, tl.sum(tl.reshape(acc_own[q], [2, G, W]), 0), mask=(first & (s0 + g < last))[:, None] & live)
            du += j[:, None] * D
            tl.store(du, acc[q] + tl.load(du, mask=j_ok[:, None] & live, other=0.0), mask=j_ok[:, None] & live)


# Delta routing. The sources of a block, N of them and the same for all its sites, are known when it starts: one kernel reads them once and writes
# what every site will add to its stream, gate * mix. One kernel does the backward, when the gradients of all the block's sites are there, and
# recomputes the weights. A site's null source has one logit per head, whatever the token: it comes in, and its gradient goes out, as a number.
# So does rstd: the gradient through the norm is taken once per source (delta_source_backward), not once per source and block.
# Two tokens at a time fill the 16 rows of the tensor cores: [token 0's sites; token 1's sites] against their sources, other tokens' masked; and
# where rows are sites alone, the second 8 hold the lo parts of u and null. So one product gives hi and lo, and the fold over a warp's chunk
# adds them. All small arrays, logits to ds, are [site, (token, source)] and the same in every warp.

@jit
def _weighted(p, b, acc, CH: tl.constexpr, SPLIT: tl.constexpr):
    """acc + p b for all chunks, p [rows, columns] in fp32; with SPLIT as hi + lo."""
    hi = p.to(b[0].dtype)
    acc = _dot_add(_chunks(hi, CH, b[0].dtype), b, acc)
    if SPLIT:
        acc = _dot_add(_chunks(p - hi.to(tl.float32), CH, b[0].dtype), b, acc)
    return acc


@jit
def _as_fp32(tiles):
    out = ()
    for q in tl.static_range(len(tiles)):
        out = out + (tiles[q].to(tl.float32),)
    return out


@jit(do_not_specialize=_RUNTIME)
def delta_forward(SOURCES, R, U, NULL, NULL_LOGIT, GATE, OUT, M, TB, J: tl.constexpr, H: tl.constexpr, K: tl.constexpr, CH: tl.constexpr,
                  W: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, ALIGNED: tl.constexpr):
    """OUT[j] = GATE[j] * mix of [NULL[j], SOURCES] for J <= 8 sites. Program: one head of TB tokens, two at a time. R [N, M], U and NULL [2, J, D]
    (hi and lo parts), NULL_LOGIT [J, H]."""
    D: tl.constexpr = H * K
    STEP: tl.constexpr = CH * W
    N: tl.constexpr = len(SOURCES)
    h = tl.program_id(0) % H
    m = (tl.program_id(0) // H).to(tl.int64) * TB
    m_end = tl.minimum(m + TB, M)
    a, b, j = tl.arange(0, 2 * BN), tl.arange(0, 16), tl.arange(0, 8)  # rows of (token, source), of (token, site) or (part, site), of sites
    k = tl.arange(0, CH)[:, None, None] * W + tl.arange(0, W)[None, None, :]  # [CH, 1, W]
    col = h * K + k
    u = _tiles(U, (b // 8 * J + b % 8) * D, b % 8 < J, col, k, K, STEP, "")  # [CH, 16, W]
    null = _tiles(NULL, (b // 8 * J + b % 8) * D, b % 8 < J, col, k, K, STEP, "")
    null_logit = tl.load(NULL_LOGIT + j * H + h, mask=j < J, other=0.0)[:, None]
    gate = tl.load(GATE + j, mask=j < J, other=0.0)[:, None]
    source = _pointers(SOURCES, a % BN, 2 * BN, ALIGNED)
    for t in range(m, m_end, 2):
        token = t + a // BN
        ok = (a % BN < N) & (token < m_end)
        v = _rows(source, token * D, ok, col, k, K, STEP)  # [CH, 2 BN, W]
        lg = _fold(_dot_t(u, v, tl.zeros([CH, 16, 2 * BN], tl.float32)), CH, 2 * BN) * tl.load(R + a % BN * M + token, mask=ok, other=0.0)[None, :]
        lg = tl.reshape(tl.where(ok[None, :], lg, float("-inf")), [8, 2, BN])
        top = tl.maximum(tl.max(lg, 2), null_logit)  # [site, token]
        p, p_null = tl.exp(lg - top[:, :, None]), tl.exp(null_logit - top)
        scale = tl.div_rn(gate, tl.sum(p, 2) + p_null)
        p = _repeat(tl.reshape(p * scale[:, :, None], [8, 2 * BN]), 2 * BN)
        p = tl.where(b[:, None] // 8 == a[None, :] // BN, p, 0.0)  # a site's own token only: [(token, site), (token, source)]
        p_null = tl.where(b[:, None] % 8 == b[None, :] % 8, tl.reshape(tl.trans(p_null * scale), [16])[:, None], 0.0)  # [(token, site), (part, site)]
        out = _weighted(p, v, _weighted(p_null, null, _empty(CH, 16, K, W), CH, SPLIT), CH, SPLIT)
        at = t + b // 8
        _store_tiles(OUT, (b % 8 * M + at) * D, (b % 8 < J) & (at < m_end), col, k, out, K, STEP)


@jit(do_not_specialize=_RUNTIME)
def delta_backward(SOURCES, DOUT, R, U, NULL, NULL_LOGIT, GATE, LATER, DV, DR, DPARAM, DLOGIT, DGATE, M, TB, J: tl.constexpr, H: tl.constexpr,
                   K: tl.constexpr, CH: tl.constexpr, W: tl.constexpr, BN: tl.constexpr, ADD: tl.constexpr,
                   ALIGNED: tl.constexpr):
    """Gradients of delta_forward's inputs. Program: one head of TB tokens, two at a time. -> DV[i] [M, D] = LATER[i] (with ADD) + this block's part,
    without the norms'; DR [N, M, H]; and partial sums over TB tokens: DPARAM [M / TB, 2, J, D] (of u and null), DLOGIT, DGATE [M / TB, J, H]."""
    D: tl.constexpr = H * K
    STEP: tl.constexpr = CH * W
    N: tl.constexpr = len(SOURCES)
    DT: tl.constexpr = U.dtype.element_ty
    h = tl.program_id(0) % H
    block = tl.program_id(0) // H
    m = block.to(tl.int64) * TB
    m_end = tl.minimum(m + TB, M)
    a, b, j = tl.arange(0, 2 * BN), tl.arange(0, 16), tl.arange(0, 8)
    k = tl.arange(0, CH)[:, None, None] * W + tl.arange(0, W)[None, None, :]  # [CH, 1, W]
    col = h * K + k
    u = _tiles(U, (b // 8 * J + b % 8) * D, b % 8 < J, col, k, K, STEP, "")  # [CH, 16, W]
    null = _tiles(NULL, (b // 8 * J + b % 8) * D, b % 8 < J, col, k, K, STEP, "")
    null_logit = tl.load(NULL_LOGIT + j * H + h, mask=j < J, other=0.0)[:, None]
    gate = tl.load(GATE + j, mask=j < J, other=0.0)[:, None]
    source, dout, dv_at = _pointers(SOURCES, a % BN, 2 * BN, ALIGNED), _pointers(DOUT, b % 8, 16, ALIGNED), _pointers(DV, a % BN, 2 * BN, ALIGNED)
    if ADD:
        later = _pointers(LATER, a % BN, 2 * BN, ALIGNED)
    mine = (b[:, None] // 8 == a[None, :] // BN)  # a site's own token: [(token, site), (token, source)]
    same = b[:, None] % 8 == b[None, :] % 8
    acc = _empty(CH, 16, K, W)  # du, dnull
    dlogit, dgate = tl.zeros([8], tl.float32), tl.zeros([8], tl.float32)
    for t in range(m, m_end, 2):
        token, at = t + a // BN, t + b // 8
        ok = (a % BN < N) & (token < m_end)
        v = _rows(source, token * D, ok, col, k, K, STEP)  # [CH, 2 BN, W]
        dh = _rows(dout, at * D, (b % 8 < J) & (at < m_end), col, k, K, STEP)  # [CH, 16, W]
        r = tl.load(R + a % BN * M + token, mask=ok, other=0.0)[None, :]
        zero = tl.zeros([CH, 16, 2 * BN], tl.float32)
        both = tl.join(_dot_t(u, v, zero), tl.where(mine[None, :, :], _dot_t(dh, v, zero), 0.0))  # one sum over the chunks for two products
        both = tl.permute(tl.sum(tl.reshape(both, [CH, 2, 8, 2 * BN, 2]), 1), (0, 3, 1, 2))
        raw, dp = tl.split(tl.permute(_sum_chunks(both, CH, 2, 2 * BN), (1, 2, 0)))
        dp = tl.reshape(dp, [8, 2, BN])
        dp_null = _fold(tl.where(same[None, :, :], _dot_t(null, dh, tl.zeros([CH, 16, 16], tl.float32)), 0.0), CH, 16)
        dp_null = tl.sum(tl.reshape(dp_null, [8, 2, 8]), 2)  # [site, token]
        lg = tl.reshape(tl.where(ok[None, :], raw * r, float("-inf")), [8, 2, BN])
        top = tl.maximum(tl.max(lg, 2), null_logit)
        p, p_null = tl.exp(lg - top[:, :, None]), tl.exp(null_logit - top)
        scale = tl.div_rn(1.0, tl.sum(p, 2) + p_null)
        p, p_null = p * scale[:, :, None], p_null * scale
        delta = tl.sum(p * dp, 2) + p_null * dp_null  # <dout_j, mix_j>
        dgate += tl.sum(delta, 1)
        p, p_null = p * gate[:, :, None], p_null * gate
        dlogit += tl.sum(p_null * (dp_null - delta), 1)
        ds = tl.reshape(p * (dp - delta[:, :, None]), [8, 2 * BN])
        tl.store(DR + (a % BN * M + token) * H + h, tl.sum(ds * raw, 0), mask=ok)
        ds = _repeat(ds * r, 2 * BN)  # [(part, site), (token, source)]
        p = tl.where(mine, _repeat(tl.reshape(p, [8, 2 * BN]), 2 * BN), 0.0)  # [(token, site), (token, source)]
        p_null = tl.where(same & (b[:, None] >= 8), tl.reshape(tl.trans(p_null), [16])[None, :], 0.0)  # [(part, site), (token, site)]
        dv = _empty(CH, 2 * BN, K, W)
        if ADD:
            dv = _as_fp32(_rows(later, token * D, ok, col, k, K, STEP))
        dv = _dot_add(_chunks(tl.trans(p), CH, DT), dh, dv)
        dv = _dot_add(_chunks(tl.trans(ds), CH, DT), u, dv)
        for q in tl.static_range(len(dv)):
            tl.store(dv_at[None, :, None] + (token * D)[None, :, None] + col + q * STEP, dv[q].to(DT), mask=ok[None, :, None] & (q * STEP + k < K))
        acc = _dot_add(_chunks(tl.where(b[:, None] < 8, ds, 0.0), CH, DT), v, acc)
        acc = _dot_add(_chunks(p_null, CH, DT), dh, acc)
    _store_tiles(DPARAM, ((block * 2 + b // 8) * J + b % 8) * D, b % 8 < J, col, k, acc, K, STEP)
    tl.store(DLOGIT + (block * J + j) * H + h, dlogit, mask=j < J)
    tl.store(DGATE + (block * J + j) * H + h, dgate, mask=j < J)


@jit(do_not_specialize=["eps"])
def delta_source(X, START, DELTA, RSTD, eps, D: tl.constexpr, BLOCK: tl.constexpr, SUBTRACT: tl.constexpr):
    """DELTA = X - START (without SUBTRACT: X is the source) and its RSTD. Program: one token."""
    m = tl.program_id(0).to(tl.int64)
    square = tl.zeros([BLOCK], tl.float32)
    for c in tl.static_range(0, D, BLOCK):
        col = c + tl.arange(0, BLOCK)
        x = tl.load(X + m * D + col, mask=col < D, other=0.0)
        if SUBTRACT:
            x = (x.to(tl.float32) - tl.load(START + m * D + col, mask=col < D, other=0.0).to(tl.float32)).to(X.dtype.element_ty)
            tl.store(DELTA + m * D + col, x, mask=col < D)
        square += x.to(tl.float32) * x.to(tl.float32)
    tl.store(RSTD + m, tl.rsqrt(tl.sum(square) / D + eps))


@jit
def delta_source_backward(V, RSTD, DRSTD, G, DX, DSTART, D: tl.constexpr, BLOCK: tl.constexpr, SUBTRACT: tl.constexpr):
    """DX = G - DRSTD rstd^3 / D V and, with SUBTRACT, DSTART = -DX. Program: one token."""
    m = tl.program_id(0).to(tl.int64)
    r = tl.load(RSTD + m)
    f = tl.load(DRSTD + m) * r * r * r / D
    for c in tl.static_range(0, D, BLOCK):
        col = c + tl.arange(0, BLOCK)
        dx = tl.load(G + m * D + col, mask=col < D, other=0.0).to(tl.float32) - f * tl.load(V + m * D + col, mask=col < D, other=0.0).to(tl.float32)
        if SUBTRACT:
            tl.store(DSTART + m * D + col, -dx.to(V.dtype.element_ty), mask=col < D)
        tl.store(DX + m * D + col, dx.to(V.dtype.element_ty), mask=col < D)


# ---------------------------------------------------------------------------------------------------------------------------------------------
# Launches. The configuration follows from the shape alone: no tuning at run time, and the same binary serves every site.

@cache
def _inter_config(D: int, H: int) -> dict:
    K = D // H
    CH = min(16, triton.next_power_of_2(triton.cdiv(K, 160)))  # 160 columns are what one warp holds in registers
    W = next((w for w in (64, 32) if K % (CH * w) == 0), 32 if K > 16 * CH else 16)
    return dict(H=H, K=K, CH=CH, W=W, G=G)


def _inter_warps(c: dict, dtype) -> int:
    return c["CH"] if dtype != torch.float32 else min(16, 4 * c["CH"])  # fp32 products run outside the tensor cores, from registers


@cache
def _intra_config(D: int, H: int, backward: bool) -> dict:
    K, HP = D // H, triton.next_power_of_2(H)
    warps = min(16, triton.next_power_of_2(triton.cdiv(HP * K, 1536)))  # one warp holds a row of up to 1536 columns, 8 to a thread and tile
    W = min(triton.next_power_of_2(K), max(8, 256 * warps // HP))
    if backward and HP * K > 768:  # it holds more rows
        warps = min(16, 2 * warps)
    return dict(H=H, HP=HP, K=K, W=W, G=G, num_warps=warps, num_stages=1)


@cache
def _delta_config(D: int, H: int, N: int, J: int, dtype) -> dict:
    K = D // H
    CH = min(16, triton.next_power_of_2(triton.cdiv(K, 128 if dtype != torch.float32 else 32)))
    W = next((w for w in (64, 32, 16) if K % (CH * w) == 0), 32 if K > 16 * CH else 16)
    BN = 8 if N <= 8 else 16  # the last of 8 blocks reads 8 sources, the embedding and 7 deltas
    return dict(J=J, H=H, K=K, CH=CH, W=W, BN=BN, num_warps=CH, num_stages=2 if BN == 8 and dtype != torch.float32 else 1)


def _aligned(tensors) -> bool:
    return all(x.data_ptr() % 16 == 0 for x in tensors)


def _on(x: Tensor):
    """Launch on the device of x, which need not be the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _forward_buffers(x: Tensor, S: int, H: int) -> list[Tensor]:
    """v [M, S, D], rstd [S / G, M, G], lse [S / G, M, G, H], and a group's partial results: part [M, G, D], part_stat [2, M, H, G]."""
    (M, D), groups = x.shape, -(-S // G)
    new = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=x.device)
    part = torch.float16 if x.dtype == torch.bfloat16 else x.dtype
    return [new(M, S, D, dtype=x.dtype), new(groups, M, G), new(groups, M, G, H), new(M, G, D, dtype=part), new(2, M, H, G)]


def _backward_buffers(M: int, D: int, S: int, H: int, dtype) -> list[tuple]:
    """(shape, dtype, the site that makes it) of what the sites of a backward pass share: delta [M, G, H], lse_h and delta_h [S / G, M, H, G],
    ds [S / G, M, H, G, G], own [M, G, H, G], du [blocks of tokens, S, D], part [M, G, D], part_c [M, H, G], and the dh [M, G, D] of every group."""
    groups, blocks, f = -(-S // G), -(-M // _query_block(M)), torch.float32
    inner = (groups - 1) * G - 1  # the last group has no later ones to pull from
    # part lies where dh will, but for short rows: that cost nothing with rows of 2,048 and 2,560 bytes, and 1.3 ms of 3.4 with 1,024 (H200, 16,384 tokens)
    part = (M, G, D) if D * dtype.itemsize <= 1024 else (0,)
    return [((M, G, H), f, S - 1), ((groups, M, H, G), f, S - 1), ((groups, M, H, G), f, S - 1), ((groups, M, H, G, G), dtype, S - 1),
            ((M, G, H, G), f, S - 1), ((blocks, S, D), f, S - 1), (part, dtype, inner), ((M, H, G), f, inner),
            *[((M, min(G, S - s0), D), dtype, min(s0 + G, S) - 1) for s0 in range(0, S, G)]]


def _query_block(M: int) -> int:
    """Tokens per partial sum of du: 32 blocks of at least 64 tokens."""
    return max(64, -(-M // 32))


def _op(name: str, mutates: tuple = ()):
    """Makes a function the operator depth_routing::`name`. torch.library.custom_op does that too, with more around it: 30 us per call, which the
    launches of a site's kernels would wait for."""
    def register(function):
        torch.library.define(f"depth_routing::{name}", torch.library.infer_schema(function, mutates_args=mutates), tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(f"depth_routing::{name}", "default", function)
        return getattr(torch.ops.depth_routing, name).default
    return register


@_op("split")
def split_op(u: Tensor, dtype: torch.dtype) -> Tensor:
    """[2, ...]: u as hi + lo in the dtype of the sources. An operator because the compiler does not round on its way through a cast, and lo would be 0."""
    hi = u.to(dtype)
    return torch.stack((hi, (u - hi.float()).to(dtype)))


@torch.library.register_fake("depth_routing::split")
def _(u, dtype):
    return u.new_empty(2, *u.shape, dtype=dtype)


@_op("read", mutates=("v", "rstd", "lse", "part", "part_stat"))
def read_op(source: Tensor, u: Tensor, u_hi: Tensor, u_lo: Tensor, v: Tensor, rstd: Tensor, lse: Tensor, part: Tensor, part_stat: Tensor,
            s: int, H: int, eps: float) -> Tensor:
    (M, D), S = source.shape, v.shape[1]
    s0 = s // G * G
    out = torch.empty_like(source)
    with _on(source):
        if s == s0 and s > 0:
            c = _inter_config(D, H)
            tokens = max(1, min(8, M * H * c["CH"] // 2048))  # per program, which loads its u once
            forward_inter[(H * -(-M // tokens),)](v, rstd, u_hi, u_lo, part, part_stat, M, S, s0, tokens, **c, BN=16,
                                                         num_warps=_inter_warps(c, source.dtype), num_stages=3)
        forward_intra[(M,)](source, v, rstd, u, part, part_stat, out, lse, M, S, s, s0, eps, MERGE=s0 > 0, **_intra_config(D, H, backward=False))
    return out


@torch.library.register_fake("depth_routing::read")
def _(source, u, u_hi, u_lo, v, rstd, lse, part, part_stat, s, H, eps):
    return torch.empty_like(source)


@_op("scratch")
def scratch_op(after: Tensor, size: list[int], dtype: torch.dtype, which: int) -> Tensor:
    """Uninitialised memory, made no earlier than `after`: torch.compile would make a torch.empty of the backward when the backward starts, and, but
    for `which`, one memory of two that are alike."""
    return torch.empty(size, dtype=dtype, device=after.device)


@torch.library.register_fake("depth_routing::scratch")
def _(after, size, dtype, which):
    return after.new_empty(size, dtype=dtype)


@_op("read_backward", mutates=("delta", "lse_h", "delta_h", "ds", "own", "du", "part", "part_c", "dh"))
def read_backward_op(dout: Tensor, h: Tensor, end: Tensor, u: Tensor, u_hi: Tensor, u_lo: Tensor, v: Tensor, rstd: Tensor, lse: Tensor, delta: Tensor,
                     lse_h: Tensor, delta_h: Tensor, ds: Tensor, own: Tensor, du: Tensor, part: Tensor, part_c: Tensor, dh: Tensor, later: list[Tensor],
                     s: int, H: int) -> tuple[Tensor, Tensor, Tensor]:
    (M, D), S = dout.shape, v.shape[1]
    s0, e0 = s // G * G, min(s // G * G + G, S)
    dv, end_out = torch.empty_like(dout), torch.empty_like(end)
    c, part = _inter_config(D, H), part if part.numel() else dh
    with _on(dout):
        if s == e0 - 1 and later:
            padded = tuple(later) + (later[-1],) * ((1 << (len(later) - 1).bit_length()) - len(later))  # to a power of two
            backward_inter[(H * -(-M // 2),)](v, rstd, u_hi, u_lo, padded, lse_h, delta_h, part, part_c, ds, end, M, S, s0, e0, **c,
                                                     num_warps=_inter_warps(c, dout.dtype), num_stages=2)
        backward_intra[(M,)](v, rstd, u, dout, h, dh, lse, delta, lse_h, delta_h, part, part_c, own, dv, end, end_out, M, S, s, s0, e0,
                             MERGE=e0 < S, **_intra_config(D, H, backward=True))
        if s == s0:
            bj = 64 if S - e0 > 32 else 32
            grid = max(1, -(-(S - e0) // bj)), H * c["CH"], du.shape[0]
            fp32 = v.dtype == torch.float32
            backward_query[grid](v, ds, own, du, end_out, M, S, s0, e0, _query_block(M), **c, BJ=bj, BM=4 if fp32 else 8, num_warps=4, num_stages=2 if fp32 else 3)
    if s > 0:
        return dv, end_out, du.new_empty(0)
    sites = torch.arange(S, device=du.device)[:, None]
    return dv, end_out, torch.where(sites < end_out, du.sum(0), 0.0)  # sites that never ran have no gradient


@torch.library.register_fake("depth_routing::read_backward")
def _(dout, h, end, u, u_hi, u_lo, v, rstd, lse, delta, lse_h, delta_h, ds, own, du, part, part_c, dh, later, s, H):
    return torch.empty_like(dout), torch.empty_like(end), du.new_empty(u.shape if s == 0 else 0)


# ---------------------------------------------------------------------------------------------------------------------------------------------
# Autograd.

def _opaque(function):
    """function.apply, which the compiler takes as it is. Looking into it, it would trace every link, and hand a backward zeros instead of None."""
    return torch.compiler.allow_in_graph(lambda *args: function.apply(*args))


@_opaque
class _Read(torch.autograd.Function):
    """One site. The forward's buffers are plain tensors on ctx, not saved tensors: later sites write other rows of them, which a backward needs. If the
    compiler took the chain in several graphs, each would keep the rows of its own sites alone; `v.sites` finds that out.

    `links` chain the sites: empty tensors that go from site to site, so that a site's backward runs before those of all earlier sites, also where
    a sublayer in between passes no gradient, or where what a site returned was not used. Their gradients carry what the backward of the later
    sites has to tell: `end`, one past the last site of this backward pass, and the buffers of _backward_buffers (of dh: those of the site's group and
    of later ones), each made when it is first needed, so that they grow as the activations go."""

    @staticmethod
    def forward(ctx, source, u, u_hi, u_lo, v, rstd, lse, part, part_stat, s, H, eps, *links):
        ctx.set_materialize_grads(False)
        if s > 0 and getattr(v, "sites", 0) != s:
            raise RuntimeError("a routing chain was cut into several compiled graphs: compile the whole model as one (fullgraph=True; under DDP with "
                               "torch._dynamo.config.optimize_ddp = False), or its sublayers and not the router")
        x = source.detach().reshape(-1, source.shape[-1]).contiguous()
        h = read_op(x, u.detach(), u_hi, u_lo, v, rstd, lse, part, part_stat, s, H, eps)
        v.sites = s + 1
        ctx.save_for_backward(h)
        ctx.chain = (u.detach(), u_hi, u_lo, v, rstd, lse), s, H, source.shape
        return h.view(source.shape), *[link.new_empty(1).expand(link.shape) for link in links]

    @staticmethod
    def backward(ctx, dout, end, *state):
        chain, s, H, shape = ctx.chain
        h, = ctx.saved_tensors
        (M, D), S, first = h.shape, chain[3].shape[1], end is None  # the first site of this backward pass, which need not be the last of the chain
        dout = torch.zeros_like(h) if dout is None else dout.reshape(h.shape).contiguous()
        end = torch.zeros(1, device=h.device) if first else end
        state = list(state)
        if first or s == S - 1 or s % G == G - 1:
            needed = _backward_buffers(M, D, S, H, h.dtype)
            for i, (size, dtype, made_at) in enumerate([*needed[:8], needed[8 + s // G]]):
                if state[i] is None and s <= made_at:
                    state[i] = scratch_op(dout, size, dtype, i)
        delta, lse_h, delta_h, ds, own, du, part, part_c, dh, *later = state
        if part is None or s >= (S - 1) // G * G:
            part, part_c = h.new_empty(0), delta.new_empty(0)
        later = [x for x in later if x is not None]
        dv, end, du = read_backward_op(dout, h, end, *chain, delta, lse_h, delta_h, ds, own, du, part, part_c, dh, later, s, H)
        return dv.view(shape), (du if s == 0 else None), *[None] * 10, end, *state


class FusedRouter:
    """Full routing of one forward pass over the Triton kernels: a chain of sites, each reading the sources so far.

        router = FusedRouter(x, query, key_norm, n_heads)      x [..., D]: source 0; query, key_norm [S, D]
        h = router.read()                                      the mix [..., D] at the current site, over sources 0..site
        router.write(f)                                        f [..., D] becomes the next source: the site after it is the current one

    Gradients equal route_reference's whatever is detached, unused, read twice or not read; a backward pass may be repeated (retain_graph).
    The sources must share one shape, dtype (bf16, fp16, fp32) and device. Raises ValueError where `kernel_support` gives a reason against it.
    """

    def __init__(self, x: Tensor, query: Tensor, key_norm: Tensor, n_heads: int, eps: float = 1e-6):
        S, D = query.shape
        if not torch.compiler.is_compiling() and (reason := kernel_support(x.device, x.dtype, D, n_heads, S)):
            raise ValueError(f"the routing kernels cannot run here: {reason}")
        if x.shape[-1] != D or key_norm.shape != query.shape:
            raise ValueError(f"x {tuple(x.shape)}, query {tuple(query.shape)} and key_norm {tuple(key_norm.shape)} do not fit together")
        self.S, self.H, self.eps, self.x = S, n_heads, eps, x
        self.u = query.float() * key_norm.float()  # [S, D]; its autograd gives the gradients of query and key_norm
        self.u_hi_lo = split_op(self.u.detach(), x.dtype).unbind(0)
        flat = x.detach().reshape(-1, D)
        self.buffers = _forward_buffers(flat, S, n_heads)
        shapes = [((1,), torch.float32), *_backward_buffers(*flat.shape, S, n_heads, x.dtype)]
        self.links = [torch.empty(1, dtype=dtype, device=x.device).expand(size) for size, dtype, *_ in shapes]
        self.source, self.site, self.mix = x, 0, None

    def read(self) -> Tensor:
        if self.mix is None:
            self.mix, *self.links = _Read(self.source, self.u, *self.u_hi_lo, *self.buffers, self.site, self.H, self.eps, *self.links)
        return self.mix

    def output(self) -> Tensor:
        return self.read()

    def write(self, f: Tensor) -> None:
        if self.site + 1 == self.S:
            raise ValueError(f"query has {self.S} rows, so there is no site after source {self.site}")
        if f.shape != self.x.shape or f.dtype != self.x.dtype or f.device != self.x.device:
            raise ValueError(f"a source of {tuple(f.shape)} {f.dtype} on {f.device} cannot join sources of {tuple(self.x.shape)} {self.x.dtype} on {self.x.device}")
        self.read()  # a site that nobody read still stores its source
        self.source, self.site, self.mix = f, self.site + 1, None
        if self.site % G == 0:
            self.links = [*self.links[:9], *self.links[10:]]  # without dh of the group that ends here, which no later site knows of


@_op("delta")
def delta_op(sources: list[Tensor], rstd: Tensor, u: Tensor, null: Tensor, null_logit: Tensor, gate: Tensor, H: int) -> Tensor:
    (M, D), J = sources[0].shape, u.shape[0]
    dtype = sources[0].dtype
    out = torch.empty(J, M, D, dtype=dtype, device=u.device)
    tokens = 16
    with _on(u):
        u, null = split_op(u, dtype), split_op(null, dtype)
        delta_forward[(H * -(-M // tokens),)](tuple(sources), rstd, u, null, null_logit, gate, out, M, tokens,
                                                     SPLIT=dtype != torch.float32, ALIGNED=_aligned(sources), **_delta_config(D, H, len(sources), J, dtype))
    return out


@torch.library.register_fake("depth_routing::delta")
def _(sources, rstd, u, null, null_logit, gate, H):
    return sources[0].new_empty(u.shape[0], *sources[0].shape)


@_op("delta_backward")
def delta_backward_op(dout: list[Tensor], sources: list[Tensor], later: list[Tensor], rstd: Tensor, u: Tensor, null: Tensor, null_logit: Tensor,
                      gate: Tensor, H: int) -> list[Tensor]:
    (M, D), N, J = sources[0].shape, len(sources), u.shape[0]
    dtype = sources[0].dtype
    tokens = max(16, triton.cdiv(M, 256) * 2)  # even: two at a time
    blocks = triton.cdiv(M, tokens)
    dv = [torch.empty_like(v) for v in sources]
    dr, dparam = u.new_empty(N, M, H), u.new_empty(blocks, 2, J, D)
    dlogit, dgate = u.new_empty(blocks, J, H), u.new_empty(blocks, J, H)
    with _on(u):
        u, null = split_op(u, dtype), split_op(null, dtype)
        delta_backward[(H * blocks,)](tuple(sources), tuple(dout), rstd, u, null, null_logit, gate, tuple(later or dv), tuple(dv), dr, dparam, dlogit, dgate,
                                      M, tokens, ADD=bool(later), ALIGNED=_aligned([*sources, *dout, *later, *dv]), **_delta_config(D, H, N, J, dtype))
    du, dnull = dparam.sum(0)
    return [dr.sum(-1), du.clone(), dnull.clone(), dlogit.sum(0), dgate.sum((0, 2)), *dv]


@torch.library.register_fake("depth_routing::delta_backward")
def _(dout, sources, later, rstd, u, null, null_logit, gate, H):
    return [torch.empty_like(x) for x in (rstd, u, null, null_logit, gate, *sources)]


@_opaque
class _Delta(torch.autograd.Function):
    """gate * mix for up to 8 sites of a block, from [null, sources]. The gradients of the sources travel on `links`, one per source: empty tensors
    that go from block to block, so that each block's backward gets what later blocks found and adds its own part while it has the rows at hand."""

    @staticmethod
    def forward(ctx, rstd, u, null, null_logit, gate, H, n, *tensors):
        ctx.set_materialize_grads(False)
        sources, links = tensors[:n], tensors[n:]
        shape = sources[0].shape
        flat = [x.reshape(-1, shape[-1]).contiguous() for x in sources]
        ctx.save_for_backward(rstd, u, null, null_logit, gate, *flat)
        ctx.H, ctx.shape = H, shape
        mixes = delta_op(flat, rstd, u, null, null_logit, gate, H).view(-1, *shape)
        return *mixes.unbind(0), *[x.new_empty(1).expand(x.shape) for x in links]

    @staticmethod
    def backward(ctx, *grads):
        rstd, u, null, null_logit, gate, *sources = ctx.saved_tensors
        dout = [torch.zeros_like(sources[0]) if x is None else x.reshape(sources[0].shape).contiguous() for x in grads[:len(u)]]
        later = [x.reshape(sources[0].shape).contiguous() for x in grads[len(u):] if x is not None]  # of all sources, or of none
        drstd, du, dnull, dlogit, dgate, *dv = delta_backward_op(dout, sources, later, rstd, u, null, null_logit, gate, ctx.H)
        return drstd, du, dnull, dlogit, dgate, None, None, *[None] * len(sources), *[x.view(ctx.shape) for x in dv]


@cache
def _row_config(D: int) -> dict:
    BLOCK = min(4096, triton.next_power_of_2(D))
    return dict(D=D, BLOCK=BLOCK, num_warps=max(1, BLOCK // 1024), num_stages=1)  # 16 bytes per thread, four times


@_op("delta_source")
def delta_source_op(x: Tensor, start: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    M, D = x.shape
    delta, rstd = x.new_empty(0) if start is None else torch.empty_like(x), torch.empty(M, dtype=torch.float32, device=x.device)
    with _on(x):
        delta_source[(M,)](x, x if start is None else start, delta, rstd, eps, SUBTRACT=start is not None, **_row_config(D))
    return delta, rstd


@torch.library.register_fake("depth_routing::delta_source")
def _(x, start, eps):
    return x.new_empty(0) if start is None else torch.empty_like(x), x.new_empty(x.shape[0], dtype=torch.float32)


@_op("delta_source_backward")
def delta_source_backward_op(v: Tensor, rstd: Tensor, drstd: Tensor, g: Tensor, subtract: bool) -> tuple[Tensor, Tensor]:
    dx, dstart = torch.empty_like(v), torch.empty_like(v) if subtract else v.new_empty(0)
    with _on(v):
        delta_source_backward[(len(v),)](v, rstd, drstd, g, dx, dstart, SUBTRACT=subtract, **_row_config(v.shape[1]))
    return dx, dstart


@torch.library.register_fake("depth_routing::delta_source_backward")
def _(v, rstd, drstd, g, subtract):
    return torch.empty_like(v), torch.empty_like(v) if subtract else v.new_empty(0)


@_opaque
class _Source(torch.autograd.Function):
    """x, or with a start the block's delta x - start, as a source without a gradient of its own; its rstd [M]; and the link that brings its gradient.
    The gradient through the norm is taken here, once for all blocks."""

    @staticmethod
    def forward(ctx, x, start, eps):
        ctx.set_materialize_grads(False)
        flat = [t if t is None else t.detach().reshape(-1, x.shape[-1]).contiguous() for t in (x, start)]
        delta, rstd = delta_source_op(*flat, eps)
        v = flat[0] if start is None else delta
        ctx.save_for_backward(v, rstd)
        ctx.shape, ctx.subtract = x.shape, start is not None
        source = v.view(x.shape) if ctx.subtract else v.new_empty(0)
        ctx.mark_non_differentiable(source)
        return source, rstd, v.new_empty(1).expand(x.shape)

    @staticmethod
    def backward(ctx, _, drstd, g):
        if g is None:
            return None, None, None
        v, rstd = ctx.saved_tensors
        dx, dstart = delta_source_backward_op(v, rstd, drstd.contiguous(), g.reshape(v.shape).contiguous(), ctx.subtract)
        return dx.view(ctx.shape), dstart.view(ctx.shape) if ctx.subtract else None, None


class FusedDeltaRouter:
    """Delta routing of one forward pass over the Triton kernels: an additive stream, and beside it a gated mix of what whole blocks added.

        router = FusedDeltaRouter(x, query, key_norm, null, gate, n_heads, block_sites)     x [..., D]; query, key_norm, null [S, D]; gate [S]
        h = router.read()                                      x + gate * mix at the current site; the mix is over the null source, the
        router.write(f)                                        embedding and the deltas of the blocks before; x becomes x + f

    A block is `block_sites` sites; its delta is the stream at its end minus the stream at its start. At most MAX_BLOCKS blocks. Every block is one
    differentiable function of its sources, so it composes with checkpointed sublayers, FSDP and repeated backward passes.
    """

    def __init__(self, x: Tensor, query: Tensor, key_norm: Tensor, null: Tensor, gate: Tensor, n_heads: int, block_sites: int, eps: float = 1e-6):
        S, D = query.shape
        blocks = -(-S // block_sites)
        if blocks > MAX_BLOCKS:
            raise ValueError(f"{S} sites in blocks of {block_sites} make more than {MAX_BLOCKS} blocks, the kernels' limit")
        if not torch.compiler.is_compiling() and (reason := kernel_support(x.device, x.dtype, D, n_heads, S, blocks)):
            raise ValueError(f"the routing kernels cannot run here: {reason}")
        self.H, self.eps, self.block_sites, self.S = n_heads, eps, block_sites, S
        self.u, self.null, self.gate = query.float() * key_norm.float(), null.float(), gate.float()
        null_rstd = (self.null.square().mean(-1, keepdim=True) + eps).rsqrt()
        self.null_logit = (self.u * self.null * null_rstd).view(S, n_heads, -1).sum(-1)  # [S, H]
        self.x = self.block_start = x
        _, rstd, link = _Source(x, None, eps)
        self.sources, self.rstd, self.links = [x.detach()], [rstd], [link]
        self.site, self.mixes = 0, ()

    def read(self) -> Tensor:
        if not self.mixes:  # the first site of a block, or the ninth: all sites from here on that read the same sources, up to G of them
            sites = slice(self.site, min(self.site + G, (self.site // self.block_sites + 1) * self.block_sites, self.S))
            parameters = self.u[sites], self.null[sites], self.null_logit[sites], self.gate[sites]
            self.mixes = _Delta(torch.stack(self.rstd), *parameters, self.H, len(self.sources), *self.sources, *self.links)
            self.links = [*self.mixes[sites.stop - sites.start:]]
        return self.x + self.mixes[self.site % self.block_sites % G]

    def write(self, f: Tensor) -> None:
        self.x = self.x + f
        self.site += 1
        if self.site % self.block_sites % G == 0:
            self.mixes = ()
        if self.site % self.block_sites == 0 and self.site < self.S:
            delta, rstd, link = _Source(self.x, self.block_start, self.eps)
            self.sources.append(delta), self.rstd.append(rstd), self.links.append(link)
            self.block_start = self.x

    def output(self) -> Tensor:
        return self.x


def _shared_memory(D: int, H: int, dtype, blocks: int = 0) -> int:
    """Bytes that the hungriest kernel may take, as measured with triton 3.6 to 3.8: backward_query's for any width, or so many per column, padding included."""
    fp32 = dtype == torch.float32
    c = _delta_config(D, H, blocks, G, dtype) if blocks else _inter_config(D, H)
    per_column = ((320 if fp32 else 162) if blocks <= 8 else (450 if fp32 else 195)) if blocks else 225 if fp32 else 113
    return max(76 * 1024, triton.cdiv(D // H, c["CH"] * c["W"]) * c["CH"] * c["W"] * per_column)


def kernel_support(device, dtype, D: int, H: int, S: int, blocks: int = 0) -> str | None:
    """None where the Triton kernels can run, otherwise the reason why not, in one line. blocks: of delta routing, 0 for full routing."""
    device = torch.device(device)
    if triton is None:
        return "triton is not installed"
    if device.type != "cuda" and not INTERPRETED:
        return f"the kernels need a CUDA device, not {device.type}"
    if INTERPRETED and dtype != torch.float32:
        return f"Triton's interpreter is right in float32 only, not in {dtype}"
    if not INTERPRETED and torch.cuda.get_device_capability(device) < (8, 0):
        return f"the kernels need compute capability 8.0, {torch.cuda.get_device_name(device)} has {'.'.join(map(str, torch.cuda.get_device_capability(device)))}"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"sources are bfloat16, float16 or float32, not {dtype}"
    if H < 1 or D % H:
        return f"route_heads={H} does not divide the width {D}"
    if H > MAX_HEADS:
        return f"at most {MAX_HEADS} routing heads, not {H}"
    if not INTERPRETED:
        need, limit = _shared_memory(D, H, dtype, blocks), torch.cuda.get_device_properties(device).shared_memory_per_block_optin
        if need > limit:
            return f"a routing head {D // H} wide needs {need} bytes of shared memory in {dtype}, this GPU has {limit}: take more route_heads"
    if S > MAX_SITES:
        return f"at most {MAX_SITES} sources, not {S}"
    return None
