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

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without triton: the reference works, and kernel_support says why the kernels do not
    triton = tl = None

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # the kernels below run on the CPU, slowly: for tests
G = 8  # sites per group
MAX_HEADS, MAX_SITES, MAX_HEAD_WIDTH = 64, 257, 4096


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
# Kernels. A head's K channels are CH chunks of KC, one warp each; a chunk is two power-of-two column tiles, KA + KB wide (160 = 128 + 32).
# Tiles are [CH, rows, columns]. The 16 rows (sources or sites) are the m of the tensor-core product, the G sites (sources) its n, so that
# nothing is padded. In 16-bit types u enters the products as hi + lo; sums, logits and softmax are fp32.

def jit(function=None, **options):
    """triton.jit, or nothing where there is no triton."""
    if function is None:
        return lambda f: jit(f, **options)
    return triton.jit(function, **options) if triton else function


_RUNTIME = ["M", "S", "s", "s0", "e0"]  # never specialised: one binary serves all sites, all depths and all batch sizes


@jit
def _columns(h, K: tl.constexpr, CH: tl.constexpr, KC: tl.constexpr, first: tl.constexpr, W: tl.constexpr):
    """Columns [CH, W] of head h, from column `first` of each chunk on, and which of them exist."""
    c = tl.arange(0, CH)[:, None]
    k = first + tl.arange(0, W)[None, :]
    return h * K + c * KC + k, (k < KC) & (c * KC + k < K)


@jit
def _tile(base, row, row_ok, col, col_ok, D: tl.constexpr, CACHE: tl.constexpr):
    """Rows of a [rows, D] matrix at the columns of `_columns`: [CH, rows, W]."""
    return tl.load(base + row[None, :, None] * D + col[:, None, :], mask=row_ok[None, :, None] & col_ok[:, None, :], other=0.0, cache_modifier=CACHE)


@jit
def _t(x):
    return tl.permute(x, (0, 2, 1))


@jit
def _dot(a, b, acc):
    return tl.dot(a, b, acc, input_precision="ieee")


