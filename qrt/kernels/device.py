"""Device code that the attention kernels share: tiles of half heads, the rotation, online softmax."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qrt.kernels.sizes import next_power_of_2
from qrt.quant import rotation
from qrt.quant.kv.device import ASM, with_tokens

CROSSED_BELOW = tl.constexpr(rotation.CROSSED_BELOW)
MIN_COLUMNS = 16  # a tensor-core dot needs at least 16 in every dimension


def half_width(head_dim: int, parts: int) -> int:
    """Return H, the columns of a half-head tile: `parts` of D/2/parts, each padded to a power of two."""
    return parts * max(MIN_COLUMNS, next_power_of_2(head_dim // 2 // parts))


def token_stride(x: Tensor, name: str) -> int:
    """Return the elements between tokens of x [T, heads, D].

    Raise ValueError unless the heads of a token are contiguous.
    """
    if x.stride(2) != 1 or x.stride(1) != x.shape[2]:
        raise ValueError(f"{name}: expected contiguous heads (strides .., {x.shape[2]}, 1), got {x.stride()}")
    return x.stride(0)


@lru_cache(maxsize=64)
def signs(head_dim: int, device: torch.device) -> tuple[Tensor, float]:
    """Return `rotation.matrix` as signs, fp16 [D/2, D/2] on `device`, and their common factor.

    The signs are -1, 0 and 1. The factor includes that of `cross`.
    """
    matrix = rotation.matrix(head_dim)
    factor = 2**-0.5 if head_dim < rotation.CROSSED_BELOW else 1.0
    return matrix.sign().half().to(device), matrix.abs().max().item() * factor


@triton.jit
def after_previous(OVERLAPS: tl.constexpr):
    """Wait for the kernel before this one, and let the next one start.

    Above this call a kernel must not write, nor read what earlier kernels write. With OVERLAPS
    (`gpu.overlaps`; the launch says `launch_pdl`) the kernel starts while the one before it runs. This is
    programmatic dependent launch: https://docs.nvidia.com/cuda/cuda-c-programming-guide. Every program must
    call this, or the kernel may end before the one before it.
    """
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def load_halves(rows, live, dims, real, D: tl.constexpr):
    """Load the halves lo, hi [M, H] of the vectors at pointers `rows` [M].

    They are zero where `live` [M] or `real` [H] is False.
    """
    at, mask = rows[:, None] + dims[None, :], live[:, None] & real[None, :]
    return tl.load(at, mask=mask, other=0.0), tl.load(at + D // 2, mask=mask, other=0.0)


@triton.jit
def store_halves(rows, lo, hi, live, dims, real, D: tl.constexpr):
    """Store what `load_halves` loads, rounded to the dtype of `rows`."""
    at, mask = rows[:, None] + dims[None, :], live[:, None] & real[None, :]
    tl.store(at, lo.to(rows.dtype.element_ty), mask=mask)
    tl.store(at + D // 2, hi.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def load_signs(matrix, dims, real, D: tl.constexpr, TRANSPOSE: tl.constexpr):
    """Load the rotation's signs [H, H] as fp32, zero outside `real`. Their transpose undoes the rotation."""
    row, column = dims[:, None], dims[None, :]
    at = column * (D // 2) + row if TRANSPOSE else row * (D // 2) + column
    return tl.load(matrix + at, mask=real[:, None] & real[None, :], other=0.0).to(tl.float32)


@triton.jit
def cross(lo, hi, D: tl.constexpr):
    """Mix the halves of a narrow head, times sqrt(2). Applied twice it gives them back, times 2."""
    if D < CROSSED_BELOW:
        lo, hi = lo + hi, lo - hi
    return lo, hi


@triton.jit
def rotate(x, matrix, factor):
    """Return x [M, H] fp32 times signs [H, H] times factor. Two TF32 terms hold 22 of x's 24 bits."""
    high = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)  # what TF32 keeps
    y = tl.dot(high, matrix, input_precision="tf32")
    return tl.dot(x - high, matrix, y, input_precision="tf32") * factor


