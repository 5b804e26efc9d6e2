"""ReasoningReader: find out from a prompt where the thinking of its answers begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from qrt.errors import ConfigError
from qrt.request.sampling import SamplingParams
from qrt.request.thinking import Thinking
from qrt.text.reasoning.channels import ChannelStream
from qrt.text.reasoning.counting import ReasoningCounter, TextCounter
from qrt.text.reasoning.formats import ReasoningFormat, reasoning_format
from qrt.text.reasoning.tags import TagStream
from qrt.text.tokenizer import Tokenizer

TAIL = 64  # tokens at the end of a prompt that are read for its marks
START, MESSAGE_END = "<|start|>", "<|end|>"  # of a message in channels


@dataclass(frozen=True)
class Marks:
    """The marks of a model as token ids.

    stop     the tokens that end one piece of thinking: in channels a message, else `end`
    hidden   whether a decoder that skips special tokens skips some of them
    exact    whether each mark is always these tokens; else the text around it may change them
    """

    start: tuple[int, ...]
    end: tuple[int, ...]
    closing: tuple[int, ...]
    stop: tuple[int, ...]
    hidden: bool
    exact: bool


@dataclass(frozen=True)
class Reasoning:
    """The thinking of the answers to one prompt.

    text_of   returns the text of a token
    inside    whether the prompt has begun it, or answers begin with it
    begun     in channels: the message that the prompt has begun
    """

    format: ReasoningFormat
    marks: Marks
    text_of: Callable[[int], str]
    inside: bool
    begun: str = ""

    def stream(self, names: Collection[str]) -> TagStream | ChannelStream:
        """Begin to split an answer; `names` are the functions that it may call."""
        if self.format.channels:
            return ChannelStream(names, self.begun)
        return TagStream(self.format, self.inside)

    def counter(self) -> ReasoningCounter | TextCounter:
        """Begin to count the tokens of thinking in an answer."""
        if not self.marks.exact:
            return TextCounter(TagStream(self.format, self.inside), self.text_of, len(self.marks.end))
        inside = self._analyses if self.format.channels else self.inside
        return ReasoningCounter(self.marks.start, self.marks.stop, inside, once=not self.format.channels)

    def thinking(
        self, params: SamplingParams, calls: bool = False, channels: bool = False
    ) -> Thinking | None:
        """Return what the engine must know of it for a budget or a grammar; None if it need not.

        In channels, an answer that may call functions (`calls`) may do so instead of answering: there a
        budget ends the thinking alone, and the model chooses the next channel, as it does with a grammar of
        all `channels`. ConfigError where the end of the thinking cannot be told by tokens.
        """
        budget, marks = params.thinking_token_budget, self.marks
        if budget is None and params.structured_outputs is None:
            return None
        if not marks.exact:
            if budget is None and not self.inside:
                return None  # the shape begins at once
            name = "structured_outputs" if budget is None else "thinking_token_budget"
            raise ConfigError(
                f"{name}: expected none where the model thinks, as {self.format.ends[0]!r} is no token of "
                "its own; leave it out, or switch the thinking off"
            )
        if self.format.channels and calls and (channels or params.structured_outputs is None):
            return Thinking(marks.stop, marks.start, self._analyses, budget, marks.stop)
        return Thinking(marks.end, marks.start, self.inside, budget, marks.closing)

    @property
    def opens(self) -> bool:
        """Whether the answer begins with a message in some channel, or inside one of thinking."""
        return self.format.channels and (self._analyses or self.begun.strip() in ("", f"{START}assistant"))

    @property
    def _analyses(self) -> bool:
        """Whether the prompt ends inside a message of thinking, in channels."""
        return any(start in self.begun for start in self.format.starts)


class ReasoningReader:
    """Reads prompts of one model.

    format   the marks of the model's thinking; None if it has none, or none that are known
    """

    def __init__(self, name: str, chat_template: str, tokenizer: Tokenizer) -> None:
        """Take the parser's name, see `reasoning_format`; ConfigError if it is unknown."""
        self.format = reasoning_format(name, chat_template)
        self._tokenizer = tokenizer
        self._marks: Marks | None = None

    def read(self, prompt: str, continued: bool = False) -> Reasoning | None:
        """Return the thinking of the answers to a prompt; None if there is none.

        The prompt's end shows whether thinking has begun or ended there. With `continued` the answer has
        begun too, so that it cannot begin to think.
        """
        if self.format is None:
            return None
        if self._marks is None:
            self._marks = _marks(self.format, self._tokenizer)
        own = self.format, self._marks, self._tokenizer.token_text
        if self.format.channels:
            at = prompt.rfind(START)
            begun = prompt[at:] if at >= 0 else ""
            answers = any(end in begun for end in self.format.ends)
            return Reasoning(*own, not answers, begun)
        inside = _is_inside(self.format, prompt.rstrip(), continued)
        return None if inside is None else Reasoning(*own, inside)

    def plain_thinking(self, prompt_ids: Sequence[int], params: SamplingParams) -> Thinking | None:
        """Return what the engine must know of the thinking behind a prompt that may be no chat.

        Without a budget it matters where the prompt begins it. Else a grammar holds from the first token on.
        """
        if self.format is None or (
            params.thinking_token_budget is None and params.structured_outputs is None
        ):
            return None
        text = self._tokenizer.decode(prompt_ids[-TAIL:], skip_special_tokens=False)
        begins = START in text if self.format.channels else text.rstrip().endswith(self.format.starts)
        reasoning = self.read(text) if begins or params.thinking_token_budget is not None else None
        return reasoning.thinking(params) if reasoning else None

    def check(self, params: SamplingParams) -> None:
        """Raise ConfigError for a budget that this model's thinking cannot have."""
        budget = params.thinking_token_budget
        if budget is not None and self.format is None:
            raise ConfigError(
                f"thinking_token_budget: expected none, as the marks of this model's thinking are unknown, "
                f"got {budget}; leave it out, or name them with reasoning_parser"
            )


