"""Put a decoder together from an architecture and a source of weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from qrt.arch import Arch
from qrt.arch.experts import Experts
from qrt.arch.shard import WHOLE, Shard, head_rows, heads, of_rank
from qrt.definitions.activations import XIELU
from qrt.definitions.rope import RopeTables, tables_by_length
from qrt.definitions.stacks import Stack, expert_stacks, head_channels, stacks
from qrt.errors import UnsupportedError
from qrt.kernels.attention_rule import AttentionRule
from qrt.kernels.tensor_parallel import TensorParallelGroup
from qrt.layers.attention import Attention, HeadNorm, Heads
from qrt.layers.embedding import Embedding
from qrt.layers.experts import ExpertLinear, ExpertRouter, MoE
from qrt.layers.linear import Linear
from qrt.layers.mlp import MLP, XIELUMLP
from qrt.layers.norm import LayerNorm, NormLayer, RMSNorm, WholeNorm
from qrt.model.decoder import Decoder, DecoderLayer, Norms
from qrt.model.fused import FusedDecoder
from qrt.quant.weight import WeightData

XIELU_PARTS = ("alpha_p", "alpha_n", "beta", "eps")


class WeightSource(Protocol):
    """Where weights come from: a checkpoint, or a random generator."""

    device: torch.device
    dtype: torch.dtype

    def linear(self, stack: Stack) -> Linear:
        """Return the checkpoint's Linears of `stack` as one."""

    def experts(self, stacks: Sequence[Stack]) -> ExpertLinear:
        """Return the Linears of `stacks`, one an expert and all alike, as one."""

    def head(self, stack: Stack, *, unit: bool) -> Linear:
        """Return the head; `unit`: its rows are normalized to length 1."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return an unquantized tensor in its own dtype, on the device."""

    def has(self, name: str) -> bool:
        """Return whether there is a tensor `name`."""


