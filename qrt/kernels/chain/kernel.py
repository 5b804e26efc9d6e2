"""`qrt::chain` on CUDA tensors: one kernel for one token, six or seven over `Digits` for a few of them."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from qrt.kernels.chain import room_for
from qrt.kernels.chain.digits_kernel import digits_product, digits_shares, gated_digits_product
from qrt.kernels.chain.one_token_kernel import one_token
from qrt.kernels.device import after_previous
from qrt.kernels.gpu import overlaps
from qrt.kernels.rmsnorm.kernel import add_rmsnorm, add_rmsnorm_digits
from qrt.quant import digits
from qrt.quant.device import GROUP, store_digits
from qrt.quant.digits import Digits
from qrt.quant.weight.tiles import TiledWeight

_GROUPS = 4  # that one program makes digits of


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
    """x [T, K] contiguous, T <= room, K in whole groups."""
    tokens, k = x.shape
    made, n = Digits.empty(tokens, k, room, x.device), _GROUPS * digits.GROUP
    _make_digits[(tokens, triton.cdiv(k, n))](
        x, made.codes, made.facts, tokens, k, room, n, num_warps=1, launch_pdl=overlaps(x.device)
    )
    return made


def chain(
    x: Sequence[Tensor],
    residual: Tensor,
    o: Sequence[Tensor],
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    qkv: Sequence[Tensor],
    bias: Tensor | None,
    mlp_norm: Tensor,
    norm: Tensor,
    eps: float,
    scheme: str,
) -> Tensor:
    """See the package's docstring."""
    tokens = len(residual)
    if tokens == 1 and len(x) == 1:
        return one_token(x[0], residual, (o, gate_up, down, qkv), bias, (mlp_norm, norm), eps, scheme)
    attended = make_digits(x[0].contiguous(), room_for(tokens)) if len(x) == 1 else Digits(x[0], x[1], tokens)
    room = attended.codes.shape[2]
    y = digits_shares(attended, TiledWeight(*o))
    y = gated_digits_product(add_rmsnorm_digits(residual, y, mlp_norm, eps, room), TiledWeight(*gate_up))
    y = digits_shares(y, TiledWeight(*down))
    if not qkv:
        return add_rmsnorm(residual, y, norm, eps)
    normal = add_rmsnorm_digits(residual, y, norm, eps, room)
    return digits_product(normal, TiledWeight(*qkv), bias, residual.dtype)
