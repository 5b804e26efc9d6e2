"""WindowCache: the slots in window groups that tokens in the prefix cache have (`qrt.mem.windows`).

A cached token may have a slot in each group, or have lost it. Where the slots of a group run out, the cache
gives up those that no request holds, without forgetting the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qrt.mem.nodes import Match, Node, path_of
from qrt.mem.slots import Ints
from qrt.mem.windows import NONE, Held, WindowSlots


class WindowCache:
    """The `windows` of the nodes of one tree, over the slots of each window group."""

    def __init__(self, pools: Sequence[WindowSlots]) -> None:
        self._pools = pools
        # the nodes that have slots in each group, roughly the least recently used first
        self._holding: list[dict[Node, None]] = [{} for _ in pools]

    def without(self, count: int) -> list[Ints]:
        """Return `Node.windows` of `count` tokens without slots."""
        return [np.full(count, NONE, np.int32) for _ in self._pools]

    def slots(self, match: Match, group: int) -> Ints:
        """Return the slots, or NONE, of a match in the window group `group`, int32 [its length]."""
        parts = [node.windows[group] for node in path_of(match.node)]
        return np.concatenate(parts[::-1])[: match.length] if parts else np.empty(0, np.int32)

    def hold(self, end: Node, count: int, group: int) -> Ints:
        """Let a request hold the slots of the last `count` tokens up to `end` in a window group."""
        parts, found, holding = [], 0, self._holding[group]
        for node in path_of(end):
            if found >= count:
                break
            parts.append(node.windows[group][max(0, len(node.key) - (count - found)) :])
            found += len(parts[-1])
            if node in holding:
                self._use(node, group)
        slots = np.concatenate(parts[::-1]) if parts else np.empty(0, np.int32)
        self._pools[group].hold(slots)
        return slots

    def fill(self, match: Match, held: Sequence[Held]) -> None:
        """Take over slots of a request in window groups, for tokens of the match that have none there."""
        start, node = match.length - match.within, match.node
        end = match.length
        while node.parent is not None:
            for group, (pool, own, slots) in enumerate(zip(self._pools, held, node.windows, strict=True)):
                low, high = max(start, own.first), min(end, own.end)
                if low < high:
                    lacking = slots[low - start : high - start]
                    at = np.flatnonzero(lacking == NONE)
                    lacking[at] = own.slots[low - own.first :][at]
                    pool.cache(lacking[at])
                    if len(at):
                        self._use(node, group)
            node = node.parent
            start, end = start - len(node.key), start

    def evict(self, group: int, need: int) -> None:
        """Free at least `need` slots of a window group that no request holds, or all if there are fewer.

        Tokens that were used least recently lose theirs first, and of one node the earlier tokens: a hit
        needs the last ones.
        """
        pool, holding = self._pools[group], self._holding[group]
        for node in list(holding):
            if need <= 0:
                return
            slots = node.windows[group]
            cached = np.flatnonzero(slots != NONE)
            at = cached[pool.unheld(slots[cached])][:need]
            pool.uncache(slots[at])
            slots[at] = NONE
            need -= len(at)
            if need > 0:  # what is left is held by requests, so it is in use
                del holding[node]
                if len(at) < len(cached):
                    holding[node] = None

    def shorten(self, node: Node, keep: int) -> None:
        """Give up the slots of the tokens of `node` beyond the first `keep`."""
        for pool, slots, holding in zip(self._pools, node.windows, self._holding, strict=True):
            rest = slots[keep:]
            pool.uncache(rest[rest != NONE])
            if not keep:
                holding.pop(node, None)
        node.windows = [slots[:keep] for slots in node.windows]

    def split(self, node: Node, upper: Node) -> None:
        """Move the slots of the first tokens of `node`, as many as `upper` has, to `upper`."""
        count = len(upper.key)
        upper.windows = [slots[:count].copy() for slots in node.windows]
        node.windows = [slots[count:].copy() for slots in node.windows]
        for holding in self._holding:
            if node in holding:
                holding[upper] = None

    def check(self, node: Node) -> None:
        """Assert that `node` has an entry for each token, and that eviction finds its slots."""
        for slots, holding in zip(node.windows, self._holding, strict=True):
            assert len(slots) == len(node.key)
            assert node in holding or (slots == NONE).all(), "slots of a window that eviction cannot find"

    def _use(self, node: Node, group: int) -> None:
        """Mark the slots of `node` in a group as just used."""
        holding = self._holding[group]
        holding.pop(node, None)
        holding[node] = None
