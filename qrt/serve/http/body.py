"""Define what request bodies of all APIs share: types of fields, and the meaning of null."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from types import NoneType
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticKnownError

from qrt.compat.settings import Unsupported, refuse
from qrt.errors import ConfigError
from qrt.request.sampling import MAX_TOKENS_LISTED
from qrt.serve.settings import MAX_STOP_CHARS, MAX_STOPS

Count = Annotated[int, Field(ge=0, lt=2**31)]
Limit = Annotated[int, Field(ge=1, lt=2**31)]
TokenId = Count
Tokens = Annotated[list[TokenId], Field(fail_fast=True)]  # may be as long as a body: one error is enough
TokenList = Annotated[list[TokenId], Field(max_length=MAX_TOKENS_LISTED, fail_fast=True)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]
_Stops = Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None
Stops = Annotated[
    _Stops,
    BeforeValidator(
        lambda given: None if given == "" else given, json_schema_input_type=_Stops | Literal[""]
    ),
]
Scores = Annotated[  # log-probabilities of so many tokens beside each one's own; false: none
    Count | None,
    BeforeValidator(
        lambda given: None if given is False else given, json_schema_input_type=Count | Literal[False] | None
    ),
]
Penalty = Annotated[float, Field(ge=-2, le=2)]


def _few(bias: Any) -> Any:
    """Check the size before the values, as each wrong value is an error; read llama.cpp's [] as none."""
    if isinstance(bias, dict) and len(bias) > MAX_TOKENS_LISTED:
        sizes = {"field_type": "Dictionary", "max_length": MAX_TOKENS_LISTED, "actual_length": len(bias)}
        raise PydanticKnownError("too_long", sizes)
    return {} if bias == [] else bias


_Bias = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_TOKENS_LISTED)]
_Empty = Annotated[list[Any], Field(max_length=0)]  # in the OpenAPI document, since it is read as none
LogitBias = Annotated[_Bias, BeforeValidator(_few, json_schema_input_type=_Bias | _Empty)]
TOKEN_ID = re.compile("0|[1-9][0-9]{0,8}")  # each id has one spelling as a key, so none comes twice


def by_token_id(bias: LogitBias) -> dict[int, float]:
    """Return the bias with its JSON keys as token ids; ConfigError for a key that is none."""
    for key in bias:
        if not TOKEN_ID.fullmatch(key):
            raise ConfigError(f"logit_bias: expected a token id, got the key {key[:20]!r}")
    return {int(key): value for key, value in bias.items()}


@cache
def _never_null(body: type[BaseModel]) -> frozenset[str]:
    """Return the keys of the fields that have a default other than null and take no null."""
    keys: set[str] = set()
    for name, field in body.model_fields.items():
        if not field.is_required() and NoneType not in get_args(field.annotation):
            alias = field.validation_alias
            keys |= {name, *map(str, alias.choices if isinstance(alias, AliasChoices) else ())}
    return frozenset(keys)


def _document_nulls(schema: dict[str, Any], body: type[BaseModel]) -> None:
    for key in _never_null(body) & schema["properties"].keys():
        schema["properties"][key] = {"anyOf": [schema["properties"][key], {"type": "null"}]}


class Body(BaseModel):
    """Base of all request bodies.

    Numbers are finite, and nothing is converted: neither true nor "1" is a number. null stands for a field's
    default, as in OpenAI's schema. Unknown fields are accepted here, and ignored or refused later.
    """

    model_config = ConfigDict(
        extra="allow", allow_inf_nan=False, strict=True, json_schema_extra=_document_nulls
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict) or None not in given.values():
            return given
        never = _never_null(cls)
        return {key: value for key, value in given.items() if value is not None or key not in never}

    def refuse_unsupported(self, table: Mapping[str, Unsupported]) -> None:
        """Raise UnsupportedError for fields of other servers in `table` that would change something."""
        refuse(table, dict(self), self.model_extra or ())

    def given(self, name: str) -> Any:
        """Return a field by name, declared or not; None if it is not given."""
        return getattr(self, name, None)
