"""The one decoder of every architecture: layers of y = x + attention(norm(x)); z = y + mlp(norm(y))."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from qrt.arch import ModelConfig
from qrt.kernels.chain import chain, fits
from qrt.kernels.gpu import launches_on
from qrt.kernels.prefill_attention.tiles import Queries
from qrt.kernels.step import StepMeta
from qrt.layers.attention import Attention
from qrt.layers.embedding import Embedding
from qrt.layers.linear import Linear
from qrt.layers.mlp import MLP
from qrt.layers.norm import RMSNorm
from qrt.layers.rope import RopeTables
from qrt.mem.storage import KVLayer, KVStorage
from qrt.quant.digits import MOST_TOKENS, Digits, room_for


class DecoderLayer:
    """Attention and MLP with the norm before each; the residual stream is kept by the caller."""

    def __init__(self, norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: MLP) -> None:
        self.norm = norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(
        self, norm: RMSNorm, reader: Linear | None, qkv: Tensor, residual: Tensor, step: StepMeta,
        kv: KVLayer, rope: RopeTables,
    ) -> Tensor:  # fmt: skip
        """qkv is `attention.qkv` of the layer's norm of `residual` [T, H], which attention and MLP are added
        to in place.

        Returns `norm`, the one that follows, of it [T, H], or what `reader`, the one Linear that reads that,
        makes of it.
        """
        chained, tokens = self.chained(norm, reader, residual), len(residual)
        y = self.attention(qkv, step, kv, rope, room_for(tokens) if chained and tokens > 1 else 0)
        return self.after_attention(y, norm, reader, residual, chained)

    def after_attention(
        self, y: Tensor | Digits, norm: RMSNorm, reader: Linear | None, residual: Tensor, chained: bool
    ) -> Tensor:
        """The rest of a call, from what the heads attended, y [T, Hq*D], by `chain` if `chained`, which takes
        Digits too."""
        if chained:
            tensors: list[list[Tensor]] = [x.tensors for x in self._linears(reader)]
            tensors += [] if reader else [[]]
            x = [y] if isinstance(y, Tensor) else [y.codes, y.facts]
            norms = self.mlp_norm.weight, norm.weight, norm.eps
            return chain(x, residual, *tensors, reader.bias if reader else None, *norms, self.mlp.down.scheme)
        assert isinstance(y, Tensor)
        y = self.mlp(self.mlp_norm.add_for(self.mlp.gate_up, residual, self.attention.o.shares(y)))
        return reader(norm.add_for(reader, residual, y)) if reader else norm.add(residual, y)

    def _linears(self, reader: Linear | None) -> list[Linear]:
        """Those behind attention, up to the one that reads the next norm."""
        return [self.attention.o, self.mlp.gate_up, self.mlp.down] + ([reader] if reader else [])

    def linears(self) -> tuple[Linear, ...]:
        """Every Linear of it."""
        return self.attention.qkv, self.attention.o, self.mlp.gate_up, self.mlp.down

    def chained(self, norm: RMSNorm, reader: Linear | None, residual: Tensor) -> bool:
        """Whether `chain` takes what is between the attention of two layers."""
        linears = self._linears(reader)
        if len(residual) > MOST_TOKENS or self.mlp_norm.eps != norm.eps:
            return False
        if len({own.scheme for own in linears}) > 1:
            return False
        tensors, biases = [own.tensors for own in linears], [own.bias for own in linears]
        return fits(self.attention.width, residual, tensors, biases, linears[0].scheme)


class Decoder:
    """A loaded model: weights, and nothing of requests. A step's state comes in StepMeta and KVStorage.

    config    sizes and facts; `config.max_position` is the longest context it answers rightly
    """

    def __init__(
        self,
        config: ModelConfig,
        embed: Embedding,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        head: Linear,
        rope: RopeTables,
    ) -> None:
        self.config = config
        self.embed = embed
        self.layers = layers
        self.norm = norm
        self.head = head
        self.rope = rope

    def hidden(self, step: StepMeta, kv: KVStorage) -> Tensor:
        """Run one step; the hidden states [T, H] after the final norm. K and V go into `kv`."""
        first, readers = self.layers[0], [layer.attention.qkv for layer in self.layers]
        blocks = zip(self.blocks(), [*readers[1:], None], strict=True)
        with launches_on(self.device):
            residual, x = self.embed(step.tokens, first.norm)
            x = readers[0](x)
            for i, ((layer, norm), reader) in enumerate(blocks):
                x = layer(norm, reader, x, residual, step, kv.layer(i), self.rope)
        return x

    def of_layers(self, count: int) -> Decoder:
        """Return a decoder of the first `count` layers, between the same embedding and head."""
        return Decoder(self.config, self.embed, self.layers[:count], self.norm, self.head, self.rope)

    def blocks(self) -> Iterator[tuple[DecoderLayer, RMSNorm]]:
        """Each layer with the norm that follows it, the final one last."""
        return zip(self.layers, [layer.norm for layer in self.layers[1:]] + [self.norm], strict=True)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [L, H] -> [L, V] in their dtype; pass only the rows that are needed."""
        with launches_on(self.device):
            return self.head(hidden)

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, norms and the embedding."""
        return self.embed.weight.dtype

    @property
    def queries(self) -> Queries:
        """How queries of a chunk are cut into tiles."""
        config = self.config
        return Queries.of(config.num_heads, config.num_kv_heads, config.head_dim, self.dtype.itemsize)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed.weight.device

    def linears(self) -> Iterator[Linear]:
        """Every Linear, the head last."""
        for layer in self.layers:
            yield from layer.linears()
        yield self.head

    def parameters(self) -> Iterator[Tensor]:
        """Every weight tensor; a tied head yields the embedding's table again."""
        yield self.embed.weight
        for linear in self.linears():
            yield from linear.parameters()
        for layer in self.layers:
            norms = (layer.norm, layer.mlp_norm, layer.attention.q_norm, layer.attention.k_norm)
            yield from (norm.weight for norm in norms if norm is not None)
        yield self.norm.weight

    @property
    def num_bytes(self) -> int:
        """Memory of all weights; shared ones count once. The RoPE tables are not weights."""
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in self.parameters()}.values())

    @property
    def schemes(self) -> Counter[str]:
        """How many projections of the layers each weight scheme has; the head is not counted."""
        return Counter(linear.scheme for linear in self.linears() if linear is not self.head)

    @property
    def scheme(self) -> str:
        """The layers' weight scheme in one word: `w4a16`, or `fp16+w4a16` where they differ."""
        return "+".join(sorted(self.schemes))

    def __str__(self) -> str:
        """For start-up: `LlamaForCausalLM, 32 layers, w4a16 (head fp16), 5.35 GiB, torch.bfloat16`."""
        return (
            f"{self.config.architecture}, {self.config.num_layers} layers, {self.scheme} "
            f"(head {self.head.scheme}), {self.num_bytes / 2**30:.2f} GiB, {self.dtype}"
        )
