"""A massive activation in the first token, as real models have, in a checkpoint that computes the same.

    from massive import make_massive
    folder = make_massive(model_path("tiny"), tmp_path / "massive")

Real Llamas, Qwens and Mistrals write a value of thousands of times the usual size into one channel of the
first token's residual stream, and take it away near the end (Sun et al., arXiv:2402.17762). RMSNorm divides
it out of what the layers between read, so an error in that token's stream is large and matters little. The
figures below are those of SmolLM2-135M-Instruct, where one neuron of layer 11 does it.

Here the first token is BOS. It attends itself alone, so everything that it computes is a constant, and the
checkpoint keeps that constant. A channel that is silent in all other tokens marks BOS in the embedding. A
neuron that reads this channel alone writes the massive value, and disturbs the other channels. In the last
layer a neuron takes all of it away, and a second one what rounding left. The channel's columns give every
Linear that reads a norm the output that it had. Other tokens' logits stay but for the rounding of these.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

MASSIVE = 187.0  # rms of the first token's stream by the median token's
WRITER = 33.0  # weight of down_proj that writes the massive value, by the mean magnitude of all
SPREAD = 0.17  # mean magnitude of that neuron's other weights, the same
MARK = 2.0  # rms of BOS's embedding by what it was


def make_massive(source: str | Path, out: str | Path, first: int = 1, massive: float = MASSIVE) -> Path:
    """Write checkpoint `source` with a massive activation behind layer `first` to `out`; returns `out`."""
    model, channel = silenced(source, first)
    inject(model, channel, model.config.bos_token_id, first, massive)
    return save(model, source, out)


def save(model: Any, source: str | Path, out: str | Path) -> Path:
    """Write a model in bf16, with the tokenizer of `source`, to `out`; returns `out`."""
    model.to(torch.bfloat16).save_pretrained(out)
    for path in Path(source).iterdir():
        if path.name.startswith("tokenizer"):
            shutil.copyfile(path, Path(out) / path.name)
    return Path(out)


@torch.no_grad()
def silenced(source: str | Path, first: int = 1) -> tuple[Any, int]:
    """Load `source` in fp32 with one channel of the stream silent; returns the model and the channel.

    It is the channel that the last MLP writes and the head reads least. Two neurons of layer `first`, and of
    the last layer, write nothing either.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    body = model.model
    embedded, written = body.embed_tokens.weight, body.layers[-1].mlp.down_proj.weight
    channel = int((embedded.norm(dim=0) * body.norm.weight.abs() * written.norm(dim=1)).argmin())
    embedded[:, channel] = 0
    body.norm.weight[channel] = 0
    for layer in body.layers:
        layer.self_attn.o_proj.weight[channel] = 0
        layer.mlp.down_proj.weight[channel] = 0
    for mlp in (body.layers[first].mlp, body.layers[-1].mlp):
        mlp.down_proj.weight[:, spare_neurons(mlp)] = 0
    return model, channel


def readers(body: Any) -> list[tuple[Any, Sequence[Any]]]:
    """Return each norm of the layers, with the Linears that read it, in the order they run in."""
    found: list[tuple[Any, Sequence[Any]]] = []
    for layer in body.layers:
        attention, mlp = layer.self_attn, layer.mlp
        found.append((layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)))
        found.append((layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)))
    return found


def spare_neurons(mlp: Any) -> list[int]:
    """Return the two neurons of an MLP that have the smallest weights to read with."""
    size = mlp.gate_proj.weight.norm(dim=1) * mlp.up_proj.weight.norm(dim=1)
    return size.topk(2, largest=False).indices.tolist()


@torch.no_grad()
def inject(model: Any, channel: int, bos: int, first: int, massive: float) -> None:
    """Change a silenced model in place: BOS gets the massive activation behind layer `first`."""
    body, last = model.model, len(model.model.layers) - 1
    spare = {layer: spare_neurons(body.layers[layer].mlp) for layer in (first, last)}
    streams = streams_of(model, bos)
    usual = body.layers[first].mlp.down_proj.weight.abs().mean()
    target = massive * rms(streams[2 * first + 1]) * len(streams[0]) ** 0.5
    added = torch.zeros_like(streams[0])  # to BOS's stream, by what it was
    added[channel] = ((MARK**2 - 1) * streams[0].square().sum()).sqrt()
    body.embed_tokens.weight[bos] += added
    for place, ((norm, linears), stream) in enumerate(zip(readers(body), streams, strict=True)):
        restore(norm, linears, stream, added, channel)
        layer, is_mlp = divmod(place, 2)
        seen, mlp = norm(stream + added), body.layers[layer].mlp
        if is_mlp and layer == first:
            column = SPREAD * usual * torch.randn(len(added), generator=torch.Generator().manual_seed(0))
            column *= (torch.pi / 2) ** 0.5  # of a normal value's mean magnitude
            column[channel] = WRITER * usual
            added += fire(mlp, spare[layer][0], seen, channel, column, target / column[channel])
        elif is_mlp and layer == last:
            for neuron in spare[layer]:
                value = added[channel].abs() / (WRITER * usual)
                added += fire(mlp, neuron, seen, channel, -added / value, value)


def streams_of(model: Any, bos: int) -> list[Tensor]:
    """Return the residual stream [H] that each norm of the layers sees in BOS."""
    found: list[Tensor] = []
    hooks = [
        norm.register_forward_pre_hook(lambda _, arguments: found.append(arguments[0][0, 0].clone()))
        for norm, _ in readers(model.model)
    ]
    model(torch.tensor([[bos]]))
    for hook in hooks:
        hook.remove()
    return found


def rms(stream: Tensor) -> Tensor:
    """Return the root mean square of a token's stream."""
    return stream.square().mean().sqrt()


def restore(norm: Any, linears: Sequence[Any], stream: Tensor, added: Tensor, channel: int) -> None:
    """Set the channel's column of each Linear so that BOS's output is what it was without `added`.

    The norm's gain makes these columns as large as the others.
    """
    norm.weight[channel] = 1
    before, after = norm(stream), norm(stream + added)
    lacking = []
    for linear in linears:
        linear.weight[:, channel] = 0
        lacking.append(linear.weight @ (before - after) / after[channel])
    usual = torch.cat([linear.weight.square().mean(1) for linear in linears]).mean().sqrt()
    gain = 2.0 ** (rms(torch.cat(lacking)) / usual).log2().round()
    norm.weight[channel] = gain
    for linear, column in zip(linears, lacking, strict=True):
        linear.weight[:, channel] = to_bf16(column / gain)


def fire(mlp: Any, neuron: int, seen: Tensor, channel: int, column: Tensor, value: Tensor) -> Tensor:
    """Let a neuron that reads the channel alone have `value` in BOS and write `column` by it.

    Returns what it adds to BOS's stream.
    """
    for linear in (mlp.gate_proj, mlp.up_proj):
        linear.weight[neuron] = 0
        linear.weight[neuron, channel] = to_bf16(value.sqrt() / seen[channel])
    mlp.down_proj.weight[:, neuron] = to_bf16(column)
    read = mlp.gate_proj.weight[neuron] @ seen
    return to_bf16(column) * F.silu(read) * read


def to_bf16(values: Tensor) -> Tensor:
    """Round to what the checkpoint keeps."""
    return values.bfloat16().float()
