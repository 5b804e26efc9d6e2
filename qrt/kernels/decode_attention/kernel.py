"""Triton kernels of decode_attention: see the package's docstring for the contract.

A program of the first kernel attends one part of one request's tokens for the query heads of one KV head,
packed into the rows of the dot. The second kernel merges the parts by their base-2 log-sum-exp and leaves
the basis of the cache (research/kv.md section 2.5).
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from qrt.checks import expect
from qrt.kernels.decode_attention import max_splits
from qrt.kernels.device import (
    after_previous,
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
from qrt.quant.kv.device import KVDevice, part_columns

MIN_HEADS = 8  # columns of a tensor-core dot; unused ones cost nothing
MIN_ROWS = 16  # rows of one
MERGE_SPLITS = 16  # parts merged at a time
MERGE_HEADS = (1, 4)  # heads a program merges: few and many in all
MANY_HEADS = 2048
MERGE_WARPS = 4


def block_of(measured: DecodeBlock, head_dim: int, dtype: torch.dtype) -> DecodeBlock:
    """The format's block, measured for heads of 64 and 128 in 16 bits, or one that any head fits."""
    if dtype is torch.float32:  # exact dots run outside the tensor cores
        return DecodeBlock(tokens=32, stages=3, warps=4, registers=255)
    return measured if head_dim <= 128 else DecodeBlock(tokens=32, stages=3, warps=2, registers=255)


@triton.jit
def _part(kv_len, splits, max_splits, TILE: tl.constexpr):
    """Tokens per part: whole tiles, so that every program but the last runs full ones."""
    return tl.cdiv(tl.cdiv(kv_len, tl.minimum(splits, max_splits)), TILE) * TILE


@triton.jit(do_not_specialize=["max_splits"])  # it differs with every batch
def _attend_kernel(
    q, buffers, slot_table, rows, kv_lens, num_splits, partial, lse, scale, num_slots,
    stride_q, stride_table, max_splits,
    G: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, H: tl.constexpr, M: tl.constexpr,
    TILE: tl.constexpr, FMT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """grid (B, Hkv, max_splits); writes partial [B, Hq, max_splits, D], each part normalized, and lse."""
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_len = tl.load(kv_lens + request)
    part = _part(kv_len, tl.load(num_splits + request), max_splits, TILE)
    start, end = split * part, tl.minimum(split * part + part, kv_len)
    if start >= end:
        return
    row = tl.arange(0, M)
    live, head = row < G, kv_head * G + row
    dims, real = part_columns(D, FMT.parts, H)
    lo, hi = load_halves(q + request.to(tl.int64) * stride_q + head * D, live, dims, real, D)
    query = FMT.query(lo, hi, scale)
    m, l = tl.full([M], -float("inf"), tl.float32), tl.zeros([TILE, M], tl.float32)
    acc = FMT.empty(M, H, TILE)
    table = slot_table + tl.load(rows + request).to(tl.int64) * stride_table
    for first in tl.range(start, end, TILE, num_stages=STAGES):
        token = first + tl.arange(0, TILE)
        valid = token < end
        slots = tl.load(table + token, mask=valid, other=0).to(tl.int64)
        tile = FMT.load(buffers, slots, valid, kv_head, num_slots, HKV, D, H)
        m, l, acc = online_softmax(query, tile, valid, m, l, acc, FMT)
    lo, hi = FMT.finish(acc)
    l = tl.sum(l, 0)
    at = (request.to(tl.int64) * (HKV * G) + head) * max_splits + split
    store_halves(partial + at * D, lo / l[:, None], hi / l[:, None], live, dims, real, D)
    tl.store(lse + at, m + tl.log2(l), mask=live)


@triton.jit(do_not_specialize=["max_splits"])
def _merge_kernel(
    partial, lse, kv_lens, num_splits, rotation, out, max_splits,
    HQ: tl.constexpr, D: tl.constexpr, H: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, N: tl.constexpr,
    launch_pdl: tl.constexpr,
):  # fmt: skip
    """grid (B, cdiv(Hq, M)): out = sum_s 2^lse[s] partial[s] / sum_s 2^lse[s], back in the model's basis."""
    after_previous(launch_pdl)
    request, head = tl.program_id(0), tl.program_id(1) * M + tl.arange(0, M)
    kv_len = tl.load(kv_lens + request)
    part = _part(kv_len, tl.load(num_splits + request), max_splits, TILE)
    splits = tl.cdiv(kv_len, tl.maximum(part, 1))
    at = request.to(tl.int64) * HQ + head
    dims, real = part_columns(D, 1, H)
    lo, hi = tl.zeros([M, H], tl.float32), tl.zeros([M, H], tl.float32)
    m, l = tl.full([M], -float("inf"), tl.float32), tl.zeros([M], tl.float32)
    for first in range(0, splits, N):
        split = first + tl.arange(0, N)
        live = (head < HQ)[:, None] & (split < splits)[None, :]
        place = at[:, None] * max_splits + split[None, :]
        part_lse = tl.load(lse + place, mask=live, other=-float("inf"))
        m_new = tl.maximum(m, tl.max(part_lse, 1))
        m_new = tl.where(head < HQ, m_new, 0.0)  # no NaN in rows that are not there
        alpha, weight = tl.exp2(m - m_new), tl.exp2(part_lse - m_new[:, None])
        rows = partial + place[:, :, None] * D + dims[None, None, :]
        mask = live[:, :, None] & real[None, None, :]
        part_lo = tl.load(rows, mask=mask, other=0.0) * weight[:, :, None]
        part_hi = tl.load(rows + D // 2, mask=mask, other=0.0) * weight[:, :, None]
        lo, hi = lo * alpha[:, None] + tl.sum(part_lo, 1), hi * alpha[:, None] + tl.sum(part_hi, 1)
        m, l = m_new, l * alpha + tl.sum(weight, 1)
    norm = 1.0 / tl.maximum(l, 1.0)[:, None]  # l is at least 1 unless there is no token
    if rotation is not None:
        lo, hi = out_of_basis(lo, hi, rotation, dims, real, D)
    store_halves(out + at * D, lo * norm, hi * norm, head < HQ, dims, real, D)


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
    _attend_kernel[(B, Hkv, splits)](
        q, tuple(kv), slot_table, rows, kv_lens, num_splits, partial, lse, scale * math.log2(math.e),
        kv[0].shape[0], token_stride(q, "q"), slot_table.stride(0), splits,
        G=Hq // Hkv, HKV=Hkv, D=D, H=half_width(D, device.parts),
        M=max(MIN_HEADS, triton.next_power_of_2(Hq // Hkv)),
        TILE=block.tokens, FMT=device, STAGES=block.stages, num_warps=block.warps, maxnreg=block.registers,
    )  # fmt: skip
    # a rotation by a dot wants its 16 rows
    merged = MERGE_HEADS[B * Hq >= MANY_HEADS] if half_width(D, 1) == D // 2 or not fmt.rotated else MIN_ROWS
    _merge_kernel[(B, triton.cdiv(Hq, merged))](
        partial, lse, kv_lens, num_splits, signs(D, q.device) if fmt.rotated else None, out,
        splits, HQ=Hq, D=D, H=half_width(D, 1), M=merged, TILE=block.tokens,
        N=min(MERGE_SPLITS, triton.next_power_of_2(splits)), num_warps=MERGE_WARPS,
        launch_pdl=overlaps(q.device),
    )  # fmt: skip
    return out
