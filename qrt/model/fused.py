"""The layers of a decoder run as chains of kernels: the equation of `qrt.model.decoder` in fewer launches.

Every fusion stands here, and the plain layers know of none:

    embed and norm    the first norm is taken as the rows of the embedding are copied
    append            norms of heads, RoPE, the store of K and V and the attention of few decodes: one launch
    split sums        an int8 product of few tokens hands the sums of its splits to the norm that adds them
    add and norm      the residual addition goes with the norm that reads the sum
    norm to int8      a norm whose reader quantizes its input hands it codes
    act * up          goes with the product of gate_up, and hands codes to a `down` that quantizes its input
    chain             one operator for all between two attentions, for few tokens on a Hopper GPU; where a
                      mixture stands between them one before and one behind it (`qrt.model.links`)

The residual x [T, H] is one tensor that every addition changes in place.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from qrt.definitions.rope import RopeTables
from qrt.kernels.act_mul import act_mul, act_mul_int8
from qrt.kernels.attention import append
from qrt.kernels.chain import chain, from_attention, to_attention
from qrt.kernels.decode_attention.blocks import block_of, measured_block
from qrt.kernels.gpu import launches_on
from qrt.kernels.linear import linear_act, linear_act_int8
from qrt.kernels.linear.product import Epilogue
from qrt.kernels.rmsnorm import embed_rmsnorm
from qrt.kernels.step import KVLayer, StepMeta
from qrt.kernels.tensor_parallel import TensorParallelGroup
from qrt.layers.attention import Attention
from qrt.layers.experts import MoE
from qrt.layers.linear import Linear
from qrt.layers.mlp import MLP
from qrt.layers.norm import NormLayer, RMSNorm, normed
from qrt.mem.storage import KVStorage
from qrt.model import merged
from qrt.model.decoder import Decoder, DecoderLayer
from qrt.model.links import Links
from qrt.model.merged import AddNorm, for_norm, int8_for_norm, mixture_for_norm, takes_int8
from qrt.model.unfused import unfused_part
from qrt.quant.digits import GROUP, Digits, room_for
from qrt.quant.kv import KV_FORMATS
from qrt.quant.tokens import QuantizedTokens
from qrt.quant.weight import WEIGHT_SCHEMES

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class FusedDecoder(Decoder):
    """A decoder whose steps run as chains of kernels; all else is as in Decoder."""

    def __post_init__(self) -> None:
        following = [(layer.norms.attention_in, layer.attention.qkv) for layer in self.layers[1:]]
        readers: list[tuple[NormLayer | None, Linear | None]] = [*following, (self.norm, None)]
        cuts = self.peers is not None and cuts_rows(self.layers)
        self.fused = [
            FusedLayer(layer, *reader, cuts=cuts) for layer, reader in zip(self.layers, readers, strict=True)
        ]

    @classmethod
    def of(cls, decoder: Decoder) -> FusedDecoder | None:
        """Return a decoder that runs the layers of `decoder` fused.

        Returns None, and logs why, where a part of a layer is one that the kernels do not compute.
        """
        if unknown := unfused_part(decoder):
            logger.warning(
                "layers run one operator at a time, which is slower; no fused kernel knows this: %s", unknown
            )
            return None
        return cls(**{own.name: getattr(decoder, own.name) for own in fields(Decoder)})

    def hidden(self, step: StepMeta, kv: KVStorage) -> Tensor:
        """Run one step, as `Decoder.hidden`."""
        first = self.layers[0]
        norm, embed = first.norms.attention_in, self.embed
        with launches_on(self.device):
            if isinstance(norm, RMSNorm) and embed.scaled_rows:
                residual, x = embed_rmsnorm(step.tokens, embed.weight, norm.weight, norm.eps, embed.scale)
            else:
                residual = embed(step.tokens, step.positions)
                x = normed(norm, residual)
            x = first.attention.qkv(x)
            for i, layer in enumerate(self.fused):
                x = layer(x, residual, step, kv.layer(i), self.ropes[i])
        return x


class FusedLayer:
    """A layer from its attention on, and what reads it: the norm that follows, and the next q, k and v.

    layer       the plain layer, whose weights it runs
    to_mlp      the addition of what attention gives, and the norm in front of the mlp
    to_next     the addition of what the mlp gives, and the next layer's norm in front of attention, or the
                final norm
    next_qkv    the next layer's attention.qkv, or None behind the last layer
    cuts        whether ranks add to their own rows of the residual alone in long steps (`AddNorm`)
    """

    def __init__(
        self, layer: DecoderLayer, norm: NormLayer | None, next_qkv: Linear | None, *, cuts: bool = False
    ) -> None:
        norms, scale = layer.norms, layer.residual_scale
        self.layer = layer
        self.to_mlp = AddNorm.of(norms.attention_out, scale, norms.mlp_in, layer.peers, cuts=cuts)
        self.to_next = AddNorm.of(norms.mlp_out, scale, norm, layer.peers, cuts=cuts)
        self.next_qkv = next_qkv
        self.links = Links.of(layer, self.to_mlp, self.to_next, next_qkv)
        if layer.peers is not None and layer.peers.memory is not None and not self._is_alike(layer.peers):
            self.links = Links()

    def __call__(
        self, qkv: Tensor, residual: Tensor, step: StepMeta, kv: KVLayer, rope: RopeTables
    ) -> Tensor:
        """Add the layer to `residual` [T, H] in place; `qkv` is what its attention reads.

        Returns `next_qkv` of `norm` of the new residual; behind the last layer, that norm [T, H].
        """
        links = self.fitting(residual)
        attended = self._attend(qkv, step, kv, rope, links)
        return self.after_attention(attended, residual, links)

    def fitting(self, residual: Tensor) -> Links:
        """Return what the operators of `qrt.kernels.chain` compute behind the attention of this step."""
        (heads, *_), head_dim = self.layer.attention.qkv_heads, self.layer.attention.head_dim
        return self.links.fitting(heads * head_dim, residual)

    def _is_alike(self, peers: TensorParallelGroup) -> bool:
        """Return whether the same operators take this layer's part on every rank: they meet each other.

        Parts differ where inputs are out of order, and in their sizes.
        """
        o, marks = self.layer.attention.o, 0
        hidden = WEIGHT_SCHEMES[o.scheme].out_features(o.tensors)
        for tokens in (1, 2):
            x = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=peers.device)
            for link in self.fitting(x):
                marks = 2 * marks + (link is not None)
        return len(set(peers.all_gather_int(marks))) == 1

    def epilogues(self, tokens: Tensor) -> dict[str, Epilogue]:
        """Return what the products of o, gate_up and down are asked for where no link fits.

        `tokens` has as many rows as the step, and its device.
        """
        o, mlp = self.layer.attention.o, self.layer.mlp.dense
        if mlp is None:
            return {"o": Epilogue.PARTIAL_SUMS if merged.splits(o, tokens) else Epilogue.PLAIN}
        gate_up, down = mlp.gate_up, mlp.down
        joined = mlp.gated and takes_int8(gate_up) == takes_int8(down)
        joined = joined and not (self.layer.parallel and takes_int8(gate_up))
        sums = {
            name: Epilogue.PARTIAL_SUMS if merged.splits(linear, tokens) else Epilogue.PLAIN
            for name, linear in (("o", o), ("down", down))
        }
        return sums | {"gate_up": Epilogue.ACT_MUL if joined else Epilogue.PLAIN}

    def after_attention(self, attended: list[Tensor], residual: Tensor, links: Links) -> Tensor:
        """Run the rest of a call, with the operators of `links`.

        attended: [what the heads attended, [T, Hq*D]], or [codes, facts] of it if `links` read `Digits`.
        """
        if links.whole is not None:
            return chain(attended, residual, links.whole)
        mlp = self.layer.mlp
        if links.start is not None and isinstance(mlp, MoE):
            y = mixture_for_norm(mlp, from_attention(attended, residual, links.start))
        else:
            y = self._mlp(for_norm(self.layer.attention.o, attended[0]), residual)
        if links.end is not None:
            return to_attention(y, residual, links.end)
        if self.next_qkv is None:
            return self.to_next(residual, y)
        return self.to_next.linear(self.next_qkv, residual, y)

    def _attend(
        self, qkv: Tensor, step: StepMeta, kv: KVLayer, rope: RopeTables, links: Links
    ) -> list[Tensor]:
        """Store K and V, and return what the heads attended as `after_attention` takes it."""
        attention = self.layer.attention
        q, k, v = attention.parts(qkv, step)
        if not _appends(attention, q, step, kv):
            return [attention.attend(q, k, v, step, kv, rope)]
        tokens, heads, head_dim = q.shape
        if head_dim == GROUP and links.read_digits(tokens):
            digits = Digits.empty(tokens, heads * head_dim, room_for(tokens), q.device)
            out = [digits.codes, digits.facts]
        else:
            out = [torch.empty(q.shape, dtype=q.dtype, device=q.device)]
        append(q, k, v, attention.norms, rope, step, kv, out, attention.scores)
        return out if len(out) == 2 else [out[0].flatten(1)]

    def _mlp(self, y: Tensor, residual: Tensor) -> Tensor:
        """Add y, which may be split sums, to `residual` in place; return the MLP of it, as `for_norm`."""
        mlp = self.layer.mlp
        if self.layer.parallel:
            out = self._mlp_beside(residual)
            self.to_mlp.add(residual, y)
            return out
        if isinstance(mlp, MoE):
            return mixture_for_norm(mlp, self.to_mlp(residual, y))
        gate_up, down, act = mlp.gate_up, mlp.down, mlp.act
        if mlp.gated and not takes_int8(gate_up) and not takes_int8(down):
            x = self.to_mlp(residual, y)
            return down(linear_act(x, gate_up.tensors, gate_up.bias, gate_up.scheme, act))
        if mlp.gated and takes_int8(gate_up) and takes_int8(down):
            tokens = self.to_mlp.int8(residual, y)
            weight = gate_up.tensors, gate_up.bias, gate_up.scheme
            codes, scale = linear_act_int8(tokens.codes, tokens.scale, *weight, tokens.dtype, act)
            return int8_for_norm(down, QuantizedTokens(codes, scale, tokens.dtype))
        both = self.to_mlp.linear(gate_up, residual, y)
        if not takes_int8(down):
            return down(act_mul(both, act, mlp.gated))
        codes, scale = act_mul_int8(both, act, mlp.gated)
        return int8_for_norm(down, QuantizedTokens(codes, scale, both.dtype))

    def _mlp_beside(self, residual: Tensor) -> Tensor:
        """Return the MLP of `residual` before attention is added to it, as `for_norm`."""
        mlp, x = self.layer.mlp, normed(self.to_mlp.norm, residual)
        if isinstance(mlp, MoE):
            return mixture_for_norm(mlp, x)
        if not mlp.gated:
            return for_norm(mlp.down, act_mul(mlp.gate_up(x), mlp.act, False))
        gate_up = mlp.gate_up
        return for_norm(mlp.down, linear_act(x, gate_up.tensors, gate_up.bias, gate_up.scheme, mlp.act))


def cuts_rows(layers: Sequence[DecoderLayer]) -> bool:
    """Return whether ranks gain by adding to their own rows of the residual alone in long steps.

    They do if a reader of a norm takes codes, which are half the bytes. No block may read the residual.
    """
    readers = [layer.attention.qkv for layer in layers]
    readers += [layer.mlp.gate_up for layer in layers if isinstance(layer.mlp, MLP)]
    return any(map(takes_int8, readers)) and not any(layer.parallel for layer in layers)


def _appends(attention: Attention, q: Tensor, step: StepMeta, kv: KVLayer) -> bool:
    """Return whether there are decodes alone, and `append` is the fastest for them."""
    if step.prefill is not None or step.decode is None or not step.decode.newest:
        return False
    block = measured_block(KV_FORMATS[kv.format], len(q), *attention.qkv_heads[:2])
    return block_of(block, attention.head_dim, q.dtype).appends
