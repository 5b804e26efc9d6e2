"""Tiles of a quantized weight, and tokens, on their way to Hopper's tensor cores, in Gluon.

The copy engine (TMA) brings them; a tile is loaded as the register operand and unpacked plane by plane.

Everywhere `ring` is the shared memory of `wide_multiply_kernel`, `copies` is what it brings there, and S are
its sizes. A tile of a gate and its up has as many rows of both, eight of each in turn: a thread then has both
of a column. Layout: quant/weight/tiles.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from qrt.kernels.linear.device import scale_of_run


@gluon.jit
def _fetch_tile(ring, copies, slot, half, row, tile, S: gl.constexpr):
    """Start the copy of a tile into a slot: some rows, from `row` on, of the halves from `half` on."""
    _, w_smem, scale_smem, zero_smem, _, _, ready, _ = ring
    _, w_desc, scale_desc, zero_desc, _ = copies
    arrived, block, inside = ready.index(slot), row // 64, row % 64
    WORDS: gl.constexpr = S.WORDS
    FACTS: gl.constexpr = WORDS + S.ASYMMETRIC  # words of a row: its scales, its zeros
    mbarrier.expect(arrived, w_desc.block_type.nbytes + FACTS * scale_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(w_desc, [half, block, tile * 64 + inside, 0], arrived, w_smem.index(slot))
    for w in gl.static_range(WORDS):
        place = (tile * WORDS + w) * 64 + inside
        tma.async_copy_global_to_shared(
            scale_desc, [half, block, place], arrived, scale_smem.index(slot * WORDS + w)
        )
    if S.ASYMMETRIC:
        place = tile * 64 + inside
        tma.async_copy_global_to_shared(zero_desc, [half, block, place], arrived, zero_smem.index(slot))


@gluon.jit
def first_row(row, GROUP: gl.constexpr, S: gl.constexpr):
    """Return a group's first row of a row block, or of each of its halves."""
    ROWS: gl.constexpr = S.ROWS // S.HALVES
    return row * (ROWS * S.GROUPS // S.OWN) + (0 if S.TURNS else ROWS * GROUP)


@gluon.jit
def fetch_x(ring, copies, token, done, steps, S: gl.constexpr):
    """Ask for planes of the tokens, XP at a time, as long as there is room; for OWN groups in turn."""
    desc, plane = copies[0], copies[4] * S.PLANES
    smem, ready, empty = ring[0], ring[4], ring[5]
    STAGES: gl.constexpr = S.PLANES // S.XP  # of a tile
    for i in range(steps * STAGES):
        stage = done * STAGES + i
        slot = stage % S.XS
        if S.OWN > 1:
            stage = i // (STAGES * S.OWN) * STAGES + i % STAGES
            slot = stage % S.XS * S.OWN + i // STAGES % S.OWN
        mbarrier.wait(empty.index(slot), (stage // S.XS - 1) & 1, pred=stage >= S.XS)
        mbarrier.expect(ready.index(slot), desc.block_type.nbytes)
        at = [plane + i * S.XP, token * S.BM, 0]
        tma.async_copy_global_to_shared(desc, at, ready.index(slot), smem.index(slot))


@gluon.jit
def fetch_w(ring, copies, expert, row, done, steps, S: gl.constexpr):
    """Ask for the groups' tiles of a weight of the stack, with scales and zeros, as long as there is room."""
    first, empty = copies[4], ring[7]
    FETCHED: gl.constexpr = S.GROUPS // S.OWN  # tiles in a turn
    for i in range(steps):
        for g in gl.static_range(FETCHED):
            turn = done + i
            slot = turn % S.WS * S.GROUPS + g
            if S.TURNS:
                turn = i // S.GROUPS
                slot = turn % S.WS * S.GROUPS + i % S.GROUPS
            mbarrier.wait(empty.index(slot), (turn // S.WS - 1) & 1, pred=turn >= S.WS)
            _fetch_tile(ring, copies, slot, expert * S.HALVES, first_row(row, g, S), first + i, S)


@gluon.constexpr_function
def _by_eights(OPERAND, J):
    """Return the layout of words [2, ROWS / 16, 8, J] that are the operand's [ROWS, J].

    Eight rows of each half come in turn, so that a thread has both halves of a column.
    """
    warps, together = OPERAND.parent.warps_per_cta[0], OPERAND.k_width
    inputs = [[0, 0, 0, 1 << i] for i in range(J.bit_length() - 1)]
    own = together.bit_length() - 1  # of a thread in a row, 4 threads have so many each
    return gl.DistributedLinearLayout(
        [*inputs[:own], [1, 0, 0, 0], *inputs[own + 2 :]],
        [*inputs[own : own + 2], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]],
        [[0, 1 << i, 0, 0] for i in range(warps.bit_length() - 1)], [], [2, warps, 8, J],
    )  # fmt: skip


@gluon.jit
def tile_of(ring, slot, S: gl.constexpr, OPERAND: gl.constexpr):
    """Return what `fetch_w` has brought: words [ROWS, J], scales (WORDS of int32 [ROWS]), zeros [ROWS].

    Without zeros, the first of the scales stands in their place.
    """
    _, w_smem, scale_smem, zero_smem, _, _, _, _ = ring
    if S.HALVES == 2:
        PAIRED: gl.constexpr = _by_eights(OPERAND, S.J)
        pairs = w_smem.index(slot).reshape([2, S.ROWS // 16, 8, S.J]).load(PAIRED)
        words = gl.convert_layout(pairs.permute((1, 0, 2, 3)).reshape([S.ROWS, S.J]), OPERAND)
    else:
        words = w_smem.index(slot).reshape([S.ROWS, S.J]).load(OPERAND)
    WORDS: gl.constexpr = S.WORDS
    scales = ()
    for w in gl.static_range(WORDS):
        scales = scales + (_row_words(scale_smem.index(slot * WORDS + w), S, OPERAND),)
    zeros = scales[0]
    if S.ASYMMETRIC:
        zeros = _row_words(zero_smem.index(slot), S, OPERAND)
    return words, scales, zeros


@gluon.jit
def _row_words(smem, S: gl.constexpr, OPERAND: gl.constexpr):
    """Load an int32 for each row of the operand, from smem [halves, .., rows]."""
    ROW: gl.constexpr = gl.SliceLayout(1, OPERAND)
    if S.HALVES == 2:
        PAIRED: gl.constexpr = gl.SliceLayout(3, _by_eights(OPERAND, S.J))
        pairs = smem.reshape([2, S.ROWS // 16, 8]).load(PAIRED)
        return gl.convert_layout(pairs.permute((1, 0, 2)).reshape([S.ROWS]), ROW)
    else:
        return smem.reshape([S.ROWS]).load(ROW)


@triton.jit
def _times(plane, scale, DTYPE: tl.constexpr):
    """Return plane * scale in the 16-bit DTYPE, computed two at a time."""
    if DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "mul.bf16x2 $0, $1, $2;", "=r,r,r", [plane, scale], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            "mul.f16x2 $0, $1, $2;", "=r,r,r", [plane, scale], dtype=tl.float16, is_pure=True, pack=2
        )


@gluon.jit
def weights_of(words, scales, zeros, PLANE: gl.constexpr, S: gl.constexpr, UNPACK: gl.constexpr):
    """Return a plane of `words` [ROWS, J] in DOT, rounded once; times `unit_of` it is weights.

    In int8 the scales are `TiledWeight.steps`, and nothing is rounded.
    """
    RUN: gl.constexpr = PLANE * S.RUNS // S.PLANES
    if S.DOT == gl.int8:
        step = (scales[0] >> (16 * RUN)) & 0xFF
        offset = ((scales[0] >> (16 * RUN + 8)) & 0xFF) * 0x01010101
        return UNPACK(words, gl.expand_dims(step, 1), gl.expand_dims(offset, 1), PLANE)
    elif S.SCALE == gl.bfloat16 and S.DOT == gl.bfloat16 and not S.ASYMMETRIC:
        pair = (scales[RUN // 2] >> (RUN % 2 * 16)) & 0xFFFF
        return UNPACK(words, 0, PLANE, S.DOT, True, gl.expand_dims(pair * 0x10001, 1))
    else:
        if S.ASYMMETRIC:
            plane = UNPACK(words, gl.expand_dims((zeros << (24 - 8 * RUN)) >> 24, 1), PLANE, S.DOT, True)
        else:
            plane = UNPACK(words, 0, PLANE, S.DOT, True)
        scale = gl.expand_dims(scale_of_run(scales, RUN, S.SCALE), 1)
        if S.SCALE == S.DOT:
            return _times(plane, scale, S.DOT)
        else:
            return (plane.to(gl.float32) * scale.to(gl.float32)).to(S.DOT)
