"""Define the flags of models that pool, by vLLM's names."""

from __future__ import annotations

import argparse
import json
from typing import Any

from qrt.config import CONVERSIONS, RUNNERS, EngineConfig

ENGINE = EngineConfig(model="")


def add_pooling(group: argparse._ArgumentGroup) -> None:
    """Add the flags to a group."""
    group.add_argument(
        "--runner",
        default=ENGINE.runner,
        choices=RUNNERS,
        help="generate text, or serve vectors and scores (pooling); auto: by the checkpoint's files",
    )
    group.add_argument(
        "--convert",
        default=ENGINE.convert,
        choices=CONVERSIONS,
        help="what a model that pools answers with: vectors (embed), a number for each label (classify), or "
        "the same for each token (reward); auto: by the architecture's name",
    )
    group.add_argument(
        "--pooler-config",
        type=_object,
        metavar="JSON",
        help='replaces the checkpoint\'s, e.g. {"pooling_type": "MEAN", "normalize": false} (default: none)',
    )
    group.add_argument(
        "--hf-overrides",
        type=_object,
        metavar="JSON",
        help='entries of config.json about pooling, e.g. {"is_matryoshka": true} (default: none)',
    )


def _object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r:.80}")
    return value
