"""Folds by powers of two change no logit by one bit; a pair that is wrong is caught before it does harm."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from qrt.arch.base import Smooth
from qrt.arch.read import read_arch
from qrt.errors import QrtError
from qrt_calibrate.rounding.fold import Pair, check_unchanged
from tiny_models import random_checkpoint

CASES = [
    ("LlamaForCausalLM", {}),
    ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    ("MistralForCausalLM", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    ("Qwen2ForCausalLM", {}),
    ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
]


def powers(channels, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.exp2(torch.randint(-4, 5, (channels,), generator=generator).float())


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture, config", CASES)
def test_logits_are_bit_identical(architecture, config, dtype, tmp_path):
    random_checkpoint(tmp_path, architecture, dtype=dtype, **config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == dtype
    ids = torch.randint(0, 512, (2, 40), generator=torch.Generator().manual_seed(1))
    before = model(ids).logits.clone()
    arch = read_arch({**model.config.to_dict(), "architectures": [architecture]}, "model")
    changed = 0.0
    for index, layer in enumerate(model.get_submodule(arch.names.layers)):
        for smooth in arch.smooth:
            source = layer.get_submodule(smooth.source).weight
            old = source.clone()
            Pair(layer, smooth, arch.head_dim).fold(powers(source.shape[0], seed=index))
            changed += float((source - old).abs().sum())
    assert changed > 0
    assert torch.equal(model(ids).logits, before)


def llama_layer():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_attention_heads=8, num_key_value_heads=2, head_dim=8
    )
    return LlamaDecoderLayer(config, 0).requires_grad_(False)


def test_tied_statistic_averages_the_query_heads_of_a_kv_head():
    pair = Pair(llama_layer(), Smooth("self_attn.v_proj", ("self_attn.o_proj",)), head_dim=8)
    columns = torch.arange(64.0)  # o_proj reads 8 query heads of 8 channels; 4 query heads per KV head
    wanted = torch.tensor(
        [[sum(64 / 2 * h + 8 * r + d for r in range(4)) / 4 for d in range(8)] for h in range(2)]
    )
    assert torch.equal(pair.tie(columns), wanted.flatten())
    scales = powers(16, seed=0)
    spread = pair.spread(scales).view(2, 4, 8)
    assert torch.equal(spread, scales.view(2, 1, 8).expand(2, 4, 8))
    assert torch.equal(pair.tie(pair.spread(scales)), scales)


def test_fp16_underflow_is_seen():
    layer = llama_layer()
    layer.input_layernorm.weight.fill_(1.001)  # not a power of two: its last bits are lost below 2^-14
    pair = Pair(layer, Smooth("input_layernorm", ("self_attn.q_proj",)), head_dim=8)
    layer.input_layernorm.weight.copy_(layer.input_layernorm.weight.half().float())
    large = torch.full((64,), 2.0**18)
    assert pair.is_exact(torch.full((64,), 4.0), torch.float16)
    assert not pair.is_exact(large, torch.float16)
    assert pair.is_exact(large, torch.bfloat16)  # which rounds 1.001 without the fold too
    assert not pair.is_exact(torch.full((64,), 3.0), torch.bfloat16)


@torch.no_grad()
@pytest.mark.parametrize(
    "wrong",
    [
        Smooth("mlp.gate_proj", ("mlp.down_proj",)),  # the gate passes through SiLU
        Smooth("post_attention_layernorm", ("mlp.gate_proj",)),  # up_proj reads the norm too
    ],
)
def test_a_pair_that_changes_the_function_is_caught(wrong):
    layer = llama_layer()
    x = torch.randn(1, 5, 64)
    rope = torch.ones(1, 5, 8), torch.zeros(1, 5, 8)
    before = layer(x, position_embeddings=rope)
    pair = Pair(layer, wrong, head_dim=8)
    channels = layer.get_submodule(wrong.source).weight.shape[0]
    pair.fold(torch.ones(channels))
    check_unchanged(before, layer(x, position_embeddings=rope), x, "model.layers.0", wrong)
    pair.fold(powers(channels, seed=1))
    with pytest.raises(
        QrtError, match=rf"model\.layers\.0: folding scales from {wrong.source} into .*--method rtn"
    ):
        check_unchanged(before, layer(x, position_embeddings=rope), x, "model.layers.0", wrong)


def test_nan_counts_as_a_change():
    x = torch.zeros(1, 2, 4)
    check_unchanged(x, x, x, "model.layers.0", Smooth("a", ("b",)))  # a layer that adds nothing
    with pytest.raises(QrtError):
        check_unchanged(x + 1, x * torch.nan, x, "model.layers.0", Smooth("a", ("b",)))
