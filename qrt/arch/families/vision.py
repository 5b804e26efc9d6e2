"""Models that read images too: their text half, which is a family of its own under other names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from qrt.arch.base import Arch
from qrt.arch.entries import Entries, typed
from qrt.arch.experts import Stacked
from qrt.arch.families import gemma, qwen
from qrt.arch.families import llama4 as llama4_family
from qrt.arch.families import mistral as mistral_family
from qrt.arch.families.llama import llama
from qrt.errors import UnsupportedError

# beginnings of the names of what reads images
IMAGES = (
    "vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "mlp1.", "image_newline",
)  # fmt: skip
ABOVE = ("tie_word_embeddings", "eos_token_id", "dtype", "torch_dtype")
TEXT: Mapping[str, Callable[[Entries], Arch]] = {
    "llama": llama,
    "mistral": mistral_family.mistral,
    "ministral3": mistral_family.ministral3,
    "qwen2": qwen.qwen2,
    "qwen3": qwen.qwen3,
}


def named_model(c: Entries) -> Arch:
    """LLaVA, LLaVA-OneVision and InternVL: `text_config` names the text half."""
    return _named(c, "llama")


def mistral3(c: Entries) -> Arch:
    """Mistral Small 3.1 and later, Ministral 3."""
    return _named(c, "mistral")


def _named(c: Entries, default: str) -> Arch:
    """Return the text half that `text_config` names, under the names that it has in such a model."""
    text = _text(c)
    if (kind := text.get("model_type", default)) not in TEXT:
        raise UnsupportedError(f"config.json: expected a text_config of {', '.join(TEXT)}, got {kind!r}")
    return _inside(_read(text, TEXT[kind]))


def gemma3(c: Entries) -> Arch:
    """Gemma 3 from 4B on."""
    return _inside(_read(_text(c), gemma.gemma3))


def llama4(c: Entries) -> Arch:
    """Llama 4 Scout and Maverick."""
    return _inside(_read(_text(c), llama4_family.llama4))


def qwen2_vl(c: Entries) -> Arch:
    """Qwen 2 VL and 2.5 VL: positions of text are those of a text model."""
    text = _text(c).filled(vocab_size=152064, hidden_size=8192, intermediate_size=29568, num_hidden_layers=80)
    text = text.filled(
        num_attention_heads=64, num_key_value_heads=8, max_window_layers=80, rms_norm_eps=1e-5, rope_theta=1e6
    )
    return replace(_read(text, qwen.qwen2), ignored=IMAGES)


def qwen3_vl(c: Entries) -> Arch:
    """Qwen 3 VL."""
    text = _text(c).filled(max_position_embeddings=128000, rope_theta=5e5)
    return _inner(_read(text, qwen.qwen3))


def qwen3_vl_moe(c: Entries) -> Arch:
    """Qwen 3 VL MoE: all experts of a layer are two tensors, [E, in, out] or as transformers 5 saves them."""
    text = _text(c).filled(intermediate_size=5632, num_attention_heads=16, num_key_value_heads=16)
    text = text.filled(max_position_embeddings=128000, rope_theta=5e5, num_experts=60, norm_topk_prob=True)
    text = text.filled(moe_intermediate_size=1408, num_experts_per_tok=4)
    arch = _inner(_read(text, qwen.qwen3_moe))
    assert arch.experts is not None
    return replace(arch, experts=replace(arch.experts, stacked=Stacked(transposed=None)))


def _text(c: Entries) -> Entries:
    """Return the entries of the text half; older checkpoints have them beside the others."""
    text = typed(c, "text_config", dict, None)
    if text is None:
        return c
    above = {key: c[key] for key in ABOVE if key in c}
    return Entries({**text, **above}, c.architecture)


def _read(text: Entries, family: Callable[[Entries], Arch]) -> Arch:
    """Return the text half; refuse an entry of `text_config` that its family does not have."""
    arch = family(text)
    text.refuse_unread()
    return arch


def _inner(arch: Arch) -> Arch:
    names = arch.names.outer(lambda name: name.replace("model.", "model.language_model.", 1))
    return replace(arch, names=names, ignored=IMAGES)


def _inside(arch: Arch) -> Arch:
    names = arch.names.outer(lambda name: f"language_model.{name}")
    return replace(arch, names=replace(names, head="language_model.lm_head"), ignored=IMAGES)
