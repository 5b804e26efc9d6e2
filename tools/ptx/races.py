"""Find shared memory that two warps use with nothing between them that orders it.

The method finds a race whatever turns the warps have taken (Flanagan and Freund 2009,
doi:10.1145/1542476.1542490).
"""

from __future__ import annotations

import numpy as np

from ptx.values import Fault, Lanes


class Races:
    """Keep what each warp knows of the others, and who wrote and read every byte, and when.

    A warp's clock advances where it signals. The threads of a warp count as one. After the warps of a program
    come its copy engine and the kernel before; that clock is 1 for warps that know the kernel to be done.
    """

    def __init__(self, programs: int, warps: int, shared_bytes: int) -> None:
        self._warps, count = warps, programs * shared_bytes
        self.knows = np.zeros((programs * warps, warps + 2), np.int32)  # [warp of the grid, others' clocks]
        self._own = np.arange(programs * warps) % warps
        self.knows[np.arange(programs * warps), self._own] = 1
        self._engine_time = 0
        self._writer = np.zeros(count, np.int16)
        self._written = np.zeros(count, np.int32)  # 0: never
        self._read = np.zeros((count, warps), np.int32)

    def go_on(self, warp: int | np.ndarray) -> None:
        """Advance the clocks of these warps: what they do from here on is not known to others yet."""
        self.knows[warp, self._own[warp]] += 1

    def meet(self, warps: list[int], known: np.ndarray) -> None:
        """Let these warps learn what is `known`."""
        self.knows[warps] = np.maximum(self.knows[warps], known)

    def read(self, lanes: Lanes, place: np.ndarray) -> None:
        """Record that lanes read place [lanes, bytes]."""
        warps = (lanes // 32)[:, None]
        self._check(place, self.knows[warps, self._writer[place]] < self._written[place], "read", "written")
        self._read[place, self._own[warps]] = self.knows[warps, self._own[warps]]

    def write(
        self, lanes: Lanes, place: np.ndarray, changes: np.ndarray, knew: np.ndarray | None = None
    ) -> None:
        """Record that lanes write `place`.

        changes   where the value changes; elsewhere others may write the same one
        knew      what the lanes' warps knew when they asked for it, [lanes, warps + 2]
        """
        warps = (lanes // 32)[:, None]
        knew = self.knows[lanes // 32] if knew is None else knew
        self._check_write(place, knew, changes)
        self._writer[place], self._written[place] = self._own[warps], self.knows[warps, self._own[warps]]

    def by_others(self, lanes: Lanes, place: np.ndarray) -> np.ndarray:
        """Return where another warp was the last to write."""
        return self._writer[place] != self._own[lanes // 32][:, None]

    def copy(self, place: np.ndarray, knew: np.ndarray, known: np.ndarray) -> None:
        """Record that the copy engine writes for a warp that `knew` this.

        Who waits for the copy learns it by `known`.
        """
        self._check_write(place[None], knew[None], np.ones((1, len(place)), bool))
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
                f"a byte of shared memory is {now} that another warp has {before}, with nothing between "
                f"(byte {at}, writer {self._writer[at]})"
            )
