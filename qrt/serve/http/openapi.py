"""Describe replies in /openapi.json: the shapes that clients rely on."""

from __future__ import annotations

from typing import Any


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


def _json(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


_ERROR = _object(
    error=_object(
        message={"type": "string"},
        type={"type": "string"},
        param={"type": ["string", "null"]},
        code={"type": "integer"},
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
    reply = _json("The completion", body)
    reply["content"]["text/event-stream"] = {}
    return {**errors(), 200: reply}
