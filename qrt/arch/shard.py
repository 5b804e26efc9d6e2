"""The part of a model that one of several ranks has: heads, channels of the mlps, rows of the head.

A rank is an ordinary model with fewer heads and narrower mlps. The outputs of attention and of the mlps are
summed over the ranks. Embedding, norms and routers are whole on each rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from qrt.arch.base import Arch
from qrt.errors import ConfigError

UNITS = (128, 64, 32, 16)  # channels of an mlp that stay together: the first of these that divides them
HEAD_ROWS = 64  # rows of the head that stay together


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `ranks` that share a model, counted from 0."""

    rank: int
    ranks: int

    def of(self, count: int) -> range:
        """Return which of `count` things in a row the rank has; ranks differ by one at most."""
        return range(count * self.rank // self.ranks, count * (self.rank + 1) // self.ranks)


WHOLE = Shard(0, 1)


def channels(size: int, shard: Shard) -> range:
    """Return the rank's channels of an mlp with `size` inner channels, in whole units."""
    unit = _unit(size)
    own = shard.of(size // unit)
    return range(own.start * unit, own.stop * unit)


def heads(arch: Arch, shard: Shard) -> tuple[range, range]:
    """Return the rank's query heads and KV heads; ranks that outnumber the KV heads have some in common."""
    first = shard.rank * arch.num_kv_heads // shard.ranks
    return shard.of(arch.num_heads), range(first, first + max(1, arch.num_kv_heads // shard.ranks))


def head_rows(vocab_size: int, shard: Shard) -> range:
    """Return the rank's rows of the head: a multiple of 64, of the last rank perhaps fewer."""
    own = shard.of(-(-vocab_size // HEAD_ROWS))
    return range(own.start * HEAD_ROWS, min(own.stop * HEAD_ROWS, vocab_size))


def rank_counts(arch: Arch) -> list[int]:
    """Return the numbers of ranks that can share a model: each has whole heads, and channels of every mlp."""
    units = (size // _unit(size) for size in _inner(arch))
    most = min(*units, -(-arch.vocab_size // HEAD_ROWS), arch.num_heads)
    q, kv = arch.num_heads, arch.num_kv_heads
    return [n for n in range(1, most + 1) if q % n == 0 and (kv % n == 0 or n % kv == 0)]


def of_rank(arch: Arch, shard: Shard) -> Arch:
    """Return the architecture of a rank; its vocabulary is the whole one.

    Raises ConfigError for a number of ranks that cannot share the model.
    """
    if shard.ranks not in (able := rank_counts(arch)):
        inner = " or ".join(
            f"{size} channels in units of {_unit(size)}" for size in sorted(set(_inner(arch)))
        )
        raise ConfigError(
            f"tensor_parallel_size: expected one of {', '.join(map(str, able))}, got {shard.ranks}; "
            f"{arch.name} has {arch.num_heads} heads and {arch.num_kv_heads} KV heads, of which a rank has "
            f"whole ones, {arch.vocab_size} tokens in units of {HEAD_ROWS}, and mlps of {inner}"
        )
    own, (q, kv), inner_size = arch.experts, heads(arch, shard), arch.intermediate_size
    if own is not None:
        width, shared = (len(channels(size, shard)) if size else 0 for size in (own.width, own.shared_width))
        own = replace(own, width=width, shared_width=shared)
    if inner_size in _inner(arch):
        inner_size = len(channels(inner_size, shard))
    return replace(
        arch,
        num_heads=len(q),
        num_kv_heads=len(kv),
        intermediate_size=inner_size,
        alibi=arch.alibi[q.start : q.stop],
        experts=own,
    )


def _unit(size: int) -> int:
    """Return how many of `size` channels stay together; all of them where no unit divides them."""
    return next((unit for unit in UNITS if size % unit == 0), size)


def _inner(arch: Arch) -> list[int]:
    """Return the inner sizes of the mlps that there are."""
    dense = any(arch.at(index).experts is None for index in range(arch.num_layers))
    sizes = [arch.intermediate_size] if dense else []
    if arch.experts is not None:
        sizes += [size for size in (arch.experts.width, arch.experts.shared_width) if size]
    return sizes
