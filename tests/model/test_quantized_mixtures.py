"""Quantized mixtures as tools publish them, a Linear for each expert, run as their dequantized weights do.

Both folders hold the same numbers, one as codes and one as floats; the latter are compared with transformers
in test_families.py. Routers and shared gates stay as they are.
"""

import json
import re
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from cases import one_in
from hand_steps import Requests
from qrt.arch.read import read_arch
from qrt.errors import CheckpointError, UnsupportedError
from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.weight import WEIGHT_SCHEMES
from tiny_models import altered, quantize_checkpoint
from tool_files import TOOLS, quantize_as
from truth import ours, prompt
from zoo import make

PROMPT = prompt(40)
GROUP = 32  # 96 inputs of an expert have three
# Qwen3's names and a dense layer; Mixtral's; a shared expert with a gate
MIXTURES = ["qwen3_moe", "mixtral", "qwen2_moe"]
# what tools leave alone, as they write it
ROUTERS = ["lm_head", "re:.*mlp[.]gate$", "re:.*block_sparse_moe[.]gate$", "re:.*shared_expert_gate$"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """sources(name) -> a mixture as transformers saves it, and the names of its Linears."""
    folder, made = tmp_path_factory.mktemp("mixtures"), {}

    def source(name):
        if name not in made:
            torch.manual_seed(len(made))
            make(name, folder / name)
            arch = read_arch(open_checkpoint(folder / name).config, folder / name)
            layers = range(arch.num_layers)
            made[name] = [f"model.layers.{i}.{own}" for i in layers for own in arch.at(i).projections]
        return folder / name, made[name]

    return source


def distance(folder, truth):
    """Return the relative distance of two checkpoints' logits."""
    got, want = (Requests(ours(each)).run([(0, PROMPT)])[0] for each in (folder, truth))
    return (got - want).norm() / want.norm()


def configure(folder, change):
    """Edit the quantization_config of a checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("name", "scheme"), one_in(3, MIXTURES, ["w4a16", "w8a16", "w8a8", "w4a8"]))
def test_compressed_tensors(name, scheme, sources, tmp_path):
    source, modules = sources(name)
    spec = WEIGHT_SCHEMES[scheme].spec
    spec = replace(spec, group_size=GROUP) if spec.group_size else spec
    written = quantize_checkpoint(source, tmp_path / "q", scheme, spec, modules, ignore=ROUTERS)
    values = {f"{module}.weight": weight.dequantize() for module, weight in written.items()}
    altered(source, tmp_path / "plain", lambda tensors: tensors.update(values))
    assert set(ours(tmp_path / "q").schemes) == {scheme}
    rounds_tokens = WEIGHT_SCHEMES[scheme].int8_tokens  # which may then choose other experts
    assert distance(tmp_path / "q", tmp_path / "plain") < (0.2 if rounds_tokens else 1e-5)
    assert distance(tmp_path / "q", source) > 1e-3  # it was quantized at all


@pytest.mark.parametrize(("name", "tool"), one_in(3, MIXTURES, TOOLS))
def test_gptq_and_awq(name, tool, sources, tmp_path):
    """Each expert has an order of its own; expert 2 saw no token, and was rounded in order."""
    source, modules = sources(name)
    quantize_as(
        tool, source, tmp_path / "q", tmp_path / "plain", modules, group=GROUP,
        in_order=[module for module in modules if ".experts.2." in module],
        modules_to_not_convert=["gate", "shared_expert_gate"],
        modules_in_block_to_quantize=[["self_attn.q_proj"], ["mlp.experts.0.gate_proj"]],
        dynamic={r"-:.*[.]gate$": {}, "-:.*shared_expert_gate": {}},
    )  # fmt: skip
    assert set(ours(tmp_path / "q").schemes) == {f"w{TOOLS[tool][1]}a16"}
    assert distance(tmp_path / "q", tmp_path / "plain") < 1e-5
    assert distance(tmp_path / "q", source) > 1e-3


def fp8(weight, block):
    """Round [N, K] in blocks, or by row (None): codes, scales, and what they stand for."""
    n, k = weight.shape
    rows, columns = block or (1, k)
    blocks = functional.pad(weight, (0, -k % columns, 0, -n % rows)).view(-(-n // rows), rows, -1, columns)
    scales = blocks.abs().amax((1, 3)) / 448
    spread = scales.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * spread


def fp8_modules(tensors, modules, block, scale):
    """Round `modules` to fp8, with scales of such an ending; return the floats."""
    floats = {}
    for module in modules:
        codes, scales, floats[f"{module}.weight"] = fp8(tensors[f"{module}.weight"], block)
        tensors.update({f"{module}.weight": codes, f"{module}.{scale}": scales})
    return floats


FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
KINDS = {
    "deepseek": ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
                  "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]},
                 (128, 128), "weight_scale_inv"),
    "channels": ({"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ROUTERS,
                  "config_groups": {"group_0": {"targets": ["Linear"], "weights": FP8 | {
                      "strategy": "channel"}}}}, None, "weight_scale"),
    "blocks": ({"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ROUTERS,
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": FP8 | {
                    "strategy": "block", "block_structure": [128, 128]}}}}, (128, 128), "weight_scale"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), one_in(3, MIXTURES, KINDS))
def test_fp8(name, kind, sources, tmp_path):
    source, modules = sources(name)
    entry, block, scale = KINDS[kind]
    floats = {}
    altered(
        source, tmp_path / "q", lambda tensors: floats.update(fp8_modules(tensors, modules, block, scale))
    )
    altered(source, tmp_path / "plain", lambda tensors: tensors.update(floats))
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": entry}
    (tmp_path / "q/config.json").write_text(json.dumps(config))
    assert set(ours(tmp_path / "q").schemes) == {"fp16"}
    assert distance(tmp_path / "q", tmp_path / "plain") < 1e-5
    assert distance(tmp_path / "q", source) > 1e-3


# a mixture of stacked experts, how it is published in fp8, and whether [E, in, out]
STACKS = [
    ("granitemoe", "channels", False),
    ("qwen3_vl_moe", "deepseek", False),
    ("qwen3_vl_moe", "deepseek", True),
]


@pytest.mark.parametrize("name, kind, transposed", STACKS)
def test_stacked_experts_in_fp8(name, kind, transposed, tmp_path):
    make(name, tmp_path / "source")
    entry, block, scale = KINDS[kind]
    floats = {}

    def quantize(tensors):
        for stack in [stack for stack, weight in tensors.items() if weight.dim() == 3]:
            weights = tensors[stack].transpose(1, 2) if transposed else tensors[stack]
            parts = zip(*(fp8(weight, block) for weight in weights), strict=True)
            codes, scales, values = map(torch.stack, parts)
            ending = scale.removeprefix("weight")
            tensors.update({stack: codes, f"{stack}{ending}": scales})
            floats[stack] = values.transpose(1, 2).contiguous() if transposed else values

    altered(tmp_path / "source", tmp_path / "q", quantize)
    altered(tmp_path / "source", tmp_path / "plain", lambda tensors: tensors.update(floats))
    config = json.loads((tmp_path / "source/config.json").read_text())
    entry = entry | (
        {"ignore": ["re:.*self_attn.*", "re:.*router.*", "lm_head"]} if "ignore" in entry else {}
    )
    (tmp_path / "q/config.json").write_text(json.dumps(config | {"quantization_config": entry}))
    assert distance(tmp_path / "q", tmp_path / "plain") < 1e-5
    assert distance(tmp_path / "q", tmp_path / "source") > 1e-3


def test_gptq_rules_for_some_layers(sources, tmp_path):
    """Layer 0 in 8 bits, everything else in 4."""
    source, modules = sources("mixtral")
    first = [module for module in modules if module.startswith("model.layers.0.")]
    others = [module for module in modules if module not in first]
    names = [tmp_path / str(number) for number in range(4)]
    quantize_as("gptq-v2-sym-order-int8", source, names[0], names[1], first, group=GROUP)
    quantize_as("gptq-v1-sym", names[0], names[2], tmp_path / "unused", others, group=GROUP)
    quantize_as("gptq-v1-sym", names[1], tmp_path / "unused too", names[3], others, group=GROUP)
    rule = {"bits": 8, "desc_act": True}
    configure(names[2], lambda c: c.update(checkpoint_format="gptq_v2", dynamic={"+:.*layers[.]0[.]": rule}))

    def as_version_2(tensors):
        for module in others:
            tensors[f"{module}.qzeros"] += 0x11111111

    altered(names[2], tmp_path / "q", as_version_2)
    assert set(ours(tmp_path / "q").schemes) == {"w4a16", "w8a16"}
    assert distance(tmp_path / "q", names[3]) < 1e-5


@pytest.mark.parametrize("expert", [0, 3])
def test_an_expert_that_is_not_quantized_is_refused(sources, tmp_path, expert):
    source, modules = sources("qwen3_moe")
    quantized = [module for module in modules if f"layers.2.mlp.experts.{expert}." not in module]
    quantize_as("awq-asym", source, tmp_path / "q", tmp_path / "plain", quantized, group=GROUP)
    named = "model.layers.2.mlp.experts.{}.gate_proj"
    text = f"{named.format(expert or 1)}: expected .* on the grid of {named.format(0)}, got .*16; quantize or"
    with pytest.raises(CheckpointError, match=text):
        ours(tmp_path / "q")


def test_an_expert_in_other_groups_is_refused(sources, tmp_path):
    """Its scales would be spread over the others' groups."""
    source, modules = sources("mixtral")
    odd = [module for module in modules if "layers.1.block_sparse_moe.experts.5." in module]
    others = [module for module in modules if module not in odd]
    quantize_as("gptq-v2-asym", source, tmp_path / "others", tmp_path / "1", others, group=GROUP)
    quantize_as("gptq-v2-asym", tmp_path / "others", tmp_path / "m", tmp_path / "2", odd, group=64)
    rule = {re.escape("model.layers.1.block_sparse_moe.experts.5."): {"group_size": 64}}
    configure(tmp_path / "m", lambda config: config.update(group_size=GROUP, dynamic=rule))
    text = (
        r"layers\.1\..*experts\.5\.w1: expected w4a16 on the grid of .*experts\.0\.w1, got w4a16 on another; "
    )
    with pytest.raises(CheckpointError, match=text):
        ours(tmp_path / "m")


def test_projections_in_different_schemes_are_refused(sources, tmp_path):
    """One operator multiplies by both, in one scheme."""
    source, modules = sources("mixtral")
    down = [module for module in modules if module.endswith(".w2")]
    others = [module for module in modules if module not in down]
    quantize_as("gptq-v2-sym-order-int8", source, tmp_path / "down", tmp_path / "1", down, group=GROUP)
    quantize_as("gptq-v2-asym", tmp_path / "down", tmp_path / "m", tmp_path / "2", others, group=GROUP)
    rule = {".*w2": {"bits": 8, "sym": True, "desc_act": True}}
    configure(tmp_path / "m", lambda config: config.update(dynamic=rule))
    text = r"layers\.0\..*experts: expected gate, up and down in one scheme, got w4a16 and w8a16; quantize"
    with pytest.raises(UnsupportedError, match=text):
        ours(tmp_path / "m")


@pytest.mark.parametrize("tool", ["awq-asym", "gptq-v2-sym-order-int8"])
def test_a_quantized_router_is_read(sources, tmp_path, tool, caplog):
    source, modules = sources("qwen3_moe")
    router = "model.layers.0.mlp.gate"
    some = [*modules, router] if tool.startswith("awq") else [router]  # gptq alone leaves experts as they are
    quantize_as(tool, source, tmp_path / "q", tmp_path / "plain", some, group=GROUP)
    assert distance(tmp_path / "q", tmp_path / "plain") < 1e-5
    assert f"{router} is stored in" in caplog.text
