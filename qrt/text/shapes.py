"""Shapes: check the shape that a request wants of its answer, before the engine sees it."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import cached_property

from qrt.grammar.check import Checker
from qrt.grammar.vocabulary import Vocabulary
from qrt.request.sampling import SamplingParams
from qrt.request.structured_outputs import StructuredOutputsParams
from qrt.text.tokenizer import Tokenizer


class Shapes:
    """The checks of one model's requests. Many threads may use it; the first check starts a process."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    @cached_property
    def marks(self) -> dict[str, int]:
        """The ids of the tokens that are no text in a grammar, by their text; those that have a logit."""
        return {name: mark for name, mark in self._tokenizer.marks.items() if mark < self._vocab_size}

    def checked(self, params: SamplingParams, place: str = "") -> SamplingParams:
        """Return parameters with the shape that the engine takes; ConfigError for what cannot be enforced.

        place   the request's field that asks for the shape, for the error
        """
        if params.structured_outputs is None:
            return params
        given = StructuredOutputsParams.of(params.structured_outputs)
        shape = self._checker.checked(given, place)
        return params if shape is given else replace(params, structured_outputs=shape)

    @cached_property
    def _checker(self) -> Checker:
        vocabulary = Vocabulary.of(self._tokenizer, self._vocab_size, self._tokenizer.eos_token_ids)
        made = Checker(vocabulary)
        weakref.finalize(self, made.close)
        return made

    def close(self) -> None:
        """End the process; a later check starts another."""
        if "_checker" in self.__dict__:
            self._checker.close()
