"""int4's encoder for many tokens at once, in Gluon (`qrt.quant.kv.many.device`)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qrt.quant.kv.device import floor_above, stored_scale
from qrt.quant.kv.int4.device import bytes_of, parts_of
from qrt.quant.kv.many.device import exchanged, has_bit, largest


@gluon.jit
def _swapped(x, SPAN: gl.constexpr):
    """Exchange columns of x [threads, N] that are SPAN apart."""
    a, b = gl.split(gl.permute(gl.reshape(x, (x.shape[0], x.shape[1] // (2 * SPAN), 2, SPAN)), (0, 1, 3, 2)))
    return gl.reshape(gl.permute(gl.join(b, a), (0, 1, 3, 2)), x.shape)


@gluon.jit
def _for_trades(x, LANES: gl.constexpr, ROWS: gl.constexpr):
    """Move what a thread trades away in `_sum_of_squares` to the odd columns of x [threads, 16]."""
    for i in gl.static_range(2):
        if LANES >> (i + 1) > 0:
            swapped = gl.convert_layout(_swapped(x, 1 << i), ROWS, assert_trivial=True)
            x = gl.where(has_bit(LANES >> (i + 1), x.shape[0], ROWS), swapped, x)
    return x


@gluon.jit
def _sum_of_squares(x, LANES: gl.constexpr, ROWS: gl.constexpr):
    """Return the sum of squares of each half vector, in each of its threads: [threads].

    x comes from `_for_trades`. The order of additions is that of a warp with one channel per lane: channels
    half a half vector apart first, neighbours last. Threads trade sums for that: of the sums that two threads
    hold, each continues with half.
    """
    low, high = parts_of(x)
    x = gl.fma(low, low, high * high)
    for i in gl.static_range(2):
        if LANES >> (i + 1) > 0:
            kept, given = gl.split(gl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
            x = kept + exchanged(given, LANES >> (i + 1))
    for _ in gl.static_range(2):
        if x.shape[1] > 1:
            low, high = parts_of(x)
            x = low + high
    x = gl.convert_layout(gl.reshape(x, (x.shape[0],)), gl.SliceLayout(1, ROWS), assert_trivial=True)
    for i in gl.static_range(2):
        if 1 << i < LANES:
            x += exchanged(x, 1 << i)
    return x


@gluon.jit
def _lost(unit, STEPS: gl.constexpr, LANES: gl.constexpr, ROWS: gl.constexpr):
    """Return `int4.device._lost` in each thread of a half vector: [threads]."""
    lost = unit * STEPS - (floor_above(unit, STEPS, 8388608.0) - 8388607.5)
    return _sum_of_squares(lost, LANES, ROWS) * (1.0 / (STEPS * STEPS))


@gluon.jit
def _best_scale(half, LANES: gl.constexpr, ROWS: gl.constexpr):
    """Return `int4.device._best_scale`, bit for bit."""
    absmax = largest(half, LANES)
    unit = gl.abs(half) * gl.expand_dims(1.0 / gl.maximum(absmax, 1e-30), 1)
    unit = _for_trades(unit, LANES, ROWS)
    best, least = gl.full_like(absmax, 8.0), gl.full_like(absmax, float("inf"))
    for i in gl.static_range(5):
        lost = _lost(unit, 8.0 - 0.25 * i, LANES, ROWS)
        best, least = gl.where(lost < least, 8.0 - 0.25 * i, best), gl.minimum(lost, least)
    return stored_scale(absmax, best)


@gluon.jit
def encode(lo, hi, LANES: gl.constexpr, ROWS: gl.constexpr):
    """Encode half vectors: their words and scales, as `qrt.quant.kv.many.device` says."""
    scale_lo, scale_hi = _best_scale(lo, LANES, ROWS), _best_scale(hi, LANES, ROWS)
    return bytes_of(lo, scale_lo) + (bytes_of(hi, scale_hi) << 8), scale_lo, scale_hi
