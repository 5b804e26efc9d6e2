"""The Triton kernel of `decode_attention` and `append_attention`; see the package's docstring.

A program attends one part (`plan`) of one request's tokens, for the query heads of one KV head or of two that
are read side by side. Parts are merged by their base-2 log-sum-exp. The program of the last of up to `FAN_IN`
parts to finish merges that group, and the last group to finish merges the groups. The program that then holds
the whole turns it out of the cache's basis (docs/kv-layout.md#decode-attention). Parts are added in their
order, so results do not depend on timing.

If there are few requests, programs load their first slots, K and V while the kernel before still runs, and
only then wait for its query (`DecodeBlock.ahead`). `append_attention` saves a launch: each program turns its
query itself, and the program with a request's last part stores the newest K and V before it loads any.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qrt.checks import expect
from qrt.kernels.attention_rule import LOG2_E, AttentionRule
from qrt.kernels.decode_attention import ref
from qrt.kernels.decode_attention.blocks import DOT_COLUMNS, block_of, measured_block, refuse_others
from qrt.kernels.decode_attention.plan import FIELDS
from qrt.kernels.device import (
    enter_basis,
    half_width,
    in_base_2,
    into_basis,
    leave_basis,
    load_halves,
    normed,
    online_softmax,
    rope,
    signs,
    store_halves,
    token_stride,
    weight_halves,
    with_sink,
)
from qrt.kernels.gpu import overlaps
from qrt.kernels.head_norms import checked
from qrt.kernels.launch import variant
from qrt.kernels.op import takes
from qrt.kernels.sizes import next_power_of_2
from qrt.quant.device import store_digits_of_halves
from qrt.quant.digits import GROUP
from qrt.quant.kv import KV_FORMATS
from qrt.quant.kv.device import KVDevice, all_tokens, no_sums, part_columns

FAN_IN = 16  # most parts or groups that one program merges; groups have half as many parts
MERGED_ROWS = 16  # heads times parts that a warp reads at a time while it merges
LEAST = tl.constexpr(-1e30)  # below every log-sum-exp, but finite


@cache  # CUDA graphs hold its address
def _arrivals(counters: int, device: torch.device) -> Tensor:
    """Return counters that are zero between launches, so that launches in a row can share them."""
    return torch.zeros(counters, dtype=torch.int32, device=device)


@triton.jit
def _is_last(arrivals, count):
    """Return whether this is the last of `count` programs to come here; it sees what the others stored."""
    tl.debug_barrier()  # every thread has stored before this program counts as arrived
    last = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == count - 1
    if last:
        tl.store(arrivals, 0)
    return last


@triton.jit
def _merged(
    partial, lse, at, live, dims, real, stride, count,
    D: tl.constexpr, H: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Merge the `count` parts at `at` [M], at + stride, ..: their sum weighted by 2^lse, and its lse.

    Returns the halves of the sum, [M, H] each, and the lse [M].
    """
    m, total = tl.full([M], LEAST, tl.float32), tl.zeros([M], tl.float32)
    lo, hi = tl.zeros([M, H], tl.float32), tl.zeros([M, H], tl.float32)
    for begin in tl.range(0, count, N, num_stages=1):
        part = begin + tl.arange(0, N)
        place = at[:, None] + (part * stride)[None, :]
        there = live[:, None] & (part < count)[None, :]
        rows = partial + place[:, :, None] * D + dims[None, None, :]
        mask = there[:, :, None] & real[None, None, :]
        part_lse = tl.load(lse + place, mask=there, other=LEAST, cache_modifier=".cg")
        part_lo = tl.load(rows, mask=mask, other=0.0, cache_modifier=".cg")
        part_hi = tl.load(rows + D // 2, mask=mask, other=0.0, cache_modifier=".cg")
        highest = tl.maximum(m, tl.max(part_lse, 1))
        alpha, weight = tl.exp2(m - highest), tl.exp2(part_lse - highest[:, None])
        total = total * alpha + tl.sum(weight, 1)
        lo = lo * alpha[:, None] + tl.sum(part_lo * weight[:, :, None], 1)
        hi = hi * alpha[:, None] + tl.sum(part_hi * weight[:, :, None], 1)
        m = highest
    inverse = (1.0 / total)[:, None]
    return lo * inverse, hi * inverse, m + tl.log2(total)


@triton.jit
def _merge(
    lo, hi, own_lse, partial, lse, arrivals, at, live, dims, real, index, count,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, H: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, FAN: tl.constexpr,
):  # fmt: skip
    """Merge part `index` of a request's `count` parts with the others, if this program is the last.

    Returns the sum, and whether it is the sum of all parts. `at` [M] is the place of the request's first part
    for each head. `arrivals` is the KV head's counter at that part; it counts groups of parts. The
    counters of the parts after it each count the parts of one group.
    """
    fan = tl.where(count <= FAN, FAN, FAN // 2)
    groups, group = tl.cdiv(count, fan), index // fan
    own, first, stride = at + index * HQ, at + group * fan * HQ, HQ + 0 * count
    counter, members = arrivals + (1 + group) * HKV, tl.minimum(count - group * fan, fan)
    levels = tl.where(groups == 1, 1, 2)
    level, whole = 0 * count, False
    while level < levels:
        store_halves(partial + own * D, lo, hi, live, dims, real, D)
        tl.store(lse + own, own_lse, mask=live)
        level += 1
        if _is_last(counter, members):
            lo, hi, own_lse = _merged(partial, lse, first, live, dims, real, stride, members, D, H, M, N)
            tl.debug_barrier()  # every thread has read the parts before their sum is stored over the first
            whole = level == levels
        else:
            level = levels
        own, first, stride, counter, members = first, at, fan * HQ, arrivals, groups
    return lo, hi, whole


@triton.jit
def _angles(new, turn, dims, real, D: tl.constexpr):
    """Load cos and sin [1, H] of row `turn` of the tables."""
    at = turn.to(tl.int64) * (D // 2) + dims
    cos, sin = tl.load(new[2] + at, mask=real, other=0.0), tl.load(new[3] + at, mask=real, other=0.0)
    return cos[None, :], sin[None, :]


@triton.jit
def _turned(lo, hi, angles):
    """Apply `rope` to vectors [M, H] of one position."""
    return rope(lo, hi, tl.broadcast_to(angles[0], lo.shape), tl.broadcast_to(angles[1], lo.shape))


@triton.jit
def _store_new(
    new, norms, smoothing, angles, request, slot, kv_head, buffers, rotation, dims, real,
    HKV: tl.constexpr, D: tl.constexpr, FMT: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Store the newest token's K and V of the KV heads, the rows of a tile, as `kv_write` does."""
    row = tl.arange(0, 2 * TOGETHER)
    which, head, every = row // TOGETHER, kv_head + row % TOGETHER, row >= 0
    is_k = (which == 0)[:, None]
    rows = tl.where(which == 0, new[0] + request * new[4], new[1] + request * new[5]) + head * D
    lo, hi = load_halves(rows, every, dims, real, D)
    lo, hi = lo.to(tl.float32), hi.to(tl.float32)
    k_lo, k_hi = lo, hi
    if norms is not None:
        weight = weight_halves(norms[1], dims, real, D)
        k_lo, k_hi = normed(lo, hi, weight, norms[2], D, new[0].dtype.element_ty)
    k_lo, k_hi = _turned(k_lo, k_hi, angles)
    if smoothing is not None:
        gains = smoothing + (HKV + head) * D
        g_lo, g_hi = load_halves(gains, every, dims, real, D)
        s_lo, s_hi = load_halves(gains + HKV * D, every, dims, real, D)
        k_lo, k_hi = tl.fma(k_lo, g_lo, -s_lo), tl.fma(k_hi, g_hi, -s_hi)
    lo, hi = tl.where(is_k, k_lo, lo), tl.where(is_k, k_hi, hi)
    if rotation is not None:
        lo, hi = into_basis(lo, hi, rotation, dims, real, D)
    FMT.encode(lo, hi, buffers, slot.to(tl.int64) + 0 * row, head, every, which, HKV, D)
    tl.debug_barrier()  # every thread has stored before any loads


@triton.jit
def _query(
    queries, norms, angles, smoothing, kv_head, live, dims, real, rotation, scale,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, FMT: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Load the queries at pointers `queries` [M] in the form that the format's `scores` takes.

    If there are angles, normalize, turn and smooth the queries first as `kv_write` does, except that they
    enter the basis in 16 bits.
    """
    lo, hi = load_halves(queries, live, dims, real, D)
    if angles is not None:
        dtype: tl.constexpr = lo.dtype
        lo, hi = lo.to(tl.float32), hi.to(tl.float32)
        if norms is not None:
            lo, hi = normed(lo, hi, weight_halves(norms[0], dims, real, D), norms[2], D, dtype)
        lo, hi = _turned(lo, hi, angles)
        if smoothing is not None:
            gains = smoothing + (kv_head + tl.arange(0, M) // (M // TOGETHER)) * D
            g_lo, g_hi = load_halves(gains, live, dims, real, D)
            lo, hi = lo * g_lo, hi * g_hi
        if rotation is not None:
            lo, hi = enter_basis(lo, hi, rotation, dims, real, D)
        lo, hi = lo.to(dtype), hi.to(dtype)
    return FMT.query(lo, hi, scale, N, TOGETHER)


@triton.jit
def _store_result(
    lo, hi, result, facts, request, head, live, dims, real, HQ: tl.constexpr, D: tl.constexpr,
    ROOM: tl.constexpr,
):  # fmt: skip
    """Store what the heads [M] of a request attended, halves lo, hi fp32 [M, H], at pointers `result` [M].

    With ROOM above 0, round it to bf16 and store it as `Digits`, one group per head: the codes to `result`,
    the facts to `facts`.
    """
    if ROOM > 0:
        lo, hi = lo.to(tl.bfloat16).to(tl.float32), hi.to(tl.bfloat16).to(tl.float32)
        store_digits_of_halves(lo, hi, result, facts, request + 0 * head, head, live, HQ, ROOM)
    else:
        store_halves(result, lo, hi, live, dims, real, D)


@triton.jit
def _attend_kernel(  # noqa: C901 -- its branches are constants, or shared by all threads
    q, buffers, slot_table, kv_splits, partial, lse, arrivals, rotation, out, scale, stride_q, stride_table,
    new, rope_positions, norms, smoothing, kv_lens, facts, softcap, slopes, sinks,
    G: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, H: tl.constexpr, M: tl.constexpr,
    TILE: tl.constexpr, FMT: tl.constexpr, STAGES: tl.constexpr, FIELDS: tl.constexpr,
    MERGED: tl.constexpr, FAN: tl.constexpr, TOGETHER: tl.constexpr, AHEAD: tl.constexpr,
    NEWEST: tl.constexpr, ROOM: tl.constexpr, launch_pdl: tl.constexpr,
):  # fmt: skip
    """Grid (Hkv / TOGETHER, P).

    partial [P, Hq, D] and lse [P, Hq] take normalized parts. `new` is k, v, cos, sin and the strides of k and
    v, or None if the cache already holds the last token. `rope_positions` are rows of cos and sin, or None.
    `norms` is from `head_norms.checked`. softcap is in base 2, slopes and sinks are not; each may be None.
    NEWEST says that the kernel before writes no tokens but the last. With ROOM above 0, out and facts are
    the tensors of `Digits`.
    """
    EARLY: tl.constexpr = launch_pdl and ROOM > 0
    if EARLY:  # the kernel that reads Digits requests its weights before it waits
        gdc_launch_dependents()
    kv_head, entry = tl.program_id(0) * TOGETHER, tl.program_id(1)
    part = kv_splits + entry * FIELDS  # written at the start of the step, not by the kernel before
    request, table_row = tl.load(part), tl.load(part + 1).to(tl.int64)
    start, end = tl.load(part + 2), tl.load(part + 3)
    index, count = tl.load(part + 4), tl.load(part + 5)
    if request < 0:
        return
    is_last, angles = index == count - 1, None
    dims, real = part_columns(D, FMT.parts, H)
    if new is not None:
        position = tl.maximum(tl.load(kv_lens + request) - 1, 0)
        turn = position if rope_positions is None else tl.load(rope_positions + request)
        angles = _angles(new, turn, dims, real, D)
    if launch_pdl:  # the kernel before writes the query and the last token, which is not loaded ahead
        if (AHEAD == 0) | (not NEWEST) | (is_last & ((new is not None) | (end - start <= AHEAD * TILE))):
            gdc_wait()
    table = slot_table + table_row * stride_table + start + tl.arange(0, TILE)
    row = tl.arange(0, M)
    SHARE: tl.constexpr = M // TOGETHER  # rows of each KV head
    live, head = row % SHARE < G, (kv_head + row // SHARE) * G + row % SHARE
    result = out if ROOM > 0 else out + (request.to(tl.int64) * (HKV * G) + head) * D
    if start >= end:
        nothing = tl.zeros([M, H], tl.float32)
        _store_result(nothing, nothing, result, facts, request, head, live, dims, real, HKV * G, D, ROOM)
        return
    if new is not None:
        if is_last:
            slot = tl.load(slot_table + table_row * stride_table + position)
            _store_new(
                new, norms, smoothing, angles, request.to(tl.int64), slot, kv_head, buffers, rotation,
                dims, real, HKV, D, FMT, TOGETHER,
            )  # fmt: skip
    queries = q + request.to(tl.int64) * stride_q + head * D
    if AHEAD == 0:
        query = _query(
            queries, norms, angles, smoothing, kv_head, live, dims, real, rotation, scale,
            D, M, 1, FMT, TOGETHER,
        )  # fmt: skip
    else:
        nothing = tl.zeros([M, H], q.dtype.element_ty)
        query = FMT.query(nothing, nothing, scale, TILE, TOGETHER)
    # a last tile reads this slot beyond the end; one slot for all programs would make memory a bottleneck
    beyond = tl.load(slot_table + table_row * stride_table + start)
    m, l = tl.full([M], -float("inf"), tl.float32), no_sums(M, TILE)
    acc = FMT.empty(M, H, TILE, TOGETHER)
    if slopes is not None:
        slope = in_base_2(tl.load(slopes + head, mask=live, other=0.0))
        newest = tl.load(kv_lens + request) - 1
    for first in tl.range(start, end, TILE, num_stages=STAGES):
        valid = first + tl.arange(0, TILE) < end
        slots = tl.load(table, mask=valid, other=beyond).to(tl.int64)
        table += TILE
        tile = FMT.load(buffers, slots, valid, kv_head, HKV, D, H, TOGETHER)
        if AHEAD > 0:
            if first == start:  # here, after the loads that the compiler puts before the loop
                if launch_pdl:
                    gdc_wait()
                query = _query(
                    queries, norms, angles, smoothing, kv_head, live, dims, real, rotation, scale,
                    D, M, TILE, FMT, TOGETHER,
                )  # fmt: skip
        if slopes is not None:
            far = (first + tl.arange(0, TILE) - newest).to(tl.float32)
            m, l, acc = online_softmax(
                query, tile, valid, m, l, acc, FMT, softcap, far[:, None] * slope[None, :]
            )
        else:
            m, l, acc = online_softmax(query, tile, valid, m, l, acc, FMT, softcap)
    if launch_pdl and not EARLY:  # earlier, the next kernel's programs would take the places of this one's
        gdc_launch_dependents()
    lo, hi = FMT.finish(acc, TOGETHER)
    sums = all_tokens(l)
    if sinks is not None:  # the first part counts it
        sink = in_base_2(tl.load(sinks + head, mask=live, other=0.0))
        m, kept, sums = with_sink(tl.where(index == 0, sink, -float("inf")), m, sums)
        lo, hi = lo * kept[:, None], hi * kept[:, None]
    inverse = (1.0 / sums)[:, None]
    lo, hi = lo * inverse, hi * inverse
    whole = count == 1
    if count > 1:
        at = (entry - index) * (HKV * G) + head
        lo, hi, whole = _merge(
            lo, hi, m + tl.log2(sums), partial, lse, arrivals + (entry - index) * HKV + kv_head, at, live,
            dims, real, index, count, HKV * G, HKV, D, H, M, MERGED, FAN,
        )  # fmt: skip
    if whole:
        if rotation is not None:
            lo, hi = leave_basis(lo, hi, rotation, dims, real, D, True)
        _store_result(lo, hi, result, facts, request, head, live, dims, real, HKV * G, D, ROOM)


@takes(ref.decode_attention)
def decode_attention(a: Any) -> None:
    """See the package's docstring."""
    B, Hq, D = a.q.shape
    expect(a.out, "B Hq D", a.q.dtype, "out", B=B, Hq=Hq, D=D)
    _launch(a, [a.out], a.newest)


@takes(ref.append_attention)
def append_attention(a: Any) -> None:
    """See the package's docstring."""
    refuse_others(a.format)
    B, _, D = a.q.shape
    Hkv = expect(a.k, "B Hkv D", a.q.dtype, "k", B=B, D=D)["Hkv"]
    expect(a.v, "B Hkv D", a.q.dtype, "v", B=B, Hkv=Hkv, D=D)
    if a.smoothing is not None:
        expect(a.smoothing, "3 Hkv D", torch.float32, "smoothing", Hkv=Hkv, D=D)
    if a.rope_positions is not None:
        expect(a.rope_positions, "B", torch.int32, "rope_positions", B=B)
    new = a.k, a.v, a.cos, a.sin, token_stride(a.k, "k"), token_stride(a.v, "v")
    _launch(a, a.out, True, (new, a.rope_positions, checked(a.q_norm, a.k_norm, a.eps, D), a.smoothing))


def _launch(a: Any, out: Sequence[Tensor], newest: bool, appended: tuple[Any, ...] = (None,) * 4) -> None:
    """Launch the kernel with the arguments of either operator; out is [out] or the tensors of `Digits`.

    `appended` is what the kernel does before: k, v, cos, sin and their strides; rows of cos and sin; norms;
    smoothing.
    """
    q, (new, rope_positions, norms, smoothing) = a.q, appended
    B, Hq, D = expect(q, "B Hq D", name="q").values()
    Hkv = a.kv[0].shape[1]
    rule = AttentionRule(a.scale, a.window, softcap=a.softcap, slopes=a.slopes, sinks=a.sinks)
    for name, lens in {"rows": a.rows, "kv_lens": a.kv_lens}.items():
        expect(lens, "B", torch.int32, name, B=B)
    P = expect(a.kv_splits, f"P {FIELDS}", torch.int32, "kv_splits")["P"]
    for name, given in {"slopes": rule.slopes, "sinks": rule.sinks}.items():
        if given is not None:
            expect(given, "Hq", torch.float32, name, Hq=Hq)
    if B == 0:
        return
    fmt = KV_FORMATS[a.format]
    device: KVDevice = fmt.device
    block = block_of(measured_block(fmt, B, Hq, Hkv), D, q.dtype)
    partial = torch.empty(P, Hq, D, dtype=torch.float32, device=q.device)
    lse = torch.empty(P, Hq, dtype=torch.float32, device=q.device)
    heads = max(DOT_COLUMNS, block.heads * next_power_of_2(Hq // Hkv))
    result, facts = out if len(out) == 2 else (out[0], None)
    if facts is not None and D != GROUP:
        raise ValueError(f"out: expected heads of {GROUP} for Digits, got heads of {D}; pass one tensor")
    kernel = variant(
        _attend_kernel, G=Hq // Hkv, HKV=Hkv, D=D, H=half_width(D, device.parts), M=heads, TILE=block.tokens,
        FMT=device, STAGES=block.stages, FIELDS=FIELDS, FAN=FAN_IN,
        MERGED=min(FAN_IN, max(1, MERGED_ROWS * block.warps // heads)),
        TOGETHER=block.heads, AHEAD=block.stages // 2 if block.ahead else 0, NEWEST=newest,
        ROOM=0 if facts is None else facts.shape[2], num_warps=block.warps,
        maxnreg=block.registers, launch_pdl=overlaps(q.device),
    )  # fmt: skip
    kernel.launch(
        (Hkv // block.heads, P), q, tuple(a.kv), a.slot_table, a.kv_splits, partial, lse,
        _arrivals(next_power_of_2(P * Hkv), q.device), signs(D, q.device) if fmt.rotated else None,
        result, rule.scale * LOG2_E, token_stride(q, "q"), a.slot_table.stride(0), new,
        rope_positions, norms, smoothing, a.kv_lens, facts, rule.softcap * LOG2_E or None, rule.slopes,
        rule.sinks,
    )  # fmt: skip
