"""StrictJsonRoute: accept only bodies in RFC 8259's JSON (no NaN), in UTF-8, and not nested too deeply."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from qrt.request.numbers import read_float
from qrt.serve.settings import MAX_JSON_DEPTH

_BODY = msgspec.json.Decoder(float_hook=read_float)  # schemas keep numbers as they are written


class StrictJsonRequest(Request):
    """A request whose `json` refuses what Python's parser wrongly accepts."""

    async def json(self) -> Any:
        """Return the body; HTTPException 400 if it is no JSON or nested too deeply."""
        try:
            value = _BODY.decode(await self.body())
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, f"body: expected valid JSON ({str(error)[:100]})") from error
        if _depth(value) > MAX_JSON_DEPTH:
            raise HTTPException(400, f"body: expected at most {MAX_JSON_DEPTH} levels of nesting, got more")
        return value


class StrictJsonRoute(APIRoute):
    """A route that reads its body as a StrictRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See fastapi.routing.APIRoute."""
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            if self.body_field is not None:
                _check_headers(request)
            return await handle(StrictJsonRequest(request.scope, request.receive))

        return strict


def _check_headers(request: Request) -> None:
    """Raise HTTPException 415 for a body that is no JSON, or is compressed."""
    coding = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    if coding not in ("", "identity"):
        raise HTTPException(
            415,
            f"Content-Encoding: expected none, got {coding[:50]!r}; send the body as it is",
            headers={"Accept-Encoding": "identity"},
        )
    kind = request.headers.get("content-type", "")
    if not _is_json(kind):
        raise HTTPException(415, f"Content-Type: expected application/json, got {kind[:50]!r}")


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _depth(value: Any) -> int:
    """Count nested levels of lists and dictionaries, up to MAX_JSON_DEPTH + 1."""
    depth, level = 0, [value]
    while level and depth <= MAX_JSON_DEPTH:
        level = [
            inner
            for outer in level
            if isinstance(outer, (list, dict))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (list, dict))
        ]
        depth += 1
    return depth
