"""Define perplexity protocols: how a text is cut into windows, which tokens count, how losses are averaged.

Figures of different protocols do not compare, so each result carries its protocol and window size.

    gptq       GPTQ, AWQ, QuaRot and most papers: disjoint windows of the joined text
    llamacpp   llama-perplexity: disjoint windows of the raw text; the second half of each is scored
    lmeval     lm-evaluation-harness' rolling log-likelihood: document by document, every token
    sliding    transformers' guide: overlapping windows, every token once and with a long context
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
    """Hold token ids. Those from `first` on are scored, each given all before it.

    num_bytes   bytes of text, in UTF-8, that the scored tokens spell
    num_words   words of text, for a protocol that divides by them
    """

    ids: tuple[int, ...]
    first: int
    num_bytes: int
    num_words: int = 0

    @property
    def num_scored(self) -> int:
        """Return how many tokens are scored."""
        return len(self.ids) - self.first


@dataclass(frozen=True)
class Loss:
    """Hold the sum of a window's negative log-likelihoods (natural), and the sum of their squares."""

    nll: float
    squares: float
    tokens: int


class Protocol(ABC):
    """Turn a text into perplexity in a named way. PROTOCOLS holds one stateless object of each."""

    name: ClassVar[str]
    default_seqlen: ClassVar[int] = 2048
    least_seqlen: ClassVar[int] = 2

    @abstractmethod
    def windows(
        self, text: EvalText, tokenizer: Tokenizer, seqlen: int, stride: int | None, limit: int | None
    ) -> list[Window]:
        """Return the first `limit` windows in the order of the text.

        `limit` counts documents if the protocol goes by documents. ConfigError if the text is shorter than a
        window.
        """

    def perplexity(self, windows: Sequence[Window], losses: Sequence[Loss]) -> float:
        """Return exp of the mean loss of the scored tokens; a protocol may weigh windows differently."""
        return exp(total(losses).nll / total(losses).tokens)

    def figures(self, windows: Sequence[Window], losses: Sequence[Loss]) -> dict[str, float]:
        """Return `ppl`, its `stderr` over tokens, `bits_per_byte`, and the protocol's own figures.

        `bits_per_byte` compares across tokenizers.
        """
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
    """Return e^loss, or infinity if that overflows, as it may per word of a text without spaces."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def total(losses: Sequence[Loss]) -> Loss:
    """Sum the losses of all windows."""
    return Loss(
        math.fsum(loss.nll for loss in losses),
        math.fsum(loss.squares for loss in losses),
        sum(loss.tokens for loss in losses),
    )


class GptqProtocol(Protocol):
    """Cut the text into disjoint windows of `seqlen`; drop the tail.

    The text is tokenized once, so a BOS stands only at its very start. Positions 1.. of each window are
    scored. The perplexity is exp of the mean of the windows' means.
    """

    name = "gptq"

    def windows(
        self, text: EvalText, tokenizer: Tokenizer, seqlen: int, stride: int | None, limit: int | None
    ) -> list[Window]:
        """Cut the joined text; see Protocol."""
        tokens = Tokens(tokenizer, text.text)
        _long_enough(tokens, seqlen, seqlen)
        starts = range(0, len(tokens.ids) - seqlen + 1, seqlen)
        return [tokens.window(start, start + seqlen, 1) for start in starts[:limit]]

    def perplexity(self, windows: Sequence[Window], losses: Sequence[Loss]) -> float:
        """Return exp of the mean of the windows' means."""
        return exp(math.fsum(loss.nll / loss.tokens for loss in losses) / len(losses))


