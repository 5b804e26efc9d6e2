"""A tiny random checkpoint of every architecture that qrt runs, beside transformers' own model of it.

`make(name, folder)` writes the checkpoint and returns the model. Norm weights and biases are random too, so
that what is read wrong shows: a norm stored around zero, a bias left out, halves swapped.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

WINDOW = 16  # tests' prompts are longer, so that a window which is ignored shows
SLIDES, FULL = "sliding_attention", "full_attention"
SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "layer_norm_eps": 1e-5,
}  # fmt: skip
ALL_HEADS = {"num_key_value_heads": 4}
MIXED = {"sliding_window": WINDOW, "layer_types": [SLIDES, SLIDES, SLIDES, FULL]}
IMAGES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
IMAGES |= {"image_size": 28, "patch_size": 14}
LLAMA4_IMAGES = {"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64}
QWEN_IMAGES = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128}
QWEN_IMAGES |= {"embed_dim": 32}
POSITIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + i / 64 for i in range(16)]}
LONG |= {"long_factor": [1.0 + i / 4 for i in range(16)]}
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 96}
GROUPS = {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
LLAMA4 = {"num_local_experts": 8, "num_experts_per_tok": 1, "intermediate_size": 96, "floor_scale": 8}
LLAMA4 |= {"intermediate_size_mlp": 192, "interleave_moe_layer_step": 2, "attention_chunk_size": WINDOW}
ALPHA = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}
HYBRID = {"layer_types": [FULL] * 4, "shared_intermediate_size": 160, "position_embedding_type": "rope"}
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.03}


@dataclass(frozen=True)
class Model:
    """One checkpoint: a model_type of transformers, what its config changes of SIZES, and how it is stored.

    name      the architecture that config.json names, where transformers has no class of it
    entries   of that config.json
    fused     what q, k and v become, and in how many groups they are stacked
    renames   old and new parts of tensors' names
    """

    kind: str
    config: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    entries: dict[str, Any] = field(default_factory=dict)
    fused: tuple[str, int] = ("", 1)
    renames: dict[str, str] = field(default_factory=dict)
    images: bool = False


def text(kind: str, inner: str = "", reader: str = "", **settings: Any) -> Model:
    """A model that reads images: its text half is `inner`."""
    own = {key: value for key, value in SIZES.items() if key != "layer_norm_eps"}  # no text half has it
    own |= settings | ({"model_type": inner} if inner else {})
    images = QWEN_IMAGES | {}
    if reader:
        images = IMAGES | {"model_type": reader} | (LLAMA4_IMAGES if kind == "llama4" else {})
    return Model(kind, {"text_config": own, "vision_config": images}, images=True)


MODELS: dict[str, Model] = {
    "llama": Model("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-yarn": Model("llama", {"rope_parameters": YARN}),
    "llama-dynamic": Model("llama", {"rope_parameters": YARN | {"rope_type": "dynamic"}}),
    "llama4": Model("llama4_text", LLAMA4),
    "llama4-maverick": Model("llama4_text", LLAMA4 | {"use_qk_norm": False, "moe_layers": [0, 3]}),
    "mistral": Model("mistral", {"sliding_window": WINDOW}),
    "ministral": Model("ministral", MIXED),
    "ministral3": Model("ministral3", {"rope_parameters": YARN | {
        "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}}),
    "mixtral": Model("mixtral", EXPERTS),
    "qwen2": Model("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "qwen3": Model("qwen3"),
    "qwen2_moe": Model("qwen2_moe", EXPERTS | {
        "shared_expert_intermediate_size": 160, "decoder_sparse_step": 2, "norm_topk_prob": True}),
    "qwen3_moe": Model("qwen3_moe", EXPERTS | {"mlp_only_layers": [1]}),
    "olmoe": Model("olmoe", EXPERTS | ALL_HEADS | {"clip_qkv": 1.0}),
    "phimoe": Model("phimoe", EXPERTS | {
        "attention_bias": True, "lm_head_bias": True, "rope_parameters": LONG | {
            "short_mscale": 1.1, "long_mscale": 1.2, "original_max_position_embeddings": 256}}),
    "phimoe-published": Model("phimoe", EXPERTS, "PhiMoEForCausalLM"),
    "glm4_moe": Model("glm4_moe", EXPERTS | GROUPS | {"use_qk_norm": True, "attention_bias": True}),
    "dots1": Model("dots1", EXPERTS | GROUPS | ALL_HEADS | {
        "n_shared_experts": 2, "norm_topk_prob": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "minimax_m2": Model("minimax_m2", EXPERTS | {"rotary_dim": 16, "partial_rotary_factor": 0.5}),
    "gemma": Model("gemma", {"num_key_value_heads": 1}),
    "gemma2": Model("gemma2", {
        "sliding_window": WINDOW, "query_pre_attn_scalar": 20, "layer_types": [SLIDES, FULL] * 2}),
    "gemma3": Model("gemma3_text", MIXED | {"query_pre_attn_scalar": 20}),
    "phi": Model("phi", ALL_HEADS | {"partial_rotary_factor": 0.5}),
    "phi3": Model("phi3", {"sliding_window": None}),
    "phi3-longrope": Model("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 24}),
    "stablelm": Model("stablelm", ALL_HEADS | {"partial_rotary_factor": 0.25, "use_qkv_bias": True}),
    "stablelm2-12b": Model("stablelm", {
        "partial_rotary_factor": 0.25, "use_parallel_residual": True, "qk_layernorm": True}),
    "cohere": Model("cohere"),
    "cohere-plus": Model("cohere", {"use_qk_norm": True}),
    "cohere2": Model("cohere2", MIXED),
    "bigcode": Model("gpt_bigcode", {"multi_query": True}),
    "starcoder2": Model("starcoder2", {"sliding_window": WINDOW}),
    "bloom": Model("bloom"),
    "falcon-7b": Model("falcon", {"multi_query": True, "parallel_attn": True, "bias": False}),
    "falcon-40b": Model("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": False}),
    "falcon-rw": Model("falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "gpt2": Model("gpt2"),
    "neox": Model("gpt_neox"),
    "gptj": Model("gptj", {"rotary_dim": 16}),
    "opt": Model("opt", {"ffn_dim": 192, "word_embed_proj_dim": 128}),
    "mpt": Model("mpt", {"max_seq_len": 256}),
    "glm": Model("glm", {"attention_bias": True}),
    "glm4": Model("glm4"),
    "olmo": Model("olmo", {"clip_qkv": 1.0}),
    "olmo2": Model("olmo2"),
    "olmo3": Model("olmo3", MIXED),
    "gpt_oss": Model("gpt_oss", EXPERTS | {"sliding_window": WINDOW, "rope_parameters": YARN | {
        "rope_theta": 1.5e5, "truncate": False}}),
    "granite": Model("granite", GRANITE | {"logits_scaling": 8.0}),
    "granitemoe": Model("granitemoe", EXPERTS | GRANITE | {"logits_scaling": 8.0}),
    "granitemoeshared": Model("granitemoeshared", EXPERTS | GRANITE | {"shared_intermediate_size": 160}),
    "granite4": Model("granitemoehybrid", GRANITE | HYBRID | {"num_local_experts": 0}),
    "granite4-moe": Model("granitemoehybrid", EXPERTS | GRANITE | HYBRID | {"position_embedding_type": None}),
    "smollm3": Model("smollm3", {"no_rope_layer_interval": 4}),
    "exaone4": Model("exaone4", MIXED),
    "nemotron": Model("nemotron", {"partial_rotary_factor": 0.5}),
    "hunyuan": Model("hunyuan_v1_dense", {"rope_parameters": ALPHA}),
    "hunyuan_moe": Model("hunyuan_v1_moe", EXPERTS | {"moe_topk": 2, "rope_parameters": ALPHA}),
    "ernie": Model("ernie4_5", {"use_bias": False}),
    "ernie-published": Model("ernie4_5", {"use_bias": False}, "Ernie4_5_ForCausalLM"),
    "ernie_moe": Model("ernie4_5_moe", EXPERTS | {
        "moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
        "moe_layer_end_index": 2, "tie_word_embeddings": False}),
    "seed_oss": Model("seed_oss"),
    "apertus": Model("apertus", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "arcee": Model("arcee"),
    "llava": text("llava", "llama", "clip_vision_model"),
    "llava_onevision": text("llava_onevision", "qwen2", "siglip_vision_model"),
    "mistral3": text("mistral3", "mistral", "pixtral"),
    "gemma3-images": text("gemma3", "", "siglip_vision_model", **MIXED),
    "llama4-images": text("llama4", "", "llama4_vision_model", **LLAMA4),
    "qwen2_vl": text("qwen2_vl", rope_parameters=POSITIONS),
    "qwen2_5_vl": text("qwen2_5_vl", rope_parameters=POSITIONS),
    "qwen3_vl": text("qwen3_vl", rope_parameters=POSITIONS | {"mrope_interleaved": True}),
    "qwen3_vl_moe": text(
        "qwen3_vl_moe", rope_parameters=POSITIONS | {"mrope_interleaved": True}, num_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=96),
    "internvl": text("internvl", "qwen2", "internvl_vision"),
    "baichuan-7b": Model("llama", ALL_HEADS, "BaiChuanForCausalLM", fused=("self_attn.W_pack", 1)),
    "baichuan2-7b": Model("llama", ALL_HEADS, "BaichuanForCausalLM", fused=("self_attn.W_pack", 1)),
    "internlm2": Model("llama", name="InternLM2ForCausalLM", entries={"bias": False},
        fused=("attention.wqkv", 2),
        renames={"embed_tokens": "tok_embeddings", "lm_head": "output", "self_attn.o_proj": "attention.wo",
                 "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
                 "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm",
                 "post_attention_layernorm": "ffn_norm"}),
    "internlm3": Model("llama", name="InternLM3ForCausalLM",
        entries={"bias": False, "qkv_bias": False, "rope_scaling": {"rope_type": "dynamic", "factor": 6.0}}),
    "minicpm": Model("granite", ALL_HEADS | GRANITE | {"residual_multiplier": 0.7, "logits_scaling": 2.0,
        "attention_multiplier": 32**-0.5}, "MiniCPMForCausalLM",
        entries={"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 64}),
    "chatglm3": Model("glm", {"attention_bias": True}, "ChatGLMModel", entries={
            "multi_query_attention": True, "multi_query_group_num": 2, "kv_channels": 32,
            "ffn_hidden_size": 192,
            "num_layers": 4, "padded_vocab_size": 512, "seq_length": 256, "add_qkv_bias": True,
            "layernorm_epsilon": 1.5625e-07},
        fused=("self_attention.query_key_value", 1), renames={
            "model.embed_tokens": "transformer.embedding.word_embeddings",
            "lm_head": "transformer.output_layer",
            "model.norm": "transformer.encoder.final_layernorm", "model.layers": "transformer.encoder.layers",
            "self_attn.o_proj": "self_attention.dense", "mlp.gate_up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h"}),
    "qwen": Model("qwen2", ALL_HEADS, "QWenLMHeadModel", entries={
            "kv_channels": 32, "intermediate_size": 384, "no_bias": True, "seq_length": 256,
            "layer_norm_epsilon": 1e-6},
        fused=("attn.c_attn", 1), renames={
            "model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f",
            "model.layers": "transformer.h",
            "self_attn.o_proj": "attn.c_proj", "mlp.gate_proj": "mlp.w2", "mlp.up_proj": "mlp.w1",
            "mlp.down_proj": "mlp.c_proj", "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}),
}  # fmt: skip


def make(name: str, folder: Path, seed: int = 0) -> PreTrainedModel:
    """Write the checkpoint `name` into `folder`; return the model that it is, in fp32."""
    spec = MODELS[name]
    auto: Any = AutoModelForImageTextToText if spec.images else AutoModelForCausalLM
    # transformers 5.17 adds Falcon's ALiBi twice in eager attention, and caps scores in no other
    how = {"dtype": torch.float32, "attn_implementation": "sdpa" if name == "falcon-rw" else "eager"}
    model = auto.from_config(_config(spec), **how).eval()
    _randomize(model, seed)
    model.save_pretrained(folder)
    if not spec.name:
        return auto.from_pretrained(folder, **how).eval()  # as transformers reads it back
    tensors = load_file(folder / "model.safetensors")
    save_file(_stored(spec, tensors), folder / "model.safetensors", {"format": "pt"})
    if name == "baichuan2-7b":  # whose head rows have length 1 when it runs
        model.lm_head.weight.data = torch.nn.functional.normalize(model.lm_head.weight.data)
    entries = json.loads((folder / "config.json").read_text())
    if name == "minicpm":  # entries of the class that stands in for it
        entries = {
            key: value for key, value in entries.items() if not key.endswith(("multiplier", "scaling"))
        }
    entries |= {"architectures": [spec.name]} | spec.entries
    (folder / "config.json").write_text(json.dumps(entries))
    return model


def _config(spec: Model) -> Any:
    """Return the config: SIZES and the model's changes, as far as its class has such entries."""
    kind = CONFIG_MAPPING[spec.kind]
    known = {*kind().to_dict(), *kind.attribute_map, "rope_parameters", "no_rope_layer_interval"}
    settings = spec.config if spec.images else SIZES | spec.config
    return kind(**{key: value for key, value in settings.items() if key in known})


@torch.no_grad()
def _randomize(model: torch.nn.Module, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    stored = dict(model.named_parameters())
    stored |= {name: buffer for name, buffer in model.named_buffers() if name.endswith("bias")}
    for name, weight in stored.items():
        noise = torch.randn(weight.shape, generator=random)
        if "embed" in name or re.search(r"\.w[tp]e\.", name):
            weight.copy_(0.5 * noise)
        elif "correction" in name:  # small beside the scores, so that each expert has some tokens
            weight.add_(0.05 * noise)
        elif weight.dim() >= 2:
            weight.copy_(noise * weight.shape[-1] ** -0.5)
        else:
            weight.add_(0.2 * noise)


def _stored(spec: Model, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that its class saved as a family without a class stores them."""
    into, groups = spec.fused
    for q in [name for name in tensors if into and ".self_attn.q_proj." in name]:
        parts = [tensors.pop(q.replace("q_proj", f"{own}_proj")).unflatten(0, (groups, -1)) for own in "qkv"]
        tensors[q.replace("self_attn.q_proj", into)] = torch.cat(parts, 1).flatten(0, 1)
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in spec.renames.items():
            name = name.replace(old, new)
        renamed[name] = tensor.contiguous().clone()
    return renamed
