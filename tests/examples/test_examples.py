"""Every example does what it says, on the bundled model."""

import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tiny_models import shallow

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.model


@pytest.fixture
def run(monkeypatch, capsys):
    """Run an example in this process; what it printed."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture
def one_layer(tmp_path_factory):
    """Where the numbers of the example are not the point: a sixth to calibrate."""
    with shallow(tmp_path_factory.getbasetemp()):
        yield


def test_offline_completes_every_prompt(run):
    shown = run("offline.py", "--max-tokens", "8")
    prompts = runpy.run_path(str(EXAMPLES / "offline.py"))["PROMPTS"]
    assert len(prompts) == 3
    for prompt in prompts:
        assert re.search(re.escape(prompt) + r"\S* ?\S", shown)


def test_chat_answers_until_an_empty_line(run, monkeypatch):
    lines = iter(["Tell me about trees.", "And rivers?", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    answers = re.findall(r"^model: (.*)$", run("chat.py", "--max-tokens", "8"), re.MULTILINE)
    assert len(answers) == 2 and all(answers)


def test_compare_kv_shows_less_memory_and_a_likelihood_a_format(run):
    shown = run("compare_kv.py", "--tokens", "64", "--max-tokens", "8").splitlines()[1:]
    rows = {row.split()[0]: row.split()[1:3] for row in shown}
    sizes = [int(size.replace(",", "")) for size, _ in rows.values()]
    assert list(rows) == ["fp16", "int8", "k8v4", "int4"] and sizes == sorted(sizes, reverse=True)
    exact = float(rows["fp16"][1])
    assert 2 < exact < 6 and all(abs(float(nats) - exact) < 0.2 for _, nats in rows.values())


@pytest.mark.slow
def test_calibrate_writes_a_checkpoint_that_generates(run, one_layer, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"Sentence number {i} is short, and not the last." for i in range(2000)))
    given = ("--out", str(tmp_path / "w4"), "--n-samples", "1", "--calib", str(text))
    shown = run("calibrate.py", *given)
    assert "4.16 bits a weight" in shown and "Cost(" in shown
    assert run("offline.py", "--model", str(tmp_path / "w4"), "--max-tokens", "4").count("\n\n") == 3


@pytest.mark.slow
def test_notebook_runs_from_top_to_bottom(one_layer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cells = json.loads((EXAMPLES / "quantize.ipynb").read_text())["cells"]
    names: dict = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None, "clear the outputs"
            exec("".join(cell["source"]).replace("N_SAMPLES = 16", "N_SAMPLES = 1"), names)
    shown = capsys.readouterr().out
    assert "4.16 bits a weight" in shown and shown.count("nats") == 2
    assert re.search(r"^The government said that\S* ?\S", shown, re.MULTILINE)
    assert names["report"].cost.kl > 0


@pytest.mark.slow
def test_client_gets_an_answer_from_the_server(run, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    log = (tmp_path / "log").open("w")
    server = subprocess.Popen(
        [EXAMPLES / "serve.sh", "--log-level", "warning"],
        env={**os.environ, "PORT": str(port), "PATH": path},
        stdout=log,
        stderr=log,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, server)
        assert run("client.py", "--base-url", f"{url}/v1", "--max-tokens", "8").strip()
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0, (tmp_path / "log").read_text()
        log.close()


def wait_until_ready(url: str, server: subprocess.Popen) -> None:
    """Return once the server answers; fail if it ends before."""
    for _ in range(600):
        assert server.poll() is None, "the server ended"
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    pytest.fail("the server is not ready after two minutes")
