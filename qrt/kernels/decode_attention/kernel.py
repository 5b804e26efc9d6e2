"""Triton kernel of decode_attention: see the package's docstring for the contract.

A program attends one part of one request's tokens for the query heads of one KV head, packed into the
columns of the dot. The last of up to `FAN_IN` parts to arrive merges them by their base-2 log-sum-exp, the
last of the groups so merged merges those, and whoever holds the whole leaves the basis of the cache
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
from qrt.kernels.decode_attention import max_splits
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
FAN_IN = 8  # parts, or groups of parts, that one program merges
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
def _part(kv_len, splits, max_splits, TILE: tl.constexpr):
    """Tokens per part: whole tiles, so that every program but the last runs full ones."""
    return tl.cdiv(tl.cdiv(kv_len, tl.minimum(splits, max_splits)), TILE) * TILE


@triton.jit
def _is_last(arrivals, count):
    """Whether `count` programs have now come here; what they stored before is visible to the last."""
    tl.debug_barrier()  # every thread has stored before this program counts as arrived
    last = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == count - 1
    if last:
        tl.store(arrivals, 0)
    return last


@triton.jit
def _places(at, live, first, stride, begin, count, N: tl.constexpr):
    """Where parts begin..begin+N of `_merged` are, [M, N], and which of them are there."""
    part = begin + tl.arange(0, N)
    return at[:, None] + (first + part * stride)[None, :], live[:, None] & (part < count)[None, :]


@triton.jit
def _merged(
    partial, lse, at, live, dims, real, first, stride, count,
    D: tl.constexpr, H: tl.constexpr, M: tl.constexpr, N: tl.constexpr, FAN: tl.constexpr,
):  # fmt: skip
    """Parts first, first + stride, .. (`count` of them, at most FAN) of the heads at `at` [M]: their sum
    weighted by 2^lse, [M, H] twice, and its lse [M]."""
    places, there = _places(at, live, first, stride, 0, count, FAN)
    known = tl.load(lse + places, mask=there, other=-float("inf"), cache_modifier=".cg")
    m = tl.where(live, tl.max(known, 1), 0.0)  # no NaN in rows that are not there
    total = m + tl.log2(tl.maximum(tl.sum(tl.exp2(known - m[:, None]), 1), 1.0))
    lo, hi = tl.zeros([M, H], tl.float32), tl.zeros([M, H], tl.float32)
    for begin in tl.range(0, count, N, num_stages=2):
        place, inside = _places(at, live, first, stride, begin, count, N)
        part_lse = tl.load(lse + place, mask=inside, other=-float("inf"), cache_modifier=".cg")
        weight = tl.exp2(part_lse - total[:, None])[:, :, None]
        rows = partial + place[:, :, None] * D + dims[None, None, :]
        mask = inside[:, :, None] & real[None, None, :]
        lo += tl.sum(tl.load(rows, mask=mask, other=0.0, cache_modifier=".cg") * weight, 1)
        hi += tl.sum(tl.load(rows + D // 2, mask=mask, other=0.0, cache_modifier=".cg") * weight, 1)
    return lo, hi, total


@triton.jit
def _merge(
    lo, hi, own_lse, partial, lse, arrivals, at, live, dims, real, split, splits,
    D: tl.constexpr, H: tl.constexpr, M: tl.constexpr, N: tl.constexpr, FAN: tl.constexpr,
):  # fmt: skip
    """This program's part -> the sum of all `splits` and whether this program holds it. `arrivals` points
    at this KV head's counters: one of all groups, then one of each."""
    store_halves(partial + (at + split) * D, lo, hi, live, dims, real, D)
    tl.store(lse + at + split, own_lse, mask=live)
    group = split // FAN
    groups, first = tl.cdiv(splits, FAN), group * FAN
    count = tl.minimum(splits - first, FAN)
    whole = False
    if _is_last(arrivals + 1 + group, count):
        lo, hi, total = _merged(partial, lse, at, live, dims, real, first, 1, count, D, H, M, N, FAN)
        whole = groups == 1
        if groups > 1:
            store_halves(partial + (at + first) * D, lo, hi, live, dims, real, D)
            tl.store(lse + at + first, total, mask=live)
            if _is_last(arrivals, groups):
                lo, hi, total = _merged(partial, lse, at, live, dims, real, 0, FAN, groups, D, H, M, N, FAN)
                whole = True
    return lo, hi, whole


