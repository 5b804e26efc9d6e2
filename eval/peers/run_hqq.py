"""Quantize a model by HQQ, which needs no text; write the dequantized weights."""

from __future__ import annotations

import torch
from hqq.core.quantize import BaseQuantizeConfig, Quantizer
from record import Record, arguments
from torch import nn
from transformers import AutoModelForCausalLM

GROUP = 64
RECIPES = {"hqq": BaseQuantizeConfig(nbits=4, group_size=GROUP)}


def main() -> None:
    """Round every Linear but the head. Scales and zeros are kept in fp16, as HQQ's own layers do."""
    flags = arguments(__doc__, RECIPES)
    model = AutoModelForCausalLM.from_pretrained(flags.model, dtype=torch.float32)
    record = Record("hqq", "HQQ")
    bits = weights = 0
    for module in model.model.modules():
        if isinstance(module, nn.Linear):
            settings = RECIPES[flags.recipe]["weight_quant_params"]
            codes, meta = Quantizer.quantize(module.weight.data, device="cpu", **settings)
            meta |= {name: meta[name].half().float() for name in ("scale", "zero")}
            module.weight.data = Quantizer.dequantize(codes, meta | {"compute_dtype": torch.float32})
            weights += module.weight.numel()
            bits += 4 * module.weight.numel() + 16 * (meta["scale"].numel() + meta["zero"].numel())
    model.save_pretrained(flags.out)
    record.write(flags.out, 0, f"w4 g{GROUP}, fp16 zeros", bits_per_weight=round(bits / weights, 4))


if __name__ == "__main__":
    main()
