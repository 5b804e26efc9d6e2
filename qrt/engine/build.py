"""Build what an engine runs on: the model, the KV pool beside it, and the runner of both."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from qrt.arch.pooling import Pooling, overridden
from qrt.arch.read import read_arch
from qrt.arch.shard import Shard
from qrt.config import EngineConfig
from qrt.engine.generation import GenerationConfig
from qrt.engine.preflight import Preflight, check_fit, check_settings, preflight
from qrt.engine.schedule.limits import Limits
from qrt.engine.step.adjustments import Adjustments
from qrt.engine.step.graphs import TokenSteps, default_rows, default_tokens
from qrt.engine.step.pooler import Pooler
from qrt.engine.step.profile import peak_step_bytes
from qrt.engine.step.runner import Runner
from qrt.engine.step.table import RequestTable
from qrt.errors import ConfigError
from qrt.grammar.compiled import Grammars
from qrt.grammar.vocabulary import Vocabulary
from qrt.kernels.all_reduce.ref import INT8_GROUP
from qrt.kernels.gpu import launches_on
from qrt.kernels.peer_memory import SECONDS
from qrt.kernels.tensor_parallel import TensorParallelGroup
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
from qrt.mem.windows import LayerGroups
from qrt.model.decoder import Decoder
from qrt.model.loader import dummy_model, load_model
from qrt.model.pooling_head import PoolingHead, dummy_head, load_head
from qrt.model.products import explain_products
from qrt.model.smoothing import fit_smoothing
from qrt.quant.checkpoint import Checkpoint, open_checkpoint
from qrt.quant.kv import KV_FORMATS, UNQUANTIZED_KV, KVFormat
from qrt.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class EngineParts:
    """What an engine runs on.

    config       the settings, with folders for names of the Hub
    generation   the checkpoint's defaults
    eos          tokens that end the text
    limits       the caps on requests and steps
    formats      KV format of each layer
    pool         size of the KV pool
    pooling      how the model pools; None: it generates
    runner       runs steps on the model and the pool
    grammars     makes the compiler of grammars over the model's tokens; None for a model without a folder
    """

    config: EngineConfig
    generation: GenerationConfig
    eos: Sequence[int]
    limits: Limits
    formats: Sequence[KVFormat]
    pool: PoolSize
    pooling: Pooling | None
    runner: Runner
    grammars: Callable[[], Grammars] | None


@dataclass(frozen=True)
class _Loaded:
    """A model with the checkpoint's defaults, and how it pools, with its head of labels."""

    model: Decoder
    generation: GenerationConfig = GenerationConfig()
    pooling: Pooling | None = None
    head: PoolingHead | None = None


def build(
    config: EngineConfig | Preflight,
    model: Decoder | None = None,
    eos_token_ids: Iterable[int] = (),
    peers: TensorParallelGroup | None = None,
) -> EngineParts:
    """Load the checkpoint that `config` names, or take `model`, and build the rest around it.

    `eos_token_ids` end the text beside those that the checkpoint names. With `peers` this is the part of one
    rank; all ranks build at the same time.
    """
    loads = model is None
    config, loaded = _checked(config, model, peers)
    model, generation = loaded.model, loaded.generation
    named = {*model.arch.eos_token_ids, *generation.eos_token_ids, *eos_token_ids}
    eos = [token for token in named if 0 <= token < model.arch.vocab_size]
    formats = _layer_formats(config, model.arch.num_layers)
    limits, sizes = _limits(config, model, formats), None
    if model.device.type == "cuda":  # a CPU gains nothing by padding
        sizes = _capture_sizes(config, limits, loaded.pooling)
        limits = replace(limits, step_sizes=tuple(sizes[1]))
    groups = _groups(model, limits.max_model_len)
    with launches_on(model.device):
        quantized = any(format.rotated for format in formats)
        smoothing = fit_smoothing(model, formats) if quantized else None
        pool = _pool(config, model, formats, limits, sizes, smoothing, groups)
        heads, dim = model.arch.num_kv_heads, model.arch.head_dim
        shape = pool.slots, heads, dim, model.dtype, model.device
        kv = KVStorage(formats, *shape, smoothing, groups=groups.of_layer)
        adjustments = Adjustments(model.arch.vocab_size, eos, model.device)
        runner = _runner(config, model, kv, limits, sizes, adjustments)
        if loaded.pooling is not None:
            table = limits.max_num_seqs + 1, model.arch.hidden_size
            runner.pooler = Pooler(loaded.head, *table, model.device)
    if peers is not None and peers.memory is not None:
        peers.memory.wait(SECONDS)
    logger.info("model: %s, on %s", model, model.device)
    logger.info("%s; at most %d run at once", pool, limits.max_num_seqs)
    if logger.isEnabledFor(logging.DEBUG):
        _log_products(model, limits, sizes)
    folder, width = config.tokenizer or config.model, model.arch.vocab_size
    grammars = (lambda: Grammars(Vocabulary.of(folder, width, eos))) if loads else None
    return EngineParts(config, generation, eos, limits, formats, pool, loaded.pooling, runner, grammars)


