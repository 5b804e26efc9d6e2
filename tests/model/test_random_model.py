"""random_model: the sizes of a real checkpoint in every scheme, and activations that stay of order one."""

import json
from dataclasses import replace

import pytest
import torch

from hand_steps import Requests
from qrt import EngineConfig, SamplingParams
from qrt.arch.read import read_arch
from qrt.assets import model_path
from qrt.engine.engine import Engine
from qrt.errors import CheckpointError, ConfigError, UnsupportedError
from qrt.model.random import random_model
from qrt.quant.checkpoint.compressed_tensors import quantization_config
from qrt.quant.weight import WEIGHT_SCHEMES, quantized
from qrt.quant.weight.base import Layout
from qrt.quant.weight.head import head_grid

CONFIG = read_arch(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 500,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    },
    "model",
)
GRIDS = [
    ("fp16", None, None),
    ("w8a16", None, None),
    ("w4a16", None, None),
    ("w4a16", 32, True),
    ("w4a16", 64, False),
    ("w8a8", None, None),
    ("w4a8", None, None),
    ("w4a8", 32, True),
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
    model, kind = make(scheme), WEIGHT_SCHEMES[scheme]
    bits = 8 if scheme == "w4a8" else kind.spec.bits if kind.spec else 32  # a CPU multiplies int8 codes
    most = 16 if kind.layout is Layout.OWN else bits  # where only the scheme knows how wide a code lies
    weights = 3 * (256 * 256 * 2 + 256 * 256 + 3 * 256 * 512)
    in_layers = model.num_bytes - 4 * (2 * 500 * 256 + 7 * 256)
    assert weights * bits / 8 <= in_layers < weights * (most / 8 + 0.2)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("scheme", "wanted"), [("w4a16", "w8a16"), ("w8a16", "w8a16"), ("w8a8", "w8a8"), ("w4a8", "w8a8")]
)
def test_a_quantized_head(scheme, wanted, tied):
    """Of a vocabulary that is no multiple of anything; as calibrated checkpoints it is not tied."""
    config = replace(CONFIG, vocab_size=509, tied_embeddings=tied)
    model = make(scheme, config=config, head_bits=8)
    assert model.head.scheme == wanted and model.schemes == {scheme: 12}
    assert f"{scheme} (head {wanted})" in str(model) and not model.arch.tied_embeddings
    logits = Requests(model).run([(0, list(range(20)))])[0]
    assert logits.shape == (20, 509) and 0.3 < logits.std() < 3
    plain = make(scheme, config=replace(config, tied_embeddings=False))
    assert all(torch.equal(*pair) for pair in zip(model.layers[0].mlp.down.tensors,
                                                  plain.layers[0].mlp.down.tensors, strict=True))  # fmt: skip
    saved = plain.num_bytes - model.num_bytes
    assert 2.8 * 509 * 256 < saved < 3 * 509 * 256  # fp32 to int8, with scales and padding


def test_heads_that_are_refused():
    with pytest.raises(ConfigError, match="--head-bits: expected one of 8, 16, got 4"):
        make("w4a16", head_bits=4)
    with pytest.raises(ConfigError, match="--head-bits 8: expected quantized layers, got fp16"):
        make("fp16", head_bits=8)


def test_seeds():
    first, same, other = make("w4a16"), make("w4a16"), make("w4a16", seed=1)
    pairs = list(zip(first.linears(), same.linears(), other.linears(), strict=True))
    assert all(torch.equal(a.tensors[0], b.tensors[0]) for a, b, _ in pairs)
    assert not any(torch.equal(a.tensors[0], c.tensors[0]) for a, _, c in pairs)


def test_a_group_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match="group size 96 does not divide 256"):
        make("w4a16", 96)


def test_biases_and_head_norms_of_other_architectures():
    qwen = replace(CONFIG, name="Qwen2ForCausalLM", qkv_bias=True, tied_embeddings=True)
    model = make("w4a16", config=qwen)
    assert model.layers[0].attention.qkv.bias.shape == (512,)
    assert model.head.tensors[0].data_ptr() == model.embed.weight.data_ptr()
    qwen3 = make("w8a16", config=replace(CONFIG, name="Qwen3ForCausalLM", qk_norm="head"))
    assert Requests(qwen3).run([(0, [1, 2, 3])])[0].isfinite().all()


def quantized_tiny(folder, entry, **changes):
    """The bundled model's config.json with a quantization_config, and no weights."""
    config = json.loads((model_path("tiny") / "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, **changes, "quantization_config": entry}))
    return str(folder)


@pytest.mark.parametrize("scheme", quantized())
def test_load_format_dummy_needs_no_weights(scheme, tmp_path):
    spec = WEIGHT_SCHEMES[scheme].spec
    folder = quantized_tiny(tmp_path / "m", quantization_config(scheme, spec, ["lm_head"], {}))
    with pytest.raises(CheckpointError, match="safetensors"):
        Engine(EngineConfig(folder))
    engine = Engine(EngineConfig(folder, load_format="dummy"))
    assert engine.model.schemes == {scheme: 4 * 6}
    engine.add("a", [1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))
    tokens = 0
    while engine.has_work:
        tokens += sum(len(delta.token_ids) for delta in engine.step())
    assert tokens == 3
    with pytest.raises(ConfigError, match="load_format"):
        EngineConfig(folder, load_format="dumy")


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
def test_load_format_dummy_makes_the_head_that_the_config_names(scheme, tmp_path):
    head = head_grid(scheme, 8)
    entry = quantization_config(scheme, WEIGHT_SCHEMES[scheme].spec, [], {}, {"lm_head": head})
    folder = quantized_tiny(tmp_path / "m", entry, tie_word_embeddings=False)
    model = Engine(EngineConfig(folder, load_format="dummy")).model
    assert model.head.scheme == head[0] and model.schemes == {scheme: 4 * 6}


def test_load_format_dummy_needs_a_complete_config(tmp_path):
    folder = quantized_tiny(tmp_path / "m", {"quant_method": "gptq", "bits": 4, "group_size": 128})
    with pytest.raises(UnsupportedError, match="expected a plain or a compressed-tensors config"):
        Engine(EngineConfig(folder, load_format="dummy"))


def test_only_experts_are_in_mxfp4():
    """As gpt-oss is published; a model without experts has all its layers so."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    mixture = read_arch({"architectures": ["GptOssForCausalLM"], **sizes, "num_local_experts": 4}, "x")
    llama = read_arch({"architectures": ["LlamaForCausalLM"], **sizes}, "x")
    found = [
        random_model(arch, "mxfp4", device=torch.device("cpu"), dtype=torch.bfloat16)
        for arch in (mixture, llama)
    ]
    assert [model.schemes for model in found] == [{"fp16": 4, "mxfp4": 4}, {"mxfp4": 8}]


def test_a_stored_correction_prefers_no_expert():
    """Whatever its shape; else all tokens of a model for measurements would choose the same experts."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "moe_intermediate_size": 32, "intermediate_size": 64}
    for name, own in {
        "Ernie4_5_MoeForCausalLM": {"moe_num_experts": 4, "moe_k": 2},
        "Glm4MoeForCausalLM": {"n_routed_experts": 4, "num_experts_per_tok": 2, "head_dim": 32},
    }.items():
        arch = read_arch({"architectures": [name], **sizes, **own}, "model")
        model = random_model(arch, "fp16", device=torch.device("cpu"), dtype=torch.float32)
        correction = model.layers[1].mlp.choose.correction
        assert correction.shape == (4,) and len(set(correction.tolist())) == 1
