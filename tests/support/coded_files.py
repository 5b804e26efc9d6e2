"""Write a checkpoint of 16-bit weights as published in fp8 or MXFP4, and the weights that this means."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mxfp4_files import MAGNITUDES, pack_mxfp4
from tiny_models import altered

Coded = tuple[dict[str, Tensor], Tensor]  # tensors by ending, and what they mean in fp32
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def fp8(weight: Tensor, rows: int | None, columns: int | None, scale: str, shape: tuple[int, ...]) -> Coded:
    """Round [.., N, K] to e4m3 with a scale for each block; None: all rows or columns."""
    n, k = weight.shape[-2:]
    at = torch.arange(n) // (rows or n), torch.arange(k) // (columns or k)
    scales = torch.zeros(*weight.shape[:-2], int(at[0].max()) + 1, int(at[1].max()) + 1)
    for i in range(scales.shape[-2]):
        for j in range(scales.shape[-1]):
            block = weight[..., at[0] == i, :][..., at[1] == j]
            scales[..., i, j] = block.float().abs().amax((-2, -1)) / 448
    spread = scales[..., at[0], :][..., at[1]]
    codes = (weight.float() / spread).to(torch.float8_e4m3fn)
    stored = scales.reshape(*weight.shape[:-2], *shape) if shape else scales.reshape(weight.shape[:-2])
    return {"weight": codes, scale: stored}, codes.float() * spread


def mxfp4(weight: Tensor) -> Coded:
    """Round [.., N, K] to MXFP4 as compressed-tensors stores it."""
    blocks, scales = pack_mxfp4(weight)
    packed = blocks.flatten(-2)
    return {"weight_packed": packed, "weight_scale": scales}, meant(blocks, scales)


def meant(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return what MXFP4 blocks [.., K/32, 16] mean: [.., K]."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()
    numbers = MAGNITUDES[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    return (numbers * torch.exp2(scales.float() - 127)[..., None]).flatten(-2)


def compressed(layout: str, weights: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": DYNAMIC}
    return {
        "quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": group}, **changes,
    }  # fmt: skip


GROUP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
# how files lie: what codes a weight, and what config.json says
LAYOUTS: dict[str, tuple[Callable[[Tensor], Coded], dict[str, Any]]] = {
    "blocks": (
        lambda w: fp8(w, 128, 128, "weight_scale_inv", (-(-w.shape[-2] // 128), -(-w.shape[-1] // 128))),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    "tensor": (
        lambda w: fp8(w, None, None, "weight_scale", ()),
        {"quant_method": "fp8", "activation_scheme": "static"},
    ),
    "rows": (
        lambda w: fp8(w, 1, None, "weight_scale", (w.shape[-2], 1)),
        compressed("float-quantized", FLOAT8 | {"strategy": "channel"}),
    ),
    "ct-blocks": (
        lambda w: fp8(w, 32, 64, "weight_scale", (-(-w.shape[-2] // 32), -(-w.shape[-1] // 64))),
        compressed("float-quantized", FLOAT8 | {"strategy": "block", "block_structure": [32, 64]}),
    ),
    "mxfp4": (mxfp4, compressed("mxfp4-pack-quantized", GROUP4)),
}


def publish_codes(layout: str, source: Path, out: Path, chosen: Callable[[str], bool]) -> tuple[Path, Path]:
    """Write `source` with the chosen weights in `layout`; return its folder and that of what it means."""
    code, entry = LAYOUTS[layout]
    weights: dict[str, Tensor] = {}

    def pack(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if chosen(name)]:
            weight = tensors.pop(name)
            coded, means = code(weight)
            weights[name] = means.to(weight.dtype)
            for ending, tensor in coded.items():
                own = name.removesuffix(".weight") + "." + ending
                if not name.endswith(".weight"):
                    own = name + ending.removeprefix("weight")
                tensors[own] = tensor.contiguous()

    quantized = altered(source, out / layout, pack)
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))
    return quantized, altered(source, out / f"{layout}-meant", lambda tensors: tensors.update(weights))
