"""Send the response of a running request: one body at the end, or server-sent events as tokens come."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException

from qrt.answers.output import TextDelta
from qrt.errors import QrtError
from qrt.serve.http.events import encode, event
from qrt.serve.http.http_errors import error_body, unexpected_error
from qrt.serve.http.service import Service
from qrt.serve.link.engine_client import RequestStream, ShutdownError

CLIENT_CLOSED_REQUEST = 499  # nginx's code; the client is gone, so the reply is not read
PING_SECONDS = 15.0  # after this silence a comment shows proxies that the stream is alive
INLINE_SCORES = 4096  # a reply with more log-probabilities is written in a thread
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


class EventReply(ABC):
    """How one API writes a reply: as one body, or as server-sent events.

    ping   what shows in a long silence that the stream is alive
    end    what ends every stream
    """

    ping = PING
    end = DONE

    @abstractmethod
    def body(self) -> Any:
        """Return the whole reply."""

    @abstractmethod
    def events(self, index: int, delta: TextDelta) -> Iterable[bytes]:
        """Return the events of one delta of collector `index`."""

    def closing(self) -> Iterable[bytes]:
        """Return the events after the last delta."""
        return ()

    def failure(self, code: int, message: str) -> Iterable[bytes]:
        """Return the events of an error on the way; `code` is its HTTP status."""
        return (event(error_body(code, message)),)


class Deadline:
    """The time limit of a request, from its arrival."""

    def __init__(self, service: Service, arrived: float) -> None:
        timeout = service.config.request_timeout
        self.at = None if timeout is None else arrived + timeout
        self.message = f"the request took more than {timeout} s (--request-timeout)"

    def left(self, most: float | None = None) -> float | None:
        """Return the seconds left, at most `most`; None if there is no limit."""
        if self.at is None:
            return most
        left = max(self.at - time.monotonic(), 0)
        return left if most is None else min(left, most)

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return self.at is not None and time.monotonic() >= self.at


async def answer_whole(
    request: Request, stream: RequestStream, deadline: Deadline, body: Callable[[], Any]
) -> Response:
    """Send `body()` at the end; abort the requests if the client goes away or the time is over."""
    try:
        async with asyncio.timeout(deadline.left()):
            finished = await _unless_disconnected(request, stream)
    except TimeoutError:
        raise HTTPException(504, deadline.message) from None
    finally:
        stream.close()
    if not finished:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    large = stream.num_scores > INLINE_SCORES
    data = await asyncio.to_thread(lambda: encode(body())) if large else encode(body())
    return Response(data, media_type="application/json")


async def _unless_disconnected(request: Request, stream: RequestStream) -> bool:
    """Read all of `stream`; stop and return False if the client goes away first."""
    task = asyncio.create_task(_drain(stream))
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return False
        task.result()
        return True
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _drain(stream: RequestStream) -> None:
    async for _ in stream:
        pass


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def answer_events(stream: RequestStream, deadline: Deadline, reply: EventReply) -> Response:
    """Send the events of each delta and of the end; an error on the way is an event too."""
    return StreamingResponse(
        _bytes(stream, deadline, reply),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


async def _bytes(stream: RequestStream, deadline: Deadline, reply: EventReply) -> AsyncIterator[bytes]:
    with contextlib.closing(stream):
        try:
            async for part in _events(stream, deadline, reply):
                yield part
        except Exception as error:
            for part in reply.failure(*_failure(error)):
                yield part
        if reply.end:
            yield reply.end


async def _events(stream: RequestStream, deadline: Deadline, reply: EventReply) -> AsyncIterator[bytes]:
    while True:
        try:
            async with asyncio.timeout(deadline.left(PING_SECONDS)):
                delta = await anext(stream)
        except StopAsyncIteration:
            break
        except TimeoutError:
            if deadline.over:
                raise HTTPException(504, deadline.message) from None
            yield reply.ping
            continue
        parts = list(reply.events(*delta))
        while stream.waiting:  # a client that reads slowly gets several tokens at a time
            parts += reply.events(*await anext(stream))
        if parts:
            yield b"".join(parts)
    for part in reply.closing():
        yield part


def _failure(error: Exception) -> tuple[int, str]:
    """Return the status and the message of an error on the way."""
    if isinstance(error, HTTPException):
        return error.status_code, str(error.detail)
    if isinstance(error, QrtError):
        return (503 if isinstance(error, ShutdownError) else 500), str(error)
    return 500, unexpected_error(error)
