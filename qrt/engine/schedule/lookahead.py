"""Lookahead: give slots ahead of the tokens that need them, and note what the request table is told."""

from __future__ import annotations

from collections.abc import Sequence

from qrt.engine.schedule.plan import Chunk, Decode, Placement
from qrt.engine.schedule.request import ALL, Request
from qrt.mem.manager import KVManager
from qrt.mem.slots import Ints

GROW_TOKENS = 16  # that a decoding request is given slots for at a time while there is room
GROWN_AT_ONCE = 64  # requests that are given some before they must have them: each costs the host some time


def lacking_slots(decoding: Sequence[Request], ahead: int = 0) -> list[Request]:
    """Those of requests that decode which lack slots for their tokens and `ahead` more."""
    return [request for request in decoding if request.covered < request.length + ahead]


class Lookahead:
    """Gives slots to running requests, and keeps for the next plan what it gave."""

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._placed: dict[int, list[Placement]] = {}  # by row of the request table

    def start(self, request: Request) -> None:
        """A request has got a row, and slots for the tokens it has; what was to be told of the row before is
        not."""
        assert request.seq is not None
        self._placed[request.row] = [Placement(request.row, 0, request.seq.slots.copy())]
        self._note(request, len(request.seq))

    def publish(self, request: Request, ids: Ints) -> None:
        """Share the first tokens of a request, which goes on with slots of another's where they are the
        same."""
        assert request.seq is not None
        start = request.seq.num_cached
        slots = self._kv.publish(request.seq, ids)
        if len(slots):
            self._placed.setdefault(request.row, []).append(Placement(request.row, start, slots))

    def taken(self, works: Sequence[Decode | Chunk]) -> tuple[Placement, ...]:
        """What the next plan, of `works`, tells the request table of their rows; it is told once. If the
        step fails, requests that go on have not missed it."""
        if not self._placed:
            return ()
        rows = {work.row for work in works}
        told = [row for row in self._placed if row in rows]
        return tuple(placement for row in told for placement in self._placed.pop(row))

    def give(self, request: Request) -> bool:
        """Slots for a request that lacks some; False when there is room for none."""
        return self._extend(request, GROW_TOKENS) or self._extend(request, 1)

    def give_ahead(self, decoding: Sequence[Request]) -> None:
        """When some want slots soon, all others get theirs in the same step, if they are not too many: most
        steps then send the device nothing."""
        few = GROW_TOKENS // 4
        soon = lacking_slots(decoding, GROW_TOKENS - few)
        if lacking_slots(soon, few):
            soon.sort(key=lambda request: request.covered - request.length)
            for request in soon[:GROWN_AT_ONCE]:
                self._extend(request, GROW_TOKENS)

    def _extend(self, request: Request, tokens: int) -> bool:
        """Slots for so many tokens from the last known one on; False when there is no room for them."""
        assert request.seq is not None
        start = len(request.seq)
        end = min(request.length - 1 + tokens, request.max_len)
        slots = self._kv.extend(request.seq, end - start)
        if slots is None:
            return False
        self._note(request, end)
        self._placed.setdefault(request.row, []).append(Placement(request.row, start, slots))
        return True

    @staticmethod
    def _note(request: Request, slots: int) -> None:
        """A request has so many slots."""
        request.covered = slots if slots < request.max_len else ALL
