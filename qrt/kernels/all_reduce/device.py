"""Device code of the all-reduce: rows go straight into the memory of the other ranks (`peer_memory`).

A row has a place of its own for each source rank, in two copies that are used in turn. How often the row has
been all-reduced says which copy; every rank counts it in its own memory, so that a CUDA graph can be
replayed. No flag and no fence says that a row is there: a place holds a value that no row has, EMPTY, until
its element arrives, and the reader puts it back. A place is written again only when its owner has sent that
row once more, in a later launch than the one that emptied it. So no rank overtakes a reader, whatever is
all-reduced in whatever order, as long as all ranks take the same rows.
"""

import triton
import triton.language as tl

from qrt.kernels import peer_memory

_PATIENCE = tl.constexpr(peer_memory.PATIENCE)
_RANK = tl.constexpr(peer_memory.RANK)
_ROWS = tl.constexpr(peer_memory.ROWS)
_ROW_BYTES = tl.constexpr(peer_memory.ROW_BYTES)
_BLOCKS = tl.constexpr(peer_memory.BLOCKS)


@triton.jit
def words_of(PEERS, RANKS: tl.constexpr):
    """Return `Memory.words` as a tuple. No kernel writes them, so they are read before `after_previous`."""
    words = (tl.load(PEERS),)
    for i in tl.static_range(1, _BLOCKS + RANKS):
        words = words + (tl.load(PEERS + i),)
    return words


@triton.jit
def all_reduced(x, words, row, k, inside, RANKS: tl.constexpr, WIRE: tl.constexpr, ASM: tl.constexpr):
    """Return the sum over all ranks of x [M, N] fp32, in fp32; each rank's x is rounded to WIRE first.

    It holds the rows `row` [M] of a step, and their columns k [N]. All ranks add in the same order, so all
    of them get the same bits.
    """
    WORD: tl.constexpr = tl.int32 if WIRE == tl.float32 else tl.int16
    bits = x.to(WIRE).to(WORD, bitcast=True)
    bits = tl.where(bits == empty(WORD), tl.zeros_like(bits), bits)  # -0, or in fp32 a number next to it
    live = tl.max(inside.to(tl.int32), 1) > 0
    turn = turn_of(words, row, live, RANKS)
    push(bits, words, turn, row, k, inside, RANKS)
    come = take(bits, words, turn, row, k, inside, RANKS, ASM)
    end_turn(words, turn, row, live, RANKS)
    total = tl.where((sources(RANKS) < RANKS)[:, :, None], come.to(WIRE, bitcast=True).to(tl.float32), 0.0)
    return tl.sum(total, 0)


@triton.jit
def empty(WORD: tl.constexpr):
    """Return what a place holds before its element is there, 0x8000 in every 16 bits."""
    if WORD == tl.int64:
        return tl.full((), -0x7FFF7FFF7FFF8000, tl.int64)
    elif WORD == tl.int32:
        return tl.full((), -0x7FFF8000, tl.int32)
    else:
        return tl.full((), -0x8000, tl.int16)


@triton.jit
def turn_of(words, row, live, RANKS: tl.constexpr):
    """Return how often each row [M] has been all-reduced before."""
    return tl.load(_counts(words, RANKS) + row, mask=live, other=0)


@triton.jit
def end_turn(words, turn, row, live, RANKS: tl.constexpr):
    """Count an all-reduce of each row [M]."""
    tl.store(_counts(words, RANKS) + row, turn + 1, mask=live)


@triton.jit
def push(bits, words, turn, row, k, inside, RANKS: tl.constexpr):
    """Write the integers bits [M, N] into this rank's places in the memory of all ranks, its own too."""
    for other in tl.static_range(RANKS):
        block = words[_BLOCKS + other]
        place = place_of(block, words, turn, words[_RANK], row, k, bits.dtype, RANKS)
        tl.store(place, bits, mask=inside)
    tl.debug_barrier()  # none of them is left for after the wait


@triton.jit
def sources(RANKS: tl.constexpr):
    """Return the ranks [S, 1], up to a power of two."""
    return tl.arange(0, triton.next_power_of_2(RANKS))[:, None]


@triton.jit
def take(like, words, turn, row, k, inside, RANKS: tl.constexpr, ASM: tl.constexpr):
    """Wait for what all ranks have written for this one, return it [S, M, N], and empty the places.

    `like` [M, N] has the type. What lies behind the last of `sources` is that one's again. All are read at
    once: one rank's behind another's would take a time of its own to come. A program that waits longer than
    the words allow ends the process: trap.
    """
    nothing = empty(like.dtype)
    source = tl.minimum(sources(RANKS), RANKS - 1)
    place = place_of(words[_BLOCKS], words, turn[None], source, row[None], k, like.dtype, RANKS)
    real = tl.broadcast_to(inside[None], place.shape)
    bits = tl.load(place, mask=real, other=0, volatile=True)
    started = tl.zeros((), tl.int64)
    while tl.max((bits == nothing).to(tl.int32)) > 0:
        if ASM:
            started = patient(started, words[_PATIENCE])
        bits = tl.load(place, mask=real, other=0, volatile=True)
    tl.debug_barrier()  # all threads have their copy of what small rows have many of
    tl.store(place, tl.zeros_like(bits) + nothing, mask=real)
    return bits


@triton.jit
def patient(started, patience):
    """Return when the wait began, in ns; trap once it has lasted longer than `patience` ns."""
    return tl.inline_asm_elementwise(
        """{ .reg .b64 t; .reg .pred p; mov.u64 t, %globaltimer;
        setp.eq.u64 p, $1, 0; selp.b64 $0, t, $1, p;
        sub.u64 t, t, $0; setp.gt.u64 p, t, $2; @p trap; }""",
        "=&l,l,l", [started, patience], dtype=tl.int64, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def place_of(block, words, turn, source, row, k, WORD: tl.constexpr, RANKS: tl.constexpr):
    """Return pointers [.., M, N] to what `source` writes into a rank's block: columns k [N] of rows [.., M].

    `turn` has the shape of `row`; `source` is one rank, or [S, 1] of them for rows [1, M].
    """
    start = block + (((turn & 1) * RANKS + source) * words[_ROWS] + row) * words[_ROW_BYTES]
    start = start.to(tl.pointer_type(WORD))
    if len(row.shape) == 2:  # 16 bytes are written at a time
        return tl.multiple_of(start, [16, 16])[:, :, None] + k[None, None, :]
    else:
        return tl.multiple_of(start, [16])[:, None] + k[None, :]


@triton.jit
def _counts(words, RANKS: tl.constexpr):
    """Return a pointer to the counts int32 of this rank's rows, behind its places."""
    places = 2 * RANKS * words[_ROWS] * words[_ROW_BYTES]
    return (words[_BLOCKS] + places).to(tl.pointer_type(tl.int32))
