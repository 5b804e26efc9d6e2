"""Multiply weight-only codes in tiles by some or many tokens on Hopper, in Gluon.

With so many tokens the tensor cores take the time, and Triton waits for every wgmma whose operand is in
registers. Here Y.T = W @ X.T with W as the register operand, and no wgmma waits: `wide_multiply_kernel`.

One group of warps multiplies, or several that do not wait for each other. Groups with row blocks of their own
share the tokens; groups with one row block take its tiles in turn. The scale goes into the weight, rounded to
the dtype of the product as a dequantized weight is, and one accumulator takes all of K. Where tokens are int8
codes, so are the weights, by the steps of progressive groups, and sums are int32. Where K is split, the
last program of an output block to arrive adds the partial sums in order. Where one program fills an SM, it
can take blocks in turn, by panels of tokens: its copies run ahead into the next block while it stores.
Layout: quant/weight/tiles.py.

Tokens of a mixture (`wide_experts`) come in blocks of places that share an expert, and programs take them in
turn, so that copies run ahead into the next expert. The operations bind 8,192 tokens of Qwen3-30B-A3B's 128
experts of 2,048 x 768: 618 GFLOP and 12 % for padding, 0.94 ms at the 740 TFLOP/s of dense blocks of 128 x
128.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from qrt.kernels.gpu import is_hopper, multiprocessors
from qrt.kernels.launch import Variant, variant
from qrt.kernels.linear.device import DTYPES, of_planes, of_tiles
from qrt.kernels.linear.shared.device import split_evenly
from qrt.kernels.linear.shared.places import Grouped
from qrt.kernels.linear.tiles.device import TileConstants
from qrt.kernels.linear.tiles.plans import WidePlan, registers
from qrt.kernels.linear.tiles.wide_multiply_kernel import WideSizes, wide
from qrt.kernels.linear.weight import Prepared
from qrt.kernels.sizes import cdiv
from qrt.quant.tokens import QuantizedTokens
from qrt.quant.weight.tiles import TiledWeight
from qrt.quant.weight.w4a8.device import int8_plane

PANEL = 4  # token blocks of a panel, where programs take blocks in turn


def fits(x: Tensor, weight: TiledWeight) -> bool:
    """Return whether this kernel multiplies x: 16 bits, K in whole planes, on a GPU with wgmma."""
    return is_hopper(x.device) and x.itemsize == 2 and x.shape[1] % weight.packed.shape[3] == 0


def fits_int8(codes: Tensor, weight: TiledWeight) -> bool:
    """Return whether this kernel multiplies codes [T, K] by weights of progressive groups."""
    whole = codes.shape[1] % weight.packed.shape[3] == 0 and weight.has_whole_groups
    return is_hopper(codes.device) and whole and weight.steps.numel() > 0


def wide_product(
    x: Tensor,
    weight: TiledWeight,
    bias: Tensor | None,
    constants: TileConstants,
    plan: WidePlan,
    act: str | None,
) -> Callable[[Tensor, Tensor | None, Tensor], None]:
    """Return what computes y from x, bias and y, for all that are as x and bias.

    y [T, N] = x [T, K] @ W.T + bias; x is contiguous and `fits`. With `act`, y [T, N / 2] is act(gate) * up
    of it, for a plan that `gates` and halves of whole row blocks. All that does not depend on addresses is
    worked out here, once.
    """
    return _product(x, weight, constants, bias, plan, act)


def wide_int8_product(
    x: QuantizedTokens,
    weight: TiledWeight,
    bias: Tensor | None,
    constants: TileConstants,
    plan: WidePlan,
    act: str | None,
    partial_sums: bool = False,
) -> Prepared:
    """Return the product of x and bias, for all that are as x and bias; x's codes are as `fits_int8` says.

    It is [T, N] in x's dtype; with `act`, as in `wide_product`, [T, N / 2]; with `partial_sums` the sum of
    each split, fp32 [S, T, N].
    """
    multiply = _product(x.codes, *_in_int8(weight, constants), bias, plan, act, partial_sums)
    tokens, n, tiles = len(x.codes), weight.out_features, weight.packed.shape[1]
    _, splits = split_evenly(tiles, plan.splits, *_outputs(tokens, weight, plan))
    size = (splits, tokens, n) if partial_sums else (tokens, n // (2 if act else 1))

    def product(x: QuantizedTokens, bias: Tensor | None) -> Tensor:
        y = torch.empty(size, dtype=torch.float32 if partial_sums else x.dtype, device=x.codes.device)
        multiply(x.codes.contiguous(), bias, y, x.scale, weight.channel)
        return y

    return product


def _in_int8(weight: TiledWeight, constants: TileConstants) -> tuple[TiledWeight, TileConstants]:
    """Return a weight of progressive groups, or a stack, with its steps for scales, and what unpacks it."""
    steps = weight._replace(scale=weight.steps, zero=weight.steps[:0])
    return steps, constants._replace(SCALE=gl.float16, ASYMMETRIC=False, UNPACK=int8_plane)


def _outputs(tokens: int, weight: TiledWeight, plan: WidePlan) -> tuple[int, int]:
    """Return the blocks of outputs, and how many counters of arrivals there are."""
    return cdiv(tokens, plan.tokens) * cdiv(len(weight.packed), plan.blocks), weight.out_features


def _product(
    x: Tensor, weight: TiledWeight, constants: TileConstants, bias: Tensor | None, plan: WidePlan,
    act: str | None, partial_sums: bool = False,
) -> Callable[..., None]:  # fmt: skip
    """Return the launch for x, bias, y and, where x holds codes, the scales of tokens and channels."""
    blocks, tiles, rows, words = weight.packed.shape
    outputs, arrivals = _outputs(x.shape[0], weight, plan)
    share, splits = split_evenly(tiles, plan.splits, outputs, arrivals)
    room = outputs * splits * plan.tokens * plan.blocks * rows if splits > 1 and not partial_sums else 0
    each, halves = plan.group_blocks, 2 if act else 1
    persistent = plan.persistent > 0 and splits == 1
    programs = min(plan.persistent * multiprocessors(x.device), outputs) if persistent else outputs
    kernel = _variant(plan, constants, DTYPES[x.dtype], bias is not None, splits > 1, act, persistent, PANEL)
    descriptors = of_tiles(weight, each, halves)
    others = weight.arrivals, x.shape[0], weight.out_features, outputs, tiles, share, *[None] * 4
    sum_dtype = torch.int32 if x.dtype == torch.int8 else torch.float32

    def multiply(
        x: Tensor, bias: Tensor | None, y: Tensor, token_scale: Tensor | None = None,
        channel: Tensor | None = None,
    ) -> None:  # fmt: skip
        planes = of_planes(x, plan.x_planes, plan.tokens, words)
        parts = torch.empty(room, dtype=sum_dtype, device=x.device) if room else None
        kernel.launch((programs, splits), planes, *descriptors, bias, y, parts, *others, token_scale, channel)

    return multiply


def wide_experts(
    x: Tensor | QuantizedTokens, weight: TiledWeight, bias: Tensor | None, constants: TileConstants,
    plan: WidePlan, act: str | None, group: Grouped,
) -> Callable[[Tensor | QuantizedTokens, Tensor | None, Tensor, Grouped], None]:  # fmt: skip
    """Return what computes y of each place's expert from x, bias, y and a group, for all that are as these.

    x [P, K] has the places in its rows, in the order of the codes, is contiguous and `fits`; or it is
    quantized, as `fits_int8` says. The rows of padding may hold anything: no row depends on another. The
    tensors of `weight` are those of all E experts, stacked; bias is [E, N]. y has a row for each place, or is
    [partial_sums, T, N]. It has x's dtype or is fp32; with `act`, which is as in `wide_product`, it has x's.
    The plan is persistent, with blocks as the group's.
    """
    channel, rows = weight.channel, x.codes if isinstance(x, QuantizedTokens) else x
    if isinstance(x, QuantizedTokens):
        weight, constants = _in_int8(weight, constants)
    blocks, tiles, _, words = weight.packed.shape[1:]
    (places, _), n, halves = rows.shape, weight.arrivals.shape[1], 2 if act else 1
    outputs = cdiv(places, plan.tokens) * cdiv(blocks, plan.blocks)
    programs = min(plan.persistent * multiprocessors(rows.device), outputs)
    dot, biased, partial_sums = DTYPES[rows.dtype], bias is not None, group.partial_sums
    kernel = _variant(plan, constants, dot, biased, False, act, True, PANEL, partial_sums)
    descriptors = of_tiles(weight, plan.group_blocks, halves)
    sizes = weight.arrivals, places, n, outputs, tiles, tiles

    def multiply(x: Tensor | QuantizedTokens, bias: Tensor | None, y: Tensor, group: Grouped) -> None:
        rows, of_codes = (
            (x.codes, (x.scale, channel)) if isinstance(x, QuantizedTokens) else (x, (None, None))
        )
        planes, owners = of_planes(rows, plan.x_planes, plan.tokens, words), group.places.experts
        scatter = (
            (group.places.order, group.weights, group.places.assignments)
            if partial_sums
            else (None, None, None)
        )
        kernel.launch((programs, 1), planes, *descriptors, bias, y, None, *sizes, owners, *scatter, *of_codes)

    return multiply


@cache
def _variant(
    plan: WidePlan, constants: TileConstants, dot: Any, biased: bool, split: bool, act: str | None,
    persistent: bool, panel: int, partial_sums: int = 0,
) -> Variant:  # fmt: skip
    sizes = WideSizes(
        constants.J, constants.PLANES, constants.RUNS, constants.SCALE, constants.ASYMMETRIC, dot, biased,
        plan.tokens, plan.group_blocks, plan.groups, plan.turns, split, 2 if act else 1, act, plan.x_planes,
        plan.x_stages, plan.w_stages, persistent, panel, partial_sums,
    )  # fmt: skip
    (of_all, of_group), others, warps = registers(plan), plan.groups - 1, 4 * plan.group_blocks
    return variant(
        wide, S=sizes, UNPACK=constants.UNPACK, WARPS=(warps,) * others + (1, 1),
        REGISTERS=(of_group,) * others + (24, 24), num_warps=warps, maxnreg=of_all, launch_pdl=True,
    )  # fmt: skip
