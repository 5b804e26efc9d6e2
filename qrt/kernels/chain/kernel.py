"""The operators of `qrt.kernels.chain` on CUDA tensors.

`chain` is one kernel for one token, and six or seven that use `Digits` for a few. The others are two such
kernels, with `make_digits` in front where attention did not leave its result as digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from qrt.kernels.chain import ref
from qrt.kernels.chain.one_token_kernel import one_token
from qrt.kernels.linear.tiles.digits_kernel import digits_partial, digits_product, gated_digits_product
from qrt.kernels.linear.tiles.make_digits_kernel import make_digits
from qrt.kernels.op import takes
from qrt.kernels.rmsnorm.kernel import add_rmsnorm, add_rmsnorm_digits
from qrt.quant.digits import Digits, room_for
from qrt.quant.weight import WEIGHT_SCHEMES
from qrt.quant.weight.tiles import TiledWeight


@takes(ref.chain)
def chain(a: Any) -> Tensor:
    """See the package's docstring."""
    tokens = len(a.residual)
    if tokens == 1 and len(a.x) == 1:
        products, norms = (a.o, a.gate_up, a.down, a.qkv), (a.attention_out, a.mlp_norm, a.mlp_out, a.norm)
        return one_token(
            a.x[0], a.residual, products, a.bias, norms, a.eps, a.scheme, a.act, a.scale, a.peers
        )
    attended = _attended(a.x, tokens)
    bits, room = WEIGHT_SCHEMES[a.scheme].bits, room_for(tokens)
    y = digits_partial(attended, TiledWeight(*a.o), bits)
    normal = add_rmsnorm_digits(a.residual, y, a.mlp_norm, a.eps, room, a.attention_out, a.scale, a.peers)
    y = digits_partial(
        gated_digits_product(normal, TiledWeight(*a.gate_up), bits, a.act), TiledWeight(*a.down), bits
    )
    if not a.qkv:
        assert a.norm is not None
        return add_rmsnorm(a.residual, y, a.norm, a.eps, a.mlp_out, a.eps, a.scale, a.peers)
    return to_attention(y, a.residual, a.qkv, a.bias, a.norm, a.eps, a.scheme, a.mlp_out, a.scale, a.peers)


@takes(ref.from_attention)
def from_attention(a: Any) -> Tensor:
    """See the package's docstring."""
    y = digits_partial(_attended(a.x, len(a.residual)), TiledWeight(*a.o), WEIGHT_SCHEMES[a.scheme].bits)
    return add_rmsnorm(a.residual, y, a.norm, a.eps, a.behind, a.eps, a.scale, a.peers)


@takes(ref.to_attention)
def to_attention(a: Any) -> Tensor:
    """See the package's docstring."""
    normal = add_rmsnorm_digits(
        a.residual, a.y, a.norm, a.eps, room_for(len(a.residual)), a.behind, a.scale, a.peers
    )
    return digits_product(
        normal, TiledWeight(*a.qkv), a.bias, WEIGHT_SCHEMES[a.scheme].bits, a.residual.dtype
    )


def _attended(x: Sequence[Tensor], tokens: int) -> Digits:
    """Return what the heads attended as digits, made here if they do not come so."""
    return make_digits(x[0].contiguous(), room_for(tokens)) if len(x) == 1 else Digits(x[0], x[1], tokens)
