"""Choose which kernel multiplies. `choose` is the only place that decides; its `Product` says why."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from qrt.kernels.gpu import multiprocessors
from qrt.kernels.linear import hopper_16bit_kernel
from qrt.kernels.linear.int8 import hopper_kernel as int8_hopper_kernel
from qrt.kernels.linear.int8 import plans as int8_plans
from qrt.kernels.linear.int8.plans import HopperPlan
from qrt.kernels.linear.product import Epilogue, Kernel, Product
from qrt.kernels.linear.tiles import digits_kernel, wide_kernel
from qrt.kernels.linear.tiles import plans as tile_plans
from qrt.kernels.linear.tiles.plans import FusedPlan, WidePlan
from qrt.kernels.tuned import configs, plan_of
from qrt.quant.tokens import QuantizedTokens
from qrt.quant.weight.base import Layout, WeightScheme
from qrt.quant.weight.tiles import TILE_ROWS, TiledScheme, TiledWeight

FUSED_TOKENS = {2: 64, 4: 16}  # most tokens, by bytes of x: accumulators and planes fill the registers
WIDE_TOKENS = {4: 33, 8: 9}  # least tokens, by bits, for which Hopper's kernel won most measured shapes
FASTEST = "it was the fastest for this shape"
WIDEST = 4096  # widest measured width; more tokens take its plan


def choose(
    scheme: WeightScheme,
    x: Tensor | QuantizedTokens,
    weight: Sequence[Tensor],
    epilogue: Epilogue = Epilogue.PLAIN,
) -> Product:
    """Return what multiplies x [T, K] by the run-time tensors of `scheme`, on x's GPU.

    It asks for shapes, dtypes and devices only. In an int8 layout x is quantized, or will be.
    """
    if scheme.layout is Layout.TILES:
        assert isinstance(scheme, TiledScheme)
        if scheme.int8_tokens and not takes_digits(scheme, x, weight):
            found = _int8_tiles(x, TiledWeight(*weight), epilogue)
        else:
            assert isinstance(x, Tensor)
            found = _tiles(x, TiledWeight(*weight), scheme, epilogue)
    elif scheme.layout is Layout.INT8_ROWS:
        found = _int8(x, weight[0], epilogue)
    elif scheme.layout is Layout.PLAIN:
        assert isinstance(x, Tensor)
        found = _plain(x, weight[0])
    else:
        found = Product(Kernel.DEFINITION, f"no kernel reads the layout of {scheme.name}")
    return found._replace(epilogue=epilogue)


def takes_digits(scheme: TiledScheme, x: Tensor | QuantizedTokens, weight: Sequence[Tensor]) -> bool:
    """Return whether x is multiplied as two int8 digits: it is not rounded to one, whatever the scheme."""
    if not scheme.has_integers or isinstance(x, QuantizedTokens):
        return False
    return digits_kernel.fits(x, TiledWeight(*weight), scheme.bits)


def _tiles(x: Tensor, weight: TiledWeight, scheme: TiledScheme, epilogue: Epilogue) -> Product:
    """Choose for weight-only codes in tiles."""
    if x.shape[0] == 0:
        return Product(Kernel.NOTHING, "x is empty")
    if takes_digits(scheme, x, weight):
        return Product(Kernel.DIGITS, "few tokens in bf16 meet int4 weights on a Hopper GPU")
    found = tile_plan(x, weight, scheme.bits)
    if epilogue is Epilogue.ACT_MUL and found.plan is not None:
        assert isinstance(found.plan, FusedPlan | WidePlan)
        return found._replace(joined=found.plan.gates and weight.out_features % (2 * TILE_ROWS) == 0)
    return found


def tile_plan(x: Tensor, weight: TiledWeight, bits: int) -> Product:
    """Choose what was measured for x, where it runs, or a rule of thumb."""
    (tokens, k), (blocks, tiles) = x.shape, weight.packed.shape[:2]
    width, few = tile_plans.width_of(tokens), tokens <= FUSED_TOKENS[x.itemsize]
    hopper = wide_kernel.fits(x, weight)
    key = partial(tile_plans.tuning_key, k, weight.out_features, bits)
    measured = plan_of(configs(x.device), key, tokens, min(width, WIDEST))
    if measured is not None:
        kind, *sizes = measured
        if kind == "fused" and few:
            return Product(Kernel.FUSED, FASTEST, tile_plans.PLANS[kind](*sizes), True)
        if kind == "wide" and hopper:
            return Product(Kernel.WIDE, FASTEST, tile_plans.PLANS[kind](*sizes), True)
    if hopper and measured is None and tokens >= WIDE_TOKENS[bits]:
        plan = tile_plans.wide_plan(width, blocks, tiles, multiprocessors(x.device))
        return Product(Kernel.WIDE, "the tokens are many, on a Hopper GPU", plan)
    if few:
        why = "the tokens are few and nothing faster was measured"
        return Product(Kernel.FUSED, why, tile_plans.fused_plan(width, blocks, tiles))
    if measured is not None and hopper:
        return Product(Kernel.DEQUANTIZE, FASTEST)
    return Product(Kernel.DEQUANTIZE, "the tokens are many, and Hopper's kernel does not take them here")


def _int8_tiles(x: Tensor | QuantizedTokens, weight: TiledWeight, epilogue: Epilogue) -> Product:
    """Choose for codes and int4 weights of progressive groups; x is quantized, or will be."""
    rows = x.codes if isinstance(x, QuantizedTokens) else x
    if rows.shape[0] == 0:
        return Product(Kernel.NOTHING, "x is empty")
    if epilogue is Epilogue.ACT_MUL and not isinstance(x, QuantizedTokens):
        epilogue = Epilogue.PLAIN
    partial_sums = epilogue is Epilogue.PARTIAL_SUMS
    if not wide_kernel.fits_int8(rows, weight):
        why = "Hopper's kernel takes groups of a multiple of 128, on its GPU"
        return Product(Kernel.TILES_INT8, why, joined=partial_sums)
    found = int8_tile_plan(rows, weight)
    halves = weight.out_features % (2 * TILE_ROWS) == 0 and found.plan.gates
    return found._replace(joined=partial_sums or (epilogue is Epilogue.ACT_MUL and halves))


def int8_tile_plan(x: Tensor, weight: TiledWeight) -> Product:
    """Choose what was measured for codes x [T, K], or a rule of thumb."""
    (tokens, k), (blocks, tiles) = x.shape, weight.packed.shape[:2]
    width = tile_plans.width_of(tokens)
    key = partial(tile_plans.int8_tuning_key, k, weight.out_features)
    measured = plan_of(configs(x.device), key, tokens, min(width, WIDEST))
    if measured is not None:
        kind, *sizes = measured
        return Product(Kernel.WIDE_INT8, FASTEST, tile_plans.PLANS[kind](*sizes), True)
    plan = tile_plans.wide_int8_plan(width, blocks, tiles, multiprocessors(x.device))
    return Product(Kernel.WIDE_INT8, "int4 weights meet int8 tokens on a Hopper GPU", plan)


def _int8(x: Tensor | QuantizedTokens, codes: Tensor, epilogue: Epilogue) -> Product:
    """Choose for int8 rows. The kernel applies the epilogue only if x comes as codes."""
    rows, n = x.codes if isinstance(x, QuantizedTokens) else x, codes.shape[0]
    if rows.shape[0] == 0:
        return Product(Kernel.NOTHING, "x is empty")
    found = int8_plan(rows, n)
    if epilogue is Epilogue.PARTIAL_SUMS:
        return found._replace(joined=True)
    gates = isinstance(found.plan, HopperPlan) and found.plan.gates
    return found._replace(joined=gates and isinstance(x, QuantizedTokens) and epilogue is Epilogue.ACT_MUL)


def int8_plan(x: Tensor, n: int) -> Product:
    """Choose what was measured for x [T, K], where it runs, or a rule of thumb."""
    (tokens, k), hopper = x.shape, int8_hopper_kernel.fits(x)
    width = int8_plans.width_of(tokens)
    measured = plan_of(configs(x.device), partial(int8_plans.tuning_key, k, n), tokens, width)
    if measured is not None:
        kind, *sizes = measured
        if kind == "block" or hopper:
            kernel = Kernel.INT8_BLOCK if kind == "block" else Kernel.INT8_HOPPER
            return Product(kernel, FASTEST, int8_plans.PLANS[kind](*sizes), True)
    plan = int8_plans.hopper_plan(tokens, n, multiprocessors(x.device)) if hopper else None
    if plan is not None:
        return Product(Kernel.INT8_HOPPER, "the tokens are many, on a Hopper GPU", plan)
    why = "reading the weight takes the time" if hopper else "Hopper's kernel does not take them here"
    return Product(Kernel.INT8_BLOCK, why, int8_plans.block_plan(width))


def _plain(x: Tensor, weight: Tensor) -> Product:
    """Choose for 16-bit and fp32 weights."""
    if hopper_16bit_kernel.fits(x, weight):
        return Product(Kernel.FEW_16_BIT, "few tokens meet many outputs on a Hopper GPU")
    return Product(Kernel.TORCH, "nothing faster was measured for this shape and GPU")


def as_codes(x: Tensor) -> QuantizedTokens:
    """Return what `choose` may be asked of codes of x [T, K]: it takes no memory and has no values."""
    codes = x.new_empty(1, dtype=torch.int8).expand(x.shape)
    return QuantizedTokens(codes, x.new_empty(1).expand(len(x)), x.dtype)
