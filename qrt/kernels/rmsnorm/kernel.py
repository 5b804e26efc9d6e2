"""RMSNorm and LayerNorm in one pass: a program holds whole rows in registers, several if K is a short head.

Rows may have gaps in memory, with one stride for tokens and one for heads. Results are dense.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from qrt.kernels.all_reduce.device import all_reduced, words_of
from qrt.kernels.device import after_previous
from qrt.kernels.gpu import overlaps
from qrt.kernels.launch import COMPILED, variant
from qrt.kernels.peer_memory import ranks_of
from qrt.kernels.sizes import cdiv, next_power_of_2
from qrt.kernels.tensor_parallel import EXACT_TOKENS
from qrt.quant.device import GROUP, store_digits, token_codes, token_scale
from qrt.quant.digits import Digits

_BLOCK_ELEMENTS = 2048  # rows shorter than this share a program


@triton.jit
def product(a, b, ASM: tl.constexpr):
    """Multiply fp32 by fp32, for a product that is rounded to 16 bits and then added.

    Of a * b and an addition the compiler would make one operation in 16 bits, which leaves out the rounding.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return a * b


@triton.jit
def _normal(x, weight, eps, K: tl.constexpr, WIDE: tl.constexpr, ADDED: tl.constexpr, ASM: tl.constexpr):
    """Return the norm of rows x [M, BLOCK_K], 0 beyond K; a WIDE weight multiplies before it is rounded.

    ADDED: what is returned is added to something.
    """
    wide = x.to(tl.float32)
    mean = tl.sum(wide * wide, 1) / K
    normal = wide * tl.rsqrt(mean + eps)[:, None]
    if not WIDE:
        normal = normal.to(x.dtype).to(tl.float32)
    if ADDED:
        return product(normal, tl.broadcast_to(weight[None, :], normal.shape), ASM).to(x.dtype)
    else:
        return (normal * weight[None, :]).to(x.dtype)


