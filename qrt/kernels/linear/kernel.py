"""`qrt::linear` on the GPU: x [T, K] -> [T, N], and the GEMM over tiles that the weight-only schemes share.

Few tokens: one kernel reads every weight once and is bound by that read. It computes W @ x^T, so that the
unpacked weights are the register operand of the tensor core and never touch shared memory, keeps codes as
exact small integers and applies scales to fp32 group sums. Where N / 64 programs would leave SMs idle, K is
split; the last program of a row block to arrive adds the partial sums in split order, so results do not
depend on timing. On Hopper `digits_kernel` takes int4 times the fewest tokens in bf16. More tokens:
`hopper_kernel` where it was measured to win or, beyond 64, fits; else the weight is
dequantized block by block to scratch and torch multiplies.
Layout: quant/weight/tiles.py. A format is its `unpack` device function.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qrt.kernels.gpu import multiprocessors, overlaps, shared_bytes
from qrt.kernels.launch import COMPILED, variant
from qrt.kernels.linear import digits_kernel, hopper_16bit_kernel
from qrt.kernels.linear.hopper_kernel import fits, wide_gemm, wide_product
from qrt.kernels.linear.int8_kernel import (
    gated_int8_gemm,
    gated_plan,
    int8_gemm,
    int8_product,
    quantize_tokens,
)
from qrt.kernels.linear.split_kernel import sum_splits
from qrt.kernels.linear.tile_plans import (
    PLANS,
    FusedPlan,
    Layout,
    WidePlan,
    fused_plan,
    tuning_key,
    wide_plan,
    width_of,
)
from qrt.kernels.linear.weight import Product, is_new, ready
from qrt.kernels.silu_mul.kernel import silu_mul, silu_mul_int8, silu_times
from qrt.kernels.tuned import configs, plan_of
from qrt.quant.tokens import QuantizedTokens
from qrt.quant.weight import WEIGHT_SCHEMES
from qrt.quant.weight.base import Gemms
from qrt.quant.weight.device import unit_of
from qrt.quant.weight.tiles import TILE_ROWS, TiledScheme, TiledWeight

FUSED_TOKENS = {2: 64, 4: 16}  # most, by bytes of x: accumulators and planes fill the registers
WIDEST = 4096  # of measured widths: more tokens have its plan
SMALL_BYTES = 4 << 10  # of shared memory, for scales and zeros
SCRATCH_BYTES = 64 << 20  # of dequantized weight: near the L2 cache, and small beside a model
_TL = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def _scale(ptr, run: tl.constexpr, ROWS: tl.constexpr, SCALE: tl.constexpr):
    """fp32 scale of each row's `run`. 16-bit scales come in pairs: an async copy moves 4 bytes or more."""
    if SCALE == tl.float32:
        return tl.load(ptr + run * ROWS).to(tl.float32, bitcast=True)
    else:
        pair = tl.load(ptr + run // 2 * ROWS)
        return ((pair >> (run % 2 * 16)) & 0xFFFF).to(tl.int16).to(SCALE, bitcast=True).to(tl.float32)


@triton.jit
def _zero(zeros, run: tl.constexpr):
    """Signed byte `run` of each row's word, [ROWS, 1]."""
    return ((zeros << (24 - 8 * run)) >> 24)[:, None]


@triton.jit(do_not_specialize=["M"])
def _fused(
    X, W, SCALES, ZEROS, BIAS, Y, PARTS, ARRIVALS, M, N,
    K: tl.constexpr, ROWS: tl.constexpr, J: tl.constexpr, PLANES: tl.constexpr, RUNS: tl.constexpr,
    SCALE: tl.constexpr, ASYMMETRIC: tl.constexpr, UNPACK: tl.constexpr, ASM: tl.constexpr,
    DOT: tl.constexpr, BIASED: tl.constexpr, BM: tl.constexpr, BLOCKS: tl.constexpr, HALVES: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, launch_pdl: tl.constexpr,
):  # fmt: skip
    """Grid (row blocks / BLOCKS, SPLITS): Y [M, N] = X [M, K] @ W.T for M <= BM; BLOCKS divide the row
    blocks, and no split is left without a tile.

    With two HALVES the two blocks are the gate and the up of the same columns: Y [M, N / 2], one split.
    """
    TILE: tl.constexpr = PLANES * J
    TILES: tl.constexpr = (K + TILE - 1) // TILE
    SHARE: tl.constexpr = (TILES + SPLITS - 1) // SPLITS
    WORDS: tl.constexpr = 1 if SCALE == tl.float32 else 2  # scales a 32-bit word
    PER_RUN: tl.constexpr = PLANES // RUNS
    block = tl.program_id(0)
    split = tl.program_id(1)
    first = split * SHARE
    rows = tl.arange(0, BLOCKS * ROWS)
    words = tl.arange(0, J)
    tokens = tl.arange(0, BM)
    live = (tokens < M)[None, :]
    tile = block * (BLOCKS // HALVES * TILES) + first
    apart = N // (HALVES * ROWS) * TILES if HALVES > 1 else TILES  # tiles between two of the blocks
    further, row = rows // ROWS * apart, rows % ROWS
    wp = W + tile.to(tl.int64) * (ROWS * J) + ((further * ROWS + row) * J)[:, None] + words[None, :]
    sp = SCALES + (tile + further) * (RUNS // WORDS * ROWS) + row
    zp = ZEROS + (tile + further) * ROWS + row
    xp = X + tokens[None, :] * K + first * TILE + words[:, None]
    acc = tl.zeros([BLOCKS * ROWS, BM], tl.float32)
    steps = SHARE if TILES % SHARE == 0 else tl.minimum(SHARE, TILES - first)
    if launch_pdl:
        gdc_wait()
    for i in tl.range(0, steps, num_stages=STAGES):
        packed = tl.load(wp, eviction_policy="evict_first")
        if ASYMMETRIC:
            zeros = tl.load(zp)
        for run in tl.static_range(RUNS):
            part = tl.zeros([BLOCKS * ROWS, BM], tl.float32)
            for p in tl.static_range(run * PER_RUN, (run + 1) * PER_RUN):
                plane = UNPACK(packed, _zero(zeros, run) if ASYMMETRIC else 0, p, DOT, ASM)
                inside = live
                if K % TILE:
                    inside = live & ((first + i) * TILE + p * J + words < K)[:, None]
                x = tl.load(xp + p * J, mask=inside, other=0.0)
                part = tl.dot(plane, x.to(DOT), part, input_precision="ieee")
            acc += part * _scale(sp, run, ROWS, SCALE)[:, None]
        wp += ROWS * J
        sp += RUNS // WORDS * ROWS
        zp += ROWS
        xp += TILE

    if launch_pdl:  # not earlier: the next kernel's programs would take the places of this one's
        gdc_launch_dependents()
    acc *= unit_of(DOT, ASM)
    n = block * (BLOCKS // HALVES * ROWS) + (row + rows // ROWS * (N // 2) if HALVES > 1 else rows)
    inside = live & (n < N)[:, None]
    last = True
    if SPLITS > 1:
        at = n[:, None] * M + tokens[None, :]
        acc, last = sum_splits(acc, PARTS, ARRIVALS + block, at, inside, M * N, split, SPLITS)
    if last:
        if BIASED:
            acc += tl.load(BIAS + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        y = acc.to(Y.dtype.element_ty)
        if HALVES > 1:  # rows r and r + 64 are in one thread
            gate, up = tl.split(tl.permute(tl.reshape(y, (HALVES, ROWS, BM)), (1, 2, 0)))
            at = tokens[None, :] * (N // 2) + (block * ROWS + tl.arange(0, ROWS))[:, None]
            tl.store(Y + at, silu_times(gate, up, ASM), mask=tl.broadcast_to(live, (ROWS, BM)))
        else:
            tl.store(Y + tokens[None, :] * N + n[:, None], y, mask=inside)


@triton.jit
def _dequantize(
    W, SCALES, ZEROS, OUT, TILES,
    K: tl.constexpr, ROWS: tl.constexpr, J: tl.constexpr, PLANES: tl.constexpr, RUNS: tl.constexpr,
    SCALE: tl.constexpr, ASYMMETRIC: tl.constexpr, UNPACK: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, row blocks): OUT [64 * row blocks, K] = (code - zero) * scale, rounded to OUT's dtype."""
    WORDS: tl.constexpr = 1 if SCALE == tl.float32 else 2
    PER_RUN: tl.constexpr = PLANES // RUNS
    column = tl.program_id(0)
    block = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    words = tl.arange(0, J)
    tile = block.to(tl.int64) * TILES + column
    packed = tl.load(W + tile * (ROWS * J) + rows[:, None] * J + words[None, :])
    if ASYMMETRIC:
        zeros = tl.load(ZEROS + tile * ROWS + rows)
    for p in tl.static_range(PLANES):
        zero = _zero(zeros, p // PER_RUN) if ASYMMETRIC else 0
        plane = UNPACK(packed, zero, p, OUT.dtype.element_ty, ASM).to(tl.float32)
        scales = SCALES + tile * (RUNS // WORDS * ROWS) + rows
        plane *= (_scale(scales, p // PER_RUN, ROWS, SCALE) * unit_of(OUT.dtype.element_ty, ASM))[:, None]
        k = (column * PLANES + p) * J + words
        out = OUT + (block * ROWS + rows).to(tl.int64)[:, None] * K + k[None, :]
        tl.store(out, plane.to(OUT.dtype.element_ty), mask=(k < K)[None, :])


def tile_gemm(x: Tensor, weight: TiledWeight, bias: Tensor | None, bits: int, unpack: Any) -> Tensor:
    """x [T, K] (columns in the order of the codes) times the tiled weight -> [T, N] in x's dtype.

    `unpack` is the format's device function (`TiledScheme.unpacker`). Bias is added in fp32. A call returns
    the same bits every time.
    """
    if digits_kernel.fits(x, weight, bits):
        return digits_kernel.digits_gemm(x, weight, bias, bits)
    y = torch.empty(x.shape[0], weight.out_features, dtype=x.dtype, device=x.device)
    layout = _layout(weight, bits, unpack)
    if x.shape[0] == 0:
        return y
    chosen = _chosen(x, weight, bits)
    if chosen is not None:
        launch = wide_gemm if isinstance(chosen, WidePlan) else _launch_fused
        launch(x.contiguous(), weight, bias, y, layout, chosen)
        return y
    blocks = max(1, SCRATCH_BYTES // (TILE_ROWS * x.shape[1] * x.itemsize))
    for first in range(0, weight.packed.shape[0], blocks):
        matrix = _launch_dequantize(x, weight, slice(first, first + blocks), layout)
        columns = slice(first * TILE_ROWS, min((first + blocks) * TILE_ROWS, weight.out_features))
        matrix = matrix[: columns.stop - columns.start].T
        if bias is None:
            torch.mm(x, matrix, out=y[:, columns])
        else:
            torch.addmm(bias[columns], x, matrix, out=y[:, columns])
    return y


def gated_tile_gemm(x: Tensor, weight: TiledWeight, bias: Tensor | None, bits: int, unpack: Any) -> Tensor:
    """`silu_mul` of `tile_gemm`, [T, N / 2], the same bits; in one kernel by a plan that `gates`."""
    chosen, n = _chosen(x, weight, bits), weight.out_features
    gates = chosen is not None and chosen.gates and n % (2 * TILE_ROWS) == 0 and x.shape[0] > 0
    if not gates or digits_kernel.fits(x, weight, bits):
        return silu_mul(tile_gemm(x, weight, bias, bits, unpack))
    y = torch.empty(x.shape[0], n // 2, dtype=x.dtype, device=x.device)
    launch = wide_gemm if isinstance(chosen, WidePlan) else _launch_fused
    launch(x.contiguous(), weight, bias, y, _layout(weight, bits, unpack), chosen, gated=True)
    return y


def _launch_fused(
    x: Tensor, weight: TiledWeight, bias: Tensor | None, y: Tensor, layout: Layout,
    chosen: FusedPlan, gated: bool = False,
) -> None:  # fmt: skip
    (tokens, k), n = x.shape, weight.out_features
    blocks, _, rows, words = weight.packed.shape
    width = width_of(tokens)
    stage_bytes = chosen.blocks * rows * words * 2 + layout.PLANES * words * width * x.itemsize
    parts = None
    if chosen.splits > 1:
        parts = torch.empty(chosen.splits * n * tokens, dtype=torch.float32, device=x.device)
    kernel = variant(
        _fused, K=k, DOT=_dot_type(x), BIASED=bias is not None, BM=width, BLOCKS=chosen.blocks,
        HALVES=2 if gated else 1, SPLITS=chosen.splits,
        STAGES=_stages(x.device, stage_bytes, chosen.stages), num_warps=chosen.warps, **layout._asdict(),
        launch_pdl=overlaps(x.device),
    )  # fmt: skip
    kernel.launch(
        (blocks // chosen.blocks, chosen.splits), x, weight.packed, weight.scale.view(torch.int32),
        weight.zero.view(torch.int32), bias, y, parts, weight.arrivals, tokens, n,
    )  # fmt: skip


def _chosen(x: Tensor, weight: TiledWeight, bits: int) -> FusedPlan | WidePlan | None:
    """What was measured for x, where it runs, or a rule of thumb; None: `_dequantize`."""
    (tokens, k), (blocks, tiles) = x.shape, weight.packed.shape[:2]
    width, few, hopper = width_of(tokens), tokens <= FUSED_TOKENS[x.itemsize], fits(x, weight)
    key = partial(tuning_key, k, weight.out_features, bits)
    measured = plan_of(configs(x.device), key, tokens, min(width, WIDEST))
    if measured is not None:
        kind, *sizes = measured
        if {"fused": few, "wide": hopper}.get(kind, False):
            chosen: FusedPlan | WidePlan = PLANS[kind](*sizes)
            return chosen
    if few:
        return fused_plan(width, blocks, tiles)
    if hopper and measured is None:
        return wide_plan(width, blocks, tiles, multiprocessors(x.device))
    return None


def _launch_dequantize(x: Tensor, weight: TiledWeight, blocks: slice, layout: Layout) -> Tensor:
    """Row blocks of the weight as [rows, K] in x's dtype."""
    packed, scale, zero = weight.packed[blocks], weight.scale[blocks], weight.zero[blocks]
    out = torch.empty(packed.shape[0] * TILE_ROWS, x.shape[1], dtype=x.dtype, device=x.device)
    kernel = variant(_dequantize, K=x.shape[1], **layout._asdict())
    kernel.launch(
        (packed.shape[1], packed.shape[0]), packed, scale.view(torch.int32), zero.view(torch.int32), out,
        packed.shape[1],
    )  # fmt: skip
    return out


def _layout(weight: TiledWeight, bits: int, unpack: Any) -> Layout:
    scale = weight.scale
    return _layout_of(weight.packed.shape[3], weight.runs, scale.dtype, weight.zero.numel() > 0, bits, unpack)


@cache
def _layout_of(
    words: int, runs: int, scale: torch.dtype, asymmetric: bool, bits: int, unpack: Any
) -> Layout:  # fmt: skip
    return Layout(TILE_ROWS, words, 16 // bits, runs, _TL[scale], asymmetric, unpack, COMPILED)


def _dot_type(x: Tensor) -> tl.dtype:
    """x's dtype; the interpreter would multiply bf16 as bit patterns, so there fp32."""
    return _TL[x.dtype] if COMPILED else tl.float32


def _stages(device: torch.device, stage_bytes: int, most: int) -> int:
    """As many tiles in flight as shared memory holds, and `most`."""
    return max(1, min(most, (shared_bytes(device) - SMALL_BYTES) // stage_bytes))


def plain_gemm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K] @ weight.T + bias of one dtype."""
    few = hopper_16bit_kernel.fits(x, weight)
    return hopper_16bit_kernel.hopper_16bit_gemm(x, weight, bias) if few else F.linear(x, weight, bias)


GEMMS = Gemms(tile_gemm, int8_gemm, plain_gemm)
GATED = Gemms(gated_tile_gemm, gated_int8_gemm, plain_gemm)
SHARED = Gemms(tile_gemm, partial(int8_gemm, shares=True), plain_gemm)


def _tile_product(
    x: Tensor, weight: TiledWeight, bias: Tensor | None, kind: TiledScheme, gated: bool
) -> Product | None:  # fmt: skip
    """Return the product of bias and all that have x's shape by `wide_gemm`, if that multiplies them."""
    chosen, n = _chosen(x, weight, kind.bits), weight.out_features
    fits_wide = isinstance(chosen, WidePlan) and (not gated or (chosen.gates and n % (2 * TILE_ROWS) == 0))
    if not fits_wide or not x.shape[0] or weight.perm.numel() or digits_kernel.fits(x, weight, kind.bits):
        return None
    multiply = wide_product(x, weight, bias, _layout(weight, kind.bits, kind.unpacker()), chosen, gated)
    size = x.shape[0], n // 2 if gated else n

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        y = torch.empty(size, dtype=x.dtype, device=x.device)
        multiply(x.contiguous(), bias, y)
        return y

    return product


def _product(x: Tensor, weight: Sequence[Tensor], bias: Tensor | None, scheme: str) -> Product | None:
    """`_tile_product`, or `int8_product` behind `quantize_tokens`."""
    kind = WEIGHT_SCHEMES[scheme]
    if isinstance(kind, TiledScheme):
        return _tile_product(x, TiledWeight(*weight), bias, kind, False)
    if not kind.int8_tokens:
        return None
    tokens = QuantizedTokens(torch.empty_like(x, dtype=torch.int8), x.new_empty(len(x)), x.dtype)
    multiply = int8_product(tokens, *weight, bias)
    return multiply and (lambda x, bias: multiply(quantize_tokens(x.contiguous()), bias))


def linear(x: Tensor, weight: Sequence[Tensor], bias: Tensor | None, scheme: str) -> Tensor:
    """`qrt::linear` on CUDA tensors."""
    key = "linear", x.shape, x.dtype, bias is None
    if product := ready(weight, key):
        return product(x, bias)
    y = WEIGHT_SCHEMES[scheme].linear_triton(x, weight, bias, GEMMS)
    if is_new(weight, key):
        weight.keep(key, _product(x, weight, bias, scheme))
    return y


def linear_int8(
    codes: Tensor, token_scale: Tensor, weight: Sequence[Tensor], bias: Tensor | None, scheme: str,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`qrt::linear_int8` on CUDA tensors."""
    key, tokens = ("int8", codes.shape, dtype, bias is None), QuantizedTokens(codes, token_scale, dtype)
    if product := ready(weight, key):
        return product(tokens, bias)
    y = WEIGHT_SCHEMES[scheme].linear_int8_triton(tokens, weight, bias, GEMMS)
    if is_new(weight, key):
        weight.keep(key, int8_product(tokens, *weight, bias))
    return y


def linear_shares(x: Tensor, weight: Sequence[Tensor], scheme: str) -> Tensor:
    """`qrt::linear_shares` on CUDA tensors."""
    codes, scale, _ = quantize_tokens(x.contiguous())
    return linear_int8_shares(codes, scale, weight, scheme)


def linear_int8_shares(codes: Tensor, token_scale: Tensor, weight: Sequence[Tensor], scheme: str) -> Tensor:
    """`qrt::linear_int8_shares` on CUDA tensors."""
    tokens = QuantizedTokens(codes, token_scale, torch.float32)
    return WEIGHT_SCHEMES[scheme].linear_int8_triton(tokens, weight, None, SHARED)


def linear_silu(x: Tensor, weight: Sequence[Tensor], bias: Tensor | None, scheme: str) -> Tensor:
    """`qrt::linear_silu` on CUDA tensors."""
    key, kind = ("silu", x.shape, x.dtype, bias is None), WEIGHT_SCHEMES[scheme]
    if product := ready(weight, key):
        return product(x, bias)
    if not isinstance(kind, TiledScheme):
        return silu_mul(kind.linear_triton(x, weight, bias, GEMMS))
    y = kind.linear_triton(x, weight, bias, GATED)
    if is_new(weight, key):
        weight.keep(key, _tile_product(x, TiledWeight(*weight), bias, kind, True))
    return y


def linear_silu_int8(
    codes: Tensor, token_scale: Tensor, weight: Sequence[Tensor], bias: Tensor | None, scheme: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`qrt::linear_silu_int8` on CUDA tensors."""
    key, tokens = ("silu int8", codes.shape, dtype, bias is None), QuantizedTokens(codes, token_scale, dtype)
    if product := ready(weight, key):
        return quantize_tokens(product(tokens, bias))[:2]
    kind = WEIGHT_SCHEMES[scheme]
    if gated_plan(tokens, kind.out_features(weight)) is None:
        return silu_mul_int8(kind.linear_int8_triton(tokens, weight, bias, GEMMS))
    y = kind.linear_int8_triton(tokens, weight, bias, GATED)
    if is_new(weight, key):
        weight.keep(key, int8_product(tokens, *weight, bias, gated=True))
    return quantize_tokens(y)[:2]
