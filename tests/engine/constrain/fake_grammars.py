"""Grammars over the fake decoder's tokens: what may follow is a hash of what came, so any slip shows."""

from __future__ import annotations

import random
from concurrent.futures import Future

import numpy as np
from fake_decoder import EOS, VOCAB


def rule(text: str, answer: list[int]) -> tuple[set[int], bool]:
    """The tokens that a grammar allows behind a part of an answer, and whether it may end there.

    `text` is "key:length"; four in ten places allow one token, and at `length` the answer is whole.
    """
    key, length = map(int, text.split(":"))
    rng = random.Random(hash((key, *answer)))
    others = [token for token in range(VOCAB) if token != EOS]
    if len(answer) >= length:
        return set(), True
    if rng.random() < 0.4:
        return {rng.choice(others)}, False
    return set(rng.sample(others, 6)), rng.random() < 0.1


class FakeMatcher:
    """A matcher by `rule`; see qrt.grammar.matcher."""

    def __init__(self, text: str) -> None:
        self.text, self.answer, self.error = text, [], None
        self.fits = True

    @property
    def failed(self) -> bool:
        return self.error is not None

    def accepts(self, token: int) -> bool:
        allowed, may_end = rule(self.text, self.answer)
        return token in allowed or (token == EOS and may_end)

    def accept(self, token: int) -> bool:
        if not self.accepts(token):
            self.error = f"token {token} is not allowed"
            return False
        self.answer.append(token)
        return True

    def fill(self, row: np.ndarray) -> None:
        row[:] = 0
        allowed, may_end = rule(self.text, self.answer)
        for token in allowed | ({EOS} if may_end else set()):
            row[token // 32] |= np.uint32(1 << token % 32).view(np.int32)

    @property
    def ended(self) -> bool:
        return self.answer[-1:] == [EOS] or not rule(self.text, self.answer)[0]

    @property
    def may_end(self) -> bool:
        return rule(self.text, self.answer)[1]

    def forced(self) -> list[int]:
        found = []
        while True:
            allowed, may_end = rule(self.text, self.answer + found)
            if may_end or len(allowed) != 1:
                return found
            found += allowed

    def rollback(self, n: int) -> None:
        del self.answer[len(self.answer) - n :]


class FakeBatch:
    """Takes the matchers one by one."""

    def accept(self, matchers, tokens) -> None:
        for matcher, token in zip(matchers, tokens, strict=True):
            matcher.accept(token)

    def fill(self, matchers, rows) -> None:
        for matcher, row in zip(matchers, rows, strict=False):
            matcher.fill(row)


class FakeGrammars:
    """Compiles regexes `key:length`; a key of 13 is refused."""

    def get(self, grammar) -> Future:
        future = Future()
        if grammar.text.startswith("13:"):
            future.set_exception(ValueError("structured_outputs.regex: unlucky"))
        else:
            future.set_result(FakeMatcher(grammar.text))
        return future
