"""Check result files against eval/qrt_eval/results/schema.json."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from qrt_eval.results.record import SCHEMA


def checked(path: str | Path) -> dict[str, Any]:
    """Return the result file at a path, after checking the schema of its command."""
    result = json.loads(Path(path).read_text())
    for validator in _validators(result["command"]):
        validator.validate(result)
    return result


@cache
def _validators(command: str) -> list[jsonschema.Draft202012Validator]:
    """Return those of a command's own schema and of the whole, which test_record finds to be schemas."""
    schema = json.loads(SCHEMA.read_text())
    kind = {"$ref": f"#/$defs/{command}", "$defs": schema["$defs"]}
    return [jsonschema.Draft202012Validator(own) for own in (kind, schema)]
