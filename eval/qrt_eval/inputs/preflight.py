"""Check a command line against folders and config.json files, before anything heavy is imported or loaded."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qrt.cli import check_output
from qrt.config import EngineConfig
from qrt.engine import preflight as engine
from qrt.errors import ConfigError
from qrt_eval.inputs.prompts import INPUT_LEN, OUTPUT_LEN


def preflight(arguments: Namespace) -> None:
    """Raise QrtError for an output that cannot be written, a model that cannot run, or too long a length."""
    given = vars(arguments)
    for name in ("json", "save_base"):
        if given.get(name):
            check_output(f"--{name.replace('_', '-')}", Path(given[name]))
    if given.get("lengths") is not None:
        longest_of(given["lengths"])
    if arguments.command == "serve":  # its --model is a name on the server
        return
    place: dict[str, Any] = {
        "max_model_len": given.get("max_model_len"),
        "download_dir": given.get("download_dir"),
    }

    def folder_of(name: str, model: str) -> str:
        revision = given.get("revision") if name == "model" else None
        config, sizes, _ = engine.preflight(EngineConfig(model, revision=revision, **place))
        for flag, length in lengths_of(given):
            if length > sizes.max_position:
                raise ConfigError(
                    f"{flag} {length}: expected at most {sizes.max_position}, the context of {model}"
                )
        return config.model

    for name, value in models_of(given, folder_of).items():
        setattr(arguments, name, value)
    if "revision" in arguments:
        arguments.revision = None  # the names above are folders of this revision by now


def shared_context(arguments: Namespace) -> int:
    """Return the shortest context among the command's checkpoints.

    All of them can then be compared on the same windows.
    """
    lengths: list[int] = []

    def note(_: str, model: str) -> str:
        lengths.append(engine.preflight(EngineConfig(model))[1].max_position)
        return model

    models_of(vars(arguments), note)
    return min(lengths)


def models_of(given: Mapping[str, Any], change: Callable[[str, str], str]) -> dict[str, Any]:
    """Return the arguments that name checkpoints, with each name replaced by `change(argument, name)`."""
    found: dict[str, Any] = {}
    for name in ("model", "baseline", "checkpoint"):
        value = given.get(name)
        if name == "checkpoint":  # SCHEME=MODEL
            words = [word.partition("=") for word in value or ()]
            found[name] = [s + equals + (model and change(name, model)) for s, equals, model in words]
        elif isinstance(value, list):
            found[name] = [change(name, model) for model in value]
        elif value:
            found[name] = change(name, value)
    return {name: value for name, value in found.items() if value}


def lengths_of(given: dict[str, Any]) -> list[tuple[str, int]]:
    """Return the lengths that a model's context must hold, with the flag that sets each."""
    found = [("--seqlen", given["seqlen"])] if given.get("seqlen") else []
    if given["command"] == "passkey":
        found += [("--context", length) for length in given["context"] or ()]
    if given.get("lengths"):
        found += [(f"--lengths {name}:", longest) for name, longest in longest_of(given["lengths"])]
    elif "output_len" in given and not given.get("prompts"):
        tokens = (given["input_len"] or INPUT_LEN) + (given["output_len"] or OUTPUT_LEN)
        found.append(("--input-len + --output-len:", tokens))
    return found


def longest_of(words: str | list[str]) -> list[tuple[str, int]]:
    """Return the most tokens of a request for each word of --lengths that needs no tokenizer."""
    from qrt_eval.inputs.lengths import parse  # it imports numpy

    found = [parse(word) for word in ([words] if isinstance(words, str) else words)]
    return [(lengths.name, lengths.longest) for lengths in found if lengths]
