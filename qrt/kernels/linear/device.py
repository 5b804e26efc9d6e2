"""What the Gluon kernels share: signals of stages, stores, sums of splits, and TMA descriptors.

A descriptor says what the bulk copy engine brings of a weight or of activations, and how it lies in shared
memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from qrt.kernels.descriptor import MOST_KEPT, Descriptor, box, descriptor_at, descriptor_of
from qrt.kernels.linear.shared.device import rows_of
from qrt.quant.weight.tiles import TiledWeight

SWIZZLED = {  # by bytes of an input, and words of a tile's row
    (size, words): gl.NVMMASharedLayout(words * size, 8 * size, 3) for size in (1, 2) for words in (32, 64)
}
FLAT = gl.NVMMASharedLayout(0, 32, 3)
DTYPES = {torch.int8: gl.int8, torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@gluon.jit
def signals(STAGES: gl.constexpr, READERS: gl.constexpr = 1):
    """Make the signals of stages: that one has come, and that all READERS are done with it."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(empty.index(s), count=READERS)
    return ready, empty


@gluon.jit
def both_are_here():
    """Wait until two groups of 4 warps are here."""
    gl.inline_asm_elementwise(
        "bar.sync 15, 256; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def blocks_in_use(EXPERTS, count, num_warps: gl.constexpr):
    """Return how many of the `count` blocks of tokens have an expert; they come first."""
    SIZE: gl.constexpr = 1024
    place = gl.arange(0, SIZE, layout=gl.BlockedLayout([4], [32], [num_warps], [0]))
    used = gl.zeros_like(place)
    for first in range(0, count, SIZE):
        at = first + place
        used += (gl.load(EXPERTS + at, mask=at < count, other=-1) >= 0).to(gl.int32)
    total = gl.sum(used, 0)
    tl.debug_barrier()  # Triton 3.6 reuses the sum's shared memory at once for what other warps are handed
    return total


@gluon.jit
def scale_of_run(scales, RUN: gl.constexpr, SCALE: gl.constexpr):
    """Return the scale of run RUN, SCALE [ROWS], from a tuple of words, int32 [ROWS]."""
    if SCALE == gl.float32:
        return scales[RUN].to(gl.float32, bitcast=True)
    else:
        return ((scales[RUN // 2] >> (RUN % 2 * 16)) & 0xFFFF).to(gl.int16).to(SCALE, bitcast=True)


@gluon.jit
def store_block(
    Y, block, first, token, M, N, num_warps: gl.constexpr, ORDER=None, count=None,
    SHARES: gl.constexpr = 1,
):  # fmt: skip
    """Store block.T in Y [M, N], from output `first` and token `token` on, in pieces of 8 outputs.

    With ORDER [M] token m is one of `count` assignments, or none, and goes to its row by `rows_of`. In fp32
    it is stored as it lies, by 8 outputs of 4 tokens, which fill their sectors too; shared memory for 4 bytes
    would be large.
    """
    LANES: gl.constexpr = min(8, block.shape[0] // 8)
    if ORDER is not None and block.dtype == gl.float32:
        OUT: gl.constexpr = block.type.layout
    else:
        OUT: gl.constexpr = gl.BlockedLayout([8, 1], [LANES, 32 // LANES], [1, num_warps], [0, 1])
    n = first + gl.arange(0, block.shape[0], layout=gl.SliceLayout(1, OUT))
    m = token + gl.arange(0, block.shape[1], layout=gl.SliceLayout(0, OUT))
    if ORDER is not None:
        assignment = gl.load(ORDER + m, mask=m < M, other=count)
        _, row = rows_of(assignment, m, count, 0, SHARES)
        m, M = gl.where(assignment < count, row, count), count
    at = gl.expand_dims(m.to(gl.int64) * N, 0) + gl.expand_dims(n, 1)
    inside = gl.expand_dims(n < N, 1) & gl.expand_dims(m < M, 0)
    gl.store(Y + at, gl.convert_layout(block, OUT), mask=inside)


@gluon.jit
def weights_of_places(ORDER, WEIGHTS, first, count, BM: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the weights fp32 [BM] of the assignments of places; 0 for padding."""
    assignment = gl.load(ORDER + first + gl.arange(0, BM, layout=LAYOUT))
    return gl.load(WEIGHTS + assignment, mask=assignment < count, other=0.0)


@gluon.jit
def sum_splits(acc, PARTS, ARRIVALS, output, MMA: gl.constexpr):
    """Do as `sum_splits` of shared/device.py, for whole blocks; acc is number `output`.

    PARTS is [output blocks, splits, size of acc], in an order that keeps the values of a thread together.
    """
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    SIZE: gl.constexpr = ROWS * COLUMNS
    splits, split = gl.num_programs(1), gl.program_id(1)
    flat = acc.reshape([ROWS // 16, 2, 8, COLUMNS // 8, 4, 2]).permute((0, 3, 2, 4, 1, 5)).reshape([SIZE])
    at = gl.arange(0, SIZE, layout=flat.type.layout)
    parts = PARTS + output.to(gl.int64) * splits * SIZE
    gl.store(parts + split * SIZE + at, flat)
    tl.debug_barrier()  # every share is stored before this program counts as arrived
    arrivals = ARRIVALS + output
    last = gl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == splits - 1
    if last:
        if splits == 2:  # either order gives the same sum
            flat += gl.load(parts + (1 - split) * SIZE + at, cache_modifier=".cg")
        else:
            flat = gl.load(parts + at, cache_modifier=".cg")
            for s in range(1, splits):
                flat += gl.load(parts + s * SIZE + at, cache_modifier=".cg")
        gl.store(arrivals, 0)
    blocks = flat.reshape([ROWS // 16, COLUMNS // 8, 8, 4, 2, 2]).permute((0, 4, 2, 1, 3, 5))
    return gl.convert_layout(blocks.reshape([ROWS, COLUMNS]), MMA), last


def of_weight(
    weight: Tensor, shape: tuple[int, ...], dtype: torch.dtype, block: tuple[int, ...],
    layout: gl.NVMMASharedLayout,
) -> Descriptor:  # fmt: skip
    """Return the TMA descriptor of blocks `block` of a contiguous weight seen as `shape` of `dtype`."""
    return _dense(weight.get_device(), weight.data_ptr(), shape, dtype, block, layout)


@lru_cache(maxsize=MOST_KEPT)
def _dense(
    device: int, address: int, shape: tuple[int, ...], dtype: torch.dtype, block: tuple[int, ...],
    layout: gl.NVMMASharedLayout,
) -> Descriptor:  # fmt: skip
    strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    return Descriptor(box(dtype, block, layout), device, address, shape, strides)


def of_tiles(
    weight: TiledWeight, blocks: int, halves: int = 1, dtype: torch.dtype = torch.int16
) -> tuple[Descriptor, Descriptor, Descriptor]:
    """Return the TMA descriptors of a tile's words, as `dtype`, of its scales and of its zeros.

    The tile has as many rows as `blocks` row blocks; with two halves, half of them from each. Of a stack of
    weights, [E, Nb, ..], the first coordinate counts halves of all: half h of weight e is e * halves + h.
    """
    packed, scale, zero = weight.packed, weight.scale, weight.zero
    places = packed.data_ptr(), scale.data_ptr(), zero.data_ptr() if zero.numel() else 0
    return _tiles(packed.get_device(), places, packed.shape, scale.nbytes, blocks, halves, dtype)


@lru_cache(maxsize=MOST_KEPT)
def _tiles(
    device: int, places: tuple[int, int, int], packed: Sequence[int], scale_bytes: int, blocks: int,
    halves: int, dtype: torch.dtype,
) -> tuple[Descriptor, Descriptor, Descriptor]:  # fmt: skip
    *stack, count, tiles, rows, words = packed
    stacked, each = math.prod(stack), blocks * rows // halves
    shape = stacked * halves, count // halves, tiles * rows
    block = halves, -(-each // rows), min(each, rows)
    row = 2 * words // dtype.itemsize
    layout = gl.NVMMASharedLayout(2 * words, 8 * dtype.itemsize, 4)
    runs = (*shape[:2], scale_bytes // (stacked * count) // 4)
    scale = _dense(device, places[1], runs, torch.int32, block, FLAT)
    zero = _dense(device, places[2], shape, torch.int32, block, FLAT) if places[2] else scale
    return _dense(device, places[0], (*shape, row), dtype, (*block, row), layout), scale, zero


def of_planes(x: Tensor, planes: int, tokens: int, words: int) -> Descriptor:
    """Return the TMA descriptor of contiguous x [T, K]: planes of `words` inputs, by tokens."""
    x, (count, inputs) = aligned(x), x.shape
    boxes = box(x.dtype, (planes, tokens, words), SWIZZLED[x.itemsize, words])
    shape = (inputs // words, count, words)
    return descriptor_at(boxes, x.get_device(), x.data_ptr(), shape, (words, inputs, 1))


def of_tokens(x: Tensor, block: tuple[int, ...], layout: gl.NVMMASharedLayout) -> Descriptor:
    """Return the TMA descriptor of activations."""
    return descriptor_of(x, box(x.dtype, block, layout))


def aligned(x: Tensor) -> Tensor:
    """Return x, or a copy of it if the copy engine cannot read where it begins."""
    return x if x.data_ptr() % 16 == 0 else x.clone()
