"""Architectures as data: a function of config.json for each family, one line here. Standard library only."""

from collections.abc import Callable

from qrt.arch.base import Arch, Names, Norm
from qrt.arch.entries import Entries
from qrt.arch.layer import Layer
from qrt.registry import Registry

_FAMILIES = "qrt.arch.families"
# It suggests no name: architectures with similar names compute different things.
ARCHS: Registry[Callable[[Entries], Arch]] = Registry(
    "architecture",
    {
        "LlamaForCausalLM": f"{_FAMILIES}.llama:llama",
        "Llama4ForCausalLM": f"{_FAMILIES}.llama4:llama4",
        "Llama4ForConditionalGeneration": f"{_FAMILIES}.vision:llama4",
        "MistralForCausalLM": f"{_FAMILIES}.mistral:mistral",
        "MinistralForCausalLM": f"{_FAMILIES}.mistral:ministral",
        "Ministral3ForCausalLM": f"{_FAMILIES}.mistral:ministral3",
        "Mistral3ForConditionalGeneration": f"{_FAMILIES}.vision:mistral3",
        "MixtralForCausalLM": f"{_FAMILIES}.mistral:mixtral",
        "MiniMaxM2ForCausalLM": f"{_FAMILIES}.mixtures:minimax_m2",
        "QWenLMHeadModel": f"{_FAMILIES}.qwen:qwen",
        "Qwen2ForCausalLM": f"{_FAMILIES}.qwen:qwen2",
        "Qwen2MoeForCausalLM": f"{_FAMILIES}.qwen:qwen2_moe",
        "Qwen2VLForConditionalGeneration": f"{_FAMILIES}.vision:qwen2_vl",
        "Qwen2_5_VLForConditionalGeneration": f"{_FAMILIES}.vision:qwen2_vl",
        "Qwen3ForCausalLM": f"{_FAMILIES}.qwen:qwen3",
        "Qwen3MoeForCausalLM": f"{_FAMILIES}.qwen:qwen3_moe",
        "Qwen3VLForConditionalGeneration": f"{_FAMILIES}.vision:qwen3_vl",
        "Qwen3VLMoeForConditionalGeneration": f"{_FAMILIES}.vision:qwen3_vl_moe",
        "GemmaForCausalLM": f"{_FAMILIES}.gemma:gemma",
        "Gemma2ForCausalLM": f"{_FAMILIES}.gemma:gemma2",
        "Gemma3ForCausalLM": f"{_FAMILIES}.gemma:gemma3",
        "Gemma3ForConditionalGeneration": f"{_FAMILIES}.vision:gemma3",
        "PhiForCausalLM": f"{_FAMILIES}.phi:phi",
        "Phi3ForCausalLM": f"{_FAMILIES}.phi:phi3",
        "PhimoeForCausalLM": f"{_FAMILIES}.phi:phimoe",
        "PhiMoEForCausalLM": f"{_FAMILIES}.phi:phimoe",  # as published
        "ChatGLMModel": f"{_FAMILIES}.glm:chatglm",
        "GlmForCausalLM": f"{_FAMILIES}.glm:glm",
        "Glm4ForCausalLM": f"{_FAMILIES}.glm:glm4",
        "Glm4MoeForCausalLM": f"{_FAMILIES}.mixtures:glm4_moe",
        "OlmoForCausalLM": f"{_FAMILIES}.olmo:olmo",
        "Olmo2ForCausalLM": f"{_FAMILIES}.olmo:olmo2",
        "Olmo3ForCausalLM": f"{_FAMILIES}.olmo:olmo3",
        "OlmoeForCausalLM": f"{_FAMILIES}.olmo:olmoe",
        "CohereForCausalLM": f"{_FAMILIES}.cohere:cohere",
        "Cohere2ForCausalLM": f"{_FAMILIES}.cohere:cohere2",
        "BaiChuanForCausalLM": f"{_FAMILIES}.others:baichuan",
        "BaichuanForCausalLM": f"{_FAMILIES}.others:baichuan2",
        "InternLM2ForCausalLM": f"{_FAMILIES}.others:internlm2",
        "InternLM3ForCausalLM": f"{_FAMILIES}.others:internlm3",
        "InternVLForConditionalGeneration": f"{_FAMILIES}.vision:named_model",
        "LlavaForConditionalGeneration": f"{_FAMILIES}.vision:named_model",
        "LlavaOnevisionForConditionalGeneration": f"{_FAMILIES}.vision:named_model",
        "MiniCPMForCausalLM": f"{_FAMILIES}.others:minicpm",
        "GptOssForCausalLM": f"{_FAMILIES}.gpt_oss:gpt_oss",
        "GraniteForCausalLM": f"{_FAMILIES}.others:granite",
        "GraniteMoeForCausalLM": f"{_FAMILIES}.mixtures:granite_moe",
        "GraniteMoeSharedForCausalLM": f"{_FAMILIES}.mixtures:granite_shared",
        "GraniteMoeHybridForCausalLM": f"{_FAMILIES}.mixtures:granite_hybrid",
        "SmolLM3ForCausalLM": f"{_FAMILIES}.others:smollm3",
        "SeedOssForCausalLM": f"{_FAMILIES}.others:seed_oss",
        "Ernie4_5ForCausalLM": f"{_FAMILIES}.others:ernie",
        "Ernie4_5_ForCausalLM": f"{_FAMILIES}.others:ernie",  # as first published
        "Ernie4_5_MoeForCausalLM": f"{_FAMILIES}.mixtures:ernie_moe",
        "HunYuanDenseV1ForCausalLM": f"{_FAMILIES}.others:hunyuan",
        "HunYuanMoEV1ForCausalLM": f"{_FAMILIES}.mixtures:hunyuan_moe",
        "Exaone4ForCausalLM": f"{_FAMILIES}.others:exaone4",
        "ArceeForCausalLM": f"{_FAMILIES}.others:arcee",
        "Dots1ForCausalLM": f"{_FAMILIES}.mixtures:dots1",
        "ApertusForCausalLM": f"{_FAMILIES}.others:apertus",
        "NemotronForCausalLM": f"{_FAMILIES}.others:nemotron",
        "StableLmForCausalLM": f"{_FAMILIES}.others:stablelm",
        "GPT2LMHeadModel": f"{_FAMILIES}.gpt:gpt2",
        "GPTBigCodeForCausalLM": f"{_FAMILIES}.gpt:bigcode",
        "GPTJForCausalLM": f"{_FAMILIES}.gpt:gptj",
        "GPTNeoXForCausalLM": f"{_FAMILIES}.gpt:neox",
        "OPTForCausalLM": f"{_FAMILIES}.gpt:opt",
        "Starcoder2ForCausalLM": f"{_FAMILIES}.gpt:starcoder2",
        "BloomForCausalLM": f"{_FAMILIES}.alibi:bloom",
        "FalconForCausalLM": f"{_FAMILIES}.alibi:falcon",
        "MptForCausalLM": f"{_FAMILIES}.alibi:mpt",
    },
    suggest=False,
)

__all__ = ["ARCHS", "Arch", "Entries", "Layer", "Names", "Norm"]
