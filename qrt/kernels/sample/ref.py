"""`sample` in torch, and the noise it draws with."""

from __future__ import annotations

import torch
from torch import Tensor

_INF = float("inf")


def sample(
    logits: Tensor, rows: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, least: Tensor | None
) -> Tensor:
    """See the package's docstring."""
    tokens = logits.argmax(-1)
    draws = (temperature[rows] > 0).nonzero()[:, 0]
    if len(draws):
        rows = rows[draws]
        scaled = logits[draws].float().div_(temperature[rows, None])
        if least is not None:
            scaled.masked_fill_(scaled < least[draws, None], -_INF)
        scaled += gumbel(seed[rows], position[rows], logits.shape[-1])
        tokens[draws] = scaled.argmax(-1)
    return tokens


def gumbel(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise fp32 [B, vocab] for `seed` int64 [B] and `position` int [B]."""
    noise = uniform(seed, position, vocab)
    return noise.neg_().log1p_().neg_().log_().neg_()


def uniform(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Uniform noise fp32 [B, vocab] in (0, 1), bit for bit the same everywhere.

    Near 0 it comes in steps of 2^-31: -log(1 - u) is the arrival time of an exponential race, in which an
    improbable token wins by a very small u.
    """
    key = _mix64(_mix64(seed) ^ position.long())
    low, high = key.int()[:, None], (key >> 32).int()[:, None]
    token = torch.arange(vocab, dtype=torch.int32, device=seed.device)
    bits = _mix32(_mix32(token ^ low) ^ high)
    return bits.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)


def _mix64(x: Tensor) -> Tensor:
    """The finalizer of splitmix64 (Steele et al. 2014), int64 with wrap-around."""
    x = x + -0x61C8864680B583EB  # 0x9E3779B97F4A7C15
    x = (x ^ _shift(x, 30, 64)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    x = (x ^ _shift(x, 27, 64)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return x ^ _shift(x, 31, 64)


def _mix32(x: Tensor) -> Tensor:
    """A 32-bit finalizer of low bias (C. Wellons, hash-prospector), int32 with wrap-around; in place."""
    x ^= _shift(x, 16, 32)
    x *= 0x7FEB352D
    x ^= _shift(x, 15, 32)
    x *= -0x7B935975  # 0x846CA68B
    x ^= _shift(x, 16, 32)
    return x


def _shift(x: Tensor, by: int, bits: int) -> Tensor:
    """Logical shift right: torch's is arithmetic."""
    return (x >> by).bitwise_and_((1 << (bits - by)) - 1)