@triton.jit(do_not_specialize=["ROWS"])
def _rmsnorm(  # noqa: C901 -- its branches are constants
    X, IDS, RESIDUAL, WEIGHT, BIAS, INNER, Y, SCALES, PEERS, ROWS, HEADS, token_stride, head_stride,
    residual_stride, eps, inner_eps, factor,
    K: tl.constexpr, SHARES: tl.constexpr, INT8: tl.constexpr, ROOM: tl.constexpr, ASM: tl.constexpr,
    CENTRED: tl.constexpr, RANKS: tl.constexpr, WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr, launch_pdl: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(ROWS, BLOCK_ROWS),): row r is head r % HEADS of token t = r // HEADS.

    The token's row in X is t, or IDS[t] if there are IDS. With SHARES, X [SHARES, ROWS, K] is summed first,
    with PEERS over RANKS ranks too, which see each other's sums in fp32 if WIDE. With INNER, its norm with
    this weight takes the place of the row; with a factor, that times the factor. With IDS, RESIDUAL receives
    the row; without, the row is added to it. Without a WEIGHT the sum is not normalized, unless CENTRED: then
    the norm is LayerNorm, with WEIGHT and BIAS if they are there. Y may be absent. With INT8, it takes codes.
    With ROOM above 0, Y and SCALES are the tensors of `Digits`.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    k = tl.arange(0, BLOCK_K)
    inside = (row < ROWS)[:, None] & (k < K)[None, :]
    if WEIGHT is not None:
        weight = tl.load(WEIGHT + k, mask=k < K, other=0.0).to(tl.float32)
    if BIAS is not None:
        bias = tl.load(BIAS + k, mask=k < K, other=0.0).to(tl.float32)
    if INNER is not None:
        inner = tl.load(INNER + k, mask=k < K, other=0.0).to(tl.float32)
    if PEERS is not None:
        words = words_of(PEERS, RANKS)
    if launch_pdl and IDS is not None:  # begins a step: no later kernel starts before `token_inputs` is done
        gdc_wait()
    after_previous(launch_pdl)
    token = row // HEADS
    if IDS is not None:
        token = tl.load(IDS + token, mask=row < ROWS, other=0)
    start = token * token_stride + row % HEADS * head_stride
    x = tl.load(X + start[:, None] + k[None, :], mask=inside, other=0.0)
    for s in tl.static_range(1, SHARES):
        share = X + tl.cast(ROWS, tl.int64) * (s * K)
        x += tl.load(share + start[:, None] + k[None, :], mask=inside, other=0.0)
    DTYPE: tl.constexpr = Y.dtype.element_ty if RESIDUAL is None else RESIDUAL.dtype.element_ty
    if PEERS is not None:
        x = all_reduced(x, words, row, k, inside, RANKS, tl.float32 if WIDE else DTYPE, ASM)
    if SHARES > 0 or PEERS is not None:
        x = x.to(DTYPE)
    if INNER is not None:
        x = _normal(x, inner, inner_eps, K, INNER.dtype.element_ty == tl.float32, True, ASM)
    if factor is not None:
        x = (x.to(tl.float32) * factor).to(x.dtype)
    if RESIDUAL is not None:
        residual = RESIDUAL + row[:, None] * residual_stride + k[None, :]
        if IDS is None:
            x = (x.to(tl.float32) + tl.load(residual, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(residual, x, mask=inside)
    y = x
    if CENTRED:
        wide = x.to(tl.float32)
        wide = tl.where((k < K)[None, :], wide - (tl.sum(wide, 1) / K)[:, None], 0.0)
        wide *= tl.rsqrt(tl.sum(wide * wide, 1) / K + eps)[:, None]
        if WEIGHT is not None:
            wide *= weight[None, :]
        if BIAS is not None:
            wide += bias[None, :]
        y = wide.to(x.dtype)
    elif WEIGHT is not None:
        y = _normal(x, weight, eps, K, WEIGHT.dtype.element_ty == tl.float32, False, ASM)
    if ROOM > 0:  # x is zero beyond K
        group = tl.arange(0, BLOCK_K // GROUP)
        store_digits(y.to(tl.float32), Y, SCALES, row, group, ROWS, K // GROUP, ROOM)
    elif Y is not None:
        if INT8:
            y = y.to(tl.float32)
            scale = token_scale(tl.max(tl.abs(y), 1))
            y = token_codes(y, scale[:, None], ASM)
            tl.store(SCALES + row, scale, mask=row < ROWS)
        tl.store(Y + row[:, None] * K + k[None, :], y, mask=inside)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, y: Tensor | None,
    scale: Tensor | None = None, ids: Tensor | None = None, inner: Tensor | None = None,
    inner_eps: float = 0.0, factor: float = 1.0, partial_sums: int = 0, room: int = 0, centred: bool = False,
    bias: Tensor | None = None, peers: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the norm of x [T, H, K] or [T, K], whose rows are dense, to the dense y.

    residual   [T, K] or None
    weight     [K]; None: what is read is not normalized, unless `centred`
    y          None: nothing reads the norm
    scale      fp32 [T*H]: y is then int8
    ids        [T]: which rows of x to take
    inner      [K]: the weight of a norm of x before it is added to the residual, with `inner_eps`
    factor     what x is multiplied by then
    partial_sums  the number S of fp32 [T, K] that x [S, T, K] holds; 0 if x has none
    room       the padded token count of `Digits`, of which y and scale are the tensors; 0 for none
    centred    the norm is LayerNorm, with this weight and bias [K] if they are there
    peers      the words of the ranks' memory, through which x is summed over them
    """
    if x.dim() == 3 and not partial_sums:
        (tokens, heads, k), (token_stride, head_stride, _) = x.shape, x.stride()
    else:
        tokens, heads, k = x.shape[-2], 1, x.shape[-1]
        token_stride = head_stride = x.stride(-2)
    rows = (tokens if ids is None else len(ids)) * heads
    if rows == 0:
        return
    block_k = max(4, next_power_of_2(k))  # four codes are made at a time
    block_rows = max(1, min(_BLOCK_ELEMENTS // block_k, next_power_of_2(rows)))
    # digits: few tokens, so the latency of one program counts; else two programs must fit on an SM
    warps = (32 if room else 16) if block_k > _BLOCK_ELEMENTS else max(1, block_rows * block_k // 256)
    kernel = variant(
        _rmsnorm, K=k, SHARES=partial_sums, INT8=scale is not None, ROOM=room, ASM=COMPILED, CENTRED=centred,
        RANKS=ranks_of(peers), WIDE=peers is not None and rows <= EXACT_TOKENS,
        BLOCK_ROWS=block_rows, BLOCK_K=block_k, num_warps=warps, launch_pdl=overlaps(x.device),
    )  # fmt: skip
    kernel.launch(
        (cdiv(rows, block_rows),), x, ids, residual, weight, bias, inner, y, scale, peers, rows, heads,
        token_stride, head_stride, 0 if residual is None else residual.stride(0),
        eps if centred or weight is not None else None, None if inner is None else inner_eps,
        None if factor == 1.0 else factor,
    )  # fmt: skip


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Run `qrt::rmsnorm` on CUDA tensors."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_rows(x, weight, eps, y)
    return y


def launch_rows(
    x: Tensor, weight: Tensor | None, eps: float, y: Tensor, *, centred: bool = False,
    bias: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch for x [..., K]; copy it first if it needs more than two leading strides."""
    dense = x if x.stride(-1) == 1 else x.contiguous()
    rows = dense if x.dim() in (2, 3) else dense.reshape(-1, x.shape[-1])
    _launch(rows, None, weight, eps, y, centred=centred, bias=bias)


def embed_rmsnorm(
    ids: Tensor, table: Tensor, weight: Tensor, eps: float, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Run `qrt::embed_rmsnorm` on CUDA tensors."""
    rows, y = (
        torch.empty(len(ids), table.shape[1], dtype=table.dtype, device=table.device) for _ in range(2)
    )
    _launch(table.contiguous(), rows, weight, eps, y, ids=ids, factor=scale)
    return rows, y


def add_normed(
    residual: Tensor, x: Tensor, inner: Tensor | None = None, inner_eps: float = 0.0, scale: float = 1.0,
    peers: Tensor | None = None,
) -> None:  # fmt: skip
    """Run `qrt::add_normed` on CUDA tensors."""
    launch_add(residual, x, None, 0.0, None, None, (inner, inner_eps, scale, peers))


def add_rmsnorm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, inner: Tensor | None = None,
    inner_eps: float = 0.0, scale: float = 1.0, peers: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Run `qrt::add_rmsnorm` on CUDA tensors."""
    y = torch.empty(residual.shape, dtype=residual.dtype, device=x.device)
    launch_add(residual, x, weight, eps, y, None, (inner, inner_eps, scale, peers))
    return y


def add_rmsnorm_int8(
    residual: Tensor, x: Tensor, weight: Tensor | None, eps: float, inner: Tensor | None = None,
    inner_eps: float = 0.0, scale: float = 1.0, peers: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run `qrt::add_rmsnorm_int8` on CUDA tensors."""
    codes = torch.empty(residual.shape, dtype=torch.int8, device=x.device)
    token_scale = torch.empty(residual.shape[0], dtype=torch.float32, device=x.device)
    launch_add(residual, x, weight, eps, codes, token_scale, (inner, inner_eps, scale, peers))
    return codes, token_scale


def add_rmsnorm_digits(
    residual: Tensor, x: Tensor, weight: Tensor | None, eps: float, room: int, inner: Tensor | None = None,
    scale: float = 1.0, peers: Tensor | None = None,
) -> Digits:  # fmt: skip
    """Return `add_rmsnorm` as `Digits`, for T <= room tokens in bf16, with K a multiple of a group."""
    digits = Digits.empty(*residual.shape, room, x.device)
    launch_add(residual, x, weight, eps, digits.codes, digits.facts, (inner, eps, scale, peers), room)
    return digits


def launch_add(
    residual: Tensor, x: Tensor, weight: Tensor | None, eps: float, y: Tensor | None,
    token_scale: Tensor | None, added: tuple[Tensor | None, float, float, Tensor | None], room: int = 0, *,
    centred: bool = False, bias: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch with a residual; x is [T, K], or its partial sums fp32 [S, T, K].

    `added` is inner, inner_eps, scale and peers of the operators.
    """
    inner, inner_eps, factor, peers = added
    _launch(
        x.contiguous(), residual, weight, eps, y, token_scale, inner=inner, inner_eps=inner_eps,
        factor=factor, partial_sums=_partial_sums(x), room=room, centred=centred, bias=bias, peers=peers,
    )  # fmt: skip


def launch_sum(x: Tensor, y: Tensor, peers: Tensor) -> None:
    """Write the sum of x [T, K], or of its partial sums fp32 [S, T, K], over all ranks to y [T, K]."""
    _launch(x.contiguous(), None, None, 0.0, y, partial_sums=_partial_sums(x), peers=peers)


def _partial_sums(x: Tensor) -> int:
    return x.shape[0] if x.dim() == 3 else 0
