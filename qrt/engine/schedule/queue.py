"""Queue: the requests that wait, in their order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from qrt.engine.schedule.limits import Limits
from qrt.engine.schedule.request import Request
from qrt.errors import QueueFullError

_order = attrgetter("order")


def insert(requests: list[Request], request: Request) -> None:
    """Put a request into a list in the order of the requests."""
    insort(requests, request, key=_order)


def remove(requests: list[Request], request: Request) -> None:
    """Take a request out of a list in the order of the requests."""
    del requests[bisect_left(requests, request.order, key=_order)]


class Queue:
    """Requests that do not run, new or paused.

    num_tokens   tokens that wait, of prompts and of outputs so far
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
        """The one to run next."""
        return self._requests[0]

    @property
    def has_priorities(self) -> bool:
        """Whether some come before others whenever they arrive."""
        return self._requests[0].order[0] != self._requests[-1].order[0]

    def check_room(self, num_tokens: int) -> None:
        """Raise QueueFullError when as many requests, or tokens with `num_tokens` more, wait as may."""
        requests, tokens = self._limits.max_num_queued_reqs, self._limits.max_num_queued_tokens
        if requests is not None and len(self._requests) >= requests:
            raise QueueFullError(
                f"{len(self._requests)} requests wait already, the most that may; try again later"
            )
        if tokens is not None and self.num_tokens and self.num_tokens + num_tokens > tokens:
            raise QueueFullError(
                f"{self.num_tokens} tokens wait already, and {tokens} are the most that may; try again later"
            )

    def add(self, request: Request) -> None:
        """Let a request wait, new ones and paused ones alike: the order knows who comes first."""
        insert(self._requests, request)
        self.num_tokens += request.length

    def remove(self, request: Request) -> None:
        """Forget a request that waits, or that runs from now on."""
        remove(self._requests, request)
        self.num_tokens -= request.length
