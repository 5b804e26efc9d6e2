"""Baichuan 1 and 2: Llama with q, k and v in one weight; 13B has ALiBi in place of RoPE."""

from __future__ import annotations

from dataclasses import replace

from qrt.arch.base import Arch, Names
from qrt.arch.entries import Entries, positive
from qrt.arch.families.alibi import slopes
from qrt.arch.families.llama import each, llama

PLAIN = {"qkv_bias": False, "o_bias": False, "mlp_bias": False}
SECOND_VOCABULARY = 125696  # of version 2, which normalizes the rows of its head
SMALL = 4096  # hidden size of 7B


def baichuan(c: Entries) -> Arch:
    """Baichuan 1 7B."""
    c = c.filled(vocab_size=64000, max_position_embeddings=4096)
    return llama(c, names=Names(qkv="self_attn.W_pack"), qkv="stacked", **PLAIN)


def baichuan2(c: Entries) -> Arch:
    """Baichuan 2 7B, and 13B of both versions, which has `model_max_length` and is wider."""
    if "model_max_length" not in c or positive(c, "hidden_size") == SMALL:
        return replace(baichuan(c), unit_head=True)
    arch = baichuan(c.filled(max_position_embeddings=positive(c, "model_max_length")))
    arch = replace(arch, alibi=slopes(arch.num_heads), unit_head=arch.vocab_size == SECOND_VOCABULARY)
    return each(arch, lambda i, layer: {"rope": None})
