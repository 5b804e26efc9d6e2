"""Read `--config FILE`: a YAML file whose keys are names of flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from qrt.cli import ArgumentParser
from qrt.compat.settings import SWITCHES, has_no_effect, setting
from qrt.errors import ConfigError
from qrt.registry import nearest


def file_words(top: ArgumentParser, path: Path) -> list[str]:
    """Return the command-line words that a file stands for; ConfigError for a key that is no flag."""
    try:
        entries: Any = yaml.safe_load(path.read_text("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8, got {error}") from error
    if not isinstance(entries, dict):
        raise ConfigError(f"{path}: expected `flag: value` lines, got {type(entries).__name__}")
    known = top._option_string_actions
    words: list[str] = []
    for key, value in entries.items():
        flag = f"--{str(key).replace('_', '-')}"
        entry = setting(flag) if flag not in known else None
        if flag in SWITCHES or (entry and has_no_effect(flag, value)):
            continue
        if entry:
            raise ConfigError(f"{path}: {key}: {entry.remedy}")
        if flag not in known or flag in ("--config", "--help"):
            names = [name.removeprefix("--") for name in known if name.startswith("--")]
            raise ConfigError(f"{path}: unknown key {str(key)!r}{nearest(flag.removeprefix('--'), names)}")
        if isinstance(value, bool):
            words += _switch(flag, value, known)
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        elif value is not None:
            words.append(f"{flag}={value}")
    return words


def _switch(flag: str, value: bool, known: dict[str, Any]) -> list[str]:
    if known[flag].nargs != 0:
        raise ConfigError(
            f"{flag.removeprefix('--')}: expected a value that is not true or false, got {value}"
        )
    if value:
        return [flag]
    negative = f"--no-{flag.removeprefix('--')}"
    return [negative] if negative in known else []
