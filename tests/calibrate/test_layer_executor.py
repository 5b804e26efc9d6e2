"""Running layer by layer gives what transformers' whole model gives, masks, windows and RoPE included."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from qrt.arch import ARCHS
from qrt.errors import CheckpointError
from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.spec import Granularity, QuantSpec
from qrt_calibrate import decoder as decoder_module
from qrt_calibrate.decoder import Decoder
from qrt_calibrate.observe import observe_inputs
from tiny_models import LLAMA3_ROPE

CASES = [
    ("LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE, "attention_bias": True}),
    ("MistralForCausalLM", {"sliding_window": 16}),
    ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
]


def layer_tensors(checkpoint, index):
    prefix = f"model.layers.{index}."
    names = [name for name in checkpoint.names() if name.startswith(prefix)]
    return {name.removeprefix(prefix): checkpoint.tensor(name) for name in names}


@torch.no_grad()
@pytest.mark.parametrize("architecture, config", CASES)
def test_hidden_states_are_those_of_transformers(architecture, config, make_checkpoint, monkeypatch):
    monkeypatch.setattr(decoder_module, "BATCH_TOKENS", 100)  # two windows of 40 at a time, then one
    folder = make_checkpoint(architecture, dtype=torch.float32, **config)
    checkpoint = open_checkpoint(folder)
    windows = torch.randint(0, 512, (3, 40), generator=torch.Generator().manual_seed(0))
    decoder = Decoder(checkpoint, ARCHS[architecture], 40, torch.device("cpu"))
    hidden = decoder.embed(windows)
    wanted = AutoModelForCausalLM.from_pretrained(folder)(windows, output_hidden_states=True).hidden_states
    assert torch.equal(hidden, wanted[0])
    layer = decoder.load(0, layer_tensors(checkpoint, 0))
    for part, output in decoder.outputs(0, layer, hidden):
        part.copy_(output)
    torch.testing.assert_close(hidden, wanted[1])
    last = decoder.load(1, layer_tensors(checkpoint, 1))
    whole = AutoModelForCausalLM.from_pretrained(folder).model
    whole.norm = nn.Identity()
    torch.testing.assert_close(decoder.run(1, last, hidden), whole(windows).last_hidden_state)


@torch.no_grad()
def test_statistics_are_means_over_all_tokens(llama, monkeypatch):
    monkeypatch.setattr(decoder_module, "BATCH_TOKENS", 100)
    checkpoint = open_checkpoint(llama)
    decoder = Decoder(checkpoint, ARCHS["LlamaForCausalLM"], 40, torch.device("cpu"))
    hidden = decoder.embed(torch.randint(0, 512, (3, 40)))
    layer = decoder.load(0, layer_tensors(checkpoint, 0))
    spec = QuantSpec(4, symmetric=True, granularity=Granularity.GROUP, group_size=64)
    seen = observe_inputs(layer, ["mlp.down_proj"], spec, lambda: list(decoder.outputs(0, layer, hidden)))
    inputs = []
    layer.mlp.down_proj.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    decoder.run(0, layer, hidden)
    assert len(inputs) == 1 and list(seen) == ["mlp.down_proj"]
    x = inputs[0].double().flatten(0, 1)
    torch.testing.assert_close(seen["mlp.down_proj"].mean_abs, x.abs().mean(0).float())
    torch.testing.assert_close(seen["mlp.down_proj"].moment, second_moment(x, 64))
    scales = torch.rand(256) + 0.5
    divided = seen["mlp.down_proj"].divided(scales)
    torch.testing.assert_close(divided.mean_abs, (x / scales).abs().mean(0).float())
    torch.testing.assert_close(divided.moment, second_moment(x / scales, 64))


def second_moment(x, group):
    blocks = [part.T @ part / x.shape[0] for part in x.split(group, dim=1)]
    return torch.stack(blocks).float()


def test_tensors_that_do_not_fit_are_named(llama):
    checkpoint = open_checkpoint(llama)
    decoder = Decoder(checkpoint, ARCHS["LlamaForCausalLM"], 8, torch.device("cpu"))
    tensors = layer_tensors(checkpoint, 1)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: shape \[3, 128\]"):
        decoder.load(1, {**tensors, "mlp.up_proj.weight": torch.zeros(3, 128)})
    del tensors["mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        decoder.load(1, tensors)
    with pytest.raises(CheckpointError, match="the tokenizer gives id 512, but the embedding has 512 rows"):
        decoder.embed(torch.tensor([[0, 512]]))
