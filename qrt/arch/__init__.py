"""Architectures as data: one file of facts per family, one line here. Standard library only."""

from qrt.arch.base import Arch, ModelConfig
from qrt.registry import Registry

ARCHS: Registry[Arch] = Registry(
    "architecture",
    {
        "LlamaForCausalLM": "qrt.arch.llama:LLAMA",
        "MistralForCausalLM": "qrt.arch.mistral:MISTRAL",
        "Qwen2ForCausalLM": "qrt.arch.qwen2:QWEN2",
        "Qwen3ForCausalLM": "qrt.arch.qwen3:QWEN3",
    },
)

__all__ = ["ARCHS", "Arch", "ModelConfig"]
