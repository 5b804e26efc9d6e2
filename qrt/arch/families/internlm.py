"""InternLM 2 and 3; InternLM 1 is saved as Llama."""

from __future__ import annotations

from qrt.arch.base import Arch, Names
from qrt.arch.entries import Entries, typed
from qrt.arch.families.llama import llama


def internlm2(c: Entries) -> Arch:
    """InternLM 2 and 2.5: q, k and v are stacked for each KV head."""
    c = c.filled(vocab_size=103168, bias=True)
    names = Names(
        embed="model.tok_embeddings", head="output", qkv="attention.wqkv", o="attention.wo",
        gate="feed_forward.w1",
        up="feed_forward.w3", down="feed_forward.w2", attention_in="attention_norm", mlp_in="ffn_norm",
    )  # fmt: skip
    bias = typed(c, "bias", bool)
    return llama(c, names=names, qkv="grouped", qkv_bias=bias, o_bias=bias, mlp_bias=False)


def internlm3(c: Entries) -> Arch:
    """InternLM 3."""
    c = c.filled(
        vocab_size=128512, max_position_embeddings=32768, rms_norm_eps=1e-5, bias=False, qkv_bias=False
    )
    bias = typed(c, "bias", bool)
    return llama(c, qkv_bias=typed(c, "qkv_bias", bool), o_bias=bias, mlp_bias=bias)
