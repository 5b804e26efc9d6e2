"""Grammar: what a request asks of its answer's shape, in one form for each way to say it."""

from __future__ import annotations

import json
from dataclasses import dataclass

from qrt.errors import ConfigError
from qrt.grammar.schema import check_schema
from qrt.request.structured_outputs import StructuredOutputsParams

MAX_BYTES = 128 * 1024
MAX_CHOICES = 10_000
# Room for the indentation of nested objects, but never endless: models like to write spaces for ever.
SPACES = r"[\x20\n\r\t]{1,40}"
ANY_OBJECT = '{"type": "object"}'
FIELDS = {"json": "json", "regex": "regex", "choice": "choice", "lark": "grammar"}


@dataclass(frozen=True)
class Grammar:
    """The shape of an answer; it is its own key in caches.

    kind         "json", "regex", "choice" or "lark"
    text         a JSON schema; a regular expression; a JSON list of texts; Lark's or EBNF's rules
    whitespace   "json" alone: the expression of the space that is allowed, once, between JSON's marks; "":
                 none is
    """

    kind: str
    text: str
    whitespace: str = ""

    @classmethod
    def of(cls, params: StructuredOutputsParams) -> Grammar:
        """Return the grammar that a request's `structured_outputs` mean."""
        kind = params.kind
        if kind in ("json", "json_object"):
            whitespace = "" if params.disable_any_whitespace else params.whitespace_pattern or SPACES
            return cls("json", ANY_OBJECT if kind == "json_object" else str(params.json), whitespace)
        if kind == "choice":
            return cls(kind, json.dumps(params.choice, ensure_ascii=False))
        return cls("lark" if kind == "grammar" else kind, str(getattr(params, kind)))

    @property
    def field(self) -> str:
        """The name of the request's field, for messages."""
        return f"structured_outputs.{FIELDS[self.kind]}"


def check_bounds(grammar: Grammar) -> None:
    """Raise ConfigError for a grammar that is too large; nothing is compiled.

    At most 128 KiB of text, 10,000 choices, and for a JSON schema what `check_schema` says.
    """
    for text in (grammar.text, grammar.whitespace):
        size = len(_bytes(grammar.field, text))
        if size > MAX_BYTES:
            raise ConfigError(
                f"{grammar.field}: expected at most {MAX_BYTES:,} bytes, got {size:,}; make it smaller"
            )
    if grammar.kind == "json":
        check_schema(grammar.field, grammar.text)
    elif grammar.kind == "choice" and (count := len(json.loads(grammar.text))) > MAX_CHOICES:
        raise ConfigError(f"{grammar.field}: expected at most {MAX_CHOICES:,} texts, got {count:,}")


def _bytes(field: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{field}: expected text without lone surrogates, got {text!r:.80}") from error
