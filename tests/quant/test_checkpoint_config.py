"""What a quantization_config may say: refused by name where it changes the meaning, else read alike."""

import json
import re
from itertools import permutations

import pytest
import torch
from compressed_tensors.utils.match import match_targets
from damage import activations, edit, grid, in_group, refuse, top
from safetensors.torch import load_file, save_file

from qrt.errors import CheckpointError, UnsupportedError
from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.checkpoint.compressed_tensors import target_of

Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("method", ["fbgemm_fp8", "bitsandbytes", None, ["gptq"]])
def test_other_quant_methods_are_refused_by_name(copy, method):
    w4 = copy("w4")
    edit(w4 / "config.json", lambda v: v.update(quantization_config={"quant_method": method, "bits": 4}))
    pattern = f"quant_method: expected .*, got {re.escape(repr(str(method)))}; .*qrt-calibrate"
    refuse(w4, UnsupportedError, pattern)


def test_a_separate_config_names_its_quant_method_too(copy):
    """As ModelOpt writes it."""
    w8a8 = copy("w8a8")
    edit(w8a8 / "config.json", lambda v: v.pop("quantization_config"))
    config = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (w8a8 / "hf_quant_config.json").write_text(json.dumps(config))
    refuse(w8a8, UnsupportedError, "quant_method: expected .*, got 'modelopt'; .*qrt-calibrate")


