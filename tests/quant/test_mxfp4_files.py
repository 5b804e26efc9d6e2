"""MXFP4 as compressed-tensors stores it, against the library; refusals name what does not fit."""

import json
import logging

import pytest
import torch
from safetensors.torch import save_file

from qrt.errors import CheckpointError, UnsupportedError
from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.weight import WEIGHT_SCHEMES

mx_utils = pytest.importorskip("compressed_tensors.compressors.mx_utils", reason="it is the truth here")
fp4 = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
presets = pytest.importorskip("compressed_tensors.quantization.quant_scheme")
Q = "model.layers.0.self_attn.q_proj"
N, K = 24, 96


def save(folder, tensors, preset, **changes):
    """Write a checkpoint whose config says what llm-compressor's `preset` does."""
    group = json.loads(json.dumps({key: value.model_dump(mode="json") for key, value in preset.items()}))
    group["weights"] |= changes
    entry = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": ["lm_head"]}
    entry["config_groups"] = {"group_0": {"targets": ["Linear"], **group}}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16", "quantization_config": entry}))
    save_file({"lm_head.weight": torch.ones(2, 2), **tensors}, folder / "model.safetensors")
    return open_checkpoint(folder)


def linear(k=K, groups=K // 32):
    return {
        f"{Q}.weight_packed": torch.randint(256, (N, k // 2), dtype=torch.uint8),
        f"{Q}.weight_scale": torch.randint(0, 250, (N, groups), dtype=torch.uint8),
    }


@pytest.mark.parametrize(
    "preset, said", [(presets.MXFP4A16, False), (presets.MXFP4, True)], ids=["a16", "a4"]
)
def test_weights_are_those_of_the_library(tmp_path, caplog, preset, said):
    tensors = linear()
    with caplog.at_level(logging.WARNING):
        checkpoint = save(tmp_path / "m", tensors, preset)
    assert ("config_groups.group_0: activations are not rounded" in caplog.text) == said
    scheme, weight = checkpoint.linear(Q)
    packed, scale = tensors.values()
    want = fp4.unpack_fp4_from_uint8(packed, N, K, torch.float32).unflatten(1, (-1, 32))
    want *= mx_utils.decompress_mx_scale(scale).float()[..., None]
    assert scheme == "mxfp4" and torch.equal(weight.dequantize(), want.flatten(1))
    assert checkpoint.grid(Q) == ("mxfp4", WEIGHT_SCHEMES["mxfp4"].spec)
    assert checkpoint.linear("lm_head")[0] == "fp16"


@pytest.mark.parametrize("changes, text", [
    ({"group_size": 16}, "group_size: expected 32, got 16"),
    ({"symmetric": False}, "symmetric: expected True, got False"),
    ({"num_bits": 8}, "num_bits: expected 4, got 8"),
    ({"dynamic": True}, "dynamic: expected False, got True"),
    ({"strategy": "channel", "group_size": None}, "strategy: expected 'group', got 'channel'"),
])  # fmt: skip
def test_other_grids_are_refused(tmp_path, changes, text):
    with pytest.raises(UnsupportedError, match=rf"group_0\.weights\.{text}"):
        save(tmp_path / "m", linear(), presets.MXFP4A16, **changes)


@pytest.mark.parametrize("tensors, text", [
    (linear(k=48), rf"{Q}: group_size 32 does not divide its 48 input features"),
    (linear(groups=6), rf"{Q}\.weight_scale: expected shape \[N K/32\] with N=24, K=96, got \[24, 6\]"),
    ({**linear(), f"{Q}.weight_scale": torch.full((N, 3), 255).to(torch.uint8)}, r"0 to 254, got 255"),
    ({**linear(), f"{Q}.weight_scale": torch.ones(N, 3)}, "expected dtype torch.uint8, got torch.float32"),
    ({**linear(), f"{Q}.weight_global_scale": torch.ones(1)}, "weight_global_scale: of no use"),
])  # fmt: skip
def test_what_does_not_fit_is_named(tmp_path, tensors, text):
    with pytest.raises(CheckpointError, match=text):
        save(tmp_path / "m", tensors, presets.MXFP4A16).linear(Q)


@pytest.mark.parametrize("left, text", [
    ("lm_head", "expected a list of names, got 'lm_head'"),
    (["*.gate"], r"regular expressions, got \['\*\.gate'\]"),
])  # fmt: skip
def test_modules_to_leave_are_patterns(tmp_path, left, text):
    entry = {"quant_method": "mxfp4", "modules_to_not_convert": left}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": entry}))
    with pytest.raises(CheckpointError, match=f"modules_to_not_convert: .*{text}"):
        open_checkpoint(tmp_path, weights=False)
