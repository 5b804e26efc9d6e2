"""Triton kernel of decode_attention: see the package's docstring for the contract.

A program attends one part (`plan`) of one request's tokens for the query heads of one KV head, packed into
the columns of the dot. The last of up to `FAN_IN` parts to arrive merges them by their base-2 log-sum-exp,
the last of the groups so merged merges those, and whoever holds the whole leaves the basis of the cache
(research/kv.md section 2.5). Parts are added in their order, so results do not depend on timing.
"""

import math
from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qrt.checks import expect
from qrt.kernels.decode_attention.plan import CUTS, FIELDS
from qrt.kernels.device import (
    half_width,
    load_halves,
    online_softmax,
    out_of_basis,
    signs,
    store_halves,
    token_stride,
)
from qrt.kernels.gpu import overlaps
from qrt.quant.kv import KV_FORMATS
from qrt.quant.kv.base import DecodeBlock
from qrt.quant.kv.device import KVDevice, all_tokens, no_sums, part_columns

MIN_HEADS = 8  # columns of a tensor-core dot; unused ones cost nothing
MIN_ROWS = 16  # rows of one
FAN_IN = 16  # parts that one program merges; it merges as many groups as there can be
MERGED_ROWS = 32  # heads times parts that are read at a time while merging


@cache  # CUDA graphs hold its address
def _arrivals(counters: int, device: torch.device) -> Tensor:
    """Zero between launches, so that launches that follow each other may share it."""
    return torch.zeros(counters, dtype=torch.int32, device=device)


def block_of(measured: DecodeBlock, head_dim: int, dtype: torch.dtype) -> DecodeBlock:
    """The format's block, measured for heads of 64 and 128 in 16 bits, or one that any head fits."""
    if dtype is torch.float32:  # exact dots run outside the tensor cores
        return DecodeBlock(tokens=32, stages=3, warps=4, registers=255)
    return measured if head_dim <= 128 else DecodeBlock(tokens=32, stages=3, warps=2, registers=255)


@triton.jit
def _is_last(arrivals, count):
    """Whether `count` programs have now come here; what they stored before is visible to the last."""
    tl.debug_barrier()  # every thread has stored before this program counts as arrived
    last = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == count - 1
    if last:
        tl.store(arrivals, 0)
    return last


@triton.jit
def _places(at, live, stride, begin, count, N: tl.constexpr):
    """Where parts begin..begin+N of `_merged` are, [M, N], and which of them are there."""
    part = begin + tl.arange(0, N)
    return at[:, None] + (part * stride)[None, :], live[:, None] & (part < count)[None, :]


