"""Connection: uvicorn's HTTP/1.1 protocol with the limits that uvicorn leaves to a proxy.

A connection whose header or body is too large gets an error and is closed before anything is parsed. A
connection that sends its request too slowly, or does not read its reply, is closed without one.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from qrt.serve.http.http_errors import error_body
from qrt.serve.settings import MAX_BODY_BYTES, MAX_HEADER_BYTES, MAX_HEADERS

REQUEST_SECONDS = 20.0  # time for a request's header and body to arrive, from its first byte
LINGER_SECONDS = 5.0  # time for a refused client to finish sending; else it would not see the error
UPGRADE = re.compile(rb"(\r\n)upgrade(?=[ \t]*:)", re.IGNORECASE)
HOST = re.compile(rb"([\w.~%!$&'()*+,;=-]*|\[[\w:.%~-]+\])(:[0-9]*)?")
MAX_PIPELINED = 64  # most requests of a connection that wait for a reply
READ_SECONDS = 60.0  # time for a client to read on, once the buffers between it and us are full


class UnchunkedCycle(RequestResponseCycle):
    """A request of an HTTP/1.0 client, which has no chunks: its reply ends when the connection closes."""

    unsized = False

    async def send(self, message: Any) -> None:
        """See ASGI. A body without a Content-Length is sent without chunks."""
        if message["type"] == "http.response.start":
            self.unsized = b"content-length" not in {name.lower() for name, _ in message.get("headers", [])}
            self.chunked_encoding = False if self.unsized else None
        elif self.unsized:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class Connection(HttpToolsProtocol):
    """The connection of one client."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.url = b""  # uvicorn sets it only where a request begins
        self._header_bytes = 0  # bytes of a header, or bytes after the last byte of a body
        self._header_end = b""  # the header's last bytes so far
        self._body_bytes = 0
        self._in_header = True
        self._refused = False
        self._cycles: list[Any] = []  # requests that may still wait for a reply
        self._request_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer: a client may connect and send nothing."""
        super().connection_made(transport)
        self._request_timer = self._timer(REQUEST_SECONDS)

    def connection_lost(self, error: Exception | None) -> None:
        """End the timers and all requests; uvicorn ends only the last request."""
        self._cancel_timers()
        super().connection_lost(error)
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Count the bytes of the header before the parser stores them.

        A chunk's extensions and trailers are counted too.
        """
        if self._refused:
            return
        if self._in_header:
            seen = self._header_end + data
            self._header_bytes += len(data)
            too_large = self._header_bytes > MAX_HEADER_BYTES + _body_part(seen)
            self._header_end = seen[-3:]
        else:
            too_large = self._header_bytes > MAX_HEADER_BYTES
            self._header_bytes += len(data)
        if too_large:
            self._refuse(431, f"the header is larger than {MAX_HEADER_BYTES} bytes")
            return
        super().data_received(_without_upgrade(data) if self._in_header else data)

    def on_message_begin(self) -> None:
        """Start the timer of the next request."""
        super().on_message_begin()
        if self._request_timer is None:
            self._request_timer = self._timer(REQUEST_SECONDS)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count the headers, and refuse a Content-Length that is too large.

        Trailers are dropped: they would change headers that have been read already, such as the key.
        """
        if not self._in_header:
            return
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refuse(431, f"more than {MAX_HEADERS} headers")
        elif name.lower() == b"content-length" and value.isdigit() and int(value) > MAX_BODY_BYTES:
            self._refuse(413, f"body: expected at most {MAX_BODY_BYTES} bytes, got {int(value)}")

    def on_headers_complete(self) -> None:
        """Check the host and start to count the body; a refused request reaches no route."""
        if not self._refused:
            self._check_host()
        self._in_header, self._header_bytes = False, 0
        if self._refused:
            return
        super().on_headers_complete()
        if self.parser.get_http_version() < "1.1":
            self.cycle.__class__ = UnchunkedCycle  # uvicorn has already made and started the cycle
            self.cycle.waiting_for_100_continue = self.cycle.keep_alive = False
        self._cycles = [cycle for cycle in (*self._cycles, self.cycle) if not cycle.response_complete]
        if len(self._cycles) > MAX_PIPELINED:
            self._refused = True
            self.transport.abort()

    def _check_host(self) -> None:
        """Refuse what RFC 9112 refuses: no Host, except by HTTP/1.0, several, or one that is no host."""
        hosts = [value for name, value in self.headers if name == b"host"]
        least = 0 if self.parser.get_http_version() < "1.1" else 1
        if not least <= len(hosts) <= 1:
            self._refuse(400, f"Host: expected one in the header, got {len(hosts) or 'none'}")
        elif hosts and not HOST.fullmatch(hosts[0]):
            self._refuse(400, f"Host: expected a name or an address, got {hosts[0].decode('latin-1')[:50]!r}")

    def on_body(self, body: bytes) -> None:
        """Count the body's bytes, also if its length was not announced."""
        self._body_bytes += len(body)
        self._header_bytes = 0
        if self._body_bytes > MAX_BODY_BYTES:
            self._refuse(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the request's timer: the request is complete, and its reply may take long."""
        self._in_header, self._header_bytes, self._header_end, self._body_bytes = True, 0, b"", 0
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None
        if not self._refused:
            super().on_message_complete()

    def pause_writing(self) -> None:
        """Start the timer of a client that does not read; it has READ_SECONDS."""
        super().pause_writing()
        self._read_timer = self._timer(READ_SECONDS)

    def resume_writing(self) -> None:
        """Stop the timer of a client that reads again."""
        super().resume_writing()
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        self._refuse(400, msg)

    def _refuse(self, code: int, message: str) -> None:
        """Send an error at once, and close the connection."""
        if self._refused:
            return
        self._refused = True
        own = None if self._in_header else self.cycle
        if any(cycle is not own and not cycle.response_complete for cycle in self._cycles):
            self.transport.abort()  # the client would take the error for an earlier request's reply
            return
        if self.cycle is not None and not self.cycle.response_complete:  # this request's body is too large
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.abort()
                return
        path = self.url.partition(b"?")[0].decode("latin-1")
        body = json.dumps(error_body(code, message, path=path)).encode()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(
            body
        )
        self.transport.write(STATUS_LINE[code] + head + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._cancel_timers()
        self._request_timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _timer(self, seconds: float) -> asyncio.TimerHandle:
        abort: Callable[[], None] = self.transport.abort
        return self.loop.call_later(seconds, abort)

    def _cancel_timers(self) -> None:
        for timer in (self._request_timer, self._read_timer):
            if timer is not None:
                timer.cancel()
        self._request_timer = self._read_timer = None


def _without_upgrade(data: bytes) -> bytes:
    """Rename the Upgrade header in the request head that `data` begins with.

    The server accepts no upgrade, but Java's client offers one (h2c) with every request, and the parser would
    then leave the body unread.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return UPGRADE.sub(rb"\1x-grade", head) + end + rest


def _body_part(data: bytes) -> int:
    """Return how many bytes of `data` follow the end of a header in it; 0 if none ends."""
    end = data.find(b"\r\n\r\n")
    return 0 if end < 0 else len(data) - end - 4
