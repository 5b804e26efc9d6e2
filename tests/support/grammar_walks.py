"""Grammars over a vocabulary, walked by tokens: the tiny model's, or a given one."""

from functools import cache

import numpy as np

from qrt.grammar.compiled import Grammars
from qrt.grammar.vocabulary import Vocabulary
from qrt.text.tokenizer import Tokenizer

TINY = Tokenizer("tiny")
WIDTH = 4096


@cache
def vocabulary():
    return Vocabulary.of(TINY, WIDTH, TINY.eos_token_ids)


@cache
def grammars():
    return Grammars(vocabulary())


def matcher_of(grammar):
    return grammars().get(grammar).result()


def allowed(matcher):
    """The ids that a matcher allows next."""
    row = np.full(vocabulary().words, -1, np.int32)
    matcher.fill(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def walked(matcher, rng, most):
    """Walk a matcher over at most `most` allowed tokens; return them, or None in an error."""
    tokens = []
    while len(tokens) < most and not matcher.ended:
        ids = allowed(matcher)
        if matcher.error:
            assert not ids
            return None
        assert ids, "neither an end nor a token is allowed"
        token = rng.choice(sorted(ids))
        if token in vocabulary().ends:
            assert matcher.may_end
            break
        if not matcher.accept(token):
            assert "token" not in matcher.error, "a mask allowed what the matcher does not"
            return None
        tokens.append(token)
    return tokens


def accepts(grammar, text):
    """Whether `text` is a whole answer, token by token, and every mask on the way allowed it."""
    matcher = matcher_of(grammar)
    for token in TINY.encode(text, add_special_tokens=False):
        if token not in allowed(matcher):
            return False
        assert matcher.accept(token), matcher.error
    return matcher.may_end
