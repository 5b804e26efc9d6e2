"""The Triton kernels of `prefill_attention`; see the package's docstring for the contract.

The first kernel decodes what the chunks read from the cache, once, into contiguous K and V of 16 bits (fp32
for fp32). So the cost of a format does not grow with the chunk. The second kernel is FlashAttention-2
(arXiv:2307.08691): a program takes a tile of (token, query head of one KV head) pairs through the cached
tokens, then through the chunk's own k and v. Both are in the basis of the cache, so one online softmax runs
over all of them, and the epilogue turns the sum back. Whole heads are tiles [.., 2H], with H columns per half
head, so that the epilogue can separate the halves. On Hopper, `hopper_kernel` replaces the second kernel for
the sizes that most models have.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qrt.checks import expect
from qrt.kernels.attention_rule import LOG2_E, AttentionRule
from qrt.kernels.device import (
    capped,
    half_width,
    in_base_2,
    leave_basis,
    out_of_basis,
    signs,
    store_halves,
    token_stride,
    with_sink,
)
from qrt.kernels.gpu import multiprocessors, shared_bytes
from qrt.kernels.launch import variant
from qrt.kernels.op import takes
from qrt.kernels.prefill_attention import ref
from qrt.kernels.prefill_attention.hopper_kernel import fits, hopper_prefill
from qrt.kernels.prefill_attention.tiles import FIELDS, tile_rows
from qrt.kernels.sizes import cdiv
from qrt.quant.kv import KV_FORMATS, KVFormat
from qrt.quant.kv.device import part_columns


class Tiling(NamedTuple):
    """Tokens of a program's dot, and how the program is compiled; `stages` is the most that it may have."""

    tokens: int
    stages: int
    warps: int


TILINGS = {  # by bytes of a value and whether D is at most 128; fp32 dots run outside the tensor cores
    (2, True): Tiling(tokens=64, stages=3, warps=8),
    (2, False): Tiling(tokens=32, stages=2, warps=4),
    (4, True): Tiling(tokens=32, stages=1, warps=8),
    (4, False): Tiling(tokens=16, stages=1, warps=8),
}
GATHERED = 64  # tokens that a program of the first kernel decodes at a time
GATHER_WARPS = 4
GATHERS_PER_SM = 16  # programs; the grid must not depend on how many tokens are cached


@triton.jit(do_not_specialize=["chunks", "halvings"])
def _gather_kernel(
    buffers, slot_table, rows, cached_start, k, v, stride_table, chunks, halvings,
    HKV: tl.constexpr, D: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr, FMT: tl.constexpr,
):  # fmt: skip
    """Grid (Hkv, programs): decode the cached tokens, chunk after chunk, into k, v [num_cached, Hkv, D].

    The programs of a head take its tiles in turn. `halvings` is how often `chunks` is halved to find one.
    """
    head, total = tl.program_id(0), tl.load(cached_start + chunks)
    for first in tl.range(tl.program_id(1) * TILE, total, tl.num_programs(1) * TILE):
        token = first + tl.arange(0, TILE)
        live = token < total
        chunk, beyond = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32) + chunks
        for _ in tl.range(0, halvings):  # cached_start[chunk] <= token < cached_start[beyond]
            middle = (chunk + beyond) // 2
            behind = tl.load(cached_start + middle) <= token
            chunk, beyond = tl.where(behind, middle, chunk), tl.where(behind, beyond, middle)
        position = token - tl.load(cached_start + chunk)
        table = slot_table + tl.load(rows + chunk, mask=live, other=0).to(tl.int64) * stride_table
        slots = tl.load(table + position, mask=live, other=0).to(tl.int64)
        k_lo, k_hi, v_lo, v_hi = FMT.decode(FMT.load(buffers, slots, live, head, HKV, D, H, 1))
        dims, real = part_columns(D, FMT.parts, H)
        at = (token.to(tl.int64) * HKV + head) * D
        store_halves(k + at, k_lo, k_hi, live, dims, real, D)
        store_halves(v + at, v_lo, v_hi, live, dims, real, D)


