"""Quantized checkpoints in fused, grouped, turned and transposed layouts run as their dequantized weights do.

Both folders hold the same numbers, one as codes and one as floats; the latter are compared with transformers
in test_families.py.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from hand_steps import Requests
from packed_words import awq_tensors, gptq_tensors
from qrt.arch.read import read_arch
from qrt.errors import CheckpointError
from qrt.model.stacks import stacks
from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.weight import WEIGHT_SCHEMES
from tiny_models import altered, quantize_checkpoint
from truth import ours, prompt
from zoo import make

PROMPT = prompt(40)
GROUP = 64
# stacked q, k, v and gate, up; stacked for each KV head; neighbours that turn; a part of the head that turns
LAYOUTS = [
    "phi3", "qwen", "glm", "chatglm3", "ernie", "internlm2", "neox", "falcon-40b", "stablelm", "gptj", "gpt2",
]  # fmt: skip
# what tools write: the method, its bits, symmetric, with act-order, GPTQ's version
TOOLS = {
    "gptq-v1-sym": ("gptq", 4, True, False, 1),
    "gptq-v1-asym-order": ("gptq", 4, False, True, 1),
    "gptq-v2-asym": ("gptq", 4, False, False, 2),
    "gptq-v2-sym-order-int8": ("gptq", 8, True, True, 2),
    "awq-asym": ("awq", 4, False, False, 0),
    "awq-sym": ("awq", 4, True, False, 0),
}


def linears(folder):
    """Names of the Linears in the layers of a checkpoint, and its architecture."""
    arch = read_arch(open_checkpoint(folder).config, folder)
    every = [stack for i in range(arch.num_layers) for stack in stacks(arch, i).values()]
    return [module for stack in every for module in stack.modules], arch


def distance(folder, truth):
    """Return the relative distance of two checkpoints' logits."""
    got, want = (Requests(ours(each)).run([(0, PROMPT)])[0] for each in (folder, truth))
    return (got - want).norm() / want.norm()


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "gpt2"])
def test_compressed_tensors(name, scheme, tmp_path):
    source, quantized, plain = tmp_path / "source", tmp_path / "quantized", tmp_path / "plain"
    make(name, source)
    modules, arch = linears(source)
    spec = WEIGHT_SCHEMES[scheme].spec
    spec = replace(spec, group_size=GROUP) if spec.group_size else spec
    written = quantize_checkpoint(source, quantized, scheme, spec, modules, ignore=[arch.names.head])
    assert written.keys() == set(modules)
    values = {f"{module}.weight": weight.dequantize() for module, weight in written.items()}
    altered(source, plain, lambda tensors: tensors.update(values))
    assert distance(quantized, plain) < (1e-5 if scheme == "w4a16" else 0.05)  # w8a8 rounds tokens, too


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


def quantize_as(tool, source, quantized, plain, modules, transposed=False):
    """Write `source` as a tool does, and the same weights as floats in `plain`."""
    method, bits, symmetric, ordered, version = TOOLS[tool]
    random = np.random.default_rng(3)
    orders = {}  # by the inputs' number: those of one projection belong to one order

    def tensors_of(weight):
        index = np.arange(len(weight)) // GROUP
        if ordered:
            index = orders.setdefault(len(weight), random.permutation(index))
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
            found, _ = tensors_of(weight if transposed else weight.T)
            tensors.update({f"{module}.{suffix}": tensor for suffix, tensor in found.items()})

    def round_only(tensors):
        for module in modules:
            weight = tensors[f"{module}.weight"].float().numpy()
            _, values = tensors_of(weight if transposed else weight.T)
            values = values if transposed else values.T
            tensors[f"{module}.weight"] = torch.from_numpy(values.astype(np.float32).copy())

    altered(source, quantized, pack)
    altered(source, plain, round_only)
    entry = {"quant_method": method, "bits": bits, "group_size": GROUP}
    if method == "awq":
        entry |= {"zero_point": not symmetric, "version": "gemm"}
    else:
        entry |= {"sym": symmetric, "desc_act": ordered, "meta": {"quantizer": "gptqmodel:7"}}
        entry |= {"checkpoint_format": {1: "gptq", 2: "gptq_v2"}[version]}
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_gptq_and_awq(name, tool, tmp_path):
    make(name, tmp_path / "source")
    modules, arch = linears(tmp_path / "source")
    quantize_as(tool, tmp_path / "source", tmp_path / "q", tmp_path / "plain", modules, arch.transposed)
    assert set(ours(tmp_path / "q").schemes) == {f"w{TOOLS[tool][1]}a16"}
    assert distance(tmp_path / "q", tmp_path / "plain") < 1e-5
    assert distance(tmp_path / "q", tmp_path / "source") > 1e-3  # it was quantized at all


def test_parts_in_different_orders_are_refused_by_name(tmp_path):
    """q, k and v run as one product, which gathers its inputs once; tools order them alike."""
    make("llama", tmp_path / "source")
    modules, _ = linears(tmp_path / "source")
    quantize_as("gptq-v1-asym-order", tmp_path / "source", tmp_path / "q", tmp_path / "plain", modules)
    k = "model.layers.1.self_attn.k_proj.g_idx"
    altered(tmp_path / "q", tmp_path / "k", lambda tensors: tensors.update({k: tensors[k].flip(0)}))
    with pytest.raises(CheckpointError, match=r"layers\.1\..*q_proj.* permutation: fused projections must"):
        ours(tmp_path / "k")


@pytest.mark.parametrize("tool", TOOLS)
def test_head_whose_rows_have_length_1(tool, tmp_path):
    make("baichuan2-7b", tmp_path / "source")
    _, arch = linears(tmp_path / "source")
    quantize_as(tool, tmp_path / "source", tmp_path / "q", tmp_path / "plain", [arch.names.head])
    assert distance(tmp_path / "q", tmp_path / "plain") < 1e-5
