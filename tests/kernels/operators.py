"""What is checked of every registered operator."""

from collections.abc import Sequence
from typing import Any

import torch


def check_operator(name: str, args: Sequence[Any]) -> None:
    """`torch.ops.qrt.<name>` mutates what its schema says, and its fake gives the shapes of its results."""
    operator = getattr(torch.ops.qrt, name).default
    torch.library.opcheck(operator, tuple(args), test_utils=("test_schema", "test_faketensor"))
