"""LLM: the engine as a Python object. It takes prompts and returns RequestOutputs, as vLLM's LLM does."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from inspect import signature
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from tqdm import tqdm

from qrt.answers.output import RequestOutput
from qrt.answers.pooling.outputs import ScoringRequestOutput
from qrt.answers.processor import OutputProcessor, outputs_of
from qrt.compat.fields import refuse_arguments
from qrt.compat.settings import has_no_effect, refuse_method, setting
from qrt.config import EngineConfig
from qrt.engine.engine import Engine
from qrt.engine.preflight import preflight
from qrt.engine.schedule.logprobs import LogprobRows, concat
from qrt.engine.schedule.output import Cause, StepDelta
from qrt.errors import ConfigError, QrtError, UnsupportedError
from qrt.gc import short_collections
from qrt.offline.pooling import PoolingCalls
from qrt.registry import nearest
from qrt.request.sampling import SamplingParams
from qrt.text.prompt import Prompt, listed_prompts, plain_ids, split_prompts
from qrt.text.reasoning import ReasoningReader
from qrt.text.shapes import Shapes
from qrt.text.tokenizer import Message, Tokenizer

ALIASES = {"kv_cache_dtype": "kv", "async_scheduling": "overlap"}  # vLLM's names


class LLM(PoolingCalls):
    """A model that is ready to generate, or to make vectors and scores.

    Usage:

        llm = LLM("tiny", kv="int8")
        llm.generate(["The"], SamplingParams(max_tokens=32))[0].outputs[0].text

    Calls of several threads run one after the other.

    engine      the engine; it must not be driven from elsewhere at the same time
    tokenizer   qrt's own, which prompts and outputs go through
    """

    def __init__(self, model: str, *, kv: str = "auto", **settings: Any) -> None:
        """Load `model`: a folder, ORG/NAME[@REVISION] of the Hub, or "tiny".

        `settings` are the other fields of EngineConfig, and `reasoning_parser`, which names the marks of the
        model's thinking as for `qrt-serve`. ConfigError for an unknown one, UnsupportedError for one of
        another engine that asks for something.
        """
        parser = settings.pop("reasoning_parser", None)
        checked = preflight(engine_config(model, {"kv": kv, **settings}))
        self.tokenizer = Tokenizer(checked.config.tokenizer or checked.config.model)
        self._reasoning = reasoning_reader(parser, self.tokenizer)
        self.engine = Engine(checked, eos_token_ids=self.tokenizer.eos_token_ids)
        self._shapes = Shapes(self.tokenizer, self.engine.model.arch.vocab_size)
        self._ids = count()
        self._lock = Lock()
        self._pid = os.getpid()

    @property
    def max_model_len(self) -> int:
        """The most tokens of one request, prompt and output together."""
        return self.engine.max_model_len

    @property
    def weight_scheme(self) -> str:
        """The scheme of the layers' weights, e.g. "w4a16", or "fp16+w4a16" if the layers differ."""
        return self.engine.model.scheme

    @property
    def weight_bytes(self) -> int:
        """The bytes of all weights."""
        return self.engine.model.num_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """The bytes of one token's K and V in all layers."""
        return self.engine.kv_bytes_per_token

    @property
    def dtype(self) -> str:
        """The dtype of activations: "float32", "float16" or "bfloat16"."""
        return str(self.engine.model.dtype).removeprefix("torch.")

    def get_tokenizer(self) -> Any:
        """Return the transformers tokenizer, as vLLM does: the checkpoint's, or the one of `tokenizer`.

        The first call imports transformers, which takes seconds.
        """
        return self.tokenizer.hf

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of generation_config.json, which calls without parameters use."""
        return self.engine.generation.sampling.clone()  # the caller may change them

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Complete each prompt; return the results in the order of the prompts.

        prompts           each is text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}; a
                          dictionary may have "cache_salt": only prompts of one salt share cached prefixes
        sampling_params   one for all prompts, or a list of one each
        priority          one integer per prompt; the smallest runs first with that scheduling policy
        others            vLLM's arguments that qrt does not have

        A completion whose own shape (`structured_outputs`) cannot be kept, or for which the model gives NaN,
        ends with finish_reason "error" and says why in `error`; the others go on. QrtError if no prompt has
        another end: ConfigError where its shape is wrong.

        Raises ConfigError for a prompt that does not fit, UnsupportedError for an argument of `others` that
        would change something, QrtError when a step fails.
        """
        refuse_arguments("LLM.generate", others, signature(self.generate).parameters)
        listed = listed_prompts(prompts)
        params = self._params(sampling_params, len(listed))
        priorities = [0] * len(listed) if priority is None else priority
        if len(priorities) != len(listed):
            raise ConfigError(f"priority: expected one per prompt, got {len(priorities)} for {len(listed)}")
        parts = split_prompts(listed, self.tokenizer)
        collectors = [
            self._collector(*given, own, first)
            for given, own, first in zip(parts, params, priorities, strict=True)
        ]
        for collector in collectors:
            collector.thinking = self._reasoning.plain_thinking(collector.prompt_ids, collector.params)
        return self._completed(collectors, use_tqdm)

    def _completed(self, collectors: Sequence[OutputProcessor], use_tqdm: bool) -> list[RequestOutput]:
        """Run the requests of all collectors and return their outputs; ConfigError if all are wrong."""
        asked, collectors = collectors, [collector for collector in collectors if not collector.finished]
        by_id = {engine_id: collector for collector in collectors for engine_id in collector.engine_ids}
        with self._running(by_id):
            for collector in collectors:
                for engine_id, own in collector.engine_requests():
                    self.engine.add(
                        engine_id,
                        collector.prompt_ids,
                        own,
                        priority=collector.priority,
                        cache_salt=collector.cache_salt,
                        thinking=collector.thinking,
                    )
            tokens = 0
            with (
                short_collections(),
                tqdm(total=len(collectors), desc="Processed prompts", disable=not use_tqdm) as bar,
            ):
                for delta in self._deltas(kept=(Cause.REQUEST, Cause.MODEL)):
                    collector = by_id[delta.request_id]
                    if (gathered := collector.buffer(delta)) is None:
                        continue
                    if collector.process(gathered).abort:
                        self.engine.abort(delta.request_id)
                    tokens += len(gathered.token_ids)
                    if collector.finished:
                        bar.set_postfix_str(f"{_rate(tokens, bar)} output tokens/s", refresh=False)
                        bar.update()
        return outputs_of(asked, f"{self.engine.config.model} in {self.engine.model.dtype}")

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, with the chat template; `others` as for `generate`."""
        refuse_arguments("LLM.chat", others, signature(self.chat).parameters)
        if isinstance(messages, (str, Mapping)) or not hasattr(messages, "__getitem__"):
            raise ConfigError(
                'messages: expected a list such as [{"role": "user", "content": "..."}], or a list of those, '
                f"got {type(messages).__name__}"
            )
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template": chat_template,
            "tools": tools,
            **(chat_template_kwargs or {}),
        }
        texts = [self.tokenizer.render_chat(conversation, **options) for conversation in conversations]
        encoded = self.tokenizer.encode_all(texts, add_special_tokens=False)
        params = self._params(sampling_params, len(texts))
        collectors = [
            self._collector(text, ids, None, own, 0)
            for text, ids, own in zip(texts, encoded, params, strict=True)
        ]
        for text, collector in zip(texts, collectors, strict=True):
            if reasoning := self._reasoning.read(text, continue_final_message):
                collector.thinking = reasoning.thinking(collector.params, bool(tools))
        return self._completed(collectors, use_tqdm)

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes."""
        with self._running(()):
            self.engine.reset_prefix_cache()

    @overload
    def score(self, data_1: Sequence[Sequence[int]], data_2: None = None, /) -> list[Tensor]: ...

    @overload
    def score(self, data_1: Any, data_2: Any, /, **options: Any) -> list[ScoringRequestOutput]: ...

    def score(self, data_1: Any, data_2: Any = None, /, **options: Any) -> Any:
        """Score pairs of texts, or with one argument the tokens of prompts.

        data_1, data_2   texts, or lists of them: one with each of `data_2`, or each with its own. A model
                         with one label scores the two together, one that embeds by their cosine. Returns a
                         ScoringRequestOutput a pair, with `outputs.score`.
        options          use_tqdm, pooling_params, and chat_template, which shows messages of the roles query
                         and document

        Without `data_2`, `data_1` are lists of token ids. Returns for each list of n ids a tensor fp32
        [n - 1] of natural logarithms on the CPU, the log-probability of every token after the first, given
        those before it. A list may have one token more than `max_model_len`, because nothing is predicted
        from its last one.
        """
        if data_2 is not None:
            return self._score_pairs(data_1, data_2, **options)
        if options or isinstance(data_1, str) or any(isinstance(ids, str) for ids in data_1):
            raise ConfigError(
                "LLM.score: expected lists of token ids, or two texts, got one; give the second"
            )
        return [torch.from_numpy(scores.logprobs) for scores in self.score_ranked(data_1)]

    def score_ranked(self, token_ids: Sequence[Sequence[int]]) -> list[LogprobRows]:
        """Score as `score` does, and return each token's rank in the vocabulary too, 1 = likeliest."""
        token_ids = [plain_ids(ids) for ids in token_ids]
        params = SamplingParams(prompt_logprobs=0)
        parts: dict[str, list[LogprobRows]] = {f"score-{next(self._ids)}": [] for _ in token_ids}
        with self._running(parts):
            for request_id, ids in zip(parts, token_ids, strict=True):
                self.engine.add(request_id, ids, params, generate=False)
            with short_collections():
                for delta in self._deltas():
                    if delta.prompt_scores is not None:
                        parts[delta.request_id].append(delta.prompt_scores)
        return [concat(scores) if scores else LogprobRows.empty() for scores in parts.values()]

    if not TYPE_CHECKING:  # it would hide misspelt names from mypy

        def __getattr__(self, name: str) -> Any:
            """Say what to use instead of a method that vLLM's LLM has and this class lacks."""
            return refuse_method(type(self).__name__, name)

    @contextmanager
    def _running(self, request_ids: Iterable[str]) -> Iterator[None]:
        """Run the engine for these requests alone, and leave nothing of them behind however it ends.

        Raises QrtError in a fork of the process: torch's threads are not there, so its first matrix product
        would wait forever.
        """
        if os.getpid() != self._pid:
            raise QrtError(
                f"LLM: expected use in process {self._pid}, which made it, got its fork {os.getpid()}; "
                "make the LLM in the child, which multiprocessing starts by spawn"
            )
        with self._lock:
            try:
                yield
            except QrtError:  # a refused prompt or a failed step leaves the engine in order
                for request_id in request_ids:
                    self.engine.abort(request_id)
                raise
            except BaseException:  # Ctrl-C may have come anywhere
                self.engine.clear()
                raise

    def _deltas(self, kept: Collection[Cause] = ()) -> Iterator[StepDelta]:
        """Step until the engine has no work left; QrtError for an error of another cause than `kept`."""
        while self.engine.has_work:
            for delta in self.engine.step():
                if delta.error and delta.cause not in kept:
                    if delta.cause is Cause.STEP:
                        raise QrtError(f"request {delta.request_id} failed in a step: {delta.error}")
                    raise QrtError(f"{self.engine.config.model} in {self.engine.model.dtype}: {delta.error}")
                yield delta

    def _collector(
        self, text: str | None, ids: list[int], salt: str | None, params: SamplingParams, priority: int
    ) -> OutputProcessor:
        self._reasoning.check(params)
        name, error = str(next(self._ids)), None
        try:
            params = self._shapes.checked(params)
        except ConfigError as wrong:
            error = str(wrong)
        made = OutputProcessor(name, text, ids, params, self.tokenizer, priority=priority, cache_salt=salt)
        if error is not None:
            made.refuse(error)
        return made

    def _params(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        """Return parameters for each of `count` prompts, copies: the caller may change theirs meanwhile."""
        if given is None:
            given = self.engine.generation.sampling
        if isinstance(given, SamplingParams):
            return [given.clone()] * count
        if not isinstance(given, Sequence) or not all(isinstance(own, SamplingParams) for own in given):
            got = type(given).__name__
            raise ConfigError(
                f"sampling_params: expected SamplingParams, or a list of one per prompt, got {got}"
            )
        if len(given) != count:
            raise ConfigError(f"sampling_params: expected one each, got {len(given)} for {count} prompts")
        return [own.clone() for own in given]


def reasoning_reader(name: str | None, tokenizer: Tokenizer) -> ReasoningReader:
    """Make the reader of a parser's name; None and "" stand for "auto"."""
    return ReasoningReader(name or "auto", tokenizer.chat_template(tools=True) or "", tokenizer)


def engine_config(model: str, settings: Mapping[str, Any]) -> EngineConfig:
    """Make an EngineConfig from keyword arguments by qrt's or vLLM's names; None is the default, as there.

    Raises UnsupportedError for a setting of another engine that asks for something, ConfigError for an
    unknown name, or for two names of one setting with two values, unless the value of `kv` is "auto".
    """
    known = [field.name for field in fields(EngineConfig)]
    given: dict[str, Any] = {}
    for name, value in settings.items():
        field = ALIASES.get(name, name)
        if field not in known:
            if has_no_effect(name, value):
                continue
            if entry := setting(name):
                raise UnsupportedError(f"LLM: {name}: {entry.remedy}")
            raise ConfigError(f"LLM: unknown setting {name!r}{nearest(name, [*known, *ALIASES])}")
        if value is None:
            continue
        if given.get(field, "auto") not in ("auto", value):
            raise ConfigError(
                f"LLM: {field}={given[field]!r} and {name}={value!r} set the same option to different "
                "values; pass one of them"
            )
        given[field] = value
    return EngineConfig(model, **given)


def _rate(count: int, bar: Any) -> str:
    seconds = bar.format_dict["elapsed"]
    return f"{count / seconds:.0f}" if seconds else "?"
