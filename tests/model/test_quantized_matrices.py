"""Embeddings, routers and tied heads that are quantized: they run as the weights that they mean."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from coded_files import publish_codes
from hand_steps import Requests
from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.spec import Granularity, QuantSpec
from tiny_models import altered, quantize_checkpoint
from truth import ours, prompt, theirs
from zoo import make

PROMPT = prompt(40)
INT8 = QuantSpec(8, True, Granularity.CHANNEL)
INT4 = QuantSpec(4, False, Granularity.GROUP, 32)
MATRICES = ("embed_tokens.weight", "mlp.gate.weight", "shared_expert_gate.weight", "mlp.router.weight")


def logits(folder):
    return Requests(ours(folder)).run([(0, PROMPT)])[0]


@pytest.mark.parametrize("layout", ["tensor", "rows", "mxfp4"])
@pytest.mark.parametrize("name", ["qwen2_moe", "llama"])
def test_floats(name, layout, tmp_path):
    make(name, tmp_path / "plain")
    coded, meant = publish_codes(layout, tmp_path / "plain", tmp_path, lambda own: own.endswith(MATRICES))
    torch.testing.assert_close(logits(coded), theirs(meant, PROMPT), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("scheme, spec", [("w4a16", INT4), ("w8a16", INT8), ("w8a8", INT8)])
@pytest.mark.parametrize("name", ["glm4_moe", "gemma"])
def test_integers(name, scheme, spec, tmp_path):
    """Gemma's head is its embedding; GLM's router has a correction beside it."""
    make(name, tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    chosen = [own.removesuffix(".weight") for own in tensors if own.endswith(MATRICES)]
    written = quantize_checkpoint(tmp_path / "plain", tmp_path / "coded", scheme, spec, chosen)
    means = {f"{module}.weight": weight.dequantize() for module, weight in written.items()}
    meant = altered(tmp_path / "plain", tmp_path / "meant", lambda own: own.update(means))
    torch.testing.assert_close(logits(tmp_path / "coded"), theirs(meant, PROMPT), atol=1e-3, rtol=1e-3)


def test_a_tied_head_that_is_stored_beside_a_packed_embedding(tmp_path):
    make("gemma", tmp_path / "plain")
    embed = "model.embed_tokens"
    written = quantize_checkpoint(tmp_path / "plain", tmp_path / "coded", "w4a16", INT4, [embed])
    path = tmp_path / "coded" / "model.safetensors"
    head = open_checkpoint(tmp_path / "plain").tensor(f"{embed}.weight").clone()
    save_file(load_file(path) | {"lm_head.weight": head}, path)
    tensors = {f"{embed}.weight": written[embed].dequantize(), "lm_head.weight": head}
    meant = altered(tmp_path / "plain", tmp_path / "meant", lambda own: own.update(tensors))
    config = json.loads((meant / "config.json").read_text())
    (meant / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    torch.testing.assert_close(logits(tmp_path / "coded"), theirs(meant, PROMPT), atol=1e-3, rtol=1e-3)
