"""A request by itself: what it must not draw next."""

import random
from itertools import product

import numpy as np
import pytest

from qrt.engine.schedule.plan import Ban
from qrt.engine.schedule.request import Request
from qrt.request.sampling import SamplingParams


def request(words, output, pending=0):
    params = SamplingParams(bad_words=words)
    prompt = np.array([1], np.int32)
    return Request("a", prompt, params, None, frozenset(), 100, (0, 0), output=list(output), pending=pending)


def test_bad_words_ban_their_last_token_after_the_rest():
    """Against every token that may be pending, and every token that may come next."""
    rng = random.Random(0)
    for _ in range(300):
        words = [tuple(rng.choices(range(3), k=rng.randint(1, 4))) for _ in range(rng.randint(1, 5))]
        output = tuple(rng.choices(range(3), k=rng.randint(0, 6)))
        known, ahead = request(words, output).banned, request(words, output, pending=1).banned
        for pending, token in product(range(3), repeat=2):
            text = (*output, token)
            assert (Ban(token) in known) == any(text[-len(word) :] == word for word in words)
            text = (*output, pending, token)
            expected = any(text[-len(word) :] == word for word in words)
            assert (Ban(token) in ahead or Ban(token, pending) in ahead) == expected


@pytest.mark.parametrize("pending", [0, 1])
def test_bad_words_are_checked_without_reading_every_token(pending):
    """They are looked at for each token of each request."""
    walks = []

    class Word(tuple):
        def __iter__(self):
            walks.append(self)
            return super().__iter__()

    one = request([Word([5] * 1000), Word([6, 7])], [4] * 2000, pending)
    walks.clear()
    assert one.banned == (() if not pending else (Ban(7, after=6),)) and not walks
