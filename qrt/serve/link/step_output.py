"""StepOutput: what a step added to the requests of one API process, with the engine's StepDeltas in it."""

from __future__ import annotations

from typing import Any, get_origin

import msgspec
import numpy as np

from qrt.engine.schedule.output import StepDelta
from qrt.serve.link.messages import Answer, Message, Ready, Refusal


class StepOutput(Message):
    """What happened to the requests of one API process since the last StepOutput.

    num_requests, waiting_tokens   the engine's load, for a client that has asked for it (`Hello.balances`):
                                   requests of all clients that run or wait, tokens of those that wait
    """

    accepted: list[str]
    refused: list[Refusal]
    deltas: list[StepDelta]
    num_requests: int = 0
    waiting_tokens: int = 0


FromEngine = Ready | StepOutput | Answer


def _decode_array(kind: type, value: Any) -> Any:
    if get_origin(kind) is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(bytearray(data), dtype).reshape(shape)  # a copy, which may be written to
    raise NotImplementedError(f"{kind.__name__} is no part of a message")


_from_engine = msgspec.msgpack.Decoder(FromEngine, dec_hook=_decode_array)


def decode_from_engine(data: bytes) -> FromEngine:
    """Decode a message of the engine; msgspec.DecodeError if it is none."""
    return _from_engine.decode(data)
