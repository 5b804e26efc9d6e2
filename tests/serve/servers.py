"""A server in this process, over a real socket: `with ThreadServer(kv="int8") as server: server.url`."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from typing import Any

import httpx

from qrt import EngineConfig
from qrt.engine.engine import Engine
from qrt.serve.http.service import Service
from qrt.serve.link.router import EngineRouter
from qrt.serve.link.thread_client import ThreadClient
from qrt.serve.processes.httpserver import HttpServer
from qrt.serve.routes.app import create_app
from qrt.serve.settings import ServerConfig
from qrt.text.tokenizer import Tokenizer

KEY = "a-key"


def bearer(key: str = KEY) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


WORDS = {401: "invalid_api_key", 429: "rate_limit_exceeded"}  # by which OpenAI's clients know an error


def refused(reply: httpx.Response, code: int = 400) -> str:
    """The message of an error in OpenAI's shape."""
    assert reply.status_code == code, reply.text
    error = reply.json()["error"]
    word = {"model": "model_not_found"}.get(error["param"] or "") if code == 404 else WORDS.get(code)
    if "maximum context length is" in error["message"]:
        word = "context_length_exceeded"
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == (word or code)
    assert "Traceback" not in reply.text and not re.search(
        r"0x[0-9a-f]{6,}|/work/|/tmp/|site-packages", reply.text
    )
    assert len(reply.content) < 3000, "a small request makes no large error"
    return error["message"]


class ThreadServer:
    """The application under qrt's uvicorn server, its engine in a thread. `engine` holds settings of
    EngineConfig, `settings` are ServerConfig's."""

    def __init__(self, kv: str = "int8", *, engine: dict[str, Any] | None = None, **settings: Any) -> None:
        config = EngineConfig(**{"model": "tiny", "kv": kv, **(engine or {})})
        self.tokenizer = Tokenizer(config.model)
        self.engine = Engine(config, eos_token_ids=self.tokenizer.eos_token_ids)
        server = ServerConfig(**{"model_names": ("tiny", "alias"), "api_keys": (KEY,), **settings})
        self.service = Service(ThreadClient(EngineRouter(self.engine)), self.tokenizer, server)
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        # as uvloop sets it for qrt-serve; a reply's second part would wait 40 ms for the client's ACK
        self.listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port = self.listener.getsockname()[1]
        self.server = HttpServer(create_app(self.service), self.service)
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        asyncio.run(self.server.serve([self.listener]))

    def __enter__(self) -> ThreadServer:
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.01)
        return self

    def __exit__(self, *error: object) -> None:
        self.server.should_exit = True
        self.thread.join(timeout=20)
        assert not self.thread.is_alive()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def wait_idle(server: ThreadServer) -> None:
    """Until nothing runs and every slot is back; a request on its way in counts as soon as it arrives."""
    engine = server.engine
    for _ in range(1000):
        idle = not engine.has_work and not server.service.client.num_running
        if idle and engine.scheduler.kv.available == engine.pool.num_slots:
            engine.scheduler.kv.check()
            return
        time.sleep(0.02)
    raise AssertionError("the engine still holds slots of a request nobody waits for")


async def wait_until(condition) -> None:
    """In an event loop."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("waited for nothing")
