"""AsyncLLM: the engine as an asyncio object, as vLLM's AsyncLLM, for requests that come at any time.

llm = AsyncLLM("tiny", kv="int8")
async for output in llm.generate("The", SamplingParams(max_tokens=32), request_id="1"):
    print(output.outputs[0].text)
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from inspect import signature
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn

from qrt.answers.output import RequestOutput
from qrt.answers.pooling.outputs import PoolingOutput, PoolingRequestOutput
from qrt.answers.pooling.processor import PoolingProcessor
from qrt.answers.pooling.task import with_task
from qrt.answers.processor import OutputProcessor
from qrt.compat.fields import refuse_arguments
from qrt.compat.settings import refuse_method
from qrt.engine.engine import Engine
from qrt.engine.preflight import preflight
from qrt.errors import ConfigError, UnsupportedError
from qrt.gc import short_collections
from qrt.offline.llm import engine_config, reasoning_reader
from qrt.request.pooling import PoolingParams
from qrt.request.sampling import SamplingParams
from qrt.text.pooling_inputs import encode
from qrt.text.prompt import Prompt, prompt_parts, split_prompts
from qrt.text.shapes import Shapes
from qrt.text.tokenizer import Tokenizer

try:
    from qrt.serve.link.engine_client import AnyCollector
    from qrt.serve.link.router import EngineRouter
    from qrt.serve.link.thread_client import ThreadClient
except ImportError as error:
    raise UnsupportedError(f"{error.name} is not installed; pip install 'qrt[serve]'") from error


class AsyncLLM:
    """A model in a thread of this process, for one event loop; `shutdown` or deletion ends the thread.

    client      the engine's client, for a server in the same process; it lives as long as the AsyncLLM, so
                the server must keep that
    tokenizer   qrt's Tokenizer of prompts and outputs
    """

    def __init__(self, model: str, *, kv: str = "auto", **settings: Any) -> None:
        """Load `model`; `settings` are those of LLM."""
        parser = settings.pop("reasoning_parser", None)
        checked = preflight(engine_config(model, {"kv": kv, **settings}))
        self.tokenizer = Tokenizer(checked.config.tokenizer or checked.config.model)
        self._reasoning = reasoning_reader(parser, self.tokenizer)
        engine = Engine(checked, eos_token_ids=self.tokenizer.eos_token_ids)
        self.client = ThreadClient(EngineRouter(engine))
        weakref.finalize(self, self.client.end)  # the thread holds the engine and its memory
        self._shapes = Shapes(self.tokenizer, engine.model.arch.vocab_size)
        self._defaults = engine.generation.sampling
        self._loop: asyncio.AbstractEventLoop | None = None  # in which it was started
        self._ids = count()
        self._running: dict[str, AnyCollector] = {}

    @classmethod
    def from_engine_args(cls, *arguments: Any, **named: Any) -> NoReturn:
        """Raise UnsupportedError: the constructor takes vLLM's engine arguments by name."""
        raise UnsupportedError(
            "AsyncLLM.from_engine_args: not supported; call AsyncLLM(model, **engine_arguments)"
        )

    @property
    def max_model_len(self) -> int:
        """The most tokens of one request, prompt and output together."""
        return self.client.info.max_model_len

    @property
    def is_running(self) -> bool:
        """Whether the engine accepts requests."""
        return not self.client.stopped

    def get_tokenizer(self) -> Any:
        """Return the transformers tokenizer, as vLLM does: the checkpoint's, or the one of `tokenizer`.

        The first call imports transformers, which takes seconds.
        """
        return self.tokenizer.hf

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of generation_config.json, which calls without parameters use."""
        return self._defaults.clone()  # the caller may change them

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        **others: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Complete a prompt, as in LLM; yield the whole output so far after each step that adds to it.

        Leaving the iteration aborts the request. `others` are those of LLM. Raises ConfigError for a prompt
        that does not fit or an id in use, QueueFullError when the queue is full, EngineError when a step
        fails.
        """
        refuse_arguments("AsyncLLM.generate", others, signature(self.generate).parameters)
        given = self._defaults if sampling_params is None else sampling_params
        if not isinstance(given, SamplingParams):
            raise ConfigError(f"sampling_params: expected SamplingParams, got {type(given).__name__}")
        params = given.clone()  # the caller may change theirs meanwhile
        collector = await asyncio.to_thread(self._collector, prompt, params, request_id, priority)
        async with contextlib.aclosing(self._outputs(collector)) as outputs:
            async for output in outputs:
                yield output

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        **others: Any,
    ) -> AsyncIterator[PoolingRequestOutput[PoolingOutput]]:
        """Yield what a model that pools makes of a prompt, once, as LLM.encode; raises as `generate` does."""
        refuse_arguments("AsyncLLM.encode", others, signature(self.encode).parameters)
        params = pooling_params or PoolingParams()
        if not isinstance(params, PoolingParams):
            raise ConfigError(f"pooling_params: expected PoolingParams, got {type(params).__name__}")
        collector = await asyncio.to_thread(self._pooled, prompt, params, request_id, priority)
        async with contextlib.aclosing(self._outputs(collector)) as outputs:
            async for output in outputs:
                yield output

    async def _outputs(self, collector: AnyCollector) -> AsyncGenerator[Any]:
        """Run a request; yield its output after each step that adds to it."""
        if collector.request_id in self._running:
            raise ConfigError(f"request id {collector.request_id!r}: already in use; choose another id")
        await self._start()
        self._running[collector.request_id] = collector
        try:
            with (
                contextlib.closing(
                    await self.client.submit([collector], whole=collector.pool is not None)
                ) as stream,
                short_collections(),
            ):
                while not collector.finished:
                    await anext(stream)
                    while stream.waiting:
                        await anext(stream)
                    yield collector.output()
        finally:
            del self._running[collector.request_id]

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End one or more requests.

        Each iterator yields its output once more, with finish_reason "abort".
        """
        for id in (request_id,) if isinstance(request_id, str) else request_id:
            if id in self._running:
                self.client.abort(self._running[id].engine_ids)

    async def check_health(self) -> None:
        """Raise EngineError if the engine has ended."""
        if self.client.stopped:
            raise self.client.stopped

    async def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes that no running request reads."""
        await self._start()
        await self.client.ask("reset_prefix_cache")

    async def shutdown(self) -> None:
        """End the engine's thread; running requests get an EngineError."""
        if self._loop is None:
            self.client.stop("the engine has been shut down")
        elif not self.client.stopped:
            await self.client.close()

    if not TYPE_CHECKING:  # it would hide misspelt names from mypy

        def __getattr__(self, name: str) -> Any:
            """Say what to use instead of a method that vLLM's AsyncLLM has and this class lacks."""
            return refuse_method(type(self).__name__, name)

    async def _start(self) -> None:
        await self.check_health()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            await self.client.start()
        elif self._loop is not loop:
            raise ConfigError(
                "AsyncLLM: expected the event loop it began in, got another; call asyncio.run once, around "
                "all that uses it, or make an AsyncLLM in each"
            )

    def _pooled(
        self, prompt: Prompt, params: PoolingParams, request_id: str | None, priority: int
    ) -> PoolingProcessor:
        pooling = self.client.info.pooling
        own = with_task(pooling, params, None, self.client.info.vector_size)
        assert pooling is not None
        text, ids, salt = prompt_parts(prompt)
        most = own.most_tokens(self.max_model_len)
        encoded = encode(self.tokenizer, ids if ids is not None else text or "", own, most)
        serial = next(self._ids)
        name = request_id if request_id is not None else f"async-{serial}"
        collector = PoolingProcessor(
            f"{name}-{serial}", encoded, pooling, own, priority=priority, cache_salt=salt
        )
        collector.request_id = name
        return collector

    def _collector(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None, priority: int
    ) -> OutputProcessor:
        params = self._shapes.checked(params)
        ((text, ids, salt),) = split_prompts([prompt], self.tokenizer)
        self._reasoning.check(params)
        serial = next(self._ids)
        name = request_id if request_id is not None else f"async-{serial}"
        # the engine gets another id: tokens of an aborted request may still come when its id is used again
        collector = OutputProcessor(
            f"{name}-{serial}", text, ids, params, self.tokenizer, priority=priority, cache_salt=salt
        )
        collector.request_id = name
        collector.thinking = self._reasoning.plain_thinking(ids, params)
        return collector
