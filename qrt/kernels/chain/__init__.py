"""`chain`: everything between one layer's attention and the next one's, for a few tokens.

chain(x, residual [T, H], link) -> q, k and v of the next layer, [T, (Hq + 2*Hkv)*D]

x is [y], where y [T, Hq*D] is the attention's result, or for several tokens [codes, facts] of y as `Digits`.

    residual += scale * RMSNorm(o(x), attention_out)
    gate, up = gate_up(RMSNorm(residual, mlp_norm))
    residual += scale * RMSNorm(down(act(gate) * up), mlp_out)
    return qkv(RMSNorm(residual, norm)) + bias

Norms may be absent. After the last layer there is no qkv, and the norm, which is there, is returned: [T, H].
residual is updated in place.

Values are rounded to residual's dtype wherever separate operators would round them, so only the products
differ; none rounds its input to int8, also where the scheme does so for more tokens. For one token their sums
have another order; one launch does what takes seven otherwise. For more tokens the products read their inputs
as `Digits`. `fits` says whether `chain` may be called.

Where a mixture stands between o and qkv, two operators do what is around it, also by `Digits`:

from_attention(x, residual [T, H], link) -> what the mixture reads, [T, H]

    residual += scale * RMSNorm(o(x), behind)
    return RMSNorm(residual, norm)

to_attention(y, residual [T, H], link) -> q, k and v of the next layer

    residual += scale * RMSNorm(y, behind)
    return qkv(RMSNorm(residual, norm)) + bias

y is what the mixture gives, [T, H], or the experts' outputs, fp32 [k, T, H]. `fits_from_attention` and
`fits_to_attention` say whether they may be called.
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

MOST_INPUTS = 1 << 15  # of a product of one token, whose input is in shared memory
UNIT = 16  # rows of a product that one program multiplies at a time for one token
MOST_UNITS = 64  # per program and product of one token, whose sums are in shared memory too


class Link(NamedTuple):
    """The weights that `chain` uses, in the order of the operator's parameters.

    o, gate_up, down    run-time tensors of a layer's weights; their products have no bias
    qkv                 run-time tensors of the next layer's weight; empty after the last layer
    bias                the bias of qkv, or None
    mlp_norm, norm      [H]: the weights of the norms before gate_up and before qkv, or None
    eps                 the epsilon of all norms
    scheme              the weight scheme of all products
    act                 the activation of the gate, as `act_mul` takes it
    attention_out       [H]: the weight of the norm behind o, or None
    mlp_out             [H]: the weight of the norm behind down, or None
    scale               what both are multiplied by before they are added
    peers               words of the memory (qrt.kernels.peer_memory) of ranks that each have a part of o and
                        down, whose outputs are summed over all of them before anything else; or None
    """

    o: Sequence[Tensor]
    gate_up: Sequence[Tensor]
    down: Sequence[Tensor]
    qkv: Sequence[Tensor]
    bias: Tensor | None
    mlp_norm: Tensor | None
    norm: Tensor | None
    eps: float
    scheme: str
    act: str = "silu"
    attention_out: Tensor | None = None
    mlp_out: Tensor | None = None
    scale: float = 1.0
    peers: Tensor | None = None


class FromAttention(NamedTuple):
    """What `from_attention` uses, in the order of the operator's parameters.

    o         run-time tensors of a weight; its product has no bias
    norm      [H]: the weight of the norm in front of the mixture
    eps       the epsilon of both norms
    scheme    the weight scheme of o
    behind    [H]: the weight of the norm behind o, or None
    scale     what the result of that is multiplied by before it is added
    peers     words of the memory of ranks over which the result is summed first, or None
    """

    o: Sequence[Tensor]
    norm: Tensor
    eps: float
    scheme: str
    behind: Tensor | None = None
    scale: float = 1.0
    peers: Tensor | None = None


class ToAttention(NamedTuple):
    """What `to_attention` uses, in the order of the operator's parameters.

    qkv       run-time tensors of the next layer's weight
    bias      the bias of qkv, or None
    norm      [H]: the weight of the norm in front of qkv, or None
    eps       the epsilon of both norms
    scheme    the weight scheme of qkv
    behind    [H]: the weight of the norm behind the mixture, or None
    scale     what the result of that is multiplied by before it is added
    peers     words of the memory of ranks over which the result is summed first, or None
    """

    qkv: Sequence[Tensor]
    bias: Tensor | None
    norm: Tensor | None
    eps: float
    scheme: str
    behind: Tensor | None = None
    scale: float = 1.0
    peers: Tensor | None = None


def fits(attended: int, residual: Tensor, link: Link) -> bool:
    """Return whether the kernels take these products; o reads `attended` inputs.

    They need bf16 on a Hopper GPU, and weight-only integers with 16-bit scales of 128 inputs or more, whose
    inputs are not reordered. For several tokens, all input sizes must be multiples of 128. For one token, the
    inputs and a program's sums must fit in shared memory.
    """
    kind, tokens = _tiled_integers(residual, link.scheme), residual.shape[0]
    if kind is None:
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
    return halves % (2 * UNIT) == 0 and room  # gate and up each come in whole units


def fits_from_attention(attended: int, residual: Tensor, link: FromAttention) -> bool:
    """Return whether the kernels of `from_attention` take this; o reads `attended` inputs.

    They need what those of `chain` need for several tokens, and int4, as few tokens' products by digits do
    elsewhere.
    """
    return _by_digits(attended, residual, link.o, link.scheme)


def fits_to_attention(residual: Tensor, link: ToAttention) -> bool:
    """Return whether the kernels of `to_attention` take this, as `fits_from_attention`."""
    return _by_digits(residual.shape[1], residual, link.qkv, link.scheme)


def _by_digits(inputs: int, residual: Tensor, tensors: Sequence[Tensor], scheme: str) -> bool:
    kind = _tiled_integers(residual, scheme)
    if kind is None or kind.bits != 4:
        return False
    weight = TiledWeight(*tensors)
    return inputs % GROUP == 0 and weight.out_features % TILE_ROWS == 0 and _takes(weight, weight)


def _tiled_integers(residual: Tensor, scheme: str) -> TiledScheme | None:
    """Return the scheme if it has integers in tiles, and there are few tokens in bf16 on a Hopper GPU."""
    few = 1 <= residual.shape[0] <= MOST_TOKENS and residual.dtype == torch.bfloat16
    kind = WEIGHT_SCHEMES[scheme]
    if not few or not is_hopper(residual.device) or not isinstance(kind, TiledScheme):
        return None
    return kind if kind.has_integers else None


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


def _fake_norm(residual: Tensor) -> Tensor:
    return torch.empty_like(residual)


from_attention_op = define(
    ref.from_attention,
    triton="qrt.kernels.chain.kernel:from_attention",
    fake=_fake_norm,
    mutates=["residual"],
)


def from_attention(x: list[Tensor], residual: Tensor, link: FromAttention) -> Tensor:
    """See the package's docstring."""
    return from_attention_op(x, residual, *link)


to_attention_op = define(
    ref.to_attention,
    triton="qrt.kernels.chain.kernel:to_attention",
    fake=_fake,
    mutates=["residual"],
)


def to_attention(y: Tensor, residual: Tensor, link: ToAttention) -> Tensor:
    """See the package's docstring."""
    return to_attention_op(y, residual, *link)
