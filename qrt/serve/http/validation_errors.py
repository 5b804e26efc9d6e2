"""Choose the pydantic error that a client is told: the one of the alternative that it meant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qrt.serve.settings import MAX_ECHO_CHARS


@dataclass(frozen=True)
class WrongField:
    """One error. pydantic adds the names of a union's alternatives to `loc`; the input does not have these.

    path    position in the input
    names   indices in `loc` of alternatives' names
    """

    loc: tuple[int | str, ...]
    path: tuple[int | str, ...]
    names: tuple[int, ...]
    kind: str
    message: str

    @property
    def fit(self) -> tuple[bool, int, list[int]]:
        """Sort key: how well the input fits this alternative.

        An input of the right type with a wrong value fits better. Then a deeper and a later error wins.
        """
        missing = self.kind == "missing"
        right_type = not (missing or self.kind == "none_required" or self.kind.endswith("_type"))
        return right_type, len(self.path) - missing, [part for part in self.path if isinstance(part, int)]


def wrong_field(errors: Sequence[Any], body: Any) -> WrongField:
    """Return the error to report: at the first error's position, that of the best fitting alternative."""
    return _best([_located(error, body) for error in errors])


def _best(errors: list[WrongField], start: int = 0) -> WrongField:
    first = errors[0]
    place = next((place for place in first.names if place >= start), None)
    if place is None:
        return first
    alternatives: dict[int | str, list[WrongField]] = {}
    for error in errors:
        if error.loc[:place] == first.loc[:place] and len(error.loc) > place:
            alternatives.setdefault(error.loc[place], []).append(error)
    return max((_best(own, place + 1) for own in alternatives.values()), key=lambda error: error.fit)


def _located(error: Any, body: Any) -> WrongField:
    """Follow an error's `loc` through the input."""
    loc = tuple(error["loc"][1:]) if error["loc"][0] == "body" else tuple(error["loc"])
    names, value = [], body
    for place, part in enumerate(loc):
        if isinstance(value, list) and isinstance(part, int):
            value = value[part] if part < len(value) else None
        elif isinstance(value, dict) and part in value:
            value = value[part]
        elif error["type"] != "missing" or place < len(loc) - 1:
            names.append(place)
    path = tuple(part for place, part in enumerate(loc) if place not in names)
    message = error["msg"].partition(" or instance of ")[0]  # of a class of ours
    if error["type"] == "literal_error":  # such as the type of a tool
        given = error["input"]
        got = repr(given[:MAX_ECHO_CHARS]) if isinstance(given, str) else type(given).__name__
        message = f"expected {error['ctx']['expected']}, got {got}"
    return WrongField(loc, path, tuple(names), error["type"], message)
