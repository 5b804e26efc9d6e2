"""Unquantized K and V on the device: dots in the dtype of the query (fp32 without TF32)."""

import triton
import triton.language as tl

from qrt.quant.kv.device import KVDevice


@triton.jit
def _load(
    buffers, slots, live, head,
    HEADS: tl.constexpr, D: tl.constexpr, H: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    tl.static_assert(TOGETHER == 1)  # one head fills whole lines of memory
    column = tl.arange(0, H)
    token = buffers[0] + (slots * (HEADS * 2 * D) + head * (2 * D))
    k_mask, v_mask = live[:, None], live[None, :]
    if D // 2 != H:
        k_mask, v_mask = k_mask & (column < D // 2)[None, :], v_mask & (column < D // 2)[:, None]
    k, v = token[:, None] + column[None, :], token[None, :] + (D + column)[:, None]
    k_lo, k_hi = tl.load(k, mask=k_mask, other=0.0), tl.load(k + D // 2, mask=k_mask, other=0.0)
    v_lo, v_hi = tl.load(v, mask=v_mask, other=0.0), tl.load(v + D // 2, mask=v_mask, other=0.0)
    return k_lo, k_hi, v_lo, v_hi


@triton.jit
def _decode(tile):
    return tile[0], tile[1], tl.trans(tile[2]), tl.trans(tile[3])


@triton.jit
def _query(lo, hi, scale, N: tl.constexpr, TOGETHER: tl.constexpr):
    return tl.trans(lo), tl.trans(hi), scale


@triton.jit
def _scores(query, tile):
    lo, hi, scale = query
    scores = tl.dot(tile[0].to(lo.dtype), lo, input_precision="ieee")
    return tl.dot(tile[1].to(lo.dtype), hi, scores, input_precision="ieee") * scale


@triton.jit
def _weight(tile, M: tl.constexpr):
    return 0.0


@triton.jit
def _empty(M: tl.constexpr, H: tl.constexpr, N: tl.constexpr, TOGETHER: tl.constexpr):
    return tl.zeros([H, M], tl.float32), tl.zeros([H, M], tl.float32)


@triton.jit
def _accumulate(acc, p, alpha, tile):
    p = p.to(tile[2].dtype)
    lo = tl.dot(tile[2], p, acc[0] * alpha[None, :], input_precision="ieee")
    hi = tl.dot(tile[3], p, acc[1] * alpha[None, :], input_precision="ieee")
    return lo, hi


@triton.jit
def _finish(acc, TOGETHER: tl.constexpr):
    return tl.trans(acc[0]), tl.trans(acc[1])


@triton.jit
def _encode(
    lo, hi, buffers, slots, heads, live, which, HEADS: tl.constexpr, D: tl.constexpr
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
    weight=_weight,
    empty=_empty,
    accumulate=_accumulate,
    finish=_finish,
)
