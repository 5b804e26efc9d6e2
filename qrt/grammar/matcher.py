"""Matcher: which tokens may follow in one answer, and whether it is complete."""

from __future__ import annotations

import time

import llguidance
import numpy as np
from numpy.typing import NDArray

from qrt.grammar.vocabulary import Vocabulary

SLOW_S = 0.005  # CPU time of a slow step, a mask or an accept; 99 of 100 masks take less than 0.4 ms
MOST_SLOW_S = 2.0  # CPU time of all slow steps of an answer: then it is an error
MOST_FORCED = 2000  # bytes that are written as forced tokens at once: Python's lock is held meanwhile
_COMPLETE = ("NoExtension", "NoExtensionBias", "EndOfSentence")  # the library's reasons of a good end


class Root:
    """A compiled grammar, which matchers are copied from and share a lexer with.

    words      int32 that the library's masks have
    spoiled    whether a copy has met an error, which may lie in what they share
    """

    def __init__(self, parser: llguidance.LLMatcher, vocabulary: Vocabulary) -> None:
        self.parser, self.vocabulary = parser, vocabulary
        self.words = -(-vocabulary.library.vocab_size // 32)
        self.spoiled = False

    def matcher(self) -> Matcher:
        """Return a matcher at the beginning of an answer."""
        return Matcher(self, self.parser.deep_copy())


class Matcher:
    """The state of one answer in its grammar. One thread at a time uses it.

    parser     the library's state
    error      what went wrong, or None. The library allows only the end from then on, which would look like a
               finished answer; a matcher in error allows nothing, and its request must fail
    """

    def __init__(self, root: Root, parser: llguidance.LLMatcher) -> None:
        self._root, self.parser = root, parser
        self._slow = 0.0  # CPU time of slow steps
        self._past = 0  # ends that were accepted behind the end of the grammar; the library counts none
        self.error: str | None = None

    @property
    def width(self) -> int:
        """The number of logits."""
        return self._root.vocabulary.width

    @property
    def known(self) -> NDArray[np.int32]:
        """The mask of the ids that have a token, int32 [W]."""
        return self._root.vocabulary.known

    @property
    def fits(self) -> bool:
        """Whether the library's masks have as many words as there are logits for."""
        return self._root.words == self._root.vocabulary.words

    @property
    def failed(self) -> bool:
        """Whether something went wrong; `error` says what."""
        return self._failed()

    def accepts(self, token: int) -> bool:
        """Return whether the grammar allows a token next; it does not go on by it."""
        if self._failed() or not 0 <= token < self._root.vocabulary.width:
            return False
        if self.ended:
            return token in self._root.vocabulary.ends
        return self.parser.validate_tokens([token]) == 1

    def accept(self, token: int) -> bool:
        """Go on by a token; False where the grammar does not allow it, which is an error from then on.

        It holds Python's lock, for 1 to 4 us as a rule.
        """
        if self.error is None and self.ended:
            if token in self._root.vocabulary.ends:
                self._past += 1
                return True
            self.error = f"token {token} behind the end of the grammar"
        if self.error is None and not 0 <= token < self._root.vocabulary.width:
            self.error = f"token {token} outside the vocabulary"
        if self.error is None:
            start = time.thread_time()
            self.parser.consume_token(token)
            self._count(start)
        return not self._failed()

    def fill(self, row: NDArray[np.int32]) -> None:
        """Write which tokens may follow: bit i % 32 of row[i // 32] for token i. Python's lock is released.

        row [ceil(vocab_size / 32)], contiguous. Ends are allowed where the answer may end; behind the end of
        the grammar and without an error nothing else is. All bits are 0 in an error.
        """
        if row.dtype != np.int32 or row.shape != (self._root.vocabulary.words,) or not row.flags.c_contiguous:
            raise ValueError(
                f"row: expected int32 [{self._root.vocabulary.words}], got {row.dtype} {row.shape}"
            )
        if self.error is None:
            self._compute(row)
        if self._failed():
            row.fill(0)
        else:
            row &= self._root.vocabulary.known

    def _compute(self, row: NDArray[np.int32]) -> None:
        words = self._root.words
        whole = row if words == len(row) else np.empty(words, np.int32)
        start = time.thread_time()
        self.parser.unsafe_compute_mask_ptr(whole.ctypes.data, whole.nbytes)
        self._count(start)
        if whole is not row:  # the tokenizer has more ids than the model has logits
            row[:] = whole[: len(row)]

    def _count(self, start: float) -> None:
        """Count a step that began at `start` of this thread's CPU time, if it was slow."""
        spent = time.thread_time() - start
        self._slow += spent if spent > SLOW_S else 0.0
        if self._slow > MOST_SLOW_S:
            self.error = f"the grammar is too costly: its slow steps took over {MOST_SLOW_S:g} s"

    def _failed(self) -> bool:
        """Look for an error of the library; also for an end that only a limit made."""
        if self.error is None and self.parser.is_stopped():
            if self.parser.is_error():
                self.error = " ".join(self.parser.get_error().replace("<non-verbose/>", "").split())[:300]
            elif (reason := self.parser.stop_reason()) not in _COMPLETE:
                self.error = f"the grammar is too costly ({reason})"
        if self.error is not None:
            self._root.spoiled = True
        return self.error is not None

    @property
    def ended(self) -> bool:
        """Whether the answer is complete and nothing but an end may follow."""
        return self.parser.is_stopped() and not self._failed()

    @property
    def may_end(self) -> bool:
        """Whether the answer is complete as it is."""
        return not self._failed() and (self.parser.is_stopped() or self.parser.is_accepting())

    def forced(self) -> list[int]:
        """Return the tokens that must follow, as the tokenizer would write them; often none.

        Where over 2,000 bytes must follow there are none: masks allow their tokens one by one.
        """
        if self._failed() or self.ended or len(self.parser.compute_ff_bytes()) > MOST_FORCED:
            return []
        return self.parser.compute_ff_tokens()

    def copy(self) -> Matcher:
        """Return another matcher at the same place."""
        other = Matcher(self._root, self.parser.deep_copy())
        other._slow, other._past, other.error = self._slow, self._past, self.error
        return other

    def rollback(self, n: int) -> None:
        """Take back the last `n` tokens that were accepted."""
        past = min(n, self._past)
        self._past -= past
        if n > past:
            self.parser.rollback(n - past)
            self._failed()
