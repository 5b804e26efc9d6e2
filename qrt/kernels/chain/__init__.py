"""chain: what lies between one layer's attention and the next one's, for a few tokens.

chain(x, residual [T, H], link) -> the next layer's q, k and v, [T, (Hq + 2*Hkv)*D]

x is [what was attended, [T, Hq*D]], or of several tokens [codes, facts] of it as `Digits`.

    residual += o(x)
    residual += down(silu(gate) * up) of gate_up(RMSNorm(residual, mlp_norm))
    return qkv(RMSNorm(residual, norm)) + bias

Behind the last layer there is no qkv: the norm [T, H] is returned.
residual is added to in place; everything is rounded to its dtype where the operators one by one would, so
that only the products differ: one token's in the order of their sums, for which one launch does where they
take seven; those of more in reading their input as `Digits`. `fits` says where it may be called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qrt.kernels.chain import ref
from qrt.kernels.gpu import is_hopper, multiprocessors
from qrt.kernels.op import define
from qrt.quant.digits import GROUP, MOST_TOKENS
from qrt.quant.weight import WEIGHT_SCHEMES
from qrt.quant.weight.tiles import TILE_ROWS, TiledScheme, TiledWeight

MOST_INPUTS = 1 << 15  # of a product of one token: its input lies in shared memory
UNIT = 16  # rows of a product that one program multiplies at a time for one token
MOST_UNITS = 64  # of a product that one program has: their sums lie there too


class Link(NamedTuple):
    """What `chain` multiplies by, in the order of the operator's parameters.

    o, gate_up, down    run-time tensors of a layer's products, none of which has a bias
    qkv                 run-time tensors of the next layer's product; empty behind the last layer
    bias                of qkv, or None
    mlp_norm, norm      [H]: the norms that gate_up and qkv read
    eps                 of both norms
    scheme              of all products
    """

    o: Sequence[Tensor]
    gate_up: Sequence[Tensor]
    down: Sequence[Tensor]
    qkv: Sequence[Tensor]
    bias: Tensor | None
    mlp_norm: Tensor
    norm: Tensor
    eps: float
    scheme: str


def fits(attended: int, residual: Tensor, link: Link) -> bool:
    """Return whether the kernels take these products, of which o reads `attended` inputs.

    They take bf16 on a Hopper GPU and weight-only integers with 16-bit scales of 128 inputs or more, not
    reordered. Of more tokens than one, all inputs come in whole groups of 128; of one, a program has room
    for the inputs and for its sums.
    """
    kind, tokens = WEIGHT_SCHEMES[link.scheme], residual.shape[0]
    if not 1 <= tokens <= MOST_TOKENS or residual.dtype != torch.bfloat16 or not is_hopper(residual.device):
        return False
    if not isinstance(kind, TiledScheme):
        return False
    weights = [link.o, link.gate_up, link.down, *([link.qkv] if link.qkv else [])]
    tiled = [TiledWeight(*tensors) for tensors in weights]
    if not all(_takes(weight, tiled[0]) for weight in tiled):
        return False
    halves = tiled[1].out_features
    if tokens > 1:
        whole = all(inputs % GROUP == 0 for inputs in (attended, residual.shape[1], halves // 2))
        return whole and all(w.out_features % TILE_ROWS == 0 for w in tiled)
    inputs = max(w.packed.shape[1] * (16 // kind.bits) * w.packed.shape[3] for w in tiled)
    rows = max(halves // 2, *(w.out_features for i, w in enumerate(tiled) if i != 1))
    room = inputs <= MOST_INPUTS and rows <= MOST_UNITS * UNIT * multiprocessors(residual.device)
    return halves % (2 * UNIT) == 0 and room  # gate and up of a unit each


def _takes(weight: TiledWeight, first: TiledWeight) -> bool:
    return (
        weight.has_whole_groups
        and weight.scale.dtype == first.scale.dtype
        and (weight.zero.numel() > 0) == (first.zero.numel() > 0)
        and weight.perm.numel() == 0
        and weight.out_features % UNIT == 0
    )


def _fake(residual: Tensor, qkv: Sequence[Tensor], scheme: str) -> Tensor:
    width = WEIGHT_SCHEMES[scheme].out_features(qkv) if qkv else residual.shape[1]
    return residual.new_empty(residual.shape[0], width)


chain_op = define(
    ref.chain,
    triton="qrt.kernels.chain.kernel:chain",
    fake=_fake,
    mutates=["residual"],
)


def chain(x: list[Tensor], residual: Tensor, link: Link) -> Tensor:
    """See the package's docstring."""
    return chain_op(x, residual, *link)
