"""Experts that a checkpoint stores as one tensor: what must be there, and errors that name what is not."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from qrt.errors import CheckpointError
from qrt.quant.checkpoint import open_checkpoint
from truth import ours
from zoo import make

EXPERTS = "model.layers.2.mlp.experts"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt_oss")
    make("gpt_oss", folder)
    return folder


def test_an_expert_is_read_alone(saved):
    checkpoint, stored = open_checkpoint(saved), load_file(saved / "model.safetensors")
    scheme, weight = checkpoint.expert(f"{EXPERTS}.down_proj", 5, transposed=True)
    assert scheme == "fp16" and torch.equal(weight.values, stored[f"{EXPERTS}.down_proj"][5].T)
    assert torch.equal(weight.bias, stored[f"{EXPERTS}.down_proj_bias"][5])
    with pytest.raises(CheckpointError, match="down_proj: expected more than 8 experts, got 8"):
        checkpoint.expert(f"{EXPERTS}.down_proj", 8, transposed=True)


@pytest.mark.parametrize("change, text", [
    ({"gate_up_proj": None}, r"no tensor 'model\.layers\.2\.mlp\.experts\.gate_up_proj'"),
    ({"down_proj_bias": None}, r"1 missing .*: model\.layers\.2\.mlp\.experts\.down_proj_bias"),
    ({"gate_up_proj_extra": (8, 1)}, "gate_up_proj_extra"),
    ({"other": (1,)}, r"1 tensors .* does not use: model\.layers\.2\.mlp\.experts\.other"),
    ({"down_proj": (7, 192, 128)}, "down_proj: expected more than 7 experts, got 7"),
    ({"down_proj": (9, 192, 128)}, "down_proj: expected 8 experts, got 9"),
    ({"down_proj_bias": (9, 128)}, "down_proj_bias: expected 8 experts, got 9"),
    ({"down_proj_bias": ()}, "down_proj_bias: expected more than 7 experts, got one number"),
    ({"down_proj": (8, 128, 192)}, "down_proj"),
    ({"down_proj_bias": (8, 127)}, r"experts\.down_proj_bias: expected shape \[N\] with N=128, got \[127\]"),
])  # fmt: skip
def test_what_does_not_fit_is_named(saved, tmp_path, change, text):
    """None removes a tensor, a shape replaces it or adds one."""
    folder = shutil.copytree(saved, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for name, shape in change.items():
        tensors.pop(f"{EXPERTS}.{name}", None)
        if shape is not None:
            tensors[f"{EXPERTS}.{name}"] = torch.zeros(shape)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=text) as raised:
        ours(folder)
    assert "\n" not in str(raised.value)
