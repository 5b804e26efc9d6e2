"""Sampling in one pass over the logits, by many programs of one warp; see the package's docstring.

A program finds the group that wins its part of a row, then the token in that group, and stores the score and
the token as one integer. The last program of a row to finish takes the largest integer. Scores are in base 2.
An integer above all others says that the part holds NaN or infinity: the largest logit of each group, which
the race needs anyway, is NaN if one of them is.
A program computes the scores of a tile (exponentials, logarithms) only if one of them may beat its best so
far. As -log(-log(1 - u)) < -log u, a hash and the largest logit of each group are enough to tell.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qrt.kernels.device import after_previous
from qrt.kernels.gpu import multiprocessors, overlaps
from qrt.kernels.launch import COMPILED, variant
from qrt.kernels.sample import ref
from qrt.kernels.sizes import cdiv, next_power_of_2

_GROUP = tl.constexpr(ref.GROUP)
_TILE = 1024  # tokens: four groups of 16-bit logits per lane of a warp
_PROGRAMS_PER_SM = 24
_NONE = tl.constexpr(-(2**31))  # less than any ordered score
_APART = tl.constexpr(32)  # int32 between the counters of two rows, so that each has a cache line of its own
_WORDS = tl.constexpr(256)  # results read at a time
_LOG2_E = tl.constexpr(1.4426950408889634)
_LOW, _LAST = tl.constexpr(ref.LOW), tl.constexpr(ref.LAST)
_NOT_FINITE_WORD = tl.constexpr(ref.NOT_FINITE_WORD)
_LARGE = tl.constexpr(3e38)  # stands for infinity in differences
_BOUND_BITS = tl.constexpr(31.0 + 3.0 + 1e-2)  # 31 for the hash, 3 for the group's tokens, the rest rounding


@triton.jit
def _mix64(x):
    """Compute `ref._mix64` on uint64."""
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _mix32(x):
    """Compute `ref._mix32` on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _bits(key, index):
    """Return the 31 bits, as int32, that `ref.uniform` makes of an index and the key of seed and position."""
    low, high = key.to(tl.int32), (key >> 32).to(tl.uint32)
    return (_mix32(_mix32((index ^ low).to(tl.uint32)) ^ high) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _uniform(bits):
    """Return the value of `ref.uniform` with these bits."""
    return tl.minimum((bits.to(tl.float32) + 0.5) * (1.0 / 2147483648.0), 1.0 - 2.0**-24)


@triton.jit
def _exponential(bits):
    """Return -log(1 - u) in fp32: the logarithm of the rounded 1 - u, corrected for the rounding."""
    u = _uniform(bits)
    rest = 1.0 - u
    lost = (1.0 - rest) - u
    return -tl.log(rest) - lost * (1.0 + u)


@triton.jit
def _over_temperature(x, temperature, ASM: tl.constexpr):
    """Return x / temperature, correctly rounded; fma gives the exact remainder of a quotient."""
    if ASM:
        inverse = tl.div_rn(1.0, temperature)
        quotient = x * inverse
        for _ in tl.static_range(2):
            quotient = tl.fma(tl.fma(-quotient, temperature, x), inverse, quotient)
        return tl.where(x > -float("inf"), quotient, x)
    else:
        return tl.div_rn(x, tl.broadcast_to(temperature, x.shape))


@triton.jit
def _load(logits, group, V, wanted, WHOLE: tl.constexpr):
    """Load the logits [n, _GROUP] of group [n] if `wanted`, with -inf where there is no token."""
    token = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    if WHOLE:
        return tl.load(logits + token, mask=wanted)
    else:
        return tl.load(logits + token, mask=token < V, other=-float("inf"))


@triton.jit
def _allowed(masks, group, mask):
    """Return a bit for each token of group [n]: whether `mask` allows it; all if that is negative."""
    return tl.load(masks + group, mask=mask >= 0, other=255)


@triton.jit
def _drawable(x, allowed, temperature, least, ASM: tl.constexpr):
    """Return the logits x in fp32, with -inf for tokens that may not be drawn."""
    x = x.to(tl.float32)
    if allowed is not None:
        bits = allowed.to(tl.int32)[:, None] >> tl.arange(0, _GROUP)[None, :]
        x = tl.where((bits & 1) == 1, x, -float("inf"))
    if least is not None:
        if temperature > 0:
            x = tl.where(_over_temperature(x, temperature, ASM) < least, -float("inf"), x)
    return x


@triton.jit
def _larger(a, b):
    """Return the larger of a and b; NaN if one of them is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(x, ASM: tl.constexpr):
    """Return the largest of each row of x fp32 [n, _GROUP]; NaN or infinity if one of them is NaN."""
    if ASM:
        return tl.reduce(x, 1, _larger)
    else:  # a reduction of our own takes the interpreter long
        return tl.max(tl.where(x < float("inf"), x, float("inf")), 1)


@triton.jit
def _unruled(tile, top, RULED: tl.constexpr, ASM: tl.constexpr):
    """Return the largest of each row of a tile; `top` [n] where no rule has removed any."""
    return _largest(tile.to(tl.float32), ASM) if RULED else top


@triton.jit
def _ordered(score):
    """Return an int32 for an fp32 score, such that both have the same order."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # -0 is 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _score(order):
    """Undo `_ordered`."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weights(x, top, to_base_2):
    """Return the weights of tokens with logits x [n, _GROUP], relative to the weight of logit top [n]."""
    return tl.exp2((x - tl.maximum(top, -_LARGE)[:, None]) * to_base_2)


@triton.jit
def _may_win(bits, top_2, best):
    """Return whether a group may beat `best`, by its largest logit top_2 [n] and the noise of bits [n]."""
    needed = best - tl.abs(best) * 1e-6 - _BOUND_BITS
    return tl.min((bits.to(tl.float32) > tl.exp2(top_2 - needed)).to(tl.int32), 0) == 0


@triton.jit
def _raced(x, top, top_2, bits, to_base_2):
    """Return the scores [n] of groups with logits x [n, _GROUP], as `_ordered` gives them."""
    sums = tl.sum(_weights(x, top, to_base_2), 1)
    return _ordered(top_2 + tl.log2(sums / _exponential(bits)))


@triton.jit
def _better(orders, group, order, chosen):
    """Return the higher of `order` and the highest of orders [n], with its group."""
    highest = tl.max(orders, 0)
    if highest > order:
        chosen = tl.min(tl.where(orders == highest, group, 0x7FFFFFFF), 0)
        order = highest
    return order, chosen


@triton.jit
def _token(x, top, group, draws, key, to_base_2):
    """Return the token drawn in a group [1] with logits x [1, _GROUP]; its best one if not `draws`."""
    chances = tl.cumsum(_weights(x, top, to_base_2), 1)
    target = _uniform(_bits(key, ~group)) * tl.max(chances, 1)
    passed = tl.where(draws, chances <= target[:, None], x < top[:, None])
    at = tl.arange(0, _GROUP)[None, :]
    first = tl.min(tl.where(passed, _GROUP, at), 1)
    return tl.max(group * _GROUP + first % _GROUP, 0)


@triton.jit(do_not_specialize=["mask_bytes", "tiles", "first_group"])
def _sample(
    LOGITS, ROWS, TEMPERATURE, SEED, POSITION, LEAST, MASKS, MASK_AT, OUT, WORDS, SHARED, V, stride,
    mask_bytes, tiles, first_group,
    TILE: tl.constexpr, WHOLE: tl.constexpr, ASM: tl.constexpr, WORD: tl.constexpr,
    launch_pdl: tl.constexpr,
):  # fmt: skip
    """Grid (S, programs of `tiles` tiles); one warp. WHOLE: V is a multiple of _GROUP.

    The first group of LOGITS is `first_group` of the vocabulary. WORD: OUT gets the word, not the token.
    """
    after_previous(launch_pdl)
    index, program, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    logits = LOGITS + index.to(tl.int64) * stride
    begin = program * tiles * TILE
    end, last = tl.minimum(begin + tiles * TILE, V), (V - 1) // _GROUP
    group = tl.minimum(tl.arange(0, TILE // _GROUP) + begin // _GROUP, last)
    tile = _load(logits, group, V, True, WHOLE)
    tl.debug_barrier()  # else the compiler makes these loads wait for the row's parameters
    row = tl.load(ROWS + index)
    temperature = tl.load(TEMPERATURE + row)
    seed, position = tl.load(SEED + row), tl.load(POSITION + row)
    least = None if LEAST is None else tl.load(LEAST + index)
    if MASKS is not None:
        mask = tl.load(MASK_AT + index)
        MASKS += mask.to(tl.int64) * mask_bytes
    allowed = None if MASKS is None else _allowed(MASKS, group, mask)
    draws = temperature > 0
    to_base_2 = _LOG2_E / tl.where(draws, temperature, 1.0)  # greedy scores are not scaled
    key = seed.to(tl.uint64)
    if draws:
        key = _mix64(_mix64(key) ^ position.to(tl.uint64))
    ARRIVALS, BEST = SHARED + index * _APART, SHARED + index * _APART + 1

    order, best, chosen = _NONE, _NONE, begin // _GROUP
    highest = tl.full([TILE // _GROUP], -float("inf"), tl.float32)
    for first in range(begin, end, TILE):
        x, here = _drawable(tile, allowed, temperature, least, ASM), group
        top = _largest(x, ASM)
        highest = _larger(highest, _unruled(tile, top, (MASKS is not None) | (LEAST is not None), ASM))
        group = tl.minimum(group + TILE // _GROUP, last)
        tile = _load(logits, group, V, first + TILE < end, WHOLE)
        if MASKS is not None:
            allowed = _allowed(MASKS, group, mask)
        if draws:
            seen = tl.load(BEST, volatile=True)
            bits = _bits(key, here + first_group)
            top_2 = tl.minimum(tl.maximum(top * to_base_2, -_LARGE), _LARGE)
            if _may_win(bits, top_2, _score(tl.maximum(best, order))):
                order, chosen = _better(_raced(x, top, top_2, bits, to_base_2), here, order, chosen)
                tl.atomic_max(BEST, order, sem="relaxed")
            best = seen  # used from the next tile on, so that no tile waits for this load
        else:
            order, chosen = _better(_ordered(top), here, order, chosen)

    winner = chosen + tl.arange(0, 1)
    if MASKS is not None:
        allowed = _allowed(MASKS, winner, mask)
    x = _drawable(_load(logits, winner, V, True, WHOLE), allowed, temperature, least, ASM)
    token = _token(x, tl.max(x, 1), winner + first_group, draws, key, to_base_2)
    word = (order.to(tl.int64) << 32) | (-token + _LAST).to(tl.int64)
    finite = tl.min((highest < float("inf")).to(tl.int32), 0) == 1
    word = tl.where(finite, word, tl.full([], _NOT_FINITE_WORD, tl.int64))
    WORDS += index * programs
    tl.store(WORDS + program, word)
    if tl.atomic_add(ARRIVALS, 1, sem="acq_rel", scope="gpu") == programs - 1:
        for first in range(0, programs, _WORDS):
            at = first + tl.arange(0, _WORDS)
            words = tl.load(WORDS + at, mask=at < programs, other=-(2**63), cache_modifier=".cg")
            word = tl.maximum(word, tl.max(words, 0))
        tl.store(OUT + index, word if WORD else -(word & _LOW) + _LAST)
        tl.store(ARRIVALS, 0)
        tl.store(BEST, _NONE)


@cache
def _shared(device: torch.device, capacity: int) -> Tensor:
    """Return what the programs of a row share, for `capacity` rows: how many are done, the best score so far.

    Between calls these are 0 and _NONE. The tensor is kept for ever, since CUDA graphs hold its address. The
    first call must not be one that a graph captures, and calls on one device must share a stream.
    """
    shared = torch.zeros(capacity, _APART.value, dtype=torch.int32, device=device)
    shared[:, 1] = _NONE.value
    return shared


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
    """Run `qrt::sample` on CUDA tensors."""
    return _launched(logits, (rows, temperature, seed, position, least, masks, mask_at), 0, word=False)


def packed_samples(
    logits: Tensor, rows: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, first: int
) -> Tensor:
    """Run `qrt::packed_samples` on CUDA tensors."""
    own = rows, temperature, seed, position, None, None, None
    return _launched(logits, own, first // ref.GROUP, word=True)


def _launched(logits: Tensor, rules: tuple[Tensor | None, ...], first_group: int, *, word: bool) -> Tensor:
    """Return the token or the word of each row; `rules` are the other arguments of `sample`."""
    S, V = logits.shape
    out = torch.empty(S, dtype=torch.int64, device=logits.device)
    if S == 0:
        return out
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    at_once = max(1, _PROGRAMS_PER_SM * multiprocessors(logits.device) // S)  # programs of a row
    tiles = cdiv(cdiv(V, _TILE), at_once)
    programs = cdiv(V, tiles * _TILE)
    *tables, masks, mask_at = rules
    masks = None if masks is None else masks.view(torch.uint8)
    words = torch.empty(S * programs, dtype=torch.int64, device=logits.device)
    shared = _shared(logits.device, max(1024, next_power_of_2(S)))
    kernel = variant(
        _sample, TILE=_TILE, WHOLE=V % ref.GROUP == 0, ASM=COMPILED, WORD=word, num_warps=1,
        launch_pdl=overlaps(logits.device),
    )  # fmt: skip
    kernel.launch(
        (S, programs), logits, *tables, masks, mask_at, out, words, shared, V, logits.stride(0),
        0 if masks is None else masks.shape[1], tiles, first_group,
    )  # fmt: skip
    return out
