"""Under which names a module is known, and that patterns of modules mean these and no others."""

import json
import random
import re

import pytest
import torch
from compressed_tensors.utils.match import match_targets
from safetensors.torch import load_file, save_file

from qrt.quant.checkpoint import CheckpointWriter, open_checkpoint
from qrt.quant.checkpoint.folder import TensorFolder
from qrt.quant.checkpoint.gptq import Gptq
from qrt.quant.checkpoint.mxfp4 import Mxfp4
from qrt.quant.module_names import below, inside_pattern, names_of, patterns_of
from qrt.quant.spec import Granularity, QuantSpec
from random_weights import round_to_nearest
from tiny_models import altered, random_checkpoint

W4, W8 = (QuantSpec(bits, True, Granularity.GROUP, 32) for bits in (4, 8))
PARTS = (
    "self_attn.q_proj",
    "self_attn.o_proj",
    "mlp.down_proj",
    "mlp.experts.1.w2",
    "mlp.experts.11.w2",
    "mlp.gate",
)
INSIDE = [f"layers.{index}.{part}" for index in (0, 1, 10, 11) for part in PARTS]
WAYS = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")


@pytest.mark.parametrize("seed", range(20))
def test_patterns_mean_just_their_modules(seed):
    """Whichever they are, and under each name that files and tools have for them."""
    draw = random.Random(seed)
    chosen = draw.sample(INSIDE, draw.randrange(1, len(INSIDE)))
    found = patterns_of(draw.choice(WAYS) + name for name in chosen)
    for way in (*WAYS, "vision_tower.", "model.vision_tower.encoder.", "visual."):
        for name in INSIDE:
            means = any(re.match(pattern, way + name) for pattern in found)
            assert means == (way in WAYS and name in chosen), way + name


def test_patterns_are_few():
    every = [
        f"model.layers.{i}.mlp.experts.{e}.{part}" for i in range(48) for e in range(64) for part in "abc"
    ]
    assert len(patterns_of(every)) == 1 and patterns_of([]) == []


@pytest.mark.parametrize("way", WAYS)
def test_a_module_is_known_under_every_name(way):
    names = names_of(f"{way}layers.0.mlp.up_proj")
    assert names[0] == f"{way}layers.0.mlp.up_proj" and below(names[0]) == "layers.0.mlp.up_proj"
    assert {other + "layers.0.mlp.up_proj" for other in WAYS} <= set(names)


@pytest.mark.parametrize(
    "stored, other",
    [
        ("language_model.lm_head", "lm_head"),
        ("lm_head", "language_model.lm_head"),
        ("embed_out", "lm_head"),
        ("transformer.h.0.attn.c_attn", "h.0.attn.c_attn"),
        ("layers.0.query_key_value", "gpt_neox.layers.0.query_key_value"),
        ("model.layers.0.block_sparse_moe.experts.0.w1", "model.layers.0.mlp.experts.0.w1"),
        ("model.layers.0.block_sparse_moe.gate", "model.layers.0.mlp.router"),
    ],
)
def test_what_transformers_calls_otherwise(stored, other):
    assert other in names_of(stored)


def test_a_head_is_never_inside_the_body():
    """Otherwise an expression of the body, such as re:model.*, would mean the head."""
    assert not any(name.startswith("model.") for name in names_of("lm_head"))


