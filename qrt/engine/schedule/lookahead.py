"""Lookahead: give requests slots before their tokens need them, and collect these for the request table."""

from __future__ import annotations

from collections.abc import Sequence

from qrt.engine.schedule.plan import Chunk, Decode, Placement
from qrt.engine.schedule.request import ALL, Request
from qrt.mem.manager import KVManager
from qrt.mem.slots import Ints

GROW_TOKENS = 16  # slots given to a decoding request at a time, while there is room
GROWN_AT_ONCE = 64  # most requests given slots early in one step, since each costs the host some time


def lacking_slots(decoding: Sequence[Request], ahead: int = 0) -> list[Request]:
    """Return the decoding requests that lack slots for their tokens and `ahead` more."""
    return [request for request in decoding if request.covered < request.length + ahead]


class Lookahead:
    """Gives slots to running requests, and keeps them until a plan tells the request table."""

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._placed: dict[int, list[Placement]] = {}  # by row of the request table

    def start(self, request: Request) -> None:
        """Note that a request got its row, and slots for its tokens; drop older slots of that row."""
        assert request.seq is not None
        row, seq = request.row, request.seq
        self._placed[row] = [Placement(row, 0, seq.slots.copy())]
        self._placed[row] += [
            Placement(row, held.first, held.slots, group)
            for group, held in enumerate(seq.windows, 1)
            if len(held.slots)
        ]
        self._note(request, len(seq))

    def reach(self, request: Request, start: int, end: int, decoding: int = 0) -> int:
        """Give a request slots in window groups for the positions [start, end) of a step.

        Returns how far there was room, at most `end`, beside the next slots of `decoding` other requests.
        """
        if not self._kv.windows:
            return end
        assert request.seq is not None
        reached, given = self._kv.reach(request.seq, start, end, GROW_TOKENS * decoding)
        for new in given:
            placement = Placement(request.row, new.start, new.slots, new.group)
            self._placed.setdefault(request.row, []).append(placement)
        return reached

    def publish(self, request: Request, ids: Ints) -> None:
        """Share the first tokens of a request with others.

        Where another request has published the same tokens first, this one goes on with its slots.
        """
        assert request.seq is not None
        start = request.seq.num_cached
        slots = self._kv.publish(request.seq, ids)
        if len(slots):
            self._placed.setdefault(request.row, []).append(Placement(request.row, start, slots))

    def taken(self, works: Sequence[Decode | Chunk]) -> tuple[Placement, ...]:
        """Return the new slots of the rows in `works`, once.

        Slots of other rows wait for a plan with these rows. So if a step fails, surviving requests have not
        missed any.
        """
        if not self._placed:
            return ()
        rows = {work.row for work in works}
        told = [row for row in self._placed if row in rows]
        return tuple(placement for row in told for placement in self._placed.pop(row))

    def give(self, request: Request) -> bool:
        """Give slots to a request that lacks some; return False when there is no room."""
        return self._extend(request, GROW_TOKENS) or self._extend(request, 1)

    def give_ahead(self, decoding: Sequence[Request]) -> None:
        """Give slots to all requests that need some soon, as soon as one of them needs them very soon.

        Requests then get their slots in the same step, and most steps send the device nothing.
        """
        few = GROW_TOKENS // 4
        soon = lacking_slots(decoding, GROW_TOKENS - few)
        if lacking_slots(soon, few):
            soon.sort(key=lambda request: request.covered - request.length)
            for request in soon[:GROWN_AT_ONCE]:
                self._extend(request, GROW_TOKENS)

    def _extend(self, request: Request, tokens: int) -> bool:
        """Give slots for `tokens` tokens, from the last known one on; return False when there is no room."""
        assert request.seq is not None
        start = len(request.seq)
        end = min(request.length - 1 + tokens, request.max_len)
        if self.reach(request, request.num_computed, end) < end:
            return False
        slots = self._kv.extend(request.seq, end - start)
        if slots is None:
            return False
        self._note(request, end)
        self._placed.setdefault(request.row, []).append(Placement(request.row, start, slots))
        return True

    @staticmethod
    def _note(request: Request, slots: int) -> None:
        """Note that a request has `slots` slots."""
        request.covered = slots if slots < request.max_len else ALL
