"""What one decoder layer sees during calibration: input statistics, and recorded calls to search against."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qrt.quant.spec import QuantSpec


@dataclass(frozen=True)
class InputStats:
    """Moments of a Linear's input x over all calibration tokens, fp32.

    mean_abs   [K]            E|x|
    moment     [K/G, G, G]    E[x x^T] inside each group of G inputs
    """

    mean_abs: Tensor
    moment: Tensor

    def divided(self, scales: Tensor) -> InputStats:
        """The statistics after a fold that divides the input by `scales` [K]."""
        grouped = scales.view(self.moment.shape[:2])
        return InputStats(self.mean_abs / scales, self.moment / grouped[:, :, None] / grouped[:, None, :])


@dataclass(frozen=True)
class Call:
    """One recorded call of a module: its arguments and its output, to be repeated with other weights."""

    module: nn.Module
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Tensor

    def loss(self) -> float:
        """Mean squared difference of the module's output now from the recorded one."""
        output = _first(self.module(*self.arguments, **self.keywords))
        return float((output - self.output).square().mean())


def observe_inputs(
    layer: nn.Module, names: Iterable[str], spec: QuantSpec, run: Callable[[], object]
) -> dict[str, InputStats]:
    """Statistics of the inputs of the Linears `names` of `layer` while `run` runs it; groups as in `spec`."""
    sums: dict[str, list[Tensor]] = {}
    tokens = dict.fromkeys(names, 0)

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            x = arguments[0].flatten(0, -2)
            groups = x.unflatten(1, (-1, spec.group_of(x.shape[1]))).transpose(0, 1)
            parts = [x.abs().sum(0), groups.mT @ groups]
            seen = sums.setdefault(name, [torch.zeros_like(part, dtype=torch.float64) for part in parts])
            for total, part in zip(seen, parts, strict=True):
                total += part
            tokens[name] += x.shape[0]

        return hook

    hooks = [layer.get_submodule(name).register_forward_pre_hook(watch(name)) for name in tokens]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return {
        name: InputStats(*((total / tokens[name]).float() for total in totals))
        for name, totals in sums.items()
    }


def record_call(layer: nn.Module, name: str, run: Callable[[], object]) -> Call:
    """The call of the submodule `name` of `layer` while `run` executes it once."""
    calls: list[Call] = []

    def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        calls.append(Call(module, arguments, keywords, _first(output)))

    handle = layer.get_submodule(name).register_forward_hook(hook, with_kwargs=True)
    try:
        run()
    finally:
        handle.remove()
    return calls[0]


def _first(output: Any) -> Tensor:
    """A block's hidden states: attention returns them together with its weights."""
    return output[0] if isinstance(output, tuple) else output
