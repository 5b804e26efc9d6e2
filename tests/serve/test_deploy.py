"""The deployment examples name flags, routes and metrics that exist."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from packaging.utils import canonicalize_name

import qrt.serve
from distributions import extras, needs
from qrt.engine.engine import Engine
from qrt.serve.command.cli import server_config
from qrt.serve.command.flags import parse
from qrt.serve.link.metrics import HISTOGRAMS

DEPLOY = Path(qrt.serve.__file__).parent / "deploy"
ROOT = DEPLOY.parents[2]
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
    assert container["startupProbe"]["httpGet"]["path"] == "/readiness", "both are red while the model loads"
    assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (models,) = (mount for mount in container["volumeMounts"] if mount["name"] == "models")
    assert models["readOnly"] and container["args"][0].startswith(models["mountPath"])
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]


def test_pods_for_llm_d(tmp_path):
    """The patch fits the pods, whose arguments differ in the metrics' names and the key alone."""
    kustomization = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())
    assert kustomization["resources"] == ["kubernetes.yaml"]
    deployment, _ = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    (change,) = kustomization["patches"]
    assert change["target"] == {"kind": deployment["kind"], "name": deployment["metadata"]["name"]}
    args, label = yaml.safe_load(change["patch"])
    *path, last = args["path"].strip("/").split("/")
    place = deployment
    for step in path:
        place = place[int(step) if step.isdigit() else step]
    theirs, ours = arguments(args["value"], tmp_path), arguments(place[last], tmp_path)
    assert theirs == replace(ours, api_keys=(), metrics_prefix="vllm") and ours.api_keys
    assert label["path"].rpartition("/")[0] == "/spec/template/metadata/labels"
    assert label["path"].rpartition("/")[2].replace("~1", "/") == "llm-d.ai/engine-type"


def test_compose_and_prometheus(tmp_path):
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    command = [re.sub(r"\$\{MODEL.*\}", "tiny", word) for word in services["qrt"]["command"]]
    assert arguments(command, tmp_path).api_keys == ("k",)
    server = services["qrt"]
    assert "/models:/models:ro" in server["volumes"] and server["read_only"] and server["cap_drop"] == ["ALL"]
    assert server["security_opt"] == ["no-new-privileges:true"] and "privileged" not in server, (
        "seccomp stays"
    )
    (home,) = (mount for mount in server["tmpfs"] if mount.startswith("/home/qrt"))
    assert "exec" in home.split(":")[1].split(","), "a compiled kernel's launcher is a library"
    files = [volume.split(":")[0] for s in services.values() for volume in s["volumes"] if volume[0] == "."]
    assert files and all((DEPLOY / file).is_file() for file in files)
    assert (ROOT / server["build"]["dockerfile"]).is_file()
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"]
    assert job["metrics_path"] in ROUTES and job["static_configs"][0]["targets"] == ["qrt:8000"]


@pytest.mark.model
def test_dashboard_uses_existing_metrics():
    from qrt import EngineConfig
    from qrt.serve.link.router import EngineRouter

    router = EngineRouter(Engine(EngineConfig("tiny", kv_cache_memory_bytes=2**25)))
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


def test_the_image_is_healthy_when_it_can_answer():
    """Also while the server drains, unlike /health."""
    (check,) = re.findall(
        r"^HEALTHCHECK .*\n.*http://127.0.0.1:8000(/\w+)'", (DEPLOY / "Dockerfile").read_text(), re.M
    )
    assert check == "/readiness"


def test_the_image_is_built_from_the_source_alone():
    """Of a checkout that may hold keys, results and builds, only what the Dockerfile copies is sent."""
    ignored, *rules = (ROOT / ".dockerignore").read_text().splitlines()[1:]
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    text = (DEPLOY / "Dockerfile").read_text()
    copied = {
        word for line in re.findall(r"^COPY (?!--)(.*) \S+$", text, re.MULTILINE) for word in line.split()
    }
    assert ignored == "*" and allowed == copied and all((ROOT / path).exists() for path in copied)
    assert "qrt/serve/deploy" in rules and (DEPLOY / "keys.txt").parent == ROOT / "qrt/serve/deploy"


def test_every_dependency_of_the_image_is_pinned():
    pins = re.findall(r"^([\w.-]+)==[\w.]+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    wanted = needs(extras("serve"))
    assert len(wanted) > 50 and all(wanted.values())
    assert not wanted.keys() - set(map(canonicalize_name, pins))
    installs = re.findall(r"pip install (.*)", (DEPLOY / "Dockerfile").read_text())
    assert len(installs) == 2 and all("--constraint constraints.txt" in line for line in installs)
