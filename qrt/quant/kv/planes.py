"""The layout that the integer KV formats share: planes of codes in 16-bit words, one scale per half head.

    kv     int16 [S, Hkv, 2 (K, V), W]   W = D * bits / 16; word j holds dim j + p * W in plane p
    scale  fp16  [Hkv, S, 4]             (k_lo, k_hi, v_lo, v_hi), read by the kernels as one int64

    int4, D = 128     bits  15..12    11..8     7..4     3..0
    word j (0..31)          j + 96    j + 64    j + 32   j       two planes per half head

16-bit words keep Triton on wide loads, and one shift-and-mask unpacks the same plane of two words at once
(research/kv.md sections 2.3 and 2.4).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from qrt.errors import UnsupportedError
from qrt.quant.kv.base import KVFormat
from qrt.quant.spec import TensorSpec

WORD_BITS = 16


class PlaneFormat(KVFormat):
    """Codes 0..2^bits-1 on a grid with one fp16 scale per half head: value (code - center) * scale."""

    rotated = True
    center: ClassVar[float]

    @abstractmethod
    def quantize(self, x: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """x [..., D] -> codes uint8 [..., D] and scale fp16 [..., D/group]: the grid, from `affine`."""

    @property
    def planes(self) -> int:
        """Codes per word."""
        return WORD_BITS // self.bits

    def buffers(
        self, num_slots: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> dict[str, TensorSpec]:
        """See KVFormat; UnsupportedError when a head does not fill whole words."""
        if head_dim % self.planes:
            raise UnsupportedError(
                f"KV format {self.name}: head_dim {head_dim}, wanted a multiple of {self.planes}; "
                "use --kv fp16"
            )
        return {
            "kv": TensorSpec((num_slots, num_kv_heads, 2, head_dim // self.planes), torch.int16),
            "scale": TensorSpec((num_kv_heads, num_slots, 4), torch.float16),
        }

    def encode_ref(self, k: Tensor, v: Tensor, buffers: Sequence[Tensor], slots: Tensor) -> None:
        """See KVFormat."""
        kv, scale = buffers
        codes, scales = self.quantize(torch.stack((k, v), 2), k.shape[-1] // 2)
        planes = codes.unflatten(-1, (self.planes, -1)).to(torch.int16)
        words = planes[..., 0, :]
        for plane in range(1, self.planes):
            words = words | (planes[..., plane, :] << (plane * self.bits))
        kv[slots] = words
        scale[:, slots] = scales.flatten(-2).transpose(0, 1)

    def decode_ref(self, buffers: Sequence[Tensor], slots: Tensor) -> tuple[Tensor, Tensor]:
        """See KVFormat."""
        kv, scale = buffers
        words = kv[slots]  # [n, Hkv, 2, W]
        values = torch.empty(*words.shape[:-1], self.planes, words.shape[-1], device=words.device)
        for plane in range(self.planes):
            values[..., plane, :] = (words >> (plane * self.bits)) & ((1 << self.bits) - 1)
        halves = values.sub_(self.center).view(*words.shape[:-1], 2, self.planes // 2 * words.shape[-1])
        halves *= scale[:, slots].float().transpose(0, 1).unflatten(-1, (2, 2))[..., None]
        k, v = halves.flatten(-2).unbind(2)
        return k, v
