"""Move channel scales from a source into its readers without changing the function.

The output of `source` is divided by s, the weights of `readers` are multiplied by s (AWQ, arXiv:2306.00978;
SmoothQuant, arXiv:2211.10438). By default the scales are powers of two, so a fold only changes exponents:
norms and biases, which stay in the model dtype, lose no bit, and the layer's output stays the same bit for
bit.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from qrt.arch.base import Smooth
from qrt.errors import QrtError

TOLERANCE = 1e-4  # largest relative change of a layer's contribution that a fold may cause in fp32


class Pair:
    """One smoothing pair of one layer: the modules, and how source channels feed reader channels.

    In grouped-query attention every query head of a group reads the same value channels, so the o_proj
    columns (kv head, query head of the group, d) share the scale of v_proj's row (kv head, d): `heads` query
    heads per KV head, `head_dim` channels each. Everywhere else channel j of the source feeds channel j.

    rows   the rows of the source that feed the readers, int64; None: all
    """

    def __init__(self, layer: nn.Module, smooth: Smooth, head_dim: int, rows: Tensor | None = None) -> None:
        self.rows = rows
        self.readers = [linear(layer, name) for name in smooth.readers]
        self._routers = [layer.get_submodule(name) for name in smooth.routers]
        self._source = list(layer.get_submodule(smooth.source).parameters())
        channels = self._source[0].shape[0] if self.rows is None else len(self.rows)
        self._heads = self.readers[0].in_features // channels
        self._width = head_dim if self._heads > 1 else channels

    def tie(self, statistic: Tensor) -> Tensor:
        """Reduce reader channels [K] to source channels: the mean of the channels that share a scale."""
        return statistic.view(-1, self._heads, self._width).mean(1).flatten()

    def tie_largest(self, statistic: Tensor) -> Tensor:
        """Reduce as `tie` does, with the largest of the channels that share a scale."""
        return statistic.view(-1, self._heads, self._width).amax(1).flatten()

    def spread(self, scales: Tensor) -> Tensor:
        """Expand source channels to reader channels [K]."""
        return scales.view(-1, 1, self._width).expand(-1, self._heads, -1).flatten()

    def is_exact(self, scales: Tensor, dtype: torch.dtype) -> bool:
        """Whether norm and bias lose nothing by the fold in the model dtype.

        A loader casts them to that dtype; fp16 can underflow.
        """
        for whole, part in zip(self._source, self._divided(scales), strict=True):
            if self.rows is not None:
                part = part[self.rows.to(part.device)]
            before = whole if self.rows is None else whole[self.rows.to(whole.device)]
            if part.dim() == 1 and not torch.equal(part.to(dtype).float() * scales, before.to(dtype).float()):
                return False
        return True

    def fold(self, scales: Tensor) -> None:
        """Apply `scales` (source channels) in place."""
        for parameter, divided in zip(self._source, self._divided(scales), strict=True):
            parameter.copy_(divided)
        for reader in (*self.readers, *self._routers):
            weight = cast(Tensor, reader.weight)
            weight.mul_(self.spread(scales))

    def _divided(self, scales: Tensor) -> list[Tensor]:
        return [divided(p, scales[:, None] if p.dim() == 2 else scales, self.rows) for p in self._source]


def divided(whole: Tensor, scales: Tensor, rows: Tensor | None) -> Tensor:
    """Return `whole` with its `rows`, or all, divided by `scales`."""
    if rows is None:
        return whole / scales
    result = whole.clone()
    result[rows.to(whole.device)] /= scales
    return result


def linear(layer: nn.Module, name: str) -> nn.Linear:
    """Return the Linear `name` of a layer."""
    return cast(nn.Linear, layer.get_submodule(name))


def check_unchanged(before: Tensor, after: Tensor, hidden: Tensor, layer: str, smooth: Smooth) -> None:
    """Raise QrtError unless the layer adds the same to `hidden` before and after a fold."""
    change, added = float((after - before).norm()), float((before - hidden).norm())
    if not change <= TOLERANCE * added:  # NaN is a change too
        readers = ", ".join(smooth.readers)
        raise QrtError(
            f"{layer}: folding scales from {smooth.source} into {readers} changed the layer's output by "
            f"{change / (added or 1):.1e} of what it adds (at most {TOLERANCE:.0e}): this pair does "
            "not preserve the function; correct the architecture's `smooth`, or use --method rtn"
        )
