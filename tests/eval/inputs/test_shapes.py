"""Write folders of known shapes, for servers without weights."""

import json

import pytest
from transformers import AutoConfig

from qrt.arch.read import read_arch
from qrt.errors import ConfigError
from qrt.quant.checkpoint import open_checkpoint
from qrt.text.tokenizer import Tokenizer
from qrt_eval.inputs.shapes import shape, write_folder


@pytest.mark.parametrize(("name", "scheme"), [("llama-3-8b", "w8a8"), ("qwen3-0.6b", "fp16")])
def test_a_folder_has_sizes_grids_and_every_token(name, scheme, tmp_path):
    write_folder(name, scheme, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    architecture = config["architectures"][0]
    sizes = read_arch({"architectures": [architecture], **config}, "shape")
    assert sizes.num_layers == shape(name).num_layers and sizes.vocab_size == shape(name).vocab_size
    assert AutoConfig.from_pretrained(tmp_path / "m").hidden_size == config["hidden_size"]  # by model_type
    checkpoint = open_checkpoint(tmp_path / "m", weights=False)
    assert checkpoint.grid("model.layers.0.mlp.down_proj")[0] == scheme
    assert checkpoint.grid("lm_head") == ("fp16", None)
    tokenizer = Tokenizer(tmp_path / "m")
    assert len(tokenizer.hf) == sizes.vocab_size and tokenizer.eos_token_ids == (1,)
    assert all(tokenizer.decode([token]) for token in (5000, sizes.vocab_size - 1))
    assert tokenizer.decode(tokenizer.encode("The president of")) == "The president of"


@pytest.mark.parametrize(("scheme", "head"), [("w4a16", "w8a16"), ("w8a8", "w8a8")])
def test_a_folder_with_a_quantized_head(scheme, head, tmp_path):
    write_folder("qwen3-0.6b", scheme, tmp_path / "m", 8)
    checkpoint = open_checkpoint(tmp_path / "m", weights=False)
    assert checkpoint.grid("lm_head")[0] == head and checkpoint.config["tie_word_embeddings"] is False
    assert checkpoint.grid("model.layers.0.mlp.down_proj")[0] == scheme


def test_an_unknown_shape(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'llama-3-8b'"):
        write_folder("llama3-8b", "w8a8", tmp_path)