@triton.jit
def sums_and_differences(x, SPAN: tl.constexpr):
    """Replace x[.., i] and x[.., i + SPAN] by their sum and difference: [M, N] -> [M, N]."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    a, b = tl.split(tl.permute(tl.reshape(x, (M, N // (2 * SPAN), 2, SPAN)), (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (M, N))


@triton.jit
def hadamard(x):
    """Return x [M, N] fp32 times the Sylvester matrix [N, N], N a power of two, in log2(N) rounds."""
    for i in tl.static_range(10):
        if 2 << i <= x.shape[1]:
            x = sums_and_differences(x, 1 << i)
    return x


@triton.jit
def into_basis(lo, hi, rotation, dims, real, D: tl.constexpr):
    """Apply `rotation.rotate` to the halves lo, hi [M, H] fp32 of vectors."""
    lo, hi = cross(lo, hi, D)
    if lo.shape[1] == D // 2:  # no padding, so the matrix is signs times one Hadamard matrix
        sign = (tl.load(rotation[0] + dims * (D // 2)).to(tl.float32) * rotation[1])[None, :]
        return hadamard(lo * sign), hadamard(hi * sign)
    else:
        matrix = load_signs(rotation[0], dims, real, D, False)
        return rotate(lo, matrix, rotation[1]), rotate(hi, matrix, rotation[1])


@triton.jit
def out_of_basis(lo, hi, rotation, dims, real, D: tl.constexpr):
    """Undo `into_basis`."""
    lo, hi = cross(lo, hi, D)
    if lo.shape[1] == D // 2:
        sign = (tl.load(rotation[0] + dims * (D // 2)).to(tl.float32) * rotation[1])[None, :]
        return hadamard(lo) * sign, hadamard(hi) * sign
    else:
        matrix = load_signs(rotation[0], dims, real, D, True)
        return rotate(lo, matrix, rotation[1]), rotate(hi, matrix, rotation[1])


@triton.jit
def rope(lo, hi, cos, sin):
    """Turn the halves lo, hi of vectors by their angles, all [M, H] fp32.

    The fused operations are spelled out, so that all kernels give the same bits.
    """
    return tl.fma(lo, cos, -(hi * sin)), tl.fma(hi, cos, lo * sin)


@triton.jit
def squares(lo, hi):
    """Return lo^2 + hi^2; the fused operation is spelled out, as in `rope`."""
    return tl.fma(lo, lo, hi * hi)


@triton.jit
def unit_of_sum(largest, N: tl.constexpr):
    """Return a power of two and its inverse: N numbers of at most `largest` add up to an int32 in this unit.

    Integers have the same sum in any order, so on any number of threads. N is a power of two.
    """
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 30)
    unit = ((exponent - 29) << 23).to(tl.float32, bitcast=True)
    inverse = ((283 - exponent) << 23).to(tl.float32, bitcast=True)
    return unit * N, inverse / N


@triton.jit
def counted(x, inverse):
    """Return x / unit, rounded, as int32; the inverse of the unit comes from `unit_of_sum`."""
    return (x * inverse + 0.5).to(tl.int32)


@triton.jit
def from_count(count, unit, largest):
    """Return a sum of `counted` as fp32, or infinity if the largest number is infinite."""
    return tl.where(largest < float("inf"), count.to(tl.float32) * unit, largest)


@triton.jit
def weight_halves(norm, dims, real, D: tl.constexpr):
    """Load the halves [1, H] of a norm's weight [D]."""
    lo, hi = tl.load(norm + dims, mask=real, other=0.0), tl.load(norm + D // 2 + dims, mask=real, other=0.0)
    return lo[None, :], hi[None, :]


@triton.jit
def weighted(lo, hi, total, weight, eps, D: tl.constexpr, DTYPE: tl.constexpr):
    """Return the RMSNorm of vectors lo, hi [M, H] fp32 whose squares add up to `total` [M], rounded to DTYPE.

    `weight` is its halves. As in `qrt.kernels.rmsnorm`, one in fp32 multiplies before anything is rounded.
    """
    factor = tl.rsqrt(total / D + eps)[:, None]
    lo, hi = lo * factor, hi * factor
    if weight[0].dtype != tl.float32:
        lo, hi = lo.to(DTYPE).to(tl.float32), hi.to(DTYPE).to(tl.float32)
    lo, hi = lo * weight[0].to(tl.float32), hi * weight[1].to(tl.float32)
    return lo.to(DTYPE).to(tl.float32), hi.to(DTYPE).to(tl.float32)


@triton.jit
def normed(lo, hi, weight, eps, D: tl.constexpr, DTYPE: tl.constexpr):
    """Return the RMSNorm of the vectors lo, hi [M, H] fp32, as `weighted`; the weight is `weight_halves`."""
    square = squares(lo, hi)
    largest = tl.max(square, 1)
    unit, inverse = unit_of_sum(largest, square.shape[1])
    total = from_count(tl.sum(counted(square, inverse[:, None]), 1), unit, largest)
    return weighted(lo, hi, total, weight, eps, D, DTYPE)


@triton.jit
def enter_basis(lo, hi, rotation, dims, real, D: tl.constexpr):
    """Do `into_basis` with dots, to 16 bits, for vectors [M, H] fp32 with M at least 8; see `leave_basis`."""
    lo, hi = cross(lo, hi, D)
    matrix = load_signs(rotation[0], dims, real, D, True)
    return _turned(matrix, lo, True) * rotation[1], _turned(matrix, hi, True) * rotation[1]


@triton.jit
def leave_basis(lo, hi, rotation, dims, real, D: tl.constexpr, COLUMNS: tl.constexpr):
    """Do `out_of_basis` with dots, to 16 bits, for vectors [M, H] fp32. Dots take fewer instructions.

    With COLUMNS the dots have the vectors as columns, and M is at least 8. Else they have them as rows, and M
    is at least 16.
    """
    lo, hi = cross(lo, hi, D)
    matrix = load_signs(rotation[0], dims, real, D, not COLUMNS)
    return _turned(matrix, lo, COLUMNS) * rotation[1], _turned(matrix, hi, COLUMNS) * rotation[1]


@triton.jit
def _turned(matrix, x, COLUMNS: tl.constexpr):
    """Multiply the signs [H, H] by each vector of x [M, H] as a column, or without COLUMNS as a row.

    Two bf16 terms hold 16 of x's 24 bits.
    """
    if COLUMNS:
        x = tl.trans(x)
    if ASM:
        matrix, high = matrix.to(tl.bfloat16), x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
        if COLUMNS:
            y = tl.dot(matrix, low, tl.dot(matrix, high))
        else:
            y = tl.dot(low, matrix, tl.dot(high, matrix))
    elif COLUMNS:  # the interpreter has no bf16
        y = tl.dot(matrix, x, input_precision="ieee")
    else:
        y = tl.dot(x, matrix, input_precision="ieee")
    return tl.trans(y) if COLUMNS else y


@triton.jit
def capped(scores, softcap):
    """Return softcap * tanh(scores / softcap), all in base 2."""
    two = 2.0 * 1.4426950408889634
    return softcap - 2.0 * softcap / (tl.exp2(scores * (two / softcap)) + 1.0)


@triton.jit
def in_base_2(scores):
    """Return scores of a softmax as exponents of 2."""
    return scores * 1.4426950408889634


@triton.jit
def with_sink(sink, m, sums):
    """Add a score without a value, in base 2, to a softmax of maximum m and sum `sums` of 2^(score - m).

    Returns the new maximum, what the sum of values must be multiplied by, and the new sum. -inf adds nothing.
    """
    highest = tl.maximum(m, sink)
    kept = tl.exp2(m - highest)
    return highest, kept, sums * kept + tl.exp2(sink - highest)


@triton.jit
def online_softmax(query, tile, visible, m, l, acc, FMT: tl.constexpr, softcap=None, bias=None):
    """Attend the tokens of one tile, `visible` [N], with M heads, and return the new m, l and acc.

    Scores are capped at `softcap` if it is given, then `bias` [N, M] is added.

    m [M] is the running maximum of each head, the format's weights included, l the running sums (`no_sums` at
    first), acc the accumulator; all in base 2. The first tile must have a visible token, or m stays -inf
    (Milakov and Gimelshein 2018, arXiv:1805.02867).
    """
    scores = FMT.scores(query, tile)
    if softcap is not None:
        scores = capped(scores, softcap)
    if bias is not None:
        scores += bias
    scores = tl.where(visible[:, None], scores, -float("inf"))
    m_new = tl.maximum(m, tl.max(scores + FMT.weight(tile, m.shape[0]), 0))
    alpha = tl.exp2(m - m_new)
    p = tl.exp2(scores - m_new[None, :])
    return m_new, with_tokens(l, alpha, p), FMT.accumulate(acc, p, alpha, tile)
