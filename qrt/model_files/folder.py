"""The files of a model's folder or its repository on the Hub, by name, and its config.json.

This module imports no torch, so that a wrong folder is reported at once.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from qrt.errors import CheckpointError

CONFIG = "config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PART = re.compile(r"-\d+-of-\d+\.safetensors$")
TOKENIZER_FILES = (  # of every class of tokenizers that transformers has
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "*vocab*", "merges.txt", "*.model", "*.spm",
    "*.tiktoken", "*.tokenizer", "bpe.codes", "dict.txt", "emoji.json", "byte_maps.json", "normalizer.json",
    "word_*.json", "tekken.json", "chat_template*", "additional_chat_templates/*",
    "processor_config.json",  # may hold a chat template
)  # fmt: skip
PROCESSOR_FILES = ("*processor*_config.json", "*feature_extractor*_config.json", "*_tokenizer_config.json")
MODULES = "modules.json"  # of sentence-transformers, whose modules have folders such as 1_Pooling
COPIED = (
    *TOKENIZER_FILES, *PROCESSOR_FILES, "generation_config.json", MODULES,
    "config_sentence_transformers.json", "sentence_*_config.json", "[0-9]*_*/*",
)  # fmt: skip
# Files of AutoGPTQ, llm-awq and ModelOpt with a quantization config -> its quant_method
SEPARATE_CONFIGS = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
OTHER_NAMES = ("consolidated", "adapter_model")  # Mistral's and Meta's own tensor names; an adapter's
MAX_JSON_BYTES = 2**26  # an index of many thousand tensors has some 10 MB
QUANTIZATION = ("quantization_config", "compression_config")  # the latter in old compressed-tensors
PLAIN_FOLDER = re.compile(r"[\w.-]*\w")
GGUF = "is GGUF, which qrt does not read; download the safetensors it was made from"


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a model's folder; CheckpointError without one."""
    if not is_file(folder / CONFIG):
        cached = next(iter(sorted(folder.glob("snapshots/*"))), None)
        remedy = (
            f"a model's folder in the Hub's cache; give {cached}" if cached else no_config(_names(folder))
        )
        raise CheckpointError(f"{folder}: no {CONFIG}; {remedy}")
    return read_json(folder / CONFIG)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def no_config(names: Collection[str]) -> str:
    """Say what a folder or repository without config.json holds, by its file names, and what to do."""
    if "adapter_config.json" in names:
        return (
            "an adapter, which qrt does not run; merge it into its model (peft: merge_and_unload), save that"
        )
    if gguf := next((name for name in sorted(names) if name.endswith(".gguf")), None):
        return f"{gguf} {GGUF}"
    return "expected a Hugging Face checkpoint"


def weight_files(names: Collection[str]) -> tuple[str | None, str | None]:
    """Return the name of the single weight file, or of the index of several; the other is None.

    Files with transformers' names come first. Without them the only candidate is taken, because AutoGPTQ
    names its file by the grid. Both are None where there is no candidate, or several.
    """
    if SINGLE in names:
        return SINGLE, None
    if INDEX in names:
        return None, INDEX
    found = sorted(
        name
        for name in names
        if ".safetensors" in name and "/" not in name and not name.startswith(OTHER_NAMES)
    )
    indices = [name for name in found if name.endswith(".safetensors.index.json")]
    wholes = [name for name in found if name.endswith(".safetensors") and not PART.search(name)]
    if len(indices) == 1:
        return None, indices[0]
    return (wholes[0] if len(wholes) == 1 else None), None


def no_weights(place: object, names: Collection[str]) -> CheckpointError:
    """Return the error for a folder or repository without `weight_files`: what it has instead, the remedy."""
    found = sorted(name for name in names if "/" not in name)
    stray = [name for name in found if name.endswith(".safetensors")]
    other = [name for name in found if name.endswith((".bin", ".pt", ".pth", ".gguf"))]
    if stray and stray[0].startswith(OTHER_NAMES):
        return CheckpointError(
            f"{place}: expected {SINGLE}, or {INDEX} and its shards, got {stray[0]}, whose tensors have "
            "other names; give the model in transformers' format"
        )
    if stray:
        return CheckpointError(f"{place}: {stray[0]} but neither {SINGLE} nor {INDEX}; download the index")
    if not other:
        return CheckpointError(f"{place}: no weights; expected {SINGLE}, or {INDEX} and its shards")
    if other[0].endswith(".gguf"):
        return CheckpointError(f"{place}: {other[0]} {GGUF}")
    return CheckpointError(
        f"{place}: expected safetensors, got only {other[0]}; convert with transformers: "
        "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER), and likewise AutoTokenizer"
    )


def beside_weights(folder: Path) -> list[Path]:
    """Return the files of a model's folder that a copy with other weights needs too, its own code included.

    Code lies in packages: folders on the way to it have names that Python can import.
    """
    found = {path for pattern in COPIED for path in folder.glob(pattern) if path.is_file()}
    for module in _content_of_modules(folder):
        found.update(path for path in (folder / module).rglob("*") if path.is_file())
    for place, inside, files in os.walk(folder):
        inside[:] = [name for name in inside if name.isidentifier() and name != "__pycache__"]
        found.update(Path(place, name) for name in files if name.endswith(".py"))
    return sorted(found)


def _content_of_modules(folder: Path) -> list[str]:
    """Return the folders of sentence-transformers' modules but the model's own, which is the root."""
    listed = read_list(folder / MODULES) if is_file(folder / MODULES) else []
    paths = [str(module.get("path") or "") for module in listed if isinstance(module, dict)]
    return [path for path in paths if PLAIN_FOLDER.fullmatch(path)]


def stated_quantization(config: Mapping[str, Any]) -> Any:
    """Return what config.json says about quantization, for the whole model or for its text half; or None."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        for name in QUANTIZATION:
            if part.get(name) is not None:
                return part[name]
    return None


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json that says nothing about quantization."""
    kept = {key: value for key, value in config.items() if key not in QUANTIZATION}
    if isinstance(text := kept.get("text_config"), Mapping):
        kept["text_config"] = {key: value for key, value in text.items() if key not in QUANTIZATION}
    return kept


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; CheckpointError if it cannot be read, is too large or no object."""
    value: dict[str, Any] = _read_json(path, dict)
    return value


def read_list(path: Path) -> list[Any]:
    """Read a JSON list from a file; raises as `read_json` does."""
    value: list[Any] = _read_json(path, list)
    return value


def _read_json(path: Path, kind: type) -> Any:
    try:
        expect_at_most(path, MAX_JSON_BYTES)
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({error}); download or copy it again") from None
    if not isinstance(value, kind):
        expected = "object" if kind is dict else kind.__name__
        raise CheckpointError(f"{path}: expected a JSON {expected}, got {type(value).__name__}")
    return value


def expect_at_most(path: Path, most: int) -> None:
    """Raise CheckpointError for a larger file, before it is read."""
    if (size := path.stat().st_size) > most:
        raise CheckpointError(f"{path}: expected at most {most} bytes, got {size}; download or copy it again")


def is_file(path: Path) -> bool:
    """Return whether there is a file; CheckpointError for a broken link or an impossible name."""
    try:
        if path.is_symlink() and not path.exists():
            raise CheckpointError(
                f"{path}: a link to {path.readlink()}, which is gone; download the checkpoint again"
            )
        return path.is_file()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
