"""Test result files: their schema, and what identifies a run."""

import hashlib
import json
import shutil
from argparse import Namespace

import jsonschema
import pytest

from qrt.assets import model_path
from qrt_eval.cli import main
from qrt_eval.reports.metrics import METRICS
from qrt_eval.results import console, record

# A change of the schema concerns everyone who reads result files: raise SCHEMA_VERSION with it, and the
# `const` in the file, and put the new hash here.
KNOWN = {1: "0d4c9ec828fdef642514c4c9096db2ff04bdf3fe66967585460ce14bc77ac43e"}


def test_schema_change_needs_a_new_version():
    schema = json.loads(record.SCHEMA.read_text())
    digest = hashlib.sha256(json.dumps(schema, sort_keys=True).encode()).hexdigest()
    assert digest == KNOWN[record.SCHEMA_VERSION]
    jsonschema.Draft202012Validator.check_schema(schema)
    versions = [s["properties"]["schema_version"]["const"] for s in schema["$defs"].values()
                if "schema_version" in s.get("properties", {})]  # fmt: skip
    assert set(versions) == {record.SCHEMA_VERSION}


def test_every_command_with_a_result_can_be_compared():
    kinds = {ref["$ref"].rpartition("/")[2] for ref in json.loads(record.SCHEMA.read_text())["oneOf"]}
    assert kinds == set(METRICS)


@pytest.mark.model
@pytest.mark.parametrize(
    "command",
    [
        "ppl pydoc --model tiny --seqlen 32 --limit 1",
        "kld pydoc --model tiny --kv int8 --seqlen 32 --limit 1",
        "passkey --model tiny --kv fp16 --context 128 --depth 0 --trials 1",
        "kv-error --kv int8 --context 64",
        "throughput --model tiny --batch 1 --input-len 4 --output-len 2 --repeats 1",
        "latency --model tiny --input-len 4 --output-len 2",
    ],
)
def test_result_is_kept_when_stdout_is_closed(command, tmp_path, monkeypatch):
    """`qrt-eval ... --json FILE | head` must not lose the run."""

    def gone(*_, **options):
        raise BrokenPipeError

    monkeypatch.setattr(console.Console, "print", gone)
    assert main([*command.split(), "--json", str(tmp_path / "r.json")]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_result_says_how_to_repeat_the_run(tmp_path):
    arguments = Namespace(command="serve", json="x", rate=float("inf"), api_key="secret", seed=3)
    record.write_json(tmp_path / "deep" / "r.json", record.command_facts(arguments))
    result = json.loads((tmp_path / "deep" / "r.json").read_text())
    assert result["arguments"] == {"rate": "inf", "seed": 3} and "secret" not in json.dumps(result)
    assert set(result["environment"]["versions"]) == {"qrt", "torch", "triton", "transformers"}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["r.json"]


def test_checkpoint_hash_depends_on_content(tmp_path):
    copy = shutil.copytree(model_path("tiny"), tmp_path / "copy")
    assert record.checkpoint_sha256(str(copy)) == record.checkpoint_sha256("tiny")
    shard = copy / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert record.checkpoint_sha256(str(copy)) != record.checkpoint_sha256("tiny")


def test_recorded_results_have_the_schema():
    """This covers the files that name a version of the schema."""
    schema = json.loads(record.SCHEMA.read_text())
    validator = jsonschema.Draft202012Validator(schema)
    for path in (record.SCHEMA.parents[2] / "results").rglob("*.json"):
        result = json.loads(path.read_text())
        if "schema_version" in result:
            validator.validate(result)
