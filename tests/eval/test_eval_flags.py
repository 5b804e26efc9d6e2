"""Test the flags of `qrt-eval`: one meaning each, and errors before anything heavy is imported."""

import argparse
import json
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from errors import assert_error
from qrt.assets import model_path
from qrt.quant.kv import KV_FORMATS
from qrt_eval.cli import main, parser


def commands() -> dict[str, argparse.ArgumentParser]:
    (action,) = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return action.choices


def flags() -> dict[str, dict[str, argparse.Action]]:
    """Return flag -> command -> what it takes."""
    found: dict[str, dict[str, argparse.Action]] = defaultdict(dict)
    for command, own in commands().items():
        for action in own._actions:
            if action.option_strings and action.dest != "help":
                found[action.option_strings[0]][command] = action
    return found


def test_shared_flags_are_alike_in_every_command():
    for flag, actions in flags().items():
        same = {(a.metavar, getattr(a.type, "__name__", a.type)) for c, a in actions.items() if c != "serve"}
        assert len(same) <= 1, f"{flag}: {same}"


def test_several_values_are_words_or_have_commas():
    lists = {"--kv": "int8 int4", "--batch": "1 8", "--context": "512 1024", "--weights": "16 w8a8",
             "--depth": "0 0.5", "--tasks": "a b", "--metric-percentiles": "50 99", "--tokens": "1 64",
             "--decode": "1x64 2x64", "--prefill": "64x0 64x64", "--op": "linear decode",
             "--tune": "llama-3-8b qwen3-8b", "--lengths": "sharegpt 128/128"}  # fmt: skip
    files = {"--model", "--checkpoint", "--goodput"}  # names may hold commas; --goodput follows vLLM
    needed = dict.fromkeys(("kld", "answers", "passkey", "sweep", "latency", "throughput"), "--model x")
    needed["lm"] = "--model x --tasks x"
    for flag, actions in flags().items():
        for command, action in actions.items():
            if action.nargs != "+":
                assert action.nargs in (None, 0) and not isinstance(action.default, list), f"{command} {flag}"
            elif flag not in files:
                found = [
                    getattr(parser().parse_args(words.split()), action.dest)
                    for given in (lists[flag], lists[flag].replace(" ", ","))
                    for words in [f"{command} {needed.get(command, '')} {flag} {given}"]
                ]
                assert found[0] == found[1] and len(found[0]) == 2, f"{command} {flag}"


def test_a_model_goes_with_its_revision_and_its_folder():
    for command in flags()["--revision"]:
        words = [command, *{"ppl": ["pydoc"], "lm": ["--tasks", "x"]}.get(command, [])]
        words += ["--model", "org/name", "--revision", "v2", "--download-dir", "kept"]
        given = parser().parse_args(words)
        assert (given.revision, given.download_dir) == ("v2", "kept"), command


def test_every_kv_format_can_be_chosen():
    for command, action in flags()["--kv"].items():
        for name in KV_FORMATS:
            assert action.type(name) in (name, [name]), command
        if command in ("passkey", "kv-error"):
            assert set(action.default) == set(KV_FORMATS)


