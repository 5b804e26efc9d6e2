"""Unquantized K and V on the device: dots in the dtype of the query (fp32 without TF32)."""

import triton
import triton.language as tl

from qrt.quant.kv.device import KVDevice


@triton.jit
def _load(buffers, slots, live, head, num_slots, HEADS: tl.constexpr, D: tl.constexpr, H: tl.constexpr):
    column = tl.arange(0, H)
    at = buffers[0] + (slots * (HEADS * 2 * D) + head * (2 * D))[:, None] + column[None, :]
    mask = live[:, None]
    if D // 2 != H:
        mask = mask & (column < D // 2)[None, :]
    k_lo, k_hi = tl.load(at, mask=mask, other=0.0), tl.load(at + D // 2, mask=mask, other=0.0)
    v_lo, v_hi = tl.load(at + D, mask=mask, other=0.0), tl.load(at + D + D // 2, mask=mask, other=0.0)
    return k_lo, k_hi, v_lo, v_hi


@triton.jit
def _decode(tile):
    return tile


@triton.jit
def _query(lo, hi, scale):
    return lo, hi, scale


@triton.jit
def _scores(query, tile):
    lo, hi, scale = query
    k_lo, k_hi = tl.trans(tile[0].to(lo.dtype)), tl.trans(tile[1].to(lo.dtype))
    return tl.dot(hi, k_hi, tl.dot(lo, k_lo, input_precision="ieee"), input_precision="ieee") * scale


@triton.jit
def _headroom(tile):
    return 0.0


@triton.jit
def _empty(M: tl.constexpr, H: tl.constexpr):
    return tl.zeros([M, H], tl.float32), tl.zeros([M, H], tl.float32)


@triton.jit
def _accumulate(acc, p, alpha, tile):
    p = p.to(tile[2].dtype)
    lo = tl.dot(p, tile[2], acc[0] * alpha[:, None], input_precision="ieee")
    hi = tl.dot(p, tile[3], acc[1] * alpha[:, None], input_precision="ieee")
    return lo, hi


@triton.jit
def _finish(acc):
    return acc


@triton.jit
def _encode(
    lo, hi, buffers, slots, heads, live, num_slots, which, HEADS: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    column = tl.arange(0, lo.shape[1])
    at = buffers[0] + (slots * (HEADS * 2 * D) + heads * (2 * D) + which * D)[:, None] + column[None, :]
    mask = live[:, None] & (column < D // 2)[None, :]
    tl.store(at, lo.to(buffers[0].dtype.element_ty), mask=mask)
    tl.store(at + D // 2, hi.to(buffers[0].dtype.element_ty), mask=mask)


DEVICE = KVDevice(
    parts=1,
    encode=_encode,
    load=_load,
    decode=_decode,
    query=_query,
    scores=_scores,
    headroom=_headroom,
    empty=_empty,
    accumulate=_accumulate,
    finish=_finish,
)
