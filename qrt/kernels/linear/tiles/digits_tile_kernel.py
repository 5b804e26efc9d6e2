"""Tiles of codes and of digits on their way to Hopper's int8 tensor cores, in Gluon.

`fetch` asks for them. `codes_of` makes int8 operands of the bytes of a word. `scaled` turns int32 sums into
the numbers that they stand for. `digits_kernel` multiplies; `ring` is its shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from qrt.kernels.linear.device import scale_of_run


@gluon.jit
def fetch(
    copies, ASYMMETRIC: gl.constexpr, RUNS: gl.constexpr, BM: gl.constexpr, BLOCKS: gl.constexpr,
    HALVES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Ask for `steps` tiles as long as there is room: for weights at once, for digits when they are written.

    Programs begin with different tiles. Otherwise all of them would read the same digits at once.
    """
    ring, x_desc, fact_desc, w_desc, scale_desc, zero_desc, block, first, steps = copies
    weight, empty, turn = (w_desc, scale_desc, zero_desc), ring[6], gl.program_id(0)
    for s in gl.static_range(STAGES):
        tile = first + (turn + s) % steps
        _fetch_weights(ring, weight, s, block, tile, s < steps, ASYMMETRIC, RUNS, BM, BLOCKS, HALVES)
    gdc_wait()
    for s in gl.static_range(STAGES):
        _fetch_digits(ring, x_desc, fact_desc, s, first + (turn + s) % steps, s < steps, RUNS)
    for i in range(STAGES, steps):
        slot, tile = i % STAGES, first + (turn + i) % steps
        mbarrier.wait(empty.index(slot), (i // STAGES - 1) & 1)
        _fetch_weights(ring, weight, slot, block, tile, True, ASYMMETRIC, RUNS, BM, BLOCKS, HALVES)
        _fetch_digits(ring, x_desc, fact_desc, slot, tile, True, RUNS)


@gluon.jit
def _fetch_weights(
    ring, weight, slot, block, tile, wanted, ASYMMETRIC: gl.constexpr, RUNS: gl.constexpr, BM: gl.constexpr,
    BLOCKS: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Start the copy of a tile into a slot. The slot is ready when its digits are there too."""
    w, scales, zeros, x, facts, ready, empty = ring
    arrived, row = ready.index(slot), tile * 64
    size: gl.constexpr = BLOCKS * 64 * (128 + 4 + 4 * ASYMMETRIC) + 2 * BM * (RUNS * 128 + 2 * 4)
    mbarrier.expect(arrived, size, pred=wanted)
    for g in gl.static_range(HALVES):
        at, part = block + g * w.shape[2], slot * HALVES + g
        tma.async_copy_global_to_shared(weight[0], [0, at, row, 0], arrived, w.index(part), pred=wanted)
        tma.async_copy_global_to_shared(weight[1], [0, at, row], arrived, scales.index(part), pred=wanted)
        if ASYMMETRIC:
            tma.async_copy_global_to_shared(weight[2], [0, at, row], arrived, zeros.index(part), pred=wanted)


@gluon.jit
def _fetch_digits(ring, x_desc, fact_desc, slot, tile, wanted, RUNS: gl.constexpr):
    """Start the copy of all groups of a tile's digits, with the scales and sums of two groups."""
    w, scales, zeros, x, facts, ready, empty = ring
    arrived = ready.index(slot)
    tma.async_copy_global_to_shared(x_desc, [tile * RUNS, 0, 0, 0], arrived, x.index(slot), pred=wanted)
    tma.async_copy_global_to_shared(fact_desc, [0, tile * RUNS, 0], arrived, facts.index(slot), pred=wanted)


@triton.jit
def codes_of(packed, RUN: tl.constexpr, RUNS: tl.constexpr):
    """Return the codes of RUN as int8, from the bytes of `packed`.

    If there is one run, they are code - 128. Of two runs, the first has the code in the low half of a byte,
    the second 16 * (code - 8) in the high half.
    """
    WHOLE: tl.constexpr = "xor.b32 $0, $1, 0x80808080;"
    LOW: tl.constexpr = "and.b32 $0, $1, 0x0f0f0f0f;"
    HIGH: tl.constexpr = "lop3.b32 $0, $1, 0xf0f0f0f0, 0x80808080, 0x6a;"
    ASM: tl.constexpr = WHOLE if RUNS == 1 else HIGH if RUN else LOW
    return tl.inline_asm_elementwise(ASM, "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4)


@gluon.jit
def high_and_low(sums):
    """Split sums into columns of high and of low digits; one thread has both of a token."""
    BM: gl.constexpr = sums.shape[1] // 2
    return gl.split(sums.reshape([sums.shape[0], 2, BM]).permute((0, 2, 1)))


@gluon.jit
def scaled(
    sums, scales, zeros, of_x, RUN: gl.constexpr, RUNS: gl.constexpr, SCALE: gl.constexpr,
    ASYMMETRIC: gl.constexpr,
):  # fmt: skip
    """Return what a run of inputs adds to the product, in fp32.

    `sums` are int32, of `codes_of` times digits; `of_x` are x's scales and sums.
    """
    high, low = high_and_low(sums)
    value = (high * 256 + low).to(gl.float32)
    MIDPOINT: gl.constexpr = RUN + 1 < RUNS  # these codes still hold the midpoint
    times: gl.constexpr = 16.0 if RUN else 1.0
    if ASYMMETRIC or MIDPOINT:
        offset = gl.full(scales.shape, -8.0 if MIDPOINT else 0.0, gl.float32, scales.type.layout)
        if ASYMMETRIC:
            offset -= ((zeros << (24 - 8 * RUN)) >> 24).to(gl.float32) * times
        value += gl.expand_dims(offset, 1) * gl.expand_dims(of_x[1], 0)
    scale = scale_of_run((scales,), RUN, SCALE).to(gl.float32) * (1 / times)
    return value * gl.expand_dims(of_x[0], 0) * gl.expand_dims(scale, 1)
