"""What becomes `Digits` between the products of a few tokens: values, parts of attention, a norm."""

import triton
import triton.language as tl
from torch import Tensor

from qrt.kernels.decode_attention.kernel import merged
from qrt.kernels.decode_attention.plan import FIELDS
from qrt.kernels.device import after_previous
from qrt.kernels.gpu import overlaps
from qrt.quant import digits
from qrt.quant.device import GROUP, store_digits
from qrt.quant.digits import Digits

_GROUPS = 4  # that one program makes digits of
_PARTS = 16  # that one program loads at a time
_MERGE_WARPS = 2


@triton.jit(do_not_specialize=["TOKENS"])
def _make_digits(
    X, CODES, FACTS, TOKENS, K, ROOM: tl.constexpr, N: tl.constexpr, launch_pdl: tl.constexpr
):  # fmt: skip
    """Grid (TOKENS, cdiv(K, N)): X [TOKENS, K] as `Digits`."""
    after_previous(launch_pdl)
    row, first = tl.program_id(0), tl.program_id(1) * N
    k = first + tl.arange(0, N)
    x = tl.load(X + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    group = first // GROUP + tl.arange(0, N // GROUP)
    store_digits(x[None, :], CODES, FACTS, row + tl.arange(0, 1), group, TOKENS, K // GROUP, ROOM)


def make_digits(x: Tensor, room: int) -> Digits:
    """x [T, K], T <= room, K in whole groups."""
    x, (tokens, k) = x.contiguous(), x.shape
    made, n = Digits.empty(tokens, k, room, x.device), _GROUPS * digits.GROUP
    _make_digits[(tokens, triton.cdiv(k, n))](
        x, made.codes, made.facts, tokens, k, room, n, num_warps=1, launch_pdl=overlaps(x.device)
    )
    return made


@triton.jit
def _merge_digits(
    partial, lse, parts, CODES, FACTS, TOKENS, HQ, D: tl.constexpr, M: tl.constexpr, FIELDS: tl.constexpr,
    N: tl.constexpr, ROOM: tl.constexpr, launch_pdl: tl.constexpr,
):  # fmt: skip
    """Grid (TOKENS, HQ / M): M heads of what a token attended as `Digits`, N parts at a time."""
    row, head = tl.program_id(0), tl.program_id(1) * M + tl.arange(0, M)
    first = tl.load(parts + row * FIELDS + 6)  # of the step, not of the kernel before
    count = tl.load(parts + first * FIELDS + 5)
    after_previous(launch_pdl)
    dims = tl.arange(0, D // 2)
    lo, hi, _ = merged(
        partial, lse, first * HQ + head, head >= 0, dims, dims >= 0, HQ, count, D, D // 2, M, N
    )
    x = tl.reshape(tl.permute(tl.join(lo, hi), (0, 2, 1)), (1, M * D))
    x = x.to(tl.bfloat16).to(tl.float32)
    group = tl.program_id(1) * (M * D // GROUP) + tl.arange(0, M * D // GROUP)
    store_digits(x, CODES, FACTS, row + tl.arange(0, 1), group, TOKENS, HQ * D // GROUP, ROOM)


def merge_digits(partial: Tensor, lse: Tensor, parts: Tensor, tokens: int, room: int) -> Digits:
    """`make_digits` of the sum of parts, see `decode_attention_parts`; D a power of two."""
    _, heads, head_dim = partial.shape
    together = max(1, GROUP.value // head_dim)
    made = Digits.empty(tokens, heads * head_dim, room, partial.device)
    _merge_digits[(tokens, heads // together)](
        partial, lse, parts, made.codes, made.facts, tokens, heads, head_dim, together, FIELDS, _PARTS, room,
        num_warps=_MERGE_WARPS, launch_pdl=overlaps(partial.device),
    )  # fmt: skip
    return made


@triton.jit
def _add_norm_digits(
    X, RESIDUAL, WEIGHT, CODES, FACTS, SQUARES, TOKENS, K, residual_stride, SHARES: tl.constexpr,
    ROOM: tl.constexpr, N: tl.constexpr, launch_pdl: tl.constexpr,
):  # fmt: skip
    """Grid (TOKENS, cdiv(K, N)): RESIDUAL [TOKENS, K] += X, the sum of [SHARES, TOKENS, K] rounded to its
    dtype; that times WEIGHT as `Digits`."""
    row, first = tl.program_id(0), tl.program_id(1) * N
    k = first + tl.arange(0, N)
    inside = k < K
    weight = tl.load(WEIGHT + k, mask=inside, other=0.0).to(tl.float32)
    after_previous(launch_pdl)
    residual = RESIDUAL + row.to(tl.int64) * residual_stride + k
    before = tl.load(residual, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(X + row * K + k, mask=inside, other=0.0)
    for s in tl.static_range(1, SHARES):
        x += tl.load(X + (s * TOKENS + row) * K + k, mask=inside, other=0.0)
    x = (x.to(RESIDUAL.dtype.element_ty).to(tl.float32) + before).to(RESIDUAL.dtype.element_ty)
    tl.store(residual, x, mask=inside)
    x = x.to(tl.float32)
    tl.store(SQUARES + tl.program_id(1) * ROOM + row, tl.sum(x * x, 0))
    group = first // GROUP + tl.arange(0, N // GROUP)
    x = (x * weight)[None, :]
    store_digits(x, CODES, FACTS, row + tl.arange(0, 1), group, TOKENS, K // GROUP, ROOM)


def add_norm_digits(residual: Tensor, shares: Tensor, weight: Tensor, eps: float, room: int) -> Digits:
    """`add_rmsnorm` of T <= room tokens' shares fp32 [S, T, K], K in whole groups."""
    tokens, k = residual.shape
    n = _GROUPS * digits.GROUP
    made = Digits.of_norm(tokens, k, room, triton.cdiv(k, n), eps, residual.device)
    _add_norm_digits[(tokens, triton.cdiv(k, n))](
        shares, residual, weight, made.codes, made.facts, made.squares, tokens, k, residual.stride(0),
        len(shares), room, n, num_warps=1, launch_pdl=overlaps(residual.device),
    )  # fmt: skip
    return made
