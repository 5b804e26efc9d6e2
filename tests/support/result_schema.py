"""Check result files against eval/qrt_eval/results/schema.json."""

import json
from pathlib import Path
from typing import Any

import jsonschema

from qrt_eval.results.record import SCHEMA


def checked(path: str | Path) -> dict[str, Any]:
    """Return the result file at a path, after checking the schema of its command."""
    result = json.loads(Path(path).read_text())
    schema = json.loads(SCHEMA.read_text())
    kind = {"$ref": f"#/$defs/{result['command']}", "$defs": schema["$defs"]}
    jsonschema.validate(result, kind)
    jsonschema.validate(result, schema)
    return result
