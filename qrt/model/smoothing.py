"""Fits the smoothing of quantized K (`qrt.quant.kv.smoothing`) to a loaded model, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qrt.errors import QrtError
from qrt.kernels.step import Chunks, PrefillMeta, StepMeta
from qrt.mem.storage import KVStorage
from qrt.model.decoder import Decoder
from qrt.quant.kv import KV_FORMATS
from qrt.quant.kv.base import KVFormat
from qrt.quant.kv.smoothing import fit, settle

# Random token ids: a model has no text of its own, and on the bundled one text does no better than 0.1 % of
# perplexity. Few, because one pass is paid at every start.
TOKENS = 512
SEED = 0


@torch.inference_mode()
def fit_smoothing(model: Decoder, formats: Sequence[KVFormat]) -> list[Tensor]:
    """Fit the table fp32 [3, Hkv, D] of every layer in one short prefill; `formats` are the layers'.

    The tables depend on the model alone and not on the length that is served, so no answer depends on
    `max_model_len`. QrtError when the model computes infinities or NaN on its own vocabulary.
    """
    config = model.config
    count = min(TOKENS, config.max_position)
    exact = [KV_FORMATS["fp16"]]  # layers run one after the other: each may use the slots of the last
    kv = KVStorage(exact, count, config.num_kv_heads, config.head_dim, model.dtype, model.device).layer(0)
    step = _prefill(model, count)
    tables = []
    x = model.embed(step.tokens)
    stretch = float(model.rope.cos[0, 0])  # at position 0 RoPE does nothing else
    for i, layer in enumerate(model.layers):
        q, k, _ = layer.attention.heads(layer.attention.qkv(layer.attention_norm(x)))
        tables.append(settle(fit(q, k, *model.rope), k[0].float() * stretch, formats[i]))
        if not tables[-1].isfinite().all():
            raise QrtError(
                f"layer {i}: q or k of random tokens is not finite in {model.dtype}; "
                "try --dtype bfloat16, or --kv fp16, which needs no smoothing"
            )
        x = layer(x, step, kv, model.rope)
    return tables


def _prefill(model: Decoder, count: int) -> StepMeta:
    """One request of `count` random tokens, in slots 0, 1, 2, ..."""
    device = model.device
    tokens = torch.randint(model.config.vocab_size, (count,), generator=torch.Generator().manual_seed(SEED))
    positions = torch.arange(count, dtype=torch.int32, device=device)
    prefill = PrefillMeta.of(Chunks([0], [count], [0], model.queries), device)
    return StepMeta(tokens.to(device), positions, positions, positions[None], None, prefill)
