"""Time the operators between the products: the norms and the activation of the MLP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from qrt.arch import Arch
from qrt.kernels.act_mul import act_mul, act_mul_int8
from qrt.kernels.rmsnorm import add_rmsnorm, add_rmsnorm_int8
from qrt_eval.speed.kernels.row import KernelRow
from qrt_eval.speed.kernels.timer import Rates, activation_dtype, copies, microseconds


def rows(config: Arch, tokens: Sequence[int], rates: Rates, device: torch.device) -> Iterator[KernelRow]:
    """Yield rows of RMSNorm with the residual addition, and of SiLU * up; both also with int8 output."""
    dtype = activation_dtype(device)
    hidden, inner = config.hidden_size, config.intermediate_size
    weight = torch.ones(hidden, device=device, dtype=dtype)
    for count in tokens:
        x = torch.randn(count, hidden, device=device, dtype=dtype)
        wide = torch.randn(count, 2 * inner, device=device, dtype=dtype)
        pairs = [(x.clone(), x.clone(), weight, 1e-5) for _ in range(copies(4 * x.nbytes))]
        several = [(wide.clone(), "silu") for _ in range(copies(wide.nbytes * 3 // 2))]
        row = partial(_row, at=f"T={count}", rates=rates)
        yield row("rmsnorm", "add + norm", add_rmsnorm, pairs, 4 * x.nbytes)  # reads both and writes both
        codes = x.numel() + 4 * count
        yield row("rmsnorm", "add + norm -> int8", add_rmsnorm_int8, pairs, 3 * x.nbytes + codes)
        yield row("silu_mul", "silu * up", act_mul, several, wide.nbytes * 3 // 2)
        codes = wide.numel() // 2 + 4 * count
        yield row("silu_mul", "silu * up -> int8", act_mul_int8, several, wide.nbytes + codes)


def _row(
    op: str,
    what: str,
    operator: Callable[..., object],
    operands: Sequence[Sequence[Any]],
    num_bytes: int,
    *,
    at: str,
    rates: Rates,
) -> KernelRow:
    return KernelRow(op, what, at, microseconds(operator, operands), rates.floor_us(num_bytes), num_bytes, 0)
