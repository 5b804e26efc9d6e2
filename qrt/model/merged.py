"""What a fused layer launches around its products: additions with norms, quantized inputs, split sums."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from qrt.kernels.all_reduce import reduce_scatter, through
from qrt.kernels.layernorm import add_layernorm, add_layernorm_int8
from qrt.kernels.linear import linear_int8, linear_int8_partial, linear_partial
from qrt.kernels.rmsnorm import add_normed, add_rmsnorm, add_rmsnorm_int8
from qrt.kernels.tensor_parallel import TensorParallelGroup
from qrt.layers.experts import MoE
from qrt.layers.linear import Linear
from qrt.layers.norm import LayerNorm, NormLayer, RMSNorm
from qrt.quant.tokens import QuantizedTokens
from qrt.quant.weight import WEIGHT_SCHEMES

SPLIT_TOKENS = 64  # most tokens whose int8 product is left in split sums: more are not split along K


class AddNorm(NamedTuple):
    """The addition of a block's output y to the residual, and what the next block reads.

    residual += scale * behind(y)
    x = norm(residual)

    behind  the norm behind the block, or None
    scale   what the output is multiplied by
    norm    the norm in front of the next block; without one that block reads the residual
    peers   the ranks whose y add up to the block's output, or None
    cuts    whether each rank adds to its own rows of the residual alone where the sums are large
            (`TensorParallelGroup.prefers_reduce_scatter`): the ranks put x together, as codes if its reader
            takes these. The other rows of the residual are left as they are, so all additions of a step must
            do so
    y may be split sums. The residual [T, H] is changed in place.
    """

    behind: RMSNorm | None
    scale: float
    norm: NormLayer | None
    peers: TensorParallelGroup | None = None
    cuts: bool = False

    @classmethod
    def of(
        cls,
        behind: NormLayer | None,
        scale: float,
        norm: NormLayer | None,
        peers: TensorParallelGroup | None = None,
        *,
        cuts: bool = False,
    ) -> AddNorm:
        """Return it of norms that `unfused_part` has found to be known."""
        assert behind is None or isinstance(behind, RMSNorm)
        return cls(behind, scale, norm, peers, cuts)

    def __call__(self, residual: Tensor, y: Tensor) -> Tensor:
        """Return x [T, H]."""
        if (peers := self._cutting(residual)) is not None:
            rows = residual[peers.own_rows(len(residual))]
            return peers.all_gather(self._alone(rows, reduce_scatter(y, peers)), len(residual))
        norm, (y, words) = self.norm, self._given(y)
        if isinstance(norm, LayerNorm):
            return add_layernorm(residual, y, norm.weight, norm.bias, norm.eps, *self._added(), words)
        if norm is not None:
            return add_rmsnorm(residual, y, norm.weight, norm.eps, *self._added(), words)
        add_normed(residual, y, *self._added(), words)
        return residual

    def add(self, residual: Tensor, y: Tensor) -> None:
        """Add alone."""
        y, words = self._given(y)
        add_normed(residual, y, *self._added(), words)

    def int8(self, residual: Tensor, y: Tensor) -> QuantizedTokens:
        """Return x as codes."""
        if (peers := self._cutting(residual)) is not None:
            rows = residual[peers.own_rows(len(residual))]
            x = self._alone.int8(rows, reduce_scatter(y, peers))
            codes, scale = (peers.all_gather(part, len(residual)) for part in (x.codes, x.scale))
            return QuantizedTokens(codes, scale, x.dtype)
        norm, (y, words) = self.norm, self._given(y)
        if isinstance(norm, LayerNorm):
            own = norm.weight, norm.bias, norm.eps
            codes, scale = add_layernorm_int8(residual, y, *own, *self._added(), words)
        else:
            weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            codes, scale = add_rmsnorm_int8(residual, y, weight, eps, *self._added(), words)
        return QuantizedTokens(codes, scale, residual.dtype)

    def linear(self, linear: Linear, residual: Tensor, y: Tensor) -> Tensor:
        """Return `linear` of x, [T, N]."""
        if takes_int8(linear):
            return int8_product(linear, self.int8(residual, y))
        return linear(self(residual, y))

    def _cutting(self, residual: Tensor) -> TensorParallelGroup | None:
        """Return the ranks where each of them adds to its own rows of the residual alone."""
        peers = self.peers if self.cuts else None
        return peers if peers is not None and peers.prefers_reduce_scatter(residual) else None

    @property
    def _alone(self) -> AddNorm:
        """The same for what is summed over the ranks already."""
        return self._replace(peers=None)

    def _given(self, y: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return y, and the words of the ranks over which the operators sum it."""
        return (y, None) if self.peers is None else through(y, self.peers)

    def _added(self) -> tuple[Tensor | None, float, float]:
        if self.behind is None:
            return None, 0.0, self.scale
        return self.behind.weight, self.behind.eps, self.scale


def takes_int8(linear: Linear) -> bool:
    """Return whether the Linear quantizes its input token by token, so that it may come as codes."""
    return WEIGHT_SCHEMES[linear.scheme].int8_tokens


def int8_product(linear: Linear, x: QuantizedTokens) -> Tensor:
    """Return `linear` of tokens that are quantized already, [T, N]."""
    return linear_int8(x.codes, x.scale, linear.tensors, linear.bias, linear.scheme, x.dtype)


def for_norm(linear: Linear, x: Tensor) -> Tensor:
    """Return `linear` of x [T, K] for an AddNorm: [T, N], or split sums fp32 [S, T, N]."""
    return linear_partial(x, linear.tensors, linear.scheme) if splits(linear, x) else linear(x)


def int8_for_norm(linear: Linear, x: QuantizedTokens) -> Tensor:
    """Do as `for_norm` with tokens that are quantized already."""
    if splits(linear, x.codes):
        return linear_int8_partial(x.codes, x.scale, linear.tensors, linear.scheme)
    return int8_product(linear, x)


def mixture_for_norm(mixture: MoE, x: Tensor) -> Tensor:
    """Return the mixture of x [T, H] for an AddNorm: [T, H], or the experts' outputs fp32 [k, T, H]."""
    return mixture.summands(x) if leaves_sums(mixture, x) else mixture(x)


def leaves_sums(mixture: MoE, x: Tensor) -> bool:
    """Return whether the norm behind adds up the experts' outputs."""
    return x.is_cuda and len(x) <= SPLIT_TOKENS and mixture.shared is None


def splits(linear: Linear, x: Tensor) -> bool:
    """Return whether the product with x is left in split sums."""
    few = x.is_cuda and len(x) <= SPLIT_TOKENS
    return few and linear.bias is None and takes_int8(linear)
