"""Messages between API processes and the engine process: typed msgspec structs, never pickle.

They do not need torch, so the supervisor does not load it.

An API process tells the engine Hello once, then Add, Abort, Ask and Failed. The engine replies with Ready,
one `step_output.StepOutput` a step, and Answer. The supervisor says Gone when an API process dies.
"""

from __future__ import annotations

from typing import Any

import msgspec

from qrt.arch.pooling import Pooling
from qrt.errors import ConfigError, ContextLengthError, QrtError, QueueFullError
from qrt.request.sampling import SamplingParams
from qrt.request.thinking import Thinking


class Message(msgspec.Struct, tag=True, array_like=True):
    """The base of all messages."""


class Hello(Message):
    """An API process has started; the answer is Ready, as soon as the model is loaded.

    balances   it chooses between engines, and wants to hear of this one's load
    """

    balances: bool = False


class Add(Message):
    """Queue a request.

    params    the fields of SamplingParams
    arrived   when the API process got it, in seconds of the monotonic clock, which all processes share
    generate, priority, cache_salt, thinking, pool   as in `Engine.add`
    """

    id: str
    prompt_ids: list[int]
    params: dict[str, Any]
    arrived: float
    generate: bool = True
    priority: int = 0
    cache_salt: str | None = None
    thinking: Thinking | None = None
    pool: str | None = None


class Abort(Message):
    """End requests that nobody waits for; `stopped` if their text has reached a stop string."""

    ids: list[str]
    stopped: bool = False


class Ask(Message):
    """Ask a question by name (`qrt.serve.link.router.QUESTIONS`); the Answer has the same id."""

    id: str
    question: str


class Failed(Message):
    """Count an HTTP request that got an error."""

    code: int


class Gone(Message):
    """End the requests of an API process that has died."""

    client: str


class EngineInfo(Message):
    """The facts of a loaded engine that its server reports.

    sampling         the fields of the checkpoint's default SamplingParams that differ from qrt's
    max_new_tokens   the checkpoint's: the default of max_tokens, and its maximum
    concurrency      requests of `max_model_len` tokens that fit into the KV pool
    pooling          how the model pools; None: it generates
    vector_size      numbers in one vector of a model that pools
    kv_windows       what layers with windows keep, for the line at start
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
    concurrency: float
    kv_windows: str
    max_model_len: int
    max_num_seqs: int
    max_num_queued_reqs: int | None
    max_num_queued_tokens: int | None
    vocab_size: int
    sampling: dict[str, Any]
    max_new_tokens: int | None
    pooling: Pooling | None = None
    vector_size: int = 0


class Ready(Message):
    """The engine is ready."""

    info: EngineInfo


class Refusal(msgspec.Struct, array_like=True, frozen=True):
    """A request that the engine refuses: it is wrong, or (`busy`) the queue is full.

    too_long   what a ContextLengthError is made of, where it is one
    """

    id: str
    message: str
    busy: bool = False
    too_long: tuple[str, int, int, int, str] | None = None

    @classmethod
    def of(cls, id: str, error: QrtError) -> Refusal:
        """Make the message of an error."""
        too_long = error.args if isinstance(error, ContextLengthError) else None
        return cls(id, str(error), isinstance(error, QueueFullError), too_long)

    @property
    def error(self) -> QrtError:
        """The error that the engine raised."""
        if self.too_long is not None:
            return ContextLengthError(*self.too_long)
        return QueueFullError(self.message) if self.busy else ConfigError(self.message)


class Answer(Message):
    """The answer to an Ask."""

    id: str
    body: bytes


ToEngine = Hello | Add | Abort | Ask | Failed | Gone


def fields_of(params: SamplingParams) -> dict[str, Any]:
    """Return the fields of `params` for Add."""
    return {name: getattr(params, name) for name in params.__dataclass_fields__}


def params_of(fields: dict[str, Any]) -> SamplingParams:
    """Make SamplingParams of the fields in Add; the socket has turned their tuples into lists."""
    words = [word if isinstance(word, str) else tuple(word) for word in fields.get("bad_words", ())]
    return SamplingParams(**{**fields, "bad_words": tuple(words)})


def _encode_array(value: Any) -> Any:
    """Turn an array into dtype, shape and bytes; see `qrt.serve.link.step_output`."""
    return str(value.dtype), value.shape, value.tobytes()


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_ready = msgspec.msgpack.Decoder(Ready)


def encode(message: Message) -> bytes:
    """Encode a message for the socket."""
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """Decode a message of an API process or the supervisor; msgspec.DecodeError if it is none."""
    return _to_engine.decode(data)


def decode_ready(data: bytes) -> Ready:
    """Decode the engine's answer to the supervisor."""
    return _ready.decode(data)
