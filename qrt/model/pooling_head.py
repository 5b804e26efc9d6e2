"""PoolingHead: what a model that classifies makes of a hidden state, in fp32, and how it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qrt.arch import Arch
from qrt.arch.base import POOLING_HEADS
from qrt.arch.pooling import Pooling
from qrt.definitions.names import place_names
from qrt.errors import CheckpointError
from qrt.quant.checkpoint import Checkpoint
from qrt.quant.checkpoint.format import FLOATS
from qrt.quant.module_names import below


@dataclass(frozen=True)
class PoolingHead:
    """Products with ReLU between them: weights fp32 [N, K] and biases [N] or None, the first one first."""

    layers: tuple[tuple[Tensor, Tensor | None], ...]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return a number for each label, fp32 [n, labels], of hidden states fp32 [n, H]."""
        for index, (weight, bias) in enumerate(self.layers):
            hidden = torch.nn.functional.linear(hidden.relu() if index else hidden, weight, bias)
        return hidden


def load_head(
    arch: Arch, pooling: Pooling, checkpoint: Checkpoint, tokens: Sequence[int], device: torch.device
) -> PoolingHead:
    """Read the head of labels: its own weights, or rows of the vocabulary's head for `tokens`.

    `arch` may be headless. Raises CheckpointError where the head is missing or has another shape.
    """
    if tokens:
        rows = _vocabulary_rows(place_names(arch, checkpoint), checkpoint, tokens).float()
        rows = rows[1:] - rows[:1] if pooling.difference else rows
        return PoolingHead(((rows.to(device), None),))
    modules = _modules(checkpoint)
    layers, width = [], arch.hidden_size
    for place, module in enumerate(modules):
        out = len(pooling.labels) if place == len(modules) - 1 else None
        weight, bias = _layer(checkpoint, module, width, out)
        layers.append((weight.to(device), None if bias is None else bias.to(device)))
        width = len(weight)
    return PoolingHead(tuple(layers))


def dummy_head(arch: Arch, pooling: Pooling, device: torch.device) -> PoolingHead:
    """Make a random head, to measure speed without a checkpoint."""
    weight = torch.randn(len(pooling.labels), arch.hidden_size, device=device) * arch.hidden_size**-0.5
    return PoolingHead(((weight, None),))


def _modules(checkpoint: Checkpoint) -> list[str]:
    """Return the modules of the head, in order: "score", or "score.0" and "score.2" where it has two."""
    found = sorted(
        name.removesuffix(".weight")
        for name in checkpoint.names()
        if below(name).startswith(POOLING_HEADS) and name.endswith(".weight")
    )
    if not found:
        raise CheckpointError(
            f"{checkpoint.path}: expected score.weight, the head of a model that classifies, got none; "
            'name the answer\'s tokens in hf_overrides, {"classifier_from_token": ["no", "yes"]}, convert to '
            "embed, or leave the head unquantized"
        )
    return found


def _layer(checkpoint: Checkpoint, module: str, width: int, out: int | None) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a module that reads `width` channels, in fp32; `out`: its rows, if known."""
    weight = checkpoint.tensor(f"{module}.weight")
    fits = weight.dtype in FLOATS and weight.ndim == 2 and weight.shape[1] == width
    if not fits or out not in (None, len(weight)):
        raise CheckpointError(
            f"{checkpoint.path}: {module}.weight: expected floats [{out or 'any'}, {width}], as config.json "
            f"says, got {weight.dtype} {list(weight.shape)}; correct num_labels or id2label"
        )
    bias = checkpoint.tensor(f"{module}.bias").float() if checkpoint.has(f"{module}.bias") else None
    return weight.float(), bias


def _vocabulary_rows(arch: Arch, checkpoint: Checkpoint, tokens: Sequence[int]) -> Tensor:
    """Return the rows of the vocabulary's head for `tokens`, of the embedding where there is no head."""
    head = arch.names.head
    stored = any(name.startswith(f"{head}.") for name in checkpoint.names())
    weight = checkpoint.linear(head if stored else arch.names.embed)[1]
    rows = weight.values if weight.scale is None else weight.dequantize()
    if max(tokens) >= len(rows):
        raise CheckpointError(
            f"{checkpoint.path}: expected a head of {max(tokens) + 1} rows, got {len(rows)}"
        )
    return rows[list(tokens)]
