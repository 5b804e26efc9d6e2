"""Inputs of a layer's Linears in calibration: their moments, and recorded calls to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WHOLE, GPU_WHOLE = 256, 4096  # largest order of x^T x that is computed as one product
TRUST_ROWS = 512  # rows of a weight, at least, that decide how far its correction is trusted


class _Reached(Exception):
    """Ends a layer's forward once its last wanted input is known."""


def inputs_of(layer: nn.Module, names: Sequence[str], run: Callable[[], object]) -> list[Tensor]:
    """Return the inputs [T, K] of the submodules `names` while `run` runs `layer`.

    The names are in the order in which they run; modules after the last one do not run.
    """
    found: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            found[name] = arguments[0].flatten(0, -2)
            if name == names[-1]:
                raise _Reached

        return hook

    hooks = [layer.get_submodule(name).register_forward_pre_hook(watch(name)) for name in names]
    try:
        run()
    except _Reached:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return [found[name] for name in names]


def input_and_output(layer: nn.Module, name: str, run: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the input [T, K] of the submodule `name` while `run` runs `layer`, and what `run` returns."""
    found: list[Tensor] = []
    hook = layer.get_submodule(name).register_forward_pre_hook(
        lambda module, arguments: found.append(arguments[0].flatten(0, -2))
    )
    try:
        output = run()
    finally:
        hook.remove()
    return found[0], output


def norm_weights(stream: Tensor, eps: float) -> Tensor:
    """Return [T, 1]: the cost of a squared error in each token of `stream` [T, H] after RMSNorm.

    RMSNorm divides a token by its size, and the error in it as well. So an error in a token with massive
    activations (arXiv:2402.17762) costs little.
    """
    return 1 / (stream.square().mean(-1, keepdim=True) + eps)


def add_square(total: Tensor, x: Tensor, alpha: float = 1.0) -> None:
    """Add alpha * x^T x to the symmetric `total` [K, K]; x is [T, K].

    Of what lies off the blocks on the diagonal only one half is computed.
    """
    k = len(total)
    if k <= (GPU_WHOLE if x.is_cuda else WHOLE):
        total.addmm_(x.T, x, alpha=alpha)
        return
    half = k // 2
    first, second = x.split((half, k - half), 1)
    add_square(total[:half, :half], first, alpha)
    add_square(total[half:, half:], second, alpha)
    beside = total[:half, half:].addmm_(first.T, second, alpha=alpha)
    total[half:, :half].copy_(beside.T)


class Moments:
    """Moments of a Linear's input over all calibration tokens, fp32.

    x is the input in the rounded model, x' the input in the exact model. Tokens count by their weights if
    `add` gets some; all moments but max_abs then have a common factor.

    mean_abs, max_abs   [K]       of |x|
    hessian             [K, K]    E[x x^T]
    drift               [2, K, K] E[(x' - x) x^T], the effect of rounding so far on the input, in two shares,
                                  each with windows of its own. For a Linear with `weight` W [N, K] whose
                                  output is added to the residual stream r it is [2, N, K] E[d x^T], where
                                  d = W (x' - x) + r' - r is what the stream lacks after the Linear
    """

    def __init__(self, in_features: int, weight: Tensor | None, device: torch.device) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, device=device)

        self.mean_abs, self.max_abs = zeros(in_features), zeros(in_features)
        self.hessian = zeros(in_features, in_features)
        self.drift = zeros(2, in_features if weight is None else len(weight), in_features)
        self._weight = weight
        self._partial_sums = [0.0, 0.0]

    def add(
        self,
        x: Tensor,
        exact: Tensor,
        total: int,
        half: int,
        stream: tuple[Tensor, Tensor] | None = None,
        weights: Tensor | None = None,
    ) -> None:
        """Count the inputs x [T, K]; `exact` are the same inputs in the exact model.

        total     number of tokens in all
        half      0 or 1: the share of the windows that they belong to
        stream    r and r' [T, N] of these tokens
        weights   [T, 1]: cost of a squared error in each token
        """
        self._partial_sums[half] += len(x) / total
        self.max_abs = torch.maximum(self.max_abs, x.abs().amax(0))
        if weights is not None:
            root = weights.sqrt()
            x, exact = x * root, exact * root
            stream = stream and (stream[0] * root, stream[1] * root)
        self.mean_abs += x.abs().sum(0) / total
        add_square(self.hessian, x, 1 / total)
        moved = exact - x
        assert (stream is None) == (self._weight is None), "the stream beside a Linear that is added to it"
        if self._weight is not None and stream is not None:
            residual, exact_residual = stream
            moved = torch.addmm(exact_residual - residual, moved, self._weight.T)
        self.drift[half].addmm_(moved.T, x, alpha=1 / total)

    def join(self, other: Moments) -> None:
        """Add what `other` has counted, on any device."""
        device = self.hessian.device
        self.mean_abs += other.mean_abs.to(device)
        self.max_abs = torch.maximum(self.max_abs, other.max_abs.to(device))
        self.hessian += other.hessian.to(device)
        self.drift += other.drift.to(device)
        self._partial_sums = [
            own + more for own, more in zip(self._partial_sums, other._partial_sums, strict=True)
        ]

    def divide(self, scales: Tensor) -> None:
        """Follow a fold that divides the input by `scales` [K]: H becomes D^-1 H D^-1."""
        for moment in (self.mean_abs, self.max_abs, self.hessian, self.drift):
            moment.div_(scales)
        self.hessian.div_(scales[:, None])
        if self._weight is None:  # W (x' - x) stays what it is
            self.drift.div_(scales[:, None])

    def take_correction(self, weight: Tensor, solve: Callable[[Tensor], Tensor]) -> tuple[Tensor, float]:
        """Return the correction of `weight` [N, K] towards the exact output, and how far to trust it, 0 to 1.

        `solve` maps rows [N, K] to rows @ H^-1.

        If d is what the output lacks, the correction is E[d x^T] H^-1. Each share of the windows estimates
        E[d x^T] with noise of its own. The product of the two estimates is the square of what both see; the
        square of their mean has the noise of the mean in addition. Their ratio is the factor with the least
        error (Wiener's). That is one number, so TRUST_ROWS rows are enough for it. The shares of `drift` are
        merged in place, then `hessian` and `drift` are freed, so this can be called only once.
        """
        rows = slice(None, None, max(1, len(weight) // TRUST_ROWS))
        first, second = (self._pull(weight, half, rows) for half in (0, 1))
        agreed = float((solve(first) * second).sum())
        correction = solve(self.drift[0].add_(self.drift[1]))
        if self._weight is None:  # such Linears have more outputs than inputs, so H^-1 is applied before W
            correction = weight @ correction
        del self.hessian, self.drift  # of many experts they take more than all else of the walk
        size = (
            float((correction[rows] * first.add_(second)).sum())
            * self._partial_sums[0]
            * self._partial_sums[1]
        )
        return correction, min(1.0, max(0.0, agreed / size)) if size > 0 else 0.0

    def _pull(self, weight: Tensor, half: int, rows: slice) -> Tensor:
        """Return a share's part of E[d x^T] for some rows: [rows, K]."""
        return weight[rows] @ self.drift[half] if self._weight is None else self.drift[half, rows].clone()


@dataclass(frozen=True)
class Call:
    """A recorded call of a module, its arguments and its output, to be repeated with other weights."""

    module: nn.Module
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Tensor

    def loss(self, weights: Tensor | None = None) -> float:
        """Return the mean squared difference between the module's output now and the recorded one.

        `weights` [T, 1] multiply each token's.
        """
        output: Tensor = self.module(*self.arguments, **self.keywords)
        squares = (output - self.output).square().flatten(0, -2)
        return float((squares if weights is None else squares * weights).mean())


def record_calls(layer: nn.Module, names: Sequence[str], run: Callable[[], object]) -> dict[str, Call]:
    """Record the calls of the submodules `names` of `layer` while `run` executes it once.

    Modules after the last one do not run. An expert that no token is sent to is not called.
    """
    calls: dict[str, Call] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(
            module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Tensor
        ) -> None:
            calls[name] = Call(module, arguments, keywords, output)
            if len(calls) == len(names):
                raise _Reached

        return hook

    modules = [(layer.get_submodule(name), watch(name)) for name in names]
    handles = [module.register_forward_hook(hook, with_kwargs=True) for module, hook in modules]
    try:
        run()
    except _Reached:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return calls
