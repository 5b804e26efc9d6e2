"""Time a whole decoder layer at decode as the engine launches it: a chain of kernels in one CUDA graph.

This shows what a kernel is worth, because its start and end may overlap with its neighbours. "chain" is what
lies between the attention of two layers: four products, two norms, silu * up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from qrt.arch import Arch
from qrt.kernels.decode_attention.plan import plan_kv_splits
from qrt.kernels.step import DecodeMeta, StepMeta
from qrt.mem.storage import KVStorage
from qrt.model.decoder import Decoder
from qrt.model.fused import FusedLayer
from qrt.model.random import random_model
from qrt.quant.kv import KV_FORMATS
from qrt.quant.weight import WEIGHT_SCHEMES
from qrt_eval.speed.kernels.attention import randomize
from qrt_eval.speed.kernels.linear import in_int8
from qrt_eval.speed.kernels.row import KernelRow
from qrt_eval.speed.kernels.timer import Rates, activation_dtype, microseconds
from qrt_eval.speed.latency import weight_bytes

GPU_LAYERS = 8  # with distinct weights
VOCABULARY = 256  # small, as embedding and head are not timed


def pairs() -> list[tuple[str, str]]:
    """Return the weight schemes, each with the KV formats that it is timed with."""
    found = []
    for scheme in WEIGHT_SCHEMES:
        spec = WEIGHT_SCHEMES[scheme].spec
        found.append((scheme, "fp16" if spec is None else "int8"))
        if spec is not None and spec.bits <= 4:
            found.append((scheme, "int4"))
    return found


def rows(
    config: Arch, sizes: Sequence[tuple[int, int]], rates: Rates, device: torch.device
) -> Iterator[KernelRow]:
    """Yield a row per pair of weight scheme and KV format, and per (batch, context)."""
    plain = _plain(device)
    for scheme, kv in pairs():
        model = layers(config, scheme, device)
        fmt = KV_FORMATS[kv]
        for batch, context in sizes:
            us = layer_us(model, decode_step(model, kv, batch, context))
            slot_bytes = fmt.bytes_per_slot(config.num_kv_heads, config.head_dim, model.dtype)
            num_bytes = _weight_bytes(model, batch) + batch * context * slot_bytes
            flops = batch * _flops_per_token(model, context)
            names = [plain if name == "fp16" else name for name in (scheme, kv)]
            what, at = "{}, KV {}".format(*names), f"{batch} x {context}"
            floor_us = rates.floor_us(num_bytes, flops, in_int8(scheme))
            yield KernelRow("layer", what, at, us, floor_us, num_bytes, flops, ours=scheme != "fp16")
        del model


def chain_rows(
    config: Arch, tokens: Sequence[int], rates: Rates, device: torch.device
) -> Iterator[KernelRow]:
    """Yield a row per weight scheme and number of tokens."""
    for scheme in WEIGHT_SCHEMES:
        model = layers(config, scheme, device)
        blocks = [
            FusedLayer(layer, following.norms.attention_in, following.attention.qkv)
            for layer, following in zip(model.layers, model.layers[1:] + model.layers[:1], strict=True)
        ]
        for m in tokens:
            widths = config.num_heads * config.head_dim, config.hidden_size
            y, residual = (torch.randn(m, width, device=device, dtype=model.dtype) for width in widths)
            calls = [(layer, [y], residual, layer.fitting(residual)) for layer in blocks]
            us = microseconds(FusedLayer.after_attention, calls)
            flops, num_bytes = m * _flops_per_token(model, 0), _weight_bytes(model, m)
            what = _plain(device) if scheme == "fp16" else scheme
            floor_us = rates.floor_us(num_bytes, flops, in_int8(scheme))
            yield KernelRow("chain", what, f"M={m}", us, floor_us, num_bytes, flops, ours=scheme != "fp16")
        del model


def _plain(device: torch.device) -> str:
    return "bf16" if device.type == "cuda" else "fp32"


def layers(config: Arch, scheme: str, device: torch.device) -> Decoder:
    """Make enough layers of a model that none is still in the cache when its turn comes again."""
    count = GPU_LAYERS if device.type == "cuda" else 1
    config = replace(config.of_layers(count), vocab_size=VOCABULARY)
    return random_model(config, scheme, device=device, dtype=activation_dtype(device))


def _weight_bytes(model: Decoder, tokens: int) -> int:
    """Return the bytes that `tokens` tokens read of one layer's weights."""
    head = sum(t.nbytes for t in model.head.parameters())
    return round((weight_bytes(model, tokens) - head) / model.arch.num_layers)


def layer_us(model: Decoder, step: tuple[StepMeta, KVStorage]) -> float:
    """Return the microseconds of one layer."""
    return microseconds(model.hidden, [step]) / model.arch.num_layers


def decode_step(model: Decoder, kv: str, batch: int, context: int) -> tuple[StepMeta, KVStorage]:
    """Return the arguments of `Decoder.hidden` for a decode step.

    Its requests have random K and V in shuffled slots.
    """
    config, device = model.arch, model.device
    fmt, tokens = KV_FORMATS[kv], batch * context
    storage = KVStorage(
        [fmt] * config.num_layers, tokens, config.num_kv_heads, config.head_dim, model.dtype, device
    )
    for i in range(len(storage)):
        randomize(storage.layer(i).buffers, fmt)
    table = torch.randperm(tokens, device=device).to(torch.int32).view(batch, context)
    index = torch.arange(batch, device=device, dtype=torch.int32)
    lens = torch.full_like(index, context)
    heads_per_sm = storage.heads_per_sm(batch, config.num_heads)
    parts = plan_kv_splits(index, lens, config.num_kv_heads, heads_per_sm)
    step = StepMeta(
        tokens=index.long() % VOCABULARY,
        positions=lens - 1,
        slots=table[:, -1].contiguous(),
        slot_table=table,
        decode=DecodeMeta(index, lens, [parts], newest=True),
        prefill=None,
    )
    return step, storage


def _flops_per_token(model: Decoder, context: int) -> int:
    config = model.arch
    attention = 4 * context * config.num_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    if (experts := config.experts) is not None:
        inner = experts.router.top_k * experts.width + experts.shared_width
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    products = hidden * width + config.num_heads * config.head_dim * hidden + 3 * hidden * inner
    return attention + 2 * products
