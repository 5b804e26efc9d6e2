"""`qrt-eval grammar`: what it counts, and its result file."""

import json

from errors import assert_error
from qrt_eval.cli import main
from qrt_eval.speed.grammar import chosen
from result_schema import checked

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def test_instances_are_replayed_and_refusals_counted(tmp_path, capsys):
    tests = [
        {"data": {"a": 1}, "valid": True},
        {"data": {"a": "x"}, "valid": False},
        {"data": {"a": 2}, "valid": True},
    ]
    files = {
        "one": {"schema": SCHEMA, "tests": tests},
        "two": SCHEMA,
        "three": {"not": {}},
        "four": {"not": {}},
    }
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert main(["grammar", str(tmp_path), "--json", str(tmp_path / "out" / "r.json")]) == 0
    result = checked(tmp_path / "out" / "r.json")
    assert (result["schemas"], result["refused"]) == (4, {"keyword 'not'; leave it out": 2})
    assert (result["valid"], result["valid_accepted"]) == (2, 2)
    assert (result["invalid"], result["invalid_refused"], result["failed"]) == (1, 1, 0)
    assert (
        result["compile_ms"]["count"] == 2 and result["mask_us"]["count"] > result["accept_us"]["count"] > 5
    )
    assert "2 of 4 schemas refused" in capsys.readouterr().out


def test_a_sample_is_the_seeds(tmp_path):
    for number in range(9):
        (tmp_path / f"{number}.json").write_text("{}")
    samples = [chosen(tmp_path, 4, seed) for seed in (0, 0, 1)]
    assert samples[0] == samples[1] != samples[2] and len(set(samples[0])) == 4
    assert chosen(tmp_path, 20, 0) == chosen(tmp_path, None, 0)


def test_a_folder_without_schemas_is_named(tmp_path, capsys):
    assert main(["grammar", str(tmp_path)]) == 1
    assert_error(capsys.readouterr().err, "schemas", str(tmp_path))