def build(
    arch: Arch,
    weights: WeightSource,
    shard: Shard | None = None,
    *,
    peers: TensorParallelGroup | None = None,
    progress: str | None,
) -> Decoder:
    """Build the decoder layer by layer, with a progress bar on stderr called `progress`; None: without.

    Its steps run fused where `qrt.model.fused` can run its layers, else plainly. With a `shard` it is a
    rank's: an ordinary decoder of the rank's architecture. Its layers and logits are put together from those
    of all ranks by `peers`; without them that is left to the caller. Raises ConfigError where so many ranks
    cannot share the model.
    """
    shard = shard or WHOLE
    own, ropes = of_rank(arch, shard), _Ropes(arch, weights.device)
    embed = _embedding(arch, weights)
    indices: Iterable[int] = range(arch.num_layers)
    if progress is not None:  # `disable` would override TQDM_DISABLE
        indices = tqdm(indices, progress, unit="layer")
    layers = [_Layer(arch, shard, weights, i, ropes, peers).layer() for i in indices]
    norm = norm_layer(arch, weights, arch.names.norm, arch.hidden_size)
    head = _head(arch, shard, weights, embed)
    behind = [ropes.behind(i) for i in range(arch.num_layers)]
    copies = max(1, shard.ranks // arch.num_kv_heads)
    decoder = Decoder(own, embed, layers, norm, head, behind, peers, copies)
    return FusedDecoder.of(decoder) or decoder


def _head(arch: Arch, shard: Shard, weights: WeightSource, embed: Embedding) -> Linear:
    """Return the rank's rows of the head; of one that is tied they are a view of the embedding."""
    own, module = head_rows(arch.vocab_size, shard), arch.names.head
    if arch.tied_embeddings and not arch.unit_head:
        bias = weights.tensor(f"{module}.bias", (arch.vocab_size,)) if arch.head_bias else None
        rows = slice(own.start, own.stop)
        tied = WeightData(embed.weight[rows], bias=None if bias is None else bias[rows])
        return Linear.pack("fp16", tied, weights.device, weights.dtype)
    places = None if shard == WHOLE else torch.arange(own.start, own.stop)
    stack = Stack((module,), (arch.vocab_size,), arch.hidden_size, arch.head_bias, places=places)
    return weights.head(stack, unit=arch.unit_head)


def norm_layer(
    arch: Arch,
    weights: WeightSource,
    name: str,
    *shape: int,
    channels: Tensor | None = None,
    own: range | None = None,
) -> NormLayer:
    """Return the norm that the checkpoint stores as `name`, of weight `shape`.

    channels  the stored channel that goes to each place of the last dimension, or None: as they are
    own       which of the first dimension are kept, or None: all
    """
    spec = arch.norm
    if spec.kind == "unit":
        return LayerNorm(None, None, spec.eps)

    def read(name: str) -> Tensor:
        tensor = weights.tensor(name, shape)
        tensor = tensor if own is None else tensor[own.start : own.stop]
        return tensor if channels is None else tensor[..., channels.to(tensor.device)].contiguous()

    stored = read(f"{name}.weight")
    weight = stored.float() if spec.wide else stored.to(weights.dtype)
    if spec.plus:
        weight = weight + spec.plus
    if spec.kind == "rms":
        return RMSNorm(weight, spec.eps)
    bias = f"{name}.bias"
    return LayerNorm(weight, read(bias).to(weights.dtype) if weights.has(bias) else None, spec.eps)


def _embedding(arch: Arch, weights: WeightSource) -> Embedding:
    names, hidden = arch.names, arch.hidden_size
    table = weights.tensor(f"{names.embed}.weight", (arch.vocab_size, hidden)).to(weights.dtype)
    positions, first = None, arch.positions or 0
    if names.positions is not None:
        shape = arch.max_position + first, hidden
        positions = weights.tensor(f"{names.positions}.weight", shape).to(weights.dtype)
    norm = None if names.embed_norm is None else norm_layer(arch, weights, names.embed_norm, hidden)
    return Embedding(table, scale=arch.embed_scale, positions=positions, first=first, norm=norm)


class _Ropes:
    """The tables that layers share, each made once: rotary embeddings, and the factor of q by position."""

    def __init__(self, arch: Arch, device: torch.device) -> None:
        self._arch = arch
        self.q_scale = _q_scale(arch, device)
        self._tables = {
            key: tables_by_length(
                None if key is None else arch.ropes[key],
                arch.head_dim,
                arch.max_position,
                arch.long_rope_switch,
                device,
            )
            for key in {layer.rope for layer in arch.layers} | ({None} if arch.qk_norm_after_rope else set())
        }

    def of(self, index: int) -> RopeTables:
        """Return that of layer `index`."""
        return self._tables[self._arch.layers[index].rope]

    def behind(self, index: int) -> RopeTables:
        """Return what is left to turn behind `Attention.heads`."""
        return self._tables[None] if self._arch.qk_norm_after_rope else self.of(index)


def _q_scale(arch: Arch, device: torch.device) -> Tensor | None:
    """Return the factor of q by position, fp32 [P], None where there is none."""
    if (spec := arch.q_scale) is None:
        return None
    steps = (torch.arange(arch.max_position, dtype=torch.float64) + spec.first) // spec.length
    return (1 + spec.strength * torch.log1p(steps)).float().to(device)


class _Layer:
    """Builds a rank's part of layer `index`; `arch` is that of the whole model."""

    def __init__(
        self,
        arch: Arch,
        shard: Shard,
        weights: WeightSource,
        index: int,
        ropes: _Ropes,
        peers: TensorParallelGroup | None,
    ) -> None:
        self.arch, self.shard, self.weights, self.index, self.ropes = arch, shard, weights, index, ropes
        self.peers = peers
        self.prefix = f"{arch.names.layers}.{index}"

    def layer(self) -> DecoderLayer:
        """Return it."""
        arch, names = self.arch, self.arch.names
        own = stacks(arch, self.index, self.shard)
        linears = {role: self.weights.linear(stack) for role, stack in own.items()}
        for role in linears.keys() & {"o", "down"}:
            self._add_once(linears[role])
        norms = Norms(
            *(
                self._norm(name)
                for name in (names.attention_in, names.mlp_in, names.attention_out, names.mlp_out)
            )
        )
        return DecoderLayer(
            Attention(linears["qkv"], linears["o"], self._heads()),
            self._mixture(linears) if arch.at(self.index).experts else self._mlp(linears),
            norms,
            parallel=arch.parallel,
            residual_scale=arch.residual_scale,
            peers=self.peers,
        )

    def _add_once(self, linear: Linear | ExpertLinear) -> None:
        """Leave the bias of a product that is summed over the ranks to the first one.

        The others have zeros: all must run the same kernels.
        """
        if self.shard.rank > 0 and linear.bias is not None:
            linear.bias = torch.zeros_like(linear.bias)

    def _norm(self, name: str | None) -> NormLayer | None:
        if name is None:
            return None
        return norm_layer(self.arch, self.weights, f"{self.prefix}.{name}", self.arch.hidden_size)

    def _heads(self) -> Heads:
        arch, (q, kv) = self.arch, heads(self.arch, self.shard)
        after = arch.qk_norm_after_rope and arch.layers[self.index].rope is not None
        return Heads(
            len(q),
            len(kv),
            arch.head_dim,
            self._scores(q),
            q_norm=self._head_norm(arch.names.q_norm, q, arch.num_heads),
            k_norm=self._head_norm(arch.names.k_norm, kv, arch.num_kv_heads),
            early_rope=self.ropes.of(self.index) if after else None,
            clip=arch.clip,
            q_scale=self.ropes.q_scale if arch.layers[self.index].q_scaled else None,
        )

    def _scores(self, own: range) -> AttentionRule:
        """Return those of the query heads `own`."""
        arch, reach, heads = self.arch, self.arch.reach(self.index), slice(own.start, own.stop)
        slopes = torch.tensor(arch.alibi[heads], dtype=torch.float32, device=self.weights.device)
        return AttentionRule(
            arch.head_dim**-0.5 if arch.attention_scale is None else arch.attention_scale,
            reach.window,
            arch.reaches.index(reach),
            arch.softcap or 0.0,
            slopes if arch.alibi else None,
            self._sinks(heads),
            reach.segment,
        )

    def _sinks(self, heads: slice) -> Tensor | None:
        arch = self.arch
        if arch.names.sinks is None:
            return None
        return self.weights.tensor(f"{self.prefix}.{arch.names.sinks}", (arch.num_heads,)).float()[heads]

    def _head_norm(self, name: str, own: range, heads: int) -> HeadNorm | None:
        """Return the norm of the heads `own` of `heads`."""
        arch, weights, full = self.arch, self.weights, f"{self.prefix}.{name}"
        channels = head_channels(arch, self.index)
        match arch.qk_norm:
            case "head" | "after":
                return norm_layer(arch, weights, full, arch.head_dim, channels=channels)
            case "unit" if arch.layers[self.index].rope is not None:
                return RMSNorm(
                    torch.ones(arch.head_dim, dtype=torch.float32, device=weights.device), arch.norm.eps
                )
            case "modules":
                parts = [
                    norm_layer(arch, weights, f"{full}.norms.{i}", arch.head_dim, channels=channels)
                    for i in own
                ]
                return LayerNorm(torch.stack([part.parameters()[0] for part in parts]), None, arch.norm.eps)
            case "each":
                return norm_layer(arch, weights, full, heads, arch.head_dim, channels=channels, own=own)
            case "whole":
                places = torch.arange(arch.head_dim) if channels is None else channels
                places = (torch.tensor(own)[:, None] * arch.head_dim + places).flatten()
                norm = norm_layer(arch, weights, full, heads * arch.head_dim, channels=places)
                return WholeNorm(norm, self.shard.ranks, self.peers)
        return None

    def _mlp(self, linears: dict[str, Linear]) -> MLP:
        arch, gated = self.arch, self.arch.gate_up != "plain"
        gate_up, down = linears["gate_up"], linears["down"]
        if arch.act == "xielu":
            name = f"{self.prefix}.{arch.names.activation}"
            shapes = ((1,), (1,), (), ())
            parts = [
                self.weights.tensor(f"{name}.{part}", shape).to(self.weights.dtype)
                for part, shape in zip(XIELU_PARTS, shapes, strict=True)
            ]
            return XIELUMLP(gate_up, down, XIELU(*parts), gated=gated)
        return MLP(gate_up, down, arch.act, gated=gated)

    def _mixture(self, linears: dict[str, Linear]) -> MoE:
        arch, weights, experts = self.arch, self.weights, self.arch.experts
        assert experts is not None
        of_each = [expert_stacks(arch, self.index, i, self.shard) for i in range(experts.count)]
        gate_up, down = (weights.experts([own[role] for own in of_each]) for role in ("gate_up", "down"))
        self._add_once(down)
        if gate_up.scheme != down.scheme:
            raise UnsupportedError(
                f"{self.prefix}.{experts.module}: expected gate, up and down in one scheme, got "
                f"{gate_up.scheme} and {down.scheme}; quantize all of them alike, or none"
            )
        shared_gate = None
        if experts.shared_gate is not None:
            name = f"{self.prefix}.{experts.shared_gate}"
            shared_gate = weights.linear(Stack((name,), (1,), arch.hidden_size))
        return MoE(
            self._chooser(experts), gate_up, down, arch.act,
            shared=None if experts.shared is None else MLP(linears["gate_up"], linears["down"], arch.act),
            shared_gate=shared_gate,
        )  # fmt: skip

    def _chooser(self, experts: Experts) -> ExpertRouter:
        weights, gate, correction = self.weights, f"{self.prefix}.{experts.gate}", None
        if experts.correction is not None:
            name = f"{self.prefix}.{experts.correction}"
            correction = weights.tensor(name, experts.correction_shape).float().flatten()
        bias = (
            weights.tensor(f"{gate}.bias", (experts.count,)).to(weights.dtype) if experts.gate_bias else None
        )
        stored = weights.tensor(f"{gate}.weight", (experts.count, self.arch.hidden_size))
        return ExpertRouter(experts.router, stored.to(weights.dtype), bias, correction)
