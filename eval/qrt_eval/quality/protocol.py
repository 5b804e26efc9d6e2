"""Perplexity protocols: how a text is cut into windows, which tokens are scored, how losses are averaged.

Figures of different protocols do not compare, so each carries its name and window.

    gptq       GPTQ, AWQ, QuaRot and most papers: disjoint windows of the joined text
    llamacpp   llama-perplexity: disjoint windows of the raw text, their second half is scored
    lmeval     lm-evaluation-harness' rolling log-likelihood: document by document, every token
    sliding    transformers' guide: overlapping windows, every token once with a long context
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from qrt.errors import ConfigError
from qrt.text.tokenizer import Tokenizer
from qrt_eval.inputs.text import Document, EvalText


@dataclass(frozen=True)
class Window:
    """Token ids; those from `first` on are scored given all before them.

    num_bytes   of text, in UTF-8, that the scored tokens spell
    num_words   of text, where the protocol divides by them
    """

    ids: tuple[int, ...]
    first: int
    num_bytes: int
    num_words: int = 0

    @property
    def num_scored(self) -> int:
        """How many tokens are scored."""
        return len(self.ids) - self.first


@dataclass(frozen=True)
class Loss:
    """Negative log-likelihoods (natural) of one window's scored tokens: their sum, of squares too."""

    nll: float
    squares: float
    tokens: int


class Protocol(ABC):
    """A named way from text to perplexity. Stateless objects in PROTOCOLS."""

    name: ClassVar[str]
    default_seqlen: ClassVar[int] = 2048
    least_seqlen: ClassVar[int] = 2

    @abstractmethod
    def windows(
        self, text: EvalText, tokenizer: Tokenizer, seqlen: int, stride: int | None, limit: int | None
    ) -> list[Window]:
        """The windows in the order of the text, the first `limit` of them (of documents, where the protocol
        goes by documents); ConfigError for a text shorter than a window."""

    def perplexity(self, windows: Sequence[Window], losses: Sequence[Loss]) -> float:
        """exp of the mean loss of the scored tokens; a protocol may weigh windows otherwise."""
        return exp(total(losses).nll / total(losses).tokens)

    def figures(self, windows: Sequence[Window], losses: Sequence[Loss]) -> dict[str, float]:
        """`ppl`, its `stderr` over tokens and `bits_per_byte` (which compares across tokenizers), and the
        protocol's own."""
        whole = total(losses)
        ppl = self.perplexity(windows, losses)
        mean = whole.nll / whole.tokens
        variance = max(whole.squares / whole.tokens - mean**2, 0.0)
        return {
            "ppl": ppl,
            "stderr": ppl * math.sqrt(variance / max(whole.tokens - 1, 1)),
            "bits_per_byte": whole.nll / math.log(2) / max(sum(w.num_bytes for w in windows), 1),
        }


