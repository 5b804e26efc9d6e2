"""`pip install qrt` alone quantizes, generates and measures; what wants an extra says which."""

import json
import os
import subprocess
import sys

from distributions import packages, packages_of
from qrt import LLM, SamplingParams

SITE = """
import sys
from importlib.machinery import PathFinder


class Core(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else super().find_spec(name, path, target)


sys.meta_path[:] = [Core if finder is PathFinder else finder for finder in sys.meta_path]
"""
PROGRAM = """
import json, sys
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from io import StringIO

from qrt import *
from qrt.errors import QrtError


def ends(command, *words):
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as said:
        try:
            code = import_module(command).main(list(words))
        except SystemExit as end:
            code = end.code
    return code or 0, said.getvalue().strip()


def error_of(module):
    try:
        import_module(module)
    except QrtError as error:
        return type(error).__name__, str(error)


folder, greedy, found = sys.argv[1], SamplingParams(temperature=0, max_tokens=4), {}
llm = LLM("tiny", device="cpu")
found["ranks"] = "qrt.engine.ranks.group" in sys.modules
found["text"] = llm.generate(["The"], greedy)[0].outputs[0].text
found["choice"] = llm.generate(
    ["The"], SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes"]))
)[0].outputs[0].text
found["chat"] = llm.chat([{"role": "user", "content": "Hi"}], greedy)[0].outputs[0].text
pooling = LLM("tiny", device="cpu", runner="pooling")
found["length"] = len(pooling.embed(["The"])[0].outputs.embedding)
found["score"] = pooling.score("The", "The")[0].outputs.score
calibrate("tiny", folder + "/w4", method="rtn", eval_samples=0, device="cpu")
found["ends"] = [
    ends("qrt_calibrate.cli", "convert", "--model", folder + "/w4", "--to", "awq", "--out", folder + "/awq"),
    ends("qrt_eval.cli", "ppl", "pydoc", "--model", folder + "/awq", "--limit", "1", "--seqlen", "64"),
    *(ends(name + ".cli", "--help") for name in ("qrt_calibrate", "qrt_eval", "qrt.serve.command")),
]
import qrt.engine.ranks.process
import qrt_eval.quality.kld
found["errors"] = {name: error_of(name) for name in ("qrt.serve.async_llm", "qrt.serve.ray_serve")}
found["commands"] = {
    "serve": ends("qrt.serve.command.cli", "tiny"),
    "lm": ends("qrt_eval.cli", "lm", "--model", "tiny", "--tasks", "arc_easy"),
    "sweep": ends("qrt_eval.cli", "sweep", "--model", "tiny", "--out", folder + "/sweep"),
    "picture": ends("qrt_eval.reports.picture"),
    "pareto": ends("qrt_eval.reports.pareto", "results.json"),
}
print(json.dumps(found))
"""


def test_the_core_needs_no_extra(tmp_path):
    """Everything that qrt's own requirements do not bring is absent, as after `pip install qrt`."""
    core = packages_of() | {name for name, owners in packages().items() if "qrt" in owners}
    absent = packages().keys() - core
    assert {"fastapi", "zmq", "prometheus_client", "matplotlib", "pytest"} <= absent
    (tmp_path / "sitecustomize.py").write_text(f"ABSENT = {set(absent)}\n{SITE}")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    llm, greedy = LLM("tiny", device="cpu"), SamplingParams(temperature=0, max_tokens=4)
    assert found["text"] == llm.generate(["The"], greedy)[0].outputs[0].text
    assert found["chat"] == llm.chat([{"role": "user", "content": "Hi"}], greedy)[0].outputs[0].text
    assert found["choice"] == "yes" and not found["ranks"]
    assert found["length"] == llm.engine.model.arch.hidden_size and abs(found["score"] - 1) < 1e-4
    assert [code for code, _ in found["ends"]] == [0] * 5, found["ends"]
    serve, plot = "is not installed; pip install 'qrt[serve", "got none; pip install 'qrt[plot]'"
    for kind, message in found["errors"].values():
        assert kind == "UnsupportedError" and serve in message
    said = {"serve": serve, "lm": "pip install 'qrt[lm]'", "sweep": plot, "picture": plot, "pareto": plot}
    assert found["commands"].keys() == said.keys()
    for name, (code, message) in found["commands"].items():
        assert code == 1 and said[name] in message.splitlines()[-1], (name, message)
