"""Checkpoints that are edited, and how they are refused."""

import json
import re
from pathlib import Path

import pytest

from qrt.errors import QrtError
from qrt.quant.checkpoint import open_checkpoint


def refuse(path: str | Path, kind: type[QrtError], pattern: str, *linears: str) -> None:
    """Opening (and reading `linears`) fails with one line of `kind` that matches."""
    with pytest.raises(kind) as caught:
        checkpoint = open_checkpoint(path)
        for module in linears:
            checkpoint.linear(module)
    assert re.search(pattern, str(caught.value)), caught.value
    assert "\n" not in str(caught.value)


def edit(path: Path, change) -> None:
    """Rewrite a JSON file with `change` applied to its content."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


# What changes a quantization_config of compressed-tensors, for `edit`


def grid(key, value):
    return lambda c: c["config_groups"]["group_0"]["weights"].update({key: value})


def activations(**change):
    entry = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True, **change}
    return lambda c: c["config_groups"]["group_0"].update(input_activations=entry)


def in_group(**change):
    return lambda c: c["config_groups"]["group_0"].update(change)


def top(**change):
    return lambda c: c.update(change)
