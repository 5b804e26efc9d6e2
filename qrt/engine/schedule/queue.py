"""Queue: the waiting requests, in their order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from qrt.engine.schedule.limits import Limits
from qrt.engine.schedule.request import Request
from qrt.errors import QueueFullError

_order = attrgetter("order")


def insert(requests: list[Request], request: Request) -> None:
    """Insert a request into a sorted list."""
    insort(requests, request, key=_order)


def remove(requests: list[Request], request: Request) -> None:
    """Remove a request from a sorted list."""
    del requests[bisect_left(requests, request.order, key=_order)]


class Queue:
    """Requests that wait, new or paused.

    num_tokens   their tokens, prompts and outputs so far
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._requests: list[Request] = []
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def first(self) -> Request:
        """The request to run next."""
        return self._requests[0]

    @property
    def has_priorities(self) -> bool:
        """Whether the requests have different priorities."""
        return self._requests[0].order[0] != self._requests[-1].order[0]

    def check_room(self, num_tokens: int) -> None:
        """Raise QueueFullError when there is no room for one more request of `num_tokens` tokens."""
        requests, tokens = self._limits.max_num_queued_reqs, self._limits.max_num_queued_tokens
        if requests is not None and len(self._requests) >= requests:
            raise QueueFullError(
                f"the queue is full ({len(self._requests)} requests waiting); try again later"
            )
        if tokens is not None and self.num_tokens and self.num_tokens + num_tokens > tokens:
            raise QueueFullError(
                f"the queue is full ({self.num_tokens} tokens waiting, at most {tokens}); try again later"
            )

    def add(self, request: Request) -> None:
        """Add a new or paused request at the position that its order gives."""
        insert(self._requests, request)
        self.num_tokens += request.length

    def remove(self, request: Request) -> None:
        """Remove a request that ends, or that runs from now on."""
        remove(self._requests, request)
        self.num_tokens -= request.length
