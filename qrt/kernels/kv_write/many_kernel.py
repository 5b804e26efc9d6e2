"""`kv_write` of many tokens in a rotated format, in Gluon. Threads exchange values only by shuffles.

A thread holds 16 channels of each half of a vector: 8 that lie together (16 bytes of a 16-bit dtype), and the
8 that lie D/4 further, which are the other plane of an int4 word. D / 32 neighbouring threads hold a vector.
Tiles are [threads, channels], so an operation along a row stays within a thread.

A program takes a few tokens and some of their heads, as many at a time as its threads can hold, and loads the
tokens' angles once. All arithmetic, the order of sums included, is that of `kernel` and of the formats'
`encode`, so the bytes are the same.
"""

import math
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qrt.kernels.device import (
    after_previous,
    counted,
    cross,
    from_count,
    rope,
    signs,
    squares,
    sums_and_differences,
    token_stride,
    unit_of_sum,
    weighted,
)
from qrt.kernels.gpu import multiprocessors, overlaps
from qrt.kernels.launch import variant
from qrt.kernels.sizes import cdiv
from qrt.quant.kv import KVFormat
from qrt.quant.kv.device import ASM
from qrt.quant.kv.many.device import exchanged, has_bit, largest
from qrt.quant.kv.planes import PlaneFormat

HEAD_DIMS = (64, 128)  # the factor of their half vectors is a power of two, so it is exact at any step
WARPS = 4
REGISTERS = 128  # per thread: 16 warps fit on an SM
WARPS_PER_SM = 16  # if the tokens alone fill these, a program takes all heads of its tokens
OVERLAPPED_PER_SM = 1  # programs, as in `kernel`
RUN = gl.constexpr(8)  # channels that lie together
CHANNELS = gl.constexpr(2 * RUN)  # per thread


@gluon.constexpr_function
def rows(columns: int, warps: int) -> gl.BlockedLayout:
    """Return the layout that gives each thread a row of `columns` columns."""
    return gl.BlockedLayout([1, columns], [32, 1], [warps, 1], [1, 0])


@gluon.jit
def _hadamard(x, LANES: gl.constexpr, ROWS: gl.constexpr):
    """Do `device.hadamard` on half vectors x [threads, 16], with the same rounds in the same order."""
    for i in gl.static_range(3):
        x = sums_and_differences(x, 1 << i)
    x = gl.convert_layout(x, ROWS, assert_trivial=True)
    for i in gl.static_range(2):
        if 1 << i < LANES:
            sign = gl.where(has_bit(1 << i, x.shape[0], ROWS), -1.0, 1.0)
            x = gl.fma(x, sign, exchanged(x, 1 << i))
    return gl.convert_layout(sums_and_differences(x, RUN), ROWS, assert_trivial=True)


