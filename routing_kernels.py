"""Depth routing: the fp32 reference, which is also its specification.

Legend: B batch, T time, M = B*T tokens, D width, H routing heads, K = D // H, S depth sources / sites, N sources read at one site.
"""
import torch
from torch import Tensor


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
