"""Errors in the shape of Anthropic's API, which its routes reply with."""

from __future__ import annotations

import re
from typing import Any

PATHS = re.compile(r"(^|/)v1/messages(/|$)")  # also below --root-path
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    501: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}
OVERLOADED = 529  # Anthropic's code where others have 503


def is_anthropic(path: str) -> bool:
    """Return whether a path belongs to Anthropic's API."""
    return PATHS.search(path) is not None


def anthropic_status(code: int) -> int:
    """Return the status that Anthropic's API has for an error."""
    return OVERLOADED if code == 503 else code


def anthropic_error(code: int, message: str, request_id: str | None = None) -> dict[str, Any]:
    """Return the body of an error reply, or the data of an event `error`."""
    kind = TYPES.get(code, "invalid_request_error" if code < 500 else "api_error")
    named = {} if request_id is None else {"request_id": request_id}
    return {"type": "error", "error": {"type": kind, "message": message}, **named}
