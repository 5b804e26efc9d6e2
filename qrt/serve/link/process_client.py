"""ProcessClient: a client of an engine in another process, over a socket."""

from __future__ import annotations

import asyncio

from qrt.serve.link.engine_client import EngineClient, ShutdownError
from qrt.serve.link.messages import Hello, Message
from qrt.serve.link.sockets import ClientSocket
from qrt.serve.link.step_output import FromEngine, decode_from_engine


class ProcessClient(EngineClient):
    """Connects to the socket at `path`; `name` tells this client from others, `balances` is Hello's."""

    def __init__(self, path: str, name: str, *, balances: bool = False) -> None:
        super().__init__()
        self._path, self._name, self._balances = path, name, balances
        self._socket: ClientSocket[FromEngine]
        self._reader: asyncio.Task[None]

    async def start(self) -> None:
        """See EngineClient."""
        self._socket = ClientSocket(self._path, self._name, decode_from_engine)
        self._send(Hello(self._balances))
        self._reader = asyncio.create_task(self._read())

    async def close(self) -> None:
        """See EngineClient."""
        self.stop("the server is shutting down", ShutdownError)
        self._reader.cancel()
        self._socket.close()

    def _send(self, message: Message) -> None:
        self._socket.send(message)

    async def _read(self) -> None:
        while True:
            self._handle(await self._socket.receive())
