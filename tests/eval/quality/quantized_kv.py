"""A transformers model whose attention sees K and V quantized and restored with plain torch.

The definition of qrt's int8 and int4 KV, for tests of perplexity: K and V go through the format's rotation,
codes and one fp16 scale per half head, and back, before an ordinary causal attention in fp32.
"""

import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from qrt.quant import rotation


def restored(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x [..., D] -> what is left of it: codes with one scale per half head, fp16.

    int8: steps of absmax / 127 to either side of zero. int4: sixteen levels at odd half steps, of absmax
    over 7 to 8 in quarters the one that loses least.
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
    """`folder` in fp32, attending restored K and V; `tables` smooth K, layer by layer (qrt.quant.kv)."""

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
