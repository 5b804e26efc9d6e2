"""Fits the smoothing of quantized K (`qrt.quant.kv.smoothing`) to a loaded model, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qrt.definitions.rope import rotate
from qrt.errors import QrtError
from qrt.kernels.step import Chunks, PrefillMeta, StepMeta
from qrt.layers.norm import normed
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
    arch = model.arch
    count = min(TOKENS, arch.long_rope_switch or arch.max_position)
    exact = [KV_FORMATS["fp16"]]  # layers run one after the other: each may use the slots of the last
    kv = KVStorage(exact, count, arch.num_kv_heads, arch.head_dim, model.dtype, model.device).layer(0)
    step = _prefill(model, count)
    tables = []
    x = model.embed(step.tokens, step.positions)
    for i, (layer, rope) in enumerate(zip(model.layers, model.ropes, strict=True)):
        attention, read = layer.attention, normed(layer.norms.attention_in, x)
        q, k, _ = attention.heads(attention.qkv(read), step)
        q = _sharing(model, q)
        first = rotate(k[:1].float(), rope, step.positions[:1])[0]
        table = settle(fit(q, k, *rope, long_rope_switch=arch.long_rope_switch), first, formats[i])
        if not attention.scores.relative:  # a cap or a sink sees that all scores of a query move
            table[2] = 0
        tables.append(table)
        if not tables[-1].isfinite().all():
            raise QrtError(
                f"layer {i}: q or k of random tokens is not finite in {model.dtype}; "
                "try --dtype bfloat16, or --kv fp16, which needs no smoothing"
            )
        x = layer(x, step, kv, rope)
    return tables


def _sharing(model: Decoder, q: Tensor) -> Tensor:
    """Return the q [T, Hq, D] of all ranks that hold the same KV heads as this one."""
    peers, copies = model.peers, model.copies
    if peers is None or copies == 1:
        return q
    every = peers.gather_columns(q.flatten(1), [q[0].numel()] * peers.size).unflatten(1, (-1, q.shape[2]))
    return every.unflatten(1, (peers.size // copies, -1))[:, peers.rank // copies]


def _prefill(model: Decoder, count: int) -> StepMeta:
    """One request of `count` random tokens, in slots 0, 1, 2, ..."""
    device = model.device
    tokens = torch.randint(model.arch.vocab_size, (count,), generator=torch.Generator().manual_seed(SEED))
    positions = torch.arange(count, dtype=torch.int32, device=device)
    prefill = PrefillMeta.of(Chunks([0], [count], [0], model.queries), device)
    return StepMeta(tokens.to(device), positions, positions, positions[None], None, prefill)
