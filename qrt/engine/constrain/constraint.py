"""Constraint: which tokens one request may sample next, by its thinking and its grammar."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from qrt.engine.schedule.plan import Verdict
from qrt.engine.schedule.request import ALL
from qrt.grammar.matcher import Matcher
from qrt.request.thinking import Thinking

Row = NDArray[np.int32]


GOES_ON = Verdict()


class Phase(Enum):
    """Where an answer is."""

    START = "start"  # the model may begin to think
    THINKING = "thinking"
    CLOSING = "closing"  # the budget is spent: the closing tokens follow
    ANSWER = "answer"


@dataclass(frozen=True)
class Rules:
    """The rules of a request beside its grammar, as masks see them.

    ends         tokens that end the text: EOS and stop tokens
    stops        whether some of them are no EOS
    min_tokens   outputs before which none of `ends` is sampled
    allowed      the only tokens that may be sampled; None: all
    appends      whether known tokens are appended at once; else each is drawn by a mask that allows it alone,
                 so that it gets a log-probability and counts for penalties
    bad_words    lists of tokens of which none is sampled to its end
    """

    ends: Collection[int] = ()
    stops: bool = False
    min_tokens: int = 0
    allowed: Collection[int] | None = None
    appends: bool = True
    bad_words: Sequence[Sequence[int]] = ()


class Constraint:
    """Follows the tokens of one request. One thread at a time may call it.

    error   why the request cannot go on: its shape and rules leave it no answer
    """

    def __init__(
        self, width: int, rules: Rules, thinking: Thinking | None = None, matcher: Matcher | None = None
    ) -> None:
        """Start before the first token; masks have `width` words of 32 tokens."""
        self._rules = rules
        self._marks = thinking
        self._matcher = matcher
        self._ends = bits_of(rules.ends, width)
        self._allowed = None if rules.allowed is None else bits_of(rules.allowed, width)
        self._phase, self._seen = Phase.ANSWER, 0  # tokens of `start`, of thinking or of `closing`
        self._tail: tuple[int, ...] = ()  # the last tokens of thinking
        self._drafted = 0  # tokens of `start` that the grammar has taken too
        self._count = 0  # output tokens
        longest = max(map(len, rules.bad_words), default=1)
        self._last: deque[int] = deque(maxlen=longest - 1)  # output tokens, as far as bad words reach
        self.error: str | None = None
        if thinking is not None and (thinking.inside or thinking.start):
            self._phase = Phase.THINKING if thinking.inside else Phase.START
            self._close()

    def needs_mask(self, pending: int) -> bool:
        """Return whether the next draw may need a mask, after `pending` tokens that are not known yet."""
        if self._matcher is not None:
            return True
        if self._phase in (Phase.ANSWER, Phase.CLOSING):
            return self._phase is Phase.CLOSING
        thinking = self._marks
        assert thinking is not None
        if thinking.budget is None:
            return False
        begins = len(thinking.start) - self._seen if self._phase is Phase.START else -self._seen
        return pending - begins >= thinking.budget

    def reads(self, token: int) -> Matcher | None:
        """Return the matcher that `take` would let go on by a token, for `Batch.accept`; None: no such."""
        answers = self._phase is Phase.ANSWER and self.error is None and token not in self._rules.ends
        return self._matcher if answers else None

    @property
    def asks(self) -> bool:
        """Whether the next mask depends on the grammar, which may be slow."""
        return self._matcher is not None and self._phase in (Phase.START, Phase.ANSWER)

    @property
    def plain(self) -> Matcher | None:
        """The matcher, if its mask alone says what may be sampled next, for `Batch.fill`; else None."""
        matcher = self._matcher
        if matcher is None or self._phase is not Phase.ANSWER or not matcher.fits:
            return None
        others = self._allowed is not None or self._rules.bad_words or self._more_ends(matcher)
        return None if others else matcher

    def _more_ends(self, matcher: Matcher) -> bool:
        """Return whether rules about the end change the grammar's mask."""
        return self._count < self._rules.min_tokens or (self._rules.stops and matcher.may_end)

    def take(self, token: int, least: int = 2, *, accepted: bool = False) -> Verdict:
        """Follow a sampled token, which a batch may have `accepted`; return what it means for the request.

        Known tokens are appended where there are `least` of them; fewer are drawn, by masks that leave one.
        """
        if accepted:
            assert self._matcher is not None
            self._note(token)
            self.error = own_error(self._matcher.error) if self._matcher.failed else None
        else:
            self._step(token)
        then: list[int] = []
        appends = self._rules.appends and least < ALL
        while self.error is None and appends and len(known := self._known()) >= least:
            for known_token in known:
                self._step(known_token)
            then += known
        if self.error is not None:
            return Verdict(error=self.error)
        ends = self._phase is Phase.ANSWER and self._matcher is not None and self._matcher.ended
        return Verdict(ends, tuple(then)) if ends or then else GOES_ON

    def _known(self) -> Sequence[int]:
        """Return tokens that must follow."""
        if self._phase is Phase.CLOSING:
            assert self._marks is not None
            return self._marks.closing[self._seen :]
        if self._phase is not Phase.ANSWER or self._matcher is None or self._matcher.ended:
            return ()
        return self._matcher.forced()

    def _note(self, token: int) -> None:
        self._count += 1
        self._last.append(token)

    def _step(self, token: int) -> None:
        self._note(token)
        match self._phase:
            case _ if self.error is not None:
                pass
            case Phase.START:
                self._start(token)
            case Phase.THINKING:
                self._think(token)
            case Phase.CLOSING:
                assert self._marks is not None
                self._seen += 1
                if self._seen == len(self._marks.closing):
                    self._phase = Phase.ANSWER
            case Phase.ANSWER:
                self._answer(token)
        self._close()

    def _close(self) -> None:
        """Begin the closing tokens if the model has thought as long as it may."""
        budget = None if self._marks is None else self._marks.budget
        if self._phase is Phase.THINKING and budget is not None and self._seen >= budget:
            self._phase, self._seen = Phase.CLOSING, 0

    def _start(self, token: int) -> None:
        marks, matcher = self._marks, self._matcher
        assert marks is not None
        drafts = matcher is not None and self._drafted == self._seen and _took(matcher, token)
        self._drafted += drafts
        if token == marks.start[self._seen]:
            self._seen += 1
            if self._seen == len(marks.start):
                self._phase, self._seen = Phase.THINKING, 0
                if matcher is not None and self._drafted:
                    matcher.rollback(self._drafted)
        elif matcher is None or drafts:
            self._phase = Phase.ANSWER
        else:
            self.error = own_error(f"token {token} begins neither thinking nor an answer in it")

    def _think(self, token: int) -> None:
        assert self._marks is not None
        end = self._marks.end
        self._seen += 1
        self._tail = (*self._tail, token)[-len(end) :]
        if self._tail == end:
            self._phase = Phase.ANSWER

    def _answer(self, token: int) -> None:
        matcher = self._matcher
        if matcher is None or token in self._rules.ends:
            return  # the scheduler ends it
        if not matcher.accept(token):
            self.error = own_error(matcher.error or f"token {token} is not in it")

    def fill(self, row: Row) -> None:
        """Write the tokens that may be sampled next into row int32 [W], a bit each; or set `error`."""
        if self._phase is Phase.THINKING:
            row[:] = -1
            if self._matcher is not None:
                row &= ~self._ends  # an answer follows
        elif self._phase is Phase.CLOSING:
            assert self._marks is not None
            row[:] = bits_of((self._marks.closing[self._seen],), len(row))
        elif self._matcher is None:
            row[:] = -1
        else:
            self._fill_answer(row, self._matcher)
        if self._phase is Phase.START:
            assert self._marks is not None
            row |= bits_of((self._marks.start[self._seen],), len(row))
        if self._rules.bad_words:
            row &= ~bits_of(self._banned(), len(row))
        if self.error is None and not row.any():
            self.error = (
                "structured_outputs: expected a shape that the request's other rules allow, got one that "
                f"leaves no token as output {self._count + 1}; change bad_words, allowed_token_ids, "
                "min_tokens or the shape"
            )

    def _banned(self) -> Collection[int]:
        """Return the last tokens of the bad words whose other tokens stand at the end of the output."""
        last = tuple(self._last)
        return {
            word[-1] for word in self._rules.bad_words if last[len(last) - len(word) + 1 :] == (*word[:-1],)
        }

    def _fill_answer(self, row: Row, matcher: Matcher) -> None:
        """Write what the grammar and the other rules allow."""
        if self._phase is Phase.START and self._drafted < self._seen:
            row[:] = 0  # only the rest of `start` may follow
            return
        matcher.fill(row)
        if matcher.error is not None:
            self.error = own_error(matcher.error)
            return
        if matcher.may_end:
            row |= self._ends
        if self._count < self._rules.min_tokens:
            row &= ~self._ends
        if self._allowed is not None:
            row &= self._allowed


def bits_of(tokens: Collection[int], width: int) -> Row:
    """Return int32 [width] with the bits of these tokens set."""
    row = np.zeros(width, np.uint32)
    for token in tokens:
        row[token // 32] |= np.uint32(1 << token % 32)
    return row.view(np.int32)


def own_error(reason: str | None) -> str:
    """Say that a request's shape cannot be kept."""
    return (
        f"structured_outputs: expected a shape that the answer can keep, got an error: {reason}; simplify it"
    )


def _took(matcher: Matcher, token: int) -> bool:
    """Let a grammar take a token if it may; return whether it did."""
    return matcher.accepts(token) and matcher.accept(token)
