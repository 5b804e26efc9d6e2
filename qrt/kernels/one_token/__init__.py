"""one_token: what lies between one layer's attention and the next one's, for a single token.

one_token(x [1, Hq*D], residual [1, H], o, gate_up, down, qkv: run-time tensors of weight-only schemes,
          mlp_norm [H], norm [H], eps, scheme) -> the next layer's q, k and v [1, (Hq + 2*Hkv)*D]

    residual += o(x)
    residual += down(silu(gate) * up) of gate_up(RMSNorm(residual, mlp_norm))
    return qkv(RMSNorm(residual, norm))

Behind the last layer there is no qkv (an empty list): the norm [1, H] is returned.
residual is added to in place; everything is rounded to its dtype where the operators one by one would, so
that only the order of the products' sums differs. One launch where they take seven. `fits` says where it may
be called.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qrt.kernels.gpu import is_hopper
from qrt.kernels.one_token import ref
from qrt.kernels.op import define
from qrt.quant.weight import WEIGHT_SCHEMES
from qrt.quant.weight.tiles import TiledScheme, TiledWeight

MOST_INPUTS = 1 << 15  # of a product: its input lies in shared memory
UNIT = 16  # rows of a product that one program multiplies at a time


def fits(
    residual: Tensor, weights: Sequence[Sequence[Tensor]], biases: Sequence[Tensor | None], scheme: str
) -> bool:
    """Whether the kernel takes these products, those of o, gate_up and down first: one token in bf16 on a
    Hopper GPU, weight-only integers with 16-bit scales of 64 inputs or more, neither reordered nor biased."""
    kind = WEIGHT_SCHEMES[scheme]
    if residual.shape[0] != 1 or residual.dtype != torch.bfloat16 or not is_hopper(residual.device):
        return False
    if not isinstance(kind, TiledScheme) or any(bias is not None for bias in biases):
        return False
    tiled = [TiledWeight(*tensors) for tensors in weights]
    inputs = max(w.packed.shape[1] * (16 // kind.bits) * w.packed.shape[3] for w in tiled)
    even = tiled[1].out_features % (2 * UNIT) == 0  # gate and up of a unit each
    return even and inputs <= MOST_INPUTS and all(_takes(weight, tiled[0]) for weight in tiled)


def _takes(weight: TiledWeight, first: TiledWeight) -> bool:
    return (
        weight.packed.shape[3] == 64
        and weight.runs == 2
        and weight.scale.itemsize == 2
        and weight.scale.dtype == first.scale.dtype
        and (weight.zero.numel() > 0) == (first.zero.numel() > 0)
        and weight.perm.numel() == 0
        and weight.out_features % UNIT == 0
    )


def _fake(
    x: Tensor,
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
    return x.new_empty(1, WEIGHT_SCHEMES[scheme].out_features(qkv) if qkv else residual.shape[1])


one_token = define(
    "one_token(Tensor x, Tensor(a!) residual, Tensor[] o, Tensor[] gate_up, Tensor[] down, Tensor[] qkv, "
    "Tensor mlp_norm, Tensor norm, float eps, str scheme) -> Tensor",
    ref=ref.one_token,
    triton="qrt.kernels.one_token.kernel:one_token",
    fake=_fake,
)
