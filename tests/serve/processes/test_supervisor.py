"""The supervisor with processes that end at once: its sockets, and what it says. The real ones are in
test_processes.py."""

import asyncio
import logging
import os
import tempfile

import pytest

from qrt import EngineConfig
from qrt.errors import ConfigError
from qrt.serve.processes.supervisor import MAX_RESTARTS, Supervisor, listen
from qrt.serve.settings import ServerConfig


def served(path) -> ServerConfig:
    return ServerConfig(model_names=("x",), uds=str(path))


def run(monkeypatch, server, spawned=lambda: None) -> int:
    """The exit code of a server whose engine says nothing and ends."""

    async def spawn(*_):
        spawned()
        return await asyncio.create_subprocess_exec("true")

    supervisor = Supervisor(EngineConfig("tiny", device="cpu"), server)
    monkeypatch.setattr(supervisor, "_spawn", spawn)
    return asyncio.run(supervisor.run())


def test_only_a_dead_servers_socket_is_taken_over(tmp_path):
    path = tmp_path / "socket"
    with listen(served(path)):
        for _ in range(2):
            with pytest.raises(OSError, match=f"Address already in use: {path}"):
                listen(served(path))
    with listen(served(path)):  # closed, and still there: as a server that was killed leaves it
        pass


def test_server_removes_only_its_own_socket(tmp_path, monkeypatch):
    path, others = tmp_path / "socket", []

    def replace():
        path.unlink()
        others.append(listen(served(path)))

    assert run(monkeypatch, served(path)) == 1 and not path.exists()
    assert run(monkeypatch, served(path), replace) == 1 and path.is_socket()
    for other in others:
        other.close()


def test_sockets_that_are_not_to_be_had(tmp_path, monkeypatch):
    path = tmp_path / "no" / "such" / "folder"
    with pytest.raises(OSError, match=f"No such file or directory: {path}"):
        listen(served(path))
    long = tmp_path / ("x" * 110)
    with pytest.raises(ConfigError, match=r"uds: expected a socket path of at most 107 bytes"):
        served(long)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", os.fspath(long))
    with pytest.raises(ConfigError, match=f"TMPDIR: expected a socket path of at most 107 bytes, got {long}"):
        run(monkeypatch, ServerConfig(model_names=("x",), port=0))
    assert not list(long.iterdir())


def test_failed_start_waits_for_no_requests(tmp_path, monkeypatch, caplog):
    """Its last line is the engine's, which says why."""
    with caplog.at_level(logging.INFO):
        assert run(monkeypatch, served(tmp_path / "socket")) == 1
    assert "running requests" not in caplog.text


def test_an_engine_that_does_not_start_ends_the_server(tmp_path, monkeypatch, caplog):
    """The others do not go on without it."""
    server = ServerConfig(model_names=("x",), uds=str(tmp_path / "socket"), data_parallel_size=3)
    with caplog.at_level(logging.INFO):
        assert run(monkeypatch, server) == 1
    assert "loading tiny on engine 0 (cpu), engine 1 (cpu), engine 2 (cpu); " in caplog.text
    assert caplog.text.count("(cpu) died: exit code 0; the server ends") == 1


def test_the_last_of_many_deaths_is_said(monkeypatch, caplog):
    supervisor = Supervisor(EngineConfig("tiny"), served("x"))
    supervisor._ready = True

    async def die() -> list[bool]:
        monkeypatch.setattr(supervisor, "_start_api", lambda: asyncio.sleep(0))
        return [await supervisor._replace("api-0", -9) for _ in range(MAX_RESTARTS + 1)]

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(die()) == [True] * MAX_RESTARTS + [False]
    assert caplog.text.count("has died (SIGKILL)") == MAX_RESTARTS + 1
    assert caplog.text.count("too many deaths; the server ends") == 1
