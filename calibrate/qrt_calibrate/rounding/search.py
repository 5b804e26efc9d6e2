"""The search of channel scales: candidates for a smoothing pair, and their cost with rounded readers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from qrt.quant import affine
from qrt.quant.spec import QuantSpec
from qrt.quant.tokens import QuantizedTokens
from qrt_calibrate.rounding.factor import Factor
from qrt_calibrate.rounding.fold import Pair
from qrt_calibrate.rounding.observe import Call
from qrt_calibrate.rounding.rtn import round_weight

GRID = 20  # candidates of AWQ's search, with the identity
STRENGTHS = (0.3, 0.5, 0.65, 0.8, 0.9)  # SmoothQuant's alpha: the share of an outlier that weights take
_TINY = 1e-5


def awq_candidates(pair: Pair, magnitude: Tensor, spec: QuantSpec, powers: bool) -> Iterator[Tensor]:
    """Yield scales per source channel: the identity, then x^r / w^(1-r) for r from 0 to 1, no repeats.

    x is the channel's `magnitude` [K] in the readers' input, w its magnitude in the weights, relative to the
    largest of their group. Scales are centred, sqrt(max * min) = 1, and with `powers` rounded to powers of
    two. A channel that was never active keeps 1.
    """
    x, w = pair.tie(magnitude), pair.tie(_relative_magnitude(pair, spec))
    active = x > 0
    x, w = x[active].log2(), (w[active] + 1e-4).log2()
    ratios = [step / (GRID - 2) for step in range(GRID - 1)]
    yield from _centred(active, (ratio * x - (1 - ratio) * w for ratio in ratios), powers)


def smooth_candidates(pair: Pair, largest: Tensor, powers: bool) -> Iterator[Tensor]:
    """Yield the identity, then SmoothQuant's x^a / w^(1-a) for the STRENGTHS a.

    x and w are the channel's largest magnitudes in the input (`largest` [K]) and in the weights.
    """
    weight = torch.stack([reader.weight.abs().amax(0) for reader in pair.readers]).amax(0)
    x, w = pair.tie_largest(largest), pair.tie_largest(weight)
    active = (x > 0) & (w > 0)
    x, w = x[active].clamp(min=_TINY).log2(), w[active].clamp(min=_TINY).log2()
    yield from _centred(active, (alpha * x - (1 - alpha) * w for alpha in STRENGTHS), powers)


def _centred(active: Tensor, logs: Iterable[Tensor], powers: bool) -> Iterator[Tensor]:
    """Yield the identity, then 2^log of each of `logs` (one per active channel), centred; no repeats."""
    last = torch.ones(active.shape, device=active.device)
    yield last
    if not active.any():
        return
    for log in logs:
        log = log - (log.max() + log.min()) / 2
        scales = torch.ones_like(last)
        scales[active] = torch.exp2(torch.round(log) if powers else log)
        if not torch.equal(scales, last):
            yield scales
        last = scales


def _relative_magnitude(pair: Pair, spec: QuantSpec) -> Tensor:
    """Return [K]: the mean over the readers' rows of |w| / the largest |w| of its group."""
    total = pair.readers[0].weight.new_zeros(pair.readers[0].in_features)
    for reader in pair.readers:
        groups = reader.weight.abs().unflatten(1, (-1, spec.group_of(len(total))))
        total += (groups / (groups.amax(-1, keepdim=True) + 1e-6)).flatten(1).sum(0)
    return total / sum(reader.out_features for reader in pair.readers)


class RoundedCost:
    """The cost of scales by AWQ: the mean squared error of a block whose readers are rounded to nearest.

    `weights` [T, 1] are the cost of a squared error in each token.
    """

    def __init__(
        self,
        pair: Pair,
        call: Call,
        spec: QuantSpec,
        dtype: torch.dtype,
        int8_tokens: bool,
        weights: Tensor | None = None,
    ) -> None:
        self._pair, self._call, self._spec, self._dtype = pair, call, spec, dtype
        self._int8_tokens, self._weights = int8_tokens, weights

    def __call__(self, scales: Tensor) -> float:
        columns = self._pair.spread(scales)
        weights = [reader.weight.clone() for reader in self._pair.readers]
        hooks = []
        for reader, weight in zip(self._pair.readers, weights, strict=True):
            rounded = round_weight(weight * columns, self._spec, self._dtype).dequantize()
            reader.weight.copy_(rounded.div_(columns))
            if self._int8_tokens:
                hooks.append(round_input(reader, columns))
        loss = self._call.loss(self._weights)
        for hook in hooks:
            hook.remove()
        for reader, weight in zip(self._pair.readers, weights, strict=True):
            reader.weight.copy_(weight)
        return loss


class TokenNoise:
    """The mean squared error that rounding tokens to int8 leaves in each input of a Linear.

    x          [T, K] tokens
    weights    [T, 1]: cost of a squared error in each token; None: all the same
    power      E[|x|^2], as the other costs count it, over all tokens
    """

    def __init__(self, x: Tensor, weights: Tensor | None, power: float) -> None:
        self._x = x.abs() if weights is None else x.abs() * weights.sqrt()
        total = float(self._x.square().sum())
        self._share = power / total / (12 * affine.INT8_MAX**2) if total else 0.0

    def __call__(self, columns: Tensor) -> float:
        """Return it after a fold that divides the input by `columns` [K]: step^2 / 12."""
        return float((self._x / columns).amax(1).square().sum()) * self._share


class ColumnCost:
    """The cost of scales as the error that GPTQ will leave, estimated without rounding.

    It is the variance of rounding, step^2 / 12, in each column times the cost of an error there after later
    columns have compensated. Folding s turns the factor U of the Hessian into U D, and so that cost into
    cost / s^2, for every candidate. `noise` adds the error of rounded tokens, for which nothing compensates.
    """

    def __init__(self, pair: Pair, factor: Factor, spec: QuantSpec, noise: TokenNoise | None = None) -> None:
        self._pair, self._spec, self._noise = pair, spec, noise
        self._importance = factor.importance()

    def __call__(self, scales: Tensor) -> float:
        columns = self._pair.spread(scales)
        squares: list[Tensor] = []
        size = 0.0
        for reader in self._pair.readers:
            weight = reader.weight * columns
            step, _ = affine.choose_qparams(weight, self._spec, torch.float32)
            squares.append(step.square().sum(0))
            size += float(weight.square().sum())
        total = torch.stack(squares).sum(0)
        cost = (self._importance / columns.square()).view(len(total), -1).sum(1)
        tokens = 0.0 if self._noise is None else self._noise(columns) * size
        return float((total * cost).sum()) / 12 + tokens


def round_input(module: nn.Linear, columns: Tensor | None = None) -> Any:
    """Make `module` read its input as int8 tokens, as a W8A8 kernel does; return the hook's handle.

    The input is divided by `columns` first, because the weight was multiplied by them.
    """

    def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = arguments[0] if columns is None else arguments[0] / columns
        x = QuantizedTokens.of(x).dequantize()
        return (x if columns is None else x * columns,)

    return module.register_forward_pre_hook(hook)
