"""KVManager: track who holds which slots. The scheduler uses no other class of `qrt.mem`.

Every slot is free, or owned by the prefix cache (evictable, or locked by running sequences), or private to
one running sequence. All work is on the host, and the caller orders it against the GPU. A later step may
write a slot as soon as it is released. So release a sequence only when no launched step still reads or writes
it, or when later steps run after that one on the same stream.

Layers with windows have slots of their own (`qrt.mem.windows`). A sequence gets them by `reach`, chunk by
chunk, which frees those that its window has passed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qrt.mem.nodes import Match, Node
from qrt.mem.prefix import RadixCache
from qrt.mem.slots import RUN, Ints, SlotAllocator
from qrt.mem.windows import NONE, Given, Held, WindowSlots, longest_prefix


class SequenceKV:
    """The slots of one running sequence, made by `KVManager.start`.

    length       number of slots
    num_cached   number of first tokens whose K/V the prefix cache holds (shared, read-only)
    salt         the salt of the cached prefixes that it shares
    windows      its slots in each window group
    """

    __slots__ = ("_buffer", "_node", "length", "num_cached", "salt", "windows")

    def __init__(
        self, shared: Ints, private: Ints, node: Node, salt: str | None, windows: Sequence[Held] = ()
    ) -> None:
        self.windows = windows
        self.num_cached = len(shared)
        self.salt = salt
        self._node = node
        self.length = len(shared) + len(private)
        self._buffer = np.empty(self.length + 64, np.int32)
        self._buffer[: len(shared)] = shared
        self._buffer[len(shared) : self.length] = private

    def __len__(self) -> int:
        return self.length

    @property
    def slots(self) -> Ints:
        """int32 [len]: the slot of each position, a view; valid until the next `extend` or `publish`."""
        return self._buffer[: self.length]

    @property
    def _tail(self) -> int:
        return self._buffer.item(self.length - 1)

    def _append(self, slots: Ints) -> None:
        length = self.length + len(slots)
        if length > len(self._buffer):
            grown = np.empty(length + length // 2, np.int32)
            grown[: self.length] = self.slots
            self._buffer = grown
        self._buffer[self.length : length] = slots
        self.length = length


@dataclass(frozen=True)
class KVStats:
    """Counts of slots (the first four add up to the pool), and of the prefix cache's use so far."""

    free_slots: int
    evictable_slots: int
    locked_slots: int
    private_slots: int
    hit_tokens: int  # prompt tokens found in the prefix cache
    query_tokens: int  # prompt tokens looked up
    usage: float  # share of the slots that running requests hold, of the group where it is highest


