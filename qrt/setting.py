"""Say what a config's field means once: docstrings, documentation and the help of its flag show this text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import field, fields
from inspect import cleandoc
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)


def told(
    *aliases: str, help: str, flag: str = "", metavar: str | None = None, choices: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return the metadata of a field: what it means, and what its flag has beyond its type's usual.

    aliases   further flags that set it
    help      what it means and, if the field's default does not say it, "(default: ...)"
    flag      its main flag, if that is not --NAME
    metavar   what the value is in the help
    choices   the values it may have
    """
    return {"aliases": aliases, "help": help, "flag": flag, "metavar": metavar, "choices": choices}


def setting(default: Any, *aliases: str, hash: bool | None = None, **own: Any) -> Any:
    """Return a field of a dataclass with a default, and with what it means and its flag has (`told`)."""
    return field(default=default, hash=hash, metadata=told(*aliases, **own))


def documented(config: Class) -> Class:
    """Add a list of its fields and what they mean to the docstring of a config class."""
    meanings = {own.name: own.metadata["help"] for own in fields(config) if own.metadata}
    width = max(map(len, meanings)) + 2
    rows = [f"{name:{width}}{_of_field(text)}" for name, text in meanings.items()]
    config.__doc__ = "\n".join([cleandoc(config.__doc__ or ""), "", *rows])
    return config


def _of_field(text: str) -> str:
    """Write the names of flags as those of fields."""
    return re.sub(r"--([a-z-]+)", lambda flag: f"`{flag[1].replace('-', '_')}`", text)
