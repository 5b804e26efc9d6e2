"""What the operators of `qrt.kernels.chain` compute of a layer, decided once per layer and then per step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from qrt.kernels.chain import (
    FromAttention,
    Link,
    ToAttention,
    fits,
    fits_from_attention,
    fits_to_attention,
)
from qrt.layers.experts import MoE
from qrt.layers.linear import Linear
from qrt.layers.mlp import MLP
from qrt.layers.norm import LayerNorm, NormLayer, RMSNorm
from qrt.model.decoder import DecoderLayer
from qrt.model.merged import AddNorm
from qrt.quant.digits import MOST_TOKENS


class Links(NamedTuple):
    """The parts of a layer behind its attention that have an operator; None: a part runs in other ways.

    whole    all of a layer with a dense mlp, for `chain`
    start    what is in front of a mixture, for `from_attention`
    end      what is behind a mixture, for `to_attention`
    """

    whole: Link | None = None
    start: FromAttention | None = None
    end: ToAttention | None = None

    @classmethod
    def of(cls, layer: DecoderLayer, to_mlp: AddNorm, to_next: AddNorm, next_qkv: Linear | None) -> Links:
        """Return what the operators take of a layer.

        They take nothing of one whose mlp stands beside attention, or whose ranks do not all-reduce so many
        tokens through memory.
        """
        if layer.parallel or (layer.peers is not None and layer.peers.most_rows < MOST_TOKENS):
            return cls()
        if isinstance(layer.mlp, MoE):
            return cls(start=_start(layer.attention.o, to_mlp), end=_end(to_next, next_qkv))
        return cls(whole=_whole(layer, layer.mlp, to_mlp, to_next, next_qkv))

    def fitting(self, attended: int, residual: Tensor) -> Links:
        """Return those whose kernels take this step; o reads `attended` inputs."""
        whole, start, end = self
        return Links(
            whole if whole is not None and fits(attended, residual, whole) else None,
            start if start is not None and fits_from_attention(attended, residual, start) else None,
            end if end is not None and fits_to_attention(residual, end) else None,
        )

    def read_digits(self, tokens: int) -> bool:
        """Return whether what the heads attended may come as `Digits`."""
        return self.start is not None or (self.whole is not None and tokens > 1)


def _start(o: Linear, add: AddNorm) -> FromAttention | None:
    """Return None for LayerNorm, norms that differ in eps, no norm in front, and where o has a bias."""
    eps = _eps((add.behind, add.norm))
    if eps is None or not isinstance(add.norm, RMSNorm) or o.bias is not None:
        return None
    own = o.tensors, add.norm.weight, eps, o.scheme, _weight(add.behind), add.scale
    return FromAttention(*own, _words(add))


def _end(add: AddNorm, qkv: Linear | None) -> ToAttention | None:
    """Return None for LayerNorm, norms that differ in eps, and behind the last layer."""
    eps = _eps((add.behind, add.norm))
    if eps is None or qkv is None:
        return None
    norm, behind = _weight(add.norm), _weight(add.behind)
    return ToAttention(qkv.tensors, qkv.bias, norm, eps, qkv.scheme, behind, add.scale, _words(add))


def _whole(
    layer: DecoderLayer, mlp: MLP, to_mlp: AddNorm, to_next: AddNorm, next_qkv: Linear | None
) -> Link | None:
    """Return None for LayerNorm, and where `chain` has no place for a difference.

    Those are products that differ in scheme, norms that differ in eps, a bias of a product other than
    `next_qkv`, and an mlp without a gate.
    """
    own = [layer.attention.o, mlp.gate_up, mlp.down]
    schemes = {linear.scheme for linear in own} | ({next_qkv.scheme} if next_qkv else set())
    eps = _eps((to_mlp.behind, to_mlp.norm, to_next.behind, to_next.norm))
    if eps is None or len(schemes) > 1 or not mlp.gated:
        return None
    if any(linear.bias is not None for linear in own):
        return None
    return Link(
        o=layer.attention.o.tensors,
        gate_up=mlp.gate_up.tensors,
        down=mlp.down.tensors,
        qkv=next_qkv.tensors if next_qkv else [],
        bias=next_qkv.bias if next_qkv else None,
        mlp_norm=_weight(to_mlp.norm),
        norm=_weight(to_next.norm),
        eps=eps,
        scheme=mlp.down.scheme,
        act=mlp.act,
        attention_out=_weight(to_mlp.behind),
        mlp_out=_weight(to_next.behind),
        scale=layer.residual_scale,
        peers=_words(to_mlp),
    )


def _eps(norms: Iterable[NormLayer | None]) -> float | None:
    """Return the eps of all the norms, 0 if there are none; None where they differ, and for LayerNorm."""
    there = [norm for norm in norms if norm is not None]
    eps = {norm.eps for norm in there} or {0.0}
    return None if len(eps) > 1 or any(isinstance(norm, LayerNorm) for norm in there) else eps.pop()


def _weight(norm: NormLayer | None) -> Tensor | None:
    return None if norm is None else norm.weight


def _words(add: AddNorm) -> Tensor | None:
    """Return the words of the memory through which ranks all-reduce, if there are several."""
    return None if add.peers is None or add.peers.memory is None else add.peers.memory.words
