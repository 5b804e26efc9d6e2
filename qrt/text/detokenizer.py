"""Detokenizer: the tokens of one running request to text that can be shown at once.

Two stages. `TextStream` turns ids into text and never gives out half a character; `StopStrings` looks for
strings that end the text and never gives out what may be the start of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from functools import cached_property
from itertools import islice

from qrt.sampling_params import SamplingParams
from qrt.text.tokenizer import Tokenizer

INCOMPLETE = "\ufffd"  # what decoders write for bytes that are not a character, or not yet
MOST_PENDING = 3  # bytes of a character that lacks its last one
# A window of tokens is decoded again for each new one; its start gives the context for spaces and bytes.
LONG_WINDOW, LONGEST_WINDOW = 16, 64
# Candidates for the start of a window, in tokens before its end: among four in a row one starts a character.
TAILS = (6, 7, 8, 9)
# A longer run of INCOMPLETE, the window's start included, is no unfinished character but invalid bytes.
LONGEST_RUN = 4 * max(TAILS)


class TextStream:
    """Ids to text: concatenated, what it gives is the decoding of all ids behind the prompt."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        prompt_ids = list(islice(self._shown(reversed(prompt_ids)), LONGEST_WINDOW))[::-1]
        whole = self._whole(prompt_ids)
        self._window, self._text = self._tail(prompt_ids[:whole])
        self._given = len(self._text)  # characters of `_text` that are out
        if whole < len(prompt_ids):
            self._window += prompt_ids[whole:]
            self._text = self._decode(self._window)

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that the tokens make certain; what may be an unfinished character waits."""
        return self._feed(list(self._shown(token_ids)))

    def _feed(self, token_ids: list[int]) -> str:
        """Decode all tokens at once, in halves where that leaves characters unfinished or bytes invalid."""
        window = self._window + token_ids
        text, half = self._decode(window), len(token_ids) // 2
        if INCOMPLETE not in text:
            return self._add(window, text)
        if half:
            return self._feed(token_ids[:half]) + self._feed(token_ids[half:])
        if self._given == len(self._text):  # what invalid bytes become depends on where the window begins
            self._begin_anew()
            window = self._window + token_ids
            text = self._decode(window)
        return self._add(window, text)

    def _add(self, window: list[int], decoded: str) -> str:
        """Take in the window with one more token, or with several of whole characters, and its text."""
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
        """What still waited: the end of the text."""
        text = self._text[self._given :]
        self._given = len(self._text)
        return text

    def _shown(self, token_ids: Iterable[int]) -> Iterable[int]:
        """What comes into the window: behind many that are skipped a text of nothing would begin anew."""
        return self._tokenizer.shown(token_ids) if self._skip_special else token_ids

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special)

    def _whole(self, prompt_ids: Sequence[int]) -> int:
        """How many of the prompt's tokens end with a whole character: all, or all but a few."""
        for end in range(len(prompt_ids), max(len(prompt_ids) - MOST_PENDING, 0) - 1, -1):
            if not self._tail(prompt_ids[:end])[1].endswith(INCOMPLETE):
                return end
        return len(prompt_ids)  # invalid bytes, not an unfinished character

    def _tail(self, token_ids: Sequence[int]) -> tuple[list[int], str]:
        """The last few tokens and their text, starting with a whole character if possible: a byte-fallback
        decoder gives up a whole run of bytes when the run starts inside a character."""
        for length in TAILS:
            window = list(token_ids[-length:])
            text = self._decode(window)
            if not text.startswith(INCOMPLETE):
                break
        return window, text


class TokenPlaces:
    """Ids to the places in the text where each one's begins; all parts of a character stand where it does."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        before: Sequence[int],
        skip_special_tokens: bool,
        start: int,
        unseen: int = 0,
    ) -> None:
        """`before` are the tokens before the first, whose text begins at `start`. The first `unseen` tokens
        are not in the text."""
        self._stream = TextStream(tokenizer, before, skip_special_tokens)
        self._next = start
        self._unseen = unseen

    def feed(self, token_ids: Iterable[int]) -> list[int]:
        """The place of each."""
        places = []
        for token_id in token_ids:
            places.append(self._next)
            if self._unseen:
                self._unseen -= 1
            else:
                self._next += len(self._stream.feed([token_id]))
        return places


class StopStrings:
    """Text to text, up to the first stop string.

    found    the stop string that ended the text; of several that end at the same character the longest
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str, overlook: bool = False) -> str:
        """The text that cannot be part of a stop string, or, once one is complete, all that is before it
        (or up to its end, with `include`). `overlook`: what is completed by this text does not count."""
        seen = len(self._held)  # a stop string ends behind it
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
        """What was held back: no stop string came of it."""
        text, self._held = self._held, ""
        return text


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a start of `stop`, all of `stop` excepted."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class Detokenizer:
    """The text of one request, piece by piece.

    text           all that has been given out; none with `detokenize` off
    num_tokens     tokens fed, up to the one that completed a stop string
    stop_reason    the stop string that ended the text; what is fed afterwards is ignored
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
        """See the class."""
        return self._stops.found

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that can be shown now. A stop string must end behind `min_tokens`."""
        if not self._params.detokenize:
            self.num_tokens += len(token_ids)
            return ""
        if not self._params.stop_strings:
            self.num_tokens += len(token_ids)
            return self._add(self._stream.feed(token_ids))
        return self._add(self._feed(token_ids)) if self.stop_reason is None else ""

    def _feed(self, token_ids: Sequence[int]) -> str:
        """Feed all tokens at once, or one by one where a stop string ends in them: `num_tokens` counts up to
        the token that completes it."""
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
        """Feed tokens that all may be overlooked, or none, up to a stop string."""
        self.num_tokens += len(token_ids)
        text = self._stream.feed(token_ids)
        return self._stops.feed(text, overlook=self.num_tokens <= self._params.min_tokens)

    def finish(self) -> str:
        """The rest of the text, when no more tokens come; it may still bring a stop string."""
        if self.stop_reason is not None or not self._params.detokenize:
            return ""
        end = self._stops.feed(self._stream.finish(), overlook=self.num_tokens <= self._params.min_tokens)
        return self._add(end + self._stops.finish())

    @cached_property
    def _stream(self) -> TextStream:
        """Made with the first tokens: it decodes the prompt's end."""
        return TextStream(self._tokenizer, self._prompt_ids, self._params.skip_special_tokens)

    def _add(self, text: str) -> str:
        self.text += text
        return text