@triton.jit
def _merged(
    partial, lse, at, live, dims, real, stride, count,
    D: tl.constexpr, H: tl.constexpr, M: tl.constexpr, N: tl.constexpr, FAN: tl.constexpr,
):  # fmt: skip
    """What lies at `at` [M], at + stride, .. (`count` of them, at most FAN): the sum weighted by 2^lse,
    [M, H] twice, and its lse [M]."""
    places, there = _places(at, live, stride, 0, count, FAN)
    known = tl.load(lse + places, mask=there, other=-float("inf"), cache_modifier=".cg")
    m = tl.where(live, tl.max(known, 1), 0.0)  # no NaN in rows that are not there
    total = m + tl.log2(tl.maximum(tl.sum(tl.exp2(known - m[:, None]), 1), 1.0))
    lo, hi = tl.zeros([M, H], tl.float32), tl.zeros([M, H], tl.float32)
    for begin in tl.range(0, count, N, num_stages=2):
        place, inside = _places(at, live, stride, begin, count, N)
        part_lse = tl.load(lse + place, mask=inside, other=-float("inf"), cache_modifier=".cg")
        weight = tl.exp2(part_lse - total[:, None])[:, :, None]
        rows = partial + place[:, :, None] * D + dims[None, None, :]
        mask = inside[:, :, None] & real[None, None, :]
        lo += tl.sum(tl.load(rows, mask=mask, other=0.0, cache_modifier=".cg") * weight, 1)
        hi += tl.sum(tl.load(rows + D // 2, mask=mask, other=0.0, cache_modifier=".cg") * weight, 1)
    return lo, hi, total


@triton.jit
def _merge(
    lo, hi, own_lse, partial, lse, arrivals, at, live, dims, real, index, count,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, H: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, FAN: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Part `index` of the `count` of a request -> the sum of all and whether this program holds it.

    `at` [M] is where the request's first part of each head is, `arrivals` the KV head's counter there: it
    counts groups of FAN parts; those of the following parts count the parts of one group each.
    """
    group = index // FAN
    groups, first = tl.cdiv(count, FAN), at + group * FAN * HQ
    store_halves(partial + (at + index * HQ) * D, lo, hi, live, dims, real, D)
    tl.store(lse + at + index * HQ, own_lse, mask=live)
    whole = False
    members = tl.minimum(count - group * FAN, FAN)
    if _is_last(arrivals + (1 + group) * HKV, members):
        lo, hi, total = _merged(partial, lse, first, live, dims, real, HQ, members, D, H, M, N, FAN)
        whole = groups == 1
        if groups > 1:
            store_halves(partial + first * D, lo, hi, live, dims, real, D)
            tl.store(lse + first, total, mask=live)
            if _is_last(arrivals, groups):
                lo, hi, total = _merged(
                    partial, lse, at, live, dims, real, FAN * HQ, groups, D, H, M, N, GROUPS
                )  # fmt: skip
                whole = True
    return lo, hi, whole


@triton.jit
def _attend_kernel(
    q, buffers, slot_table, parts, partial, lse, arrivals, rotation, out, scale, stride_q, stride_table,
    G: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, H: tl.constexpr, M: tl.constexpr,
    TILE: tl.constexpr, FMT: tl.constexpr, STAGES: tl.constexpr, FIELDS: tl.constexpr,
    MERGED: tl.constexpr, FAN: tl.constexpr, GROUPS: tl.constexpr, launch_pdl: tl.constexpr,
):  # fmt: skip
    """grid (Hkv, P). partial [P, Hq, D] and lse [P, Hq] take normalized parts."""
    kv_head, entry = tl.program_id(0), tl.program_id(1)
    part = parts + entry * FIELDS  # of the step, not of the kernel before
    request, table_row = tl.load(part), tl.load(part + 1).to(tl.int64)
    start, end = tl.load(part + 2), tl.load(part + 3)
    index, count = tl.load(part + 4), tl.load(part + 5)
    if request < 0:
        return
    if launch_pdl:
        gdc_wait()
    row = tl.arange(0, M)
    live, head = row < G, kv_head * G + row
    dims, real = part_columns(D, FMT.parts, H)
    result = out + (request.to(tl.int64) * (HKV * G) + head) * D
    if start >= end:
        nothing = tl.zeros([M, H], tl.float32)
        store_halves(result, nothing, nothing, live, dims, real, D)
        return
    lo, hi = load_halves(q + request.to(tl.int64) * stride_q + head * D, live, dims, real, D)
    query = FMT.query(lo, hi, scale)
    m, l = tl.full([M], -float("inf"), tl.float32), no_sums(M, TILE)
    acc = FMT.empty(M, H, TILE)
    table = slot_table + table_row * stride_table + start + tl.arange(0, TILE)
    for first in tl.range(start, end, TILE, num_stages=STAGES):
        valid = first + tl.arange(0, TILE) < end
        slots = tl.load(table, mask=valid, other=0).to(tl.int64)
        table += TILE
        tile = FMT.load(buffers, slots, valid, kv_head, HKV, D, H)
        m, l, acc = online_softmax(query, tile, valid, m, l, acc, FMT)
    if launch_pdl:  # not earlier: the next kernel's programs would take the places of this one's
        gdc_launch_dependents()
    lo, hi = FMT.finish(acc)
    sums = all_tokens(l)
    lo, hi = lo / sums[:, None], hi / sums[:, None]
    whole = count == 1
    if count > 1:
        at = (entry - index) * (HKV * G) + head
        lo, hi, whole = _merge(
            lo, hi, m + tl.log2(sums), partial, lse, arrivals + (entry - index) * HKV + kv_head, at, live,
            dims, real, index, count, HKV * G, HKV, D, H, M, MERGED, FAN, GROUPS,
        )  # fmt: skip
    if whole:
        if rotation is not None:
            lo, hi = out_of_basis(lo, hi, rotation, dims, real, D)
        store_halves(result, lo, hi, live, dims, real, D)


def decode_attention(
    q: Tensor,
    kv: Sequence[Tensor],
    slot_table: Tensor,
    rows: Tensor,
    kv_lens: Tensor,
    parts: Tensor,
    format: str,
    scale: float,
) -> Tensor:
    """See the package's docstring."""
    B, Hq, D = expect(q, "B Hq D", name="q").values()
    Hkv = kv[0].shape[1]
    for name, lens in {"rows": rows, "kv_lens": kv_lens}.items():
        expect(lens, "B", torch.int32, name, B=B)
    P = expect(parts, f"P {FIELDS}", torch.int32, "parts")["P"]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if B == 0:
        return out
    fmt = KV_FORMATS[format]
    device: KVDevice = fmt.device()
    block = block_of(fmt.block(B), D, q.dtype)
    partial = torch.empty(P, Hq, D, dtype=torch.float32, device=q.device)
    lse = torch.empty(P, Hq, dtype=torch.float32, device=q.device)
    # a rotation by a dot wants its 16 rows
    least = MIN_HEADS if half_width(D, 1) == D // 2 or not fmt.rotated else MIN_ROWS
    heads = max(least, triton.next_power_of_2(Hq // Hkv))
    _attend_kernel[(Hkv, P)](
        q, tuple(kv), slot_table, parts, partial, lse, _arrivals(triton.next_power_of_2(P * Hkv), q.device),
        signs(D, q.device) if fmt.rotated else None, out, scale * math.log2(math.e),
        token_stride(q, "q"), slot_table.stride(0),
        G=Hq // Hkv, HKV=Hkv, D=D, H=half_width(D, device.parts), M=heads, TILE=block.tokens, FMT=device,
        STAGES=block.stages, FIELDS=FIELDS, MERGED=min(FAN_IN, max(1, MERGED_ROWS // heads)), FAN=FAN_IN,
        GROUPS=triton.cdiv(CUTS[1], FAN_IN), num_warps=block.warps, maxnreg=block.registers,
        launch_pdl=overlaps(q.device),
    )  # fmt: skip
    return out