FOLDER, FILE = str(Path(__file__).parent), __file__
WRONG = [
    ("ppl pydoc --model no/such", 1, ["no/such"]),
    (f"ppl pydoc --model {FOLDER}", 1, [FOLDER, "config.json"]),
    (f"ppl pydoc --model {FILE}", 1, [FILE, "folder"]),
    ("ppl pydoc --model tiny --baseline no/such", 1, ["no/such"]),
    ("ppl pydoc --model tiny --dtype int7", 2, ["--dtype", "int7"]),
    ("ppl pydoc --model tiny --seqlen 2049", 1, ["--seqlen", "2049", "2048", "tiny"]),
    (f"ppl pydoc --model tiny --json {FOLDER}", 1, ["--json", FOLDER]),
    (f"ppl pydoc --model tiny --json {FILE}/x.json", 1, ["--json", f"{FILE}/x.json"]),
    ("ppl pydoc --model tiny --json /proc/x.json", 1, ["--json", "/proc/x.json"]),
    ("kld pydoc --model tiny no/such", 1, ["no/such"]),
    (f"kld pydoc --model tiny --save-base {FOLDER}", 1, ["--save-base", FOLDER]),
    ("kld pydoc --model tiny --kv int8,int9", 2, ["--kv", "int9", "auto", "int8"]),
    ("answers --model tiny --baseline no/such", 1, ["no/such"]),
    ("answers --model tiny --near-tie 0", 2, ["--near-tie", "'0'", "above 0"]),
    ("lm --model no/such --tasks x", 1, ["no/such"]),
    ("lm --model tiny --tasks x --max-model-len 2049", 1, ["max_model_len", "2049"]),
    ("lm --model tiny --tasks x --num-fewshot -1", 2, ["--num-fewshot", "-1", "integer"]),
    ("passkey --model tiny --context 512 2049", 1, ["--context", "2049", "2048"]),
    ("passkey --model tiny --depth 1.1", 2, ["--depth", "1.1", "0 to 1"]),
    ("kv-error --seed -1", 2, ["--seed", "-1", "at least 0"]),
    ("sweep --model tiny --checkpoint 4=no/such", 1, ["no/such"]),
    ("sweep --model tiny --memory-gib nan", 2, ["--memory-gib", "nan", "above 0"]),
    ("sweep --shape tiny", 2, ["--shape", "tiny"]),
    ("latency --model tiny --input-len 2048", 1, ["--input-len", "--output-len", "2112", "2048"]),
    ("throughput --model tiny --batch 0", 2, ["--batch", "'0'", "at least 1"]),
    ("throughput --model tiny --lengths 9/9 no/such", 1, ["--lengths", "no/such", "sharegpt"]),
    ("throughput --model tiny --lengths sharegpt,2000/49", 1, ["2000/49", "2049", "2048", "tiny"]),
    ("throughput --model tiny --gpu-memory-utilization 1.5", 2, ["1.5", "at most 1"]),
    ("serve --lengths 5x5", 1, ["--lengths", "5x5", "sharegpt"]),
    ("serve --request-rate 0", 2, ["--request-rate", "'0'", "above 0", "inf"]),
    ("serve --metric-percentiles 100", 2, ["--metric-percentiles", "'100'"]),
    ("serve --temperature nan", 2, ["--temperature", "nan", "at least 0"]),
    ("serve --json /proc/x.json", 1, ["--json", "/proc/x.json"]),
    ("compare a b --sigmas -1", 2, ["--sigmas", "-1", "at least 0"]),
    ("kernels --decode 16", 2, ["--decode", "'16'", "16x4096", "1x1"]),
    ("kernels --decode 0x10", 2, ["--decode", "'0x10'"]),
    ("kernels --decode 4x64,4x0", 2, ["--decode", "'4x0'"]),
    ("kernels --prefill ax3", 2, ["--prefill", "'ax3'", "16x4096", "1x0"]),
    ("kernels --tokens 0", 2, ["--tokens", "'0'", "at least 1"]),
    ("kernels --tune llama-9", 2, ["--tune", "llama-9", "llama-3.2-1b"]),
]


@pytest.fixture(scope="module")
def told() -> dict[str, tuple[int, str, bool]]:
    """Return exit code, stderr, and whether torch was imported, for every wrong command line."""
    code = (
        "import contextlib, io, json, sys\n"
        "from qrt_eval.cli import main\n"
        "for words in json.load(sys.stdin):\n"
        "    error = io.StringIO()\n"
        "    with contextlib.redirect_stderr(error):\n"
        "        try: code = main(words.split())\n"
        "        except SystemExit as stop: code = stop.code\n"
        "    print(json.dumps([words, code, error.getvalue(), 'torch' in sys.modules]))\n"
    )
    asked = json.dumps([words for words, *_ in WRONG])
    done = subprocess.run(
        [sys.executable, "-c", code], input=asked, capture_output=True, text=True, check=True
    )
    return {words: tuple(rest) for words, *rest in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize(("words", "code", "named"), WRONG)
def test_errors_come_before_torch_is_imported(words, code, named, told):
    got, error, torch = told[words]
    assert got == code and not torch and error.count("\n") == 1
    assert_error(error, *named)


def test_unsupported_architecture_gives_an_error(tmp_path, capsys):
    folder = shutil.copytree(model_path("tiny"), tmp_path / "bert")
    entries = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(entries | {"architectures": ["BertModel"]}))
    assert main(["ppl", "pydoc", "--model", "tiny", "--baseline", str(folder)]) == 1
    assert_error(capsys.readouterr().err, "BertModel")
