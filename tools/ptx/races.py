"""Shared memory that two warps use with nothing between them that orders it (Flanagan and Freund 2009,
doi:10.1145/1542476.1542490): found whatever turns the warps have taken."""

from __future__ import annotations

import numpy as np

from ptx.values import Fault, Lanes


class Races:
    """What each warp knows of the others, and of every byte who wrote it, who has read it and when.

    A warp's time goes on where it signals. Threads of a warp are taken as one. After the warps of a program
    come its copy engine, and the kernel before: 1 for who knows that it is done.
    """

    def __init__(self, programs: int, warps: int, shared_bytes: int) -> None:
        self._warps, count = warps, programs * shared_bytes
        self.knows = np.zeros((programs * warps, warps + 2), np.int32)  # by warp of the grid: others' times
        self._own = np.arange(programs * warps) % warps
        self.knows[np.arange(programs * warps), self._own] = 1
        self._engine_time = 0
        self._writer = np.zeros(count, np.int16)
        self._written = np.zeros(count, np.int32)  # 0: never
        self._read = np.zeros((count, warps), np.int32)

    def go_on(self, warp: int | np.ndarray) -> None:
        """What these do from here on is not what others know by now."""
        self.knows[warp, self._own[warp]] += 1

    def meet(self, warps: list[int], known: np.ndarray) -> None:
        """These learn what is known."""
        self.knows[warps] = np.maximum(self.knows[warps], known)

    def read(self, lanes: Lanes, place: np.ndarray) -> None:
        """place [lanes, bytes]."""
        warps = (lanes // 32)[:, None]
        self._check(place, self.knows[warps, self._writer[place]] < self._written[place], "read", "written")
        self._read[place, self._own[warps]] = self.knows[warps, self._own[warps]]

    def write(
        self, lanes: Lanes, place: np.ndarray, changes: np.ndarray, knew: np.ndarray | None = None
    ) -> None:
        """changes: where another value is there until now: others may write the same one. knew: what warps of
        the lanes knew when they asked for it, [lanes, warps + 2]."""
        warps = (lanes // 32)[:, None]
        knew = self.knows[lanes // 32] if knew is None else knew
        self._check_write(place, knew, changes)
        self._writer[place], self._written[place] = self._own[warps], self.knows[warps, self._own[warps]]

    def by_others(self, lanes: Lanes, place: np.ndarray) -> np.ndarray:
        """Where another warp was the last to write."""
        return self._writer[place] != self._own[lanes // 32][:, None]

    def copy(self, place: np.ndarray, knew: np.ndarray, known: np.ndarray) -> None:
        """The engine writes what a warp asked for that knew so much; who waits for it will know that."""
        self._check_write(place[None], knew[None], np.True_)
        self._engine_time += 1
        self._writer[place], self._written[place] = self._warps, self._engine_time
        np.maximum(known, knew, out=known)
        known[self._warps] = max(known[self._warps], self._engine_time)

    def _check_write(self, place: np.ndarray, knew: np.ndarray, changes: np.ndarray) -> None:
        writes = np.take_along_axis(knew, self._writer[place].astype(np.int64), 1) < self._written[place]
        self._check(place, writes & changes, "written", "written")
        reads = (self._read[place] > knew[:, None, : self._warps]).any(2)
        self._check(place, reads, "written", "read")

    def _check(self, place: np.ndarray, wrong: np.ndarray, now: str, before: str) -> None:
        if wrong.any():
            at = place[wrong][0]
            raise Fault(
                f"a byte of shared memory is {now} that another warp has {before}, and nothing lies between "
                f"(byte {at}, writer {self._writer[at]})"
            )
