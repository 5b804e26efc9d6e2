"""SamplingParams: how one request is decoded, validated when it is made or changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from typing import Any, TypeVar

from qrt.checks import at_least, at_most, between, check_seed, is_integer, is_number, listed, plain, yes_or_no
from qrt.compat.fields import refuse_arguments
from qrt.errors import ConfigError
from qrt.request.structured_outputs import StructuredOutputsParams

MAX_TOKENS_LISTED = 1024  # most ids in logit_bias and allowed_token_ids, which bounds a request's work
MAX_BAD_WORDS = 128  # words given as text; each becomes one or two lists of tokens
MAX_LOGPROBS = 20  # per token, as in OpenAI and vLLM, so that no request gets the whole vocabulary
GREEDY_TEMPERATURE = 1e-5  # below it the likeliest token is taken, as logits / temperature may overflow
LARGE = 1e30  # larger factors and divisors of logits overflow fp32

Params = TypeVar("Params")


def _for_vllm_users(cls: type[Params]) -> type[Params]:
    """Let callers make and change a frozen dataclass as they do in vLLM.

    The constructor also takes vLLM's other arguments if their values ask for nothing. An assignment
    (`params.max_tokens = 5`) checks all fields as the constructor does.
    """
    make, names = cls.__init__, [each.name for each in fields(cls)]  # type: ignore[arg-type]

    @wraps(make)
    def init(self: Params, *args: Any, **given: Any) -> None:
        others = {name: given.pop(name) for name in [*given] if name not in names}
        refuse_arguments(cls.__name__, others, names, given)
        make(self, *args, **given)

    def assign(self: Params, name: str, value: Any) -> None:
        checked = replace(self, **{name: value})  # type: ignore[type-var]
        for each in names:
            object.__setattr__(self, each, getattr(checked, each))

    setattr(cls, "__init__", init)  # noqa: B010 -- mypy reports a plain assignment as an error
    setattr(cls, "__setattr__", assign)  # noqa: B010
    return cls


@_for_vllm_users
@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded, by vLLM's names and meanings.

    n, best_of      completions: the `n` likeliest (by cumulative log-probability) of `best_of`, or n
    temperature     0 is greedy
    top_k           the k likeliest tokens (0 or -1: off)
    top_p           the fewest likeliest of these whose probability reaches p (1: off)
    min_p           tokens at least this share of the likeliest one's probability (0: off); before the other
                    two
    seed            makes a request reproducible in any batch (None or -1: no seed)
    max_tokens      None: all that the context leaves
    min_tokens      no token that ends the text is sampled before this many
    stop            strings that end the text, which is cut before them unless `include_stop_str_in_output`
    stop_token_ids  tokens that end it like EOS; with `ignore_eos` EOS does not
    detokenize      False: outputs have token ids but no text
    logprobs        log-probability of every output token (0: its own only, n: also the n likeliest) by the
                    model, before temperature and anything below
    prompt_logprobs the same for the prompt
    structured_outputs     the shape that the answer must have, as StructuredOutputsParams or a mapping
    thinking_token_budget  most tokens that the model may think, where its thinking has marks; then it answers

    These change the logits, in this order: `allowed_token_ids` (no other tokens), `logit_bias` (token id ->
    value added), `bad_words` (texts, or token ids, that are not continued to their end), `repetition_penalty`
    (divides positive logits of tokens in prompt or output and multiplies negative ones; Keskar et al.,
    arXiv:1909.05858), `frequency_penalty` and `presence_penalty` (subtracted per occurrence, or once, of a
    token in the output), `exponential_decay_length_penalty` (start, factor): from `start` output tokens on,
    EOS gains |its logit| * (factor^(tokens beyond start) - 1).
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | list[int] = field(default=())
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    exponential_decay_length_penalty: tuple[int, float] | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    bad_words: tuple[str | tuple[int, ...], ...] | list[str] = field(default=())
    detokenize: bool = True
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    thinking_token_budget: int | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, plain(getattr(self, each.name)))
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        object.__setattr__(self, "stop", listed("stop", stop))
        for name in ("stop_token_ids", "bad_words"):
            object.__setattr__(self, name, listed(name, getattr(self, name) or ()))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", listed("allowed_token_ids", self.allowed_token_ids))
        if not isinstance(self.logit_bias or {}, Mapping):
            raise ConfigError(
                f"logit_bias: expected a mapping of token ids to values, got {self.logit_bias!r}"
            )
        bias = {plain(token): plain(value) for token, value in (self.logit_bias or {}).items()}
        object.__setattr__(self, "logit_bias", bias)
        if self.structured_outputs is not None:
            object.__setattr__(
                self, "structured_outputs", StructuredOutputsParams.of(self.structured_outputs)
            )
        self._check_numbers()
        self._check_counts()
        self._check_lists()
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            yes_or_no(name, getattr(self, name))
        if self.seed == -1:
            object.__setattr__(self, "seed", None)

    def _check_numbers(self) -> None:
        for name, low, high in (
            ("temperature", 0, LARGE),
            ("min_p", 0, 1),
            ("presence_penalty", -2, 2),
            ("frequency_penalty", -2, 2),
        ):
            between(name, getattr(self, name), low, high)
        if not is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p: expected above 0 and at most 1, got {self.top_p!r}")
        penalty = self.repetition_penalty
        if not is_number(penalty) or not 1 / LARGE <= penalty <= LARGE:
            raise ConfigError(f"repetition_penalty: expected above 0, got {penalty!r}")
        if (decay := self.exponential_decay_length_penalty) is not None:
            start, factor = decay if isinstance(decay, (tuple, list)) and len(decay) == 2 else (None, None)
            if not is_integer(start) or start < 0 or not is_number(factor) or not 1 <= factor <= LARGE:
                raise ConfigError(
                    f"exponential_decay_length_penalty: expected (tokens, factor from 1 on), got {decay!r}"
                )
            object.__setattr__(self, "exponential_decay_length_penalty", (start, float(factor)))
        for token, bias in self.logit_bias.items():
            at_least("logit_bias", token, 0)
            between(f"logit_bias of token {token}", bias, -100, 100)

    def _check_counts(self) -> None:
        at_least("n", self.n, 1)
        if self.best_of is not None:
            at_least("best_of", self.best_of, self.n)
            if self.best_of > self.n and self.greedy:
                raise ConfigError(
                    f"best_of: expected at most n with temperature 0, where all completions are the same, "
                    f"got {self.best_of}; leave it out, or raise temperature"
                )
        at_least("top_k", self.top_k, -1)
        if self.seed is not None:
            check_seed(self.seed)
        at_least("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            at_least("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise ConfigError(
                    f"min_tokens: expected at most max_tokens {self.max_tokens}, got {self.min_tokens}"
                )
        if self.thinking_token_budget is not None:
            at_least("thinking_token_budget", self.thinking_token_budget, 0)
            if self.max_tokens is not None and self.thinking_token_budget >= self.max_tokens:
                raise ConfigError(
                    f"thinking_token_budget: expected less than max_tokens {self.max_tokens}, got "
                    f"{self.thinking_token_budget}; the answer needs tokens too"
                )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 0)
                at_most(name, getattr(self, name), MAX_LOGPROBS)

    def _check_lists(self) -> None:
        at_most("logit_bias: number of tokens", len(self.logit_bias), MAX_TOKENS_LISTED)
        words = sum(isinstance(word, str) for word in self.bad_words)
        at_most("bad_words: number", words, MAX_BAD_WORDS)
        at_most("bad_words: number of token lists", len(self.bad_words) - words, 2 * MAX_BAD_WORDS)
        for token in self.stop_token_ids:
            at_least("stop_token_ids", token, 0)
        if self.allowed_token_ids is not None:
            at_most("allowed_token_ids: number", len(self.allowed_token_ids), MAX_TOKENS_LISTED)
            if not self.allowed_token_ids:
                raise ConfigError("allowed_token_ids: expected at least one token id, or None, got none")
            for token in self.allowed_token_ids:
                at_least("allowed_token_ids", token, 0)
        if any(not isinstance(text, str) or not text for text in self.stop_strings):
            raise ConfigError(f"stop: expected non-empty strings, got {self.stop!r}")
        if self.stop_strings and not self.detokenize:
            raise ConfigError(
                f"stop: expected none with detokenize=False, got {self.stop!r}; they are looked for in the "
                "text; leave detokenize out, or use stop_token_ids"
            )
        for word in self.bad_words:
            if not isinstance(word, (str, tuple)) or not word:
                raise ConfigError(f"bad_words: expected non-empty strings, got {word!r}")
            for token in word if isinstance(word, tuple) else ():
                at_least("bad_words", token, 0)

    def clone(self) -> SamplingParams:
        """Return a copy that shares nothing with this one."""
        return replace(self)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, even if it was given as one string."""
        return tuple(self.stop or ())
