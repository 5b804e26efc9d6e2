"""ThreadClient: a client of an engine in a thread of this process."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading

from qrt.serve.link.engine_client import EngineClient
from qrt.serve.link.messages import Message, ToEngine
from qrt.serve.link.router import EngineRouter
from qrt.serve.link.step_output import FromEngine

logger = logging.getLogger(__name__)


class ThreadClient(EngineClient):
    """Runs a Router in a thread and is its Port."""

    def __init__(self, router: EngineRouter) -> None:
        super().__init__()
        self.router = router
        self.info = router.info
        self._inbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop

    async def start(self) -> None:
        """See EngineClient."""
        self._loop = asyncio.get_running_loop()
        self.ready.set()
        self._thread.start()

    async def close(self) -> None:
        """See EngineClient; wait for the running step."""
        self.stop("the engine has been shut down")
        self.end()
        await asyncio.to_thread(self._thread.join)

    def end(self) -> None:
        """End the engine's thread after its step; any thread may call it."""
        self._inbox.put(None)

    def _send(self, message: Message) -> None:
        self._inbox.put(message)  # type: ignore[arg-type]

    # Called in the engine's thread, as the Router's Port:

    def _run(self) -> None:
        try:
            self.router.run(self)
        except Exception:
            logger.exception("the engine's loop failed")
        self._call(self.stop, "the engine has stopped; see the log")

    def receive(self, wait: bool) -> list[tuple[str, ToEngine]] | None:
        """As Port."""
        messages: list[tuple[str, ToEngine]] = []
        while True:
            try:
                message = self._inbox.get(block=wait and not messages)
            except queue.Empty:
                return messages
            if message is None:
                return None
            messages.append(("", message))

    def send(self, client: str, message: FromEngine) -> None:
        """As Port."""
        self._call(self._handle, message)

    def _call(self, function: object, argument: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, argument)  # type: ignore[arg-type]
        except RuntimeError:  # the event loop has been closed without `close`
            logger.debug("the event loop is gone")
