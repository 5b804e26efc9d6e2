"""Orders: what rank 0 tells the others to run, as bytes on a socket.

A rank that runs the same plans has the same request table, so nothing else has to be told. Ranks never
answer.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import replace
from typing import Any, Literal

import msgspec
import numpy as np

from qrt.engine.schedule.plan import Decode, Plan

_LENGTH = struct.Struct("<I")


class Launch(msgspec.Struct, frozen=True, tag="launch"):
    """Run a whole step. With `again` its decodes are those of the plan before, and are left out."""

    plan: Plan
    again: bool


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    """Run a step up to its hidden states; `again` as in Launch."""

    plan: Plan
    again: bool


class SampleOrder(msgspec.Struct, frozen=True, tag="sample"):
    """Sample the tokens of the last Forward."""


Order = Launch | Forward | SampleOrder
OrderKind = Literal["launch", "forward", "sample"]


class OrderSender:
    """Writes orders to the sockets of all other ranks."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        self._sockets = sockets
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_array_bytes)
        self._decodes: tuple[Decode, ...] = ()

    def send(self, kind: OrderKind, plan: Plan | None = None) -> None:
        """Send an order of `kind`; "launch" and "forward" have a plan."""
        if plan is None:
            return self._write(SampleOrder())
        again = plan.decodes == self._decodes
        self._decodes = plan.decodes
        order = Launch if kind == "launch" else Forward
        self._write(order(replace(plan, decodes=()) if again else plan, again))

    def close(self) -> None:
        """End the orders."""
        for end in self._sockets:
            end.close()

    def _write(self, order: Order) -> None:
        body = self._encoder.encode(order)
        message = _LENGTH.pack(len(body)) + body
        for end in self._sockets:
            end.sendall(message)


class OrderReader:
    """Reads the orders of an OrderSender."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._decoder = msgspec.msgpack.Decoder(Order, dec_hook=_array)
        self._decodes: tuple[Decode, ...] = ()

    def read(self) -> Order | None:
        """Wait for the next order and return it, whole; None when rank 0 has closed its end."""
        length = self._bytes(_LENGTH.size)
        body = None if length is None else self._bytes(*_LENGTH.unpack(length))
        if body is None:
            return None
        order = self._decoder.decode(body)
        if isinstance(order, SampleOrder):
            return order
        if order.again:
            order = type(order)(replace(order.plan, decodes=self._decodes), True)
        self._decodes = order.plan.decodes
        return order

    def _bytes(self, count: int) -> bytearray | None:
        """Return the next `count` bytes; None at the end of the stream."""
        found = bytearray(count)
        view, have = memoryview(found), 0
        while have < count:
            got = self._end.recv_into(view[have:])
            if not got:
                return None
            have += got
        return found


def _array_bytes(value: Any) -> bytes:
    """Return the bytes of an array of a plan, which are all int32."""
    if isinstance(value, np.ndarray) and value.dtype == np.int32:
        return value.tobytes()
    raise TypeError(f"expected an int32 array, got {type(value).__name__}")


def _array(kind: Any, value: bytes) -> Any:
    return np.frombuffer(value, np.int32)