class KVManager:
    """Manages the slots and the prefix cache of a pool of `num_slots` tokens.

    A sequence is started with all its known tokens, extended as it grows, and released once. To pause one,
    release it with keep=True and start it again later with all its tokens. Tokens that have not been evicted
    in the meantime are not computed again. Without `prefix_caching` nothing is kept.

    windows   the slots of each window group
    """

    def __init__(
        self,
        num_slots: int,
        windows: Sequence[WindowSlots] = (),
        *,
        prefix_caching: bool = True,
        run: int = RUN,
    ) -> None:
        self.windows = windows
        self._slots = SlotAllocator(num_slots, run)
        self._cache = RadixCache(windows)
        self.prefix_caching = prefix_caching
        # evicting many slots takes as long as evicting one; up to `_max_gaps` free slots may lie in gaps
        self._evict_slots = run * max(1, min(64, num_slots // (64 * run)))
        self._max_gaps = num_slots // 16
        self._running: set[SequenceKV] = set()
        self._hit_tokens = self._query_tokens = 0

    @property
    def num_slots(self) -> int:
        """Size of the pool."""
        return self._slots.capacity

    @property
    def available(self) -> int:
        """Slots that can be taken now: free ones, and those of cached tokens that nobody reads."""
        return self._slots.num_free + self._cache.evictable

    @property
    def stats(self) -> KVStats:
        """A snapshot of the counts."""
        free, evictable, locked = self._slots.num_free, self._cache.evictable, self._cache.locked
        private = self.num_slots - free - evictable - locked
        usage = [(locked + private) / self.num_slots]
        usage += [1 - pool.available / pool.capacity for pool in self.windows]
        return KVStats(free, evictable, locked, private, self._hit_tokens, self._query_tokens, max(usage))

    def cached(self, ids: Ints, salt: str | None = None) -> int:
        """Return how many tokens of `ids` int32 [n] a new sequence would share; change nothing."""
        return self._usable(ids[:-1], salt).length if self.prefix_caching else 0

    def start(
        self, ids: Sequence[int] | Ints, *, reuse: bool = True, spare: int = 0, salt: str | None = None
    ) -> SequenceKV | None:
        """Start a sequence whose known tokens are `ids` [n]; an int32 array is not converted.

        It shares the longest cached prefix of `ids[:-1]` with the same `salt`, so at least one token is left
        to compute; with reuse=False all are. Returns None, without a change, when there is no room or fewer
        than `spare` slots would stay available; never when n + spare <= `available`.
        """
        ids = np.asarray(ids, np.int32)
        if not len(ids):
            raise ValueError("a sequence starts with at least one token")
        look_up = self.prefix_caching and reuse
        match = self._usable(ids[:-1] if look_up else ids[:0], salt)
        need = len(ids) - match.length
        if need > self.available - match.unlocked - spare:
            return None
        node = self._cache.lock(match)
        shared = self._cache.slots(node)
        tail = int(shared[-1]) if len(shared) else None
        windows = [self._held(node, match.length, group) for group in range(len(self.windows))]
        seq = SequenceKV(shared, self._alloc(need, tail), node, salt, windows)
        self._running.add(seq)
        if look_up:
            self._hit_tokens += match.length
            self._query_tokens += len(ids)
        return seq

    def extend(self, seq: SequenceKV, n: int = 1) -> Ints | None:
        """Add `n` slots to `seq` and return them, int32 [n]; None, without a change, if there is no room."""
        if n > self.available:
            return None
        slots = self._alloc(n, seq._tail)
        seq._append(slots)
        return slots

    def reach(self, seq: SequenceKV, start: int, end: int, spare: int = 0) -> tuple[int, list[Given]]:
        """Give `seq` slots in all window groups for the tokens of a step, the positions [start, end).

        First frees the slots that no token from `start` on attends. Returns how far there was room, at most
        `end`, with `spare` slots that stay available, and the new slots.
        """
        reached, given = end, []
        for group, (pool, held) in enumerate(zip(self.windows, seq.windows, strict=True)):
            passed = min(start - pool.kept, held.end) - held.first
            if passed > 0:
                pool.drop(held.slots[:passed])
                held.first, held.slots = held.first + passed, held.slots[passed:]
            at = held.end
            need = min(end - at, pool.available - spare)
            if need > 0:
                if need > pool.num_free:
                    self._cache.windows.evict(group, max(need - pool.num_free, pool.capacity // 64))
                slots = pool.take(need, held.slots.item(-1) if len(held.slots) else None)
                held.slots = np.concatenate([held.slots, slots])
                given.append(Given(1 + group, at, slots))
            reached = min(reached, held.end)
        return max(reached, start), given

    def publish(self, seq: SequenceKV, ids: Ints) -> Ints:
        """Share the first tokens of a running sequence, `ids` int32 [n], whose K/V have been written.

        They move to the prefix cache, locked by `seq`. Where another sequence has cached the same tokens,
        `seq` goes on with the cached slots and frees its own. These cached slots are returned, int32 [m]; the
        first is for position `num_cached`, before this call changes it. Does nothing without prefix caching,
        or when all of the tokens are cached already: then `seq` keeps its own slots.
        """
        taken = np.empty(0, np.int32)
        if not self.prefix_caching or len(ids) <= seq.num_cached:
            return taken
        if not self._publish(seq, ids):
            match = self._cache.match(ids, seq.salt)
            if match.length < len(ids):
                taken = self._share(seq, match)
                self._publish(seq, ids)
        if self.windows:
            self._cache.windows.fill(self._cache.match(ids, seq.salt), seq.windows)
        return taken

    def release(self, seq: SequenceKV, ids: Sequence[int] | Ints, keep: bool = True) -> None:
        """End or pause `seq`, whose first tokens `ids` [n <= len(seq)] have their K/V written.

        With `keep` these stay in the prefix cache; all other slots become free. Raises ValueError when `seq`
        is not running, or when `ids` are too many or differ from those it was started with.
        """
        if seq not in self._running:
            raise ValueError("release: the sequence is not running (released twice?)")
        ids = np.asarray(ids, np.int32)
        if len(ids) > len(seq):
            raise ValueError(f"release: {len(ids)} tokens written, but the sequence has {len(seq)} slots")
        unused = seq.slots[seq.num_cached :]
        if keep and self.prefix_caching:
            match = self._cache.match(ids, seq.salt)
            if match.length < min(seq.num_cached, len(ids)):
                raise ValueError("release: the tokens differ from the cached prefix the sequence reads")
            self._cache.insert(match, ids, seq.slots[: len(ids)])
            duplicates, unwritten = seq.slots[seq.num_cached : match.length], seq.slots[len(ids) :]
            if len(ids) > seq.num_cached:
                unused = np.concatenate([duplicates, unwritten])
            if self.windows:
                self._cache.windows.fill(self._cache.match(ids, seq.salt), seq.windows)
        for pool, held in zip(self.windows, seq.windows, strict=True):
            pool.drop(held.slots)
        self._slots.free(unused)
        self._cache.unlock(seq._node)
        self._running.remove(seq)

    def reset(self) -> None:
        """Drop the prefix cache, except for what running sequences read."""
        self._slots.free(self._cache.evict(self._cache.evictable))

    def check(self) -> None:
        """Assert that every slot has exactly one owner and every lock its holders. O(num_slots)."""
        self._slots.check()
        self._cache.check()
        owned = [node.slots for node in self._cache.nodes()]
        owned += [seq.slots[seq.num_cached :] for seq in self._running]
        every = np.concatenate([np.empty(0, np.int32), *owned])
        assert np.array_equal(np.sort(every), self._slots.in_use()), "a slot without or with two owners"
        locks: Counter[Node] = Counter()
        for seq in self._running:
            assert np.array_equal(self._cache.slots(seq._node), seq.slots[: seq.num_cached])
            node: Node | None = seq._node
            while node is not None:
                locks[node] += 1
                node = node.parent
        assert all(node.ref == locks[node] for node in self._cache.nodes())
        for group, pool in enumerate(self.windows):
            cached = [node.windows[group] for node in self._cache.nodes()]
            held = [seq.windows[group].slots for seq in self._running]
            pool.check(held, [slots[slots != NONE] for slots in cached])

    def _usable(self, ids: Ints, salt: str | None) -> Match:
        """Return the longest cached prefix of `ids` of which the next token finds all that it attends."""
        match = self._cache.match(ids, salt)
        if not match.length or not self.windows:
            return match
        found = [self._cache.windows.slots(match, group) for group in range(len(self.windows))]
        length = longest_prefix(found, [pool.window for pool in self.windows], match.length)
        return match if length == match.length else self._cache.match(ids[:length], salt)

    def _held(self, node: Node, length: int, group: int) -> Held:
        """Let a new sequence hold what its first token attends of a cached prefix of `length` tokens."""
        first = max(0, length - self.windows[group].window + 1)
        return Held(first, self._cache.windows.hold(node, length - first, group))

    def _publish(self, seq: SequenceKV, ids: Ints) -> bool:
        """Publish the tokens that `seq` does not share yet; return False if another sequence was first."""
        new = slice(seq.num_cached, len(ids))
        end = self._cache.extend(seq._node, ids[new], seq.slots[new], seq.salt)
        if end is not None:
            seq._node, seq.num_cached = end, len(ids)
        return end is not None

    def _share(self, seq: SequenceKV, match: Match) -> Ints:
        """Replace slots of `seq` by those of the cached prefix, free its own, and return the new ones."""
        old = seq._node
        seq._node = self._cache.lock(match)
        self._cache.unlock(old)
        new = slice(seq.num_cached, match.length)
        slots = self._cache.slots(seq._node)[new]
        self._slots.free(seq.slots[new])
        seq.slots[new] = slots
        seq.num_cached = match.length
        return slots

    def _alloc(self, n: int, tail: int | None = None) -> Ints:
        """Return `n` slots; the caller knows that they are available."""
        if n > self._slots.num_whole and self._cache.evictable:
            self._make_room(n)
        slots = self._slots.alloc(n, tail)
        assert slots is not None, "`available` counted slots that cannot be had"
        return slots

    def _make_room(self, n: int) -> None:
        """Evict until `n` slots are free in whole runs; or free anywhere, if gaps exceed `_max_gaps`.

        A full cache is the normal state of a busy server. If gaps were filled before anything is evicted,
        sequences would soon be scattered, and every extension would search. On a mixed load sequences then
        touched 3.6 times the runs they needed, against 1.003 this way, and `extend` took ten times as long.
        """
        num_gaps = self._slots.num_free - self._slots.num_whole
        short = n - (self._slots.num_free if num_gaps > self._max_gaps else self._slots.num_whole)
        if short > 0:
            self._slots.free(self._cache.evict(-(-short // self._evict_slots) * self._evict_slots))
