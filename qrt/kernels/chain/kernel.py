"""`qrt::chain` on CUDA tensors: one kernel for one token, seven over `Digits` for a few of them.

The first of the seven makes the digits of what was attended, and where that comes in parts adds them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qrt.kernels.chain import MOST_TOKENS
from qrt.kernels.chain.digits_kernel import digits_product, digits_shares, gated_digits_product
from qrt.kernels.chain.make_digits_kernel import add_norm_digits, make_digits, merge_digits
from qrt.kernels.chain.one_token_kernel import one_token
from qrt.kernels.rmsnorm.kernel import add_rmsnorm
from qrt.quant.weight.tiles import TiledWeight


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
    y = gated_digits_product(add_norm_digits(residual, y, mlp_norm, eps, room), TiledWeight(*gate_up))
    y = digits_shares(y, TiledWeight(*down))
    if not qkv:
        return add_rmsnorm(residual, y, norm, eps)
    return digits_product(add_norm_digits(residual, y, norm, eps, room), TiledWeight(*qkv), residual.dtype)
