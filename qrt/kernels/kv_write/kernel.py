"""The Triton kernel of `kv_write`; see the package's docstring for the contract.

A program takes a few vectors (token, head) of q, of k or of v. Their number does not change the order of any
sum over a vector, so a token's bytes do not depend on T. Many tokens in a rotated format go to `many_kernel`
if heads have 64 or 128 channels. It writes the same bytes.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from qrt.checks import expect
from qrt.kernels.device import (
    after_previous,
    half_width,
    into_basis,
    load_halves,
    normed,
    rope,
    signs,
    store_halves,
    token_stride,
    weight_halves,
)
from qrt.kernels.gpu import multiprocessors, overlaps
from qrt.kernels.head_norms import checked
from qrt.kernels.kv_write import ref
from qrt.kernels.kv_write.many_kernel import fits, kv_write_many
from qrt.kernels.launch import variant
from qrt.kernels.op import takes
from qrt.kernels.sizes import cdiv
from qrt.quant.kv import KV_FORMATS
from qrt.quant.kv.device import KVDevice, part_columns

ROWS, WARPS = 8, 1  # few vectors per warp: no registers spill, and no barrier waits
FEW_ROWS = 2  # per program of few tokens, where latency counts more than the number of programs
FEW_TOKENS = 64
OVERLAPPED_PER_SM = 4  # programs; more of them would wait in the way of those that run
DOT_ROWS = 16  # the least of a tensor-core dot, which turns heads whose width is not a power of two


@triton.jit
def _pair(lo, hi, wanted, dims, real, D: tl.constexpr):
    """Load the half vectors fp32 [M, H] at pointers lo and hi [M], zero where not `wanted`."""
    mask = wanted[:, None] & real[None, :] if dims.shape[0] != D // 2 else wanted[:, None]
    lo, hi = lo[:, None] + dims[None, :], hi[:, None] + dims[None, :]
    return tl.load(lo, mask=mask, other=0.0), tl.load(hi, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["tokens"])
def _kv_write_kernel(
    q, k, v, cos, sin, positions, slots, buffers, smoothing, rotation, norms, tokens,
    stride_q, stride_k, stride_v,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, H: tl.constexpr, M: tl.constexpr,
    FMT: tl.constexpr, launch_pdl: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of q, then of k, then of v."""
    tile = tl.program_id(0)
    q_tiles, kv_tiles = tl.cdiv(tokens * HQ, M), tl.cdiv(tokens * HKV, M)
    is_q, is_v = tile < q_tiles, tile >= q_tiles + kv_tiles
    x = tl.where(is_q, q, tl.where(is_v, v, k))
    stride = tl.where(is_q, stride_q, tl.where(is_v, stride_v, stride_k))
    first = tl.where(is_q, 0, tl.where(is_v, q_tiles + kv_tiles, q_tiles))

    row = (tile - first) * M + tl.arange(0, M)
    token, head = tl.where(is_q, row // HQ, row // HKV), tl.where(is_q, row % HQ, row % HKV)
    live = token < tokens
    dims, real = part_columns(D, FMT.parts, H)
    if norms is not None:
        weight = weight_halves(tl.where(is_q, norms[0], norms[1]), dims, real, D)
    after_previous(launch_pdl)
    rows = x + token.to(tl.int64) * stride + head * D
    turned = live & (is_v == 0)
    position = tl.load(positions + token, mask=turned, other=0).to(tl.int64)
    lo, hi = load_halves(rows, live, dims, real, D)
    if smoothing is not None:  # rows: gains of q, gains of k, shifts of k
        gains = smoothing + tl.where(is_q, head // (HQ // HKV), HKV + head) * D
        g_lo, g_hi = _pair(gains, gains + D // 2, turned, dims, real, D)
        shifts = gains + HKV * D
        s_lo, s_hi = _pair(shifts, shifts + D // 2, turned & (is_q == 0), dims, real, D)
    c, s = _pair(cos + position * (D // 2), sin + position * (D // 2), turned, dims, real, D)

    lo, hi = lo.to(tl.float32), hi.to(tl.float32)
    if is_v == 0:
        if norms is not None:
            lo, hi = normed(lo, hi, weight, norms[2], D, q.dtype.element_ty)
        lo, hi = rope(lo, hi, c, s)
        if smoothing is not None:
            lo, hi = tl.fma(lo, g_lo, -s_lo), tl.fma(hi, g_hi, -s_hi)
    if rotation is not None:
        lo, hi = into_basis(lo, hi, rotation, dims, real, D)
    store_halves(rows, lo, hi, live, dims, real, D)
    if tile >= q_tiles:
        slot = tl.load(slots + token, mask=live, other=0).to(tl.int64)
        FMT.encode(lo, hi, buffers, slot, head, live, is_v.to(tl.int32), HKV, D)


@takes(ref.kv_write)
def kv_write(a: Any) -> None:
    """See the package's docstring."""
    T, Hq, D = expect(a.q, "T Hq D", name="q").values()
    Hkv = expect(a.k, "T Hkv D", a.q.dtype, "k", T=T, D=D)["Hkv"]
    expect(a.v, "T Hkv D", a.q.dtype, "v", T=T, Hkv=Hkv, D=D)
    if a.smoothing is not None:
        expect(a.smoothing, "3 Hkv D", torch.float32, "smoothing", Hkv=Hkv, D=D)
    norms = checked(a.q_norm, a.k_norm, a.eps, D)
    if T == 0:
        return
    fmt = KV_FORMATS[a.format]
    if T > FEW_TOKENS and fits(fmt, D):
        kv_write_many(a, fmt, norms)
        return
    device: KVDevice = fmt.device
    H = half_width(D, device.parts)
    rows = ROWS if D <= 128 else ROWS // 2
    if fmt.rotated:
        rows = DOT_ROWS if H != D // 2 else FEW_ROWS if T <= FEW_TOKENS else rows
    grid = (cdiv(T * Hq, rows) + 2 * cdiv(T * Hkv, rows),)
    kernel = variant(
        _kv_write_kernel, HQ=Hq, HKV=Hkv, D=D, H=H, M=rows, FMT=device, num_warps=WARPS,
        launch_pdl=overlaps(a.q.device) and grid[0] <= OVERLAPPED_PER_SM * multiprocessors(a.q.device),
    )  # fmt: skip
    kernel.launch(
        grid, a.q, a.k, a.v, a.cos, a.sin, a.positions, a.slots, tuple(a.kv), a.smoothing,
        signs(D, a.q.device) if fmt.rotated else None, norms, T,
        token_stride(a.q, "q"), token_stride(a.k, "k"), token_stride(a.v, "v"),
    )  # fmt: skip
