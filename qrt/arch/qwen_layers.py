"""Tell which layers of the Qwen families slide a window, and which are mixtures of experts."""

from collections.abc import Mapping
from typing import Any

from qrt.arch.entries import typed


def upper_window(config: Mapping[str, Any]) -> int | None:
    """Return the window in tokens if a layer slides it: those from `max_window_layers` on, unless listed."""
    return listed_window(config, typed(config, "max_window_layers", int) < config["num_hidden_layers"])


def listed_window(config: Mapping[str, Any], slides: bool) -> int | None:
    """Return the window in tokens if `layer_types` lists a layer that slides it, else None.

    slides   whether a layer slides it where there is no list
    """
    if not typed(config, "use_sliding_window", bool):
        return None
    kinds = typed(config, "layer_types", list, None)
    slides = slides if kinds is None else "sliding_attention" in kinds
    return config["sliding_window"] if slides else None


def all_sparse(config: Mapping[str, Any]) -> bool:
    """Return whether every layer is a mixture."""
    return typed(config, "decoder_sparse_step", int) == 1 and not config.get("mlp_only_layers")