def _checked(
    config: EngineConfig | Preflight, model: Decoder | None, peers: TensorParallelGroup | None
) -> tuple[EngineConfig, _Loaded]:
    """Return the settings, checked, with the model that they name and its defaults; or with `model`."""
    if model is None:
        found = config if isinstance(config, Preflight) else preflight(config)
        return found.config, _load(found.config, found.pooling, peers)
    own = config.config if isinstance(config, Preflight) else config
    if own.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size: expected 1 for a model in memory, got {own.tensor_parallel_size}; "
            "name a checkpoint, of which each rank reads its part"
        )
    check_settings(own)
    check_fit(own, model.arch)
    return own, _Loaded(model)


def _load(config: EngineConfig, pooling: Pooling | None, peers: TensorParallelGroup | None) -> _Loaded:
    """Load the checkpoint's model, its generation defaults, and its head of labels."""
    device = devices_of(config)[0] if peers is None else peers.device
    dummy = config.load_format == "dummy"
    checkpoint = open_checkpoint(config.model, weights=not dummy)
    checkpoint.config = overridden(checkpoint.config, config.hf_overrides or {})
    neutral = config.generation_config == "vllm"
    generation = GenerationConfig.read(Path(checkpoint.path), sampling=not neutral)
    if dummy:
        logger.warning("%s: the weights are random, as load_format dummy asks for", checkpoint.path)
    load = dummy_model if dummy else load_model
    dtype, shard = model_dtype(config, checkpoint, device), None
    if peers is not None:
        shard = Shard(peers.rank, peers.size)
        width = read_arch(checkpoint.config, checkpoint.path).hidden_size
        if device.type == "cuda":
            from qrt.kernels.all_reduce.choose import (
                choose,
            )  # imports Triton, which is installed only with GPUs

            peers.memory = choose(peers, width, config.all_reduce, dtype)
        peers.int8 = config.all_reduce_dtype == "int8"
        if peers.int8 and width % INT8_GROUP:
            raise ConfigError(
                f"all_reduce_dtype: expected auto for a hidden size of {width}, got int8, which takes groups "
                f"of {INT8_GROUP}; leave it out"
            )
    headless = pooling is not None
    model = load(checkpoint, device=device, dtype=dtype, headless=headless, shard=shard, peers=peers)
    head = None
    if pooling is not None and pooling.labels:
        own = model.arch, pooling
        head = (
            dummy_head(*own, device)
            if dummy
            else load_head(*own, checkpoint, _token_ids(config, pooling), device)
        )
    return _Loaded(model, generation, pooling, head)


def _token_ids(config: EngineConfig, pooling: Pooling) -> list[int]:
    """Return the ids of the tokens that the head of labels is made from."""
    if not pooling.tokens:
        return []
    vocabulary = Tokenizer(config.tokenizer or config.model).backend_tokenizer.get_vocab()
    if unknown := [token for token in pooling.tokens if token not in vocabulary]:
        raise ConfigError(f"classifier_from_token: expected tokens of the vocabulary, got {unknown[0]!r}")
    return [int(vocabulary[token]) for token in pooling.tokens]


def devices_of(config: EngineConfig) -> list[torch.device]:
    """Return the device of each rank of `config`; raise ConfigError if this machine lacks one."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = ("cuda" if count else "cpu") if config.device is None else config.device
    device, ranks = torch.device(name), config.tensor_parallel_size
    if device.type != "cuda":
        return [device] * ranks
    first = device.index or 0
    if first >= count:
        found = f"cuda:0 to cuda:{count - 1}, or cpu" if count else "cpu: torch finds no GPU here"
        raise ConfigError(f"device: expected {found}, got {name!r}")
    if first + ranks > count:
        raise ConfigError(
            f"tensor_parallel_size: expected at most {count - first}, the GPUs from cuda:{first} on, "
            f"got {ranks}"
        )
    return [torch.device("cuda", first + rank) for rank in range(ranks)] if ranks > 1 else [device]


def model_dtype(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """Return the dtype of activations: the one that `config` names, or the checkpoint's where it is fast."""
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
    """Return the KV format of each layer."""
    skipped = KV_FORMATS["fp16"]
    format = skipped if config.kv in UNQUANTIZED_KV else KV_FORMATS[config.kv]
    return [skipped if layer in config.kv_skip_layers else format for layer in range(num_layers)]


