"""Tell which architecture a config.json names, and read it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qrt.arch import ARCHS, Arch
from qrt.arch.entries import Entries
from qrt.errors import CheckpointError

# What names of architectures end in: those that have no head of a vocabulary, and those that have one.
BODIES = (
    "ForSequenceClassification", "ForTokenClassification", "ForProcessRewardModel", "ForRewardModel",
    "ForTextEncoding", "EmbeddingModel", "Model",
)  # fmt: skip
WITH_HEAD = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def architecture(config: Mapping[str, Any], path: str | Path) -> str:
    """Return the architecture's name from `config`, the config.json of the folder `path`.

    Without `architectures` it is the causal model of `model_type`, as in transformers. CheckpointError where
    neither names it.
    """
    given = config.get("architectures")
    names = given or []
    if not names and isinstance(kind := config.get("model_type"), str):
        names = [name for name in ARCHS if _model_type(name) == kind.replace("_", "")][:1]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(
            f"{path}: config.json: architectures: expected a list of one name, e.g. {next(iter(ARCHS))!r}, "
            f"got {given!r}; download config.json again"
        )
    return names[0]


def _model_type(name: str) -> str:
    return name.removesuffix("ForCausalLM").replace("_", "").lower()


def body_of(name: str, images: bool = False) -> str | None:
    """Return the causal model whose body the architecture `name` is; None for one with a head.

    With `images` it is the one that reads them, if the family has two.
    """
    if name in ARCHS:
        return None
    stems = [name.removesuffix(end).removesuffix("Text") for end in BODIES if name.endswith(end)]
    ends = WITH_HEAD[::-1] if images else WITH_HEAD
    return next((stem + end for stem in stems for end in ends if stem + end in ARCHS), None)


def read_arch(config: Mapping[str, Any], path: str | Path) -> Arch:
    """Return the architecture of `config`, the config.json of the folder `path`, with its sizes.

    A body without the head of a vocabulary (`Qwen3Model`, `Qwen3ForSequenceClassification`) is read as its
    causal model. Raises CheckpointError for an impossible entry, UnsupportedError for an architecture that
    qrt does not know and for an entry that changes the result and that the architecture does not have; each
    names it.
    """
    entries = Entries(config, architecture(config, path))
    whole = body_of(entries.architecture, images="text_config" in config)
    arch = ARCHS[whole or entries.architecture](entries)
    entries.refuse_unread()
    return arch if whole is None else arch.without_head()
