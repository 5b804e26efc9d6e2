"""Functions that the encoders of many tokens share, in Gluon.

`kv_write`'s kernel for many tokens holds half vectors as [threads, 16]. A thread has 16 channels of a half
vector: 8 neighbours, and the 8 that are half a half vector further on. LANES neighbouring threads hold the
whole. A grid hands in its encoder (`Grid.many`):

    encode(lo, hi, LANES, ROWS) -> codes, scale_lo, scale_hi

lo and hi are the half vectors, fp32 [threads, 16] in the layout ROWS. codes are the words that a thread's
channels fill, in the low 16 bits of int32: [threads, 16] for 8-bit codes, [threads, 8] for 4-bit codes. The
scales fp32 [threads] are the same in all threads of a vector. The bytes must equal those of the format's
`encode`. A grid whose words hold channels of several threads, as with 2 bits, has no such encoder.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def exchanged(x, APART: gl.constexpr):
    """Return the value of the thread whose number differs in the bit APART."""
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", "=r,r,r", [x, APART], dtype=x.dtype, is_pure=True, pack=1
    )


@gluon.jit
def has_bit(BIT: gl.constexpr, THREADS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return whether the number of each thread has the bit: [THREADS, 1]."""
    return gl.expand_dims((gl.arange(0, THREADS, layout=gl.SliceLayout(1, LAYOUT)) & BIT) != 0, 1)


@gluon.jit
def largest(half, LANES: gl.constexpr):
    """Return the largest magnitude of each half vector, in each of its threads: [threads]."""
    largest = gl.max(gl.abs(half), 1)
    for i in gl.static_range(2):
        if 1 << i < LANES:
            largest = gl.maximum(largest, exchanged(largest, 1 << i))
    return largest