@gluon.jit
def _normed(
    lo, hi, norm, eps, dims, D: gl.constexpr, DTYPE: gl.constexpr, LANES: gl.constexpr
):  # fmt: skip
    """Do `device.normed` on half vectors [threads, 16], with the weight at `norm`."""
    square = squares(lo, hi)
    most = largest(square, LANES)
    unit, inverse = unit_of_sum(most, D // 2)
    count = gl.sum(counted(square, gl.expand_dims(inverse, 1)), 1)
    for i in gl.static_range(2):
        if 1 << i < LANES:
            count += exchanged(count, 1 << i)
    total = from_count(count, unit, most)
    return weighted(lo, hi, total, _pair(norm + dims, D), eps, D, DTYPE)


@gluon.jit
def _times(x, y):
    """Return x * y, never fused with an addition that follows."""
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _store(
    lo, hi, words, scales, head, which, ENCODE: gl.constexpr, BITS: gl.constexpr, lane, live,
    D: gl.constexpr, LANES: gl.constexpr, ROWS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Encode K (which 0) or V (which 1) into the heads [threads] of the cache."""
    codes, scale_lo, scale_hi = ENCODE(lo, hi, LANES, ROWS)
    WORDS: gl.constexpr = rows(codes.shape[1], num_warps)
    OF_ROW: gl.constexpr = gl.SliceLayout(1, WORDS)
    codes = gl.convert_layout(codes.to(gl.int16), WORDS, assert_trivial=True)
    first = gl.convert_layout(words + (head * (D * BITS // 16) + lane * RUN), OF_ROW, assert_trivial=True)
    some = gl.convert_layout(live, OF_ROW, assert_trivial=True)
    i = gl.arange(0, codes.shape[1], layout=gl.SliceLayout(0, WORDS))
    at = gl.expand_dims(first, 1) + gl.expand_dims(i % RUN + i // RUN * (D // 4), 0)
    gl.store(at, codes, mask=gl.expand_dims(some, 1))
    gl.store(scales + head * 4 + 2 * which, scale_lo, mask=live & (lane == 0))
    gl.store(scales + head * 4 + 2 * which + 1, scale_hi, mask=live & (lane == 0))


@gluon.jit
def _vectors(
    step, q, k, v, stride_q, stride_k, stride_v, token, own, dims,
    HQ: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Return pointers [threads, 16] to the lower halves of a step's vectors."""
    is_q, is_v = step < HQ // G, step >= (HQ + HKV) // G
    x = gl.where(is_q, q, gl.where(is_v, v, k))
    stride = gl.where(is_q, stride_q, gl.where(is_v, stride_v, stride_k))
    head = step * G - gl.where(is_q, 0, gl.where(is_v, HQ + HKV, HQ)) + own
    return gl.expand_dims(x + (token.to(gl.int64) * stride + head * D), 1) + dims


@gluon.jit
def _pair(at, D: gl.constexpr):
    """Load the values at the pointers, and those half a vector further."""
    return gl.load(at), gl.load(at + D // 2)


@gluon.jit(do_not_specialize=["tokens"])
def _kv_write_many(
    q, k, v, cos, sin, positions, slots, buffers, smoothing, signs, norms, tokens,
    stride_q, stride_k, stride_v,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, K_BITS: gl.constexpr, V_BITS: gl.constexpr,
    ENCODE_K: gl.constexpr, ENCODE_V: gl.constexpr, SAME: gl.constexpr, G: gl.constexpr, STEPS: gl.constexpr,
    launch_pdl: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Grid (tiles of tokens, tiles of STEPS steps); a step is G heads of q, of k or of v."""
    ROWS: gl.constexpr = rows(CHANNELS, num_warps)
    LANES: gl.constexpr = D // (2 * CHANNELS)
    TOKENS: gl.constexpr = 32 * num_warps // (LANES * G)
    thread = gl.arange(0, 32 * num_warps, layout=gl.SliceLayout(1, ROWS))
    lane, own = thread % LANES, thread // LANES % G
    token = gl.program_id(0) * TOKENS + thread // (LANES * G)
    live = token < tokens
    token = gl.minimum(token, tokens - 1)  # so that every load has a valid address
    some = gl.expand_dims(live, 1)
    i = gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, ROWS))
    dims = gl.expand_dims(lane * RUN, 1) + gl.expand_dims(i % RUN + i // RUN * (D // 4), 0)
    begin = gl.program_id(1) * STEPS
    end = gl.minimum(begin + STEPS, (HQ + 2 * HKV) // G)

    after_previous(launch_pdl)
    where = (q, k, v, stride_q, stride_k, stride_v, token, own, dims, HQ, HKV, G)
    position, slot = gl.load(positions + token), gl.load(slots + token).to(gl.int64)
    sign = gl.load(signs + dims)
    angles = gl.expand_dims(position * (D // 2), 1) + dims
    c, s = gl.load(cos + angles) * sign, gl.load(sin + angles) * sign
    for step in range(begin, end):
        is_q, is_v = step < HQ // G, step >= (HQ + HKV) // G
        at = _vectors(step, *where, D)
        lo, hi = _pair(at, D)
        lo, hi = lo.to(gl.float32), hi.to(gl.float32)
        if is_v:
            sign = gl.load(signs + dims)  # loaded again, since keeping it would take registers
            lo, hi = lo * sign, hi * sign
        else:
            if norms is not None:
                norm = gl.where(is_q, norms[0], norms[1])
                lo, hi = _normed(lo, hi, norm, norms[2], dims, D, q.dtype.element_ty, LANES)
            lo, hi = rope(lo, hi, c, s)
            if smoothing is not None:  # rows: gains of q, gains of k, shifts of k
                head = gl.where(is_q, (step * G + own) // (HQ // HKV), HKV - HQ + step * G + own)
                gains = gl.expand_dims(smoothing + head * D, 1) + dims
                g_lo, g_hi = _pair(gains, D)
                if is_q:
                    lo, hi = _times(lo, g_lo), _times(hi, g_hi)
                else:
                    sign = gl.load(signs + dims)
                    s_lo, s_hi = _pair(gains + HKV * D, D)
                    lo, hi = gl.fma(lo, g_lo, -(s_lo * sign)), gl.fma(hi, g_hi, -(s_hi * sign))
        lo, hi = cross(lo, hi, D)
        lo, hi = _hadamard(lo, LANES, ROWS), _hadamard(hi, LANES, ROWS)
        gl.store(at, lo.to(q.dtype.element_ty), mask=some)
        gl.store(at + D // 2, hi.to(q.dtype.element_ty), mask=some)
        if step >= HQ // G:
            head = slot * HKV + (step * G - HQ + own - gl.where(is_v, HKV, 0))
            if SAME:
                words, which = gl.where(is_v, buffers[1], buffers[0]), is_v.to(gl.int32)
                _store(
                    lo, hi, words, buffers[2], head, which, ENCODE_K, K_BITS,
                    lane, live, D, LANES, ROWS, num_warps,
                )  # fmt: skip
            elif is_v:
                _store(
                    lo, hi, buffers[1], buffers[2], head, 1, ENCODE_V, V_BITS,
                    lane, live, D, LANES, ROWS, num_warps,
                )  # fmt: skip
            else:
                _store(
                    lo, hi, buffers[0], buffers[2], head, 0, ENCODE_K, K_BITS,
                    lane, live, D, LANES, ROWS, num_warps,
                )  # fmt: skip


@lru_cache(maxsize=64)
def _scaled_signs(head_dim: int, device: torch.device) -> Tensor:
    """Return the factors of a half vector before `hadamard`: fp32 [D/2], powers of two with a sign."""
    matrix, factor = signs(head_dim, device)
    return matrix[:, 0].float() * factor


@cache
def _encoder(name: str) -> Any:
    """Return the Gluon function of a `Grid.many`."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def fits(fmt: KVFormat, head_dim: int) -> bool:
    """Return whether `kv_write_many` takes the format: K and V must be planes that bring their encoders."""
    takes = isinstance(fmt, PlaneFormat) and bool(fmt.k.many and fmt.v.many)
    return bool(ASM) and takes and head_dim in HEAD_DIMS


def kv_write_many(a: Any, fmt: Any, norms: tuple[Tensor, Tensor, float] | None) -> None:
    """Run `kv_write` with its arguments; the format must be one that `fits`."""
    (T, Hq, D), Hkv = a.q.shape, a.k.shape[1]
    vectors = 1024 // D  # per warp
    heads = math.gcd(Hq, Hkv, vectors)
    tiles, steps = cdiv(T * heads, WARPS * vectors), (Hq + 2 * Hkv) // heads
    sms = multiprocessors(a.q.device)
    each = steps if tiles * WARPS >= sms * WARPS_PER_SM else 1
    grid = (tiles, cdiv(steps, each))
    kernel = variant(
        _kv_write_many, HQ=Hq, HKV=Hkv, D=D, K_BITS=fmt.k.bits, V_BITS=fmt.v.bits,
        ENCODE_K=_encoder(fmt.k.many), ENCODE_V=_encoder(fmt.v.many), SAME=fmt.k == fmt.v,
        G=heads, STEPS=each,
        num_warps=WARPS, maxnreg=REGISTERS,
        launch_pdl=overlaps(a.q.device) and math.prod(grid) <= OVERLAPPED_PER_SM * sms,
    )  # fmt: skip
    kernel.launch(
        grid, a.q, a.k, a.v, a.cos, a.sin, a.positions, a.slots, tuple(a.kv), a.smoothing,
        _scaled_signs(D, a.q.device), norms, T,
        token_stride(a.q, "q"), token_stride(a.k, "k"), token_stride(a.v, "v"),
    )  # fmt: skip
