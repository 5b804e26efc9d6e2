"""Llama 1 to 3.x, and what the other families are changes of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from qrt.arch.base import Arch, Norm
from qrt.arch.entries import MAX_LAYERS, Entries, number, positive, token_ids, typed
from qrt.arch.experts import Experts
from qrt.arch.layer import Layer
from qrt.arch.rope import rope
from qrt.errors import CheckpointError, UnsupportedError

DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,  # as many as attention heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}

# fields that families often have otherwise; then Llama's entry is not read
READ: Mapping[str, Callable[[Entries], Any]] = {
    "layers": lambda c: full(c),
    "norm": lambda c: Norm(number(c, "rms_norm_eps")),
    "act": lambda c: activation(c),
    "qkv_bias": lambda c: typed(c, "attention_bias", bool),
    "o_bias": lambda c: typed(c, "attention_bias", bool),
    "mlp_bias": lambda c: typed(c, "mlp_bias", bool),
    "intermediate_size": lambda c: positive(c, "intermediate_size"),
    "max_position": lambda c: positive(c, "max_position_embeddings"),
}


def llama(c: Entries, **changes: Any) -> Arch:
    """Read Llama's entries; `changes` are the fields of `Arch` that a family has otherwise."""
    c = c.filled(**DEFAULTS)
    hidden, heads = positive(c, "hidden_size"), positive(c, "num_attention_heads")
    whole = c["head_dim"] is None and c.default("head_dim") is None
    head_dim = hidden // heads if whole else positive(c, "head_dim")
    if "ropes" not in changes:
        turned, longest = rope(c, head_dim, positive(c, "max_position_embeddings"))
        changes = {"max_position": longest, **changes, "ropes": {"all": turned}}
    changes |= {field: read(c) for field, read in READ.items() if field not in changes}
    sizes = {"num_heads": heads, "head_dim": head_dim, "hidden_size": hidden}
    sizes["num_kv_heads"] = heads if c["num_key_value_heads"] is None else positive(c, "num_key_value_heads")
    return Arch(
        name=c.architecture,
        vocab_size=positive(c, "vocab_size"),
        tied_embeddings=typed(c, "tie_word_embeddings", bool),
        dtype=str(c.get("dtype") or c.get("torch_dtype") or "bfloat16"),
        eos_token_ids=token_ids(c, "eos_token_id"),
        **sizes | changes,
    )


def count(c: Entries) -> int:
    """Return the number of layers."""
    return positive(c.filled(**DEFAULTS), "num_hidden_layers", most=MAX_LAYERS)


def full(c: Entries) -> tuple[Layer, ...]:
    """Return layers that all attend everything."""
    return (Layer(),) * count(c)


def windows(c: Entries, slides: Callable[[int], bool], *, listed: bool = True) -> tuple[Layer, ...]:
    """Return layers of which some attend `sliding_window` tokens.

    Those that `layer_types` lists as sliding; without a list, and where it is not `listed`, those whose index
    `slides` says.
    """
    layers, kinds = full(c), typed(c, "layer_types", list, None) if listed else None
    if kinds is not None and len(kinds) != len(layers):
        raise CheckpointError(
            f"config.json: expected layer_types for {len(layers)} layers, got {len(kinds)}; "
            "correct num_hidden_layers"
        )
    sliding = [slides(i) if kinds is None else kinds[i] == "sliding_attention" for i in range(len(layers))]
    if not any(sliding) or c["sliding_window"] is None:
        return layers
    window = positive(c, "sliding_window")
    return tuple(Layer(window=window if slid else None) for slid in sliding)


def each(arch: Arch, change: Callable[[int, Layer], dict[str, Any]]) -> Arch:
    """Return `arch` with `change` of every layer, by its index."""
    return replace(
        arch, layers=tuple(replace(layer, **change(i, layer)) for i, layer in enumerate(arch.layers))
    )


def sparse(
    arch: Arch, experts: Experts, layers: Callable[[int], bool] = lambda i: True, **changes: Any
) -> Arch:
    """Return `arch` with a mixture of experts in those layers of which `layers` says so, by index."""
    return replace(each(arch, lambda i, layer: {"sparse": layers(i)}), experts=experts, **changes)


def neighbours(arch: Arch) -> Arch:
    """Return `arch` with RoPE that rotates neighbouring channels."""
    return replace(arch, ropes={key: replace(own, pairs="neighbours") for key, own in arch.ropes.items()})


def activation(c: Entries, key: str = "hidden_act") -> str:
    """Return the activation that an entry names."""
    if (name := c[key]) not in ACTIVATIONS:
        raise UnsupportedError(
            f"config.json: {c.name(key)}: expected one of {', '.join(ACTIVATIONS)}, got {name!r}"
        )
    return ACTIVATIONS[name]
