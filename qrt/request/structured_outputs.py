"""StructuredOutputsParams: the shape that an answer must have, by vLLM's names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from qrt.checks import listed, yes_or_no
from qrt.errors import ConfigError
from qrt.request.numbers import json_text

KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The shape of an answer. Exactly one of the first five is given.

    json                     a JSON schema, as a mapping or a text; kept as text
    regex                    a regular expression that the whole answer matches
    choice                   texts of which the answer is one
    grammar                  a grammar in Lark's notation, or in EBNF as in llama.cpp (GBNF) and SGLang
    json_object              True: any JSON object
    whitespace_pattern       the expression that JSON has where space is allowed; None: at most 40 spaces,
                             tabs or line ends
    disable_any_whitespace   True: JSON has no such spaces
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        if self.json_object is not None:
            yes_or_no("structured_outputs.json_object", self.json_object)
            object.__setattr__(self, "json_object", bool(self.json_object) or None)
        yes_or_no("structured_outputs.disable_any_whitespace", self.disable_any_whitespace)
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"structured_outputs: expected one of {', '.join(KINDS)}, got {' and '.join(given) or 'none'}"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", listed("structured_outputs.choice", self.choice))
            if not self.choice or not all(isinstance(text, str) and text for text in self.choice):
                raise ConfigError(
                    f"structured_outputs.choice: expected non-empty texts, got {self.choice!r:.80}"
                )
        for name in ("regex", "grammar", "whitespace_pattern"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text):
                raise ConfigError(f"structured_outputs.{name}: expected a non-empty text, got {text!r:.80}")

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @classmethod
    def of(cls, given: Any) -> StructuredOutputsParams:
        """Make them of a mapping of their fields, or return them as they are; ConfigError for others."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ConfigError(f"structured_outputs: expected a mapping, got {given!r:.80}")
        names = [each.name for each in fields(cls)]
        if unknown := [name for name in given if name not in names]:
            raise ConfigError(
                f"structured_outputs: expected {', '.join(names)}, got {unknown[0]!r:.80}; leave it out"
            )
        return cls(**given)


def _schema_text(schema: Any) -> str:
    """Return a JSON schema as a text, after it has been read once."""
    try:
        read = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(read, (Mapping, bool)):
            raise TypeError(f"{type(read).__name__} is no object")
        return schema if isinstance(schema, str) else json_text(schema)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"structured_outputs.json: expected a JSON schema, an object, got {schema!r:.80} ({error})"
        ) from error
