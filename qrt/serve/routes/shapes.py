"""Fields by which the clients of other servers ask for the shape of an answer; each request has one shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field

from qrt.errors import ConfigError, UnsupportedError
from qrt.request.structured_outputs import StructuredOutputsParams
from qrt.serve.http.body import Body

MAX_CHOICES = 10_000
Schema = dict[str, Any] | str
Asked = tuple[str, dict[str, Any]]  # the place of the field that asks, and fields of StructuredOutputsParams


class ShapeFields(Body):
    """The fields of OpenAI, vLLM, SGLang, LightLLM, TGI, llama.cpp and Ollama; any route takes any of them.

    As in vLLM a JSON schema is enforced whether `strict` or not.
    """

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(max_length=MAX_CHOICES, fail_fast=True)] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: Schema | None = None
    regex: str | None = None
    ebnf: str | None = None
    regular_constraint: str | None = None
    grammar: str | dict[str, Any] | None = None
    format: Schema | None = None

    def shape(self) -> StructuredOutputsParams | None:
        """Return the shape that the answer must have; None: any.

        ConfigError for more than one shape, or a wrong one; UnsupportedError for a structural tag.
        """
        if not (asked := self._all_asked()):
            return None
        if len(asked) > 1:
            names = " and ".join(name.partition(".")[0] for name, _ in asked)
            raise ConfigError(
                f"{names}: expected one of them, as an answer has one shape; leave the rest out"
            )
        ((place, fields),) = asked
        if self.guided_whitespace_pattern and fields.keys() & {"json", "json_object"}:
            fields = {"whitespace_pattern": self.guided_whitespace_pattern, **fields}
        try:
            return StructuredOutputsParams.of(fields)
        except ConfigError as error:
            if place == "structured_outputs":
                raise
            (kind,) = fields.keys() - {"whitespace_pattern"}
            raise ConfigError(str(error).replace(f"structured_outputs.{kind}", place)) from error

    @property
    def shape_place(self) -> str:
        """The place of the field that asks for a shape, for errors; "" where they name it anyway."""
        place = next((place for place, _ in self._all_asked()), "")
        return "" if place == "structured_outputs" else place

    def _all_asked(self) -> list[Asked]:
        return [found for name in READERS if (found := self._asked(name))]

    def _asked(self, name: str) -> Asked | None:
        value = getattr(self, name)
        return None if value is None or value in ("", [], False) else READERS[name](name, value)


def _as(kind: str) -> Callable[[str, Any], Asked]:
    """Return the reader of a field whose value is the field `kind` of StructuredOutputsParams."""
    return lambda name, value: (name, {kind: value})


def _response_format(name: str, value: dict[str, Any]) -> Asked | None:
    """Read OpenAI's form, with llama.cpp's and TGI's `schema` and `value` beside the type."""
    kind = value.get("type")
    if kind == "text" or not value:
        return None
    beside = next((key for key in ("schema", "value") if value.get(key) is not None), None)
    if kind == "json_object":
        return (f"{name}.{beside}", {"json": value[beside]}) if beside else (name, {"json_object": True})
    if kind == "json_schema":
        inner = value.get("json_schema")
        if isinstance(inner, Mapping) and inner.get("schema") is not None:
            return f"{name}.json_schema.schema", {"json": inner["schema"]}
        if beside is None:
            raise ConfigError(f"{name}.json_schema.schema: expected a JSON schema, got none")
        return f"{name}.{beside}", {"json": value[beside]}
    if kind == "structural_tag":
        raise UnsupportedError(f"{name}.type: {STRUCTURAL_TAG}")
    raise ConfigError(f"{name}.type: expected text, json_object or json_schema, got {kind!r:.50}")


def _structured_outputs(name: str, value: dict[str, Any]) -> Asked | None:
    """Read vLLM's form."""
    given = {key: inner for key, inner in value.items() if inner is not None and inner is not False}
    if given.get("structural_tag"):
        raise UnsupportedError(f"{name}.structural_tag: {STRUCTURAL_TAG}")
    return (name, given) if given else None


def _grammar(name: str, value: str | dict[str, Any]) -> Asked | None:
    """Read llama.cpp's text, or TGI's object with a type and a value."""
    if isinstance(value, str):
        return name, {"grammar": value}
    if not value:
        return None
    kind, inner = value.get("type"), value.get("value")
    if kind == "json_schema" and isinstance(inner, Mapping) and "schema" in inner:
        return f"{name}.value.schema", {"json": inner["schema"]}
    kinds = {"json": "json", "json_object": "json", "json_schema": "json", "regex": "regex"}
    if kind not in kinds:
        raise ConfigError(f"{name}.type: expected json, json_schema or regex, got {kind!r:.50}")
    if inner is None:
        raise ConfigError(f"{name}.value: expected a JSON schema or an expression, got none")
    return f"{name}.value", {kinds[kind]: inner}


def _format(name: str, value: Schema) -> Asked | None:
    """Read Ollama's form: the word json, or a JSON schema."""
    if not value:
        return None
    return name, {"json_object": True} if value == "json" else {"json": value}


STRUCTURAL_TAG = "structural tags are not supported; write a grammar, or use tools with strict: true"
READERS: dict[str, Callable[[str, Any], Asked | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _as("json"),
    "guided_regex": _as("regex"),
    "guided_choice": _as("choice"),
    "guided_grammar": _as("grammar"),
    "guided_json_object": _as("json_object"),
    "json_schema": _as("json"),
    "regex": _as("regex"),
    "ebnf": _as("grammar"),
    "regular_constraint": _as("regex"),
    "grammar": _grammar,
    "format": _format,
}