@triton.jit
def _load_heads(rows, dims, live, real, D: tl.constexpr, MASKED: tl.constexpr):
    """Load the heads [N, 2H] at pointers `rows` [N].

    They are zero where `real` [2H] is False and, if MASKED, where `live` [N] is False.
    """
    at = rows[:, None] + dims[None, :]
    if MASKED:
        return tl.load(at, mask=live[:, None] & real[None, :], other=0.0)
    elif dims.shape[0] != D:
        return tl.load(at, mask=real[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _attend_tiles(
    q, k, v, stride_k, stride_v, first, end, position, low, state, scale, softcap, slope, dims, real,
    D: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Go on from `state` through keys first to end-1, in base 2 and fp32.

    These are whole tiles that every row sees or, if MASKED, any number of keys, of which row r sees those up
    to position[r] and, if LIMITED, from low[r] on. If not, every row must see a key of the first tile it
    meets, or its m stays -inf.
    """
    m, l, acc = state
    column = tl.arange(0, TILE)
    for at in tl.range(first, end, TILE, num_stages=STAGES):
        key, live = at + column, at + column < end
        k_tile = _load_heads(
            k + tl.cast(at, tl.int64) * stride_k + column * stride_k, dims, live, real, D, MASKED
        )
        scores = tl.dot(q.to(k_tile.dtype), tl.trans(k_tile), input_precision="ieee")
        if softcap is not None:
            scores = capped(scores * scale, softcap) / scale
        if slope is not None:
            scores += (key[None, :] - position[:, None]).to(tl.float32) * (slope / scale)[:, None]
        if MASKED:
            seen = (key[None, :] <= position[:, None]) & live[None, :]
            if LIMITED:
                seen &= key[None, :] >= low[:, None]
            scores = tl.where(seen, scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, 1) * scale)
        if MASKED and LIMITED:  # a row may have seen no key yet
            highest = tl.where(m_new == -float("inf"), 0.0, m_new)
        else:
            highest = m_new
        p = tl.exp2(scores * scale - highest[:, None])
        alpha = tl.exp2(m - highest)
        v_tile = _load_heads(
            v + tl.cast(at, tl.int64) * stride_v + column * stride_v, dims, live, real, D, MASKED
        )
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision="ieee")
        m, l = m_new, l * alpha + tl.sum(p, 1)
    return m, l, acc


@triton.jit
def _attend(
    q, k, v, stride_k, stride_v, free, end, position, lows, state, scale, softcap, slope, dims, real,
    D: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Go on from `state` through keys 0 to end-1; rows are at position [M].

    Every row sees the first `free` keys, and row r those up to position[r]; if LIMITED none before the first
    of `lows` [M], of which the others are the least and the greatest. Masks take time, so only the last
    tiles have them. The masked tiles go first, and every row sees key free-1 in them: if they came after the
    others, ptxas would make every wgmma of the kernel wait for the one before (warning C7515).
    """
    whole = tl.maximum(free - 1, 0) // TILE * TILE
    begin, all_see, low = 0, 0, None
    if LIMITED:
        low, least, greatest = lows
        begin = tl.minimum(tl.maximum(least, 0) // TILE * TILE, end // TILE * TILE)
        all_see = tl.minimum(tl.cdiv(tl.maximum(greatest, 0), TILE) * TILE, whole)
        whole = tl.maximum(whole, begin)
    state = _attend_tiles(
        q, k, v, stride_k, stride_v, whole, end, position, low, state, scale, softcap, slope, dims, real, D,
        TILE, STAGES, True, LIMITED,
    )  # fmt: skip
    if LIMITED:
        state = _attend_tiles(
            q, k, v, stride_k, stride_v, begin, all_see, position, low, state, scale, softcap, slope, dims,
            real, D, TILE, STAGES, True, LIMITED,
        )  # fmt: skip
        all_see = tl.maximum(all_see, begin)
    return _attend_tiles(
        q, k, v, stride_k, stride_v, all_see, whole, position, low, state, scale, softcap, slope, dims, real,
        D, TILE, STAGES, False, LIMITED,
    )  # fmt: skip


@triton.jit
def _low(position, WINDOW: tl.constexpr, SEGMENT: tl.constexpr):
    """Return the first key that a row at `position` sees, or a number below 0."""
    if SEGMENT > 0:
        return position // SEGMENT * SEGMENT
    else:
        return position - WINDOW + 1


@triton.jit
def _lows(token, lowest, highest, prefix, begin, WINDOW: tl.constexpr, SEGMENT: tl.constexpr):
    """Return what `_attend` takes of rows at tokens behind `prefix` others, for keys from key `begin` on."""
    row = _low(prefix + token, WINDOW, SEGMENT) - begin
    least = _low(prefix + lowest, WINDOW, SEGMENT) - begin
    return row, least, _low(prefix + highest, WINDOW, SEGMENT) - begin


@triton.jit
def _prefill_kernel(
    q, k, v, cached_k, cached_v, query_start, cached_start, tiles, rotation, out, scale,
    stride_q, stride_k, stride_v, softcap, slopes, sinks, ATTEND_CACHE: tl.constexpr, WINDOW: tl.constexpr,
    SEGMENT: tl.constexpr, G: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, H: tl.constexpr,
    M: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Grid (Hkv, tiles): a program attends M rows (token, query head) of a chunk.

    softcap is in base 2, slopes and sinks are not; each may be None.
    """
    kv_head, tile = tl.program_id(0), tiles + tl.program_id(1) * FIELDS
    chunk, first = tl.load(tile), tl.load(tile + 1)
    if chunk < 0:
        return
    start = tl.load(query_start + chunk).to(tl.int64)
    length = (tl.load(query_start + chunk + 1) - start).to(tl.int32)
    row = first + tl.arange(0, M)
    token, head, live = row // G, kv_head * G + row % G, row < length * G
    free, end = first // G + 1, tl.minimum((first + M - 1) // G + 1, length)  # of the chunk's own tokens
    dims, real = part_columns(2 * D, 2, 2 * H)
    query = _load_heads(q + (start + token) * stride_q + head * D, dims, live, real, D, True)

    cached_at = tl.load(cached_start + chunk).to(tl.int64)
    cached = (tl.load(cached_start + chunk + 1) - cached_at).to(tl.int32)
    cached_k += (cached_at * HKV + kv_head) * D
    cached_v += (cached_at * HKV + kv_head) * D
    m, l = tl.full([M], -float("inf"), tl.float32), tl.zeros([M], tl.float32)
    state = m, l, tl.zeros([M, 2 * H], tl.float32)
    lowest, highest, slope = first // G, tl.minimum((first + M - 1) // G, length - 1), None
    if slopes is not None:
        slope = in_base_2(tl.load(slopes + head, mask=live, other=0.0))
    LIMITED: tl.constexpr = WINDOW > 0 or SEGMENT > 0
    if ATTEND_CACHE:
        prefix = cached - length
        lows = _lows(token, lowest, highest, prefix, 0, WINDOW, SEGMENT)
        state = _attend(
            query, cached_k, cached_v, HKV * D, HKV * D, prefix + free, prefix + end, prefix + token, lows,
            state, scale, softcap, slope, dims, real, D, TILE, STAGES, LIMITED,
        )  # fmt: skip
    else:
        k += start * stride_k + kv_head * D
        v += start * stride_v + kv_head * D
        lows = _lows(token, lowest, highest, cached, 0, WINDOW, SEGMENT)
        state = _attend(
            query, cached_k, cached_v, HKV * D, HKV * D, cached, cached, cached + token, lows, state, scale,
            softcap, slope, dims, real, D, TILE, STAGES, LIMITED,
        )  # fmt: skip
        lows = _lows(token, lowest, highest, cached, cached, WINDOW, SEGMENT)
        state = _attend(
            query, k, v, stride_k, stride_v, free, end, token, lows, state, scale, softcap, slope, dims, real,
            D, TILE, STAGES, LIMITED,
        )  # fmt: skip
    m, l, acc = state
    if sinks is not None:
        _, kept, l = with_sink(in_base_2(tl.load(sinks + head, mask=live, other=0.0)), m, l)
        acc *= kept[:, None]
    lo, hi = tl.split(tl.permute(tl.reshape(acc / l[:, None], (M, 2, H)), (0, 2, 1)))
    dims, real = part_columns(D, 1, H)
    if rotation is not None:
        if out.dtype.element_ty == tl.float32:
            lo, hi = out_of_basis(lo, hi, rotation, dims, real, D)
        else:
            lo, hi = leave_basis(lo, hi, rotation, dims, real, D, False)
    store_halves(out + ((start + token) * (HKV * G) + head) * D, lo, hi, live, dims, real, D)


def gather(
    kv: Sequence[Tensor],
    slot_table: Tensor,
    rows: Tensor,
    cached_start: Tensor,
    fmt: KVFormat,
    k: Tensor,
    v: Tensor,
) -> None:
    """Decode the cached tokens of all chunks into k, v [num_cached, Hkv, D].

    The values keep the basis of the cache and get the dtype of k and v.
    """
    (room, Hkv, D), device = k.shape, fmt.device
    if not room or not len(rows):
        return
    programs, chunks = cdiv(GATHERS_PER_SM * multiprocessors(k.device), Hkv), len(rows)
    kernel = variant(
        _gather_kernel, HKV=Hkv, D=D, H=half_width(D, device.parts), TILE=GATHERED, FMT=device,
        num_warps=GATHER_WARPS,
    )  # fmt: skip
    kernel.launch(
        (Hkv, min(cdiv(room, GATHERED), programs)), tuple(kv), slot_table, rows, cached_start, k, v,
        slot_table.stride(0), chunks, (chunks - 1).bit_length(),
    )  # fmt: skip


@takes(ref.prefill_attention)
def prefill_attention(a: Any) -> None:
    """See the package's docstring; `scale` must be positive."""
    T, Hq, D = expect(a.q, "T Hq D", name="q").values()
    Hkv = expect(a.k, "T Hkv D", a.q.dtype, "k", T=T, D=D)["Hkv"]
    expect(a.v, "T Hkv D", a.q.dtype, "v", T=T, Hkv=Hkv, D=D)
    expect(a.out, "T Hq D", a.q.dtype, "out", T=T, Hq=Hq, D=D)
    B = expect(a.rows, "B", torch.int32, "rows")["B"]
    expect(a.query_start, "N", torch.int32, "query_start", N=B + 1)
    expect(a.cached_start, "N", torch.int32, "cached_start", N=B + 1)
    expect(a.tiles, f"N {FIELDS}", torch.int32, "tiles")
    if not len(a.tiles):
        return
    fmt = KV_FORMATS[a.format]
    # fp16 holds a code times its scale, bf16 would round it as coarsely as int8 does
    dtype = torch.float16 if fmt.quantized and a.q.dtype is torch.bfloat16 else a.q.dtype
    cached = [torch.empty(a.num_cached, Hkv, D, dtype=dtype, device=a.q.device) for _ in "kv"]
    gather(a.kv, a.slot_table, a.rows, a.cached_start, fmt, *cached)
    rule = AttentionRule(
        a.scale * LOG2_E, a.window, softcap=a.softcap * LOG2_E, slopes=a.slopes, sinks=a.sinks,
        segment=a.segment,
    )  # fmt: skip
    attend = hopper_prefill if fits(a.q, a.k, a.v, rule) else _triton_prefill
    attend(a, cached, signs(D, a.q.device) if fmt.rotated else None, rule)


def _triton_prefill(
    a: Any, cached: Sequence[Tensor], rotation: tuple[Tensor, float] | None, rule: AttentionRule
) -> None:
    """Do what `hopper_prefill` does, for any tensors and any rule; its scale and softcap are in base 2."""
    q, (cached_k, cached_v), (_, Hq, D), Hkv = a.q, cached, a.q.shape, a.k.shape[1]
    tiling, H, M = TILINGS[q.itemsize, D <= 128], half_width(D, 1), tile_rows(q.itemsize, D)
    row_bytes, queries = 2 * H * q.itemsize, 1 + (cached_k.dtype is not q.dtype)  # one copy of q per dtype
    stages = (shared_bytes(q.device) - queries * M * row_bytes) // (2 * tiling.tokens * row_bytes)
    kernel = variant(
        _prefill_kernel, ATTEND_CACHE=a.attend_cache, G=Hq // Hkv, HKV=Hkv, D=D, H=H, M=M, TILE=tiling.tokens,
        STAGES=max(1, min(tiling.stages, stages)), FIELDS=FIELDS, WINDOW=rule.window, SEGMENT=rule.segment,
        num_warps=tiling.warps,
    )  # fmt: skip
    kernel.launch(
        (Hkv, len(a.tiles)), q, a.k, a.v, cached_k, cached_v, a.query_start, a.cached_start, a.tiles,
        rotation, a.out, rule.scale, token_stride(q, "q"), token_stride(a.k, "k"), token_stride(a.v, "v"),
        rule.softcap or None, rule.slopes, rule.sinks,
    )  # fmt: skip
