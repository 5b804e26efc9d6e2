"""Pooling: how a model that answers with vectors makes them from its hidden states, read from its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qrt.arch.base import Arch
from qrt.arch.read import architecture, body_of, read_arch
from qrt.errors import CheckpointError, ConfigError, UnsupportedError
from qrt.model_files.folder import MODULES, PLAIN_FOLDER, is_file, read_json, read_list

KINDS = ("last", "mean", "all")
MODES = {"lasttoken": "last", "mean": "mean"}  # sentence-transformers' names of what a decoder has
# entries of config.json that `hf_overrides` may replace, as in vLLM
OVERRIDES = (
    "architectures", "classifier_from_token", "method", "is_original_qwen3_reranker", "num_labels",
    "id2label", "problem_type", "is_matryoshka", "matryoshka_dimensions",
)  # fmt: skip
ACTIVATIONS = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


@dataclass(frozen=True)
class Pooling:
    """How a model's hidden states become vectors.

    task         "embed": a vector is a hidden state; "classify": a number for each label, made by a head
    kind         "last": of the last token, "mean": of all tokens, "all": a vector for each token
    normalize    whether embeddings get length 1
    dimensions   lengths to which embeddings may be cut; (): any; None: they may not be cut
    labels       names of the classes; () for embeddings
    activation   what turns a head's numbers into scores: "softmax", "sigmoid" or "none"
    tokens       texts of the tokens whose rows of the model's own head are the head; (): it is stored
    difference   whether the head is one row, the second token's less the first one's
    """

    task: str
    kind: str = "last"
    normalize: bool = True
    dimensions: tuple[int, ...] | None = None
    labels: tuple[str, ...] = ()
    activation: str = "none"
    tokens: tuple[str, ...] = ()
    difference: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"pooling: expected {', '.join(KINDS)}, got {self.kind!r}")

    @property
    def pairs(self) -> bool:
        """Whether the head scores a pair of texts: it has one label."""
        return len(self.labels) == 1


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with `overrides`; UnsupportedError for an entry that no override may replace."""
    if unknown := [key for key in overrides if key not in OVERRIDES]:
        raise UnsupportedError(
            f"hf_overrides: expected {', '.join(OVERRIDES)}, got {unknown[0]!r}; change it in config.json"
        )
    return {**config, **overrides}


def pools(config: Mapping[str, Any], folder: Path) -> bool:
    """Return whether the model in `folder` pools if nobody asks for anything else.

    It does if its architecture has no head of a vocabulary, or if sentence-transformers' modules.json pools.
    """
    return body_of(architecture(config, folder)) is not None or "Pooling" in map(_type, _listed(folder))


def read_model(config: Mapping[str, Any], folder: Path) -> Arch:
    """Return the architecture of the model in `folder`, without its head if the model `pools`."""
    arch = read_arch(config, folder)
    return arch.without_head() if pools(config, folder) and not arch.headless else arch


def read_pooling(
    config: Mapping[str, Any],
    folder: Path,
    *,
    runner: str = "auto",
    convert: str = "auto",
    pooler: Mapping[str, Any] | None = None,
) -> Pooling | None:
    """Return how the model in `folder` pools; None for one that generates.

    config    its config.json
    runner    "generate", "pooling", or "auto": what the model does by itself (`pools`)
    convert   "embed", "classify", "reward", or "auto" and "none": by the architecture's name
    pooler    entries that replace the files': "pooling_type" and "normalize"

    Raises ConfigError where the two do not fit the model, UnsupportedError for modules that qrt does not run.
    """
    name = architecture(config, folder)
    modules, asked = _modules(folder), convert not in ("auto", "none")
    by_itself = pools(config, folder) or asked or bool(pooler)
    if runner == "generate":
        if body_of(name) is not None or asked:
            got = f"convert {convert!r}" if asked else f"{name}, which has no head of a vocabulary"
            raise ConfigError(f"runner: expected 'pooling' with {got}, got 'generate'; leave it out")
        return None
    if runner == "auto" and not by_itself:
        return None
    job = convert if asked else _job_of(name)
    given = _given(pooler or {})
    if job == "embed":
        return Pooling("embed", **{**(modules or {}), "dimensions": _dimensions(config), **given})
    every = job == "reward" or name.endswith("ForTokenClassification")
    return _classifier(config, "all" if every else "last", given)


def _job_of(name: str) -> str:
    if name.endswith(("ForSequenceClassification", "ForTokenClassification")):
        return "classify"
    return "reward" if name.endswith("RewardModel") else "embed"


