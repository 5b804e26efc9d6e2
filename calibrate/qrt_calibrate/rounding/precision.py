"""The precision of fp32 matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

EXACT = "highest"
TF32 = "high"  # on tensor cores: 10 bits of mantissa, more than the bf16 that models run in


@contextmanager
def products(precision: str) -> Iterator[None]:
    """Compute fp32 products in `precision`, one of torch's names, until the block ends."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
