"""Write folders of known shapes, for servers without weights."""

import json

import pytest
from transformers import AutoConfig

from qrt.arch.read import read_arch
from qrt.errors import ConfigError
from qrt.quant.checkpoint import open_checkpoint
from qrt.text.tokenizer import Tokenizer
from qrt_eval.inputs.shapes import shape, write_folder


@pytest.mark.parametrize(
    ("name", "scheme"), [("llama-3-8b", "w4a8"), ("qwen3-0.6b", "fp16"), ("glm-4-9b", "w4a16")]
)
def test_a_folder_has_sizes_grids_and_every_token(name, scheme, tmp_path):
    write_folder(name, scheme, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    architecture = config["architectures"][0]
    sizes = read_arch({"architectures": [architecture], **config}, "shape")
    assert sizes.num_layers == shape(name).num_layers and sizes.vocab_size == shape(name).vocab_size
    assert AutoConfig.from_pretrained(tmp_path / "m").hidden_size == sizes.hidden_size  # by model_type
    checkpoint = open_checkpoint(tmp_path / "m", weights=False)
    assert checkpoint.grid("model.layers.0.mlp.down_proj")[0] == scheme
    assert checkpoint.grid("lm_head") == ("fp16", None)
    tokenizer = Tokenizer(tmp_path / "m")
    assert len(tokenizer.hf) == sizes.vocab_size and tokenizer.eos_token_ids == (1,)
    assert all(tokenizer.decode([token]) for token in (5000, sizes.vocab_size - 1))
    assert tokenizer.decode(tokenizer.encode("The president of")) == "The president of"


@pytest.mark.parametrize(
    ("scheme", "head"),
    [
        ("w4a16", "w8a16"),
        ("w4a8", "w8a8"),
        pytest.param("w8a8", "w8a8", marks=pytest.mark.exhaustive),  # so is test_latency's
    ],
)
def test_a_folder_with_a_quantized_head(scheme, head, tmp_path):
    write_folder("qwen3-0.6b", scheme, tmp_path / "m", 8)
    checkpoint = open_checkpoint(tmp_path / "m", weights=False)
    assert checkpoint.grid("lm_head")[0] == head and checkpoint.config["tie_word_embeddings"] is False
    assert checkpoint.grid("model.layers.0.mlp.down_proj")[0] == scheme


def test_a_folder_as_gpt_oss_is_published(tmp_path):
    write_folder("gpt-oss-20b", "mxfp4", tmp_path / "m")
    assert AutoConfig.from_pretrained(tmp_path / "m").num_local_experts == 32
    checkpoint = open_checkpoint(tmp_path / "m", weights=False)
    for name, scheme in {
        "mlp.experts.down_proj": "mxfp4",
        "self_attn.q_proj": "fp16",
        "mlp.router": "fp16",
    }.items():
        assert checkpoint.grid(f"model.layers.23.{name}")[0] == scheme
    assert checkpoint.grid("lm_head") == ("fp16", None)


@pytest.mark.parametrize(("name", "head_bits", "text"), [
    ("llama-3-8b", 16, r"weights mxfp4: expected a shape with stacked experts .*, got llama-3-8b"),
    ("qwen3-30b-a3b", 16, "weights mxfp4: .*got qwen3-30b-a3b"),
    ("gpt-oss-20b", 8, "--head-bits: expected 16 beside mxfp4, got 8"),
])  # fmt: skip
def test_a_folder_that_nobody_publishes(name, head_bits, text, tmp_path):
    with pytest.raises(ConfigError, match=text):
        write_folder(name, "mxfp4", tmp_path / "m", head_bits)


def test_an_unknown_shape(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'llama-3-8b'"):
        write_folder("llama3-8b", "w8a8", tmp_path)
