"""Two replicas behind Ray Serve, on this machine."""

import httpx
import pytest

ray = pytest.importorskip("ray", reason="ray is not installed (pip install 'qrt[ray]')")
from ray import serve  # noqa: E402

from qrt.errors import ConfigError  # noqa: E402
from qrt.serve.ray_serve import app  # noqa: E402

pytestmark = [pytest.mark.model, pytest.mark.slow]


def test_arguments():
    with pytest.raises(ConfigError, match="wanted a checkpoint folder"):
        app({})
    with pytest.raises(ConfigError, match="unknown setting 'replica'"):
        app({"model": "tiny", "replica": "2"})
    with pytest.raises(ConfigError, match="max_num_seqs: got 0"):
        app({"model": "tiny", "max_num_seqs": "0"})


def test_replicas_answer():
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
