"""`kv_write` from its definition, in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qrt.kernels.rmsnorm.ref import rmsnorm
from qrt.quant.kv import KV_FORMATS


def kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    kv: Sequence[Tensor],
    smoothing: Tensor | None,
    format: str,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """See the package's docstring."""
    fmt = KV_FORMATS[format]
    c, s = cos[positions][:, None], sin[positions][:, None]
    normal_q = q if q_norm is None else rmsnorm(q, q_norm, eps)
    normal_k = k if k_norm is None else rmsnorm(k, k_norm, eps)
    turned_q, turned_k = _rope(normal_q, c, s), _rope(normal_k, c, s)
    if smoothing is not None:
        q_gain, k_gain, shift = smoothing
        turned_q = turned_q * q_gain.repeat_interleave(q.shape[1] // k.shape[1], 0)
        turned_k = turned_k * k_gain - shift
    q.copy_(fmt.to_basis(turned_q))
    stored_k, stored_v = fmt.to_basis(turned_k), fmt.to_basis(v)
    fmt.encode_ref(stored_k, stored_v, kv, slots)
    k.copy_(stored_k)
    v.copy_(stored_v)


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [T, H, D] in fp32, turned by cos, sin [T, 1, D/2]."""
    lo, hi = x.float().chunk(2, -1)
    return torch.cat((lo * cos - hi * sin, hi * cos + lo * sin), -1)
