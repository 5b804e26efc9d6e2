"""The operators of `qrt.kernels.experts` on the GPU: order the assignments, multiply twice, add.

What a layer takes at least: the bytes of the experts that are chosen (Qwen3-30B-A3B in w4a16: 2.4 MB each;
one token chooses 8, 19 MB or 6 us at 3 TB/s; 64 tokens nearly all 128), or for many tokens the operations
(6 I H of each assignment: 8,192 tokens, 618 GFLOP). x, the order and the sums are small beside them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from qrt.checks import expect
from qrt.kernels.act_mul.kernel import act_mul
from qrt.kernels.experts import choose, ref
from qrt.kernels.experts.choose import ExpertSizes, ExpertsPlan, plan
from qrt.kernels.experts.order_kernel import order
from qrt.kernels.experts.tokens_kernel import add, arrange
from qrt.kernels.gpu import multiprocessors
from qrt.kernels.linear.int8.plans import BlockPlan
from qrt.kernels.linear.int8.quantize_kernel import quantize_tokens
from qrt.kernels.linear.shared.places import Grouped, Places
from qrt.kernels.linear.shared.rows_kernel import grouped_rows
from qrt.kernels.linear.tiles import wide_kernel
from qrt.kernels.linear.tiles.device import constants_of
from qrt.kernels.linear.tiles.fused_kernel import fused_gemm
from qrt.kernels.linear.tiles.plans import FusedPlan, WidePlan
from qrt.kernels.op import takes
from qrt.quant.tokens import QuantizedTokens
from qrt.quant.weight import WEIGHT_SCHEMES
from qrt.quant.weight.base import Layout, WeightScheme
from qrt.quant.weight.tiles import TiledScheme, TiledWeight

logger = logging.getLogger(__name__)
WIDE_BYTES = 32 << 20  # of more fp32 summands than these, which the L2 cache holds, `experts` rounds each


@takes(ref.experts)
def experts(a: Any) -> Tensor:
    """Run `qrt::experts` on CUDA tensors."""
    wide = 4 * a.x.numel() * a.chosen.shape[1] <= WIDE_BYTES
    return add(_summands(a, torch.float32 if wide else a.x.dtype), a.x.dtype)


@takes(ref.experts_partial)
def experts_partial(a: Any) -> Tensor:
    """Run `qrt::experts_partial` on CUDA tensors."""
    return _summands(a, torch.float32)


def _summands(a: Any, dtype: torch.dtype) -> Tensor:
    """Return what each expert adds to each token, [k, T, H] in `dtype`."""
    kind, chosen, weights = WEIGHT_SCHEMES[a.scheme], a.chosen, a.weights
    (tokens, top_k), x = chosen.shape, a.x.contiguous()
    if kind.layout is Layout.OWN:
        _say(a.scheme)
        return ref.experts_partial(*a).to(dtype)
    y = torch.empty(top_k, *x.shape, dtype=dtype, device=x.device)  # what down writes is as wide as x
    if not tokens:
        return y
    expect(weights, "T k", torch.float32, "weights", T=tokens, k=top_k)
    expect(chosen, "T k", torch.int32, "chosen", T=len(x))
    chosen, weights = chosen.contiguous(), weights.contiguous().view(-1)
    first, second = _product(kind, a.gate_up), _product(kind, a.down)
    first.check(x)
    how = plan(_sizes(kind.layout, x, top_k, len(a.gate_up[0]), first, second))
    places = Places(None, chosen.view(-1), how.block, chosen.numel())
    if how.ordered:
        places = order(chosen, len(a.gate_up[0]), how.block)
    read, reads = x if a.on_input else _quantized(x, how), top_k
    if a.on_input or first.perm is not None or isinstance(how.gate_up, WidePlan):
        read, reads = arrange(read, places, reads, first.perm, weights if a.on_input else None), 0
    joined = a.act if how.joined else None
    inner = x.new_empty(places.rows, first.n // 2 if joined else first.n)
    first.run(_quantized(read, how), a.gate_up_bias, inner, how.gate_up, joined, Grouped(places, reads))
    if not joined:
        inner = act_mul(inner, a.act)
    if second.perm is not None:
        inner = arrange(inner, places, 0, second.perm)
    group = Grouped(places, 0, top_k, None if a.on_input else weights)
    second.run(_quantized(inner, how), a.down_bias, y, how.down, None, group)
    return y


def _quantized(x: Tensor | QuantizedTokens, how: ExpertsPlan) -> Tensor | QuantizedTokens:
    """Return x as both products read it."""
    return quantize_tokens(x) if how.int8 and isinstance(x, Tensor) else x


def _sizes(
    layout: Layout, x: Tensor, top_k: int, experts: int, first: _Tiles | _StackedRows,
    second: _Tiles | _StackedRows,
) -> ExpertSizes:  # fmt: skip
    """Return what a plan depends on."""
    inner, steps = first.n // 2, (first.steps, second.steps)
    sizes = ExpertSizes(layout, x.dtype, len(x), top_k, experts, second.n, inner, steps)
    if isinstance(first, _Tiles) and isinstance(second, _Tiles):
        wide = first.is_wide(x) and second.is_wide(x.new_empty(0, inner))
        int8 = first.is_int8(x) and second.is_int8(x.new_empty(0, inner))
        words, sms = (first.constants.J, second.constants.J), multiprocessors(x.device) if wide else 0
        return sizes._replace(words=words, sms=sms, int8=int8)
    return sizes


def explain(
    x: Tensor, top_k: int, gate_up: Sequence[Tensor], down: Sequence[Tensor], scheme: str
) -> tuple[str, str]:
    """Do as `qrt.kernels.experts.explain` for CUDA tensors."""
    kind = WEIGHT_SCHEMES[scheme]
    if kind.layout is Layout.OWN:
        why = f"The definition of {scheme} (linear_ref) multiplies, as no kernel reads its layout."
        return why, why
    first, second = _product(kind, gate_up), _product(kind, down)
    return choose.explain(_sizes(kind.layout, x, top_k, len(gate_up[0]), first, second))


@cache
def _say(scheme: str) -> None:
    """Log once that no kernel multiplies a scheme."""
    logger.warning(
        "experts: no kernel reads the layout of %s; its definition (linear_ref) multiplies", scheme
    )


class _Tiles:
    """The product with weights of all experts in tiles."""

    def __init__(self, kind: TiledScheme, tensors: Sequence[Tensor]) -> None:
        self._weight, self._kind = TiledWeight(*tensors), kind
        self._one = one = TiledWeight(*(tensor[0] for tensor in tensors))
        self.constants = constants_of(one, kind.bits, kind.unpacker())
        self.n, self.steps = one.out_features, one.packed.shape[1]
        self.perm = self._weight.perm if one.perm.numel() else None

    def check(self, x: Tensor) -> None:
        """Raise ValueError unless x has the weights' inputs."""
        self._kind.tiles_for(x, self._one)

    def is_wide(self, x: Tensor) -> bool:
        """Return whether Hopper's kernel for many tokens multiplies x."""
        return wide_kernel.fits(x, self._one)

    def is_int8(self, x: Tensor) -> bool:
        """Return whether it multiplies int8 codes of x."""
        return self._kind.int8_tokens and wide_kernel.fits_int8(x, self._one)

    def run(
        self, x: Tensor | QuantizedTokens, bias: Tensor | None, y: Tensor, how: FusedPlan | WidePlan,
        act: str | None, group: Grouped,
    ) -> None:  # fmt: skip
        """Write the product with x, or act(gate) * up of it, to y."""
        if isinstance(how, WidePlan):
            multiply = wide_kernel.wide_experts(x, self._weight, bias, self.constants, how, act, group)
            multiply(x, bias, y, group)
        else:
            assert isinstance(x, Tensor)
            fused_gemm(x, self._weight, bias, y, self.constants, how, act, group)


class _StackedRows:
    """The product with weights of all experts that lie row by row, [E, N, K]."""

    perm = None

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        _, self.n, self.steps = tensors[0].shape

    def check(self, x: Tensor) -> None:
        """Do as `_Tiles.check`."""
        expect(x, "T K", name="x", K=self.steps)

    def run(
        self, x: Tensor | QuantizedTokens, bias: Tensor | None, y: Tensor, how: BlockPlan, act: str | None,
        group: Grouped,
    ) -> None:  # fmt: skip
        """Do as `_Tiles.run`."""
        codes, token_scale = (x, None) if isinstance(x, Tensor) else (x.codes, x.scale)
        grouped_rows(codes, token_scale, self._tensors, bias, y, how, act, group)


def _product(kind: WeightScheme, tensors: Sequence[Tensor]) -> _Tiles | _StackedRows:
    return _Tiles(kind, tensors) if isinstance(kind, TiledScheme) else _StackedRows(tensors)
