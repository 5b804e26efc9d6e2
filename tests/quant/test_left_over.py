"""The tensors decide: entries and scales that are left over, and formats that are missing or are others."""

import logging

import pytest
import torch
from damage import edit, in_group, refuse, top
from safetensors.torch import load_file, save_file

from qrt.errors import CheckpointError, UnsupportedError
from qrt.quant.checkpoint import open_checkpoint

Q = "model.layers.0.self_attn.q_proj"
GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 128}}
LEFT_OVER = [
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
    {"quant_method": "awq", "bits": 4, "version": "gemv"},
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
    {"quant_method": "mxfp4"},
    {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": GROUP}},
    {"quant_method": "compressed-tensors", "config_groups": {}, "quantization_status": "frozen"},
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    {"quant_method": "hqq"},
    {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    {"bits": 4, "group_size": 128},
    {},
]


@pytest.mark.parametrize("entry", LEFT_OVER, ids=str)
def test_plain_weights_under_an_entry_are_read_as_they_are(made, copy, entry, caplog):
    plain = copy("plain")
    edit(plain / "config.json", lambda v: v.update(quantization_config=entry))
    with caplog.at_level(logging.WARNING):
        checkpoint = open_checkpoint(plain)
    assert ("left over" in caplog.text) == bool(entry) and not checkpoint.quantization
    scheme, got = checkpoint.linear(Q)
    assert scheme == "fp16" and torch.equal(got.values, open_checkpoint(made / "plain").linear(Q)[1].values)


@pytest.mark.parametrize("entry, text", [
    ({"quant_method": "bitnet", "quantization_mode": "online"}, "quant_method: expected .*, got 'bitnet'"),
    ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R1": {}}}}, "transform"),
])  # fmt: skip
def test_plain_weights_that_something_changes_are_refused(copy, entry, text):
    plain = copy("plain")
    edit(plain / "config.json", lambda v: v.update(quantization_config=entry))
    refuse(plain, UnsupportedError, text)


def change(folder, work):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    work(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("status", ["decompressed", "frozen", "initialized", "calibration", None])
@pytest.mark.parametrize("base", ["w4", "w8a8"])
def test_plain_weights_beside_scales_and_others_packed(made, copy, base, status):
    folder, source = copy(base), open_checkpoint(made / base)
    means = source.linear(Q)[1].dequantize().to(torch.bfloat16)

    def unpack(tensors):
        tensors.pop(f"{Q}.weight_packed", None)
        tensors[f"{Q}.weight"] = means

    change(folder, unpack)
    edit(folder / "config.json", lambda v: v["quantization_config"].update(quantization_status=status))
    read = open_checkpoint(folder)
    assert read.linear(Q)[0] == "fp16" and torch.equal(read.linear(Q)[1].values, means)
    other = Q.replace("q_proj", "k_proj")
    assert read.linear(other)[0] == source.linear(other)[0] != "fp16"


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float32])
def test_codes_that_were_cast_to_floats_are_refused(copy, cast):
    w8a8 = copy("w8a8")
    change(w8a8, lambda tensors: tensors.update({f"{Q}.weight": tensors[f"{Q}.weight"].to(cast)}))
    refuse(w8a8, CheckpointError, rf"{Q}\.weight: expected a weight.* got codes cast to floats", Q)


@pytest.mark.parametrize("base, layout", [
    ("w4", None), ("w4", "mixed-precision"), ("w4", "int-quantized"), ("w4", "float-quantized"),
    ("w4", "dense"), ("w8a8", None), ("w8a8", "pack-quantized"), ("w8a8", "float-quantized"),
])  # fmt: skip
@pytest.mark.parametrize("place", ["file", "group", "both"])
def test_layouts_are_those_of_the_tensors(made, copy, base, layout, place):
    folder = copy(base)
    said = {"file": layout if place != "group" else None, "group": layout if place != "file" else None}
    edit(folder / "config.json", lambda v: top(format=said["file"])(v["quantization_config"]))
    edit(folder / "config.json", lambda v: in_group(format=said["group"])(v["quantization_config"]))
    (scheme, got), (wanted, want) = (open_checkpoint(own).linear(Q) for own in (folder, made / base))
    assert scheme == wanted and torch.equal(got.dequantize(), want.dequantize())


@pytest.mark.parametrize("method", ["compressed_tensors", "Compressed-Tensors", None])
def test_quant_methods_are_known_by_other_spellings(made, copy, method):
    w4 = copy("w4")
    edit(w4 / "config.json", lambda v: v["quantization_config"].update(quant_method=method))
    got, want = (open_checkpoint(own).linear(Q)[1] for own in (w4, made / "w4"))
    assert torch.equal(got.dequantize(), want.dequantize())
