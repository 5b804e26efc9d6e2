"""RadixCache: the prefix cache, a radix tree from token ids to the slots that hold their K/V.

A node owns the slots of its tokens until they are evicted. Running sequences lock the path they read. Tokens
that are not locked can be evicted, the least recently used leaf token first. Tokens cached with a salt are
found only with that salt, so nobody else can tell from the time of an answer that they are cached. (This is
SGLang's RadixAttention, arXiv:2312.07104, with pages of one token as in LightLLM.)

A token may also have a slot in each window group (`qrt.mem.windows`), or have lost it. These slots are
evicted on their own, too.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from qrt.mem.slots import Ints
from qrt.mem.windows import NONE, Held, WindowSlots

# The first token of a key; directly below the root, together with the salt if there is one.
Edge = int | tuple[str, int]


@dataclass(eq=False, slots=True)
class Node:
    """An edge and its end: the tokens `key` [n] after the parent's, and their `slots` [n].

    `windows` has their slots [n] in each window group, NONE for those without one.
    """

    key: Ints
    slots: Ints
    windows: list[Ints] = field(default_factory=list)
    parent: Node | None = None
    edge: Edge = 0  # its key among the parent's children
    children: dict[Edge, Node] = field(default_factory=dict)
    ref: int = 0  # locks whose path contains this node
    last_use: int = 0  # never earlier than a child's
    queued: bool = False  # whether the eviction queue has an entry for it


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of a lookup; valid until the tree changes.

    node       the node in which it ends
    within     how many tokens of `node` belong to it
    length     number of its tokens
    unlocked   how many of them are evictable now
    salt       the salt of the lookup
    """

    node: Node
    within: int
    length: int
    unlocked: int
    salt: str | None = None


