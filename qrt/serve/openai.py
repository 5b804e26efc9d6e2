"""The OpenAI-compatible endpoints: /v1/completions, /v1/chat/completions, /v1/models, /health."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from qrt.config import SamplingParams
from qrt.errors import ConfigError, QrtError, UnsupportedError
from qrt.serve.async_engine import AsyncEngine
from qrt.serve.output import CompletionDelta, RequestCollector
from qrt.serve.protocol import ChatCompletionRequest, CompletionRequest, Sampling
from qrt.serve.replies import ChatReply, CompletionReply, Reply
from qrt.serve.tokenizer import Tokenizer

Deltas = AsyncGenerator[tuple[int, CompletionDelta], None]

logger = logging.getLogger(__name__)

OPEN_ROUTES = ("/health",)  # answered without a key
CLIENT_CLOSED_REQUEST = 499  # nginx's code; nobody reads the reply


@dataclass(frozen=True)
class Service:
    """What the routes need.

    names      what `/v1/models` lists and requests may ask for, the first one first
    api_key    None lets everybody in
    """

    engine: AsyncEngine
    tokenizer: Tokenizer
    names: tuple[str, ...]
    api_key: str | None = None


def create_app(service: Service) -> FastAPI:
    """The ASGI application; the engine's loop runs from its start-up to its shutdown."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        await service.engine.close()

    app = FastAPI(title="qrt", lifespan=lifespan, dependencies=[Depends(_key_check(service.api_key))])
    _add_error_handlers(app)
    started = int(time.time())

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if service.engine.alive else 503)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(service, name, started) for name in service.names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        _check_model(service, name)
        return _model_card(service, name, started)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        _check_body(service, body)
        collectors = await asyncio.to_thread(_completion_collectors, service, body)
        reply = CompletionReply(_id("cmpl"), body.model or service.names[0], body, collectors)
        return await _answer(service, request, body, collectors, reply)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        _check_body(service, body)
        collectors = await asyncio.to_thread(_chat_collectors, service, body)
        reply = ChatReply(_id("chatcmpl"), body.model or service.names[0], body, collectors)
        return await _answer(service, request, body, collectors, reply)

    return app


def _id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def _model_card(service: Service, name: str, started: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": started,
        "owned_by": "qrt",
        "root": name,
        "parent": None,
        "max_model_len": service.engine.engine.max_model_len,
    }


def _check_model(service: Service, name: str) -> None:
    if name not in service.names:
        raise HTTPException(404, f"model {name!r} is not served here; it is {' or '.join(service.names)}")


def _check_body(service: Service, body: Sampling) -> None:
    if body.model is not None:
        _check_model(service, body.model)
    if body.stream_options is not None and not body.stream:
        raise ConfigError("stream_options: wanted only with stream: true")
    if isinstance(body, CompletionRequest) and body.echo and body.logprobs is not None:
        raise UnsupportedError("echo with logprobs: log-probabilities of the prompt are not returned yet")
    if refused := body.unsupported():
        raise UnsupportedError(f"{', '.join(refused)}: not run by this server; leave it out")


def _completion_collectors(service: Service, body: CompletionRequest) -> list[RequestCollector]:
    """One for each prompt, tokenized."""
    params = body.sampling_params(_defaults(service), body.max_tokens, body.logprobs)
    collectors = []
    for prompt in body.prompts():
        if isinstance(prompt, str):
            text, ids = prompt, service.tokenizer.encode(prompt)
        else:
            text, ids = service.tokenizer.decode(prompt), prompt
        collectors.append(RequestCollector(_id("req"), text, ids, params, service.tokenizer))
    return collectors


def _chat_collectors(service: Service, body: ChatCompletionRequest) -> list[RequestCollector]:
    """The conversation through the chat template, tokenized."""
    messages = [message.for_template() for message in body.messages]
    text = service.tokenizer.render_chat(messages, add_generation_prompt=body.add_generation_prompt)
    ids = service.tokenizer.encode(text, add_special_tokens=False)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = body.sampling_params(_defaults(service), body.max_completion_tokens or body.max_tokens, logprobs)
    return [RequestCollector(_id("req"), text, ids, params, service.tokenizer)]


def _defaults(service: Service) -> SamplingParams:
    return service.engine.engine.generation.sampling


async def _answer(
    service: Service, request: Request, body: Sampling, collectors: Sequence[RequestCollector], reply: Reply
) -> Response:
    """One JSON body at the end, or server-sent events as tokens come."""
    deltas = service.engine.generate(collectors)
    if not body.stream:
        async with aclosing(deltas):
            finished = await _unless_disconnected(request, _drain(deltas))
        return JSONResponse(reply.body()) if finished else Response(status_code=CLIENT_CLOSED_REQUEST)
    first = await anext(deltas)  # a refused request raises here, before the status line is sent
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    events = _events(first, deltas, reply, include_usage)
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _drain(deltas: Deltas) -> None:
    async for _ in deltas:
        pass


async def _unless_disconnected(request: Request, work: Awaitable[None]) -> bool:
    """Await `work`; give it up and return False when the client goes away first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return False
        task.result()
        return True
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(
    first: tuple[int, CompletionDelta],
    deltas: Deltas,
    reply: Reply,
    include_usage: bool,
) -> AsyncIterator[str]:
    """Server-sent events; an error in the middle is an event of its own, `[DONE]` always comes last."""
    async with aclosing(deltas):
        try:
            for event in reply.opening():
                yield event
            for event in reply.events(*first):
                yield event
            async for index, delta in deltas:
                for event in reply.events(index, delta):
                    yield event
            if include_usage:
                yield reply.usage_event()
        except QrtError as error:
            yield reply.error_event(_error(500, str(error)))
        yield "data: [DONE]\n\n"


# Errors: always {"error": {message, type, param, code}}, never a traceback.

ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


def _error(code: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = ERROR_TYPES.get(code, "BadRequestError" if code < 500 else "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _add_error_handlers(app: FastAPI) -> None:
    codes: dict[type[Exception], int] = {ConfigError: 400, UnsupportedError: 501, QrtError: 500}
    for kind, code in codes.items():
        app.add_exception_handler(kind, _handler(code))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"] if part != "body")
        return JSONResponse(_error(400, f"{param or 'body'}: {first['msg']}", param or None), 400)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(_error(error.status_code, str(error.detail)), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        reference = uuid.uuid4().hex[:12]
        logger.error("request failed (%s)", reference, exc_info=error)
        return JSONResponse(_error(500, f"internal error, logged as {reference}"), 500)


def _handler(code: int) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(request: Request, error: Exception) -> Response:
        return JSONResponse(_error(code, str(error)), code)

    return handle


def _key_check(api_key: str | None) -> Callable[[Request], Awaitable[None]]:
    """A dependency that wants `Authorization: Bearer <api_key>`; comparison takes the same time for all."""
    wanted = hashlib.sha256(f"Bearer {api_key}".encode()).digest()

    async def check(request: Request) -> None:
        if api_key is None or request.url.path in OPEN_ROUTES:
            return
        given = hashlib.sha256(request.headers.get("authorization", "").encode()).digest()
        if not hmac.compare_digest(given, wanted):
            raise HTTPException(401, "wrong or missing API key", {"WWW-Authenticate": "Bearer"})

    return check
