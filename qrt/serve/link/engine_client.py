"""EngineClient: requests to an engine as async streams, whether it runs in a process or in a thread.

stream = await client.submit(collectors)      # refused requests raise here
async for index, delta in stream: ...
stream.close()                                # aborts what still runs
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from qrt.answers.output import TextDelta
from qrt.answers.pooling.processor import PoolingProcessor
from qrt.answers.processor import OutputProcessor
from qrt.engine.schedule.output import Cause, StepDelta, merge
from qrt.engine.schedule.request import FinishReason
from qrt.errors import ConfigError, QrtError
from qrt.serve.link.messages import (
    Abort,
    Add,
    Answer,
    Ask,
    EngineInfo,
    Message,
    Ready,
    fields_of,
)
from qrt.serve.link.step_output import FromEngine, StepOutput

logger = logging.getLogger(__name__)

AnyCollector = OutputProcessor | PoolingProcessor
ANSWER_SECONDS = 10.0  # time to wait for an answer, which comes after the running step


class EngineError(QrtError):
    """A failure of the engine, not of the request: a step failed, or the engine has ended."""


class ShutdownError(EngineError):
    """The engine was told to end; another server may answer."""


class EngineLoad(NamedTuple):
    """What an engine has to do: its running and waiting requests, and the tokens of those that wait."""

    requests: int
    waiting_tokens: int


class Owner(Protocol):
    """Who is told what has become of a stream's requests."""

    def forget(self, request_ids: Collection[str], *, abort: bool, stopped: bool = False) -> None:
        """See EngineClient."""


class RequestStream:
    """An async iterator over running requests: (index of the collector, its delta).

    Deltas that arrive before the last ones are read are merged, one per request. So text for a slow client,
    or in a busy process, takes less work per token. With `whole` the text is only read at the end, and the
    collectors gather the deltas.
    """

    def __init__(self, owner: Owner, collectors: Sequence[AnyCollector], *, whole: bool = False) -> None:
        self._owner = owner
        self._collectors = collectors
        self._whole = whole
        self._owners = {id: index for index, c in enumerate(collectors) for id in c.engine_ids}
        self._running = set(self._owners)
        self._unaccepted = set(self._owners)
        self._deltas: dict[str, list[StepDelta]] = {}
        self._error: QrtError | None = None
        self._news = asyncio.Event()

    # Called for the engine:

    def accept(self, request_id: str) -> None:
        """Note that the engine has accepted the request."""
        self._unaccepted.discard(request_id)
        self._news.set()

    def put(self, delta: StepDelta) -> None:
        """Add what a step added to a request."""
        if self._whole:
            gathered = self._collectors[self._owners[delta.request_id]].buffer(delta)
            if gathered is None:
                return
            delta = gathered
        self._deltas.setdefault(delta.request_id, []).append(delta)
        self._news.set()

    def fail(self, error: QrtError) -> None:
        """Fail with `error` after the deltas that have come: a request was refused or the engine ended."""
        self._error = error
        self._news.set()

    # Called by the reader:

    async def accepted(self) -> None:
        """Wait until the engine has accepted all requests; raise the errors of `EngineClient.submit`."""
        try:
            while self._unaccepted and not self._error:
                await self._wait()
            if self._error:
                raise self._error
        except BaseException:
            self.close()
            raise

    @property
    def waiting(self) -> bool:
        """Whether a delta can be read without waiting."""
        return bool(self._running and self._deltas)

    @property
    def num_scores(self) -> int:
        """The number of log-probabilities so far."""
        return sum(collector.num_scores for collector in self._collectors)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> tuple[int, TextDelta]:
        """Return the next delta.

        ConfigError where a request's own shape ends it, EngineError when a step or the engine fails.
        """
        while self._running:
            if self._deltas:
                request_id = next(iter(self._deltas))
                return self._take(merge(self._deltas.pop(request_id)))
            if self._error:
                raise self._error
            await self._wait()
        raise StopAsyncIteration

    def _take(self, item: StepDelta) -> tuple[int, TextDelta]:
        request_id = item.request_id
        if item.error and item.cause is Cause.REQUEST:
            raise ConfigError(item.error)
        if item.error and item.cause is Cause.MODEL:
            raise EngineError(item.error)
        if item.error:
            logger.error("request %s failed in a step: %s", request_id, item.error)
            raise EngineError("the request failed in a step; the server's log says why")
        index = self._owners[request_id]
        delta = self._collectors[index].process(item)
        if delta.finish_reason and request_id in self._running:
            self._running.remove(request_id)
            self._owner.forget([request_id], abort=delta.abort, stopped=True)
        return index, delta

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()

    def close(self) -> None:
        """Abort the requests that still run."""
        if self._running:
            self._owner.forget(self._running, abort=True)
            self._running = set()


