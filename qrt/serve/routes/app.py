"""The ASGI application: all routes, and before them the check of keys, counters and request ids."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import re
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse, Response
from fastapi.routing import APIRoute
from starlette._utils import get_route_path
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Match
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qrt.serve.http.anthropic_errors import is_anthropic
from qrt.serve.http.http_errors import add_error_handlers, error_response, unexpected_error
from qrt.serve.http.service import Service, new_id
from qrt.serve.link.engines import AnyClient
from qrt.serve.link.messages import Failed
from qrt.serve.routes.health import health_routes
from qrt.serve.routes.lightllm import lightllm_routes
from qrt.serve.routes.messages.routes import messages_routes
from qrt.serve.routes.monitoring import monitoring_routes
from qrt.serve.routes.openai import openai_routes
from qrt.serve.routes.pooling.routes import pooling_routes
from qrt.serve.routes.render import render_routes
from qrt.serve.routes.responses.routes import responses_routes
from qrt.serve.routes.tokens import token_routes
from qrt.version import __version__

PAGE = Path(__file__).parents[1] / "page"
OPEN_ROUTES = ("/", "/health", "/healthz", "/ping", "/liveness", "/readiness")  # readable without a key
OPEN_FOLDER = "/page/"
# The page loads from and asks only this server, runs no inline script, and no other page may frame it.
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {
    "Content-Security-Policy": PAGE_POLICY,
    "Cache-Control": "no-cache",  # browsers check each time, so that the files are of one version
    "Referrer-Policy": "no-referrer",
}
ROUTES = (
    openai_routes, messages_routes, responses_routes, lightllm_routes, pooling_routes, token_routes,
    render_routes, health_routes, monitoring_routes,
)  # fmt: skip
READY_SECONDS = 3.0  # time for a running engine to answer before this process takes connections
REQUEST_ID = re.compile(rb"[\w.:-]{1,128}")


def create_app(service: Service) -> FastAPI:
    """Make the application; it starts and closes the engine's client. `state.paths` are those of its API."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.client.start()
        # a running engine answers at once; do not wait for a loading one, so that /liveness answers
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(service.client.ready.wait(), READY_SECONDS)
        yield
        await service.close()

    app = FastAPI(
        title="qrt",
        version=__version__,
        lifespan=lifespan,
        openapi_url=None,  # qrt's own route; the pages that show it would load scripts from other sites
        redirect_slashes=False,  # behind a proxy that ends TLS, a redirect would lead to http://
    )
    add_error_handlers(app)
    app.state.paths = set[str]()
    for make in ROUTES:
        router = make(service)
        app.include_router(router)
        shown = [route for route in router.routes if isinstance(route, APIRoute) and route.include_in_schema]
        app.state.paths |= {route.path_format for route in shown}

    @app.get("/openapi.json", include_in_schema=False)
    def document(request: Request) -> JSONResponse:  # in a thread: the first time it takes half a second
        root = request.scope["root_path"]
        return JSONResponse(app.openapi() | ({"servers": [{"url": root}]} if root else {}))

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)

    app.mount("/page", PageFiles(directory=PAGE), name="page")
    app.add_middleware(Gate, service=service, routes=app.routes)
    if service.config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.config.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    return app


class PageFiles(StaticFiles):
    """The page's scripts and style, with PAGE_HEADERS."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """See StaticFiles."""
        response = super().file_response(*args, **kwargs)
        response.headers.update(PAGE_HEADERS)
        return response


class Gate:
    """Checks the key before a request is read, gives requests ids, and replies to unexpected errors.

    It also finds the path below --root-path, and treats HEAD as GET.
    """

    def __init__(self, app: ASGIApp, service: Service, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._service = service
        self._routes = routes
        self._keys = [_digest(f"bearer {key.strip()}".encode()) for key in service.config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = self._routed(scope)
        headers = dict(scope["headers"])
        name = self._name(headers)
        state, request_id = scope.setdefault("state", {}), None
        state["request_name"] = name
        if is_anthropic(scope["path"]):
            request_id = state["request_id"] = name or f"req_{uuid.uuid4().hex}"
        sender = Sender(send, self._service.client, name, request_id)
        if self._keys and not _is_open(scope) and not self._has_key(headers):
            refusal = error_response(
                scope, 401, "wrong or missing API key", headers={"WWW-Authenticate": "Bearer"}
            )
            await refusal(scope, receive, sender)
            return
        try:
            if get_route_path(scope) == "":  # the page's relative links need the slash
                await RedirectResponse(f"{scope['root_path']}/")(scope, receive, sender)
                return
            await self._app(scope, receive, sender)
        except Exception as error:
            if sender.begun:
                raise
            await error_response(scope, 500, unexpected_error(error))(scope, receive, sender)

    def _routed(self, scope: Scope) -> Scope:
        """Return a copy of the scope as routes read it.

        A proxy may strip --root-path or forward it; a path that a route has itself is never shortened. HEAD
        becomes GET; the connection keeps the original scope, so it sends no body.
        """
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        scope, root = {**scope, "method": method}, self._service.config.root_path
        if root:
            path = scope["path"]
            if f"{path}/".startswith(f"{root}/") and not self._is_own({**scope, "root_path": ""}):
                path = path.removeprefix(root)
            scope |= {"path": root + path, "root_path": root}
        return scope

    def _is_own(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] is not Match.NONE for route in self._routes)

    def _name(self, headers: dict[bytes, bytes]) -> str | None:
        """Return the client's X-Request-Id, or a new one; None if replies have none."""
        if not self._service.config.enable_request_id_headers:
            return None
        wanted = headers.get(b"x-request-id", b"")
        return wanted.decode("ascii") if REQUEST_ID.fullmatch(wanted) else new_id("http")

    def _has_key(self, headers: dict[bytes, bytes]) -> bool:
        """Compare with every key in constant time; the scheme may be in any case (RFC 9110).

        Spaces around a key do not count. Anthropic's clients send a key as X-API-Key.
        """
        scheme, key = [*headers.get(b"authorization", b"").split(None, 1), b"", b""][:2]
        bearer = b"bearer " + headers.get(b"x-api-key", b"").strip()
        given = [_digest(scheme.lower() + b" " + key.strip()), _digest(bearer)]
        matches = [hmac.compare_digest(each, key) for each in given for key in self._keys]
        return any(matches)


class Sender:
    """The `send` of one request: counts errors and adds headers.

    begun    whether the status has been sent
    """

    def __init__(
        self, send: Send, client: AnyClient, name: str | None, request_id: str | None = None
    ) -> None:
        """Start; `name` and `request_id` become headers by OpenAI's and Anthropic's name."""
        self._send = send
        self._client = client
        self._headers = [(b"x-content-type-options", b"nosniff")]
        for header, value in ((b"x-request-id", name), (b"request-id", request_id)):
            if value is not None:
                self._headers.append((header, value.encode()))
        self.begun = False

    async def __call__(self, message: Message) -> None:
        """See ASGI."""
        if message["type"] == "http.response.start":
            self.begun = True
            if message["status"] >= 400:
                self._client.tell(Failed(message["status"]))
            message = {**message, "headers": [*message.get("headers", []), *self._headers]}
        await self._send(message)


def _is_open(scope: Scope) -> bool:
    """Return whether the route needs no key, by the path that the router reads: the one below --root-path."""
    path = get_route_path(scope) or "/"
    if scope["method"] == "POST":
        return path == "/ping"  # SageMaker's probe, which some ask by POST
    return scope["method"] == "GET" and (path in OPEN_ROUTES or path.startswith(OPEN_FOLDER))


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()
