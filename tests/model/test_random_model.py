"""random_model: the sizes of a real checkpoint in every scheme, and activations that stay of order one."""

from dataclasses import replace

import pytest
import torch
from hand_steps import Requests

from qrt.arch import ARCHS, ModelConfig
from qrt.errors import ConfigError
from qrt.model.random import random_model
from qrt.quant.weight import WEIGHT_SCHEMES

CONFIG = ModelConfig.from_hf(
    {
        "vocab_size": 500,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    },
    ARCHS["LlamaForCausalLM"],
)
GRIDS = [
    ("fp16", None, None),
    ("w8a16", None, None),
    ("w4a16", None, None),
    ("w4a16", 32, True),
    ("w4a16", 64, False),
    ("w8a8", None, None),
]


def make(scheme, group_size=None, symmetric=None, config=CONFIG, **options):
    cpu = torch.device("cpu")
    return random_model(config, scheme, group_size, symmetric, device=cpu, dtype=torch.float32, **options)


@pytest.mark.parametrize(("scheme", "group_size", "symmetric"), GRIDS)
def test_it_runs_and_stays_of_order_one(scheme, group_size, symmetric):
    model = make(scheme, group_size, symmetric)
    assert model.schemes == {scheme: 12} and model.head.scheme == "fp16"
    requests = Requests(model)
    prompt = torch.randint(500, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = requests.run([(0, prompt)])[0]
    assert logits.isfinite().all() and 0.3 < logits.std() < 3
    assert requests.run([(0, [1])])[0].isfinite().all()


@pytest.mark.parametrize("scheme", WEIGHT_SCHEMES)
def test_bytes_are_those_of_the_scheme(scheme):
    model = make(scheme)
    spec = WEIGHT_SCHEMES[scheme].spec
    weights = 3 * (256 * 256 * 2 + 256 * 256 + 3 * 256 * 512)
    in_layers = model.num_bytes - 4 * (2 * 500 * 256 + 7 * 256)
    assert (
        weights * (spec.bits if spec else 32) / 8
        <= in_layers
        < weights * ((spec.bits if spec else 32) / 8 + 0.2)
    )


def test_seeds():
    first, same, other = make("w4a16"), make("w4a16"), make("w4a16", seed=1)
    pairs = list(zip(first.linears(), same.linears(), other.linears(), strict=True))
    assert all(torch.equal(a.tensors[0], b.tensors[0]) for a, b, _ in pairs)
    assert not any(torch.equal(a.tensors[0], c.tensors[0]) for a, _, c in pairs)


def test_a_group_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match="group size 96 does not divide 256"):
        make("w4a16", 96)


def test_biases_and_head_norms_of_other_architectures():
    qwen = replace(CONFIG, architecture="Qwen2ForCausalLM", qkv_bias=True, tied_embeddings=True)
    model = make("w4a16", config=qwen)
    assert model.layers[0].attention.qkv.bias.shape == (512,)
    assert model.head.tensors[0].data_ptr() == model.embed.weight.data_ptr()
    qwen3 = make("w8a16", config=replace(CONFIG, architecture="Qwen3ForCausalLM", qk_norm=True))
    assert Requests(qwen3).run([(0, [1, 2, 3])])[0].isfinite().all()
