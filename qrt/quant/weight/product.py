"""The product of 16-bit x and 16-bit weights on a CPU, in fp32 where torch is slow in 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

# With AVX2 alone, torch takes 8 to 15 times as long for 64 tokens in 16 bits as in fp32.
SLOW_IN_16_BITS = torch.backends.cpu.get_cpu_capability() == "AVX2"
FEW_TOKENS = 3  # up to so many, to convert the weight costs more than it saves
SCRATCH_BYTES = 8 << 20  # of converted weight at a time: it stays in the cache


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [T, K] by weight [N, K], and add bias [N]: [T, N] in x's dtype, which all have."""
    if x.dtype == torch.float32 or not SLOW_IN_16_BITS or len(x) <= FEW_TOKENS:
        return F.linear(x, weight, bias)
    wide = x.float()
    y = x.new_empty(len(x), len(weight))
    rows = max(1, SCRATCH_BYTES // (4 * x.shape[1]))
    for first in range(0, len(weight), rows):
        part = slice(first, first + rows)
        y[:, part] = F.linear(wide, weight[part].float(), None if bias is None else bias[part].float())
    return y
