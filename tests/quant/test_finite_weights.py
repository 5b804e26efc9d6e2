"""Codes or scales that mean NaN or infinity: refused when a Linear is read, by the name of its tensor."""

import json
import math

import pytest
import torch
from damage import refuse

from qrt.errors import CheckpointError
from qrt.model.loader import load_model
from qrt_calibrate.convert import convert
from tiny_models import altered
from tool_files import quantize_as

DOWN = "model.layers.0.mlp.down_proj"
NUMBERS = (math.nan, math.inf, -math.inf)


def set_first(name, value):
    """Change one element of a tensor; NaN of fp8, which has no infinity, is all ones but the sign."""

    def change(tensors):
        flat = tensors[name].view(-1)
        if flat.dtype == torch.float8_e4m3fn:
            flat.view(torch.uint8)[0] = 0x7F
        else:
            flat[0] = value

    return change


def fp8(made, out):
    """Write the plain checkpoint with one Linear in fp8, by a scale for each block of 128 x 128."""

    def change(tensors):
        weight = tensors[f"{DOWN}.weight"]
        tensors[f"{DOWN}.weight"] = weight.to(torch.float8_e4m3fn)
        blocks = [-(-size // 128) for size in weight.shape]
        tensors[f"{DOWN}.weight_scale_inv"] = torch.ones(blocks)

    altered(made / "plain", out, change)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (out / "config.json").write_text(json.dumps(config))
    return out


def by_a_tool(tool):
    def make(made, out):
        quantize_as(tool, made / "plain", out, out.with_name("floats"), [DOWN])
        method, bits = tool.partition("-")[0], 4
        config = json.loads((out / "config.json").read_text())
        entry = {"quant_method": method, "bits": bits, "group_size": 64, "sym": True, "zero_point": False}
        (out / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))
        return out

    return make


SOURCES = {  # who makes a checkpoint, the tensor of its codes, the one that is damaged
    "fp8 codes": (fp8, "weight", "weight"),
    "fp8 scales": (fp8, "weight", "weight_scale_inv"),
    "compressed-tensors": (lambda made, out: made / "w4", "weight_packed", "weight_scale"),
    "w8a8": (lambda made, out: made / "w8a8", "weight", "weight_scale"),
    "gptq": (by_a_tool("gptq-v1-sym"), "qweight", "scales"),
    "awq": (by_a_tool("awq-sym"), "qweight", "scales"),
}


@pytest.mark.parametrize("value", NUMBERS)
@pytest.mark.parametrize("name", SOURCES)
def test_codes_and_scales_mean_finite_weights(made, tmp_path, name, value):
    make, codes, damaged = SOURCES[name]
    source = make(made, tmp_path / "source")
    load_model(source, device=torch.device("cpu"), dtype=torch.float32)
    path = altered(source, tmp_path / "damaged", set_first(f"{DOWN}.{damaged}", value))
    said = rf"{DOWN}\.{codes}: expected codes and scales of finite weights, got NaN or infinity; download"
    refuse(path, CheckpointError, said, DOWN)
    with pytest.raises(CheckpointError, match=said):
        load_model(path, device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.parametrize("value", NUMBERS)
@pytest.mark.parametrize("target", ["compressed-tensors", "awq", "gptq"])
def test_convert_writes_no_scale_that_is_not_finite(made, tmp_path, target, value):
    source = by_a_tool("awq-sym")(made, tmp_path / "source")
    path = altered(source, tmp_path / "damaged", set_first(f"{DOWN}.scales", value))
    with pytest.raises(CheckpointError, match="expected codes and scales of finite weights"):
        convert(path, target, tmp_path / "out")
    assert not (tmp_path / "out").exists()
