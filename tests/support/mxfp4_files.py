"""Write a gpt-oss checkpoint as OpenAI publishes it: only the experts are in MXFP4."""

import json
from pathlib import Path

import torch
from torch import Tensor

from tiny_models import altered

MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
LEFT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def pack_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round [.., K] to nearest: blocks uint8 [.., K/32, 16] and scales uint8 [.., K/32]."""
    groups = weight.float().unflatten(-1, (-1, 32))
    power = torch.floor(torch.log2(groups.abs().amax(-1).clamp(min=2.0**-100))) - 2  # the largest is 4 to 6
    scaled = groups * torch.exp2(-power)[..., None]
    codes = (scaled.abs()[..., None] - MAGNITUDES).abs().argmin(-1) + 8 * (scaled < 0)
    low, high = codes.unflatten(-1, (16, 2)).unbind(-1)
    return (low | high << 4).to(torch.uint8), (power + 127).to(torch.uint8)


def publish(source: Path, out: Path) -> Path:
    """Write the gpt-oss checkpoint `source` with experts in MXFP4."""

    def pack(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            blocks, scales = pack_mxfp4(tensors.pop(name).transpose(1, 2))
            tensors.update({f"{name}_blocks": blocks, f"{name}_scales": scales})

    altered(source, out, pack)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": LEFT}
    (out / "config.json").write_text(json.dumps(config))
    return out
