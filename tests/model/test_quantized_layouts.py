"""Quantized checkpoints in fused, grouped, turned and transposed layouts run as their dequantized weights do.

Both folders hold the same numbers, one as codes and one as floats; the latter are compared with transformers
in test_families.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from cases import one_in
from hand_steps import Requests
from qrt.arch.read import read_arch
from qrt.definitions.stacks import stacks
from qrt.errors import CheckpointError
from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.weight import WEIGHT_SCHEMES
from tiny_models import altered, quantize_checkpoint
from tool_files import GROUP, TOOLS, quantize_as
from truth import ours, prompt
from zoo import make

PROMPT = prompt(40)
# stacked q, k, v and gate, up; stacked for each KV head; neighbours that turn; a part of the head that turns
LAYOUTS = [
    "phi3", "qwen", "glm", "chatglm3", "ernie", "internlm2", "neox", "falcon-40b", "stablelm", "gptj", "gpt2",
]  # fmt: skip


def linears(folder):
    """Names of the Linears in the layers of a checkpoint, and its architecture."""
    arch = read_arch(open_checkpoint(folder).config, folder)
    every = [stack for i in range(arch.num_layers) for stack in stacks(arch, i).values()]
    return [module for stack in every for module in stack.modules], arch


def distance(folder, truth):
    """Return the relative distance of two checkpoints' logits."""
    got, want = (Requests(ours(each)).run([(0, PROMPT)])[0] for each in (folder, truth))
    return (got - want).norm() / want.norm()


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "w4a8"])
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
    assert distance(quantized, plain) < (0.05 if WEIGHT_SCHEMES[scheme].int8_tokens else 1e-5)


@pytest.mark.parametrize(("name", "tool"), one_in(3, LAYOUTS, TOOLS))
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
