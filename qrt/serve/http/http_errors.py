"""Reply to errors, never with a traceback, path or address.

The shape is OpenAI's, {"error": {message, type, param, code}}, but Anthropic's on the routes of its API.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from qrt.errors import ConfigError, ContextLengthError, QrtError, QueueFullError, UnsupportedError
from qrt.serve.http.anthropic_errors import anthropic_error, anthropic_status, is_anthropic
from qrt.serve.http.validation_errors import wrong_field
from qrt.serve.link.engine_client import ShutdownError
from qrt.serve.settings import MAX_ECHO_CHARS

logger = logging.getLogger(__name__)

ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    431: "HeaderTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}
CODES: dict[type[Exception], int] = {  # another kind of error has the code of its nearest base class
    ConfigError: 400,
    UnsupportedError: 501,
    QueueFullError: 429,
    ShutdownError: 503,
    QrtError: 500,
}
# What OpenAI's clients tell errors by; other errors have the status, as in vLLM.
TOO_LONG, NO_MODEL = "context_length_exceeded", "model_not_found"
WORDS = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
NO_ROUTE = "Not Found"  # starlette's message for a path without a route
RETRY_AFTER = {429: "1", 503: "5"}  # seconds
MAX_MESSAGE_CHARS = 1000


class UnknownModelError(HTTPException):
    """A request names a model that is not served."""

    def __init__(self, message: str) -> None:
        super().__init__(404, message)


def error_body(
    code: int,
    message: str,
    param: str | None = None,
    path: str = "",
    request_id: str | None = None,
    *,
    word: str | None = None,
) -> dict[str, Any]:
    """Return the body of an error reply.

    path   that of the request
    word   the error's code in OpenAI's shape, if it has one of its own
    """
    if len(message) > MAX_MESSAGE_CHARS:
        message = f"{message[:MAX_MESSAGE_CHARS]}..."
    if is_anthropic(path):
        return anthropic_error(code, message, request_id)
    kind = ERROR_TYPES.get(code, "BadRequestError" if code < 500 else "InternalServerError")
    word = word or WORDS.get(code)
    return {"error": {"message": message, "type": kind, "param": param, "code": word or code}}


def error_response(
    scope: Scope,
    code: int,
    message: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    word: str | None = None,
) -> JSONResponse:
    """Return the reply to an error of a request, with its headers."""
    headers = dict(headers or {})
    if code in RETRY_AFTER:
        headers["Retry-After"] = RETRY_AFTER[code]
    if code == 501:
        headers["X-Should-Retry"] = "false"  # OpenAI's clients ask again after any other 5xx
    path, request_id = scope["path"], scope.get("state", {}).get("request_id")
    status = anthropic_status(code) if is_anthropic(path) else code
    return JSONResponse(error_body(code, message, param, path, request_id, word=word), status, headers)


def unexpected_error(error: BaseException) -> str:
    """Log a bug with a reference number, and return a message with that number."""
    reference = uuid.uuid4().hex[:12]
    logger.error("request failed (%s)", reference, exc_info=error)
    return f"internal error, logged as {reference}"


def add_error_handlers(app: FastAPI) -> None:
    """Add handlers for errors of qrt, pydantic and starlette; the Gate handles all others."""
    for kind, code in CODES.items():
        app.add_exception_handler(kind, _handler(code))

    @app.exception_handler(ContextLengthError)
    async def too_long(request: Request, error: ContextLengthError) -> JSONResponse:
        message = str(error)
        if is_anthropic(request.scope["path"]):
            message = f"prompt is too long: {error.got} tokens > {error.most} maximum"
        return error_response(request.scope, 400, message, word=TOO_LONG)

    @app.exception_handler(UnknownModelError)
    async def unknown(request: Request, error: UnknownModelError) -> JSONResponse:
        return error_response(request.scope, 404, str(error.detail), "model", word=NO_MODEL)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        wrong = wrong_field(error.errors(), error.body)
        param = ".".join(map(str, wrong.path))
        return error_response(
            request.scope,
            400,
            f"{param or 'body'}: {wrong.message}"[:MAX_MESSAGE_CHARS],
            param[:MAX_ECHO_CHARS],
        )

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code == 404 and message == NO_ROUTE:
            path = str(request.scope["path"])
            bare = {**request.scope, "path": path.rstrip("/")}
            known = any(route.matches(bare)[0] is not Match.NONE for route in request.app.routes)
            hint = "; leave out the slash at its end" if known and path.endswith("/") else ""
            message = f"no route {path[:MAX_ECHO_CHARS]!r}{hint}"
        return error_response(request.scope, error.status_code, message, headers=error.headers)


def _handler(code: int) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(request: Request, error: Exception) -> Response:
        return error_response(request.scope, code, str(error))

    return handle