FP8_KV = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
REFUSED = [
    ("w4", grid("num_bits", 3), "got pack-quantized with 3-bit .*; start .* qrt-calibrate"),
    ("w4", grid("num_bits", 16), "got pack-quantized with 16-bit"),
    ("w4", grid("type", "float"), r"weights\.type: expected 'int', got 'float'; start .* qrt-calibrate"),
    ("w4", grid("strategy", "tensor"), r"weights\.strategy: expected .*, got 'tensor'"),
    ("w4", grid("dynamic", True), r"weights\.dynamic: expected .*, got True"),
    (
        "w8a8",
        activations(dynamic=False, strategy="tensor"),
        r"input_activations\.strategy: expected .*, got 'tensor'",
    ),
    ("w8a8", activations(dynamic=False), r"input_activations\.dynamic: expected .*, got False"),
    ("w8a8", activations(type="float"), r"input_activations\.type: expected .*, got 'float'"),
    ("w8a8", activations(num_bits=4), r"input_activations\.num_bits: expected .*, got 4"),
    ("w8a8", in_group(input_activations=None), "got int-quantized with 8-bit channel weights; "),
    ("w8a8", grid("num_bits", 5), "got int-quantized with 5-bit channel"),
    ("w8a8", grid("symmetric", False), "got int-quantized with"),
    ("w8a8", in_group(output_activations={"num_bits": 8}), "output_activations"),
    ("w4", in_group(format="marlin-24"), "marlin-24"),
    ("w4", in_group(targets=["Linear", "Embedding"]), "target 'Embedding' is neither a module.*; start"),
    (
        "w4",
        top(config_groups={"W4A16": ["Linear"]}),
        "config_groups.W4A16: expected a group .*, got \\['Linear'\\]",
    ),
    ("w4", top(kv_cache_scheme=FP8_KV), "kv_cache_scheme is not read.*--kv"),
    ("w4", top(transform_config={"config_groups": {"R1": {}}}), "transform_config is not read"),
    ("w4", top(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is not read"),
]
MALFORMED = [
    ("w4", grid("num_bits", 4.0), r"weights\.num_bits: expected a whole number, got 4\.0"),
    ("w4", grid("group_size", 0), r"weights\.group_size: expected .*, got 0"),
    ("w4", grid("group_size", "64"), r"weights\.group_size: expected .*, got '64'"),
    ("w4", in_group(weights=None), "weights: expected an object, got None"),
    ("w4", in_group(targets="Linear"), "expected lists of strings for targets and ignore, got "),
    ("w4", in_group(targets=["re:*"]), r"'re:\*' is not a regular expression"),
    ("w4", top(ignore=["re:("]), r"'re:\(' is not a regular expression"),
    ("w4", top(ignore="lm_head"), "expected lists of strings for targets and ignore, got "),
    ("w4", top(config_groups={}), "config_groups: expected at least one group, got {}"),
]


@pytest.mark.parametrize("base, change, pattern", REFUSED, ids=[case[2] for case in REFUSED])
def test_entries_that_change_the_meaning_are_refused_by_name(copy, base, change, pattern):
    folder = copy(base)
    edit(folder / "config.json", lambda v: change(v["quantization_config"]))
    refuse(folder, UnsupportedError, pattern)


@pytest.mark.parametrize("base, change, pattern", MALFORMED, ids=[case[2] for case in MALFORMED])
def test_malformed_configs(copy, base, change, pattern):
    folder = copy(base)
    edit(folder / "config.json", lambda v: change(v["quantization_config"]))
    refuse(folder, CheckpointError, pattern)


def test_remedy_for_a_kv_cache_config_makes_it_load(made, copy):
    plain = copy("plain")
    config = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": FP8_KV}
    edit(plain / "config.json", lambda v: v.update(quantization_config=config))
    refuse(plain, UnsupportedError, "kv_cache_scheme is not read; delete the entry")
    edit(plain / "config.json", lambda v: v["quantization_config"].pop("kv_cache_scheme"))
    got, wanted = (open_checkpoint(folder).linear(Q)[1] for folder in (plain, made / "plain"))
    assert torch.equal(got.dequantize(), wanted.dequantize())


def test_a_group_index_of_uneven_groups_is_refused(copy):
    w4 = copy("w4")
    tensors = load_file(w4 / "model.safetensors")
    tensors[f"{Q}.weight_g_idx"] = (torch.arange(128, dtype=torch.int32) + 1) // 64
    save_file(tensors, w4 / "model.safetensors", metadata={"format": "pt"})
    refuse(w4, UnsupportedError, f"{Q}.weight_g_idx does not name 2 groups of 64 inputs", Q)


@pytest.mark.parametrize(
    "change",
    [
        grid("actorder", "static"),
        grid("actorder", "dynamic"),
        grid("actorder", True),
        grid("observer", "memoryless_minmax"),
        top(kv_cache_scheme=None, sparsity_config={}, transform_config={}, version="0.19.0"),
        top(sparsity_config={"format": "dense"}),
        top(
            sparsity_config={"format": "dense", "global_sparsity": 0.14, "sparsity_structure": "unstructured"}
        ),
        top(format="mixed-precision"),
        top(ignore=None),
        in_group(format=None),
        in_group(targets=["re:.*proj$"]),
        in_group(targets=[Q]),
    ],
)
def test_harmless_variants_read_the_same(made, copy, change):
    w4 = copy("w4")
    edit(w4 / "config.json", lambda v: change(v["quantization_config"]))
    scheme, got = open_checkpoint(w4).linear(Q)
    assert scheme == "w4a16"
    assert torch.equal(got.dequantize(), open_checkpoint(made / "w4").linear(Q)[1].dequantize())


def test_the_key_of_the_first_compressed_tensors(made, copy):
    w4 = copy("w4")
    edit(w4 / "config.json", lambda v: v.update(compression_config=v.pop("quantization_config")))
    scheme, got = open_checkpoint(w4).linear(Q)
    assert scheme == "w4a16"
    assert torch.equal(got.dequantize(), open_checkpoint(made / "w4").linear(Q)[1].dequantize())


@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_points_in_bytes_and_an_index_that_was_never_set(copy, symmetric):
    """As old compressed-tensors stored them: signed, one a byte; and -1 where nothing was reordered."""
    w4 = copy("w4")
    tensors = load_file(w4 / "model.safetensors")
    zero = open_checkpoint(w4).linear(Q)[1].zero.to(torch.int16) - 8
    zero = torch.zeros_like(zero) if symmetric else zero
    tensors[f"{Q}.weight_zero_point"] = zero.to(torch.int8)
    tensors[f"{Q}.weight_g_idx"] = torch.full((128,), -1, dtype=torch.int32)
    save_file(tensors, w4 / "model.safetensors", metadata={"format": "pt"})
    edit(w4 / "config.json", lambda v: grid("symmetric", symmetric)(v["quantization_config"]))
    got = open_checkpoint(w4).linear(Q)[1]
    assert got.perm is None and (got.zero is None) == symmetric
    wanted = (got.values.float().unflatten(1, (2, 64)) - 8 - zero[..., None]) * got.scale[..., None]
    assert torch.equal(got.dequantize(), wanted.flatten(1))
    tensors[f"{Q}.weight_zero_point"] = zero.to(torch.int8) + 1
    save_file(tensors, w4 / "model.safetensors", metadata={"format": "pt"})
    if symmetric:
        refuse(w4, CheckpointError, f"{Q}.weight_zero_point holds zero points", Q)


def test_naive_quantized_is_the_old_name_of_int_quantized(made, copy):
    w8a8 = copy("w8a8")
    edit(w8a8 / "config.json", lambda v: top(format="naive-quantized")(v["quantization_config"]))
    edit(w8a8 / "config.json", lambda v: in_group(format=None)(v["quantization_config"]))
    (scheme, got), (_, wanted) = (open_checkpoint(path).linear(Q) for path in (w8a8, made / "w8a8"))
    assert scheme == "w8a8" and torch.equal(got.dequantize(), wanted.dequantize())


@pytest.mark.parametrize("ignore", [Q, "re:.*q_proj", "Linear"])
def test_ignore_wins_over_every_target(copy, ignore):
    """And codes of an ignored module are refused: no group says what they mean."""
    w4 = copy("w4")
    edit(w4 / "config.json", lambda v: v["quantization_config"].update(ignore=[ignore]))
    edit(w4 / "config.json", lambda v: in_group(targets=["Linear", Q])(v["quantization_config"]))
    refuse(w4, UnsupportedError, re.escape(f"{Q}.weight_packed: quantized, but no group"), Q)


@pytest.mark.parametrize("ignore, plain", [("re:mlp", False), ("re:.*mlp", True), ("re:model.*q_proj", True)])
def test_a_regular_expression_matches_from_the_start_of_a_name(copy, ignore, plain):
    """As re.match does, which compressed-tensors, transformers and vLLM use: an ignored module is plain."""
    w4 = copy("w4")
    edit(w4 / "config.json", lambda v: v["quantization_config"].update(ignore=[ignore]))
    module = Q if "q_proj" in ignore else "model.layers.0.mlp.up_proj"
    assert open_checkpoint(w4).grid(module)[0] == ("fp16" if plain else "w4a16")


@pytest.mark.parametrize("module", [Q, "model.layers.0.mlp.down_proj", "lm_head"])
def test_target_priority_is_that_of_compressed_tensors(module):
    known = ["Linear", Q, "re:.*proj$", "re:.*down_proj$", "re:model", "re:.*[.]q", "lm"]
    for targets in permutations(known, 3):
        theirs = match_targets(module, torch.nn.Linear(1, 1), targets)
        assert target_of(module, targets) == next(iter(theirs), None), targets
