"""Say which kernel runs each product of a model, by the number of tokens in a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from qrt.definitions.stacks import stacks
from qrt.kernels import experts
from qrt.kernels.linear import explain
from qrt.kernels.linear.product import Epilogue
from qrt.layers.experts import MoE
from qrt.layers.linear import Linear
from qrt.model.decoder import Decoder
from qrt.model.fused import FusedDecoder
from qrt.model.links import Links
from qrt.model.merged import takes_int8
from qrt.quant.weight import WEIGHT_SCHEMES

CHAINED = "One operator computes all between two attentions (qrt.kernels.chain)."
STARTS = "One operator multiplies by digits, adds the result and takes the norm of it (qrt.kernels.chain)."
ENDS = "One operator adds the experts' outputs, takes the norm and multiplies by digits (qrt.kernels.chain)."


class Explained(NamedTuple):
    """Which kernel runs one product for a range of token counts.

    name     qkv, o, gate_up, down, expert gate_up, expert down or head
    layers   the layers whose product it is; empty for the head
    scheme   of the weight
    sizes    its inputs and outputs, K and N
    tokens   the fewest and the most tokens of the range
    why      which kernel runs, and why
    """

    name: str
    layers: tuple[int, ...]
    scheme: str
    sizes: tuple[int, int]
    tokens: tuple[int, int]
    why: str

    @property
    def place(self) -> str:
        """Return the name with the layers: `qkv of layers 0 to 31`."""
        return f"{self.name} of {_runs(self.layers)}" if self.layers else self.name

    @property
    def size(self) -> str:
        """Return K and N: `4096 x 6144`."""
        return f"{self.sizes[0]} x {self.sizes[1]}"

    @property
    def range(self) -> str:
        """Return the token counts: `17 to 32`."""
        first, last = self.tokens
        return f"{first} to {last}" if last > first else f"{first}"

    def __str__(self) -> str:
        """Return one line: `qkv of layers 0 to 31 (w4a16, 4096 x 6144), tokens 17 to 32: ...`."""
        return f"{self.place} ({self.scheme}, {self.size}), tokens {self.range}: {self.why}"


def explain_products(model: Decoder, tokens: Sequence[int]) -> Iterator[Explained]:
    """Yield which kernel runs each product in steps of these token counts.

    Layers that are multiplied alike come together, and so do neighbouring counts; the head comes last.
    """
    counts = sorted(set(tokens))
    alike: dict[tuple[str, str, tuple[int, int], tuple[str, ...]], list[int]] = {}
    for index in range(len(model.layers)):
        said = [_layer(model, index, count) for count in counts]
        parts = {
            name: (linear.scheme, _sizes(linear, inputs))
            for name, (linear, inputs) in _products(model, index).items()
        }
        for name, part in (parts | _expert_parts(model, index)).items():
            alike.setdefault((name, *part, tuple(whys[name] for whys in said)), []).append(index)
    head, hidden = model.head, model.arch.hidden_size
    whys = tuple(explain(_rows(model, count, hidden), head.tensors, head.scheme) for count in counts)
    alike["head", head.scheme, _sizes(head, hidden), whys] = []
    for (name, scheme, sizes, whys), layers in alike.items():
        for why, run in groupby(zip(counts, whys, strict=True), key=lambda pair: pair[1]):
            same = [count for count, _ in run]
            yield Explained(name, tuple(layers), scheme, sizes, (same[0], same[-1]), why)


def _products(model: Decoder, index: int) -> dict[str, tuple[Linear, int]]:
    """Return the products of a layer by name, with the inputs of each."""
    layer, found = model.layers[index], {}
    linears = {"qkv": layer.attention.qkv, "o": layer.attention.o}
    if (mlp := layer.mlp.dense) is not None:
        linears |= {"gate_up": mlp.gate_up, "down": mlp.down}
    for name, stack in stacks(model.arch, index).items():
        found[name] = linears[name], stack.in_features
    return found


def _expert_parts(model: Decoder, index: int) -> dict[str, tuple[str, tuple[int, int]]]:
    """Return the scheme, and one expert's sizes, of the products of a layer's experts, by name."""
    mixture, arch = model.layers[index].mlp, model.arch
    if not isinstance(mixture, MoE) or arch.experts is None:
        return {}
    hidden, inner = arch.hidden_size, arch.experts.width
    return {
        "expert gate_up": (mixture.gate_up.scheme, (hidden, 2 * inner)),
        "expert down": (mixture.down.scheme, (inner, hidden)),
    }


def _layer(model: Decoder, index: int, count: int) -> dict[str, str]:
    """Return which kernel runs each product of a layer in a step of `count` tokens, and why."""
    fused = model.fused if isinstance(model, FusedDecoder) else None
    residual = _rows(model, count, model.arch.hidden_size)
    found, epilogues, quantized = {}, {}, set()  # the last: whose tokens what is in front may quantize
    if fused is not None:
        quantized = {"qkv"} if index else set()
        quantized |= set() if model.layers[index].parallel else {"gate_up", "down"}
        epilogues = fused[index].epilogues(residual)
        own, before = fused[index].fitting(residual), fused[index - 1].fitting(residual) if index else Links()
        if own.whole is not None:
            found = dict.fromkeys(epilogues, CHAINED)
        if own.start is not None:
            found["o"] = STARTS
        if before.whole is not None or before.end is not None:
            found["qkv"] = ENDS if before.whole is None else CHAINED
    for name, (linear, inputs) in _products(model, index).items():
        if name not in found:
            epilogue = epilogues.get(name, Epilogue.PLAIN)
            coded = takes_int8(linear) and (epilogue is not Epilogue.PLAIN or name in quantized)
            x = _rows(model, count, inputs)
            found[name] = explain(x, linear.tensors, linear.scheme, epilogue, coded=coded)
    if isinstance(mixture := model.layers[index].mlp, MoE):
        gate_up, down, top_k = mixture.gate_up, mixture.down, mixture.choose.rules.top_k
        said = experts.explain(residual, top_k, gate_up.tensors, down.tensors, gate_up.scheme)
        found |= zip(("expert gate_up", "expert down"), said, strict=True)
    return found


def _rows(model: Decoder, count: int, width: int) -> Tensor:
    """Return a tensor [count, width] on the model's device that takes no memory."""
    return torch.empty(1, dtype=model.dtype, device=model.device).expand(count, width)


def _sizes(linear: Linear, inputs: int) -> tuple[int, int]:
    """Return K and N."""
    return inputs, WEIGHT_SCHEMES[linear.scheme].out_features(linear.tensors)


def _runs(layers: Sequence[int]) -> str:
    """Return ascending layers in words: `layer 3`, or `layers 0, 2 to 5`."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1][1:] = [layer]
        else:
            runs.append([layer])
    return f"layer{'s' * (len(layers) > 1)} {', '.join(' to '.join(map(str, run)) for run in runs)}"