class RadixCache:
    """Token ids -> slots. `evictable` and `locked` count the tokens it holds."""

    def __init__(self, windows: Sequence[WindowSlots] = ()) -> None:
        self.evictable = self.locked = 0
        self._windows = windows
        # the nodes that have slots in each window group, roughly the least recently used first
        self._holding: list[dict[Node, None]] = [{} for _ in windows]
        self._root = Node(np.empty(0, np.int32), np.empty(0, np.int32))
        self._clock = 0
        # Nodes that were an unlocked leaf when they were queued, by their last use at that time. Each node
        # has at most one entry, and `evict` corrects a stale one when it comes up.
        self._queue: list[tuple[int, int, Node]] = []
        self._serial = count()

    def match(self, ids: Ints, salt: str | None = None) -> Match:
        """Find the longest prefix of `ids` [n] cached with `salt`.

        Changes nothing, not even the order of eviction.
        """
        node, within, length, unlocked = self._root, 0, 0, 0
        while length < len(ids):
            child = node.children.get(_edge(node, int(ids[length]), salt))
            if child is None:
                break
            node = child
            within = _common_prefix(node.key, ids[length:])
            length += within
            if not node.ref:
                unlocked += within
            if within < len(node.key):
                break
        return Match(node, within, length, unlocked, salt)

    def lock(self, match: Match) -> Node:
        """Keep the matched prefix until `unlock` is called with the returned node, where the prefix ends."""
        end = self._end(match)
        for node in _path(end):
            if not node.ref:
                self.evictable -= len(node.key)
                self.locked += len(node.key)
            node.ref += 1
        return end

    def unlock(self, end: Node) -> None:
        """Undo one `lock` and mark the prefix as just used."""
        for node in _path(end):
            node.ref -= 1
            assert node.ref >= 0, "prefix unlocked more often than locked"
            if not node.ref:
                self.locked -= len(node.key)
                self.evictable += len(node.key)
        self._touch(end)
        self._offer(end)

    def slots(self, end: Node) -> Ints:
        """Return a copy of the slots of the whole prefix that ends at `end`, int32 [its length]."""
        parts = [node.slots for node in _path(end)]
        return np.concatenate(parts[::-1]) if parts else np.empty(0, np.int32)

    def window_slots(self, match: Match, group: int) -> Ints:
        """Return the slots, or NONE, of a match in the window group `group`, int32 [its length]."""
        parts = [node.windows[group] for node in _path(match.node)]
        return np.concatenate(parts[::-1])[: match.length] if parts else np.empty(0, np.int32)

    def hold_window(self, end: Node, count: int, group: int) -> Ints:
        """Let a request hold the slots of the last `count` tokens up to `end` in a window group."""
        parts, found, holding = [], 0, self._holding[group]
        for node in _path(end):
            if found >= count:
                break
            parts.append(node.windows[group][max(0, len(node.key) - (count - found)) :])
            found += len(parts[-1])
            if node in holding:
                self._use_window(node, group)
        slots = np.concatenate(parts[::-1]) if parts else np.empty(0, np.int32)
        self._windows[group].hold(slots)
        return slots

    def fill(self, match: Match, held: Sequence[Held]) -> None:
        """Take over slots of a request in window groups, for tokens of the match that have none there."""
        start, node = match.length - match.within, match.node
        end = match.length
        while node.parent is not None:
            for group, (pool, own, slots) in enumerate(zip(self._windows, held, node.windows, strict=True)):
                low, high = max(start, own.first), min(end, own.end)
                if low < high:
                    lacking = slots[low - start : high - start]
                    at = np.flatnonzero(lacking == NONE)
                    lacking[at] = own.slots[low - own.first :][at]
                    pool.cache(lacking[at])
                    if len(at):
                        self._use_window(node, group)
            node = node.parent
            start, end = start - len(node.key), start

    def evict_window(self, group: int, need: int) -> None:
        """Free at least `need` slots of a window group that no request holds, or all if there are fewer.

        Tokens that were used least recently lose theirs first, and of one node the earlier tokens: a hit
        needs the last ones.
        """
        pool, holding = self._windows[group], self._holding[group]
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

    def insert(self, match: Match, ids: Ints, slots: Ints) -> Node:
        """Add `ids` [n], whose cached prefix is `match`, and return the node where they end.

        The tree becomes the owner of `slots[match.length:]`. The first `match.length` slots are duplicates
        and stay the caller's.
        """
        end = self._end(match)
        if match.length < len(ids):
            rest = slice(match.length, None)
            leaf = Node(ids[rest].copy(), slots[rest].copy(), self._without(match.length, len(ids)), end)
            leaf.edge = _edge(end, int(leaf.key[0]), match.salt)
            end.children[leaf.edge] = leaf
            self.evictable += len(leaf.key)
            end = leaf
        self._touch(end)
        self._offer(end)
        return end

    def extend(self, end: Node, ids: Ints, slots: Ints, salt: str | None = None) -> Node | None:
        """Add `ids` [n > 0] and their `slots` after the prefix that ends at `end`.

        One lock of that prefix moves to the new end, which is returned. Returns None, without a change, if
        the first of the ids is cached there already.
        """
        edge = _edge(end, int(ids[0]), salt)
        if edge in end.children:
            return None
        lost = self._without(0, len(ids))
        leaf = Node(ids.copy(), slots.copy(), lost, end, edge, ref=1, last_use=end.last_use)
        end.children[edge] = leaf
        self.locked += len(ids)
        return leaf

    def evict(self, need: int) -> Ints:
        """Forget `need` unlocked tokens, or all if there are fewer, and return their slots.

        The least recently used leaf token goes first, so a long leaf is shortened from its end.
        """
        freed = []
        while need > 0 and self._queue:
            last_use, _, node = heapq.heappop(self._queue)
            node.queued = False
            if node.children or node.ref or node.last_use != last_use:
                self._offer(node)
                continue
            keep = max(0, len(node.key) - need)
            freed.append(node.slots[keep:])
            self._lose(node, keep)
            need -= len(node.key) - keep
            self.evictable -= len(node.key) - keep
            if keep:
                node.key, node.slots = node.key[:keep], node.slots[:keep]
                node.windows = [slots[:keep] for slots in node.windows]
                self._offer(node)
            else:
                self._remove(node)
        return np.concatenate(freed) if freed else np.empty(0, np.int32)

    def nodes(self) -> Iterator[Node]:
        """Yield every node but the root, parents first."""
        stack = [self._root]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            if node.parent is not None:
                yield node

    def check(self) -> None:
        """Assert the invariants of the tree. O(tokens)."""
        evictable = locked = 0
        queued = {id(node) for _, _, node in self._queue}
        assert len(queued) == len(self._queue)
        for node in self.nodes():
            parent = node.parent
            assert parent is not None and parent.children[node.edge] is node
            assert node.edge == int(node.key[0]) or (parent.parent is None and isinstance(node.edge, tuple))
            assert len(node.key) == len(node.slots) > 0
            assert [len(slots) for slots in node.windows] == [len(node.key)] * len(self._windows)
            for slots, holding in zip(node.windows, self._holding, strict=True):
                assert node in holding or (slots == NONE).all(), "slots of a window that eviction cannot find"
            assert node.queued == (id(node) in queued)
            assert node.queued or node.children or node.ref, "an evictable leaf that eviction cannot find"
            if parent.parent is not None:
                assert parent.ref >= node.ref and parent.last_use >= node.last_use
            evictable += 0 if node.ref else len(node.key)
            locked += len(node.key) if node.ref else 0
        assert (self.evictable, self.locked) == (evictable, locked)

    def _end(self, match: Match) -> Node:
        """Return the node that ends where the match ends; split a node if there is none."""
        node, within, parent = match.node, match.within, match.node.parent
        if within == len(node.key):
            return node
        assert parent is not None
        # The upper part is the new node: locks and queue entries refer to ends of paths. Both parts are
        # copied, so that the short one does not keep the long array alive.
        upper = Node(node.key[:within].copy(), node.slots[:within].copy(), parent=parent, edge=node.edge)
        upper.windows = [slots[:within].copy() for slots in node.windows]
        node.windows = [slots[within:].copy() for slots in node.windows]
        for holding in self._holding:
            if node in holding:
                holding[upper] = None
        upper.ref, upper.last_use = node.ref, node.last_use
        parent.children[upper.edge] = upper
        node.key, node.slots, node.parent = node.key[within:].copy(), node.slots[within:].copy(), upper
        node.edge = int(node.key[0])
        upper.children[node.edge] = node
        return upper

    def _without(self, first: int, end: int) -> list[Ints]:
        """Return NONE for the tokens [first, end) in each window group."""
        return [np.full(end - first, NONE, np.int32) for _ in self._windows]

    def _lose(self, node: Node, keep: int) -> None:
        """Give up the slots in window groups that tokens of `node` beyond the first `keep` have."""
        for pool, slots, holding in zip(self._windows, node.windows, self._holding, strict=True):
            rest = slots[keep:]
            pool.uncache(rest[rest != NONE])
            if not keep:
                holding.pop(node, None)

    def _use_window(self, node: Node, group: int) -> None:
        """Mark the slots of `node` in a window group as just used."""
        holding = self._holding[group]
        holding.pop(node, None)
        holding[node] = None

    def _touch(self, end: Node) -> None:
        self._clock += 1
        for node in _path(end):
            node.last_use = self._clock

    def _offer(self, node: Node) -> None:
        """Queue `node` for eviction if it is an unlocked leaf."""
        if not (node.children or node.ref or node.queued or node.parent is None):
            node.queued = True
            heapq.heappush(self._queue, (node.last_use, next(self._serial), node))

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.edge]
        self._offer(parent)


def _edge(parent: Node, token: int, salt: str | None) -> Edge:
    return token if salt is None or parent.parent is not None else (salt, token)


def _path(node: Node) -> Iterator[Node]:
    """Yield the nodes from `node` up to the root, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def _common_prefix(a: Ints, b: Ints) -> int:
    """Return the length of the common prefix of two keys, which are not empty."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax())
    return first if differ[first] else n
