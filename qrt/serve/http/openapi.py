"""Describe replies in /openapi.json: the shapes that clients rely on."""

from __future__ import annotations

from typing import Any

from qrt.serve.http.anthropic_errors import anthropic_status


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


def _json(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


_ANTHROPIC_ERROR = _object(
    type={"const": "error"},
    error=_object(type={"type": "string"}, message={"type": "string"}),
    request_id={"type": "string"},
)
_ERROR = _object(
    error=_object(
        message={"type": "string"},
        type={"type": "string"},
        param={"type": ["string", "null"]},
        code={"type": ["integer", "string"]},
    )
)
_MEANINGS: dict[int | str, str] = {
    400: "Wrong request",
    401: "Wrong or missing API key",
    404: "No such model or route",
    405: "Not with this method",
    413: "Body too large",
    415: "Not JSON",
    429: "Queue full; see Retry-After",
    "4XX": "Wrong request",
    500: "Failure of the server",
    501: "Not run by this server",
    503: "Starting, ending or broken; see Retry-After",
    504: "Took too long",
}
Responses = dict[int | str, dict[str, Any]]


def errors() -> Responses:
    """Return the errors that any route may reply with."""
    return {code: _json(text, _ERROR) for code, text in _MEANINGS.items()}


def _anthropic_errors() -> Responses:
    codes = {
        anthropic_status(code) if isinstance(code, int) else code: text for code, text in _MEANINGS.items()
    }
    return {code: _json(text, _ANTHROPIC_ERROR) for code, text in codes.items()}


_CARD = _object(
    id={"type": "string"},
    object={"const": "model"},
    created={"type": "integer"},
    owned_by={"type": "string"},
    max_model_len={"type": "integer"},
)
MODEL: Responses = {**errors(), 200: _json("A model", _CARD)}
MODELS: Responses = {
    **errors(),
    200: _json("All names", _object(object={"const": "list"}, data={"type": "array", "items": _CARD})),
}
EVENTS: Responses = {
    **errors(),
    200: {"description": "Server-sent events", "content": {"text/event-stream": {}}},
}


def listed(**item: dict[str, Any]) -> Responses:
    """Return the schema of a list with one object of these properties for each input."""
    usage = _object(prompt_tokens={"type": "integer"}, total_tokens={"type": "integer"})
    one = _object(index={"type": "integer"}, object={"type": "string"}, **item)
    body = _object(
        id={"type": "string"},
        object={"const": "list"},
        created={"type": "integer"},
        model={"type": "string"},
        data={"type": "array", "items": one},
        usage=usage,
    )
    return {**errors(), 200: _json("One for each input, in order", body)}


_RESULT = _object(index={"type": "integer"}, relevance_score={"type": "number"})
RERANKED: Responses = {
    **errors(),
    200: _json(
        "The documents, the most relevant first",
        _object(id={"type": "string"}, model={"type": "string"}, results={"type": "array", "items": _RESULT}),
    ),
}


def events_or(kind: str) -> Responses:
    """Return the schema of a body of that kind, and with `stream` of the events with its chunks."""
    usage = _object(
        prompt_tokens={"type": "integer"},
        completion_tokens={"type": "integer"},
        total_tokens={"type": "integer"},
    )
    choice = _object(index={"type": "integer"}, finish_reason={"type": ["string", "null"]})
    body = _object(
        id={"type": "string"},
        object={"const": kind},
        created={"type": "integer"},
        model={"type": "string"},
        choices={"type": "array", "items": choice},
        usage=usage,
    )
    return {**errors(), 200: _reply_or_events(body)}


def _reply_or_events(schema: dict[str, Any]) -> dict[str, Any]:
    reply = _json("The answer", schema)
    reply["content"]["text/event-stream"] = {}
    return reply


_RESPONSE = _object(
    id={"type": "string"},
    object={"const": "response"},
    created_at={"type": "integer"},
    model={"type": "string"},
    status={"enum": ["completed", "incomplete"]},
    output={"type": "array", "items": _object(id={"type": "string"}, type={"type": "string"})},
    usage=_object(
        input_tokens={"type": "integer"}, output_tokens={"type": "integer"}, total_tokens={"type": "integer"}
    ),
)
RESPONSE: Responses = {**errors(), 200: _reply_or_events(_RESPONSE)}
INPUT_TOKENS: Responses = {
    **errors(),
    200: _json(
        "The number of tokens",
        _object(object={"const": "response.input_tokens"}, input_tokens={"type": "integer"}),
    ),
}
_MESSAGE = _object(
    id={"type": "string"},
    type={"const": "message"},
    role={"const": "assistant"},
    model={"type": "string"},
    content={"type": "array", "items": _object(type={"enum": ["text", "thinking", "tool_use"]})},
    stop_reason={
        "enum": ["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
    },
    stop_sequence={"type": ["string", "null"]},
    usage=_object(input_tokens={"type": "integer"}, output_tokens={"type": "integer"}),
)
MESSAGE: Responses = {**_anthropic_errors(), 200: _reply_or_events(_MESSAGE)}
COUNT: Responses = {
    **_anthropic_errors(),
    200: _json("The number of tokens", _object(input_tokens={"type": "integer"})),
}
