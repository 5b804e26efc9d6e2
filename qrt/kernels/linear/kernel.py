"""The operators of `qrt.kernels.linear` on the GPU: run what `choose` chose, and keep what can be kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qrt.checks import expect
from qrt.kernels.act_mul.kernel import act_mul, act_mul_int8
from qrt.kernels.linear.choose import choose, takes_digits
from qrt.kernels.linear.hopper_16bit_kernel import hopper_16bit_gemm
from qrt.kernels.linear.int8.block_kernel import block_gemm
from qrt.kernels.linear.int8.hopper_kernel import hopper_product
from qrt.kernels.linear.int8.plans import BlockPlan, HopperPlan
from qrt.kernels.linear.int8.quantize_kernel import quantize_tokens
from qrt.kernels.linear.product import Epilogue, Kernel, Product
from qrt.kernels.linear.tiles.dequantize_kernel import dequantized_gemm
from qrt.kernels.linear.tiles.device import constants_of
from qrt.kernels.linear.tiles.digits_kernel import digits_gemm
from qrt.kernels.linear.tiles.fused_kernel import fused_gemm
from qrt.kernels.linear.tiles.int8_kernel import int8_tiles_gemm
from qrt.kernels.linear.tiles.plans import FusedPlan, WidePlan
from qrt.kernels.linear.tiles.wide_kernel import wide_int8_product, wide_product
from qrt.kernels.linear.weight import Prepared, is_new, ready
from qrt.quant.tokens import QuantizedTokens
from qrt.quant.weight import WEIGHT_SCHEMES
from qrt.quant.weight.base import Layout, WeightScheme
from qrt.quant.weight.tiles import TiledScheme

logger = logging.getLogger(__name__)


class Done(NamedTuple):
    """A finished product.

    y         its result, without the epilogue unless `product.joined`
    product   what `choose` chose
    prepared  a function that multiplies every x of the same kind, if one can be kept
    """

    y: Tensor
    product: Product
    prepared: Prepared | None = None


def _multiply(
    kind: WeightScheme, x: Tensor, weight: Sequence[Tensor], bias: Tensor | None, act: str | None = None
) -> Done:
    """Multiply x [T, K] by the kernel that `choose` chooses; with `act`, for act(gate) * up of it."""
    if isinstance(kind, TiledScheme) and (not kind.int8_tokens or takes_digits(kind, x, weight)):
        return _multiply_tiles(kind, x, weight, bias, act)
    if kind.int8_tokens and kind.layout in (Layout.INT8_ROWS, Layout.TILES):
        expect(x, "T K", name="x")
        done = _multiply_codes(kind, quantize_tokens(x.contiguous()), weight, bias)
        if (multiply := done.prepared) is None or act is not None:
            return done._replace(prepared=None)
        return done._replace(prepared=lambda x, bias: multiply(quantize_tokens(x.contiguous()), bias))
    chosen = choose(kind, x, weight, _epilogue(act))
    if chosen.kernel is Kernel.FEW_16_BIT:
        return Done(hopper_16bit_gemm(x, weight[0], bias), chosen)
    if chosen.kernel is Kernel.TORCH:
        return Done(F.linear(x, weight[0], bias), chosen)
    _say(kind.name, chosen)
    return Done(kind.linear_ref(x, weight, bias), chosen)


def _epilogue(act: str | None) -> Epilogue:
    return Epilogue.PLAIN if act is None else Epilogue.ACT_MUL


@cache
def _say(scheme: str, chosen: Product) -> None:
    """Log once that no kernel multiplies a scheme."""
    logger.warning("%s: %s", scheme, chosen.explain())


def _multiply_tiles(
    kind: TiledScheme, x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None, act: str | None
) -> Done:
    """Multiply x [T, K] by a weight in tiles."""
    weight = kind.tiles_for(x, tensors)
    x = weight.gather(x)
    chosen = choose(kind, x, weight, _epilogue(act))
    if chosen.kernel is Kernel.DIGITS:
        return Done(digits_gemm(x, weight, bias, kind.bits), chosen)
    tokens, n, joined = len(x), weight.out_features, act if chosen.joined else None
    y = torch.empty(tokens, n // 2 if joined else n, dtype=x.dtype, device=x.device)
    if chosen.kernel is Kernel.NOTHING:
        return Done(y, chosen)
    constants = constants_of(weight, kind.bits, kind.unpacker())
    if chosen.kernel is Kernel.DEQUANTIZE:
        dequantized_gemm(x, weight, bias, y, constants)
        return Done(y, chosen)
    if isinstance(chosen.plan, FusedPlan):
        fused_gemm(x.contiguous(), weight, bias, y, constants, chosen.plan, joined)
        return Done(y, chosen)
    assert isinstance(chosen.plan, WidePlan)
    multiply = wide_product(x, weight, bias, constants, chosen.plan, joined)
    multiply(x.contiguous(), bias, y)
    can_stay = not weight.perm.numel() and joined == act
    return Done(y, chosen, _filled(multiply, y.shape) if can_stay else None)


def _filled(multiply: Callable[[Tensor, Tensor | None, Tensor], None], size: torch.Size) -> Prepared:
    """Return `multiply` with a new result of `size`."""

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        y = torch.empty(size, dtype=x.dtype, device=x.device)
        multiply(x.contiguous(), bias, y)
        return y

    return product


def _multiply_codes(
    kind: WeightScheme, x: QuantizedTokens, weight: Sequence[Tensor], bias: Tensor | None,
    epilogue: Epilogue = Epilogue.PLAIN, act: str | None = None,
) -> Done:  # fmt: skip
    """Multiply tokens [T, K] that are quantized already."""
    if not kind.int8_tokens:
        raise NotImplementedError(f"{kind.name} takes no int8 tokens")
    if isinstance(kind, TiledScheme):
        return _multiply_int8_tiles(kind, x, weight, bias, epilogue, act)
    if kind.layout is not Layout.INT8_ROWS:
        chosen = choose(kind, x, weight, epilogue)
        _say(kind.name, chosen)
        return Done(kind.linear_int8_ref(x, weight, bias), chosen)
    expect(x.codes, "T K", name="x", K=weight[0].shape[1])
    chosen, partial_sums = choose(kind, x, weight, epilogue), epilogue is Epilogue.PARTIAL_SUMS
    if chosen.kernel is Kernel.NOTHING:
        return Done(_nothing(x, weight[0].shape[0], partial_sums), chosen)
    if isinstance(chosen.plan, HopperPlan):
        product = hopper_product(x, weight, bias, chosen.plan, act if chosen.joined else None, partial_sums)
        return Done(product(x, bias), chosen, product)
    assert isinstance(chosen.plan, BlockPlan)
    return Done(block_gemm(x, weight, bias, chosen.plan, partial_sums), chosen)


def _nothing(x: QuantizedTokens, n: int, partial_sums: bool) -> Tensor:
    """Return the product of no tokens with N outputs."""
    size = (*((1,) if partial_sums else ()), 0, n)
    return torch.empty(size, dtype=torch.float32 if partial_sums else x.dtype, device=x.codes.device)


def _multiply_int8_tiles(
    kind: TiledScheme, x: QuantizedTokens, tensors: Sequence[Tensor], bias: Tensor | None,
    epilogue: Epilogue, act: str | None,
) -> Done:  # fmt: skip
    """Multiply tokens [T, K] that are quantized already by int4 weights of progressive groups."""
    weight = kind.tiles_for(x.codes, tensors)
    x = x._replace(codes=weight.gather(x.codes))
    chosen, partial_sums = choose(kind, x, weight, epilogue), epilogue is Epilogue.PARTIAL_SUMS
    if chosen.kernel is Kernel.NOTHING:
        return Done(_nothing(x, weight.out_features, partial_sums), chosen)
    if chosen.kernel is Kernel.TILES_INT8:
        return Done(int8_tiles_gemm(x, weight, bias, partial_sums), chosen)
    constants, joined = constants_of(weight, kind.bits, None), act if chosen.joined else None
    product = wide_int8_product(x, weight, bias, constants, chosen.plan, joined, partial_sums)
    return Done(product(x, bias), chosen, None if weight.perm.numel() else product)


def _keep(weight: Sequence[Tensor], key: Hashable, prepared: Prepared | None) -> None:
    """Keep how the product was multiplied, if the weight keeps such and has none yet."""
    if is_new(weight, key):
        weight.keep(key, prepared)  # type: ignore[attr-defined]


def linear(x: Tensor, weight: Sequence[Tensor], bias: Tensor | None, scheme: str) -> Tensor:
    """`qrt::linear` on CUDA tensors."""
    key = "linear", x.shape, x.dtype, bias is None
    if product := ready(weight, key):
        return product(x, bias)
    done = _multiply(WEIGHT_SCHEMES[scheme], x, weight, bias)
    _keep(weight, key, done.prepared)
    return done.y


def linear_int8(
    codes: Tensor, token_scale: Tensor, weight: Sequence[Tensor], bias: Tensor | None, scheme: str,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`qrt::linear_int8` on CUDA tensors."""
    key, tokens = ("int8", codes.shape, dtype, bias is None), QuantizedTokens(codes, token_scale, dtype)
    if product := ready(weight, key):
        return product(tokens, bias)
    done = _multiply_codes(WEIGHT_SCHEMES[scheme], tokens, weight, bias)
    _keep(weight, key, done.prepared)
    return done.y


