"""`chain`, `from_attention` and `to_attention` as sequences of other operators."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qrt.kernels.act_mul import act_mul
from qrt.kernels.rmsnorm import add_normed, rmsnorm
from qrt.quant.digits import Digits
from qrt.quant.weight import WEIGHT_SCHEMES
from qrt.quant.weight.tiles import TiledScheme


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
    add_normed(residual, _product(_attended(x, residual), o, None, scheme), attention_out, eps, scale, peers)
    y = residual if mlp_norm is None else rmsnorm(residual, mlp_norm, eps)
    y = _product(act_mul(_product(y, gate_up, None, scheme), act), down, None, scheme)
    if qkv:
        return to_attention(y, residual, qkv, bias, norm, eps, scheme, mlp_out, scale, peers)
    add_normed(residual, y, mlp_out, eps, scale, peers)
    return residual if norm is None else rmsnorm(residual, norm, eps)


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
    add_normed(residual, _product(_attended(x, residual), o, None, scheme), behind, eps, scale, peers)
    return rmsnorm(residual, norm, eps)


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
    add_normed(residual, y, behind, eps, scale, peers)
    return _product(residual if norm is None else rmsnorm(residual, norm, eps), qkv, bias, scheme)


def _attended(x: Sequence[Tensor], residual: Tensor) -> Tensor:
    """Return what the heads attended, which may come as `Digits`."""
    return x[0] if len(x) == 1 else Digits(x[0], x[1], len(residual)).read().to(residual.dtype)


def _product(x: Tensor, weight: Sequence[Tensor], bias: Tensor | None, scheme: str) -> Tensor:
    kind = WEIGHT_SCHEMES[scheme]
    assert isinstance(kind, TiledScheme)
    return kind.unrounded_ref(x, weight, bias)
