"""Multiply an unquantized weight of many rows by a few tokens on Hopper, in Gluon.

Y.T = W [N, K] @ X [M, K].T. Reading W takes the time, so W must never stop coming. Every multiprocessor has
one program, whose blocks of W are one stream. A warp asks for them (TMA) as far ahead as shared memory has
room, from before the previous kernel is done until the last block; the other warps multiply and store.
"""

from __future__ import annotations

import torch
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

from qrt.kernels.gpu import is_hopper, multiprocessors, shared_bytes
from qrt.kernels.launch import variant
from qrt.kernels.linear.device import DTYPES, aligned, of_tokens, of_weight, signals, store_block

MOST_TOKENS = 64
LEAST_BLOCKS = 2  # fewest blocks of a program; with fewer, cuBLAS is faster,
OUTPUTS = 128  # outputs of a block
FEW_OUTPUTS = 64  # unless all blocks of so many outputs run at once,
FEW_INPUTS = 4096  # and each has at most so many inputs
INPUTS = 64  # inputs of a stage: a row of swizzled shared memory
SWIZZLED = gl.NVMMASharedLayout(INPUTS * 2, 16, 2)
OTHER_BYTES = 20 << 10  # shared memory for outputs on their way, and for signals


@gluon.jit(do_not_specialize=["M"])
def _hopper_16bit(
    x_desc, w_desc, BIAS, Y, M, N, blocks, steps,
    DOT: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Multiply `blocks` of BN outputs in `steps` stages of K; programs take blocks in turn."""
    gdc_launch_dependents()
    first, apart = gl.program_id(0), gl.num_programs(0)
    count = (blocks - first + apart - 1) // apart
    x = gl.allocate_shared_memory(DOT, [STAGES, BM, BK], x_desc.layout)
    w = gl.allocate_shared_memory(DOT, [STAGES, BN, BK], w_desc.layout)
    ready, empty = signals(STAGES)
    fence_async_shared()
    ring = (x, w, ready, empty)
    gl.warp_specialize(
        [
            (_multiply, (ring, BIAS, Y, first, apart, count, steps, M, N, BM, BN, STAGES, num_warps)),
            (_fetch, (ring, x_desc, w_desc, first, apart, count, steps, BN, BK, STAGES)),
        ],
        [1], [24],
    )  # fmt: skip


@gluon.jit
def _fetch(
    ring, x_desc, w_desc, first, apart, count, steps, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Ask for the stages of all blocks while there is room: for W at once, for x when it is written."""
    x, w, ready, empty = ring
    for s in gl.static_range(STAGES):
        _fetch_weights(
            ring, x_desc, w_desc, s, (first + s // steps * apart) * BN, s % steps * BK, s < count * steps
        )
    gdc_wait()
    for s in gl.static_range(STAGES):
        wanted = s < count * steps
        tma.async_copy_global_to_shared(x_desc, [0, s % steps * BK], ready.index(s), x.index(s), pred=wanted)
    for i in range(STAGES, count * steps):
        slot, k = i % STAGES, i % steps * BK
        mbarrier.wait(empty.index(slot), (i // STAGES - 1) & 1)
        _fetch_weights(ring, x_desc, w_desc, slot, (first + i // steps * apart) * BN, k, True)
        tma.async_copy_global_to_shared(x_desc, [0, k], ready.index(slot), x.index(slot))


@gluon.jit
def _fetch_weights(ring, x_desc, w_desc, slot, row, k, wanted):
    """Start the copy of a stage's weights into a slot. The slot is ready when its x is there too."""
    x, w, ready, empty = ring
    arrived = ready.index(slot)
    mbarrier.expect(arrived, x_desc.block_type.nbytes + w_desc.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(w_desc, [row, k], arrived, w.index(slot), pred=wanted)


@gluon.jit
def _multiply(
    ring, BIAS, Y, first, apart, count, steps, M, N, BM: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Multiply the stages as they come; write a block after its last one."""
    x, w, ready, empty = ring
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BM, 16])
    gdc_wait()  # sleeps; waiting for the first stage would poll while the previous kernel works
    for b in range(count):
        acc = gl.zeros([BN, BM], gl.float32, MMA)
        for k in range(steps):
            i = b * steps + k
            slot = i % STAGES
            mbarrier.wait(ready.index(slot), i // STAGES & 1)
            acc = warpgroup_mma(w.index(slot), x.index(slot).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])  # the previous stage is done
            mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1, pred=k > 0)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((b * steps + steps - 1) % STAGES), count=1)
        row = (first + b * apart) * BN
        if BIAS is not None:
            n = row + gl.arange(0, BN, layout=gl.SliceLayout(1, MMA))
            acc += gl.expand_dims(gl.load(BIAS + n, mask=n < N, other=0.0).to(gl.float32), 1)
        store_block(Y, acc.to(Y.dtype.element_ty), row, 0, M, N, num_warps)


def outputs_of(n: int, k: int, sms: int) -> int | None:
    """Return the outputs of a block of a weight [N, K], or None where cuBLAS is faster."""
    if n >= LEAST_BLOCKS * sms * OUTPUTS:
        return OUTPUTS
    return FEW_OUTPUTS if n <= sms * FEW_OUTPUTS and k <= FEW_INPUTS else None


def fits(x: Tensor, weight: Tensor) -> bool:
    """Return whether `hopper_16bit_gemm` multiplies x [T, K] by weight [N, K] and is the fastest way."""
    return (
        1 <= x.shape[0] <= MOST_TOKENS
        and x.dtype in DTYPES
        and is_hopper(x.device)
        and x.shape[1] % 8 == 0
        and outputs_of(weight.shape[0], x.shape[1], multiprocessors(x.device)) is not None
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
    )


def hopper_16bit_gemm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [T, K] @ weight.T + bias, [T, N]; x and weight `fit`."""
    (tokens, k), n = x.shape, weight.shape[0]
    outputs = outputs_of(n, k, multiprocessors(x.device)) or OUTPUTS
    y = torch.empty(tokens, n, dtype=x.dtype, device=x.device)
    room = next(size for size in (8, 16, 32, 64) if size >= tokens)
    blocks = -(-n // outputs)
    stages = (shared_bytes(x.device) - OTHER_BYTES) // ((outputs + room) * INPUTS * x.itemsize)
    kernel = variant(
        _hopper_16bit, DOT=DTYPES[x.dtype], BM=room, BN=outputs, BK=INPUTS, STAGES=stages, num_warps=4,
        launch_pdl=True,
    )  # fmt: skip
    kernel.launch(
        (min(multiprocessors(x.device), blocks),),
        of_tokens(aligned(x.contiguous()), (room, INPUTS), SWIZZLED),
        of_weight(weight, (n, k), x.dtype, (outputs, INPUTS), SWIZZLED), bias, y, tokens, n, blocks,
        -(-k // INPUTS),
    )  # fmt: skip
    return y
