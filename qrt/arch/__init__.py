"""Architectures as data: one file of facts per family, one line here. Standard library only."""

from qrt.arch.base import Arch, Mixture, ModelConfig
from qrt.registry import Registry

# Neither suggests a name: architectures with similar names compute different things.
ARCHS: Registry[Arch] = Registry(
    "architecture",
    {
        "LlamaForCausalLM": "qrt.arch.llama:LLAMA",
        "MistralForCausalLM": "qrt.arch.mistral:MISTRAL",
        "Qwen2ForCausalLM": "qrt.arch.qwen2:QWEN2",
        "Qwen3ForCausalLM": "qrt.arch.qwen3:QWEN3",
    },
    suggest=False,
)

# Families with a mixture of experts: qrt-calibrate quantizes them, qrt does not run them.
MIXTURES: Registry[Mixture] = Registry(
    "mixture",
    {
        "MixtralForCausalLM": "qrt.arch.mixtral:MIXTRAL",
        "Qwen2MoeForCausalLM": "qrt.arch.qwen2_moe:QWEN2_MOE",
        "Qwen3MoeForCausalLM": "qrt.arch.qwen3_moe:QWEN3_MOE",
    },
    suggest=False,
)

__all__ = ["ARCHS", "MIXTURES", "Arch", "Mixture", "ModelConfig"]
