"""The signed Hadamard rotation of quantized KV, which spreads each channel of a head over many.

Each half of a head (lo, hi) is multiplied by M = diag(sign) @ H / sqrt(n), n = D/2. Where D/2 is no power of
two, M is block-diagonal with the largest power of two that divides D/2. In a head narrower than 128 the
halves are first crossed, (lo + hi, lo - hi) / sqrt(2), because 32 channels alone do not even out an outlier:
int4 costs the bundled model (D = 64) 1.9 % of perplexity instead of 2.5. The rotation applies to q, k (after
RoPE) and v, so scores do not change. The attention output is rotated back with M^T, and crossed. At the same
bytes the error of int4 attention is 2.4 times smaller at D = 128 (docs/kv-layout.md#rotation).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def signs(n: int) -> Tensor:
    """Return n fixed signs from a xorshift32 sequence: the same on every machine and version."""
    state, drawn = 0x9E3779B9, []
    for _ in range(n):
        state ^= (state << 13) & 0xFFFFFFFF
        state ^= state >> 17
        state ^= (state << 5) & 0xFFFFFFFF
        drawn.append(1.0 if state & 1 else -1.0)
    return torch.tensor(drawn, dtype=torch.float32)


def hadamard(n: int) -> Tensor:
    """Return Sylvester's matrix of +1 and -1 [n, n]; n is a power of two."""
    h = torch.ones(1, 1, dtype=torch.float32)
    while h.shape[0] < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


CROSSED_BELOW = 128  # head_dim


@lru_cache(maxsize=16)
def matrix(head_dim: int) -> Tensor:
    """Return the orthogonal M [D/2, D/2], fp32 on the CPU, shared by all layers and heads."""
    half = head_dim // 2
    block = half & -half
    return signs(half)[:, None] * torch.block_diag(*[hadamard(block)] * (half // block)) * block**-0.5


def rotate(x: Tensor) -> Tensor:
    """Rotate x [..., D] into the basis of the cache: fp32 [..., D]."""
    return (_halves(x) @ matrix(x.shape[-1]).to(x.device)).flatten(-2)


def unrotate(y: Tensor) -> Tensor:
    """Undo `rotate`: y [..., D] -> fp32 [..., D]."""
    return (_halves(y) @ matrix(y.shape[-1]).to(y.device).T).flatten(-2)


def _halves(x: Tensor) -> Tensor:
    """Return the halves of x [..., D], crossed where the head is narrow: fp32 [..., 2, D/2]."""
    halves = x.float().unflatten(-1, (2, -1))
    if x.shape[-1] >= CROSSED_BELOW:
        return halves
    lo, hi = halves.unbind(-2)
    return torch.stack((lo + hi, lo - hi), -2) * 2**-0.5
