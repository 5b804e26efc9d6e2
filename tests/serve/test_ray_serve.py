"""Two replicas behind Ray Serve, on this machine; and one alone, for which ray need not be installed."""

import gc
import runpy
import sys
from types import ModuleType

import httpx
import pytest
from fastapi.testclient import TestClient

from qrt.errors import ConfigError
from qrt.serve.settings import ServerConfig

pytestmark = pytest.mark.model


class Options:
    """A deployment of ray.serve that keeps what it is told."""

    def __init__(self, ingress) -> None:
        self.told = {}

    def options(self, **told):
        self.told = told
        return self

    def bind(self):
        return self


@pytest.fixture
def stub(monkeypatch):
    """The module `qrt.serve.ray_serve` where ray need not be installed."""
    stub = ModuleType("ray")
    stub.serve = ModuleType("ray.serve")
    stub.serve.deployment, stub.serve.ingress = Options, lambda build: lambda: build
    monkeypatch.setitem(sys.modules, "ray", stub)
    return runpy.run_module("qrt.serve.ray_serve")


@pytest.fixture
def ray():
    return pytest.importorskip("ray", reason="ray is not installed (pip install 'qrt[ray]')")


def test_a_replica_keeps_its_engine(stub):
    served = stub["_replica"]("tiny", {"kv_cache_memory_bytes": 2**25}, ServerConfig(model_names=("mine",)))
    gc.collect()
    with TestClient(served) as client:
        reply = client.post("/v1/completions", json={"prompt": "The", "max_tokens": 2})
        assert reply.status_code == 200 == client.get("/health").status_code, reply.text
        assert 'qrt:num_requests_running{model_name="mine"} 0.0' in client.get("/metrics").text


@pytest.mark.parametrize(
    "given, gpus",
    [({}, 0), ({"gpus": "1"}, 1), ({"tensor_parallel_size": "2"}, 2),
     ({"tensor_parallel_size": "2", "gpus": "4"}, 4), ({"tensor_parallel_size": "2", "device": "cpu"}, 0)],
)  # fmt: skip
def test_gpus_of_a_replica(stub, given, gpus, monkeypatch):
    """Ray keeps as many for each replica as its ranks take."""
    monkeypatch.setitem(stub["app"].__globals__, "engine_config", lambda model, given: None)
    served = stub["app"]({"model": "tiny", "replicas": "3", **given})
    assert served.told == {"name": "qrt", "num_replicas": 3, "ray_actor_options": {"num_gpus": gpus}}


@pytest.mark.parametrize(
    "given, message",
    [({"tensor_parallel_size": "4", "gpus": "2"}, "gpus: expected at least tensor_parallel_size 4, got 2"),
     ({"data_parallel_size": "2"}, "data_parallel_size: expected 1, got 2; replicas=N")],
)  # fmt: skip
def test_wrong_sizes_of_a_replica(stub, given, message):
    with pytest.raises(ConfigError, match=message):
        stub["app"]({"model": "tiny", **given})


@pytest.mark.slow
def test_arguments(ray):
    from qrt.serve.ray_serve import app

    with pytest.raises(ConfigError, match="expected a checkpoint folder"):
        app({})
    with pytest.raises(ConfigError, match="unknown setting 'replica'"):
        app({"model": "tiny", "replica": "2"})
    with pytest.raises(ConfigError, match="max_num_seqs: expected .*, got 0"):
        app({"model": "tiny", "max_num_seqs": "0"})


@pytest.mark.slow
def test_replicas_answer(ray):
    from ray import serve

    from qrt.serve.ray_serve import app

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": 8399})
        arguments = {"model": "tiny", "kv": "int8", "replicas": "2", "kv_cache_memory_bytes": str(2**25)}
        serve.run(app(arguments), name="qrt", route_prefix="/")
        with httpx.Client(base_url="http://127.0.0.1:8399", timeout=120) as client:
            body = {"model": "tiny", "prompt": "The president of", "max_tokens": 5, "temperature": 0}
            texts = {client.post("/v1/completions", json=body).json()["choices"][0]["text"] for _ in range(6)}
            assert len(texts) == 1, "greedy answers are those of any replica"
            events = client.post("/v1/completions", json={**body, "stream": True}).text
            assert events.endswith("data: [DONE]\n\n")
            assert client.post("/v1/completions", json={**body, "n": 0}).json()["error"]["code"] == 400
            assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    finally:
        serve.shutdown()
        ray.shutdown()