@jit(do_not_specialize=_RUNTIME)
def forward_inter(V, R, UH, UL, PART, PART_LSE, M, S, s0, TB, H: tl.constexpr, K: tl.constexpr, CH: tl.constexpr, KC: tl.constexpr,
                  KA: tl.constexpr, KB: tl.constexpr, G: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr):
    """Sites s0..s0+G-1 attend to sources 0..s0-1. Program: one head of TB tokens. -> PART [M, G, D], normalised; PART_LSE [M, H, G]."""
    pid = tl.program_id(0)
    h = pid % H
    m = (pid // H).to(tl.int64) * TB
    m_end = tl.minimum(m + TB, M)
    D: tl.constexpr = H * K
    g, n = tl.arange(0, G), tl.arange(0, BN)
    g_ok = s0 + g < S
    ca, ma = _columns(h, K, CH, KC, 0, KA)
    uha = _t(_tile(UH, s0 + g, g_ok, ca, ma, D, ""))  # [CH, KA, G]
    va = _tile(V + m * S * D, n, n < s0, ca, ma, D, ".cg")  # [CH, BN, KA]
    acca = tl.zeros([CH, KA, G], tl.float32)
    if SPLIT:
        ula = _t(_tile(UL, s0 + g, g_ok, ca, ma, D, ""))
    if KB > 0:
        cb, mb = _columns(h, K, CH, KC, KA, KB)
        uhb = _t(_tile(UH, s0 + g, g_ok, cb, mb, D, ""))
        vb = _tile(V + m * S * D, n, n < s0, cb, mb, D, ".cg")
        accb = tl.zeros([CH, KB, G], tl.float32)
        if SPLIT:
            ulb = _t(_tile(UL, s0 + g, g_ok, cb, mb, D, ""))
    r = tl.load(R + m * S + n, mask=n < s0, other=0.0)
    top = tl.full([G], float("-inf"), tl.float32)  # running maximum and sum of the softmax
    den = tl.zeros([G], tl.float32)
    i = 0
    for _ in range((m_end - m).to(tl.int32) * tl.cdiv(s0, BN)):  # all tiles of all tokens; the next one is fetched while this one is used
        last = i + BN >= s0
        m_next = tl.where(last, m + 1, m)
        i_next = tl.where(last, 0, i + BN)
        row = i_next + n
        ok = (row < s0) & (m_next < m_end)
        va_next = _tile(V + m_next * S * D, row, ok, ca, ma, D, ".cg")
        r_next = tl.load(R + m_next * S + row, mask=ok, other=0.0)
        zero = tl.zeros([CH, BN, G], tl.float32)
        lg = _dot(va, uha, zero)
        if SPLIT:
            lg += _dot(va, ula, zero)
        if KB > 0:
            vb_next = _tile(V + m_next * S * D, row, ok, cb, mb, D, ".cg")
            lg = _dot(vb, uhb, lg)
            if SPLIT:
                lg = _dot(vb, ulb, lg)
        lg = tl.where((i + n < s0)[:, None], tl.sum(lg, 0) * r[:, None], float("-inf"))  # [BN, G]
        top_new = tl.maximum(top, tl.max(lg, 0))
        scale = tl.exp(top - top_new)
        p = tl.exp(lg - top_new[None, :])
        den = den * scale + tl.sum(p, 0)
        top = top_new
        pv = tl.broadcast_to(p.to(va.dtype)[None, :, :], [CH, BN, G])
        acca = _dot(_t(va), pv, acca * scale[None, None, :])
        if KB > 0:
            accb = _dot(_t(vb), pv, accb * scale[None, None, :])
        if last:
            row_out = (m * G + g)[None, :, None] * D
            tl.store(PART + row_out + ca[:, None, :], _t(acca / den[None, None, :]).to(PART.dtype.element_ty), mask=g_ok[None, :, None] & ma[:, None, :])
            acca = tl.zeros([CH, KA, G], tl.float32)
            if KB > 0:
                tl.store(PART + row_out + cb[:, None, :], _t(accb / den[None, None, :]).to(PART.dtype.element_ty), mask=g_ok[None, :, None] & mb[:, None, :])
                accb = tl.zeros([CH, KB, G], tl.float32)
            tl.store(PART_LSE + (m * H + h) * G + g, top + tl.log(den), mask=g_ok)
            top = tl.full([G], float("-inf"), tl.float32)
            den = tl.zeros([G], tl.float32)
        va = va_next
        if KB > 0:
            vb = vb_next
        r = r_next
        m = m_next
        i = i_next


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
def forward_intra(X, V, R, U, PART, PART_LSE, OUT, LSE, S, s, s0, eps, H: tl.constexpr, HP: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
                  G: tl.constexpr, MERGE: tl.constexpr):
    """Store source s and its rstd; site s attends to sources s0..s and merges its partial result. Program: one token. -> OUT [M, D], LSE [M, H, S]."""
    m = tl.program_id(0).to(tl.int64)
    D: tl.constexpr = H * K
    h, k = tl.arange(0, HP), tl.arange(0, W)[None, :]
    h_ok = h < H
    live = h_ok[:, None]
    col = h[:, None] * K + k  # [HP, W]
    V += m * S * D
    R += m * S
    x = _row(X + m * D, col, k, K, W, live, "")
    u = _row(U + s * D, col, k, K, W, live, "")
    y = _row(V + s0 * D, col, k, K, W, live & (s0 < s), ".cg")
    if MERGE:
        lse = tl.load(PART_LSE + (m * H + h) * G + s - s0, mask=h_ok, other=0.0)
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
        acc = _axpy(keep, x, add, part)
    else:
        acc = _axpy(den, x, den * 0.0, x)
    for i in range(s0, s):
        y_next = _row(V + (i + 1) * D, col, k, K, W, live & (i + 1 < s), ".cg")  # fetched while this row is used
        lg = _heads_dot(y, u) * tl.load(R + i)
        top_new = tl.maximum(top, lg)
        scale, p = tl.exp(top - top_new), tl.exp(lg - top_new)
        den = den * scale + p
        top = top_new
        acc = _axpy(scale, acc, p, y)
        y = y_next
    for q in tl.static_range(len(x)):
        tl.store(OUT + m * D + col + q * W, (acc[q] / den[:, None]).to(OUT.dtype.element_ty), mask=live & (q * W + k < K))
    tl.store(LSE + (m * H + h) * S + s, top + tl.log(den), mask=h_ok)


@jit
def _pull_start(V, R, m, s0, S, ca, ma, cb, mb, D: tl.constexpr, CH: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, G: tl.constexpr):
    """One token's G sources, transposed, their rstd, and empty sums."""
    g = tl.arange(0, G)
    va = _t(_tile(V + m * S * D, s0 + g, g < G, ca, ma, D, ".cg"))  # [CH, KA, G]
    acca = tl.zeros([CH, KA, G], tl.float32)
    vb, accb = va, acca
    if KB > 0:
        vb = _t(_tile(V + m * S * D, s0 + g, g < G, cb, mb, D, ".cg"))
        accb = tl.zeros([CH, KB, G], tl.float32)
    return va, vb, tl.load(R + m * S + s0 + g), acca, accb, tl.zeros([G], tl.float32)


@jit
def _pull(vat, vbt, r, acca, accb, c, uha, uhb, ula, ulb, DO, LSE, DEL, DS, m, h, row, row_ok, ca, ma, cb, mb, S, H: tl.constexpr, D: tl.constexpr,
          CH: tl.constexpr, KB: tl.constexpr, G: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr):
    """One token's part of `backward_inter` for BN later sites: the two sums of dv, c = sum_j ds_ji logit_ji, and ds for du."""
    da = _tile(DO + m * S * D, row, row_ok, ca, ma, D, ".cg")  # [CH, BN, KA]
    lse = tl.load(LSE + (m * H + h) * S + row, mask=row_ok, other=0.0)
    delta = tl.load(DEL + (m * H + h) * S + row, mask=row_ok, other=0.0)
    zero = tl.zeros([CH, BN, G], tl.float32)
    dp = _dot(da, vat, zero)
    lg = _dot(uha, vat, zero)
    if SPLIT:
        lg += _dot(ula, vat, zero)
    if KB > 0:
        db = _tile(DO + m * S * D, row, row_ok, cb, mb, D, ".cg")
        dp = _dot(db, vbt, dp)
        lg = _dot(uhb, vbt, lg)
        if SPLIT:
            lg = _dot(ulb, vbt, lg)
    lg = tl.sum(lg, 0) * r[None, :]  # [BN, G]
    p = tl.where(row_ok[:, None], tl.exp(lg - lse[:, None]), 0.0)
    ds = p * (tl.sum(dp, 0) - delta[:, None])
    c += tl.sum(ds * lg, 0)
    ds = (ds * r[None, :]).to(da.dtype)
    g = tl.arange(0, G)
    tl.store(DS + ((m * H + h) * S + row)[:, None] * G + g[None, :], ds, mask=row_ok[:, None])
    p = tl.broadcast_to(p.to(da.dtype)[None, :, :], [CH, BN, G])
    ds = tl.broadcast_to(ds[None, :, :], [CH, BN, G])
    acca = _dot(_t(uha), ds, _dot(_t(da), p, acca))
    if KB > 0:
        accb = _dot(_t(uhb), ds, _dot(_t(db), p, accb))
    return acca, accb, c


@jit
def _pull_end(acca, accb, c, PART, PART_C, m, h, ca, ma, cb, mb, H: tl.constexpr, D: tl.constexpr, KB: tl.constexpr, G: tl.constexpr):
    g = tl.arange(0, G)
    row = (m * G + g)[None, :, None] * D
    tl.store(PART + row + ca[:, None, :], _t(acca).to(PART.dtype.element_ty), mask=(g < G)[None, :, None] & ma[:, None, :])
    if KB > 0:
        tl.store(PART + row + cb[:, None, :], _t(accb).to(PART.dtype.element_ty), mask=(g < G)[None, :, None] & mb[:, None, :])
    tl.store(PART_C + (m * H + h) * G + g, c)


@jit(do_not_specialize=_RUNTIME)
def backward_inter(V, R, UH, UL, DO, LSE, DEL, PART, PART_C, DS, END, M, S, s0, e0, H: tl.constexpr, K: tl.constexpr, CH: tl.constexpr,
                   KC: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, G: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, TWO: tl.constexpr):
    """Sources s0..e0-1 pull from sites e0..END-1. Program: one head of one token, or of two that share the tiles of u; head-major, so that
    the programs on a multiprocessor find those in L1. -> PART [M, G, D], PART_C [M, H, G], DS [M, H, S, G]."""
    D: tl.constexpr = H * K
    blocks = tl.cdiv(M, 1 + TWO)
    h = tl.program_id(0) // blocks
    m0 = (tl.program_id(0) % blocks).to(tl.int64) * (1 + TWO)
    m1 = tl.minimum(m0 + 1, M - 1)  # of an odd number of tokens the last is done twice, with the same result
    end = tl.load(END).to(tl.int32)
    g = tl.arange(0, G)
    ca, ma = _columns(h, K, CH, KC, 0, KA)
    cb, mb = ca, ma
    if KB > 0:
        cb, mb = _columns(h, K, CH, KC, KA, KB)
    va0, vb0, r0, acca0, accb0, c0 = _pull_start(V, R, m0, s0, S, ca, ma, cb, mb, D, CH, KA, KB, G)
    if TWO:
        va1, vb1, r1, acca1, accb1, c1 = _pull_start(V, R, m1, s0, S, ca, ma, cb, mb, D, CH, KA, KB, G)
    for j in range(e0, end, BN):
        row = j + tl.arange(0, BN)
        ok = row < end
        uha = _tile(UH, row, ok, ca, ma, D, "")
        ula, uhb, ulb = uha, uha, uha
        if SPLIT:
            ula = _tile(UL, row, ok, ca, ma, D, "")
        if KB > 0:
            uhb = _tile(UH, row, ok, cb, mb, D, "")
            if SPLIT:
                ulb = _tile(UL, row, ok, cb, mb, D, "")
        acca0, accb0, c0 = _pull(va0, vb0, r0, acca0, accb0, c0, uha, uhb, ula, ulb, DO, LSE, DEL, DS, m0, h, row, ok, ca, ma, cb, mb, S, H, D, CH, KB, G, BN, SPLIT)
        if TWO:
            acca1, accb1, c1 = _pull(va1, vb1, r1, acca1, accb1, c1, uha, uhb, ula, ulb, DO, LSE, DEL, DS, m1, h, row, ok, ca, ma, cb, mb, S, H, D, CH, KB, G, BN, SPLIT)
    _pull_end(acca0, accb0, c0, PART, PART_C, m0, h, ca, ma, cb, mb, H, D, KB, G)
    if TWO:
        _pull_end(acca1, accb1, c1, PART, PART_C, m1, h, ca, ma, cb, mb, H, D, KB, G)


@jit(do_not_specialize=_RUNTIME)
def backward_intra(V, R, U, DH, HOUT, DO, LSE, DEL, PART, PART_C, DS, DV, END, END_OUT, S, s, s0, e0, H: tl.constexpr, HP: tl.constexpr,
                   K: tl.constexpr, W: tl.constexpr, G: tl.constexpr, MERGE: tl.constexpr):
    """Store dh_s and Delta_s; the gradient of source s from sites s..min(e0, END)-1, plus what backward_inter found. Program: one token. -> DV [M, D]."""
    m = tl.program_id(0).to(tl.int64)
    D: tl.constexpr = H * K
    end = tl.load(END).to(tl.int32)  # one past the last site that has a gradient; 0 where this site is the first to run
    end = tl.where(end == 0, s + 1, end)
    last = tl.minimum(e0, end)
    if m == 0:
        tl.store(END_OUT, end.to(tl.float32))
    h, k = tl.arange(0, HP), tl.arange(0, W)[None, :]
    h_ok = h < H
    live = h_ok[:, None]
    col = h[:, None] * K + k  # [HP, W]
    DO += m * S * D
    LSE += (m * H + h) * S  # [HP]
    DEL += (m * H + h) * S
    DS += (m * H + h) * S * G + s - s0
    dh = _row(DH + m * D, col, k, K, W, live, "")
    v = _row(V + (m * S + s) * D, col, k, K, W, live, ".cg")
    mix = _row(HOUT + m * D, col, k, K, W, live, ".cg")
    u = _row(U + s * D, col, k, K, W, live, "")
    dh_next = _row(DO + (s + 1) * D, col, k, K, W, live & (s + 1 < last), ".cg")
    c = tl.zeros([HP], tl.float32)
    merge = False
    if MERGE:
        merge = end > e0  # otherwise backward_inter has not run
        c = tl.load(PART_C + (m * H + h) * G + s - s0, mask=h_ok & merge, other=0.0)
        part = _row(PART + (m * G + s - s0) * D, col, k, K, W, live & merge, ".cg")
    for q in tl.static_range(len(dh)):
        tl.store(DO + s * D + col + q * W, dh[q], mask=live & (q * W + k < K))
    delta = _heads_dot(dh, mix)
    tl.store(DEL + s, delta, mask=h_ok)
    r = tl.load(R + m * S + s)
    lg = _heads_dot(u, v) * r
    p = tl.where(h_ok, tl.exp(lg - tl.load(LSE + s, mask=h_ok, other=0.0)), 0.0)
    ds = p * (_heads_dot(dh, v) - delta)
    c += ds * lg
    tl.store(DS + s * G, (ds * r).to(DS.dtype.element_ty), mask=h_ok)
    acc = _axpy(p, dh, ds * r, u)
    if MERGE:
        one = tl.full([HP], 1.0, tl.float32)
        acc = _axpy(one, acc, one, part)
    for j in range(s + 1, last):
        dh = dh_next
        dh_next = _row(DO + (j + 1) * D, col, k, K, W, live & (j + 1 < last), ".cg")  # fetched while this row is used
        u = _row(U + j * D, col, k, K, W, live, "")
        lg = _heads_dot(u, v) * r
        p = tl.where(h_ok, tl.exp(lg - tl.load(LSE + j, mask=h_ok, other=0.0)), 0.0)
        ds = p * (_heads_dot(dh, v) - tl.load(DEL + j, mask=h_ok, other=0.0))
        c += ds * lg
        tl.store(DS + j * G, (ds * r).to(DS.dtype.element_ty), mask=h_ok)
        acc = _add(acc, p, dh, ds * r, u)
    f = tl.sum(c) * r * r / D
    for q in tl.static_range(len(dh)):
        tl.store(DV + m * D + col + q * W, (acc[q] - f * v[q].to(tl.float32)).to(DV.dtype.element_ty), mask=live & (q * W + k < K))


@jit(do_not_specialize=_RUNTIME)
def backward_query(V, DS, DU, END, M, S, s0, e0, TB, H: tl.constexpr, K: tl.constexpr, KC: tl.constexpr, CH: tl.constexpr, KA: tl.constexpr,
                   KB: tl.constexpr, G: tl.constexpr, BJ: tl.constexpr, BM: tl.constexpr):
    """du_j += sum over TB tokens and the sources s0..e0-1 of ds_ji rstd_i v_i, for BJ sites j >= s0 and one chunk of a head's columns.
    DU [M / TB, S, D] holds one partial sum per block of tokens; the groups run one after the other, so the order is fixed."""
    h = tl.program_id(1) // CH
    first = h * K + tl.program_id(1) % CH * KC
    j = s0 + tl.program_id(0) * BJ + tl.arange(0, BJ)
    m = tl.program_id(2).to(tl.int64) * TB
    m_end = tl.minimum(m + TB, M)
    end = tl.load(END).to(tl.int32)
    D: tl.constexpr = H * K
    if s0 + tl.program_id(0) * BJ < end:
        q = tl.arange(0, BM * G)
        i = q % G
        ka, kb = tl.arange(0, KA), KA + tl.arange(0, KA)
        last = tl.minimum(first + KC, (h + 1) * K)
        acca = tl.zeros([BJ, KA], tl.float32)
        if KB > 0:
            kb = KA + tl.arange(0, KB)
            accb = tl.zeros([BJ, KB], tl.float32)
        for t in range(m, m_end, BM):
            token = t + q // G
            ok = (token < m_end) & (s0 + i < e0)
            # sources after site j have no weight in it, and their ds was never written
            ds = tl.load(DS + ((token * H + h) * S)[None, :] * G + j[:, None] * G + i[None, :],
                         mask=ok[None, :] & (j[:, None] < end) & (j[:, None] >= s0 + i[None, :]), other=0.0)  # [BJ, BM * G]
            row = (token * S + s0 + i) * D + first
            va = tl.load(V + row[:, None] + ka[None, :], mask=ok[:, None] & (first + ka < last)[None, :], other=0.0)  # [BM * G, KA]
            acca = _dot(ds, va, acca)
            if KB > 0:
                vb = tl.load(V + row[:, None] + kb[None, :], mask=ok[:, None] & (first + kb < last)[None, :], other=0.0)
                accb = _dot(ds, vb, accb)
        out = DU + (tl.program_id(2) * S + j)[:, None] * D + first
        oka = (j < end)[:, None] & (first + ka < last)[None, :]
        acca += tl.load(out + ka[None, :], mask=oka & (j >= e0)[:, None], other=0.0)  # of later groups' sources; this group's sites start here
        tl.store(out + ka[None, :], acca, mask=oka)
        if KB > 0:
            okb = (j < end)[:, None] & (first + kb < last)[None, :]
            accb += tl.load(out + kb[None, :], mask=okb & (j >= e0)[:, None], other=0.0)
            tl.store(out + kb[None, :], accb, mask=okb)


# ---------------------------------------------------------------------------------------------------------------------------------------------
# Launches. The configuration follows from the shape alone: no tuning at run time, and the same binary serves every site.

def _tiles(width: int) -> tuple[int, int]:
    """Two power-of-two column tiles for a chunk, the second 0 where one is as good: 160 -> (128, 32), 128 -> (128, 0), 100 -> (128, 0)."""
    full = triton.next_power_of_2(max(width, 16))
    half, rest = full // 2, triton.next_power_of_2(max(width - full // 2, 16))
    return (half, rest) if half >= 16 and half < width and half + rest < full else (full, 0)


def _inter_config(D: int, H: int, dtype) -> dict:
    K = D // H
    CH = min(16, triton.next_power_of_2(triton.cdiv(K, 160)))  # chunks of at most 160 columns: what one warp holds in registers
    KC = triton.cdiv(K, CH)
    KA, KB = _tiles(KC)
    return dict(H=H, K=K, CH=CH, KC=KC, KA=KA, KB=KB, G=G)


def _intra_config(D: int, H: int) -> dict:
    K, HP = D // H, triton.next_power_of_2(H)
    warps = min(16, triton.next_power_of_2(triton.cdiv(HP * K, 1536)))  # one warp holds a row of up to 1536 columns, 8 to a thread and tile
    W = min(triton.next_power_of_2(K), max(8, 256 * warps // HP))
    return dict(H=H, HP=HP, K=K, W=W, G=G, num_warps=warps, num_stages=1)


def _on(x: Tensor):
    """Launch on the device of x, which need not be the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _forward_buffers(x: Tensor, S: int, H: int) -> list[Tensor]:
    """v [M, S, D], rstd [M, S], lse [M, H, S], and the group's partial results: part [M, G, D], part_lse [M, H, G]."""
    M, D = x.shape
    new = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=x.device)
    return [new(M, S, D, dtype=x.dtype), new(M, S), new(M, H, S), new(M, G, D, dtype=x.dtype), new(M, H, G)]


def _backward_buffers(x: Tensor, S: int, H: int) -> list[Tensor]:
    """dh [M, S, D], delta [M, H, S], part [M, G, D], part_c [M, H, G], ds [M, H, S, G], du [blocks of tokens, S, D]."""
    M, D = x.shape
    new = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=x.device)
    return [new(M, S, D, dtype=x.dtype), new(M, H, S), new(M, G, D, dtype=x.dtype), new(M, H, G), new(M, H, S, G, dtype=x.dtype),
            new(-(-M // _query_block(M)), S, D)]


def _query_block(M: int) -> int:
    """Tokens per partial sum of du: 32 blocks of at least 64 tokens."""
    return max(64, -(-M // 32))


@torch.library.custom_op("depth_routing::read", mutates_args={"v", "rstd", "lse", "part", "part_lse"})
def read_op(source: Tensor, u: Tensor, u_hi: Tensor, u_lo: Tensor, v: Tensor, rstd: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor,
            s: int, H: int, eps: float) -> Tensor:
    (M, D), S = source.shape, v.shape[1]
    s0 = s // G * G
    out = torch.empty_like(source)
    with _on(source):
        if s == s0 and s > 0:
            c = _inter_config(D, H, source.dtype)
            tokens = max(1, min(16, M * H * c["CH"] // 8192))  # per program; u stays in registers
            forward_inter[(H * triton.cdiv(M, tokens),)](v, rstd, u_hi, u_lo, part, part_lse, M, S, s0, tokens, **c, BN=16,
                                                         SPLIT=source.dtype != torch.float32, num_warps=c["CH"], num_stages=1)
        forward_intra[(M,)](source, v, rstd, u, part, part_lse, out, lse, S, s, s0, eps, MERGE=s0 > 0, **_intra_config(D, H))
    return out


@read_op.register_fake
def _(source, u, u_hi, u_lo, v, rstd, lse, part, part_lse, s, H, eps):
    return torch.empty_like(source)


@torch.library.custom_op("depth_routing::read_backward", mutates_args={"do", "delta", "part", "part_c", "ds", "du"})
def read_backward_op(dh: Tensor, h: Tensor, end: Tensor, u: Tensor, u_hi: Tensor, u_lo: Tensor, v: Tensor, rstd: Tensor, lse: Tensor, do: Tensor,
                     delta: Tensor, part: Tensor, part_c: Tensor, ds: Tensor, du: Tensor, s: int, H: int) -> tuple[Tensor, Tensor, Tensor]:
    (M, D), S = dh.shape, v.shape[1]
    s0, e0 = s // G * G, min(s // G * G + G, S)
    dv, end_out = torch.empty_like(dh), torch.empty_like(end)
    c = _inter_config(D, H, dh.dtype)
    with _on(dh):
        if s == e0 - 1 and e0 < S:
            two = dh.dtype != torch.float32
            backward_inter[(H * triton.cdiv(M, 1 + two),)](v, rstd, u_hi, u_lo, do, lse, delta, part, part_c, ds, end, M, S, s0, e0, **c, BN=16,
                                                           SPLIT=dh.dtype != torch.float32, TWO=two, num_warps=c["CH"], num_stages=1)
        backward_intra[(M,)](v, rstd, u, dh, h, do, lse, delta, part, part_c, ds, dv, end, end_out, S, s, s0, e0, MERGE=e0 < S, **_intra_config(D, H))
        if s == s0:
            block = _query_block(M)
            bj = 64 if S - s0 > 32 else 32
            backward_query[(triton.cdiv(S - s0, bj), H * c["CH"], du.shape[0])](v, ds, du, end_out, M, S, s0, e0, block, **c, BJ=bj, BM=8, num_warps=4, num_stages=2)
    if s > 0:
        return dv, end_out, du.new_empty(0)
    sites = torch.arange(S, device=du.device)[:, None]
    return dv, end_out, torch.where(sites < end_out, du.sum(0), 0.0)  # sites that never ran have no gradient


@read_backward_op.register_fake
def _(dh, h, end, u, u_hi, u_lo, v, rstd, lse, do, delta, part, part_c, ds, du, s, H):
    return torch.empty_like(dh), torch.empty_like(end), du.new_empty(u.shape if s == 0 else 0)


# ---------------------------------------------------------------------------------------------------------------------------------------------
# Autograd.

class _Read(torch.autograd.Function):
    """One site. The chain's buffers are plain tensors on ctx, not saved tensors: later sites write other rows of them.

    `token` links the sites: a site's backward must run before those of all earlier sites, also where a sublayer in between passes no gradient
    or where what a site returned was not used. Its gradient carries one number, `end`: one past the last site of this backward pass."""

    @staticmethod
    def forward(ctx, source, u, token, u_hi, u_lo, v, rstd, lse, part, part_lse, s, H, eps, *back):
        x = source.detach().reshape(-1, source.shape[-1]).contiguous()
        h = read_op(x, u.detach(), u_hi, u_lo, v, rstd, lse, part, part_lse, s, H, eps)
        ctx.save_for_backward(h)
        ctx.chain = (u.detach(), u_hi, u_lo, v, rstd, lse), back, s, H, source.shape
        return h.view(source.shape), token.new_empty(1)

    @staticmethod
    def backward(ctx, dh, end):
        chain, back, s, H, shape = ctx.chain
        h, = ctx.saved_tensors
        buffers = back
        if len(back) == 1:  # outside torch.compile the backward's buffers are made when the backward starts, and freed at its end
            lazy, = back
            buffers = list(lazy) or _backward_buffers(h, chain[3].shape[1], H)
            lazy[:] = buffers if s > 0 else []
        dv, end, du = read_backward_op(dh.reshape(h.shape).contiguous(), h, end, *chain, *buffers, s, H)
        return dv.view(shape), (du if s == 0 else None), end, *[None] * (10 + len(back))


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
        u = self.u.detach()
        u_hi = u.to(x.dtype)
        self.u_hi_lo = u_hi, (u - u_hi.float()).to(x.dtype)
        flat = x.detach().reshape(-1, D)
        self.buffers = _forward_buffers(flat, S, n_heads)
        self.back = _backward_buffers(flat, S, n_heads) if torch.compiler.is_compiling() else [[]]
        self.token = x.new_zeros(1, dtype=torch.float32)
        self.source, self.site, self.mix = x, 0, None

    def read(self) -> Tensor:
        if self.mix is None:
            self.mix, self.token = _Read.apply(self.source, self.u, self.token, *self.u_hi_lo, *self.buffers, self.site, self.H, self.eps, *self.back)
        return self.mix

    def write(self, f: Tensor) -> None:
        if self.site + 1 == self.S:
            raise ValueError(f"query has {self.S} rows, so there is no site after source {self.site}")
        if f.shape != self.x.shape or f.dtype != self.x.dtype or f.device != self.x.device:
            raise ValueError(f"a source of {tuple(f.shape)} {f.dtype} on {f.device} cannot join sources of {tuple(self.x.shape)} {self.x.dtype} on {self.x.device}")
        self.read()  # a site that nobody read still stores its source
        self.source, self.site, self.mix = f, self.site + 1, None


def kernel_support(device, dtype, D: int, H: int, S: int) -> str | None:
    """None where the Triton kernels can run, otherwise the reason why not, in one line."""
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
    if D // H > MAX_HEAD_WIDTH:
        return f"a routing head is at most {MAX_HEAD_WIDTH} wide, not {D // H}"
    if S > MAX_SITES:
        return f"at most {MAX_SITES} sources, not {S}"
    return None
