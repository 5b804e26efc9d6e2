"""AsyncEngine: the engine's loop in a thread of its own, its output as async streams.

One inbox carries requests and aborts to the loop; one wake-up of the event loop per step carries all of the
step's deltas back.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence

from qrt.config import SamplingParams
from qrt.engine.engine import Engine
from qrt.engine.output import RequestDelta
from qrt.errors import QrtError
from qrt.serve.output import CompletionDelta, RequestCollector

logger = logging.getLogger(__name__)

Item = RequestDelta | QrtError


class EngineError(QrtError):
    """The engine failed, not the request: a step went wrong, or the loop has ended."""


class AsyncEngine:
    """Drives an Engine for an asyncio event loop. Make it, `start()` it inside the loop, `close()` it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, asyncio.Queue[tuple[str, Item]]] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._stopped: EngineError | None = None  # why nothing is generated any more; set in the event loop

    def start(self) -> None:
        """Start the loop; call it where the event loop runs."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """End the loop after the current step and wait for it; requests in flight get an EngineError."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def alive(self) -> bool:
        """Whether the loop runs."""
        return self._thread.is_alive()

    async def generate(
        self, collectors: Sequence[RequestCollector]
    ) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
        """Run the requests of all `collectors`; yields (index of the collector, what a step added to it).

        Closing the iterator early aborts what still runs. Raises ConfigError when the engine refuses a
        request, EngineError when a step or the loop fails.
        """
        if self._stopped:
            raise self._stopped
        owners = {id: index for index, c in enumerate(collectors) for id in c.engine_ids}
        stream: asyncio.Queue[tuple[str, Item]] = asyncio.Queue()
        self._streams.update(dict.fromkeys(owners, stream))
        for collector in collectors:
            for engine_id, params in collector.engine_requests():
                self._submit(engine_id, collector.prompt_ids, params)
        running = set(owners)
        try:
            while running:
                engine_id, item = await stream.get()
                if isinstance(item, QrtError):
                    raise item
                if item.error:
                    raise EngineError(f"the request failed in a step: {item.error}")
                delta = collectors[owners[engine_id]].feed(item)
                if delta.finish_reason and engine_id in running:
                    running.remove(engine_id)
                    self._forget(engine_id, abort=delta.abort)
                yield owners[engine_id], delta
        finally:
            for engine_id in running:
                self._forget(engine_id, abort=True)

    def _submit(self, engine_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        def add() -> None:
            try:
                self.engine.add(engine_id, prompt_ids, params)
            except QrtError as error:
                self._deliver([(engine_id, error)])

        self._inbox.put(add)

    def _forget(self, engine_id: str, *, abort: bool) -> None:
        del self._streams[engine_id]
        if abort:
            self._inbox.put(lambda: self.engine.abort(engine_id))

    # Below: the engine's thread.

    def _run(self) -> None:
        try:
            while self._take_messages():
                self._deliver([(delta.request_id, delta) for delta in self.engine.step()])
        except Exception:
            logger.exception("the engine's loop failed")
        self._loop.call_soon_threadsafe(self._stop)

    def _take_messages(self) -> bool:
        """Run what is in the inbox, waiting for something while there is no work; False ends the loop."""
        while True:
            try:
                message = self._inbox.get(block=not self.engine.has_work)
            except queue.Empty:
                return True
            if message is None:
                return False
            message()

    def _stop(self) -> None:
        """In the event loop: fail what still waits, and what comes later."""
        self._stopped = EngineError("the engine has stopped; see the server's log")
        self._put([(engine_id, self._stopped) for engine_id in self._streams])

    def _deliver(self, items: list[tuple[str, Item]]) -> None:
        if items:
            self._loop.call_soon_threadsafe(self._put, items)

    def _put(self, items: list[tuple[str, Item]]) -> None:
        """In the event loop: hand each item to who waits for it, if anyone still does."""
        for engine_id, item in items:
            if (stream := self._streams.get(engine_id)) is not None:
                stream.put_nowait((engine_id, item))
