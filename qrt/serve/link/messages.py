"""What API processes and the engine process say to each other: typed msgspec structs, never pickle.

Torch-free, so that the supervisor need not load it.

An API process tells the engine Hello once, then Add, Abort, Ask and Failed. The engine replies with Ready,
one `step_output.StepOutput` a step, and Answer. The supervisor says Gone when an API process dies.
"""

from __future__ import annotations

from typing import Any

import msgspec

from qrt.sampling_params import SamplingParams


class Message(msgspec.Struct, tag=True, array_like=True):
    """Base of all messages."""


class Hello(Message):
    """An API process is there; answered with Ready as soon as the model is loaded."""


class Add(Message):
    """Queue a request. `params` are the fields of SamplingParams; `arrived` is when the API process got it,
    in seconds of the machine's monotonic clock, which all processes share.
    generate=False only scores the prompt; priority and cache_salt as `Engine.add` has them."""

    id: str
    prompt_ids: list[int]
    params: dict[str, Any]
    arrived: float
    generate: bool = True
    priority: int = 0
    cache_salt: str | None = None


class Abort(Message):
    """End requests that nobody waits for; `stopped`: because their text has reached a stop string."""

    ids: list[str]
    stopped: bool = False


class Ask(Message):
    """A question by name (`qrt.serve.link.router.QUESTIONS`); answered with Answer under the same id."""

    id: str
    question: str


class Failed(Message):
    """An HTTP request was answered with an error, for the counters."""

    code: int


class Gone(Message):
    """The API process of that name has died: end its requests."""

    client: str


class EngineInfo(Message):
    """What a server says about its engine; fixed once the model is loaded.

    sampling         the fields of the checkpoint's default SamplingParams that differ from qrt's
    max_new_tokens   the checkpoint's, which is max_tokens where a request names none, and the most it may be
    """

    model: str
    weight_scheme: str
    weight_bytes: int
    dtype: str
    device: str
    kv: str
    kv_bytes_per_token: int
    pool_tokens: int
    pool_bytes: int
    max_model_len: int
    max_num_seqs: int
    max_num_queued_reqs: int | None
    max_num_queued_tokens: int | None
    vocab_size: int
    sampling: dict[str, Any]
    max_new_tokens: int | None


class Ready(Message):
    """The engine runs."""

    info: EngineInfo


class Refusal(msgspec.Struct, array_like=True, frozen=True):
    """A request that the engine does not take: it is wrong, or (`busy`) the queue is full."""

    id: str
    message: str
    busy: bool = False


class Answer(Message):
    """To an Ask."""

    id: str
    body: bytes


ToEngine = Hello | Add | Abort | Ask | Failed | Gone


def fields_of(params: SamplingParams) -> dict[str, Any]:
    """The fields of `params`, as Add carries them."""
    return {name: getattr(params, name) for name in params.__dataclass_fields__}


def params_of(fields: dict[str, Any]) -> SamplingParams:
    """Back again: the socket makes lists of tuples."""
    words = [word if isinstance(word, str) else tuple(word) for word in fields.get("bad_words", ())]
    return SamplingParams(**{**fields, "bad_words": tuple(words)})


def _encode_tensor(value: Any) -> Any:
    """A tensor as dtype, shape and bytes; see `qrt.serve.link.step_output`."""
    array = value.cpu().contiguous().numpy()
    return str(array.dtype), array.shape, array.tobytes()


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_tensor)
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_ready = msgspec.msgpack.Decoder(Ready)


def encode(message: Message) -> bytes:
    """For the socket."""
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """What an API process or the supervisor sent; msgspec.DecodeError for anything else."""
    return _to_engine.decode(data)


def decode_ready(data: bytes) -> Ready:
    """What the engine answers to the supervisor."""
    return _ready.decode(data)
