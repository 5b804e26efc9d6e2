"""Injected outliers change no logit by one bit, and are there."""

import pytest
import torch
from outliers import PROFILES, Profile, make_hard
from transformers import AutoModelForCausalLM

from qrt.quant.checkpoint import open_checkpoint
from tiny_models import random_checkpoint

CASES = [
    ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    ("MistralForCausalLM", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    ("Qwen3ForCausalLM", {}),
]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("architecture, config", CASES)
def test_logits_are_bit_identical(architecture, config, profile, dtype, tmp_path):
    plain = random_checkpoint(tmp_path / "plain", architecture, dtype=dtype, **config)
    hard = make_hard(plain, tmp_path / "hard", profile)
    ids = torch.randint(0, 512, (2, 40), generator=torch.Generator().manual_seed(1))
    logits = [AutoModelForCausalLM.from_pretrained(folder)(ids).logits for folder in (plain, hard)]
    assert torch.equal(*logits)


def test_the_outliers_are_where_the_profile_says(tmp_path):
    plain = open_checkpoint(random_checkpoint(tmp_path / "plain", "LlamaForCausalLM"))
    hard = open_checkpoint(make_hard(tmp_path / "plain", tmp_path / "hard", Profile(64.0, 5, heads=True)))

    def grown(name):
        ratio = hard.tensor(f"model.layers.1.{name}.weight") / plain.tensor(f"model.layers.1.{name}.weight")
        rows = ratio.view(ratio.shape[0], -1)  # up_proj also reads 5 channels of its norm small
        return int((rows.eq(64).float().mean(1) > 0.9).sum())

    assert [grown("input_layernorm"), grown("post_attention_layernorm"), grown("mlp.up_proj")] == [5, 5, 5]
    assert hard.config == plain.config
    values = hard.tensor("model.layers.0.self_attn.v_proj.weight").abs().amax(1)
    assert (values > 16 * values.median()).sum() == 2  # one channel of each of two KV heads
