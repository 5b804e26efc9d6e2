"""Smoothing of K before it is quantized: the rounding error shrinks, exact attention stays the same.

For each KV head, after RoPE, a constant vector is subtracted from K and its channels are divided by a gain;
those of q are multiplied by it.

    k' = k / gain - shift      q' = q * gain      q' . k' = q . k - q . (gain * shift)

The last term is the same for every key of a query, so it cancels in the softmax (subtracting K's mean:
SageAttention, arXiv:2410.02367). Two channels that RoPE rotates into each other share a gain (SmoothAttention
of QServe, arXiv:2405.04532). The rotation spreads the error of K evenly over the channels, so the error of a
score is proportional to (sum E[q'^2]) (sum E[k'^2]). It is least where E[q'^2] = E[k'^2] in every pair
(Cauchy and Schwarz), so gain = (E[k^2] / E[q^2])^(1/4). On the bundled model int4 KV then costs 1.4 % of
perplexity instead of 1.8 %.

The shift may move by a rounding error without harm, so `settle` moves it to where the first token's K is
stored exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.quant.kv.base import KVFormat

# Position p has the weight 1 / (p + COMMON) in the shift, whatever length is served: most requests are short,
# so most keys are at early positions. KL of int4's attention weights on SmolLM2-135M (context 8,192), in 1e-3
# nats, over all layers and the last 64 queries of WikiText:
#
#     context                         256   1,024   2,048   4,096   8,192
#     these weights                  17.2    17.4    17.4    18.2    26.4
#     equal weights                  21.6    21.4    20.0    16.5    21.4
#     equal weights up to there      20.2    20.5    19.7    19.5    21.4
#     no shift and no gain           23.7    26.7    26.2    23.6    25.8
COMMON = 512
FLOOR = 1e-4  # least energy of a pair, as a share of the mean energy: keeps gains within 10x


def fit(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, long_rope_switch: int = 0) -> Tensor:
    """Fit the table of one layer to a sample of its q [T, Hq, D] and k [T, Hkv, D], before RoPE.

    cos, sin fp32 [P, D/2] cover all positions of the model, from 0 on, behind those up to `long_rope_switch`
    as short requests turn there. The shift is K's mean before RoPE,
    rotated to each position and averaged: only channels that rotate slowly keep much of it, and for them it
    is nearly the same at every position.

    Returns t, fp32 [3, Hkv, D]: q' = q * t[0] (of its KV head), k' = k * t[1] - t[2].
    """
    q, k = q.float(), k.float()
    positions = torch.arange(len(cos), dtype=torch.float32, device=cos.device)
    positions[long_rope_switch:] -= long_rope_switch
    weights = 1 / (positions + COMMON)
    c, s = (weights @ table / weights.sum() for table in (cos, sin))
    lo, hi = k.mean(0).chunk(2, -1)  # [Hkv, D/2]
    mean_lo, mean_hi = lo * c - hi * s, hi * c + lo * s
    # the energy of both channels of a pair once the shift is subtracted
    stretch = cos[0].square()  # 1 unless RoPE also stretches (YaRN)
    k_energy = _floored(stretch * _pairs(k.square().mean(0)) - mean_lo.square() - mean_hi.square())
    q_energy = _floored(_pairs(q.square().mean(0).unflatten(0, (k.shape[1], -1)).mean(1)))
    gain = (k_energy / q_energy) ** 0.25
    gain = (gain / gain.log().mean(-1, keepdim=True).exp()).repeat(1, 2)
    return torch.stack((gain, 1 / gain, torch.cat((mean_lo, mean_hi), -1) / gain))


def settle(table: Tensor, k: Tensor, fmt: KVFormat) -> Tensor:
    """Move the shift of a table from `fit` so that `fmt` stores k fp32 [Hkv, D] without an error.

    k belongs to the first token, after RoPE. Most heads attend to that token whatever they look for, and its
    K hardly depends on which token it is (Xiao et al., attention sinks, arXiv:2309.17453; Sun et al., massive
    activations, arXiv:2402.17762), so the K of a random token serves for all. The shift moves by one rounding
    error, which lowers the KL divergence of int4 on SmolLM2-135M by a fifth.
    """
    (heads, dim), (gain, inverse, shift) = k.shape, table
    wanted = (k * inverse - shift)[None]
    buffers = [spec.zeros(k.device) for spec in fmt.buffers(1, heads, dim, torch.float32).values()]
    slot, rotated = torch.zeros(1, dtype=torch.long, device=k.device), fmt.to_basis(wanted)
    fmt.encode_ref(rotated, rotated, buffers, slot)
    stored = fmt.from_basis(fmt.decode_ref(buffers, slot)[0])
    return torch.stack((gain, inverse, shift + (wanted - stored)[0]))


def _pairs(x: Tensor) -> Tensor:
    """Add the two channels that RoPE rotates into each other: [..., D] -> [..., D/2]."""
    lo, hi = x.chunk(2, -1)
    return lo + hi


def _floored(energy: Tensor) -> Tensor:
    mean = energy.mean(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.maximum(energy, FLOOR * mean)
