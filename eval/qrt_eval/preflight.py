"""What is wrong with a command line as far as folders and config.json tell: before anything heavy is
imported, loaded or measured."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from qrt.cli import check_output
from qrt.config import EngineConfig
from qrt.engine import preflight as engine
from qrt.errors import ConfigError


def preflight(arguments: Namespace) -> None:
    """QrtError for an output that cannot be written, a model that is not run, and lengths beyond its
    context."""
    given = vars(arguments)
    for name in ("json", "save_base"):
        if given.get(name):
            check_output(f"--{name.replace('_', '-')}", Path(given[name]))
    if arguments.command == "serve":  # --model is a name there
        return
    for model in models_of(given):
        longest = engine.preflight(EngineConfig(model, max_model_len=given.get("max_model_len"))).context
        for flag, length in lengths_of(given):
            if length > longest:
                raise ConfigError(f"{flag} {length}: wanted at most {longest}, the context of {model}")


def shared_context(arguments: Namespace) -> int:
    """What every checkpoint of a command holds, so that they can be compared on the same windows."""
    return min(engine.preflight(EngineConfig(model)).context for model in models_of(vars(arguments)))


def models_of(given: dict[str, Any]) -> list[str]:
    """Every checkpoint that a command reads."""
    found = [given.get("model"), given.get("baseline")]
    found += [word.partition("=")[2] for word in given.get("checkpoint", ())]
    flat = [each for entry in found for each in (entry if isinstance(entry, list) else [entry])]
    return [model for model in flat if model]


def lengths_of(given: dict[str, Any]) -> list[tuple[str, int]]:
    """What a model's context must hold, by flag."""
    found = [("--seqlen", given["seqlen"])] if given.get("seqlen") else []
    if given["command"] == "passkey":
        found += [("--context", length) for length in given["context"] or ()]
    if "output_len" in given and not given.get("prompts"):
        found.append(("--input-len + --output-len:", given["input_len"] + given["output_len"]))
    return found
