"""The API process: HTTP, tokenizing, chat templates, detokenizing, server-sent events.

The supervisor starts it as `python -m qrt.serve.processes.httpserver`; several share one listening socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from qrt.cli import run_main
from qrt.serve.http.connection import Connection
from qrt.serve.http.service import Service
from qrt.serve.link.engine_client import ShutdownError
from qrt.serve.link.engines import AnyClient, Engines
from qrt.serve.link.prefixes import Prefixes
from qrt.serve.link.process_client import ProcessClient
from qrt.serve.processes.process import Spec, child_spec
from qrt.serve.processes.supervisor import address_of
from qrt.serve.routes.app import create_app
from qrt.serve.settings import ServerConfig
from qrt.text.tokenizer import Tokenizer

logger = logging.getLogger("qrt.serve.processes.httpserver")  # __name__ would be __main__

KEEP_ALIVE_SECONDS = 30


class HttpServer(uvicorn.Server):
    """uvicorn with qrt's connection; SIGTERM drains the requests before it closes.

    While it drains, running requests go on, /readiness is red, and new requests get 503.
    """

    def __init__(self, app: FastAPI, service: Service, alive: Sequence[int] = ()) -> None:
        """Serve `app`; each pipe of `alive` closes when its engine dies."""
        super().__init__(uvicorn_config(app, service.config))
        self._service = service
        self._alive = alive
        self._draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drain on SIGTERM, and watch the engine; this replaces uvicorn's handlers."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ValueError, RuntimeError):  # signals reach the main thread only
            loop.add_signal_handler(signal.SIGTERM, self.drain)
        for engine, pipe in enumerate(self._alive):
            loop.add_reader(pipe, self._engine_died, engine)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does, and announce when the server is ready."""
        await super().startup(sockets)
        self._announcement = asyncio.create_task(self._announce(sockets or []))

    def drain(self) -> None:
        """End when all running requests have ended, or their time is over."""
        self._service.draining = True
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        end = time.monotonic() + self._service.config.shutdown_timeout
        while self.server_state.tasks and self._service.client.num_running and time.monotonic() < end:
            await asyncio.sleep(0.05)
        if self._service.client.num_running:
            logger.warning("%d requests are given up", self._service.client.num_running)
        self._service.client.stop("the server is shutting down", ShutdownError)
        self.should_exit = True

    def _engine_died(self, engine: int) -> None:
        asyncio.get_running_loop().remove_reader(self._alive[engine])
        self._service.client.died(engine)

    async def _announce(self, sockets: list[socket.socket]) -> None:
        await self._service.client.ready.wait()
        for listener in sockets:
            logger.info(
                "ready: serving %s on %s", self._service.model, address_of(listener, self._service.config)
            )


def uvicorn_config(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    """Return uvicorn's settings for an application."""
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_config=None,
        access_log=config.log_level == "debug",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=5,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        server_header=False,
        proxy_headers=False,
    )


def serve(spec: Spec) -> None:
    """Serve until SIGTERM."""
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    tokenizer = Tokenizer(spec.engine.tokenizer or spec.engine.model)
    service = Service(_client(spec), tokenizer, spec.server)
    app = create_app(service)
    if spec.name == "api-0":
        logger.info("routes: %s", ", ".join(sorted(app.state.paths)))
    server = HttpServer(app, service, [link.alive for link in spec.links])
    gc.collect()
    gc.freeze()  # the imported modules' objects live as long as the process
    server.run([socket.socket(fileno=spec.listener)])


def _client(spec: Spec) -> AnyClient:
    """Return the client of the server's engine, or of all its engines."""
    if len(spec.links) == 1:
        return ProcessClient(spec.links[0].socket, spec.name)
    shared = Path(spec.links[0].socket).with_name("prefixes")
    return Engines(
        [ProcessClient(link.socket, spec.name, balances=True) for link in spec.links],
        [link.name for link in spec.links],
        metrics=[spec.metric_names(link) for link in spec.links],
        prefixes=Prefixes(str(shared)) if spec.engine.enable_prefix_caching else None,
    )


def main() -> None:
    """Read the Spec from stdin and serve."""
    spec = child_spec("httpserver")

    def stopped_early(number: int, frame: Any) -> None:
        os._exit(0)

    signal.signal(signal.SIGTERM, stopped_early)  # until the event loop runs
    sys.exit(run_main(lambda: serve(spec)))


if __name__ == "__main__":
    main()
