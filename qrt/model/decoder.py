"""The one decoder of every architecture, layer by layer from its definition.

This is what the tests trust. `qrt.model.fused` runs the same layers in fewer launches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from qrt.arch import Arch
from qrt.arch.shard import Shard, head_rows
from qrt.definitions.rope import RopeTables
from qrt.kernels.all_reduce import reduce
from qrt.kernels.gpu import launches_on
from qrt.kernels.prefill_attention.tiles import Queries
from qrt.kernels.step import KVLayer, StepMeta
from qrt.kernels.tensor_parallel import TensorParallelGroup
from qrt.layers.attention import Attention
from qrt.layers.embedding import Embedding
from qrt.layers.experts import ExpertLinear, MoE
from qrt.layers.linear import Linear
from qrt.layers.mlp import MLP
from qrt.layers.norm import NormLayer, normed
from qrt.mem.storage import KVStorage


class Norms(NamedTuple):
    """The norms of a layer: in front of attention and mlp, and behind them. None: there is none."""

    attention_in: NormLayer | None
    mlp_in: NormLayer | None
    attention_out: NormLayer | None = None
    mlp_out: NormLayer | None = None


class DecoderLayer:
    """Attention and mlp, each between its norms and added to what it read.

    mlp             in a sparse layer a mixture of experts
    parallel        both read the layer's input
    residual_scale  what both are multiplied by before they are added
    peers           the ranks whose attention and mlp add up to the layer's, or None
    """

    def __init__(
        self,
        attention: Attention,
        mlp: MLP | MoE,
        norms: Norms,
        *,
        parallel: bool = False,
        residual_scale: float = 1.0,
        peers: TensorParallelGroup | None = None,
    ) -> None:
        self.attention = attention
        self.mlp = mlp
        self.norms = norms
        self.parallel = parallel
        self.residual_scale = residual_scale
        self.peers = peers

    def __call__(self, x: Tensor, step: StepMeta, kv: KVLayer, rope: RopeTables) -> Tensor:
        """x [T, H] -> [T, H]; K and V of the step's tokens go into `kv`."""
        n, m = self.norms, self.residual_scale
        attended = self._whole(self.attention(normed(n.attention_in, x), step, kv, rope))
        y = x + m * normed(n.attention_out, attended)
        out = self._whole(self.mlp(normed(n.mlp_in, x if self.parallel else y)))
        return y + m * normed(n.mlp_out, out)

    def _whole(self, share: Tensor) -> Tensor:
        """Return the sum of what the ranks compute."""
        return share if self.peers is None else reduce(share, self.peers)

    def linears(self) -> tuple[Linear | ExpertLinear, ...]:
        """Every product with a weight scheme."""
        return self.attention.qkv, self.attention.o, *self.mlp.linears()

    def parameters(self) -> Iterator[Tensor]:
        """Every weight tensor outside its Linears."""
        yield from self.attention.parameters()
        yield from self.mlp.parameters()
        for norm in self.norms:
            yield from () if norm is None else norm.parameters()


@dataclass(eq=False, repr=False)
class Decoder:
    """A loaded model: weights, and nothing of requests. A step's state comes in StepMeta and KVStorage.

    arch      sizes and facts; `arch.max_position` is the longest context it answers rightly
    norm      the final one, which the head reads
    ropes     the rotary embedding of each layer
    peers     the ranks of which this is one: `arch` has its heads, and `head` its rows of the vocabulary; or
              None
    copies    how many ranks have the same KV heads as this one
    """

    arch: Arch
    embed: Embedding
    layers: list[DecoderLayer]
    norm: NormLayer
    head: Linear
    ropes: list[RopeTables]
    peers: TensorParallelGroup | None = None
    copies: int = 1

    def hidden(self, step: StepMeta, kv: KVStorage) -> Tensor:
        """Run one step; the hidden states [T, H] after the final norm. K and V go into `kv`."""
        with launches_on(self.device):
            x = self.embed(step.tokens, step.positions)
            for i, layer in enumerate(self.layers):
                x = layer(x, step, kv.layer(i), self.ropes[i])
            return self.norm(x)

    def of_layers(self, count: int) -> Decoder:
        """Return a decoder of the first `count` layers, between the same embedding and head."""
        return replace(self, layers=self.layers[:count], ropes=self.ropes[:count])

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [L, H] -> [L, V] in their dtype; pass only the rows that are needed."""
        own = self.own_logits(hidden)
        if self.peers is None:
            return own
        with launches_on(self.device):
            return self.peers.gather_columns(own, [len(rows) for rows in self._head_rows(self.peers)])

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the tokens whose rows of the head this rank has, from `first_token` on."""
        with launches_on(self.device):
            logits = self.head(hidden)
            if self.arch.logit_scale != 1.0:
                logits *= self.arch.logit_scale
            cap = self.arch.logit_cap
            return logits if cap is None else cap * torch.tanh(logits / cap)

    @property
    def first_token(self) -> int:
        """The first token of `own_logits`, a multiple of 64."""
        return 0 if self.peers is None else self._head_rows(self.peers)[self.peers.rank].start

    def _head_rows(self, peers: TensorParallelGroup) -> list[range]:
        """Return the rows of the vocabulary that the head of each rank has."""
        return [head_rows(self.arch.vocab_size, Shard(rank, peers.size)) for rank in range(peers.size)]

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, norms and the embedding."""
        return self.embed.weight.dtype

    @property
    def queries(self) -> Queries:
        """How queries of a chunk are cut into tiles."""
        arch = self.arch
        return Queries.of(arch.num_heads, arch.num_kv_heads, arch.head_dim, self.dtype.itemsize)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed.weight.device

    def linears(self) -> Iterator[Linear | ExpertLinear]:
        """Every product with a weight scheme, the head last."""
        for layer in self.layers:
            yield from layer.linears()
        yield self.head

    def parameters(self) -> Iterator[Tensor]:
        """Every weight tensor; a tied head yields the embedding's table again."""
        yield from self.embed.parameters()
        for linear in self.linears():
            yield from linear.parameters()
        for layer in self.layers:
            yield from layer.parameters()
        yield from self.norm.parameters()

    @property
    def num_bytes(self) -> int:
        """Memory of all weights; shared ones count once. The RoPE tables are not weights."""
        sizes: dict[int, int] = {}
        for tensor in self.parameters():  # a rank's tied head is a part of the embedding
            place = tensor.untyped_storage().data_ptr()
            sizes[place] = max(tensor.nbytes, sizes.get(place, 0))
        return sum(sizes.values())

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
            f"{self.arch.name}, {self.arch.num_layers} layers, {self.scheme} "
            f"(head {self.head.scheme}), {self.num_bytes / 2**30:.2f} GiB, {self.dtype}"
        )
