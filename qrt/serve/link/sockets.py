"""The zmq sockets between the processes: a ROUTER in the engine, a DEALER in each client, over ipc.

Sending never blocks: a message is dropped when its receiver is gone. The tokens that requests may have bound
the messages that are queued for an API process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import zmq
import zmq.asyncio

from qrt.serve.link.messages import Message, ToEngine, decode_to_engine, encode

IDLE_MS = 1000  # longest sleep of an idle engine
RECONNECT_MS = 20  # between a client's tries to reach an engine that loads


Received = TypeVar("Received")


class EnginePort:
    """The engine's end: the Router's Port over the ipc socket at `path`."""

    def __init__(self, path: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.bind(f"ipc://{path}")
        os.chmod(path, 0o600)

    def __enter__(self) -> EnginePort:
        return self

    def __exit__(self, *error: object) -> None:
        self._context.destroy(linger=200)

    def receive(self, wait: bool) -> list[tuple[str, ToEngine]] | None:
        """As Port."""
        if wait and not self._socket.poll(IDLE_MS):
            return []
        messages: list[tuple[str, ToEngine]] = []
        while True:
            try:
                client, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.append((client.decode(), decode_to_engine(data)))

    def send(self, client: str, message: Message) -> None:
        """As Port."""
        self._socket.send_multipart([client.encode(), encode(message)])


class ClientSocket(Generic[Received]):
    """A client's end, used in its event loop."""

    def __init__(self, path: str, name: str, decode: Callable[[bytes], Received]) -> None:
        self._decode = decode
        self._context = zmq.asyncio.Context()
        self._socket: Any = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.IDENTITY, name.encode())
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.connect(f"ipc://{path}")

    def send(self, message: Message) -> None:
        """Queue a message without waiting."""
        self._socket.send(encode(message))

    async def receive(self) -> Received:
        """Wait for the next message and return it."""
        return self._decode(await self._socket.recv())

    def close(self) -> None:
        """Close the socket and drop queued messages."""
        self._context.destroy(linger=0)
