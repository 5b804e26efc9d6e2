"""What the Gluon kernels share: signals of stages, stores, sums of splits, and the TMA descriptors of weights
and activations, which say what the bulk copy engine brings and how it lies in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from qrt.quant.weight.tiles import TiledWeight

SWIZZLED = {words: gl.NVMMASharedLayout(words * 2, 16, 3) for words in (32, 64)}  # by words of a tile's row
FLAT = gl.NVMMASharedLayout(0, 32, 3)
_kept = WeakTensorKeyDictionary()  # weight -> block -> descriptor: making one costs the host 20 us
DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@gluon.jit
def signals(STAGES: gl.constexpr, READERS: gl.constexpr = 1):
    """What says of each stage that it is there, and that all READERS let it be overwritten."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(empty.index(s), count=READERS)
    return ready, empty


@gluon.jit
def both_are_here():
    """A barrier of two groups of 4 warps."""
    gl.inline_asm_elementwise(
        "bar.sync 15, 256; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def scale_of_run(scales, RUN: gl.constexpr, SCALE: gl.constexpr):
    """The scale, SCALE [ROWS], of run RUN from words: a tuple of int32 [ROWS]."""
    if SCALE == gl.float32:
        return scales[RUN].to(gl.float32, bitcast=True)
    else:
        return ((scales[RUN // 2] >> (RUN % 2 * 16)) & 0xFFFF).to(gl.int16).to(SCALE, bitcast=True)


@gluon.jit
def store_block(Y, block, first, token, M, N, num_warps: gl.constexpr):
    """Y [M, N] = block.T at outputs `first`.. and tokens `token`.., in pieces of 8 outputs."""
    LANES: gl.constexpr = min(8, block.shape[0] // 8)
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [LANES, 32 // LANES], [1, num_warps], [0, 1])
    n = first + gl.arange(0, block.shape[0], layout=gl.SliceLayout(1, OUT))
    m = token + gl.arange(0, block.shape[1], layout=gl.SliceLayout(0, OUT))
    at = gl.expand_dims(m.to(gl.int64) * N, 0) + gl.expand_dims(n, 1)
    inside = gl.expand_dims(n < N, 1) & gl.expand_dims(m < M, 0)
    gl.store(Y + at, gl.convert_layout(block, OUT), mask=inside)


@gluon.jit
def sum_splits(acc, PARTS, ARRIVALS, output, MMA: gl.constexpr):
    """As in `split_kernel`, for whole blocks, of which acc is number `output`: PARTS [output blocks, splits,
    acc's size], in an order in which what a thread has of a product lies together."""
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
        if splits == 2:  # in either order the same
            flat += gl.load(parts + (1 - split) * SIZE + at, cache_modifier=".cg")
        else:
            flat = gl.load(parts + at, cache_modifier=".cg")
            for s in range(1, splits):
                flat += gl.load(parts + s * SIZE + at, cache_modifier=".cg")
        gl.store(arrivals, 0)
    blocks = flat.reshape([ROWS // 16, COLUMNS // 8, 8, 4, 2, 2]).permute((0, 4, 2, 1, 3, 5))
    return gl.convert_layout(blocks.reshape([ROWS, COLUMNS]), MMA), last


class _Place(NamedTuple):
    """As much of a tensor as Triton asks a descriptor's for, without keeping its memory."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def of_weight(
    weight: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    block: Sequence[int],
    layout: gl.NVMMASharedLayout,
) -> Any:
    """TMA descriptor: blocks `block` of a contiguous weight seen as `shape` of `dtype`. Kept like it."""
    known = _kept.setdefault(weight, {})
    if (found := known.get(tuple(block))) is None:
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        place = _Place(weight.data_ptr(), dtype)
        found = known[tuple(block)] = TensorDescriptor(place, list(shape), strides, list(block), layout)
    return found


def of_tiles(
    weight: TiledWeight, blocks: int, halves: int = 1, dtype: torch.dtype = torch.int16
) -> tuple[Any, Any, Any]:
    """TMA descriptors of a tile of as many rows as so many row blocks have, as many of each of two halves if
    there are two: its words as `dtype`, its scales and its zeros."""
    count, tiles, rows, words = weight.packed.shape
    each = blocks * rows // halves
    shape, block = (halves, count // halves, tiles * rows), (halves, -(-each // rows), min(each, rows))
    row = 2 * words // dtype.itemsize
    layout = gl.NVMMASharedLayout(2 * words, 8 * dtype.itemsize, 4)
    packed = of_weight(weight.packed, (*shape, row), dtype, (*block, row), layout)
    runs = (*shape[:2], weight.scale.nbytes // count // 4)
    scale = of_weight(weight.scale, runs, torch.int32, block, FLAT)
    zero = of_weight(weight.zero, shape, torch.int32, block, FLAT) if weight.zero.numel() else scale
    return packed, scale, zero


def of_planes(x: Tensor, planes: int, tokens: int, words: int) -> Any:
    """TMA descriptor of x [T, K] by planes of `words` inputs: so many of them of so many tokens."""
    by_plane = aligned(x).unflatten(1, (-1, words)).transpose(0, 1)
    return of_tokens(by_plane, (planes, tokens, words), SWIZZLED[words])


def of_tokens(x: Tensor, block: Sequence[int], layout: gl.NVMMASharedLayout) -> Any:
    """TMA descriptor of activations."""
    return TensorDescriptor.from_tensor(x, list(block), layout)


def aligned(x: Tensor) -> Tensor:
    """x, or a copy of it if it does not begin where the copy engine can read."""
    return x if x.data_ptr() % 16 == 0 else x.clone()