def _given(pooler: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a `pooler_config` sets, by vLLM's names."""
    names = {"pooling_type", "seq_pooling_type", "normalize", "use_activation"}
    given = {key: value for key, value in pooler.items() if value is not None}
    if unknown := given.keys() - names:
        raise UnsupportedError(f"pooler_config: expected {', '.join(sorted(names))}, got {min(unknown)!r}")
    fields: dict[str, Any] = {}
    if kind := given.get("pooling_type", given.get("seq_pooling_type")):
        fields["kind"] = str(kind).lower()
        if fields["kind"] not in KINDS:
            raise UnsupportedError(f"pooler_config: pooling_type: expected LAST, MEAN or ALL, got {kind!r}")
    normalize = given.get("normalize", given.get("use_activation"))
    return fields if normalize is None else {**fields, "normalize": bool(normalize)}


def _classifier(config: Mapping[str, Any], kind: str, given: Mapping[str, Any]) -> Pooling:
    """Return how a model with a head of labels pools."""
    tokens, method = config.get("classifier_from_token") or (), config.get("method")
    if isinstance(tokens, str) or not all(isinstance(token, str) and token for token in tokens):
        raise ConfigError(f"classifier_from_token: expected a list of tokens, got {tokens!r:.80}")
    if method not in (None, "from_2_way_softmax", "no_post_processing"):
        raise UnsupportedError(
            f"method: expected 'from_2_way_softmax' or 'no_post_processing', got {method!r:.80}"
        )
    difference = len(tokens) == 2 and method != "no_post_processing"
    if method == "from_2_way_softmax" and not difference:
        raise ConfigError(f"classifier_from_token: expected two tokens with that method, got {tokens!r:.80}")
    labels = _labels(config, 1 if difference else len(tokens))
    activation = ACTIVATIONS.get(
        config.get("problem_type") or "", "sigmoid" if len(labels) < 2 else "softmax"
    )
    own = {"activation": activation, "tokens": tuple(tokens), "difference": difference}
    kind = "all" if config.get("problem_type") == "token_classification" else kind
    return Pooling("classify", **{"kind": kind, **given, "labels": labels, **own})


def _labels(config: Mapping[str, Any], count: int) -> tuple[str, ...]:
    """Return the labels' names: of `count` labels, or if that is 0 of as many as config.json says."""
    named = config.get("id2label") or {}
    if not isinstance(named, Mapping):
        raise CheckpointError(f"config.json: id2label: expected an object, got {named!r:.80}")
    count = count or config.get("num_labels") or len(named) or 2  # transformers' default
    if not isinstance(count, int) or not 1 <= count <= 2**16:
        raise CheckpointError(f"config.json: num_labels: expected 1 to {2**16}, got {count!r:.80}")
    return tuple(str(named.get(str(i), f"LABEL_{i}")) for i in range(count))


def _dimensions(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return `Pooling.dimensions` as config.json has it."""
    listed = config.get("matryoshka_dimensions")
    if listed is None:
        return () if config.get("is_matryoshka") is True else None
    if not isinstance(listed, list) or not all(isinstance(n, int) and n > 0 for n in listed):
        raise CheckpointError(f"config.json: matryoshka_dimensions: expected numbers, got {listed!r:.80}")
    return tuple(listed)


def _modules(folder: Path) -> dict[str, Any] | None:
    """Return kind and normalization as sentence-transformers' modules.json says; None without it."""
    kind, normalize = None, False
    for module in _listed(folder):
        name = _type(module)
        match name:
            case "Transformer":
                pass
            case "Pooling":
                kind = _kind(folder, str(module.get("path", "")))
            case "Normalize":
                normalize = True
            case _:
                raise UnsupportedError(
                    f"{folder / MODULES}: expected Transformer, Pooling and Normalize, got "
                    f"{name or module!r:.80}; qrt runs no other modules"
                )
    return None if kind is None else {"kind": kind, "normalize": normalize}


def _listed(folder: Path) -> list[Any]:
    """Return sentence-transformers' modules, a folder and a type each; none without modules.json."""
    return read_list(folder / MODULES) if is_file(folder / MODULES) else []


def _type(module: Any) -> str:
    return str(module.get("type", "") if isinstance(module, Mapping) else "").rpartition(".")[2]


def _kind(folder: Path, name: str) -> str:
    """Return `Pooling.kind` of the Pooling module in the folder `name`."""
    path = folder / name / "config.json"
    if not PLAIN_FOLDER.fullmatch(name) or not is_file(path):
        raise CheckpointError(f"{folder}: {MODULES}: expected a folder with config.json, got {name!r:.80}")
    entries, prefix = read_json(path), "pooling_mode_"
    modes = [key.removeprefix(prefix) for key, on in entries.items() if key.startswith(prefix) and on is True]
    modes = [str(entries["pooling_mode"])] if "pooling_mode" in entries else modes
    found = [mode.removesuffix("_token").removesuffix("_tokens") for mode in modes]
    if len(found) != 1 or found[0] not in MODES:
        raise UnsupportedError(
            f"{path}: expected pooling of the last token or the mean, got {' and '.join(modes) or 'none'}; "
            "in a decoder the first token sees no other"
        )
    return MODES[found[0]]
