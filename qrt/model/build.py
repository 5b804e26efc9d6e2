"""Put a decoder together from arch data, a config and a source of weights."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from qrt.arch import Arch, ModelConfig
from qrt.layers.attention import Attention
from qrt.layers.embedding import Embedding
from qrt.layers.linear import Linear
from qrt.layers.mlp import MLP
from qrt.layers.norm import RMSNorm
from qrt.layers.rope import rope_tables
from qrt.model.decoder import Decoder, DecoderLayer
from qrt.model.fused import FusedDecoder
from qrt.quant.weight import WeightData


class LinearShape(NamedTuple):
    """Of one run-time Linear: the N of each part stacked in it, the K they share, whether it has a bias."""

    outs: tuple[int, ...]
    in_features: int
    bias: bool


class WeightSource(Protocol):
    """Where weights come from: a checkpoint, or a random generator."""

    device: torch.device
    dtype: torch.dtype

    def linear(self, modules: tuple[str, ...], shape: LinearShape) -> Linear:
        """Return the checkpoint's Linears `modules`, stacked along N in this order."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return an unquantized tensor in the model dtype, on the device."""


def layer_shapes(config: ModelConfig) -> dict[str, LinearShape]:
    """Return the run-time Linears of one layer, by the names that `Arch.fuse` gives them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "self_attn.qkv_proj": LinearShape((q, kv, kv), hidden, config.qkv_bias),
        "self_attn.o_proj": LinearShape((hidden,), q, config.o_bias),
        "mlp.gate_up_proj": LinearShape((inner, inner), hidden, config.mlp_bias),
        "mlp.down_proj": LinearShape((hidden,), inner, config.mlp_bias),
    }


def layer_norms(config: ModelConfig) -> dict[str, int]:
    """Return the norms of one layer, by their checkpoint names, with their sizes."""
    norms = {"input_layernorm": config.hidden_size, "post_attention_layernorm": config.hidden_size}
    heads = {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    return norms | heads if config.qk_norm else norms


def build(config: ModelConfig, arch: Arch, weights: WeightSource, *, progress: str) -> Decoder:
    """Build the decoder layer by layer, with a progress bar on stderr called `progress`.

    Its steps run fused where `qrt.model.fused` can run its layers, else plainly.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    embed = Embedding(weights.tensor(f"{arch.embed}.weight", (vocab, hidden)))
    layers = [
        _layer(config, arch, weights, i) for i in tqdm(range(config.num_layers), progress, unit="layer")
    ]
    norm = RMSNorm(weights.tensor(f"{arch.norm}.weight", (hidden,)), config.rms_norm_eps)
    if config.tied_embeddings:
        head = Linear.pack("fp16", WeightData(embed.weight), weights.device, weights.dtype)
    else:
        head = weights.linear((arch.head,), LinearShape((vocab,), hidden, False))
    rope = rope_tables(config.rope, config.head_dim, config.max_position, weights.device)
    decoder = Decoder(config, embed, layers, norm, head, rope)
    return FusedDecoder.of(decoder) or decoder


def _layer(config: ModelConfig, arch: Arch, weights: WeightSource, index: int) -> DecoderLayer:
    prefix = f"{arch.layers}.{index}"
    shapes = layer_shapes(config)
    linears = {
        role: weights.linear(tuple(f"{prefix}.{part}" for part in parts), shapes[role])
        for role, parts in arch.fuse
    }

    norms = {
        name: RMSNorm(weights.tensor(f"{prefix}.{name}.weight", (size,)), config.rms_norm_eps)
        for name, size in layer_norms(config).items()
    }
    attention = Attention(
        linears["self_attn.qkv_proj"],
        linears["self_attn.o_proj"],
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        q_norm=norms.get("self_attn.q_norm"),
        k_norm=norms.get("self_attn.k_norm"),
    )
    mlp = MLP(linears["mlp.gate_up_proj"], linears["mlp.down_proj"])
    return DecoderLayer(norms["input_layernorm"], attention, norms["post_attention_layernorm"], mlp)
