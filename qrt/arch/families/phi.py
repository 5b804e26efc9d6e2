"""Microsoft's Phi: 1 to 2 with a parallel residual and LayerNorm, 3 to 4 as Llama with fused projections."""

from __future__ import annotations

from qrt.arch.base import Arch, Names, Norm
from qrt.arch.entries import Entries, expect, number
from qrt.arch.families.llama import llama, windows


def phi(c: Entries) -> Arch:
    """Phi 1, 1.5 and 2."""
    c = c.filled(vocab_size=51200, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24)
    c = c.filled(hidden_act="gelu_new", layer_norm_eps=1e-5, partial_rotary_factor=0.5)
    expect(c, "qk_layernorm", False)
    names = Names(
        norm="model.final_layernorm", o="self_attn.dense", mlp_in="input_layernorm", up="mlp.fc1",
        down="mlp.fc2",
    )  # fmt: skip
    return llama(
        c, names=names, norm=Norm(number(c, "layer_norm_eps"), "layer"), parallel=True, gate_up="plain",
        qkv_bias=True, o_bias=True, mlp_bias=True, head_bias=True,
    )  # fmt: skip


def phi3(c: Entries) -> Arch:
    """Phi 3, 3.5 and 4."""
    c = c.filled(vocab_size=32064, hidden_size=3072, intermediate_size=8192, max_position_embeddings=4096)
    c = c.filled(original_max_position_embeddings=4096, rms_norm_eps=1e-5, sliding_window=None)
    layers = windows(c, lambda i: True, listed=False)
    return llama(
        c, layers=layers, qkv="stacked", gate_up="stacked", qkv_bias=False, o_bias=False, mlp_bias=False
    )
