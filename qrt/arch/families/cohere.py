"""Cohere's Command R: attention and mlp read one LayerNorm; logits are scaled."""

from __future__ import annotations

from typing import Any

from qrt.arch.base import Arch, Names, Norm
from qrt.arch.entries import Entries, number, typed
from qrt.arch.families.llama import each, llama, neighbours, windows

DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "logit_scale": 0.0625,
    "use_qk_norm": False,
    "tie_word_embeddings": True,
}


def cohere(c: Entries, **changes: Any) -> Arch:
    """Command R; R+ has a norm over q and k with weights of each head."""
    c = c.filled(**DEFAULTS)
    norm = Norm(number(c, "layer_norm_eps"), "layer")
    known = {
        "names": Names(mlp_in="input_layernorm"), "norm": norm, "parallel": True, "mlp_bias": False,
        "logit_scale": number(c, "logit_scale"), "qk_norm": "each" if typed(c, "use_qk_norm", bool) else None,
    }  # fmt: skip
    return neighbours(llama(c, **known | changes))


def cohere2(c: Entries) -> Arch:
    """Command R7B and A: three sliding layers for each full one, which has no positions."""
    c = c.filled(sliding_window=4096, sliding_window_pattern=4, **DEFAULTS)
    every = typed(c, "sliding_window_pattern", int)
    arch = cohere(c, layers=windows(c, lambda i: (i + 1) % every != 0))
    return each(arch, lambda i, layer: {"rope": "all" if layer.window else None})
