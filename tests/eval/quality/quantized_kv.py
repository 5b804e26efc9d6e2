"""Run a transformers model whose attention sees K and V quantized and restored with plain torch.

This is the definition of qrt's int8 and int4 KV, for tests of perplexity. K and V go through the format's
rotation, its codes and one fp16 scale per half head, and back, before an ordinary causal attention in fp32.
"""

import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from qrt.quant import rotation


def restored(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Quantize x [..., D] with one fp16 scale per half head, and restore it.

    int8 has steps of absmax / 127 on both sides of zero. int4 has sixteen levels at odd half steps; of the
    steps absmax / 7 to absmax / 8, in quarters, it takes the one that loses least.
    """
    halves = x.unflatten(-1, (2, -1))
    absmax = halves.abs().amax(-1, keepdim=True)
    if bits == 8:
        scale = (absmax / 127).half().float()
        return ((halves / scale).round() * scale).flatten(-2)
    scales = torch.stack([(absmax / steps).half().float() for steps in (8, 7.75, 7.5, 7.25, 7)])
    tried = ((halves / scales - 0.5).round().clamp(-8, 7) + 0.5) * scales
    best = (tried - halves).square().sum(-1, keepdim=True).argmin(0, keepdim=True)
    return tried.take_along_dim(best, 0)[0].flatten(-2)


def quantized_model(folder, bits: int, tables: list[torch.Tensor]):
    """Load `folder` in fp32, attending to restored K and V; `tables` smooth K layer by layer."""

    def attend(module, query, key, value, mask, scaling, dropout=0.0, **options):
        gain, inverse, shift = (part[None, :, None] for part in tables[module.layer_idx])
        groups = query.shape[1] // key.shape[1]
        k = restored(rotation.rotate(key * inverse - shift), bits)
        v = rotation.unrotate(restored(rotation.rotate(value), bits))
        q = rotation.rotate(query * gain.repeat_interleave(groups, 1))
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        n = q.shape[2]
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        scores = (q @ k.mT * scaling).masked_fill(hidden, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).contiguous(), None

    AttentionInterface.register(f"int{bits}_kv", attend)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=f"int{bits}_kv"
    )