def _is_inside(format: ReasoningFormat, prompt: str, continued: bool) -> bool | None:
    """Return whether the prompt's end is in a thinking; None if no thinking can begin any more."""
    if prompt.endswith(format.starts):
        return True
    if prompt.endswith(format.ends):
        return None
    if not continued:
        return format.begun
    started = max(prompt.rfind(start) for start in format.starts)
    return True if started > max(prompt.rfind(end) for end in format.ends) else None


def _marks(format: ReasoningFormat, tokenizer: Tokenizer) -> Marks:
    start, end = _encode(format.starts[0], tokenizer), _encode(format.ends[0], tokenizer)
    closing = (*_encode(format.closing, tokenizer), *end)
    stop = _encode(MESSAGE_END, tokenizer) if format.channels else end
    hidden = not tokenizer.special_ids.isdisjoint(start + closing)
    exact = all(
        _has(tokenizer.encode(before + text + behind, add_special_tokens=False), ids)
        for text, ids in ((format.starts[0], start), (format.ends[0], end))
        for before in ("\n", ". ", ".")
        for behind in ("\n", "\n\n", " a", ".")
    )
    return Marks(start, end, closing, stop, hidden, exact)


def _has(token_ids: Sequence[int], mark: tuple[int, ...]) -> bool:
    """Return whether the tokens of a mark are among others."""
    places = range(len(token_ids) - len(mark) + 1)
    return any(tuple(token_ids[at : at + len(mark)]) == mark for at in places)


def _encode(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens of a text behind another one: a tokenizer may put a space before the first."""
    before = tokenizer.encode("\n", add_special_tokens=False)
    both = tokenizer.encode("\n" + text, add_special_tokens=False)
    if both[: len(before)] == before:
        return tuple(both[len(before) :])
    return tuple(tokenizer.encode(text, add_special_tokens=False))
