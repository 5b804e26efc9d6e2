"""The one decoder of every architecture, layer by layer from its definition.

This is what the tests trust. `qrt.model.fused` runs the same layers in fewer launches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qrt.arch import ModelConfig
from qrt.kernels.gpu import launches_on
from qrt.kernels.prefill_attention.tiles import Queries
from qrt.kernels.step import KVLayer, StepMeta
from qrt.layers.attention import Attention
from qrt.layers.embedding import Embedding
from qrt.layers.linear import Linear
from qrt.layers.mlp import MLP
from qrt.layers.norm import RMSNorm
from qrt.layers.rope import RopeTables
from qrt.mem.storage import KVStorage


class DecoderLayer:
    """Attention and MLP, each behind a norm and added to what it read."""

    def __init__(self, attention_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: MLP) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(self, x: Tensor, step: StepMeta, kv: KVLayer, rope: RopeTables) -> Tensor:
        """x [T, H] -> [T, H]; K and V of the step's tokens go into `kv`."""
        x = x + self.attention(self.attention_norm(x), step, kv, rope)
        return x + self.mlp(self.mlp_norm(x))

    def linears(self) -> tuple[Linear, ...]:
        """Every Linear of it."""
        return self.attention.qkv, self.attention.o, self.mlp.gate_up, self.mlp.down

    def norms(self) -> tuple[RMSNorm, ...]:
        """Every norm of it."""
        norms = (self.attention_norm, self.mlp_norm, self.attention.q_norm, self.attention.k_norm)
        return tuple(norm for norm in norms if norm is not None)


@dataclass(eq=False, repr=False)
class Decoder:
    """A loaded model: weights, and nothing of requests. A step's state comes in StepMeta and KVStorage.

    config    sizes and facts; `config.max_position` is the longest context it answers rightly
    norm      the final one, which the head reads
    """

    config: ModelConfig
    embed: Embedding
    layers: list[DecoderLayer]
    norm: RMSNorm
    head: Linear
    rope: RopeTables

    def hidden(self, step: StepMeta, kv: KVStorage) -> Tensor:
        """Run one step; the hidden states [T, H] after the final norm. K and V go into `kv`."""
        with launches_on(self.device):
            x = self.embed(step.tokens)
            for i, layer in enumerate(self.layers):
                x = layer(x, step, kv.layer(i), self.rope)
            return self.norm(x)

    def of_layers(self, count: int) -> Decoder:
        """Return a decoder of the first `count` layers, between the same embedding and head."""
        return replace(self, layers=self.layers[:count])

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
            yield from (norm.weight for norm in layer.norms())
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
