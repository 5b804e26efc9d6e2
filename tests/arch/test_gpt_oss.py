"""What is read from a gpt-oss config.json, as it is published and by transformers."""

import pytest
import torch
from transformers import GptOssConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from qrt.arch.read import read_arch
from qrt.definitions.rope import frequencies
from qrt.errors import UnsupportedError

PUBLISHED = {  # of the 20B model
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
    "initial_context_length": 4096, "intermediate_size": 2880, "max_position_embeddings": 131072,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
    "rms_norm_eps": 1e-05, "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "vocab_size": 201088, "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False},
}  # fmt: skip


def test_published_config():
    arch = read_arch(PUBLISHED, "model")
    assert [arch.reach(i).most for i in range(4)] == [128, 0, 128, 0] and arch.num_layers == 24
    assert arch.qkv_bias and arch.o_bias and arch.max_position == 131072
    experts = arch.experts
    assert all(layer.sparse for layer in arch.layers)
    assert (experts.count, experts.router.top_k, experts.width) == (32, 4, 2880)
    assert experts.bias and experts.gate_bias and experts.router.score == "top"


@pytest.mark.parametrize("entries", [PUBLISHED, {"architectures": PUBLISHED["architectures"]}])
def test_rope_is_that_of_transformers(entries):
    """Its band between kept and stretched channels begins and ends between channels."""
    (rope,) = read_arch(entries, "model").ropes.values()
    theirs = GptOssConfig(**entries)
    theirs.standardize_rope_params()
    want, length = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    torch.testing.assert_close(frequencies(rope).float(), want, rtol=1e-6, atol=0)
    assert rope.length == pytest.approx(length, rel=1e-12) and not rope.truncate


@pytest.mark.parametrize("change", [{"swiglu_limit": 5.0}, {"hidden_act": "gelu"}])
def test_another_activation_is_refused(change):
    with pytest.raises(UnsupportedError, match=f"{next(iter(change))}: expected .*, got "):
        read_arch({**PUBLISHED, **change}, "model")
