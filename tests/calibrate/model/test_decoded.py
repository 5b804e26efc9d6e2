"""Checkpoints of fp8 and MXFP4 are calibrated from what their weights mean: as the plain weights would be."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import qrt
from byte_tokenizer import save_tokenizer
from coded_files import LAYOUTS, publish_codes
from mxfp4_files import publish
from qrt.errors import UnsupportedError
from tiny_models import altered
from zoo import make

TEXT = {"n_samples": 4, "seqlen": 32, "eval_samples": 1, "device": "cpu"}
RTN = {"method": "rtn", "eval_samples": 0, "device": "cpu"}
CASES = [  # each layout, each kind of model, each scheme
    ("llama", "blocks", {"bits": 4, "group_size": 32, **TEXT}),
    ("llama", "tensor", {"scheme": "w8a8", **RTN}),
    ("qwen3", "rows", {"bits": 8, **RTN}),
    ("gemma2", "ct-blocks", {"scheme": "w4a8", "group_size": 32, **RTN}),
    ("qwen3", "mxfp4", {"bits": 4, "group_size": 32, "head_bits": 8, **RTN}),
    ("minimax_m2", "blocks", {"bits": 4, "group_size": 32, **RTN}),
    ("glm4_moe", "rows", {"scheme": "w8a8", **RTN}),
    ("qwen3_moe", "mxfp4", {"bits": 4, "group_size": 32, **RTN}),
    ("granitemoe", "rows", {"bits": 4, "group_size": 32, **RTN}),
    ("gpt_oss", "tensor", {"bits": 8, **RTN}),
    ("llama4", "rows", {"bits": 4, "group_size": 32, **RTN}),
]


@pytest.fixture
def source(tmp_path):
    """source(name) -> a small model of the zoo in bfloat16, with a tokenizer."""

    def made(name):
        make(name, tmp_path / name).bfloat16().save_pretrained(tmp_path / name)
        save_tokenizer(tmp_path / name)
        return tmp_path / name

    return made


def is_linear(name):
    """Whether tools quantize the tensor: matrices of layers, no router and no norm."""
    stacked = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    inside = ".layers." in name and (name.endswith("_proj.weight") or "put_linear.weight" in name)
    return stacked or inside or name.endswith((".w1.weight", ".w2.weight", ".w3.weight"))


def same(got, want):
    """Both folders hold the same bytes of weights under the same quantization_config."""
    one, other = (load_file(folder / "model.safetensors") for folder in (got, want))
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]
    entries = [json.loads((folder / "config.json").read_text()) for folder in (got, want)]
    assert entries[0] == entries[1]


@pytest.mark.parametrize("name, layout, settings", CASES)
def test_calibrated_as_the_weights_they_mean(name, layout, settings, source, tmp_path, calib):
    coded, meant = publish_codes(layout, source(name), tmp_path, is_linear)
    settings = settings | ({} if settings.get("method") else {"calib": str(calib)})
    report = qrt.calibrate(coded, tmp_path / "got", **settings)
    qrt.calibrate(meant, tmp_path / "want", **settings)
    same(tmp_path / "got", tmp_path / "want")
    kind, method = "MXFP4" if layout == "mxfp4" else "fp8", LAYOUTS[layout][1]["quant_method"]
    assert report.to_json()["source_weights"] == f"{kind} ({method})"
    assert any(f"the source has {kind}" in own for own in report.to_json()["findings"])


def test_scales_of_activations_and_of_the_cache_are_left_out(source, tmp_path):
    """As compressed-tensors, vLLM, ModelOpt and AutoFP8 name them: they say nothing about the result."""
    coded, meant = publish_codes("rows", source("llama"), tmp_path, is_linear)
    inside = (
        "k_scale",
        "v_scale",
        "attn.k_scale",
        "k_proj.k_scale",
        "k_proj.output_scale",
        "q_proj.input_scale",
    )
    names = [f"model.layers.{i}.self_attn.{name}" for i in (0, 1) for name in inside]
    scaled = altered(coded, tmp_path / "scaled", lambda t: t.update({name: torch.ones(1) for name in names}))
    settings = {"bits": 4, "group_size": 32, **RTN}
    qrt.calibrate(scaled, tmp_path / "got", **settings)
    qrt.calibrate(meant, tmp_path / "want", **settings)
    same(tmp_path / "got", tmp_path / "want")


def test_gpt_oss_as_published(source, tmp_path):
    """transformers says what its blocks mean."""
    plain, settings = source("gpt_oss"), {"scheme": "w8a8", **RTN}
    coded = publish(plain, tmp_path / "coded")
    own = load_file(coded / "model.safetensors")

    def means(tensors):
        for name in [name for name in own if name.endswith("_blocks")]:
            packed = own[name], own[name.replace("_blocks", "_scales")]
            found = convert_moe_packed_tensors(*packed, dtype=torch.bfloat16)
            tensors[name.removesuffix("_blocks")] = found.contiguous()

    qrt.calibrate(coded, tmp_path / "got", **settings)
    qrt.calibrate(altered(plain, tmp_path / "plain", means), tmp_path / "want", **settings)
    same(tmp_path / "got", tmp_path / "want")


def test_tune_asks_for_plain_weights(source, tmp_path):
    coded, _ = publish_codes("rows", source("llama"), tmp_path, is_linear)
    with pytest.raises(UnsupportedError, match=r"--tune: expected a checkpoint without .*, got fp8"):
        qrt.calibrate(coded, tmp_path / "out", bits=4, group_size=32, tune=2, seqlen=32, device="cpu")
