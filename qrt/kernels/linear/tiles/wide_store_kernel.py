"""The sums of a group of warps on their way from registers to memory, in Gluon.

S are the sizes of `wide_multiply_kernel`. Of two halves, a gate and its up, a thread has both of a column.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qrt.kernels.act_mul.kernel import act_times
from qrt.kernels.linear.device import store_block, weights_of_places


@gluon.jit
def store_sums(acc, Y, BIAS, of_codes, where, M, N, scatter, S: gl.constexpr):
    """Store the sums [ROWS, tokens] of a group, or with two halves ACT(gate) * up of them.

    With WEIGHTS a row is first multiplied by that of its assignment.
    """
    ORDER, WEIGHTS, count = scatter
    TOKENS: gl.constexpr = acc.shape[1]
    expert, first, token = where
    sums = _finished(acc, BIAS, of_codes, where, M, N, S)
    if WEIGHTS is not None:
        COLUMN: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
        sums *= gl.expand_dims(weights_of_places(ORDER, WEIGHTS, token, count, TOKENS, COLUMN), 0)
    y = sums.to(Y.dtype.element_ty)
    if S.HALVES == 2:
        gate, up = gl.split(y.reshape([S.ROWS // 16, 2, 8, TOKENS]).permute((0, 2, 3, 1)))
        ACT: gl.constexpr = S.ACT  # Triton 3.6 passes no string that is an attribute
        y = act_times(gate, up, ACT, True).reshape([S.ROWS // 2, TOKENS])
    store_block(Y, y, first, token, M, N // S.HALVES, 4 * S.BN, ORDER, count, S.SHARES)


@gluon.jit
def _finished(acc, BIAS, of_codes, where, M, N, S: gl.constexpr):
    """Return what the sums [ROWS, tokens] of a group stand for, float32, with the bias."""
    expert, first, token = where
    TOKEN_SCALES, CHANNEL = of_codes
    MMA: gl.constexpr = acc.type.layout
    y = acc.to(gl.float32)
    if S.DOT == gl.int8:
        m = token + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, MMA))
        y *= gl.expand_dims(gl.load(TOKEN_SCALES + m, mask=m < M, other=0.0), 0)
        y *= gl.expand_dims(_of_rows(CHANNEL + expert * N, MMA, first, N, S), 1)
    if S.BIASED:
        y += gl.expand_dims(_of_rows(BIAS + expert * N, MMA, first, N, S), 1)
    return y


@gluon.jit
def _of_rows(FACTS, LAYOUT: gl.constexpr, first, N, S: gl.constexpr):
    """Return FACTS [N] of the rows of a group, float32 [ROWS]."""
    row = gl.arange(0, S.ROWS, layout=gl.SliceLayout(1, LAYOUT))
    n, half = first + row, 0
    if S.HALVES == 2:
        n, half = first + row // 16 * 8 + row % 8, row // 8 % 2
    return gl.load(FACTS + n + half * (N // S.HALVES), mask=n < N // S.HALVES, other=0.0).to(gl.float32)
