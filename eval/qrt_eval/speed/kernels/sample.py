"""Time sampling over the vocabulary, the operator after the head."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from qrt.arch import Arch
from qrt.kernels.sample import sample
from qrt_eval.speed.kernels.row import KernelRow
from qrt_eval.speed.kernels.timer import Rates, activation_dtype, copies, microseconds

BATCHES = (1, 16, 64, 256)


def rows(config: Arch, rates: Rates, device: torch.device) -> Iterator[KernelRow]:
    """Yield greedy rows, and rows drawn at temperature 1 from logits without a peak.

    Without a peak, sampling can skip the least work.
    """
    for count in BATCHES:
        logits = torch.randn(count, config.vocab_size, device=device, dtype=activation_dtype(device))
        several = [logits.clone() for _ in range(copies(logits.nbytes))]
        index = torch.arange(count, device=device)
        num_bytes = logits.nbytes + index.nbytes
        floor = rates.floor_us(num_bytes)
        for what, degrees in (("greedy", 0.0), ("drawn", 1.0)):
            temperature = torch.full((count,), degrees, device=device)
            operands = [(x, index, temperature, index, index, None) for x in several]
            us = microseconds(sample, operands)
            yield KernelRow("sample", what, f"S={count}", us, floor, num_bytes, 0)
