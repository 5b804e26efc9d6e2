"""The operators between the products: the norms and the activation of the MLP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from qrt.arch import ModelConfig
from qrt.kernels.rmsnorm import add_rmsnorm
from qrt.kernels.silu_mul import silu_mul
from qrt_eval.kernels.row import Row
from qrt_eval.kernels.timer import Rates, activation_dtype, copies, microseconds


def rows(config: ModelConfig, tokens: Sequence[int], rates: Rates, device: torch.device) -> Iterator[Row]:
    """RMSNorm with the residual addition, and SiLU * up."""
    dtype = activation_dtype(device)
    hidden, inner = config.hidden_size, config.intermediate_size
    weight = torch.ones(hidden, device=device, dtype=dtype)
    for count in tokens:
        x = torch.randn(count, hidden, device=device, dtype=dtype)
        pairs = [(x.clone(), x.clone()) for _ in range(copies(4 * x.nbytes))]
        us = microseconds(add_rmsnorm, [(a, b, weight, 1e-5) for a, b in pairs])
        num_bytes = 4 * x.nbytes  # both read, both written
        floor = rates.floor_us(num_bytes)
        yield Row("rmsnorm", "add + norm", f"T={count}", us, floor, num_bytes, 0)
        wide = torch.randn(count, 2 * inner, device=device, dtype=dtype)
        several = [wide.clone() for _ in range(copies(wide.nbytes * 3 // 2))]
        us = microseconds(silu_mul, [(y,) for y in several])
        num_bytes = wide.nbytes * 3 // 2
        floor = rates.floor_us(num_bytes)
        yield Row("silu_mul", "silu * up", f"T={count}", us, floor, num_bytes, 0)
