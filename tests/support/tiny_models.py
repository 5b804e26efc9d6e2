"""Random-weight Hugging Face checkpoints for tests: `from tiny_models import random_checkpoint`.

pyproject.toml puts tests/support on pytest's path, so every test imports this module by its bare name.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qrt import assets
from qrt.quant.checkpoint import CheckpointWriter, open_checkpoint
from qrt.quant.spec import QuantSpec
from qrt.quant.weight.base import WeightData
from qrt.text.tokenizer import Tokenizer
from random_weights import round_to_nearest

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SIX_LAYERS = assets.model_path("tiny")  # also while `shallow` is in force
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
KINDS = {  # ends of architectures -> the class of transformers that makes one
    "ForCausalLM": "AutoModelForCausalLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "Model": "AutoModel",
}
NO_HEAD_DIM = {"Qwen2ForCausalLM"}  # its heads are hidden_size / num_attention_heads wide


def random_checkpoint(
    folder: str | Path,
    architecture: str,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_shard_size: str | int = "5GB",
    **config: Any,
) -> Path:
    """Save a random model of `architecture` ("LlamaForCausalLM", ...) to `folder`; returns `folder`.

    It may be a body alone ("Qwen3Model") or have a head of labels ("Qwen3ForSequenceClassification").

    `config` replaces entries of SIZES or adds to them: `attention_bias=True`, `rope_parameters=LLAMA3_ROPE`,
    `tie_word_embeddings=True`. Weights are large enough that attention and logits are not flat, biases are
    random and not zero, norm weights are random around 1, so a layer that is dropped or swapped shows.
    """
    import transformers  # here, so that quantize_checkpoint can be used in a process without it

    sizes = {**SIZES, **config}
    if architecture in NO_HEAD_DIM and "head_dim" not in config:
        del sizes["head_dim"]
    end = next(end for end in KINDS if architecture.endswith(end))
    settings = getattr(transformers, architecture.removesuffix(end) + "Config")(**sizes)
    torch.manual_seed(seed)
    model = getattr(transformers, KINDS[end]).from_config(settings, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            elif name.endswith(".bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
            elif "embed_tokens" in name:
                parameter.copy_(torch.randn_like(parameter))
            else:
                parameter.copy_(1.5 * torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    model.config.dtype = dtype
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return Path(folder)


def altered(source: Path, out: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Copy a checkpoint of one file, with its tensors as `change` leaves them; return `out`."""
    shutil.copytree(source, out)
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def one_layer(out: Path) -> Path:
    """Write a model of the first layer of "tiny" to the new folder `out`; the tokenizer is the same.

    One layer alone would write its last token again and again. So it has a head of its own: the embedding,
    with the rows of ASCII tokens in another order.
    """

    def cut(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if re.search(r"\.layers\.[^0]", name)]:
            del tensors[name]
        tokenizer, embedding = Tokenizer(out), tensors["model.embed_tokens.weight"]
        ids = [token for token in range(len(embedding)) if tokenizer.token_text(token).isascii()]
        words = torch.tensor(sorted({*ids} - tokenizer.special_ids))
        tensors["lm_head.weight"] = embedding.clone()
        tensors["lm_head.weight"][words] = embedding[
            words[torch.randperm(len(words), generator=torch.Generator().manual_seed(0))]
        ]

    altered(SIX_LAYERS, out, cut)
    config = json.loads((out / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "tie_word_embeddings": False}
    (out / "config.json").write_text(json.dumps(config))
    return out


@contextmanager
def shallow(folder: Path) -> Iterator[None]:
    """Let "tiny" mean one layer in this process, for tests of what is around a model."""
    out = folder / "one-layer"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(assets._FOLDERS, "tiny", out if out.exists() else one_layer(out))
        yield


def quantize_checkpoint(
    source: str | Path,
    out: str | Path,
    scheme: str,
    spec: QuantSpec,
    linears: Collection[str] | None = None,
    **options: Any,
) -> dict[str, WeightData]:
    """Round every projection of `source` to nearest on `spec` and write `out`; returns what was written.

    `linears` names the modules to round; by default they are those whose names end in "_proj".
    `options` go to CheckpointWriter; by default lm_head is ignored and there is no metadata. Modules that
    `ignore` names stay as they are.
    """
    checkpoint = open_checkpoint(source)
    dtype = getattr(torch, checkpoint.config["dtype"])
    options = {"ignore": ["lm_head"], "metadata": {}, **options}
    written: dict[str, WeightData] = {}
    with CheckpointWriter(Path(out), checkpoint, grid=(scheme, spec), **options) as writer:
        for name in checkpoint.names():
            module, _, kind = name.rpartition(".")
            chosen = module.endswith("_proj") if linears is None else module in linears
            if not chosen or module in options["ignore"] or kind not in ("weight", "bias"):
                writer.add_tensor(name, checkpoint.tensor(name))
            elif kind == "weight":
                weight = checkpoint.tensor(name)
                bias = checkpoint.tensor(f"{module}.bias") if checkpoint.has(f"{module}.bias") else None
                written[module] = round_to_nearest(weight, spec, dtype, bias)
                writer.add_linear(module, written[module])
    return written
