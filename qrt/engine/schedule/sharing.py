"""Unpublished: running prompts that other requests may soon find in the prefix cache."""

from __future__ import annotations

import numpy as np

from qrt.engine.schedule.request import Request
from qrt.mem.slots import Ints

# A request waits for a running prefill if it can then share at least this many more tokens.
SHARED_TOKENS = 32


class Unpublished:
    """Running requests whose prompts are not yet whole in the prefix cache.

    They are looked up by how the prompts begin, so that thousands of requests are not compared one by one.
    """

    def __init__(self) -> None:
        self._requests: dict[tuple[str | None, bytes], list[Request]] = {}

    def add(self, request: Request) -> None:
        """Note a request that begins to compute its prompt."""
        if request.caches_prompt and request.prompt_len >= SHARED_TOKENS:
            self._requests.setdefault(_beginning(request.prompt, request), []).append(request)

    def remove(self, request: Request) -> None:
        """Forget a request that has ended or whose prompt is cached; do nothing if it is not listed."""
        key = _beginning(request.prompt, request)
        same = self._requests.get(key, [])
        if request in same:
            same.remove(request)
            if not same:
                del self._requests[key]

    def shares(self, request: Request, ids: Ints, cached: int) -> bool:
        """Return whether a running request computes tokens that `request` can share later.

        ids      tokens of `request`
        cached   how many of them are in the prefix cache now
        """
        size = cached + SHARED_TOKENS
        if len(ids) <= size:
            return False
        return any(
            np.array_equal(other.prompt[:size], ids[:size])
            for other in self._requests.get(_beginning(ids, request), ())
        )


def _beginning(ids: Ints, request: Request) -> tuple[str | None, bytes]:
    """Return the key that two requests must have in common to share anything."""
    return request.salt, ids[:SHARED_TOKENS].tobytes()
