"""Check an EngineConfig against the model's config.json, in milliseconds and without torch.

A mistake is reported before processes start or weights load. The engine checks the GPU and the weights later.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from qrt.arch import Arch
from qrt.arch.pooling import Pooling, overridden, read_pooling
from qrt.arch.read import read_arch
from qrt.arch.shard import Shard, of_rank
from qrt.config import EngineConfig
from qrt.errors import ConfigError
from qrt.model_files.folder import read_config
from qrt.model_files.location import model_commit, model_folder, model_name, tokenizer_folder
from qrt.quant.kv import KV_FORMATS, UNQUANTIZED_KV

DEVICE = re.compile(r"(cuda|cpu)(:\d{1,2})?|\d{1,2}")  # an index alone names a GPU, as in torch


class Preflight(NamedTuple):
    """Checked settings, with names of the Hub replaced by folders, the model's sizes, and how it pools."""

    config: EngineConfig
    sizes: Arch
    pooling: Pooling | None


def preflight(config: EngineConfig) -> Preflight:
    """Check `config` as far as config.json allows.

    A model of the Hub is downloaded: config.json first, the rest after the check. Raises ConfigError for a
    setting that the model does not allow, CheckpointError for a folder without a model, UnsupportedError for
    a KV format or an architecture that qrt does not have.
    """
    check_settings(config)
    found: list[Arch] = []

    def check(folder: Path) -> None:
        entries = overridden(read_config(folder), config.hf_overrides or {})
        found.append(read_arch(entries, model_name(folder)))
        check_fit(config, found[0])

    tokenizer = config.tokenizer
    if tokenizer is None and config.tokenizer_revision is not None:
        tokenizer = config.model
    source: dict[str, Any] = {"download_dir": config.download_dir}
    weights = config.load_format != "dummy"
    model = model_folder(config.model, revision=config.revision, weights=weights, check=check, **source)
    if tokenizer is not None:
        folder = tokenizer_folder(tokenizer, revision=config.tokenizer_revision, **source)
        tokenizer = _place(tokenizer, folder)
    names: dict[str, Any] = {"model": _place(config.model, model), "tokenizer": tokenizer}
    settled: dict[str, Any] = dict.fromkeys(("revision", "tokenizer_revision", "download_dir"))
    own = replace(config, **names, **settled)
    return Preflight(own, found[0], pooling_of(own, read_config(model), model))


def pooling_of(config: EngineConfig, entries: dict[str, Any], folder: Path) -> Pooling | None:
    """Return how the model in `folder`, with the config.json `entries`, pools by these settings."""
    return read_pooling(
        overridden(entries, config.hf_overrides or {}),
        folder,
        runner=config.runner,
        convert=config.convert,
        pooler=config.pooler_config,
    )


def _place(given: str, folder: Path) -> str:
    """Return the folder of a model of the Hub, and any other name unchanged."""
    return given if model_commit(folder) is None else str(folder)


def check_settings(config: EngineConfig) -> None:
    """Raise a QrtError for a setting that is wrong for every model."""
    if config.kv not in UNQUANTIZED_KV:
        KV_FORMATS.check(config.kv)
    if config.device is not None and not DEVICE.fullmatch(str(config.device)):
        raise ConfigError(f"device: expected cuda, cuda:N or cpu, got {config.device!r}")


def check_fit(config: EngineConfig, model: Arch) -> None:
    """Raise ConfigError for a length, a layer or a number of ranks that the model does not have."""
    if config.max_model_len is not None and config.max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len: expected at most the model's {model.max_position}, got {config.max_model_len}"
        )
    of_rank(model, Shard(0, config.tensor_parallel_size))
    if wrong := [layer for layer in config.kv_skip_layers if layer >= model.num_layers]:
        layers = f"0 to {model.num_layers - 1}"
        raise ConfigError(f"kv_skip_layers: expected {layers}, the model's layers, got {wrong[0]}")