@triton.jit(do_not_specialize=["max_splits"])  # it differs with every batch
def _attend_kernel(
    q, buffers, slot_table, rows, kv_lens, num_splits, partial, lse, arrivals, rotation, out, scale,
    stride_q, stride_table, max_splits,
    G: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, H: tl.constexpr, M: tl.constexpr,
    TILE: tl.constexpr, FMT: tl.constexpr, STAGES: tl.constexpr, MERGED: tl.constexpr, FAN: tl.constexpr,
    launch_pdl: tl.constexpr,
):  # fmt: skip
    """grid (B, Hkv, max_splits). partial [B, Hq, max_splits, D] and lse take normalized parts."""
    if launch_pdl:
        gdc_wait()
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_len = tl.load(kv_lens + request)
    part = _part(kv_len, tl.load(num_splits + request), max_splits, TILE)
    start, end = split * part, tl.minimum(split * part + part, kv_len)
    row = tl.arange(0, M)
    live, head = row < G, kv_head * G + row
    dims, real = part_columns(D, FMT.parts, H)
    head_of_all = request.to(tl.int64) * (HKV * G) + head
    if start >= end:
        if split == 0:
            nothing = tl.zeros([M, H], tl.float32)
            store_halves(out + head_of_all * D, nothing, nothing, live, dims, real, D)
        return
    table = slot_table + tl.load(rows + request).to(tl.int64) * stride_table
    lo, hi = load_halves(q + request.to(tl.int64) * stride_q + head * D, live, dims, real, D)
    query = FMT.query(lo, hi, scale)
    m, l = tl.full([M], -float("inf"), tl.float32), no_sums(M, TILE)
    acc = FMT.empty(M, H, TILE)
    table += start + tl.arange(0, TILE)
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
    splits = tl.cdiv(kv_len, part)
    whole = splits == 1
    if splits > 1:
        counters = arrivals + (request * HKV + kv_head) * (tl.cdiv(max_splits, FAN) + 1)
        lo, hi, whole = _merge(
            lo, hi, m + tl.log2(sums), partial, lse, counters, head_of_all * max_splits, live, dims, real,
            split, splits, D, H, M, MERGED, FAN,
        )  # fmt: skip
    if whole:
        if rotation is not None:
            lo, hi = out_of_basis(lo, hi, rotation, dims, real, D)
        store_halves(out + head_of_all * D, lo, hi, live, dims, real, D)


def decode_attention(
    q: Tensor,
    kv: Sequence[Tensor],
    slot_table: Tensor,
    rows: Tensor,
    kv_lens: Tensor,
    num_splits: Tensor,
    format: str,
    scale: float,
) -> Tensor:
    """See the package's docstring."""
    B, Hq, D = expect(q, "B Hq D", name="q").values()
    Hkv = kv[0].shape[1]
    for name, lens in {"rows": rows, "kv_lens": kv_lens, "num_splits": num_splits}.items():
        expect(lens, "B", torch.int32, name, B=B)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if B == 0:
        return out
    fmt = KV_FORMATS[format]
    device: KVDevice = fmt.device()
    splits, block = max_splits(B, Hkv, q.device), block_of(fmt.decode_block, D, q.dtype)
    partial = torch.empty(B, Hq, splits, D, dtype=torch.float32, device=q.device)
    lse = torch.empty(B, Hq, splits, dtype=torch.float32, device=q.device)
    counters = triton.next_power_of_2(B * Hkv * (triton.cdiv(splits, FAN_IN) + 1))
    # a rotation by a dot wants its 16 rows
    least = MIN_HEADS if half_width(D, 1) == D // 2 or not fmt.rotated else MIN_ROWS
    heads = max(least, triton.next_power_of_2(Hq // Hkv))
    _attend_kernel[(B, Hkv, splits)](
        q, tuple(kv), slot_table, rows, kv_lens, num_splits, partial, lse, _arrivals(counters, q.device),
        signs(D, q.device) if fmt.rotated else None, out, scale * math.log2(math.e),
        token_stride(q, "q"), slot_table.stride(0), splits,
        G=Hq // Hkv, HKV=Hkv, D=D, H=half_width(D, device.parts), M=heads, TILE=block.tokens, FMT=device,
        STAGES=block.stages, MERGED=min(FAN_IN, max(1, MERGED_ROWS // heads)), FAN=FAN_IN,
        num_warps=block.warps, maxnreg=block.registers, launch_pdl=overlaps(q.device),
    )  # fmt: skip
    return out
