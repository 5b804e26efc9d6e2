"""The real server: its processes, and what becomes of requests when one of them dies or the server ends."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import msgspec
import pytest
from launched import LONG, PATIENCE, Processes, Request, gone

from qrt import EngineConfig
from qrt.serve.processes.process import Spec
from qrt.serve.settings import ServerConfig

pytestmark = [pytest.mark.model, pytest.mark.slow]
KEY = "a-key-of-its-own"


@pytest.fixture
def pair(tmp_path):
    """A server of two API processes, to be killed."""
    server = Processes(tmp_path, "--api-server-count", "2", "--served-model-name", "mine", "tiny")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def started():
    servers = []
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture
def server(started, tmp_path_factory):
    """One for all tests that only read it; the next one where it was killed."""
    if not started or started[-1].process.poll() is not None:
        folder = tmp_path_factory.mktemp("server")
        (folder / "keys").write_text(KEY)
        flags = ("--kv", "int8", "--max-model-len", "1024", "--api-key-file", str(folder / "keys"))
        started.append(Processes(folder, *flags, whole=True))
        started[-1].wait_ready()
    return started[-1]


def test_deaths(pair, tmp_path):
    """An API process that is killed is replaced and its requests' slots come back; with the engine the
    server dies: a JSON error for who waits, red health, exit code 1, nothing left behind."""
    server = pair
    server.wait(lambda: server.log.read_text().count("ready: serving") == 2)
    (engine,), apis = server.children("engine"), server.children("httpserver")
    assert len(apis) == 2
    assert 'qrt:num_requests_running{model_name="mine"} 0.0' in server.get("/metrics").text
    (folder,) = tmp_path.glob("qrt-*")
    (engine_socket,) = folder.iterdir()
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, engine_socket)]
    assert modes == [0o700, 0o600], "nobody else speaks to the engine"
    requests = [Request(server, stream=True, max_tokens=1000) for _ in range(8)]  # there is room for all
    for request in requests:
        request.start()
    assert all(request.began.wait(PATIENCE) for request in requests)
    for pid in apis:
        os.kill(pid, signal.SIGKILL)
    for request in requests:
        request.join(PATIENCE)
        assert isinstance(request.reply, Exception)
    server.wait(lambda: len(server.children("httpserver")) == 2)
    assert not set(apis) & set(server.children("httpserver"))
    server.wait(server.idle)
    reply = httpx.post(f"{server.url}/v1/completions", json={**LONG, "max_tokens": 4}, timeout=PATIENCE)
    assert reply.json()["usage"]["completion_tokens"] == 4

    stream, whole = Request(server, stream=True), Request(server, stream=False)
    stream.start()
    whole.start()
    assert stream.began.wait(PATIENCE)
    server.wait(lambda: server.load()["running"] == 2)
    os.kill(engine, signal.SIGKILL)
    server.wait(lambda: server.get("/health").status_code == 503)
    stream.join(PATIENCE)
    whole.join(PATIENCE)
    code, text = whole.reply
    assert code == 500 and json.loads(text)["error"]["type"] == "InternalServerError"
    code, text = stream.reply
    *_, error, done, rest = text.split("\n\n")
    assert code == 200 and json.loads(error.removeprefix("data: "))["error"]["code"] == 500
    assert (done, rest) == ("data: [DONE]", "")
    assert server.process.wait(PATIENCE) == 1
    assert "the engine process has died (SIGKILL)" in server.log.read_text()
    assert not list(tmp_path.glob("qrt-*")), "the folder of the sockets stays behind"


def test_sigterm_drains_though_the_disk_of_the_log_is_full(tmp_path):
    """What runs is answered, what is new is refused, the exit code is 0; every write to the log fails. All
    processes get the signal at once, as systemd sends it to those of a service."""
    with open("/dev/full", "wb") as log:
        flags = ("--enable-log-requests", "--shutdown-timeout", str(PATIENCE))
        server = Processes(tmp_path, *flags, log=log.fileno())
    try:
        server.wait_ready()
        running = Request(server, stream=False, max_tokens=400)
        running.start()
        server.wait(lambda: server.load()["running"] == 1)
        for pid in (*server.children("engine"), *server.children("httpserver"), server.process.pid):
            os.kill(pid, signal.SIGTERM)
        server.wait(lambda: server.get("/readiness").status_code == 503)
        refused = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=PATIENCE)
        assert refused.status_code == 503 and int(refused.headers["Retry-After"]) > 0
        assert refused.json()["error"]["type"] == "ServiceUnavailableError"
        running.join(PATIENCE)
        code, text = running.reply
        assert code == 200 and json.loads(text)["usage"]["completion_tokens"] == 400
        assert server.process.wait(PATIENCE) == 0
    finally:
        server.stop()


def test_ctrl_c_while_it_starts_is_no_traceback(tmp_path):
    """A terminal sends it to all processes at once; the children import for seconds."""
    server = Processes(tmp_path)
    try:
        server.wait(lambda: server.children("engine") and server.children("httpserver"))
        for pid in (*server.children("engine"), *server.children("httpserver"), server.process.pid):
            os.kill(pid, signal.SIGINT)
        assert server.process.wait(PATIENCE) == 130
        assert "Traceback" not in server.log.read_text()
    finally:
        server.stop()


def test_startup_log_lines(server):
    """What users look for: the model and its weights, the KV format, memory, the pool in tokens and requests,
    the routes, where to ask."""
    tokens = 41_104  # of 64 MiB: 6 layers x 2 heads x (K and V of 64 bytes and 4 of scales)
    for line in (  # of two processes, in no order
        "model: tiny, weights fp16, 0.02 GiB, activations float32 on cpu",
        "KV cache: int8, 1,632 bytes per token, 0.06 GiB",
        f"KV pool: {tokens:,} tokens; maximum concurrency for 1,024 tokens per request: "
        f"{tokens / 1024:.2f}x, at most 256 requests",
        f"ready: serving tiny on http://127.0.0.1:{server.port}",
    ):
        server.wait(lambda line=line: line in server.log.read_text())
    (routes,) = re.findall(r"routes: (.*)", server.log.read_text())
    assert {"/v1/completions", "/v1/chat/completions", "/generate", "/metrics"} < set(routes.split(", "))
    key = {"Authorization": f"Bearer {KEY}"}
    document = httpx.get(f"{server.url}/openapi.json", headers=key).raise_for_status().json()
    assert set(routes.split(", ")) == set(document["paths"])


def test_keys_stand_on_no_command_line(server):
    """A key that comes from a file is known to the API processes, and to nobody who lists processes or reads
    the log."""
    assert server.get("/v1/models").status_code == 401
    allowed = httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    assert allowed.status_code == 200
    lines = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True).stdout.decode().splitlines()
    processes = [server.process.pid, *server.children("engine"), *server.children("httpserver")]
    seen = [line for line in lines if int(line.split()[0]) in processes]
    assert len(seen) == 3 and not any(KEY in line for line in seen)
    assert KEY not in server.log.read_text()


def test_only_the_engine_loads_torch(server):
    """Also when the API process writes what it does not import torch for: log-probabilities, a chat."""
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    for path, body in (
        ("completions", {**LONG, "max_tokens": 2, "logprobs": 2, "echo": True}),
        ("chat/completions", {**chat, "logprobs": True, "top_logprobs": 2}),
    ):
        url = f"{server.url}/v1/{path}"
        reply = httpx.post(url, json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=PATIENCE)
        assert reply.raise_for_status().json()["choices"][0]["logprobs"]
    loaded = {
        module: {"libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in server.children(module)}
        for module in ("engine", "httpserver")
    }
    assert loaded == {"engine": {True}, "httpserver": {False}}


def test_a_killed_supervisor_leaves_no_process(server):
    children = server.children("engine") + server.children("httpserver")
    assert len(children) == 2
    server.process.kill()
    server.process.wait()
    server.wait(lambda: all(map(gone, children)))


def test_child_of_a_dead_supervisor_does_not_start():
    """It was killed before the child could ask to die with it."""
    spec = Spec("engine", EngineConfig("tiny"), ServerConfig(("tiny",)), [], 1, -1)
    code = "from qrt.serve.processes.process import child_spec; child_spec('engine')"
    ended = subprocess.run([sys.executable, "-c", code], input=msgspec.json.encode(spec), capture_output=True)
    assert ended.returncode == 1 and ended.stderr == b"engine: the supervisor has died\n"
