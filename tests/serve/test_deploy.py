"""The deployment examples name flags, routes and metrics that exist."""

import json
import re
from pathlib import Path

import pytest
import yaml

import qrt.serve
from qrt.engine.engine import Engine
from qrt.serve.cli import server_config
from qrt.serve.flags import parse
from qrt.serve.metrics import HISTOGRAMS

DEPLOY = Path(qrt.serve.__file__).parent / "deploy"
ROUTES = {"/readiness", "/health", "/metrics"}


def arguments(words, tmp_path):
    """The words as qrt-serve takes them, with a file of keys that is there."""
    keys = tmp_path / "keys"
    keys.write_text("k")
    words = [str(keys) if word.startswith(("/keys/", "/run/secrets/")) else word for word in words]
    return server_config(parse(words))


def test_kubernetes(tmp_path):
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    server = arguments(container["args"], tmp_path)
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > server.shutdown_timeout + pause
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in ROUTES
    assert container["livenessProbe"]["httpGet"]["path"] == "/health", "red when the engine is stuck"
    assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]


def test_compose_and_prometheus(tmp_path):
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    command = [re.sub(r"\$\{MODEL.*\}", "tiny", word) for word in services["qrt"]["command"]]
    assert arguments(command, tmp_path).api_keys == ("k",)
    files = [volume.split(":")[0] for s in services.values() for volume in s["volumes"] if volume[0] == "."]
    assert files and all((DEPLOY / file).is_file() for file in files)
    assert (DEPLOY.parents[2] / services["qrt"]["build"]["dockerfile"]).is_file()
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"]
    assert job["metrics_path"] in ROUTES and job["static_configs"][0]["targets"] == ["qrt:8000"]


@pytest.mark.model
def test_the_dashboard_asks_for_metrics_that_are_there():
    from qrt import EngineConfig
    from qrt.serve.router import Router

    router = Router(Engine(EngineConfig("tiny", kv_cache_memory_bytes=2**25)))
    exported = set(re.findall(r"^# TYPE (qrt:\w+)", router.metrics.exposition().decode(), re.MULTILINE))
    exported |= {f"qrt:{name}_bucket" for name in HISTOGRAMS}
    board = json.loads((DEPLOY / "grafana" / "qrt.json").read_text())
    asked = set()
    for panel in board["panels"]:
        for target in panel["targets"]:
            asked |= set(re.findall(r"qrt:\w+", target["expr"]))
    assert len(asked) > 10 and not asked - exported, asked - exported


def test_the_image_does_not_run_as_root():
    text = (DEPLOY / "Dockerfile").read_text()
    assert re.search(r"^USER 10001$", text, re.MULTILINE) and "--user root" not in text
    assert 'ENTRYPOINT ["qrt-serve"' in text and "STOPSIGNAL SIGTERM" in text
