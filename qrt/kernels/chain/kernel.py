"""The operators of `qrt.kernels.chain` on CUDA tensors.

`chain` is one kernel for one token, and six or seven that use `Digits` for a few. The others are two such
kernels, with `make_digits` in front where attention did not leave its result as digits.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qrt.kernels.chain.one_token_kernel import one_token
from qrt.kernels.linear.tiles.digits_kernel import digits_partial, digits_product, gated_digits_product
from qrt.kernels.linear.tiles.make_digits_kernel import make_digits
from qrt.kernels.rmsnorm.kernel import add_rmsnorm, add_rmsnorm_digits
from qrt.quant.digits import Digits, room_for
from qrt.quant.weight import WEIGHT_SCHEMES
from qrt.quant.weight.tiles import TiledWeight


def chain(
    x: Sequence[Tensor],
    residual: Tensor,
    o: Sequence[Tensor],
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    qkv: Sequence[Tensor],
    bias: Tensor | None,
    mlp_norm: Tensor | None,
    norm: Tensor | None,
    eps: float,
    scheme: str,
    act: str = "silu",
    attention_out: Tensor | None = None,
    mlp_out: Tensor | None = None,
    scale: float = 1.0,
    peers: Tensor | None = None,
) -> Tensor:
    """See the package's docstring."""
    tokens = len(residual)
    if tokens == 1 and len(x) == 1:
        products, norms = (o, gate_up, down, qkv), (attention_out, mlp_norm, mlp_out, norm)
        return one_token(x[0], residual, products, bias, norms, eps, scheme, act, scale, peers)
    attended = _attended(x, tokens)
    bits, room = WEIGHT_SCHEMES[scheme].bits, room_for(tokens)
    y = digits_partial(attended, TiledWeight(*o), bits)
    normal = add_rmsnorm_digits(residual, y, mlp_norm, eps, room, attention_out, scale, peers)
    y = digits_partial(
        gated_digits_product(normal, TiledWeight(*gate_up), bits, act), TiledWeight(*down), bits
    )
    if not qkv:
        assert norm is not None
        return add_rmsnorm(residual, y, norm, eps, mlp_out, eps, scale, peers)
    return to_attention(y, residual, qkv, bias, norm, eps, scheme, mlp_out, scale, peers)


def from_attention(
    x: Sequence[Tensor],
    residual: Tensor,
    o: Sequence[Tensor],
    norm: Tensor,
    eps: float,
    scheme: str,
    behind: Tensor | None = None,
    scale: float = 1.0,
    peers: Tensor | None = None,
) -> Tensor:
    """See the package's docstring."""
    y = digits_partial(_attended(x, len(residual)), TiledWeight(*o), WEIGHT_SCHEMES[scheme].bits)
    return add_rmsnorm(residual, y, norm, eps, behind, eps, scale, peers)


def to_attention(
    y: Tensor,
    residual: Tensor,
    qkv: Sequence[Tensor],
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    scheme: str,
    behind: Tensor | None = None,
    scale: float = 1.0,
    peers: Tensor | None = None,
) -> Tensor:
    """See the package's docstring."""
    normal = add_rmsnorm_digits(residual, y, norm, eps, room_for(len(residual)), behind, scale, peers)
    return digits_product(normal, TiledWeight(*qkv), bias, WEIGHT_SCHEMES[scheme].bits, residual.dtype)


def _attended(x: Sequence[Tensor], tokens: int) -> Digits:
    """Return what the heads attended as digits, made here if they do not come so."""
    return make_digits(x[0].contiguous(), room_for(tokens)) if len(x) == 1 else Digits(x[0], x[1], tokens)
