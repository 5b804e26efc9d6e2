"""Sampling in one pass over the logits, by many programs of one warp; see the package's docstring.

A row's programs share one word: the best score so far, in the order of integers, over the complement of its
token. A maximum does not depend on the order in which they come, and of equal scores the lowest token wins.
A program makes the scores of a tile (the logarithms are most of the work) only if one of them may beat the
best so far: -log(-log(1 - u)) < -log u, so a hash and the largest logit of a few tokens are enough to tell.
The last program of a row to arrive writes its token.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

_GROUP = tl.constexpr(8)  # tokens of a lane that share one bound: 16 bytes of 16-bit logits
_TILE = tl.constexpr(256)  # tokens that are drawn together; a program has one or several tiles
_GREEDY_TILE = tl.constexpr(1024)  # of nothing but loads: as many in flight as it takes
_PROGRAMS = 24 * 132  # as an H200 runs at once, by registers
_NONE = tl.constexpr(-(2**63))
_LOG2_E = tl.constexpr(1.4426950408889634)
_MARGIN = tl.constexpr(1e-2)  # of a bound in base 2: more than the rounding of what it is compared with


@triton.jit
def _mix64(x):
    """`ref._mix64` on uint64."""
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _mix32(x):
    """`ref._mix32` on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _gumbel(bits):
    """-log(-log(1 - u)) fp32 of the hash's 31 bits int32, u as `ref.uniform`.

    log(1 - u) is the logarithm of the rounded 1 - u and what the rounding lost.
    """
    u = tl.minimum((bits.to(tl.float32) + 0.5) * (1.0 / 2147483648.0), 1.0 - 2.0**-24)
    rest = 1.0 - u
    lost = (1.0 - rest) - u
    return -tl.log(-tl.log(rest) - lost * (1.0 + u))


@triton.jit
def _over_temperature(x, temperature, ASM: tl.constexpr):
    """x / temperature, rounded as a division is; with fma a quotient's remainder is exact."""
    if ASM:
        inverse = tl.div_rn(1.0, temperature)
        quotient = x * inverse
        for _ in tl.static_range(2):
            quotient = tl.fma(tl.fma(-quotient, temperature, x), inverse, quotient)
        return tl.where(x > -float("inf"), quotient, x)
    else:
        return tl.div_rn(x, tl.broadcast_to(temperature, x.shape))


