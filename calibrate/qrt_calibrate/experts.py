"""A mixture's experts as Linears under the checkpoint's names; transformers stacks them into one tensor."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

EXPERT_BYTES = 4 << 30  # of moments that are held at a time, one expert's at least


class Expert(nn.Module):
    """One expert, a SwiGLU."""

    def __init__(self, hidden: int, inner: int, activation: nn.Module) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self._activation = activation

    def inside(self, x: Tensor) -> Tensor:
        """What down_proj reads: [T, H] -> [T, I]."""
        inner: Tensor = self._activation(self.gate_proj(x)) * self.up_proj(x)
        return inner

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        out: Tensor = self.down_proj(self.inside(x))
        return out


def inside(layer: nn.Module, name: str, x: Tensor) -> Tensor:
    """What `name`, an expert's down_proj in `layer`, reads where the expert gets x [T, H]: [T, I]."""
    return cast(Expert, layer.get_submodule(name.rpartition(".")[0])).inside(x)


class Experts(nn.ModuleList):
    """All experts of a layer, in place of transformers' own module, `stacked`."""

    def __init__(self, stacked: Any) -> None:
        count, hidden, inner = stacked.down_proj.shape
        super().__init__(Expert(hidden, inner, stacked.act_fn) for _ in range(count))

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Hidden states [T, H] through the experts `chosen` [T, k], summed with `weights` [T, k]: [T, H]."""
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self)).tolist()
        parts = hidden[order // chosen.shape[1]].split(counts)
        found = torch.cat([expert(part) for expert, part in zip(self, parts, strict=True)])
        return (found[order.argsort()].view(*chosen.shape, -1) * weights[..., None]).sum(1)
