"""Engine: token ids in, token ids out. Builds model, pool and loop from one config."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qrt.config import EngineConfig
from qrt.engine.generation import GenerationConfig
from qrt.engine.preflight import check_fit, check_settings, preflight
from qrt.engine.schedule.limits import Limits
from qrt.engine.schedule.output import RequestDelta
from qrt.engine.schedule.plan import Plan
from qrt.engine.schedule.scheduler import Scheduler
from qrt.engine.step.adjustments import Adjustments
from qrt.engine.step.graphs import TokenSteps, default_rows, default_tokens
from qrt.engine.step.profile import peak_step_bytes
from qrt.engine.step.runner import Launched, Runner
from qrt.engine.step.table import RequestTable
from qrt.engine.step.timeline import Timeline
from qrt.errors import ConfigError
from qrt.kernels.gpu import launches_on
from qrt.mem.manager import KVManager
from qrt.mem.sizing import (
    GIB,
    LEAST_SEQS,
    PoolSize,
    default_num_seqs,
    kv_budget_bytes,
    pool_size,
    slot_bytes,
)
from qrt.mem.storage import KVStorage
from qrt.model.decoder import Decoder
from qrt.model.loader import dummy_model, load_model
from qrt.model.smoothing import fit_smoothing
from qrt.quant.checkpoint import Checkpoint, open_checkpoint
from qrt.quant.kv import KV_FORMATS, UNQUANTIZED_KV, KVFormat
from qrt.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Engine:
    """A model and the requests it works on. One thread at a time calls it:

        engine.add("a", [1, 2, 3], SamplingParams(max_tokens=8))
        while engine.has_work:
            for delta in engine.step(): ...

    With `overlap` a step is planned and launched while the one before it runs, reading its tokens on the
    device; what that one gave is reported meanwhile. A request that ends by a token it has just drawn is then
    in one launched step too many, whose token for it is dropped.

    model         the decoder
    formats       KV format of each layer
    pool          size of the KV pool
    generation    the checkpoint's defaults
    scheduler     waiting and running requests, for counts
    """

    def __init__(
        self, config: EngineConfig, model: Decoder | None = None, *, eos_token_ids: Iterable[int] = ()
    ) -> None:
        """Load the checkpoint `config.model`, or take `model` (then nothing is read from disk).

        `eos_token_ids` (the tokenizer's) end the text beside those that the checkpoint names.
        Raises QrtError kinds as the loader and the pool do, ConfigError for a max_model_len beyond the model.
        """
        self.config = config
        self.generation = GenerationConfig()
        if model is None:
            self.config, _ = preflight(config)
            config = self.config
            model, self.generation = _load(config)
        else:
            check_settings(config)
            check_fit(config, model.config)
        self.model = model
        self.formats = _layer_formats(config, model.config.num_layers)
        max_model_len = config.max_model_len or model.config.max_position
        self._limits = Limits(
            max_model_len,
            config.max_num_seqs or _num_seqs(config, model, self.formats, max_model_len),
            config.max_num_batched_tokens,
            config.max_num_queued_reqs,
            config.max_num_queued_tokens,
        )
        named = {*model.config.eos_token_ids, *self.generation.eos_token_ids, *eos_token_ids}
        self._eos = [token for token in named if 0 <= token < model.config.vocab_size]
        with launches_on(model.device):
            self.runner = self._build_runner()
        overlap = config.overlap if config.overlap is not None else model.device.type == "cuda"
        self._depth = 2 if overlap else 1
        self._forget()
        logger.info("model: %s, on %s", model, model.device)
        logger.info("%s; at most %d run at once", self.pool, self._limits.max_num_seqs)

    def _build_runner(self) -> Runner:
        """The pool, and what works on it; steps are recorded unless that is off."""
        config, model, limits = self.config, self.model, self._limits
        quantized = any(format.rotated for format in self.formats)
        smoothing = fit_smoothing(model, self.formats) if quantized else None
        self.pool = _pool(config, model, self.formats, limits, smoothing)
        heads, dim = model.config.num_kv_heads, model.config.head_dim
        slots = self.pool.num_slots
        kv = KVStorage(self.formats, slots, heads, dim, model.dtype, model.device, smoothing)
        table = RequestTable(limits.max_num_seqs, limits.max_model_len, kv.pad_slot, model.device)
        steps = None
        if model.device.type == "cuda":  # a CPU gains nothing by padding
            sizes = _capture_sizes(config, limits)
            self._limits = replace(limits, step_sizes=tuple(sizes[1]))
            steps = TokenSteps(model, kv, table, *sizes, attend_cache=config.attend_cache)
            if not config.enforce_eager:
                steps.record()
        adjustments = Adjustments(model.config.vocab_size, self._eos, model.device)
        return Runner(model, kv, table, adjustments, attend_cache=config.attend_cache, token_steps=steps)

    def _forget(self) -> None:
        """No request, no launched step, an empty pool."""
        config = self.config
        self.scheduler = Scheduler(
            KVManager(self.pool.num_slots, prefix_caching=config.enable_prefix_caching),
            self._limits,
            self._eos,
            config.seed,
            conservative=config.admission == "conservative",
        )
        self._launched: deque[tuple[Plan, Launched]] = deque()

    @property
    def max_model_len(self) -> int:
        """Most tokens of one request, prompt and output together."""
        return self.scheduler.limits.max_model_len

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's K and V, all layers, scales included."""
        config = self.model.config
        return slot_bytes(self.formats, config.num_kv_heads, config.head_dim, self.model.dtype)

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, or a step does, so that `step` is worth calling."""
        return self.scheduler.has_work or bool(self._launched)

    def validate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, generate: bool = True
    ) -> NDArray[np.int32]:
        """The prompt as an array, when `add` will take it. Changes nothing; any thread may ask.

        Raises ConfigError when the prompt is empty or too long, or a token id is outside the vocabulary.
        """
        ids, vocab = _array(prompt_ids), self.model.config.vocab_size
        for name, given in (
            ("prompt", ids),
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("logit_bias", tuple(params.logit_bias)),
            ("bad_words", [t for word in params.bad_words if not isinstance(word, str) for t in word]),
        ):
            values = given if given is ids else np.array(given, object)
            wrong = values[(values < 0) | (values >= vocab)]
            if wrong.size:
                raise ConfigError(
                    f"{name}: token id {wrong[0]}, wanted 0 to {vocab - 1}, the model's vocabulary"
                )
        self._check_allowed(params)
        self._limits.end(ids.size, params.max_tokens if generate else 0, self.pool.num_slots)
        return ids.astype(np.int32)

    def _check_allowed(self, params: SamplingParams) -> None:
        """ConfigError where no token may be drawn, at first or ever."""
        allowed = params.allowed_token_ids
        banned = {word[-1] for word in params.bad_words if isinstance(word, tuple)}
        if params.min_tokens:
            banned |= {*params.stop_token_ids, *(() if params.ignore_eos else self._eos)}
        if banned.issuperset(range(self.model.config.vocab_size) if allowed is None else allowed):
            left = "no token" if allowed is None else f"none of {list(allowed)[:8]}"
            raise ConfigError(
                "allowed_token_ids: the ends of bad_words, or min_tokens and what ends the text, may leave "
                f"{left}; wanted one that may always be drawn"
            )

    def add(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        generate: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queue a request (`params.n` is the caller's business); generate=False only scores the prompt.

        The smallest `priority` runs first under that scheduling policy; a request finds cached prefixes only
        of requests with its `cache_salt`. Raises ConfigError as `validate` does, and when the id is in use;
        QueueFullError when as many requests or tokens wait as may.
        """
        if not isinstance(priority, int):
            raise ConfigError(f"priority: got {priority!r}, wanted an integer")
        if priority and self.config.scheduling_policy != "priority":
            raise ConfigError(
                f"priority: got {priority}, but requests run in the order they come; set scheduling_policy "
                "to 'priority' (--scheduling-policy priority), or leave it out"
            )
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise ConfigError(f"cache_salt: got {cache_salt!r}, wanted text, not empty")
        ids = self.validate(prompt_ids, params, generate=generate)
        if any(isinstance(word, str) for word in params.bad_words):
            raise ConfigError("bad_words: got text, wanted token ids; LLM and the server encode them")
        self.scheduler.add(
            request_id, ids, params, generate=generate, priority=priority, cache_salt=cache_salt
        )

    def abort(self, request_id: str) -> None:
        """Forget a request; nothing happens when it is not, or no longer, there."""
        self.scheduler.abort(request_id)

    def step(self) -> list[RequestDelta]:
        """Launch the next step, and say what the oldest launched one added to each request once there are
        `depth` of them, or nothing can be launched.

        An error in a step ends the requests that took part in it (`RequestDelta.error`); the others go on.
        """
        plan, deltas = self.scheduler.plan(), []
        if plan is not None:
            try:
                self._launched.append((plan, self.runner.launch(plan)))
            except Exception as error:
                while self._launched:  # what is known of its requests comes first
                    deltas += self._finish()
                return deltas + self._give_up(plan, error)
        while self._launched and (plan is None or len(self._launched) >= self._depth):
            deltas += self._finish()
        return deltas

    def clear(self) -> None:
        """Forget all requests and cached prefixes, wherever an exception that is no QrtError (Ctrl-C, say)
        has left them; what has been launched is waited for."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        self._forget()

    def start_timeline(self) -> Timeline:
        """Note from now on which steps the GPU runs, how long they take and how long it waits."""
        self.runner.timeline = Timeline()
        return self.runner.timeline

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes that no running request reads."""
        self.scheduler.kv.reset()

    def _finish(self) -> list[RequestDelta]:
        """Wait for the oldest launched step and take in what it gave."""
        plan, launched = self._launched.popleft()
        try:
            result = launched.result()
        except Exception as error:
            return self._give_up(plan, error)
        return self.scheduler.commit(plan, result)

    def _give_up(self, plan: Plan, error: Exception) -> list[RequestDelta]:
        logger.error("a step failed; its %d requests are given up", len(plan.works), exc_info=error)
        return self.scheduler.fail(f"{type(error).__name__}: {error}".splitlines()[0])


def _load(config: EngineConfig) -> tuple[Decoder, GenerationConfig]:
    """The checkpoint's model and defaults."""
    device = _device(config)
    dummy = config.load_format == "dummy"
    checkpoint = open_checkpoint(config.model, weights=not dummy)
    neutral = config.generation_config == "vllm"
    generation = GenerationConfig.read(Path(checkpoint.path), sampling=not neutral)
    load = dummy_model if dummy else load_model
    return load(checkpoint, device=device, dtype=_dtype(config, checkpoint, device)), generation


def _array(prompt_ids: Sequence[int]) -> NDArray[Any]:
    """ConfigError for what is no list of integers."""
    try:
        ids = np.asarray(prompt_ids)
    except ValueError:  # lists of different lengths
        ids = np.empty((0, 0), object)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ConfigError(f"prompt: got {str(prompt_ids)[:50]}, wanted a list of token ids")
    return ids


def _num_seqs(config: EngineConfig, model: Decoder, formats: list[KVFormat], max_model_len: int) -> int:
    """Requests that run at once, unless told."""
    if model.device.type != "cuda":
        return LEAST_SEQS
    shape = model.config
    budget = kv_budget_bytes(
        model.device,
        gpu_memory_utilization=config.gpu_memory_utilization,
        reserve_bytes=0,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
    )
    per_slot = slot_bytes(formats, shape.num_kv_heads, shape.head_dim, model.dtype)
    return default_num_seqs(budget, per_slot, max_model_len)


def _capture_sizes(config: EngineConfig, limits: Limits) -> tuple[Sequence[int], Sequence[int]]:
    """Sizes of recorded steps: rows that decode, and tokens of steps with prompts."""
    rows = config.cudagraph_capture_sizes or default_rows(limits.max_num_seqs)
    return rows, default_tokens(limits.max_num_batched_tokens)


def _device(config: EngineConfig) -> torch.device:
    """ConfigError for one that this machine has not."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = ("cuda" if count else "cpu") if config.device is None else config.device
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= count:
        found = f"cuda:0 to cuda:{count - 1}, or cpu" if count else "cpu: torch finds no GPU here"
        raise ConfigError(f"device: got {name!r}, wanted {found}")
    return device


def _dtype(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    stored = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "bfloat16"
    if device.type == "cpu":  # torch's packed integer products want bf16; else the reference multiplies
        packed = bool(checkpoint.quantization) and stored == "bfloat16"
        return torch.bfloat16 if packed and _is_bf16_fast() else torch.float32
    if stored not in DTYPES:
        raise ConfigError(f"dtype: the checkpoint's is {stored!r}; choose {' or '.join(DTYPES)} with --dtype")
    return DTYPES[stored]


def _is_bf16_fast() -> bool:
    """Whether this CPU's matrix products in bf16 are not emulated."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _layer_formats(config: EngineConfig, num_layers: int) -> list[KVFormat]:
    """The format of each layer."""
    skipped = KV_FORMATS["fp16"]
    format = skipped if config.kv in UNQUANTIZED_KV else KV_FORMATS[config.kv]
    return [skipped if layer in config.kv_skip_layers else format for layer in range(num_layers)]


def _pool(
    config: EngineConfig,
    model: Decoder,
    formats: list[KVFormat],
    limits: Limits,
    smoothing: list[torch.Tensor] | None,
) -> PoolSize:
    """The pool that fits beside the weights and the largest step."""
    measured = model.device.type == "cuda" and config.kv_cache_memory_bytes is None
    recorded = _capture_sizes(config, limits)
    reserve = peak_step_bytes(model, formats, limits, smoothing, *recorded) if measured else 0
    if measured:
        tokens = limits.max_num_batched_tokens
        logger.info("activations and graphs: %.2f GiB for steps of %d tokens", reserve / GIB, tokens)
    budget = kv_budget_bytes(
        model.device,
        gpu_memory_utilization=config.gpu_memory_utilization,
        reserve_bytes=reserve,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
    )
    return pool_size(
        formats,
        model.config.num_kv_heads,
        model.config.head_dim,
        model.dtype,
        budget_bytes=budget,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
    )