@triton.jit
def _ordered(bits):
    """fp32 as int32 <-> an int32 of the same order; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _word(score, token, end):
    """The largest of score over the complement of token, as int64; tokens from `end` on do not count."""
    order = _ordered((score + 0.0).to(tl.int32, bitcast=True)).to(tl.int64)  # -0 is 0
    words = tl.where(token < end, (order << 32) | (0x7FFFFFFF - token).to(tl.int64), _NONE)
    return tl.max(tl.max(words, 1), 0)


@triton.jit
def _tile(logits, first, end, TILE: tl.constexpr):
    """Tokens of a tile [groups, _GROUP] int32, less `first`, and their logits fp32."""
    within = tl.arange(0, TILE // _GROUP)[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    x = tl.load(logits + first + within, mask=first + within < end, other=-float("inf"))
    return within, x.to(tl.float32)


@triton.jit
def _best(BEST):
    """Score fp32 of a row so far, NaN when there is none."""
    word = tl.load(BEST, volatile=True)
    return _ordered((word >> 32).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _greedy(logits, BEST, begin, end):
    """Offer the largest logit of tokens [begin, end) to BEST."""
    for first in range(begin, end, _GREEDY_TILE):
        within, x = _tile(logits, first, end, _GREEDY_TILE)
        beaten = tl.max(tl.max(x, 1), 0) < _best(BEST)
        if not beaten:
            tl.atomic_max(BEST, _word(x, first + within, end))


@triton.jit
def _draw(logits, BEST, begin, end, temperature, seed, position, least, ASM: tl.constexpr):
    """Offer the best score of tokens [begin, end) to BEST."""
    key = _mix64(_mix64(seed.to(tl.uint64)) ^ position.to(tl.uint64))
    low, high = key.to(tl.int32), (key >> 32).to(tl.uint32)
    to_base_2 = _LOG2_E / temperature
    for first in range(begin, end, _TILE):
        within, x = _tile(logits, first, end, _TILE)
        best = _best(BEST)
        # (first ^ low) ^ within is token ^ low, since first is a multiple of the tile
        hashed = _mix32(_mix32(((first ^ low) ^ within).to(tl.uint32)) ^ high)
        bits = (hashed & 0x7FFFFFFF).to(tl.int32)
        needed = (best - tl.abs(best) * 1e-6) * _LOG2_E - 31.0 - _MARGIN
        beaten = tl.min(bits, 1).to(tl.float32) > tl.exp2(tl.max(x, 1) * to_base_2 - needed)
        if tl.min(beaten.to(tl.int32), 0) == 0:
            scaled = _over_temperature(x, temperature, ASM)
            score = tl.where(scaled < least, -float("inf"), scaled + _gumbel(bits))
            tl.atomic_max(BEST, _word(score, first + within, end))


@triton.jit(do_not_specialize=["tiles"])
def _sample(
    LOGITS, ROWS, TEMPERATURE, SEED, POSITION, LEAST, TOKENS, BEST, ARRIVALS, V, stride, tiles,
    ASM: tl.constexpr,
):  # fmt: skip
    """Grid (S, programs of `tiles` tiles); one warp."""
    index = tl.program_id(0)
    row = tl.load(ROWS + index)
    temperature = tl.load(TEMPERATURE + row)
    logits = LOGITS + index.to(tl.int64) * stride
    begin = tl.program_id(1) * tiles * _TILE
    end = tl.minimum(begin + tiles * _TILE, V)
    if temperature > 0:
        least = -float("inf")
        if LEAST is not None:
            least = tl.load(LEAST + index)
        seed, position = tl.load(SEED + row), tl.load(POSITION + row)
        _draw(logits, BEST + index, begin, end, temperature, seed, position, least, ASM)
    else:
        _greedy(logits, BEST + index, begin, end)
    if tl.atomic_add(ARRIVALS + index, 1, sem="acq_rel", scope="gpu") == tl.num_programs(1) - 1:
        word = tl.atomic_xchg(BEST + index, _NONE)
        tl.store(TOKENS + index, 0x7FFFFFFF - (word & 0x7FFFFFFF))
        tl.store(ARRIVALS + index, 0)


@cache
def _shared(device: torch.device, capacity: int) -> tuple[Tensor, Tensor]:
    """What the programs of `capacity` rows share: the best so far and the arrivals, _NONE and 0 between
    calls. Kept for ever, since CUDA graphs hold them; the first call is not one that a graph captures. Calls
    on one device follow each other on one stream."""
    best = torch.full((capacity,), _NONE.value, dtype=torch.int64, device=device)
    return best, torch.zeros(capacity, dtype=torch.int32, device=device)


def tiles_of(rows: int, vocab: int) -> int:
    """Tiles of a program."""
    return triton.cdiv(triton.cdiv(vocab, _TILE.value), max(1, _PROGRAMS // rows))


def sample(
    logits: Tensor, rows: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, least: Tensor | None
) -> Tensor:
    """`qrt::sample` on CUDA tensors."""
    S, V = logits.shape
    tokens = torch.empty(S, dtype=torch.int64, device=logits.device)
    if S == 0:
        return tokens
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    best, arrivals = _shared(logits.device, max(1024, triton.next_power_of_2(S)))
    tiles = tiles_of(S, V)
    _sample[(S, triton.cdiv(V, tiles * _TILE.value))](
        logits, rows, temperature, seed, position, least, tokens, best, arrivals, V, logits.stride(0), tiles,
        ASM=not triton.knobs.runtime.interpret, num_warps=1,
    )  # fmt: skip
    return tokens