def linear_partial(x: Tensor, weight: Sequence[Tensor], scheme: str) -> Tensor:
    """`qrt::linear_partial` on CUDA tensors."""
    codes, scale, _ = quantize_tokens(x.contiguous())
    return linear_int8_partial(codes, scale, weight, scheme)


def linear_int8_partial(codes: Tensor, token_scale: Tensor, weight: Sequence[Tensor], scheme: str) -> Tensor:
    """`qrt::linear_int8_partial` on CUDA tensors."""
    tokens = QuantizedTokens(codes, token_scale, torch.float32)
    done = _multiply_codes(WEIGHT_SCHEMES[scheme], tokens, weight, None, Epilogue.PARTIAL_SUMS)
    return done.y if done.y.dim() == 3 else done.y[None]


def linear_act(x: Tensor, weight: Sequence[Tensor], bias: Tensor | None, scheme: str, act: str) -> Tensor:
    """`qrt::linear_act` on CUDA tensors."""
    key = "act", act, x.shape, x.dtype, bias is None
    if product := ready(weight, key):
        return product(x, bias)
    done = _multiply(WEIGHT_SCHEMES[scheme], x, weight, bias, act)
    _keep(weight, key, done.prepared)
    return done.y if done.product.joined else act_mul(done.y, act)


def linear_act_int8(
    codes: Tensor, token_scale: Tensor, weight: Sequence[Tensor], bias: Tensor | None, scheme: str,
    dtype: torch.dtype, act: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`qrt::linear_act_int8` on CUDA tensors."""
    key = "act int8", act, codes.shape, dtype, bias is None
    tokens = QuantizedTokens(codes, token_scale, dtype)
    if product := ready(weight, key):
        return quantize_tokens(product(tokens, bias))[:2]
    done = _multiply_codes(WEIGHT_SCHEMES[scheme], tokens, weight, bias, Epilogue.ACT_MUL, act)
    if not done.product.joined:
        return act_mul_int8(done.y, act)
    _keep(weight, key, done.prepared)
    return quantize_tokens(done.y)[:2]
