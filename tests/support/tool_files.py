"""Write a checkpoint as GPTQ's and AWQ's tools do, and the same weights as floats."""

from __future__ import annotations

import json

import numpy as np
import torch

from packed_words import awq_tensors, gptq_tensors
from tiny_models import altered

GROUP = 64
# what tools write: the method, its bits, symmetric, with act-order, GPTQ's version
TOOLS = {
    "gptq-v1-sym": ("gptq", 4, True, False, 1),
    "gptq-v1-asym-order": ("gptq", 4, False, True, 1),
    "gptq-v2-asym": ("gptq", 4, False, False, 2),
    "gptq-v2-sym-order-int8": ("gptq", 8, True, True, 2),
    "awq-asym": ("awq", 4, False, False, 0),
    "awq-sym": ("awq", 4, True, False, 0),
}


def rounded(weight, index, bits, symmetric):
    """Round [in, out] to nearest: codes, zeros and fp16 scales; `index` names the group of each input."""
    groups, most = index.max() + 1, (1 << bits) - 1
    low, high = (
        np.stack([f(weight[index == g], 0) for g in range(groups)]) for f in (np.min, np.max)
    )  # [G, out]
    if symmetric:
        high = np.maximum(abs(low), abs(high))
        low = -high
    scales = ((high - low) / most).astype(np.float16)
    wide = scales.astype(np.float32)
    zeros = np.full(scales.shape, (most + 1) // 2) if symmetric else (-low / wide).round().clip(0, most)
    zeros = zeros.astype(np.int64)
    codes = ((weight / wide[index]).round() + zeros[index]).clip(0, most).astype(np.int64)
    return codes, zeros, scales


def quantize_as(
    tool, source, quantized, plain, modules, transposed=False, *, group=GROUP, in_order=(), **settings
):  # fmt: skip
    """Write `source` as a tool does, and the same weights as floats in `plain`.

    With act-order, projections that read one input share an order, and those of `in_order` have none.
    `settings` are added to the quantization_config.
    """
    method, bits, symmetric, ordered, version = TOOLS[tool]
    random = np.random.default_rng(3)
    orders = {}  # by the block that projections belong to, and the inputs' number

    def tensors_of(module, weight):
        index = np.arange(len(weight)) // group
        if ordered and module not in in_order:
            index = orders.setdefault((module.rpartition(".")[0], len(weight)), random.permutation(index))
        codes, zeros, scales = rounded(weight, index, bits, symmetric)
        if method == "awq":
            found = awq_tensors(codes, zeros, scales)
        else:
            found = gptq_tensors(codes, zeros, scales, index.astype(np.int32), bits, version)
        values = (codes - zeros[index]) * scales[index].astype(np.float32)
        return {key: torch.from_numpy(np.array(t, order="C")) for key, t in found.items()}, values

    def pack(tensors):
        for module in modules:
            weight = tensors.pop(f"{module}.weight").float().numpy()
            found, _ = tensors_of(module, weight if transposed else weight.T)
            tensors.update({f"{module}.{suffix}": tensor for suffix, tensor in found.items()})

    def round_only(tensors):
        for module in modules:
            weight = tensors[f"{module}.weight"].float().numpy()
            _, values = tensors_of(module, weight if transposed else weight.T)
            values = values if transposed else values.T
            tensors[f"{module}.weight"] = torch.from_numpy(values.astype(np.float32).copy())

    altered(source, quantized, pack)
    altered(source, plain, round_only)
    entry = {"quant_method": method, "bits": bits, "group_size": group} | settings
    if method == "awq":
        entry |= {"zero_point": not symmetric, "version": "gemm"}
    else:
        entry |= {"sym": symmetric, "desc_act": ordered, "meta": {"quantizer": "gptqmodel:7"}}
        entry |= {"checkpoint_format": {1: "gptq", 2: "gptq_v2"}[version]}
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))
