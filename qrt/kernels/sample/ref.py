"""`sample` in torch, and the noise it draws with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

GROUP = 8  # tokens that race as one: 16 bytes of 16-bit logits
LOW = 0x7FFFFFFF  # the bits of a word's lower half
LAST = 0x7FFFFFFE  # the lower half is this less the token, so that the lowest of equals wins
NOT_FINITE = -1  # instead of the token of a row with NaN or infinity
NOT_FINITE_WORD = (LOW << 32) | (LAST - NOT_FINITE)  # beats the words of all tokens
_INF = float("inf")


def sample(
    logits: Tensor,
    rows: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    least: Tensor | None,
    masks: Tensor | None = None,
    mask_at: Tensor | None = None,
) -> Tensor:
    """See the package's docstring."""
    allowed = logits if masks is None or mask_at is None else masked(logits, masks, mask_at)
    tokens = _drawn(allowed, (rows, temperature, seed, position), least)[1]
    return tokens.masked_fill_(not_finite(logits), NOT_FINITE)


def not_finite(logits: Tensor) -> Tensor:
    """Return bool [S]: which rows of logits [S, V] hold NaN or infinity."""
    return ~(logits.amax(-1) < _INF)  # the largest of numbers with a NaN is NaN


def packed_samples(
    logits: Tensor, rows: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, first: int
) -> Tensor:
    """See the package's docstring."""
    scores, tokens = _drawn(logits, (rows, temperature, seed, position), None, first // GROUP)
    bits = (scores + 0.0).view(torch.int32)  # -0 is 0
    ordered = bits ^ ((bits >> 31) & LOW)
    words = (ordered.long() << 32) | (LAST - tokens - first)
    return words.masked_fill_(not_finite(logits), NOT_FINITE_WORD)


def _drawn(
    logits: Tensor, tables: tuple[Tensor, ...], least: Tensor | None, first_group: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the scores fp32 [S] and the tokens int64 [S] that win; the first group is `first_group`."""
    rows, temperature, seed, position = tables
    tokens = logits.argmax(-1)
    scores = logits.gather(1, tokens[:, None])[:, 0].float()
    draws = (temperature[rows] > 0).nonzero()[:, 0]
    if len(draws):
        rows = rows[draws]
        scaled = logits[draws].float().div_(temperature[rows, None])
        if least is not None:
            scaled.masked_fill_(scaled < least[draws, None], -_INF)
        scores[draws], tokens[draws] = _draw(scaled, seed[rows], position[rows], first_group)
    return scores, tokens


def masked(logits: Tensor, masks: Tensor, mask_at: Tensor) -> Tensor:
    """Return logits [S, V] with -inf for the tokens that masks int32 [C, W] do not allow.

    mask_at int32 [S] is the index of each row's mask; a row with a negative one stays as it is.
    """
    words = masks[mask_at.clamp(min=0)]
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)
    allowed = (bits & 1).bool().flatten(1)[:, : logits.shape[1]]
    return logits.masked_fill(~allowed & (mask_at >= 0)[:, None], -_INF)


def _draw(scaled: Tensor, seed: Tensor, position: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Draw tokens int64 [B] with the distribution softmax(scaled [B, V]); return their scores too.

    The noise is that of the groups from `first` on.
    """
    groups = F.pad(scaled, (0, -scaled.shape[1] % GROUP), value=-_INF).unflatten(1, (-1, GROUP))
    index = torch.arange(first, first + groups.shape[1], dtype=torch.int32, device=scaled.device)
    scores = groups.logsumexp(-1).add_(gumbel(seed, position, index))
    group = scores.argmax(-1)
    chances = groups[torch.arange(len(group), device=group.device), group].softmax(-1).cumsum(-1)
    target = uniform(seed, position, ~(group + first).int()[:, None]) * chances[:, -1:]
    best = scores.gather(1, group[:, None])[:, 0]
    return best, group * GROUP + (chances > target).int().argmax(-1)


def gumbel(seed: Tensor, position: Tensor, index: Tensor) -> Tensor:
    """Return standard Gumbel noise in fp32; the arguments are those of `uniform`."""
    return uniform(seed, position, index).neg_().log1p_().neg_().log_().neg_()


def uniform(seed: Tensor, position: Tensor, index: Tensor) -> Tensor:
    """Return uniform noise fp32 [B, n] in (0, 1), the same to the bit everywhere.

    seed       int64 [B]
    position   int [B]
    index      int32 [n] or [B, n]

    Near 0 its steps are 2^-31. They must be fine there: -log(1 - u) is the arrival time in an exponential
    race, and an improbable group wins by a very small u.
    """
    key = _mix64(_mix64(seed) ^ position.long())
    low, high = key.int()[:, None], (key >> 32).int()[:, None]
    bits = _mix32(_mix32(index ^ low) ^ high)
    return bits.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)


def _mix64(x: Tensor) -> Tensor:
    """Apply the finalizer of splitmix64 (Steele et al. 2014) to int64, with wrap-around."""
    x = x + -0x61C8864680B583EB  # 0x9E3779B97F4A7C15
    x = (x ^ _shift(x, 30, 64)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    x = (x ^ _shift(x, 27, 64)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return x ^ _shift(x, 31, 64)


def _mix32(x: Tensor) -> Tensor:
    """Apply a low-bias 32-bit finalizer (C. Wellons, hash-prospector) to int32 in place, with wrap-around."""
    x ^= _shift(x, 16, 32)
    x *= 0x7FEB352D
    x ^= _shift(x, 15, 32)
    x *= -0x7B935975  # 0x846CA68B
    x ^= _shift(x, 16, 32)
    return x


def _shift(x: Tensor, by: int, bits: int) -> Tensor:
    """Shift right without the sign; torch's own shift keeps it."""
    return (x >> by).bitwise_and_((1 << (bits - by)) - 1)
