"""What checkpoints of mixtures hold beside experts: corrections of scores, layers that qrt does not run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hand_steps import Requests
from qrt.errors import CheckpointError
from truth import ours, prompt
from zoo import LONG, MODELS, make

CORRECTION = "model.layers.1.mlp.gate.e_score_correction_bias"


def change(folder, tensors):
    """Store `tensors` in a checkpoint; None takes one away."""
    stored = load_file(folder / "model.safetensors") | tensors
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def test_a_missing_correction_is_named(tmp_path):
    make("glm4_moe", tmp_path)
    change(tmp_path, {CORRECTION: None})
    with pytest.raises(CheckpointError, match=f"1 missing that config.json asks for: {CORRECTION}"):
        ours(tmp_path)


def test_a_correction_without_a_reader_must_be_zero(tmp_path):
    make("qwen3_moe", tmp_path)
    before = Requests(ours(tmp_path)).run([(0, prompt(20))])[0]
    name = CORRECTION.replace("layers.1", "layers.2")
    change(tmp_path, {name: torch.zeros(8)})
    assert torch.equal(Requests(ours(tmp_path)).run([(0, prompt(20))])[0], before)
    change(tmp_path, {name: torch.ones(8)})
    with pytest.raises(CheckpointError, match=f"1 tensors that Qwen3MoeForCausalLM .* does not use: {name}"):
        ours(tmp_path)


def test_a_correction_of_another_shape_is_named(tmp_path):
    make("glm4_moe", tmp_path)
    change(tmp_path, {CORRECTION: torch.zeros(7)})
    with pytest.raises(CheckpointError, match=rf"{CORRECTION}: expected shape \[8\].* got \[7\]"):
        ours(tmp_path)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    make("glm4_moe", tmp_path)
    before = Requests(ours(tmp_path)).run([(0, prompt(20))])[0]
    extra = "model.layers.4."
    change(
        tmp_path, {f"{extra}eh_proj.weight": torch.ones(128, 256), f"{extra}enorm.weight": torch.ones(128)}
    )
    assert torch.equal(Requests(ours(tmp_path)).run([(0, prompt(20))])[0], before)
    change(tmp_path, {"model.layers.5.enorm.weight": torch.ones(128)})
    with pytest.raises(CheckpointError, match="does not use: model.layers.5.enorm.weight"):
        ours(tmp_path)


def test_experts_that_are_stacked_are_read_either_way_round(tmp_path):
    """Qwen3-VL-MoE's are published [E, in, out]; transformers 5 saves them [E, out, in]."""
    make("qwen3_vl_moe", tmp_path)
    before = Requests(ours(tmp_path)).run([(0, prompt(20))])[0]
    stored = load_file(tmp_path / "model.safetensors")
    experts = {name: own.mT.contiguous() for name, own in stored.items() if ".experts." in name}
    assert len(experts) == 2 * 4
    change(tmp_path, experts)
    assert torch.equal(Requests(ours(tmp_path)).run([(0, prompt(20))])[0], before)
    change(tmp_path, {name: own[:, :-1].contiguous() for name, own in experts.items() if "down" in name})
    with pytest.raises(CheckpointError, match=r"down_proj: expected shape \[128, 96\].* got \[128, 95\]"):
        ours(tmp_path)


@torch.inference_mode()
@pytest.mark.parametrize("length", [24, 40])
def test_phimoe_turns_long_requests_by_its_long_factors(length, monkeypatch, tmp_path):
    """Its class in transformers 5.17 makes the frequencies without the length, which is given here."""
    rope = LONG | {"short_mscale": 1.1, "long_mscale": 1.3, "original_max_position_embeddings": 24}
    config = MODELS["phimoe"].config | {"rope_parameters": rope}
    monkeypatch.setitem(MODELS, "phimoe", replace(MODELS["phimoe"], config=config))
    model = make("phimoe", tmp_path)
    rotary_dim = model.model.rotary_emb
    rotary_dim.rope_init_fn = lambda config: ROPE_INIT_FUNCTIONS["longrope"](config, None, seq_len=length)
    tokens = prompt(length)
    got = Requests(ours(tmp_path), long=length > 24).run([(0, tokens)])[0]
    torch.testing.assert_close(got, model(input_ids=torch.tensor([tokens])).logits[0], rtol=1e-4, atol=1e-4)