def exp(loss: float) -> float:
    """e^loss; infinity where no float is as large, as by the words of a text without spaces."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def total(losses: Sequence[Loss]) -> Loss:
    """The losses of all windows as one."""
    return Loss(
        math.fsum(loss.nll for loss in losses),
        math.fsum(loss.squares for loss in losses),
        sum(loss.tokens for loss in losses),
    )


class Gptq(Protocol):
    """Text tokenized once (BOS as the tokenizer puts it: at the very start only), disjoint windows of
    `seqlen`, the tail dropped; positions 1.. of each are scored; exp(mean of the windows' means)."""

    name = "gptq"

    def windows(
        self, text: EvalText, tokenizer: Tokenizer, seqlen: int, stride: int | None, limit: int | None
    ) -> list[Window]:
        """See Protocol."""
        tokens = Tokens(tokenizer, text.text)
        _long_enough(tokens, seqlen, seqlen)
        starts = range(0, len(tokens.ids) - seqlen + 1, seqlen)
        return [tokens.window(start, start + seqlen, 1) for start in starts[:limit]]

    def perplexity(self, windows: Sequence[Window], losses: Sequence[Loss]) -> float:
        """See Protocol."""
        return exp(math.fsum(loss.nll / loss.tokens for loss in losses) / len(losses))


class LlamaCpp(Protocol):
    """Raw text tokenized once, disjoint chunks of `seqlen`, the first token of each replaced by BOS where the
    tokenizer adds one; tokens seqlen/2 + 1.. are scored, so that each has half a window of context."""

    name = "llamacpp"
    default_seqlen = 512
    least_seqlen = 4

    def windows(
        self, text: EvalText, tokenizer: Tokenizer, seqlen: int, stride: int | None, limit: int | None
    ) -> list[Window]:
        """See Protocol."""
        tokens = Tokens(tokenizer, text.raw)
        _long_enough(tokens, seqlen, 2 * seqlen)  # as llama-perplexity, which refuses less
        bos = _bos(tokenizer)
        starts = range(0, len(tokens.ids) - seqlen + 1, seqlen)
        return [tokens.window(start, start + seqlen, seqlen // 2 + 1, bos) for start in starts[:limit]]


class LmEval(Protocol):
    """Each document tokenized alone; every token is scored once, in windows of up to `seqlen` predictions.
    The first window is prefixed with BOS (else EOS), a later full one with the last token of the one before,
    and the last, short one keeps a whole window of context. `word_perplexity` divides by the words, and
    `bits_per_byte` by the bytes, of the original documents.

    Equals lm-eval with max_length=seqlen, whose default is the model's context; a window has one token more
    than its model reads.
    """

    name = "lmeval"

    def windows(
        self, text: EvalText, tokenizer: Tokenizer, seqlen: int, stride: int | None, limit: int | None
    ) -> list[Window]:
        """See Protocol."""
        prefix = tokenizer.hf.bos_token_id
        prefix = tokenizer.hf.eos_token_id if prefix is None else prefix
        if prefix is None:
            raise ConfigError(
                "protocol lmeval: the tokenizer has neither BOS nor EOS to begin a document with"
            )
        found = [w for doc in text.documents[:limit] for w in self._document(doc, tokenizer, prefix, seqlen)]
        if not found:
            raise ConfigError(f"{text.source}: no document has a token to score")
        return found

    def _document(self, document: Document, tokenizer: Tokenizer, prefix: int, seqlen: int) -> list[Window]:
        begins = tokenizer.decode([prefix], skip_special_tokens=False)
        specials = not (begins and document.text.startswith(begins))
        ids = tokenizer.encode(document.text, add_special_tokens=specials)
        num_words = len(re.split(r"\s+", document.original))
        num_bytes = len(document.original.encode())
        spans = rolling_spans(len(ids), seqlen)
        windows = []
        for i, (start, first, end) in enumerate(spans):
            head = (prefix,) if start < 0 else ()
            whole = (num_bytes, num_words) if i == 0 else (0, 0)  # the document's, once
            windows.append(Window((*head, *ids[max(start, 0) : end]), first - start, *whole))
        return windows

    def figures(self, windows: Sequence[Window], losses: Sequence[Loss]) -> dict[str, float]:
        """See Protocol; `ppl` is by tokens, lm-eval's own are `word_perplexity` and `byte_perplexity`."""
        nll, words = total(losses).nll, sum(window.num_words for window in windows)
        num_bytes = sum(window.num_bytes for window in windows)
        return {
            **super().figures(windows, losses),
            "word_perplexity": exp(nll / words),
            "byte_perplexity": exp(nll / num_bytes),
        }


def rolling_spans(count: int, seqlen: int) -> list[tuple[int, int, int]]:
    """lm-eval's windows over `count` tokens: (start, first scored, end), start -1 for the prefix token."""
    spans = []
    for first in range(0, count, seqlen):
        end = min(first + seqlen, count)
        spans.append((-1 if first == 0 else end - seqlen - 1, first, end))
    return spans


class Sliding(Protocol):
    """Windows of `seqlen` that begin every `stride` tokens; only tokens that no window before has scored are,
    so each has at least seqlen - stride tokens of context (but those of the first window)."""

    name = "sliding"

    def windows(
        self, text: EvalText, tokenizer: Tokenizer, seqlen: int, stride: int | None, limit: int | None
    ) -> list[Window]:
        """See Protocol."""
        stride = default_stride(seqlen) if stride is None else stride
        if not 1 <= stride < seqlen:
            raise ConfigError(f"--stride {stride}: wanted 1 to {seqlen - 1}, less than --seqlen {seqlen}")
        tokens = Tokens(tokenizer, text.text)
        _long_enough(tokens, seqlen, seqlen)
        windows, scored = [], 1
        for start in range(0, len(tokens.ids), stride)[:limit]:
            end = min(start + seqlen, len(tokens.ids))
            windows.append(tokens.window(start, end, scored - start))
            scored = end
            if end == len(tokens.ids):
                break
        return windows


def default_stride(seqlen: int) -> int:
    """Of `sliding`, unless the command line says otherwise."""
    return min(512, seqlen - 1)


class Tokens:
    """A text's token ids, and where in the text each begins and ends."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        encoded = tokenizer.hf(text, return_offsets_mapping=True, verbose=False)
        self.ids: list[int] = encoded["input_ids"]
        self._offsets: list[tuple[int, int]] = encoded["offset_mapping"]
        self._text = text

    def window(self, start: int, end: int, first: int, begin: int | None = None) -> Window:
        """Tokens [start, end), scored from `first` of them on; `begin` replaces the first."""
        ids = self.ids[start:end]
        if begin is not None:
            ids[0] = begin
        spans = self._offsets[start + first : end]
        spelled = self._text[spans[0][0] : max(stop for _, stop in spans)]
        return Window(tuple(ids), first, len(spelled.encode()))


def _bos(tokenizer: Tokenizer) -> int | None:
    """BOS, where the tokenizer begins a text with it."""
    ids = tokenizer.encode("a")
    return ids[0] if ids and ids[0] == tokenizer.hf.bos_token_id else None


def _long_enough(tokens: Tokens, seqlen: int, wanted: int) -> None:
    if len(tokens.ids) < wanted:
        windows = (
            "one window" if wanted == seqlen else f"the {wanted // seqlen} windows that the protocol wants"
        )
        raise ConfigError(
            f"the text has {len(tokens.ids)} tokens, less than {windows} of {seqlen}; use a longer text or a "
            "shorter --seqlen"
        )


PROTOCOLS: dict[str, Protocol] = {p.name: p for p in (Gptq(), LlamaCpp(), LmEval(), Sliding())}


def cut(
    name: str, text: EvalText, tokenizer: Tokenizer, max_model_len: int, settings: Any
) -> tuple[list[Window], int]:
    """The windows that `--protocol`, `--seqlen`, `--stride` and `--limit` ask for, and the seqlen.

    ConfigError when a window does not fit the model's context.
    """
    chosen = PROTOCOLS[name]
    seqlen = min(chosen.default_seqlen, max_model_len) if settings.seqlen is None else settings.seqlen
    least = chosen.least_seqlen
    if not least <= seqlen <= max_model_len:
        raise ConfigError(
            f"--seqlen {seqlen}: wanted {least} to {max_model_len}, what the model's context holds"
        )
    if settings.stride is not None and name != Sliding.name:
        raise ConfigError(f"--stride goes with --protocol sliding, not with {name}")
    return chosen.windows(text, tokenizer, seqlen, settings.stride, settings.limit), seqlen
