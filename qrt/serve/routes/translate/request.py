"""Turn bodies of other APIs into a ChatCompletionRequest, and name their own fields in its errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from qrt.compat.settings import named, refuse
from qrt.errors import ConfigError, UnsupportedError
from qrt.serve.http.body import Body
from qrt.serve.routes.protocol import ChatCompletionRequest

# Fields of /v1/chat/completions that other APIs say in their own way, or whose replies have no place for.
_ELSEWHERE = "this route does not have it; ask /v1/chat/completions"
NOT_SHARED = named(
    ("messages tools max_tokens max_completion_tokens prompt_logprobs", _ELSEWHERE, ()),
    ("stream_options", _ELSEWHERE, ({}, {"include_usage": False})),
    ("functions reasoning_effort", _ELSEWHERE, ()),
    ("n best_of", _ELSEWHERE, (1,)),
    ("logprobs return_token_ids return_tokens_as_token_ids", _ELSEWHERE, (False,)),
    ("top_logprobs", _ELSEWHERE, (0,)),
    ("tool_choice", _ELSEWHERE, ("none", "auto")),
    ("parallel_tool_calls", _ELSEWHERE, (True,)),
    ("response_format", _ELSEWHERE, ({}, {"type": "text"})),
)


def chat_request(body: Body, own: Mapping[str, Any]) -> ChatCompletionRequest:
    """Return the request with the fields `own`, and those of /v1/chat/completions that the body has besides.

    So clients can send `seed`, `chat_template_kwargs` or `structured_outputs` to any API. UnsupportedError
    for one that the API says in another way, RequestValidationError for a wrong one.
    """
    others = {name: value for name, value in (body.model_extra or {}).items() if value is not None}
    refuse(NOT_SHARED, others, others)
    others = {name: value for name, value in others.items() if name not in NOT_SHARED}
    given = {**others, **{name: value for name, value in own.items() if value is not None}}
    try:
        return ChatCompletionRequest.model_validate(given)
    except ValidationError as error:
        errors = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
        raise RequestValidationError(errors, body=given) from error


@contextmanager
def naming(fields: Mapping[str, str]) -> Iterator[None]:
    """Let errors name the fields of the client's body; `fields` maps names of the chat's body to them."""
    try:
        yield
    except (ConfigError, UnsupportedError) as error:
        name, colon, rest = str(error.args[0]).partition(":")
        if name in fields:
            raise type(error)(f"{fields[name]}{colon}{rest}", *error.args[1:]) from error
        raise