class EngineClient(ABC):
    """A client of an engine, in one event loop.

    info      describes the engine, once `ready` is set
    stopped   the error that ended the engine; None while it runs
    dead      names of engines that have died while others go on: none, there is one engine
    """

    dead: Sequence[str] = ()

    def __init__(self) -> None:
        self.info: EngineInfo
        self.ready = asyncio.Event()
        self.stopped: EngineError | None = None
        self.heard = time.monotonic()  # time of the engine's last message
        self._streams: dict[str, RequestStream] = {}
        self._told = EngineLoad(0, 0)  # by the engine, last
        self._untold: dict[str, int] = {}  # tokens of requests that it may not have counted yet
        self._answers: dict[str, asyncio.Future[bytes]] = {}

    async def submit(
        self, collectors: Sequence[AnyCollector], arrived: float | None = None, *, whole: bool = False
    ) -> RequestStream:
        """Run the requests of all `collectors` and return their stream.

        arrived   when the caller came, in seconds of the monotonic clock
        whole     as in RequestStream

        Raises ConfigError when the engine refuses a request, QueueFullError when too many wait, EngineError
        when it has failed.
        """
        if self.stopped:
            raise self.stopped
        stream, arrived = RequestStream(self, collectors, whole=whole), arrived or time.monotonic()
        for collector in collectors:
            self.add(collector, stream, arrived)
        await stream.accepted()
        return stream

    def add(self, c: AnyCollector, stream: RequestStream, arrived: float) -> None:
        """Send the engine the requests of a collector, whose deltas go to `stream`."""
        if not self._streams:
            self.heard = time.monotonic()
        for id, params in c.engine_requests():
            self._streams[id] = stream
            self._untold[id] = len(c.prompt_ids)
            own = c.generate, c.priority, c.cache_salt, c.thinking, c.pool
            self._send(Add(id, c.prompt_ids, fields_of(params), arrived, *own))

    async def ask(self, question: str) -> bytes:
        """Ask the Router a question and return its answer; EngineError when none comes."""
        if self.stopped:
            raise self.stopped
        id = uuid.uuid4().hex
        answer = self._answers[id] = asyncio.get_running_loop().create_future()
        self._send(Ask(id, question))
        try:
            return await asyncio.wait_for(answer, ANSWER_SECONDS)
        except TimeoutError:
            raise EngineError(f"the engine has not answered in {ANSWER_SECONDS:.0f} s") from None
        finally:
            del self._answers[id]

    def forget(self, request_ids: Collection[str], *, abort: bool, stopped: bool = False) -> None:
        """Drop requests that nobody waits for; `stopped` is that of Abort."""
        for request_id in request_ids:
            self._streams.pop(request_id, None)
        if abort and not self.stopped:
            self._send(Abort(list(request_ids), stopped))

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests whose streams are still read; these end with finish_reason "abort"."""
        self._send(Abort(list(request_ids)))
        for request_id in request_ids:
            if stream := self._streams.get(request_id):
                stream.put(StepDelta(request_id, finish_reason=FinishReason.ABORT))

    @property
    def num_running(self) -> int:
        """The number of requests that somebody waits for."""
        return len(self._streams)

    def owns(self, request_id: str) -> bool:
        """Return whether somebody waits for this request of the engine."""
        return request_id in self._streams

    @property
    def load(self) -> EngineLoad:
        """The engine's load as it has told it, and what was sent to it since."""
        told, untold = self._told, self._untold
        return EngineLoad(told.requests + len(untold), told.waiting_tokens + sum(untold.values()))

    @property
    def silent_seconds(self) -> float:
        """How long the engine has sent nothing although requests wait for it; 0 without requests."""
        return time.monotonic() - self.heard if self._streams else 0.0

    def tell(self, message: Message) -> None:
        """Send a message that has no answer."""
        if not self.stopped:
            self._send(message)

    @abstractmethod
    async def start(self) -> None:
        """Start; call it in the client's event loop."""

    @abstractmethod
    async def close(self) -> None:
        """Close the client; running requests get an EngineError."""

    @abstractmethod
    def _send(self, message: Message) -> None: ...

    def _handle(self, message: FromEngine) -> None:
        """Pass a message of the engine to those who wait for it, if any; call it in the event loop."""
        self.heard = time.monotonic()
        match message:
            case Ready(info=info):
                self.info = info
                self.ready.set()
            case Answer(id=id, body=body):
                if (answer := self._answers.get(id)) is not None and not answer.done():
                    answer.set_result(body)
            case StepOutput():
                self._hand_out(message)

    def _hand_out(self, output: StepOutput) -> None:
        self._told = EngineLoad(output.num_requests, output.waiting_tokens)
        for request_id in output.accepted:
            self._untold.pop(request_id, None)
            if stream := self._streams.get(request_id):
                stream.accept(request_id)
        for refusal in output.refused:
            self._untold.pop(refusal.id, None)
            if stream := self._streams.pop(refusal.id, None):
                stream.fail(refusal.error)
        for delta in output.deltas:
            if stream := self._streams.get(delta.request_id):
                stream.put(delta)

    def died(self, engine: int) -> None:
        """Note the death of the engine's process; call it in the event loop."""
        self.stop("the engine process has died")

    def stop(self, reason: str, kind: type[EngineError] = EngineError) -> None:
        """Fail all waiting and later requests; call it in the event loop."""
        if self.stopped:
            return
        self.stopped = kind(reason)
        for stream in self._streams.values():
            stream.fail(self.stopped)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self.stopped)
