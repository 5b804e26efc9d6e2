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


@pytest.fixture
def ray():
    return pytest.importorskip("ray", reason="ray is not installed (pip install 'qrt[ray]')")


def test_a_replica_keeps_its_engine(monkeypatch):
    stub = ModuleType("ray")
    stub.serve = ModuleType("ray.serve")
    monkeypatch.setitem(sys.modules, "ray", stub)
    replica = runpy.run_module("qrt.serve.ray_serve")["_replica"]
    served = replica("tiny", {"kv_cache_memory_bytes": 2**25}, ServerConfig(model_names=("mine",)))
    gc.collect()
    with TestClient(served) as client:
        reply = client.post("/v1/completions", json={"prompt": "The", "max_tokens": 2})
        assert reply.status_code == 200 == client.get("/health").status_code, reply.text
        assert 'qrt:num_requests_running{model_name="mine"} 0.0' in client.get("/metrics").text


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
