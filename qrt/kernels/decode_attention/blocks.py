"""Which block of a format attends, and which formats `append_attention` stores."""

from __future__ import annotations

import torch

from qrt.quant.kv import KV_FORMATS
from qrt.quant.kv.base import DecodeBlock


def block_of(measured: DecodeBlock, head_dim: int, dtype: torch.dtype) -> DecodeBlock:
    """The format's block, measured for heads of 64 and 128 in 16 bits, or one that any head fits."""
    if dtype is torch.float32:  # exact dots run outside the tensor cores
        return DecodeBlock(tokens=32, stages=3, warps=4, registers=255)
    return measured if head_dim <= 128 else DecodeBlock(tokens=32, stages=3, warps=2, registers=255)


def refuse_others(format: str) -> None:
    """ValueError for a format that `append_attention` does not take."""
    if not KV_FORMATS[format].appends:
        some = ", ".join(name for name in KV_FORMATS if KV_FORMATS[name].appends)
        raise ValueError(f"format: got {format}, wanted one of {some}; call kv_write, then decode_attention")
