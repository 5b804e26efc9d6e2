"""Lazy registries: a name maps to "module:attribute" and is imported on first use."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from importlib import import_module
from typing import Generic, TypeVar, cast

from qrt.errors import UnsupportedError

T = TypeVar("T")


def nearest(name: str, known: list[str]) -> str:
    """`; did you mean 'x'?` when a known name is close, else an empty string."""
    close = get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


class Registry(Generic[T]):
    """Names to objects of one kind, one line per entry: `Registry("KV format", {"int4": "module:ATTR"})`.

    The error for an unknown name suggests the nearest one unless `suggest` is False.
    """

    def __init__(self, kind: str, entries: dict[str, str], *, suggest: bool = True) -> None:
        self.kind = kind
        self._suggest = suggest
        self._entries = dict(entries)
        self._loaded: dict[str, T] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def check(self, name: str) -> None:
        """UnsupportedError for an unknown name; nothing is imported."""
        if name not in self._entries:
            known = list(self._entries)
            hint = nearest(name, known) if self._suggest else ""
            raise UnsupportedError(f"unknown {self.kind} {name!r} (known: {', '.join(known)}){hint}")

    def __getitem__(self, name: str) -> T:
        if name not in self._loaded:
            self.check(name)
            module, _, attribute = self._entries[name].partition(":")
            self._loaded[name] = cast(T, getattr(import_module(module), attribute))
        return self._loaded[name]
