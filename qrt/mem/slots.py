"""SlotAllocator: track which slots of the pool are free. Integers only; the bytes are in `storage.py`.

A slot holds the K/V of one token. Slots are given out in aligned runs where possible, so that the tokens of a
sequence lie together in memory (wide loads, few DRAM rows). But any free slot can hold any token, so no
memory is lost to fragmentation.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
RUN = 16  # slots per run


class SlotAllocator:
    """Free slots of a pool [0, capacity), grouped in runs of `run` consecutive slots.

    A run is whole (all free), partial or full. Allocation prefers, in this order: the rest of the sequence's
    own last run, whole runs, then the gaps of partial runs.
    """

    def __init__(self, capacity: int, run: int = RUN) -> None:
        if capacity < 1 or run < 1:
            raise ValueError(f"slot pool: expected at least 1 of each, got capacity {capacity} and run {run}")
        num_runs = -(-capacity // run)
        self.capacity, self.run, self.num_free = capacity, run, capacity
        self._used = np.zeros(num_runs * run, np.bool_)
        self._used[capacity:] = True  # the missing end of the last run is never handed out
        self._rows = self._used.reshape(num_runs, run)
        self._free_in = (run - np.count_nonzero(self._rows, axis=1)).astype(np.int32)
        # one-slot extends read and write single elements, which is several times faster through a memoryview
        self._used_at, self._free_at = memoryview(self._used.data), memoryview(self._free_in.data)
        self._whole = _RunQueue(num_runs)  # exactly the whole runs
        self._partial = _RunQueue(num_runs)  # all partial runs, and some that have become whole or full since
        self._listed = np.zeros(num_runs, np.bool_)  # which runs are in `_partial`
        self._marks = np.zeros(num_runs, np.bool_)  # scratch of `_distinct`, all False between calls
        is_whole = self._free_in == run
        self._whole.push(np.flatnonzero(is_whole))
        self._list(np.flatnonzero(~is_whole))

    def alloc(self, n: int, tail: int | None = None) -> Ints | None:
        """Return `n` slots, int32 [n]; None, without a change, when fewer are free.

        `tail` is the sequence's last slot; the rest of its run is used first.
        """
        if n > self.num_free:
            return None
        out = np.empty(n, np.int32)
        done = 0 if tail is None else self._fill_from_tail(out, tail)
        if done < n:
            done += self._fill_from_whole(out[done:])
        if done < n:
            self._fill_from_partial(out[done:])
        self.num_free -= n
        return out

    @property
    def num_whole(self) -> int:
        """Free slots that lie in whole runs."""
        return self._whole.size * self.run

    def free(self, slots: Ints) -> None:
        """Give back `slots` int [n]; ValueError, without a change, if one is not in use or comes twice."""
        if not len(slots):
            return
        if slots.min() < 0 or slots.max() >= self.capacity:
            raise ValueError(
                f"free: expected slots of 0 to {self.capacity - 1}, got {slots.min()} to {slots.max()}"
            )
        if not self._used[slots].all():
            raise ValueError(f"free: slot {slots[~self._used[slots]][0]} is not in use")
        rows = self._distinct(slots // self.run)
        self._used[slots] = False
        before = self._free_in[rows]
        after = self.run - np.count_nonzero(self._rows[rows], axis=1)
        if (after - before).sum() != len(slots):
            self._used[slots] = True
            raise ValueError(f"free: expected each slot once, got some of the {len(slots)} twice")
        self._free_in[rows] = after
        self.num_free += len(slots)
        is_whole = after == self.run
        self._whole.push(rows[is_whole])
        self._list(rows[~is_whole])

    def in_use(self) -> Ints:
        """All slots that are not free, ascending."""
        return np.flatnonzero(self._used[: self.capacity]).astype(np.int32)

    def check(self) -> None:
        """Assert that the counts and lists agree with the map of used slots. O(capacity)."""
        free_in = self.run - np.count_nonzero(self._rows, axis=1)
        assert (free_in == self._free_in).all()
        assert self.num_free == free_in.sum() and self._used[self.capacity :].all()
        whole, partial = self._whole.peek(self._whole.size), self._partial.peek(self._partial.size)
        assert np.array_equal(np.sort(whole), np.flatnonzero(free_in == self.run))
        assert np.array_equal(np.sort(partial), np.flatnonzero(self._listed))
        assert self._listed[(free_in > 0) & (free_in < self.run)].all()

    def _fill_from_tail(self, out: Ints, tail: int) -> int:
        """Fill `out` with the free slots that directly follow `tail` in its run; return how many."""
        first = tail + 1
        room = min(len(out), -first % self.run)
        used, done = self._used_at, 0
        while done < room and not used[first + done]:
            used[first + done] = True
            out[done] = first + done
            done += 1
        self._free_at[tail // self.run] -= done
        return done

    def _fill_from_whole(self, out: Ints) -> int:
        """Fill `out` from whole runs; the rest of the last run stays free for its sequence to grow into."""
        if len(out) <= self.run and self._whole.size:  # the usual case; several times faster on its own
            row = self._whole.pop_one()
            first, done = row * self.run, len(out)
            out[:] = range(first, first + done)
            self._used[first : first + done] = True
            self._free_at[row] = self.run - done
            if done < self.run and not self._listed[row]:
                self._listed[row] = True
                self._partial.push_one(row)
            return done
        rows = self._whole.pop(min(self._whole.size, -(-len(out) // self.run)))
        if not len(rows):
            return 0
        done = min(len(out), len(rows) * self.run)
        out[:done] = (rows[:, None] * self.run + np.arange(self.run, dtype=np.int32)).reshape(-1)[:done]
        self._rows[rows] = True
        self._free_in[rows] = 0
        if rest := len(rows) * self.run - done:
            self._used[out[done - 1] + 1 :][:rest] = False
            self._keep_rest(rows[-1:], rest)
        return done

    def _fill_from_partial(self, out: Ints) -> None:
        """Fill all of `out` from the gaps of partial runs; `alloc` has made sure that they are enough."""
        done = 0
        while done < len(out):
            need = len(out) - done
            rows = self._partial.peek(need)  # each has a gap, unless it has filled up
            gaps = np.where(self._free_in[rows] < self.run, self._free_in[rows], 0)
            total = np.cumsum(gaps)
            rows = self._partial.pop(min(len(rows), int(np.searchsorted(total, need)) + 1))
            self._listed[rows] = False
            rows = rows[gaps[: len(rows)] > 0]
            if not len(rows):
                continue
            row, column = np.nonzero(~self._rows[rows])
            slots = (rows[row] * self.run + column)[:need]
            out[done : done + len(slots)] = slots
            done += len(slots)
            self._used[slots] = True
            self._free_in[rows] = 0
            if rest := len(row) - len(slots):
                self._keep_rest(rows[-1:], rest)

    def _keep_rest(self, row: Ints, num_free: int) -> None:
        """Note that `num_free` slots of `row` [1] were not needed."""
        self._free_in[row] = num_free
        self._list(row)

    def _distinct(self, rows: NDArray[np.integer]) -> NDArray[np.integer]:
        """Return `rows` ascending and without repetition; scanning marks is faster than sorting 32k rows."""
        self._marks[rows] = True
        rows = np.flatnonzero(self._marks)
        self._marks[rows] = False
        return rows

    def _list(self, rows: NDArray[np.integer]) -> None:
        """Add `rows` to the partial runs."""
        rows = rows[~self._listed[rows]]
        self._listed[rows] = True
        self._partial.push(rows)


class _RunQueue:
    """A first-in first-out queue in one array; it holds a run at most once, so `capacity` is enough."""

    def __init__(self, capacity: int) -> None:
        self._runs = np.empty(capacity, np.int32)
        self._head = 0
        self.size = 0

    def push(self, runs: NDArray[np.integer]) -> None:
        """Append `runs`."""
        if len(runs):
            self._runs[self._places(self.size, len(runs))] = runs
            self.size += len(runs)

    def peek(self, n: int) -> Ints:
        """Return the next `n` runs, or as many as there are."""
        return self._runs[self._places(0, min(n, self.size))]

    def pop(self, n: int) -> Ints:
        """Remove and return the next `n` runs, or as many as there are."""
        runs = self.peek(n)
        self._head = (self._head + len(runs)) % len(self._runs)
        self.size -= len(runs)
        return runs

    def push_one(self, run: int) -> None:
        """Append a run."""
        self._runs[(self._head + self.size) % len(self._runs)] = run
        self.size += 1

    def pop_one(self) -> int:
        """Remove and return the next run; there must be one."""
        run = self._runs.item(self._head)
        self._head = (self._head + 1) % len(self._runs)
        self.size -= 1
        return run

    def _places(self, start: int, n: int) -> NDArray[np.integer]:
        return (np.arange(start, start + n) + self._head) % len(self._runs)
