"""The unquantized KV format: the model's dtype, the model's basis."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qrt.quant.kv.base import KVFormat
from qrt.quant.spec import TensorSpec


class Fp16Format(KVFormat):
    """One buffer, `kv` [S, Hkv, 2 (K, V), D] in the model's dtype."""

    name = "fp16"
    widths = 16, 16
    quantized = False
    rotated = False
    appends = True

    def buffers(
        self, num_slots: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> dict[str, TensorSpec]:
        """See KVFormat."""
        return {"kv": TensorSpec((num_slots, num_kv_heads, 2, head_dim), dtype)}

    def encode_ref(self, k: Tensor, v: Tensor, buffers: Sequence[Tensor], slots: Tensor) -> None:
        """See KVFormat."""
        (kv,) = buffers
        kv[slots] = torch.stack((k, v), 2).to(kv.dtype)

    def decode_ref(self, buffers: Sequence[Tensor], slots: Tensor) -> tuple[Tensor, Tensor]:
        """See KVFormat."""
        (kv,) = buffers
        k, v = kv[slots].float().unbind(2)
        return k, v


FP16 = Fp16Format()
