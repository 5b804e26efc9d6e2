"""Detokenizer: turn the tokens of a running request into text that can be shown at once.

It has two stages. `TextStream` turns ids into text and never returns half a character. `StopStrings` looks
for strings that end the text, and never returns text that may be the start of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from functools import cached_property
from itertools import islice

from qrt.request.sampling import SamplingParams
from qrt.text.tokenizer import Tokenizer

INCOMPLETE = "\ufffd"  # decoders write it for bytes that are no character, or not yet a whole one
MOST_PENDING = 3  # most bytes of an unfinished character
# A window of tokens is decoded again for each new one; its start gives the context for spaces and bytes.
LONG_WINDOW, LONGEST_WINDOW = 16, 64
# Lengths of a new window to try: of four tokens in a row, at least one starts a character.
TAILS = (6, 7, 8, 9)
# A longer run of INCOMPLETE, including the window's start, is invalid bytes, not an unfinished character.
LONGEST_RUN = 4 * max(TAILS)


class TextStream:
    """Turns ids into text; all the pieces together are the decoding of all ids after the prompt."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        prompt_ids = list(islice(self._shown(reversed(prompt_ids)), LONGEST_WINDOW))[::-1]
        whole = self._whole(prompt_ids)
        self._window, self._text = self._tail(prompt_ids[:whole])
        self._given = len(self._text)  # characters of `_text` that have been returned
        if whole < len(prompt_ids):
            self._window += prompt_ids[whole:]
            self._text = self._decode(self._window)

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that is certain now; what may be an unfinished character waits."""
        return self._feed(list(self._shown(token_ids)))

    def _feed(self, token_ids: list[int]) -> str:
        """Decode all tokens at once, or in halves if characters are unfinished or bytes invalid."""
        window = self._window + token_ids
        text, half = self._decode(window), len(token_ids) // 2
        if INCOMPLETE not in text:
            return self._add(window, text)
        if half:
            return self._feed(token_ids[:half]) + self._feed(token_ids[half:])
        if self._given == len(self._text):  # the text of invalid bytes depends on the window's start
            self._begin_anew()
            window = self._window + token_ids
            text = self._decode(window)
        return self._add(window, text)

    def _add(self, window: list[int], decoded: str) -> str:
        """Store a window with one more token, or several of whole characters, and return the new text."""
        self._window, self._text = window, decoded
        whole = len(self._text.rstrip(INCOMPLETE))
        if len(self._text) - whole > LONGEST_RUN:
            whole = len(self._text) - MOST_PENDING
        text = self._text[self._given : whole]
        self._given = max(self._given, whole)
        clean = whole == len(self._text)
        if len(self._window) > (LONG_WINDOW if clean else LONGEST_WINDOW):
            self._begin_anew()
        return text

    def _begin_anew(self) -> None:
        """Shorten the window."""
        pending = len(self._text) - self._given
        self._window, self._text = self._tail(self._window)
        self._given = len(self._text) - pending

    def finish(self) -> str:
        """Return the text that still waits, at the end of the tokens."""
        text = self._text[self._given :]
        self._given = len(self._text)
        return text

    def _shown(self, token_ids: Iterable[int]) -> Iterable[int]:
        """Return the tokens to put into the window: without skipped ones, which would fill it."""
        return self._tokenizer.shown(token_ids) if self._skip_special else token_ids

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special)

    def _whole(self, prompt_ids: Sequence[int]) -> int:
        """Return how many of the prompt's first tokens end with a whole character: all, or nearly all."""
        for end in range(len(prompt_ids), max(len(prompt_ids) - MOST_PENDING, 0) - 1, -1):
            if not self._tail(prompt_ids[:end])[1].endswith(INCOMPLETE):
                return end
        return len(prompt_ids)  # invalid bytes, not an unfinished character

    def _tail(self, token_ids: Sequence[int]) -> tuple[list[int], str]:
        """Return the last few tokens and their text, starting with a whole character if possible.

        A byte-fallback decoder drops a whole run of bytes if the run starts inside a character.
        """
        for length in TAILS:
            window = list(token_ids[-length:])
            text = self._decode(window)
            if not text.startswith(INCOMPLETE):
                break
        return window, text


class StopStrings:
    """Passes text on, up to the first stop string.

    found    the stop string that ended the text; the longest, if several end at the same character
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str, overlook: bool = False) -> str:
        """Return the text that cannot be part of a stop string.

        Once one is complete, return all text before it (with `include`, up to its end). With `overlook` stop
        strings that this text completes do not count.
        """
        seen = len(self._held)  # a stop string ends after this
        text = self._held + text
        starts = [(text.find(stop, max(0, seen - len(stop) + 1)), stop) for stop in self._stops]
        matches = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if matches and not overlook:
            end, start, self.found = min(matches)
            self._held = ""
            return text[: end if self._include else start]
        held = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Return the text that was held back; it is no stop string."""
        text, self._held = self._held, ""
        return text


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a start of `stop`, but not all of it."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class Detokenizer:
    """Makes the text of one request, piece by piece.

    text           all text returned so far; empty with `detokenize` off
    num_tokens     number of tokens fed, up to the one that completed a stop string
    stop_reason    the stop string that ended the text; later tokens are ignored
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._params = params
        self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)
        self.text = ""
        self.num_tokens = 0

    @property
    def stop_reason(self) -> str | None:
        """The stop string that ended the text; None if none has."""
        return self._stops.found

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that can be shown now; stop strings within `min_tokens` do not count."""
        if not self._params.detokenize:
            self.num_tokens += len(token_ids)
            return ""
        if not self._params.stop_strings:
            self.num_tokens += len(token_ids)
            return self._add(self._stream.feed(token_ids))
        return self._add(self._feed(token_ids)) if self.stop_reason is None else ""

    def _feed(self, token_ids: Sequence[int]) -> str:
        """Feed all tokens at once, or one by one if a stop string ends in them.

        `num_tokens` counts up to the token that completes it.
        """
        if len(token_ids) == 1:
            return self._look_through(token_ids)
        if not 0 < self._params.min_tokens - self.num_tokens < len(token_ids):
            before = copy(self._stream), copy(self._stops), self.num_tokens
            text = self._look_through(token_ids)
            if self.stop_reason is None:
                return text
            self._stream, self._stops, self.num_tokens = before
        return "".join(self._look_through([each]) for each in token_ids if self.stop_reason is None)

    def _look_through(self, token_ids: Sequence[int]) -> str:
        """Feed tokens, up to a stop string; either all or none of them are within `min_tokens`."""
        self.num_tokens += len(token_ids)
        text = self._stream.feed(token_ids)
        return self._stops.feed(text, overlook=self.num_tokens <= self._params.min_tokens)

    def finish(self) -> str:
        """Return the rest of the text after the last token; it may still hold a stop string."""
        if self.stop_reason is not None or not self._params.detokenize:
            return ""
        end = self._stops.feed(self._stream.finish(), overlook=self.num_tokens <= self._params.min_tokens)
        return self._add(end + self._stops.finish())

    @cached_property
    def _stream(self) -> TextStream:
        """The stream, made with the first tokens, since it decodes the prompt's end."""
        return TextStream(self._tokenizer, self._prompt_ids, self._params.skip_special_tokens)

    def _add(self, text: str) -> str:
        self.text += text
        return text
