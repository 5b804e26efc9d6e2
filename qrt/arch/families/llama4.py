"""Meta's Llama 4: experts that read scaled input; most layers turn and attend within segments."""

from __future__ import annotations

from typing import Any

from qrt.arch.base import Arch, Names
from qrt.arch.entries import MAX_LAYERS, Entries, number, positive, typed
from qrt.arch.experts import Experts, RouterConfig, Stacked
from qrt.arch.families.llama import full, llama, neighbours, sparse
from qrt.arch.layer import Layer, QScale
from qrt.errors import CheckpointError, UnsupportedError

DEFAULTS: dict[str, Any] = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "num_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}
KINDS = {"chunked_attention": True, "full_attention": False}
NAMES = Names(gate="feed_forward.gate_proj", up="feed_forward.up_proj", down="feed_forward.down_proj")


def llama4(c: Entries) -> Arch:
    """Scout and Maverick. In layers without RoPE q grows with its position."""
    c = c.filled({"num_experts": "num_local_experts"}, **DEFAULTS)
    q_scale = None
    if typed(c, "attn_temperature_tuning", bool, int):
        q_scale = QScale(number(c, "attn_scale"), positive(c, "floor_scale"), 1)
    arch = llama(
        c, names=NAMES, layers=_layers(c), intermediate_size=positive(c, "intermediate_size_mlp"),
        qk_norm="unit" if typed(c, "use_qk_norm", bool) else None, q_scale=q_scale, mlp_bias=False,
    )  # fmt: skip
    width = positive(c, "intermediate_size")
    experts = Experts(
        positive(c, "num_experts", most=MAX_LAYERS), width,
        RouterConfig(positive(c, "num_experts_per_tok"), "sigmoid", on_input=True), "feed_forward.experts",
        stacked=Stacked(transposed=True), gate="feed_forward.router", shared="feed_forward.shared_expert",
        shared_width=width,
    )  # fmt: skip
    mixtures = typed(c, "moe_layers", list, None)
    if mixtures is None:
        step = positive(c, "interleave_moe_layer_step")
        mixtures = range(step - 1, arch.num_layers, step)
    return sparse(neighbours(arch), experts, lambda i: i in mixtures)


def _layers(c: Entries) -> tuple[Layer, ...]:
    """Return what differs between layers: those that turn are `no_rope_layers`, by its ones, in spite of it.

    `layer_types` says which attend within segments, else those do that turn.
    """
    count, every = len(full(c)), positive(c, "no_rope_layer_interval")
    turns = typed(c, "no_rope_layers", list, None) or [int((i + 1) % every != 0) for i in range(count)]
    kinds = typed(c, "layer_types", list, None)
    if kinds is not None and (unknown := [kind for kind in kinds if kind not in [*KINDS]]):
        raise UnsupportedError(
            f"config.json: layer_types: expected {' or '.join(KINDS)}, got {unknown[0]!r:.40}"
        )
    within = [bool(turned) for turned in turns] if kinds is None else [KINDS[kind] for kind in kinds]
    if len(turns) != count or len(within) != count:
        raise CheckpointError(
            f"config.json: expected no_rope_layers and layer_types for {count} layers, got {len(turns)} and "
            f"{len(within)}; correct num_hidden_layers"
        )
    segment = positive(c, "attention_chunk_size") if any(within) else None
    return tuple(
        Layer("all" if turned else None, segment=segment if inside else None, q_scaled=not turned)
        for turned, inside in zip(turns, within, strict=True)
    )
