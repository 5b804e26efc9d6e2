"""Service: what the routes of all APIs share, from the check of a body to the running requests."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

from qrt.answers.pooling.processor import PoolingProcessor
from qrt.answers.pooling.task import with_task
from qrt.answers.processor import OutputProcessor, encode_bad_words
from qrt.errors import ConfigError, ContextLengthError
from qrt.request.pooling import PoolingParams
from qrt.request.sampling import SamplingParams
from qrt.serve.http.http_errors import UnknownModelError
from qrt.serve.link.engine_client import AnyCollector, RequestStream
from qrt.serve.link.engines import AnyClient
from qrt.serve.settings import MAX_LISTED, MAX_SCORES, ServerConfig
from qrt.text.reasoning import ReasoningReader
from qrt.text.shapes import Shapes
from qrt.text.tokenizer import Tokenizer
from qrt.text.tool_calls import ToolFormat, tool_format

logger = logging.getLogger(__name__)

SHAPE_THREADS = 4  # that wait for checks, one of which runs at a time
INLINE_CHARS = 8192  # longer texts are tokenized in a thread
Result = TypeVar("Result")


class Service:
    """A client of the engine, or of all engines, with the tokenizer and the settings.

    tool_format   format of the model's tool calls; None if unknown
    reasoning     finds the thinking of the model's answers
    draining      whether the server is ending: running requests go on, new ones are refused
    """

    def __init__(self, client: AnyClient, tokenizer: Tokenizer, config: ServerConfig) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.config = config
        self.draining = False
        self.started = int(time.time())
        self._shape_threads = ThreadPoolExecutor(SHAPE_THREADS, "shapes")
        template = tokenizer.chat_template(config.chat_template, tools=True) or ""
        self.tool_format: ToolFormat | None = tool_format(config.tool_call_parser, template)
        self.reasoning = ReasoningReader(config.reasoning_parser, template, tokenizer)

    @property
    def model(self) -> str:
        """The model's first name."""
        return self.config.model_names[0]

    @property
    def defaults(self) -> dict[str, Any]:
        """The fields of the checkpoint's default SamplingParams."""
        return self.client.info.sampling

    def max_tokens(self, wanted: int | None) -> int | None:
        """Return the token limit of a request that asks for `wanted`; None is all that the context leaves.

        As in vLLM, the checkpoint's max_new_tokens is both the default and the maximum.
        """
        most = self.client.info.max_new_tokens
        return most if wanted is None else wanted if most is None else min(wanted, most)

    def check_running(self) -> None:
        """Raise HTTPException 503 while the server starts or ends."""
        if self.draining:
            raise HTTPException(503, "the server is shutting down")
        self.check_running_or_draining()

    def check_running_or_draining(self) -> None:
        """Raise HTTPException 503 while the server starts."""
        if not self.client.ready.is_set() and not self.client.stopped:
            raise HTTPException(503, "the server is starting: the model is being loaded")

    def check_model(self, name: str | None) -> None:
        """Raise UnknownModelError for a model that is not served; "" is none, as in vLLM."""
        if name and name not in self.config.model_names:
            known = " or ".join(self.config.model_names)
            raise UnknownModelError(f"model: expected {known}, got {name[:100]!r}")

    async def encode(self, text: str, add_special_tokens: bool = True, *, counted: bool = False) -> list[int]:
        """Tokenize a text.

        A text that is too long for the context by its characters alone is not tokenized: ContextLengthError
        says the least that it can have. With `counted` it is, as it is only counted.
        """
        most, least = self.client.info.max_model_len, -(-len(text) // self.tokenizer.max_token_chars)
        if least > most + 1 and not counted:
            raise ContextLengthError("prompt", least, most, most)
        return await self.off_loop(len(text), lambda: self.tokenizer.encode(text, add_special_tokens))

    async def with_bad_words(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with its bad words as token ids; call it once for all prompts of a body."""
        if not (words := params.bad_words):
            return params
        ids = await self.off_loop(sum(map(len, words)), lambda: encode_bad_words(words, self.tokenizer))
        return replace(params, bad_words=ids)

    async def with_checked_shape(self, params: SamplingParams, place: str) -> SamplingParams:
        """Return `params` with the shape that the engine takes; call it once for all prompts of a body.

        place    the field that asks for the shape; a ConfigError of what cannot be enforced names it

        It waits in threads of its own: a slow grammar holds up other grammars alone.
        """
        if params.structured_outputs is None:
            return params
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._shape_threads, self._shapes.checked, params, place)

    @property
    def marks(self) -> Mapping[str, int]:
        """The ids of the tokens that are no text in a grammar, by their text."""
        return self._shapes.marks

    @cached_property
    def _shapes(self) -> Shapes:
        return Shapes(self.tokenizer, self.client.info.vocab_size)

    async def close(self) -> None:
        """Close the engine's client, and end the process that checks shapes."""
        await self.client.close()
        self._shape_threads.shutdown(wait=False, cancel_futures=True)
        if "_shapes" in self.__dict__:
            await asyncio.to_thread(self._shapes.close)

    async def off_loop(self, num_chars: int, work: Callable[[], Result]) -> Result:
        """Do `work` here if the text is short, else in a thread."""
        return work() if num_chars <= INLINE_CHARS else await asyncio.to_thread(work)

    async def render_chat(self, messages: Sequence[dict[str, Any]], **arguments: Any) -> str:
        """Render the prompt of a conversation in a thread, because a template may take long."""
        template = self.config.chat_template
        return await asyncio.to_thread(self.tokenizer.render_chat, messages, template, **arguments)

    def collector(
        self, prompt: str | None, ids: list[int], params: SamplingParams, **options: Any
    ) -> OutputProcessor:
        """Make the collector of a request with a new id."""
        return OutputProcessor(new_id("req"), prompt, ids, params, self.tokenizer, **options)

    def pooled(
        self, ids: list[int], params: PoolingParams, task: str | None = None, **options: Any
    ) -> PoolingProcessor:
        """Make the collector of a request for vectors; ConfigError if the model does not do the task."""
        info = self.client.info
        own = with_task(info.pooling, params, task, info.vector_size)
        assert info.pooling is not None
        return PoolingProcessor(new_id("req"), ids, info.pooling, own, size=info.vector_size, **options)

    async def submit(
        self, collectors: Sequence[AnyCollector], arrived: float, request: Request, *, whole: bool
    ) -> RequestStream:
        """Check the size of a body's requests together, and submit them as EngineClient does."""
        self.check_size(collectors)
        if self.config.enable_log_requests:
            name = request.state.request_name
            for collector in collectors:
                logger.info(
                    "%s%s: %d prompt tokens, %s",
                    collector.request_id,
                    "" if name is None else f" of {name}",
                    len(collector.prompt_ids),
                    collector.params,
                )
        return await self.client.submit(collectors, arrived, whole=whole)

    def check_size(self, collectors: Sequence[AnyCollector]) -> None:
        """Check the requests of one body together.

        Raises ConfigError for more requests or tokens than the queue holds, more than MAX_SCORES
        log-probabilities of prompts, or numbers in vectors of their tokens, or more than MAX_LISTED token ids
        in lists.
        """
        info, count = self.client.info, sum(len(c.engine_ids) for c in collectors)
        tokens = sum(len(c.engine_ids) * len(c.prompt_ids) for c in collectors)
        for what, got, most in (
            ("requests", count, info.max_num_queued_reqs),
            ("tokens", tokens, info.max_num_queued_tokens),
        ):
            if most is not None and count > 1 and got > most:
                raise ConfigError(f"prompts x n: expected at most {most} {what} per body, got {got}")
        if (scores := sum(c.num_scores for c in collectors)) > MAX_SCORES:
            raise ConfigError(
                f"prompts x n: expected at most {MAX_SCORES} numbers about prompts per body, got {scores}"
            )
        if count > 1 and (listed := sum(c.num_listed for c in collectors)) > MAX_LISTED:
            raise ConfigError(
                f"prompts x n: expected at most {MAX_LISTED} token ids in lists per body, got {listed}"
            )


def new_id(kind: str) -> str:
    """Return a unique id that begins with `kind`."""
    return f"{kind}-{uuid.uuid4().hex}"
