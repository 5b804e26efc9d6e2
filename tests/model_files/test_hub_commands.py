"""The commands with a model of the Hub, as processes: the model's name in results, and errors without it."""

import json
import os
import socket
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import httpx
import pytest

from hub_server import Repo, asks, hub, repo_of
from qrt import LLM, SamplingParams
from qrt.assets import model_path

pytestmark = [pytest.mark.model, pytest.mark.slow]
MAINS = {
    "serve": "qrt.serve.command.cli",
    "calibrate": "qrt_calibrate.cli",
    "eval": "qrt_eval.cli",
}


@pytest.fixture(scope="module")
def server():
    rows = "".join(json.dumps({"text": f"Sentence number {i} is short. " * 9}) + "\n" for i in range(40))
    repos = {
        "org/tiny": repo_of(model_path("tiny")),
        "datasets/org/rows": Repo({"rows.jsonl": rows.encode()}),
    }
    with hub(repos) as server:
        yield server


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def start(server, home, tmp_path):
    """Start `qrt-NAME words` in a folder of its own."""

    def begin(name, *words, **environment):
        code = f"import sys; from {MAINS[name]} import main; sys.exit(main())"
        given = {"HF_ENDPOINT": server.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", **environment}
        return subprocess.Popen(
            [sys.executable, "-c", code, *words],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", **given},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return begin


@pytest.fixture
def run(server, tmp_path, monkeypatch, capfd):
    """Do `qrt-NAME words` in this process and a folder of its own; return exit code, stdout and stderr."""
    asks(server, monkeypatch, tmp_path / "home")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def ran(name, words):
        code = import_module(MAINS[name]).main(words)
        return code, *capfd.readouterr()

    return ran


def test_eval_writes_id_and_commit(run, server):
    words = "ppl pydoc --model org/tiny --baseline org/tiny@main --limit 1 --seqlen 32 --json r.json".split()
    code, out, err = run("eval", words)
    assert code == 0, err[-3000:]
    commit = server.repos["org/tiny"].commit
    result = json.loads(Path("r.json").read_text())
    assert (result["model"], result["model_revision"]) == ("org/tiny", commit)
    assert result["arguments"]["model"] == result["arguments"]["baseline"] == f"org/tiny@{commit}"
    assert out.count("org/tiny") == 2 and "snapshots" not in out, "the table has the id"
    assert "Fetching" in err and "Fetching" not in out, "progress is no result"


def test_a_calibrated_checkpoint_has_the_models_name(start, server, tmp_path):
    words = "--model org/tiny --bits 4 --method rtn --calib org/rows --seqlen 32 --eval-samples 1".split()
    process = start("calibrate", *words, "--device", "cpu", HF_HUB_DISABLE_PROGRESS_BARS="1")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and "written to tiny-w4" in out, err[-3000:]
    source = {"model": "org/tiny", "commit": server.repos["org/tiny"].commit}
    report = json.loads((tmp_path / "tiny-w4/qrt_report.json").read_text())
    config = json.loads((tmp_path / "tiny-w4/config.json").read_text())
    assert report["calibration"]["text"] == "org/rows"
    assert report["source"] == config["quantization_config"]["qrt"]["source"] == source
    assert source["commit"] in (page := (tmp_path / "tiny-w4/qrt_report.html").read_text())
    assert "<h1>org/tiny</h1>" in page


def test_the_server_names_id_and_commit(start, server, home, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["org/tiny@main", "--port", str(port), "--kv-cache-memory-bytes", "64M"]
    process = start("serve", *words, TMPDIR=str(tmp_path))
    try:
        card = _models(f"http://127.0.0.1:{port}", process)["data"][0]
    finally:
        process.terminate()
        _, err = process.communicate(timeout=60)
    commit = server.repos["org/tiny"].commit
    assert (card["id"], card["root"], card["revision"]) == ("org/tiny", "org/tiny", commit)
    assert f"org/tiny: commit {commit}, in {home}" in err
    assert server.url not in err, "the client's requests are not logged"


def _models(url, process):
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        try:
            if (reply := httpx.get(f"{url}/v1/models")).status_code == 200:
                return reply.json()
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    process.kill()
    pytest.fail(f"no answer; the log: {process.communicate()[1][-3000:]}")


def test_the_python_api(server, tmp_path, monkeypatch):
    asks(server, monkeypatch, tmp_path / "home")
    words = {"revision": "main", "tokenizer": "org/tiny@main"}
    llms = LLM("org/tiny", kv_cache_memory_bytes=2**26, **words), LLM("tiny", kv_cache_memory_bytes=2**26)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    texts = [llm.generate(["The"], greedy, use_tqdm=False)[0].outputs[0].text for llm in llms]
    assert texts[0] == texts[1] and server.asked("GET", "model.safetensors")


@pytest.mark.parametrize(
    "name, words",
    [
        ("serve", ["org/none"]),
        ("calibrate", ["--model", "org/none", "--bits", "4", "--dry-run"]),
        ("eval", ["kld", "pydoc", "--model", "tiny", "--baseline", "org/none"]),
    ],
)
def test_missing_model_is_a_one_line_error(name, words, start, tmp_path):
    process = start(name, *words)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1 and out == ""
    assert err.startswith("error: org/none: no such") and "http://127.0.0.1:" in err
    assert err.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name, words",
    [
        ("serve", ["tiny", "--tokenizer", "org/none"]),
        ("calibrate", ["--model", "tiny", "--bits", "4", "--calib", "org/none"]),
        ("calibrate", ["convert", "--model", "org/none", "--to", "awq", "--out", "x"]),
        ("eval", ["sweep", "--model", "org/none"]),
    ],
)
def test_missing_names_elsewhere_are_one_line_errors(name, words, run):
    code, out, err = run(name, words)
    asked = "error: --calib: org/none: no such" if "--calib" in words else "error: org/none: no such"
    assert code == 1 and out == "" and err.startswith(asked) and "http://127.0.0.1:" in err
    assert err.count("\n") == 1 and not list(Path.cwd().iterdir())
