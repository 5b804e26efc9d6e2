"""Two engines behind one API: who serves what, and what becomes of the rest when one of them dies."""

import os
import re
import signal

import httpx
import pytest
from launched import LONG, PATIENCE, Processes, Request
from prometheus_client.parser import text_string_to_metric_families

from qrt import EngineConfig
from qrt.errors import ConfigError
from qrt.serve.processes import replicas, supervisor
from qrt.serve.processes.replicas import engine_configs, engine_name
from qrt.serve.settings import ServerConfig


def devices(config: EngineConfig, count: int) -> list[str | None]:
    return [each.device for each in engine_configs(config, count)]


@pytest.mark.parametrize(
    "gpus, device, count, expected",
    [
        (0, None, 2, ["cpu", "cpu"]),
        (4, "cpu", 2, ["cpu", "cpu"]),
        (0, "cuda:7", 1, ["cuda:7"]),  # as without the flag: the engine says what is wrong
        (4, None, 1, [None]),
        (4, None, 3, ["cuda:0", "cuda:1", "cuda:2"]),
        (4, "cuda", 4, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        (4, "cuda:2", 2, ["cuda:2", "cuda:3"]),
        (4, "1", 2, ["cuda:1", "cuda:2"]),
    ],
)
def test_each_engine_has_its_own_gpu(monkeypatch, gpus, device, count, expected):
    monkeypatch.setattr(replicas, "_count_gpus", lambda: gpus)
    assert devices(EngineConfig("tiny", device=device), count) == expected


def test_engines_of_several_gpus(monkeypatch):
    monkeypatch.setattr(replicas, "_count_gpus", lambda: 6)
    configs = engine_configs(EngineConfig("tiny", device="cuda:2", tensor_parallel_size=2), 2)
    assert [engine_name(i, config) for i, config in enumerate(configs)] == [
        "engine 0 (cuda:2-3)", "engine 1 (cuda:4-5)",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="expected at most 1, got 2; there are 6 GPUs, counted from cuda:3"):
        engine_configs(EngineConfig("tiny", device="cuda:3", tensor_parallel_size=2), 2)


def test_too_few_gpus_are_named(monkeypatch):
    monkeypatch.setattr(replicas, "_count_gpus", lambda: 2)
    for device, count, message in (
        (None, 3, "data_parallel_size: expected at most 2, got 3; there are 2 GPUs, counted from cuda:0"),
        ("cuda:1", 2, "data_parallel_size: expected at most 1, got 2; there are 2 GPUs, counted from cuda:1"),
        ("cuda:5", 2, "data_parallel_size: expected at most 0, got 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            devices(EngineConfig("tiny", device=device), count)


@pytest.mark.parametrize(
    "cores, engines, given, expected",
    [(2, 1, None, 1), (2, 2, None, 1), (16, 8, None, 8), (12, 8, None, 4), (64, 1, None, 1), (1, 1, 3, 3)],
)
def test_number_of_api_processes(monkeypatch, cores, engines, given, expected):
    """One for each engine, as far as the engines leave cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    server = ServerConfig(("x",), data_parallel_size=engines, api_server_count=given)
    assert supervisor.num_api_processes(server) == expected


def complete(server: Processes, prompt: list[int], **fields) -> dict:
    body = {**LONG, "prompt": prompt, "max_tokens": 2, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE).raise_for_status().json()


def by_engine(server: Processes, name: str) -> dict[str, float]:
    families = text_string_to_metric_families(server.get("/metrics").raise_for_status().text)
    (family,) = (family for family in families if family.name == f"qrt:{name}")
    return {sample.labels["engine"]: sample.value for sample in family.samples}


def both_serve(server: Processes) -> None:
    """The log names them, all is well, and the answers are one engine's."""
    for pool in ("engine 0 (cpu): KV pool: ", "engine 1 (cpu): KV pool: "):
        server.wait(lambda pool=pool: pool in server.log.read_text())  # the supervisor writes it
    assert server.get("/health").content == b"" and server.get("/readiness").json() == {"status": "ready"}
    texts = {complete(server, [5, 6, 7])["choices"][0]["text"] for _ in range(8)}
    assert len(texts) == 1 and by_engine(server, "engine_up") == {"0": 1, "1": 1}
    assert min(by_engine(server, "prompt_tokens").values()) > 0


def conversations_find_their_prefix(server: Processes) -> None:
    """As many tokens as one engine would find; each salt has its own."""
    prompts = [[who] * 200 for who in (11, 12, 13)]
    for turn in range(3):
        for prompt in prompts:
            usage = complete(server, prompt + [9] * turn)["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached == (len(prompt) + turn - 1 if turn else 0)
    for _ in range(2):
        usage = complete(server, prompts[0], cache_salt="s")["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 199
    usage = complete(server, prompts[0], cache_salt="t")["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def one_is_killed(server: Processes) -> None:
    """Streams of the other go on, the dead one is named, and all that is new is served."""
    streams = [Request(server, stream=True, max_tokens=800) for _ in range(4)]
    for stream in streams:
        stream.start()
    assert all(stream.began.wait(PATIENCE) for stream in streams)
    assert by_engine(server, "num_requests_running") == {"0": 2, "1": 2}
    os.kill(server.children("engine")[0], signal.SIGKILL)
    for stream in streams:
        stream.join(PATIENCE)
    server.wait(lambda: "died: SIGKILL" in server.log.read_text())
    (name,) = set(re.findall(r"(engine \d \(cpu\)) died: SIGKILL; the others go on", server.log.read_text()))
    errors = [text.count(f'"message":"{name} has died"') for _, text in (s.reply for s in streams)]
    whole = [text.count('"finish_reason":"length"') for _, text in (s.reply for s in streams)]
    assert sorted(errors) == sorted(whole) == [0, 0, 1, 1] and errors != whole
    for _ in range(4):
        health, ready = server.get("/health"), server.get("/readiness")
        assert (health.status_code, health.json()) == (200, {"dead": [name]})
        assert (ready.status_code, ready.json()) == (200, {"status": "ready", "dead": [name]})
        assert complete(server, [5, 6, 7])["usage"]["completion_tokens"] == 2
    assert sorted(by_engine(server, "engine_up").items()) == [
        (str(i), float(f"engine {i}" not in name)) for i in range(2)
    ]
    assert len(by_engine(server, "num_requests_running")) == 1


def an_api_process_is_killed(server: Processes) -> None:
    os.kill(server.children("httpserver")[0], signal.SIGKILL)
    server.wait(lambda: server.log.read_text().count("ready: serving") == 2)
    for _ in range(8):
        assert complete(server, [5, 6, 7])["usage"]["completion_tokens"] == 2
        assert len(server.get("/health").json()["dead"]) == 1


def the_last_one_is_killed(server: Processes) -> None:
    running = Request(server, stream=False)
    running.start()
    server.wait(lambda: server.load()["running"] == 1)
    os.kill(server.children("engine")[0], signal.SIGKILL)
    server.wait(lambda: server.get("/health").status_code == 503)
    running.join(PATIENCE)
    assert running.reply[0] == 500 and "has died" in running.reply[1]
    assert server.process.wait(PATIENCE) == 1
    assert "died: SIGKILL; the server ends" in server.log.read_text()


@pytest.mark.model
@pytest.mark.slow
def test_two_engines(tmp_path):
    """One server for all of this, because it takes seconds to start."""
    server = Processes(tmp_path, "--data-parallel-size", "2", "--device", "cpu")
    try:
        server.wait(lambda: "ready: serving" in server.log.read_text())
        both_serve(server)
        conversations_find_their_prefix(server)
        one_is_killed(server)
        an_api_process_is_killed(server)
        the_last_one_is_killed(server)
    finally:
        server.stop()