def _limits(config: EngineConfig, model: Decoder, formats: Sequence[KVFormat]) -> Limits:
    """Return the caps that the config names, or those that the model and the machine allow."""
    max_model_len = config.max_model_len or model.arch.max_position
    return Limits(
        max_model_len,
        config.max_num_seqs or _num_seqs(config, model, formats, max_model_len),
        config.max_num_batched_tokens,
        config.max_num_queued_reqs,
        config.max_num_queued_tokens,
        long_rope_switch=model.arch.long_rope_switch,
    )


def _num_seqs(config: EngineConfig, model: Decoder, formats: Sequence[KVFormat], max_model_len: int) -> int:
    """Return how many requests run at once if the config does not say."""
    if model.device.type != "cuda":
        return LEAST_SEQS
    shape = model.arch
    budget = _budget_bytes(config, model, 0)
    per_slot = slot_bytes(formats, shape.num_kv_heads, shape.head_dim, model.dtype)
    return default_num_seqs(budget, per_slot, max_model_len, len(_groups(model, max_model_len).windows))


def _groups(model: Decoder, max_model_len: int) -> LayerGroups:
    """Return which layers of the model share slots."""
    arch = model.arch
    return LayerGroups.of([arch.reach(layer).most for layer in range(arch.num_layers)], max_model_len)


def _capture_sizes(
    config: EngineConfig, limits: Limits, pooling: Pooling | None = None
) -> tuple[Sequence[int], Sequence[int]]:
    """Sizes of recorded steps: rows that decode, and tokens of steps with prompts.

    A model that pools decodes nothing.
    """
    rows: Sequence[int] = [1]
    if pooling is None:
        rows = config.cudagraph_capture_sizes or default_rows(limits.max_num_seqs)
    return rows, default_tokens(limits.max_num_batched_tokens)


def _pool(
    config: EngineConfig,
    model: Decoder,
    formats: Sequence[KVFormat],
    limits: Limits,
    sizes: tuple[Sequence[int], Sequence[int]] | None,
    smoothing: Sequence[torch.Tensor] | None,
    groups: LayerGroups,
) -> PoolSize:
    """Return the size of the pool that fits beside the weights and the largest step."""
    reserve = 0
    if sizes is not None and config.kv_cache_memory_bytes is None:
        reserve = peak_step_bytes(model, formats, limits, smoothing, *sizes, groups)
        tokens = limits.max_num_batched_tokens
        logger.info("activations and graphs: %.2f GiB for steps of %d tokens", reserve / GIB, tokens)
    return pool_size(
        formats,
        model.arch.num_kv_heads,
        model.arch.head_dim,
        model.dtype,
        budget_bytes=_budget_bytes(config, model, reserve),
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        groups=groups,
    )


def _budget_bytes(config: EngineConfig, model: Decoder, reserve: int) -> int:
    """Return the memory that the pool may take where steps need `reserve` bytes: the least of all ranks."""
    own = kv_budget_bytes(
        model.device,
        gpu_memory_utilization=config.gpu_memory_utilization,
        reserve_bytes=reserve,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
    )
    return own if model.peers is None else min(model.peers.all_gather_int(own))


def _runner(
    config: EngineConfig,
    model: Decoder,
    kv: KVStorage,
    limits: Limits,
    sizes: tuple[Sequence[int], Sequence[int]] | None,
    adjustments: Adjustments,
) -> Runner:
    """Return the runner; it records the steps of `sizes`, unless that is off."""
    table = RequestTable.of(limits, kv.slots, model.device)
    steps = None
    if sizes is not None:
        steps = TokenSteps(model, kv, table, *sizes, attend_cache=config.attend_cache)
        if not config.enforce_eager:
            steps.record()
    return Runner(model, kv, table, adjustments, attend_cache=config.attend_cache, token_steps=steps)


def _log_products(model: Decoder, limits: Limits, sizes: tuple[Sequence[int], Sequence[int]] | None) -> None:
    """Log which kernel runs each product of the model in the sizes of its steps, and why."""
    rows, tokens = sizes or (default_rows(limits.max_num_seqs), default_tokens(limits.max_num_batched_tokens))
    for product in explain_products(model, [*rows, *tokens]):
        logger.debug("%s", product)
