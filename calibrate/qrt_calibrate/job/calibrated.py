"""Which architectures are calibrated, and for which of them training and rounded heads are known."""

from __future__ import annotations

from dataclasses import fields

from qrt.arch import Arch

# fields that any value may have under --tune: no product or norm of transformers' classes depends on them
FREE = frozenset(
    "name vocab_size hidden_size intermediate_size num_heads num_kv_heads head_dim layers ropes "
    "max_position dtype eos_token_ids tied_embeddings qkv_bias o_bias mlp_bias norm qk_norm".split()
)


def uncalibrated(arch: Arch) -> str | None:
    """Return the first fact of `arch` that the calibrator does not know, None where it knows all."""
    if arch.transposed:
        return "weights stored [in, out], which no quantized format holds"
    return None


def untrained(arch: Arch) -> str | None:
    """Return the first fact of `arch` for which --tune is not known, None where all are."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # takes seconds

    if arch.name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return "layers, of which transformers has no class"
    return _beyond(arch)


def _beyond(arch: Arch) -> str | None:
    """Return the first fact of `arch` beyond sizes, biases and norms of heads."""
    for field in fields(arch):
        value = getattr(arch, field.name)
        if field.name not in FREE and value != field.default:
            return f"{field.name} {value!r:.60}"
    if arch.norm.kind != "rms" or arch.norm.plus:
        return f"norm {arch.norm}"
    return None if arch.qk_norm in (None, "head") else f"qk_norm {arch.qk_norm!r}"
