"""Every setting, frozen and validated where it is made; the only place that reads the environment."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeGuard

from qrt.errors import ConfigError


class KernelBackend(Enum):
    """Which implementation an op runs."""

    AUTO = "auto"  # Triton on CUDA tensors, the torch reference on CPU tensors
    REF = "ref"  # the reference everywhere
    TRITON = "triton"  # Triton everywhere (on CPU tensors: with TRITON_INTERPRET=1)


@dataclass(frozen=True)
class Environment:
    """The environment variables qrt reads, read once."""

    kernel_backend: KernelBackend = KernelBackend.AUTO
    data_folder: str | None = None
    api_key: str | None = None

    @classmethod
    def read(cls) -> Environment:
        """From QRT_KERNEL_BACKEND, QRT_DATA and QRT_API_KEY; an unknown backend is a ConfigError."""
        name = os.environ.get("QRT_KERNEL_BACKEND", "auto")
        known = [backend.value for backend in KernelBackend]
        if name not in known:
            raise ConfigError(f"QRT_KERNEL_BACKEND: got {name!r}, wanted one of {', '.join(known)}")
        return cls(KernelBackend(name), os.environ.get("QRT_DATA"), os.environ.get("QRT_API_KEY"))


ENV = Environment.read()

MAX_LOGPROBS = 20  # per token, as OpenAI and vLLM: a request cannot ask for a whole vocabulary per position
GREEDY_TEMPERATURE = 1e-5  # below this, logits / temperature overflows where it still changes anything


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is built from. `None` and "auto" are settled by the engine from model and device.

    model                    checkpoint folder, or "tiny" for the bundled one
    kv                       KV format: "auto" (unquantized), "fp16", "bf16", "int8", "int4"
    dtype                    activations: "auto" is the checkpoint's on a GPU; on a CPU float32, or bf16 for a
                             quantized checkpoint that is stored in it where the CPU multiplies it fast
    max_model_len            most tokens of one request, prompt and output together
    max_num_seqs             most requests that run at once
    max_num_batched_tokens   most tokens of one step; longer prompts are prefilled in chunks
    gpu_memory_utilization   share of the GPU's memory that weights, activations and KV may take
    kv_cache_memory_bytes    KV memory, instead of what `gpu_memory_utilization` leaves
    attend_cache             prefill reads the chunk's own K/V back from the cache too, so that a perplexity
                             sees the KV format's loss (served prefill attends the chunk's raw K/V)
    enforce_eager            record no CUDA graphs: slower steps, an earlier start
    cudagraph_capture_sizes  decodes of a recorded step (None: 1, 2, 4, then every 8 to 256)
    """

    model: str
    tokenizer: str | None = None
    kv: str = "auto"
    dtype: str = "auto"
    device: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    attend_cache: bool = False
    enforce_eager: bool = False
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, ("auto", "float32", "float16", "bfloat16"))
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            _at_least(name, getattr(self, name), 1)
        for name in ("max_model_len", "kv_cache_memory_bytes"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        for size in self.cudagraph_capture_sizes or ():
            _at_least("cudagraph_capture_sizes", size, 1)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization: got {self.gpu_memory_utilization}, wanted above 0 and at most 1"
            )


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded; vLLM's names and meanings.

    temperature 0 is greedy; top_k 0 or -1 and top_p 1 are off; `seed` makes a request reproducible whatever
    it is batched with. max_tokens None is all that the context leaves; before `min_tokens` nothing that ends
    the text is drawn. `stop` strings end the text (which is cut before them unless
    `include_stop_str_in_output`); `stop_token_ids` end it like EOS. `logprobs` and `prompt_logprobs` ask for
    the log probability of every output or prompt token (0 = the token's own only, n = also the n likeliest).
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | list[int] = field(default=())
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _at_least("n", self.n, 1)
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature: got {self.temperature!r}, wanted 0 or more")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p: got {self.top_p!r}, wanted above 0 and at most 1")
        _at_least("top_k", self.top_k, -1)
        if self.seed is not None and (not _is_integer(self.seed) or not -(2**63) <= self.seed < 2**63):
            raise ConfigError(f"seed: got {self.seed!r}, wanted an integer of 64 bits")
        _at_least("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _at_least("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise ConfigError(
                    f"min_tokens: got {self.min_tokens}, wanted at most max_tokens {self.max_tokens}"
                )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 0)
                if getattr(self, name) > MAX_LOGPROBS:
                    raise ConfigError(f"{name}: got {getattr(self, name)}, wanted at most {MAX_LOGPROBS}")
        for token in self.stop_token_ids:
            _at_least("stop_token_ids", token, 0)
        if any(not isinstance(text, str) or not text for text in stop):
            raise ConfigError(f"stop: got {self.stop!r}, wanted non-empty strings")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whatever it was given as."""
        return tuple(self.stop or ())


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _at_least(name: str, value: object, low: int) -> None:
    if not _is_integer(value) or value < low:
        raise ConfigError(f"{name}: got {value!r}, wanted an integer of at least {low}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name}: got {value!r}, wanted one of {', '.join(known)}")