class LlamaCpp(Protocol):
    """Cut the raw text into disjoint chunks of `seqlen`; score tokens seqlen/2 + 1.. of each.

    So each scored token has at least half a window of context. If the tokenizer adds BOS, it replaces the
    first token of each chunk.
    """

    name = "llamacpp"
    default_seqlen = 512
    least_seqlen = 4

    def windows(
        self, text: EvalText, tokenizer: Tokenizer, seqlen: int, stride: int | None, limit: int | None
    ) -> list[Window]:
        """Cut the raw text; see Protocol."""
        tokens = Tokens(tokenizer, text.raw)
        _long_enough(tokens, seqlen, 2 * seqlen)  # as llama-perplexity does
        bos = _bos(tokenizer)
        starts = range(0, len(tokens.ids) - seqlen + 1, seqlen)
        return [tokens.window(start, start + seqlen, seqlen // 2 + 1, bos) for start in starts[:limit]]


class LmEval(Protocol):
    """Tokenize each document alone and score every token once, in windows of up to `seqlen` predictions.

    A document's first window begins with BOS (else EOS), a later full one with the last token of the one
    before. The last window is short and keeps a whole window of context. `word_perplexity` divides by the
    words and `bits_per_byte` by the bytes of the original documents.

    The figures equal lm-eval's with max_length=seqlen, whose default is the model's context. A window holds
    one token more than its model reads.
    """

    name = "lmeval"

    def windows(
        self, text: EvalText, tokenizer: Tokenizer, seqlen: int, stride: int | None, limit: int | None
    ) -> list[Window]:
        """Cut document by document; see Protocol."""
        prefix = tokenizer.bos_token_id
        prefix = next(iter(tokenizer.eos_token_ids), None) if prefix is None else prefix
        if prefix is None:
            raise ConfigError("--protocol lmeval: expected a tokenizer with BOS or EOS, got one with neither")
        found = [w for doc in text.documents[:limit] for w in self._document(doc, tokenizer, prefix, seqlen)]
        if not found:
            raise ConfigError(f"{text.source}: expected a document with tokens to score, got none")
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
            whole = (num_bytes, num_words) if i == 0 else (0, 0)  # counted once per document
            windows.append(Window((*head, *ids[max(start, 0) : end]), first - start, *whole))
        return windows

    def figures(self, windows: Sequence[Window], losses: Sequence[Loss]) -> dict[str, float]:
        """Add lm-eval's `word_perplexity` and `byte_perplexity`; `ppl` counts tokens."""
        nll, words = total(losses).nll, sum(window.num_words for window in windows)
        num_bytes = sum(window.num_bytes for window in windows)
        return {
            **super().figures(windows, losses),
            "word_perplexity": exp(nll / words),
            "byte_perplexity": exp(nll / num_bytes),
        }


def rolling_spans(count: int, seqlen: int) -> list[tuple[int, int, int]]:
    """Return lm-eval's windows over `count` tokens: (start, first scored, end); start -1 is the prefix."""
    spans = []
    for first in range(0, count, seqlen):
        end = min(first + seqlen, count)
        spans.append((-1 if first == 0 else end - seqlen - 1, first, end))
    return spans


class Sliding(Protocol):
    """Begin a window of `seqlen` every `stride` tokens; score the tokens that no earlier window has scored.

    So each token has at least seqlen - stride tokens of context, except in the first window.
    """

    name = "sliding"

    def windows(
        self, text: EvalText, tokenizer: Tokenizer, seqlen: int, stride: int | None, limit: int | None
    ) -> list[Window]:
        """Cut into overlapping windows; see Protocol."""
        stride = default_stride(seqlen) if stride is None else stride
        if not 1 <= stride < seqlen:
            raise ConfigError(
                f"--stride: expected 1 to {seqlen - 1}, less than --seqlen {seqlen}, got {stride}"
            )
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
    """Return the stride of `sliding` when the command line gives none."""
    return min(512, seqlen - 1)


class Tokens:
    """Hold a text's token ids, and where in the text each begins and ends."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        encoded = tokenizer.backend_tokenizer.encode(text)
        self.ids: list[int] = encoded.ids
        self._offsets: list[tuple[int, int]] = encoded.offsets
        self._text = text

    def window(self, start: int, end: int, first: int, begin: int | None = None) -> Window:
        """Return tokens [start, end), scored from their `first` on; `begin` replaces the first token."""
        ids = self.ids[start:end]
        if begin is not None:
            ids[0] = begin
        spans = self._offsets[start + first : end]
        spelled = self._text[spans[0][0] : max(stop for _, stop in spans)]
        return Window(tuple(ids), first, len(spelled.encode()))


def _bos(tokenizer: Tokenizer) -> int | None:
    """Return BOS if the tokenizer begins a text with it."""
    ids = tokenizer.encode("a")
    return ids[0] if ids and ids[0] == tokenizer.bos_token_id else None


def _long_enough(tokens: Tokens, seqlen: int, wanted: int) -> None:
    if len(tokens.ids) < wanted:
        windows = (
            "one window" if wanted == seqlen else f"the {wanted // seqlen} windows that the protocol needs"
        )
        raise ConfigError(
            f"text: expected at least {wanted} tokens, {windows} of {seqlen}, got {len(tokens.ids)}; give a "
            "longer text or a shorter --seqlen"
        )


PROTOCOLS: dict[str, Protocol] = {p.name: p for p in (GptqProtocol(), LlamaCpp(), LmEval(), Sliding())}


def cut(
    name: str, text: EvalText, tokenizer: Tokenizer, max_model_len: int, settings: Any
) -> tuple[list[Window], int]:
    """Return the windows that --protocol, --seqlen, --stride and --limit ask for, and the seqlen.

    ConfigError if a window does not fit the model's context.
    """
    chosen = PROTOCOLS[name]
    seqlen = min(chosen.default_seqlen, max_model_len) if settings.seqlen is None else settings.seqlen
    least = chosen.least_seqlen
    if not least <= seqlen <= max_model_len:
        raise ConfigError(f"--seqlen: expected {least} to {max_model_len}, the model's context, got {seqlen}")
    if settings.stride is not None and name != Sliding.name:
        raise ConfigError(f"--stride: expected --protocol sliding beside it, got {name}; leave --stride out")
    return chosen.windows(text, tokenizer, seqlen, settings.stride, settings.limit), seqlen
