"""StepOutput: what a step added to the requests of one API process, with the engine's StepDeltas in it."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

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


def _decode_tensor(kind: type, value: Any) -> Any:
    if kind is torch.Tensor:
        name, shape, data = value
        dtype = getattr(torch, name)
        flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(shape)
    raise NotImplementedError(f"{kind.__name__} is no part of a message")


_from_engine = msgspec.msgpack.Decoder(FromEngine, dec_hook=_decode_tensor)


def decode_from_engine(data: bytes) -> FromEngine:
    """Decode a message of the engine; msgspec.DecodeError if it is none."""
    return _from_engine.decode(data)
