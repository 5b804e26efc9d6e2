"""A mixture's experts as Linears under the checkpoint's names; transformers stacks them into one tensor."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from qrt.arch import Arch

EXPERT_BYTES = 4 << 30  # most bytes of moments held at a time, but one expert's at least


class Expert(nn.Module):
    """One expert, a SwiGLU; `parts` are the names of its Linears: gate, up and down."""

    def __init__(self, hidden: int, inner: int, activation: nn.Module, parts: tuple[str, str, str]) -> None:
        super().__init__()
        self._parts, self._activation = parts, activation
        for part, shape in zip(parts, ((hidden, inner), (hidden, inner), (inner, hidden)), strict=True):
            self.add_module(part, nn.Linear(*shape, bias=False))

    def inside(self, x: Tensor) -> Tensor:
        """Return the input [T, I] of the last Linear for x [T, H]."""
        gate, up, _ = (self.get_submodule(part) for part in self._parts)
        inner: Tensor = self._activation(gate(x)) * up(x)
        return inner

    def forward(self, x: Tensor) -> Tensor:
        """Run the expert on x [T, H]: [T, H]."""
        out: Tensor = self.get_submodule(self._parts[2])(self.inside(x))
        return out


class Experts(nn.ModuleList):
    """All experts of a layer, in place of transformers' own module, `stacked`."""

    def __init__(self, stacked: Any, parts: tuple[str, str, str]) -> None:
        count, hidden, inner = stacked.down_proj.shape
        super().__init__(Expert(hidden, inner, stacked.act_fn, parts) for _ in range(count))

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Run hidden states [T, H] through experts `chosen` [T, k] and sum by `weights` [T, k]: [T, H]."""
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self)).tolist()
        parts = hidden[order // chosen.shape[1]].split(counts)
        found = torch.cat([expert(part) for expert, part in zip(self, parts, strict=True)])
        return (found[order.argsort()].view(*chosen.shape, -1) * weights[..., None]).sum(1)


def spell_out(layer: Any, arch: Arch) -> None:
    """Give the experts of transformers' `layer` the checkpoint's names.

    Their block, which transformers calls mlp, gets the checkpoint's name too.
    """
    assert arch.experts is not None
    name, _, experts = arch.experts.module.rpartition(".")
    block = layer.mlp
    setattr(block, experts, Experts(getattr(block, experts), arch.experts.parts))
    if name != "mlp":
        del layer.mlp
        layer.add_module(name, block)
        layer.__dict__["mlp"] = block  # the layer's forward looks here; it is not a second module


def inside(layer: nn.Module, name: str, x: Tensor) -> Tensor:
    """Return the input [T, I] of `name`, an expert's last Linear, when the expert gets x [T, H]."""
    return cast(Expert, layer.get_submodule(name.rpartition(".")[0])).inside(x)