@pytest.mark.parametrize(
    "name", ["score", "model.score", "score.0", "visual", "visual.blocks.0.qkv", "model.visual.x"]
)
def test_a_part_is_meant_with_all_that_is_in_it(name):
    linear, part = torch.nn.Linear(1, 1), "score" if "score" in name else "visual"
    assert match_targets(name, linear, [f"re:{inside_pattern(part)}"])
    assert not match_targets(name.replace(part, f"{part}s"), linear, [f"re:{inside_pattern(part)}"])


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A checkpoint in 4 and 8 bits and plain weights, with the kind of each Linear."""
    folder = tmp_path_factory.mktemp("mixed")
    source = random_checkpoint(folder / "plain", "LlamaForCausalLM")
    modules = {n.removesuffix(".weight") for n in open_checkpoint(source).names() if "_proj.weight" in n}
    kinds = {module: "w8a16" if "down_proj" in module else "w4a16" for module in sorted(modules)}
    kinds |= dict.fromkeys(["lm_head", *(module for module in modules if ".1.self_attn" in module)], "fp16")
    eights = {module: ("w8a16", W8) for module, kind in kinds.items() if kind == "w8a16"}
    plain, ignore = open_checkpoint(source), [module for module, kind in kinds.items() if kind == "fp16"]
    options = {"grid": ("w4a16", W4), "overrides": eights, "ignore": ignore, "metadata": {}}
    with CheckpointWriter(folder / "mixed", plain, **options) as writer:
        for name in plain.names():
            module, tensor = name.removesuffix(".weight"), plain.tensor(name)
            if kinds.get(module, "fp16") == "fp16":
                writer.add_tensor(name, tensor)
            else:
                spec = W8 if module in eights else W4
                writer.add_linear(module, round_to_nearest(tensor, spec, torch.float32, None))
    return folder / "mixed", kinds


def renamed(mixed, out, stored, listed, more=()):
    """Write the tensors under one beginning, and list modules exactly, under another."""
    source, kinds = mixed
    altered(source, out, lambda tensors: None)
    tensors = {
        moved(name, stored): tensor for name, tensor in load_file(source / "model.safetensors").items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())

    def of(kind):
        return [moved(name, listed) for name, own in kinds.items() if own == kind]

    entry = config["quantization_config"]
    for group, kind in zip(entry["config_groups"].values(), ("w4a16", "w8a16"), strict=True):
        group["targets"] = [*of(kind), *(more if kind == "w4a16" else ())]
    entry["ignore"] = of("fp16")
    (out / "config.json").write_text(json.dumps(config))
    return open_checkpoint(out)


def moved(name, top):
    return top + below(name) if name.startswith("model.") else name


@pytest.mark.parametrize("listed", WAYS)
@pytest.mark.parametrize("stored", ["language_model.model.", "model.", ""])
def test_targets_are_read_under_every_name(mixed, stored, listed, tmp_path):
    """Exact names, also where a class or an expression means the stored name too."""
    for place, more in enumerate(((), ("Linear",), ("re:.*_proj",))):
        read = renamed(mixed, tmp_path / f"{place}", stored, listed, more)
        original = open_checkpoint(mixed[0])
        for module, kind in mixed[1].items():
            scheme, weight = read.linear(moved(module, stored))
            assert scheme == kind == read.grid(moved(module, stored))[0], module
            assert torch.equal(weight.values, original.linear(module)[1].values)


@pytest.mark.parametrize("ignore", ["lm_head", r"re:(?!gpt_neox[.]layers[.]0[.]).*"])
def test_tensors_tell_what_a_name_of_others_means(mixed, ignore, tmp_path):
    """`lm_head` is no module of GPT-NeoX in transformers 4, and a name that is not its own may match."""
    tensors = {
        name.replace(
            "model.layers.0.mlp.up_proj", "embed_out" if ignore == "lm_head" else "gpt_neox.layers.0.x"
        ): own
        for name, own in load_file(mixed[0] / "model.safetensors").items()
    }
    out = altered(mixed[0], tmp_path / "m", lambda own: (own.clear(), own.update(tensors)))
    config = json.loads((out / "config.json").read_text())
    entry = config["quantization_config"]
    entry["config_groups"] = {"a": next(iter(entry["config_groups"].values())) | {"targets": ["Linear"]}}
    (out / "config.json").write_text(
        json.dumps(config | {"quantization_config": entry | {"ignore": [ignore]}})
    )
    module = "embed_out" if ignore == "lm_head" else "gpt_neox.layers.0.x"
    assert open_checkpoint(out).linear(module)[0] == "w4a16"


@pytest.mark.parametrize("rule", [r"+:model[.]language_model[.]layers[.]0[.].*", "layers.0.mlp.up_proj"])
def test_rules_of_gptq_mean_every_name(rule, tmp_path):
    folder = TensorFolder(tmp_path, {})
    format = Gptq({"bits": 4, "dynamic": {rule: {"bits": 8}}}, folder)
    assert format._overrides("language_model.model.layers.0.mlp.up_proj") == {"bits": 8}
    assert format._overrides("language_model.model.layers.1.mlp.up_proj") == {}


def test_mxfp4_leaves_out_every_name(tmp_path):
    format = Mxfp4({"modules_to_not_convert": ["model.layers.0.mlp.experts"]}, TensorFolder(tmp_path, {}))
    grids = [format.grid(f"layers.{index}.mlp.experts.down_proj")[0] for index in (0, 1)]
    assert grids == ["fp16", "mxfp4"]
