"""RadixCache: the prefix cache, a radix tree from token ids to the slots that hold their K/V.

A node owns the slots of its tokens until they are evicted. Running sequences lock the path they read. Tokens
that are not locked can be evicted, the least recently used leaf token first. Tokens cached with a salt are
found only with that salt, so nobody else can tell from the time of an answer that they are cached. (This is
SGLang's RadixAttention, arXiv:2312.07104, with pages of one token as in LightLLM.)

A token may also have a slot in each window group, which `qrt.mem.window_cache` keeps.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np

from qrt.mem.nodes import Edge, Match, Node, path_of
from qrt.mem.slots import Ints
from qrt.mem.window_cache import WindowCache
from qrt.mem.windows import WindowSlots


class RadixCache:
    """Token ids -> slots. `evictable` and `locked` count the tokens it holds; `windows` has other slots."""

    def __init__(self, windows: Sequence[WindowSlots] = ()) -> None:
        self.evictable = self.locked = 0
        self.windows = WindowCache(windows)
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
        for node in path_of(end):
            if not node.ref:
                self.evictable -= len(node.key)
                self.locked += len(node.key)
            node.ref += 1
        return end

    def unlock(self, end: Node) -> None:
        """Undo one `lock` and mark the prefix as just used."""
        for node in path_of(end):
            node.ref -= 1
            assert node.ref >= 0, "prefix unlocked more often than locked"
            if not node.ref:
                self.locked -= len(node.key)
                self.evictable += len(node.key)
        self._touch(end)
        self._offer(end)

    def slots(self, end: Node) -> Ints:
        """Return a copy of the slots of the whole prefix that ends at `end`, int32 [its length]."""
        parts = [node.slots for node in path_of(end)]
        return np.concatenate(parts[::-1]) if parts else np.empty(0, np.int32)

    def insert(self, match: Match, ids: Ints, slots: Ints) -> Node:
        """Add `ids` [n], whose cached prefix is `match`, and return the node where they end.

        The tree becomes the owner of `slots[match.length:]`. The first `match.length` slots are duplicates
        and stay the caller's.
        """
        end = self._end(match)
        if match.length < len(ids):
            rest = slice(match.length, None)
            leaf = Node(
                ids[rest].copy(), slots[rest].copy(), self.windows.without(len(ids) - match.length), end
            )
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
        without = self.windows.without(len(ids))
        leaf = Node(ids.copy(), slots.copy(), without, end, edge, ref=1, last_use=end.last_use)
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
            self.windows.shorten(node, keep)
            need -= len(node.key) - keep
            self.evictable -= len(node.key) - keep
            if keep:
                node.key, node.slots = node.key[:keep], node.slots[:keep]
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
            self.windows.check(node)
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
        self.windows.split(node, upper)
        upper.ref, upper.last_use = node.ref, node.last_use
        parent.children[upper.edge] = upper
        node.key, node.slots, node.parent = node.key[within:].copy(), node.slots[within:].copy(), upper
        node.edge = int(node.key[0])
        upper.children[node.edge] = node
        return upper

    def _touch(self, end: Node) -> None:
        self._clock += 1
        for node in path_of(end):
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


def _common_prefix(a: Ints, b: Ints) -> int:
    """Return the length of the common prefix of two keys, which are not empty."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax())
    return first if differ[first] else n
