"""The blocks of a layer that hold Linears under the checkpoint's names, and the mlp among them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from qrt.arch import Arch
from qrt.definitions.activations import ACTIVATIONS, XIELU
from qrt.definitions.stacks import Stack, stacks
from qrt_calibrate.model.norms import META


class Block(nn.Module):
    """Part of a layer: its Linears under their names, those of `Stack`s next to each other."""

    def outputs(self, stack: Stack, prefix: str, x: Tensor) -> list[Tensor]:
        """Return the output of each module of `stack`."""
        return [self.get_submodule(name.removeprefix(prefix))(x) for name in stack.modules]

    def add(self, stack: Stack, prefix: str) -> None:
        """Make the modules of `stack`."""
        for name, out in zip(stack.modules, stack.outs, strict=True):
            nest(self, name.removeprefix(prefix), nn.Linear(stack.in_features, out, stack.bias, device=META))


class _XIELU(nn.Module):
    """`XIELU` with parameters."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ())):
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=META)))

    def forward(self, x: Tensor) -> Tensor:
        """Of each element."""
        return XIELU(*self.parameters())(x)


class Mlp(Block):
    """The mlp of layer `index`, whose names begin with `prefix`."""

    def __init__(self, arch: Arch, index: int, prefix: str) -> None:
        super().__init__()
        found = stacks(arch, index)
        self._prefix, self._gate_up, self._down = prefix, found["gate_up"], found["down"]
        self._gated = arch.gate_up != "plain"
        self.add(self._gate_up, prefix)
        self.add(self._down, prefix)
        self._act: Callable[[Tensor], Tensor] | str
        if arch.act == "xielu":
            self._act = f"{arch.names.layers}.{index}.{arch.names.activation}".removeprefix(prefix)
            nest(self, self._act, _XIELU())
        else:
            self._act = ACTIVATIONS[arch.act]

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, H] -> [B, T, H]."""
        act = self.get_submodule(self._act) if isinstance(self._act, str) else self._act
        parts = self.outputs(self._gate_up, self._prefix, x)
        if self._gated:
            gate, up = parts if len(parts) == 2 else parts[0].chunk(2, -1)
            inner = act(gate) * up
        else:
            inner = act(parts[0])
        (output,) = self.outputs(self._down, self._prefix, inner)
        return output


def nest(parent: nn.Module, name: str, child: nn.Module) -> None:
    """Register `child` under a dotted name."""
    owner, last = _owner(parent, name)
    owner.add_module(last, child)


def nest_parameter(parent: nn.Module, name: str, *shape: int) -> None:
    """Register a parameter of `shape`, without memory, under a dotted name."""
    owner, last = _owner(parent, name)
    owner.register_parameter(last, nn.Parameter(torch.empty(shape, device=META)))


def _owner(parent: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that a dotted name lies in, made where it is not there yet, and its last part."""
    *path, last = name.split(".")
    for part in path:
        if not hasattr(parent, part):
            parent.add_module(part, nn.Module())
        parent = parent.get_submodule(part)
    return parent, last
