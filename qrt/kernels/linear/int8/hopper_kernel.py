"""Multiply int8 codes by int8 codes on Hopper, where the tensor cores take the time, in Gluon.

Y.T = B [N, K] @ A [M, K].T. The copy engine (TMA) brings both operands to shared memory some stages ahead of
the wgmma that reads them. Sums are exact in int32; scales and bias follow in fp32. Where B stacks a gate over
its up, a block can hold as many rows of both, and only act(gate) * up is written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qrt.kernels.act_mul.kernel import act_times
from qrt.kernels.gpu import is_hopper, multiprocessors
from qrt.kernels.launch import variant
from qrt.kernels.linear.device import aligned, of_tokens, of_weight, store_block, sum_splits
from qrt.kernels.linear.int8.plans import HopperPlan
from qrt.kernels.linear.shared.device import in_panels, split_evenly
from qrt.kernels.linear.weight import Prepared
from qrt.kernels.sizes import cdiv
from qrt.quant.tokens import QuantizedTokens

SWIZZLED = {rank: gl.NVMMASharedLayout(128, 8, rank) for rank in (2, 3)}
INPUTS = 128  # inputs of a stage: one row of swizzled shared memory
MOST_EXCHANGED = gl.constexpr(8 * 32 << 10)  # bits that threads exchange at once
PANEL = 16  # token blocks of a panel


@gluon.jit(do_not_specialize=["M", "share"])
def _hopper_int8(
    a_desc, b_desc, TOKEN_SCALES, SCALES, BIAS, Y, PARTS, ARRIVALS, M, N, steps_of_k, share,
    BIASED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, PANEL: gl.constexpr,
    SPLIT: gl.constexpr, SHARES: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
    PERSISTENT: gl.constexpr, ACT: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Multiply BN outputs by BM tokens over a grid (cdiv(M, BM) * cdiv(N, BN), splits).

    A program has `share` steps of K. If SHARES, Y [splits, M, N] takes the sum of each split. If PERSISTENT,
    fewer programs, without splits, take the blocks in turn; the first steps of the next block, STAGES at
    least, are asked for while the last steps of this one multiply. With two HALVES a block has BN / 2 outputs
    of each half of B, the gate and the up of the same columns: Y [M, N / 2].
    """
    ROWS: gl.constexpr = BN // HALVES
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BM, 32])
    gdc_launch_dependents()
    first = gl.program_id(1) * share
    steps = gl.minimum(share, steps_of_k - first)
    block = gl.program_id(0)
    token, output = _place_of(block, M, N, BM, BN, ROWS, PANEL)

    a_smem = gl.allocate_shared_memory(gl.int8, [STAGES, BM, BK], a_desc.layout)
    b_smem = gl.allocate_shared_memory(gl.int8, [STAGES, HALVES, ROWS, BK], b_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    for s in gl.static_range(STAGES):
        _fetch_weights(a_desc, b_desc, b_smem, ready, s, output, (first + s) * BK, s < steps)
    gdc_wait()
    for s in gl.static_range(STAGES):
        _fetch_tokens(a_desc, a_smem, ready, s, token, (first + s) * BK, s < steps)
    operands = a_desc, b_desc, a_smem, b_smem, ready
    if SHARES:
        Y += gl.program_id(1).to(gl.int64) * M * N
    if PERSISTENT:
        blocks, done = gl.cdiv(M, BM) * gl.cdiv(N, BN), 0
        while block < blocks:
            after = block + gl.num_programs(0)
            next_token, next_output = _place_of(after, M, N, BM, BN, ROWS, PANEL)
            follows = next_token, next_output, after < blocks
            acc = _multiply(operands, token, output, first, steps, done, follows, STAGES, True, MMA)
            _store(acc, TOKEN_SCALES, SCALES, BIAS, Y, output, token, M, N, BIASED, HALVES, ACT, num_warps)
            block, token, output, done = after, next_token, next_output, done + steps
    else:
        acc = _multiply(operands, token, output, first, steps, 0, (token, output, False), STAGES, False, MMA)
        last = True
        if SPLIT and not SHARES:
            acc, last = sum_splits(acc, PARTS, ARRIVALS, block, MMA)
        if last:
            _store(acc, TOKEN_SCALES, SCALES, BIAS, Y, output, token, M, N, BIASED, HALVES, ACT, num_warps)


@gluon.jit
def _place_of(block, M, N, BM: gl.constexpr, BN: gl.constexpr, ROWS: gl.constexpr, PANEL: gl.constexpr):
    """Return the first token and output of a block."""
    token, row = in_panels(block, gl.cdiv(M, BM), gl.cdiv(N, BN), PANEL)
    return token * BM, row * ROWS


@gluon.jit
def _multiply(
    operands, token, output, first, steps, done, follows, STAGES: gl.constexpr, PERSISTENT: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """Return the sums of a block, int32 [BN, BM].

    Its first STAGES steps are asked for already; `done` steps of other blocks came before. If PERSISTENT, it
    asks for as many steps of the block that `follows`, if there is one.
    """
    a_desc, b_desc, a_smem, b_smem, ready = operands
    next_token, next_output, more = follows
    BM: gl.constexpr = a_smem.shape[1]
    BN: gl.constexpr = b_smem.shape[1] * b_smem.shape[2]
    BK: gl.constexpr = a_smem.shape[2]
    acc = gl.zeros([BN, BM], gl.int32, MMA)
    for i in range(steps):
        slot = (done + i) % STAGES
        mbarrier.wait(ready.index(slot), (done + i) // STAGES & 1)
        weights = b_smem.index(slot).reshape([BN, BK])
        acc = warpgroup_mma(weights, a_smem.index(slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])  # the step before this one is done
        ahead, n, m = i - 1 + STAGES, output, token
        slot, wanted = (done + ahead) % STAGES, (i > 0) & (ahead < steps)
        if PERSISTENT:
            here = ahead < steps
            n, m = gl.where(here, output, next_output), gl.where(here, token, next_token)
            ahead, wanted = gl.where(here, ahead, ahead - steps), (i > 0) & (here | more)
        _fetch_weights(a_desc, b_desc, b_smem, ready, slot, n, (first + ahead) * BK, wanted)
        _fetch_tokens(a_desc, a_smem, ready, slot, m, (first + ahead) * BK, wanted)
    acc = warpgroup_mma_wait(0, deps=[acc])
    tl.debug_barrier()  # what follows may reuse memory that products of other warps still read
    if PERSISTENT:
        slot = (done + steps - 1) % STAGES
        _fetch_weights(a_desc, b_desc, b_smem, ready, slot, next_output, (STAGES - 1) * BK, more)
        _fetch_tokens(a_desc, a_smem, ready, slot, next_token, (STAGES - 1) * BK, more)
    return acc


@gluon.jit
def _store(
    acc, TOKEN_SCALES, SCALES, BIAS, Y, output, token, M, N, BIASED: gl.constexpr, HALVES: gl.constexpr,
    ACT: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Scale the sums of a block, int32 [BN, BM], and store them."""
    ROWS: gl.constexpr = acc.shape[0] // HALVES
    m = token + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
    row = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, acc.type.layout))
    column = output + row % ROWS
    n, inside = column + row // ROWS * (N // HALVES), column < N // HALVES
    token_scale = gl.load(TOKEN_SCALES + m, mask=m < M, other=0.0)
    y = acc.to(gl.float32) * gl.expand_dims(token_scale, 0)
    y *= gl.expand_dims(gl.load(SCALES + n, mask=inside, other=0.0), 1)
    if BIASED:
        y += gl.expand_dims(gl.load(BIAS + n, mask=inside, other=0.0).to(gl.float32), 1)
    y = y.to(Y.dtype.element_ty)
    if HALVES == 2:
        gate, up = gl.split(y.reshape([2, ROWS, acc.shape[1]]).permute((1, 2, 0)))
        y = act_times(gate, up, ACT, True)
    _store_pieces(y, Y, output, token, M, N // HALVES, num_warps)


@gluon.jit
def _store_pieces(y, Y, output, token, M, N, num_warps: gl.constexpr):
    """Do as `store_block`, a few tokens at a time: what threads exchange has to fit beside the operands."""
    TOKENS: gl.constexpr = y.shape[1]
    if y.shape[0] * TOKENS * y.dtype.primitive_bitwidth > MOST_EXCHANGED:
        early, late = gl.split(y.reshape([y.shape[0], 2, TOKENS // 2]).permute((0, 2, 1)))
        _store_pieces(early, Y, output, token, M, N, num_warps)
        _store_pieces(late, Y, output, token + TOKENS // 2, M, N, num_warps)
    else:
        store_block(Y, y, output, token, M, N, num_warps)


@gluon.jit
def _fetch_weights(a_desc, b_desc, b_smem, ready, slot, output, k, wanted):
    """Start the copy of one step's weights into a slot. The slot is ready when its tokens are there too."""
    arrived = ready.index(slot)
    mbarrier.expect(arrived, a_desc.block_type.nbytes + b_desc.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(b_desc, [0, output, k], arrived, b_smem.index(slot), pred=wanted)


@gluon.jit
def _fetch_tokens(a_desc, a_smem, ready, slot, token, k, wanted):
    """Start the copy of one step's tokens into a slot."""
    tma.async_copy_global_to_shared(a_desc, [token, k], ready.index(slot), a_smem.index(slot), pred=wanted)


def fits(x: Tensor) -> bool:
    """Return whether this kernel multiplies codes x [T, K]: rows of whole 16 bytes, a GPU with wgmma."""
    return is_hopper(x.device) and x.shape[1] % 16 == 0


def hopper_product(
    x: QuantizedTokens, weight: Sequence[Tensor], bias: Tensor | None, plan: HopperPlan, act: str | None,
    partial_sums: bool = False,
) -> Prepared:  # fmt: skip
    """Return the product of x and bias, for all that are as x and bias.

    [T, N] = x @ codes.T scaled, plus bias; x `fits`, the weight lies as in `Layout.INT8_ROWS`. With `act`, by
    a plan that `gates`, it is act(gate) * up of that, [T, N / 2]. With `partial_sums` it is the sum of each
    split, fp32 [S, T, N]. All that does not depend on addresses is worked out here, once.
    """
    codes, scale, arrivals = weight
    (tokens, k), n, halves = x.codes.shape, codes.shape[0], 2 if act else 1
    outputs = cdiv(tokens, plan.tokens) * cdiv(n, plan.outputs)
    steps = cdiv(k, INPUTS)
    share, splits = split_evenly(steps, plan.splits, outputs, arrivals.shape[0])
    room = outputs * splits * plan.tokens * plan.outputs if splits > 1 and not partial_sums else 0
    persistent = plan.persistent > 0 and splits == 1 and steps >= plan.stages
    programs = min(plan.persistent * multiprocessors(codes.device), outputs) if persistent else outputs
    kernel = variant(
        _hopper_int8, BIASED=bias is not None, BM=plan.tokens, BN=plan.outputs, BK=INPUTS, PANEL=PANEL,
        SPLIT=splits > 1, SHARES=partial_sums, STAGES=plan.stages, HALVES=halves, PERSISTENT=persistent,
        ACT=act, num_warps=min(8, plan.outputs // (16 * halves)), launch_pdl=True,
    )  # fmt: skip
    rows = halves, plan.outputs // halves, INPUTS
    of_codes = of_weight(codes, (halves, n // halves, k), torch.int8, rows, SWIZZLED[3])
    size = (splits, tokens, n) if partial_sums else (tokens, n // halves)

    def multiply(x: QuantizedTokens, bias: Tensor | None) -> Tensor:
        y = torch.empty(size, dtype=torch.float32 if partial_sums else x.dtype, device=codes.device)
        of_x = of_tokens(aligned(x.codes.contiguous()), (plan.tokens, INPUTS), SWIZZLED[2])
        parts = torch.empty(room, dtype=torch.int32, device=codes.device) if room else None
        kernel.launch(
            (programs, splits), of_x, of_codes, x.scale, scale, bias, y, parts, arrivals, tokens, n, steps,
            share,
        )  # fmt: skip
        return y

    return multiply
