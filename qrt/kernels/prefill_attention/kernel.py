"""Triton kernel of prefill_attention: see the package's docstring for the contract.

A program takes a tile of (token, query head of one KV head) pairs of one chunk through the cached tokens
it may see, by the KV format's device functions, then through the chunk's own k and v, which are attended
as the unquantized format attends its tiles. Both are in the basis of the cache, so one online softmax runs
over all of it, and the epilogue turns the sum back (FlashAttention-2, arXiv:2307.08691).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qrt.checks import expect
from qrt.kernels.device import (
    cross,
    half_width,
    load_halves,
    load_signs,
    online_softmax,
    rotate,
    signs,
    store_halves,
    token_stride,
)
from qrt.quant.kv import KV_FORMATS
from qrt.quant.kv.device import KVDevice, part_columns
from qrt.quant.kv.fp16.device import DEVICE as RAW


class Tile(NamedTuple):
    """Rows (token, head) and tokens of a program's dot, and how it is compiled."""

    rows: int
    tokens: int
    stages: int
    warps: int


def _tile(head_dim: int, dtype: torch.dtype) -> Tile:
    if dtype is torch.float32:  # exact dots run outside the tensor cores: keep the accumulators small
        return Tile(rows=32, tokens=32 if head_dim <= 128 else 16, stages=1, warps=8)
    return Tile(rows=128, tokens=64 if head_dim <= 128 else 32, stages=2, warps=8)


@triton.jit
def _attend_cached(
    query, buffers, table, cached, position, num_slots, M: tl.constexpr, HKV: tl.constexpr,
    D: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr, FMT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend positions 0..cached-1 of the cache, row r those up to position[r]."""
    m, l, acc = tl.full([M], -float("inf"), tl.float32), tl.zeros([M], tl.float32), FMT.empty(M, H)
    kv_head = tl.program_id(1)
    for first in tl.range(0, cached, TILE, num_stages=STAGES):
        key = first + tl.arange(0, TILE)
        slots = tl.load(table + key, mask=key < cached, other=0).to(tl.int64)
        tile = FMT.load(buffers, slots, key < cached, kv_head, num_slots, HKV, D, H)
        visible = (key < cached)[None, :] & (key[None, :] <= position[:, None])
        m, l, acc = online_softmax(query, tile, visible, m, l, acc, FMT)
    return m, l, FMT.finish(acc)


@triton.jit
def _attend_own(
    query, k, v, seen, token, dims, real, state, stride_k, stride_v,
    D: tl.constexpr, TILE: tl.constexpr, RAW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Go on from `state` through the chunk's first `seen` k and v, row r those up to token[r]."""
    m, l, acc = state
    for first in tl.range(0, seen, TILE, num_stages=STAGES):
        key = first + tl.arange(0, TILE)
        k_lo, k_hi = load_halves(k + key.to(tl.int64) * stride_k, key < seen, dims, real, D)
        v_lo, v_hi = load_halves(v + key.to(tl.int64) * stride_v, key < seen, dims, real, D)
        visible = (key < seen)[None, :] & (key[None, :] <= token[:, None])
        m, l, acc = online_softmax(query, (k_lo, k_hi, v_lo, v_hi), visible, m, l, acc, RAW)
    return m, l, acc


@triton.jit
def _prefill_kernel(
    q, k, v, buffers, slot_table, rows, query_start, kv_lens, rotation, out, scale, num_slots,
    stride_q, stride_k, stride_v, stride_table, ATTEND_CACHE: tl.constexpr,
    G: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, H: tl.constexpr, M: tl.constexpr,
    TILE: tl.constexpr, FMT: tl.constexpr, RAW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """grid (tiles of the longest chunk, Hkv, B); the last tiles see most and start first."""
    kv_head, request = tl.program_id(1), tl.program_id(2)
    start = tl.load(query_start + request).to(tl.int64)
    length = (tl.load(query_start + request + 1) - start).to(tl.int32)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    if first >= length * G:
        return
    row = first + tl.arange(0, M)
    token, head, live = row // G, kv_head * G + row % G, row < length * G
    seen = tl.minimum((first + M - 1) // G + 1, length)
    dims, real = part_columns(D, FMT.parts, H)
    lo, hi = load_halves(q + (start + token) * stride_q + head * D, live, dims, real, D)

    prefix = tl.load(kv_lens + request) - length
    cached = prefix + seen if ATTEND_CACHE else prefix
    table = slot_table + tl.load(rows + request).to(tl.int64) * stride_table
    query = FMT.query(lo, hi, scale)
    m, l, acc = _attend_cached(
        query, buffers, table, cached, prefix + token, num_slots, M, HKV, D, H, TILE, FMT, STAGES
    )
    if not ATTEND_CACHE:
        k += start * stride_k + kv_head * D
        v += start * stride_v + kv_head * D
        query = RAW.query(lo, hi, scale)
        m, l, acc = _attend_own(
            query, k, v, seen, token, dims, real, (m, l, acc), stride_k, stride_v, D, TILE, RAW, STAGES
        )
    lo, hi = acc[0] / l[:, None], acc[1] / l[:, None]
    if rotation is not None:
        matrix = load_signs(rotation[0], dims, real, D, True)
        lo, hi = cross(lo, hi, D)
        lo, hi = rotate(lo, matrix, rotation[1]), rotate(hi, matrix, rotation[1])
    store_halves(out + ((start + token) * (HKV * G) + head) * D, lo, hi, live, dims, real, D)


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Sequence[Tensor],
    slot_table: Tensor,
    rows: Tensor,
    query_start: Tensor,
    kv_lens: Tensor,
    max_query_len: int,
    attend_cache: bool,
    format: str,
    scale: float,
) -> Tensor:
    """See the package's docstring."""
    T, Hq, D = expect(q, "T Hq D", name="q").values()
    Hkv = expect(k, "T Hkv D", q.dtype, "k", T=T, D=D)["Hkv"]
    expect(v, "T Hkv D", q.dtype, "v", T=T, Hkv=Hkv, D=D)
    B = expect(kv_lens, "B", torch.int32, "kv_lens")["B"]
    expect(rows, "B", torch.int32, "rows", B=B)
    expect(query_start, "N", torch.int32, "query_start", N=B + 1)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if T == 0:
        return out
    fmt = KV_FORMATS[format]
    device: KVDevice = fmt.device()
    tile = _tile(D, q.dtype)
    _prefill_kernel[(triton.cdiv(max_query_len * (Hq // Hkv), tile.rows), Hkv, B)](
        q, k, v, tuple(kv), slot_table, rows, query_start, kv_lens,
        signs(D, q.device) if fmt.rotated else None, out, scale * math.log2(math.e), kv[0].shape[0],
        token_stride(q, "q"), token_stride(k, "k"), token_stride(v, "v"), slot_table.stride(0),
        ATTEND_CACHE=attend_cache, G=Hq // Hkv, HKV=Hkv, D=D, H=half_width(D, device.parts),
        M=tile.rows, TILE=tile.tokens, FMT=device, RAW=RAW, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out
