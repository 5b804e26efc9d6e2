"""What is wrong with an EngineConfig as far as config.json tells: in milliseconds and without torch, so that
nobody waits for processes or weights to be told. The GPU and the weights are the engine's to check."""

from __future__ import annotations

import re

from qrt.arch import ModelConfig
from qrt.arch.runnable import runnable
from qrt.config import EngineConfig
from qrt.errors import ConfigError
from qrt.folder import model_folder, read_config
from qrt.quant.kv import KV_FORMATS, UNQUANTIZED_KV

DEVICE = re.compile(r"(cuda|cpu)(:\d{1,2})?|\d{1,2}")  # an index alone is a GPU's, as in torch


def preflight(config: EngineConfig) -> ModelConfig:
    """The sizes of the model, after all that can be told of `config` has been checked.

    ConfigError for a setting that the model does not allow, CheckpointError for a folder that holds no
    model, UnsupportedError for a KV format or an architecture that qrt does not have.
    """
    check_settings(config)
    folder = model_folder(config.model)
    entries = read_config(folder)
    model = ModelConfig.from_hf(entries, runnable(entries, folder))
    check_fit(config, model)
    if config.tokenizer is not None:
        model_folder(config.tokenizer)
    return model


def check_settings(config: EngineConfig) -> None:
    """What is wrong whatever the model is."""
    if config.kv not in UNQUANTIZED_KV:
        KV_FORMATS.check(config.kv)
    if config.device is not None and not DEVICE.fullmatch(str(config.device)):
        raise ConfigError(f"device: got {config.device!r}, wanted cuda, cuda:N or cpu")


def check_fit(config: EngineConfig, model: ModelConfig) -> None:
    """ConfigError for a length or a layer that the model does not have."""
    if config.max_model_len is not None and config.max_model_len > model.context:
        raise ConfigError(
            f"max_model_len: got {config.max_model_len}, wanted at most {model.context}, the model's context"
        )
    if wrong := [layer for layer in config.kv_skip_layers if layer >= model.num_layers]:
        layers = f"0 to {model.num_layers - 1}"
        raise ConfigError(f"kv_skip_layers: got {wrong[0]}, wanted {layers}, the model's layers")
