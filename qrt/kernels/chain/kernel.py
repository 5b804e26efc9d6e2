"""`qrt::chain` on CUDA tensors: one kernel for one token, seven over `Digits` for a few of them.

The first of the seven makes the digits of what was attended, and where that comes in parts adds them.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from qrt.kernels.chain import MOST_TOKENS
from qrt.kernels.chain.digits_kernel import digits_product, digits_shares, gated_digits_product
from qrt.kernels.chain.one_token_kernel import one_token
from qrt.kernels.decode_attention.kernel import merged
from qrt.kernels.decode_attention.plan import FIELDS
from qrt.kernels.device import after_previous
from qrt.kernels.gpu import overlaps
from qrt.kernels.rmsnorm.kernel import add_rmsnorm, add_rmsnorm_digits
from qrt.quant import digits
from qrt.quant.device import GROUP, store_digits
from qrt.quant.digits import Digits
from qrt.quant.weight.tiles import TiledWeight

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


def chain(
    x: Sequence[Tensor],
    residual: Tensor,
    o: Sequence[Tensor],
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    qkv: Sequence[Tensor],
    mlp_norm: Tensor,
    norm: Tensor,
    eps: float,
    scheme: str,
) -> Tensor:
    """See the package's docstring."""
    if len(residual) == 1:
        return one_token(x[0], residual, o, gate_up, down, qkv, mlp_norm, norm, eps, scheme)
    room = 8 if len(residual) <= 8 else MOST_TOKENS
    attended = make_digits(x[0], room) if len(x) == 1 else merge_digits(*x, len(residual), room)
    y = digits_shares(attended, TiledWeight(*o))
    y = gated_digits_product(add_rmsnorm_digits(residual, y, mlp_norm, eps, room), TiledWeight(*gate_up))
    y = digits_shares(y, TiledWeight(*down))
    if not qkv:
        return add_rmsnorm(residual, y, norm, eps)
    return digits_product(add_rmsnorm_digits(residual, y, norm, eps, room), TiledWeight(*qkv), residual.dtype)
