"""Batch: the matchers of many answers go on at once, in threads of the library without Python's lock."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import llguidance
import numpy as np
from numpy.typing import NDArray

from qrt.grammar.matcher import Matcher


class MatcherThreads:
    """Some threads of the library; they start with the first call. One thread at a time may call it."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    @cached_property
    def _executor(self) -> llguidance.LLExecutor:
        return llguidance.LLExecutor(self._threads)

    def accept(self, matchers: Sequence[Matcher], tokens: Sequence[int]) -> None:
        """Let each matcher go on by its token, as `Matcher.accept` does; look at their errors then."""
        together = []
        for matcher, token in zip(matchers, tokens, strict=True):
            if matcher.ended or not 0 <= token < matcher.width:
                matcher.accept(token)
            else:
                together.append((matcher.parser, token))
        if together:
            self._executor.consume_token_par(together)

    def fill(self, matchers: Sequence[Matcher], rows: NDArray[np.int32]) -> None:
        """Write what may follow in each answer into rows int32 [n, W], as `Matcher.fill` does.

        The matchers are those of one vocabulary, and `fits` is true of them. Look at their errors then.
        """
        parsers = [(matcher.parser, index) for index, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(parsers, rows.ctypes.data, rows.strides[0], len(parsers))
        known = matchers[0].known
        gaps = np.flatnonzero(known != -1)
        if len(gaps):  # few words, at the end as a rule
            some = slice(gaps[0], gaps[-1] + 1)
            rows[: len(parsers), some] &= known[some]
