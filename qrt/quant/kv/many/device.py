"""What the encoders of many tokens share, in Gluon.

`kv_write`'s kernel for many tokens holds half vectors as [threads, 16]: a thread has 16 channels of a half
vector, 8 that lie together and the 8 that lie half a half further, and LANES neighbouring threads have all of
it. A grid hands in its encoder (`Grid.many`):

    encode(lo, hi, LANES, ROWS) -> codes, scale_lo, scale_hi

lo and hi are the half vectors, fp32 [threads, 16] in the layout ROWS. codes, in the low 16 bits of int32, are
the words of the vector that a thread's channels fill: [threads, 16] of 8-bit codes, [threads, 8] of 4-bit
ones. The scales fp32 [threads] are the same in all threads of a vector. The bytes must be those of the
format's `encode`. A grid whose words hold channels of several threads, as of 2 bits, has no such encoder.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def exchanged(x, APART: gl.constexpr):
    """What the thread has whose number differs in the bit APART."""
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", "=r,r,r", [x, APART], dtype=x.dtype, is_pure=True, pack=1
    )


@gluon.jit
def has_bit(BIT: gl.constexpr, THREADS: gl.constexpr, LAYOUT: gl.constexpr):
    """Whether the thread's number has the bit, [THREADS, 1]."""
    return gl.expand_dims((gl.arange(0, THREADS, layout=gl.SliceLayout(1, LAYOUT)) & BIT) != 0, 1)


@gluon.jit
def largest(half, LANES: gl.constexpr):
    """The largest magnitude of each half vector, in each of its threads: [threads]."""
    largest = gl.max(gl.abs(half), 1)
    for i in gl.static_range(2):
        if 1 << i < LANES:
            largest = gl.maximum(largest, exchanged(largest, 1 << i))
    return largest
