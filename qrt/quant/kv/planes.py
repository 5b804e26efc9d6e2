"""The layout that the integer KV formats share: planes of codes in 16-bit words, one scale per half head.

    k, v   int16 [S, Hkv, W]   W = D * bits / 16; word j holds dim j + p * W in plane p
    scale  fp16  [S, Hkv, 4]   (k_lo, k_hi, v_lo, v_hi), read by the kernels as one int64

int4, D = 128     bits  15..12    11..8     7..4     3..0
word j (0..31)          j + 96    j + 64    j + 32   j       two planes per half head

16-bit words let Triton use wide loads, and one shift-and-mask unpacks the same plane of two words at once
(docs/kv-layout.md#planes). Heads lie side by side, so the K of two int4 heads fills a line of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qrt.errors import UnsupportedError
from qrt.quant import affine
from qrt.quant.kv.base import KVFormat
from qrt.quant.spec import TensorSpec

WORD_BITS = 16


@dataclass(frozen=True)
class Grid:
    """How K or V is rounded and packed: codes 0..2^bits-1, value (code - center) * scale.

    quantize   (x [..., D], group) -> codes uint8 [..., D] and scale fp16 [..., D/group], from `affine`
    many       "module:ATTR" of the Gluon function that encodes many tokens (see `qrt.quant.kv.many.device`).
               With "" `kv_write` encodes all tokens with the format's `device.py`
    """

    bits: int
    center: float
    quantize: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    many: str = ""

    @property
    def planes(self) -> int:
        """Codes per word."""
        return WORD_BITS // self.bits

    def pack(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Encode x [..., D] as words int16 [..., W] and scales fp16 [..., 2] of its half heads."""
        codes, scales = self.quantize(x, x.shape[-1] // 2)
        planes = codes.unflatten(-1, (self.planes, -1)).to(torch.int16)
        words = planes[..., 0, :]
        for plane in range(1, self.planes):
            words = words | (planes[..., plane, :] << (plane * self.bits))
        return words, scales

    def unpack(self, words: Tensor, scales: Tensor) -> Tensor:
        """Undo `pack`: fp32 [..., D]."""
        size = (*words.shape[:-1], self.planes, words.shape[-1])
        values = torch.empty(size, dtype=torch.float32, device=words.device)
        for plane in range(self.planes):
            values[..., plane, :] = (words >> (plane * self.bits)) & ((1 << self.bits) - 1)
        return affine.decode_groups(values.flatten(-2), scales, self.center)


class PlaneFormat(KVFormat):
    """K on the grid `k`, V on the grid `v`, with one fp16 scale per half head."""

    rotated = True
    k: ClassVar[Grid]
    v: ClassVar[Grid]

    @property
    def widths(self) -> tuple[int, int]:
        """See KVFormat."""
        return self.k.bits, self.v.bits

    def buffers(
        self, num_slots: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> dict[str, TensorSpec]:
        """See KVFormat; UnsupportedError when a head does not fill whole words."""
        planes = max(self.k.planes, self.v.planes)
        if head_dim % planes:
            raise UnsupportedError(
                f"KV format {self.name}: expected head_dim a multiple of {planes}, got {head_dim}; "
                "use --kv fp16"
            )
        return {
            "k": TensorSpec((num_slots, num_kv_heads, head_dim // self.k.planes), torch.int16),
            "v": TensorSpec((num_slots, num_kv_heads, head_dim // self.v.planes), torch.int16),
            "scale": TensorSpec((num_slots, num_kv_heads, 4), torch.float16),
        }

    def encode_ref(self, k: Tensor, v: Tensor, buffers: Sequence[Tensor], slots: Tensor) -> None:
        """See KVFormat."""
        (k_words, k_scales), (v_words, v_scales) = self.k.pack(k), self.v.pack(v)
        k_buffer, v_buffer, scale = buffers
        k_buffer[slots], v_buffer[slots] = k_words, v_words
        scale[slots] = torch.cat((k_scales, v_scales), -1)

    def decode_ref(self, buffers: Sequence[Tensor], slots: Tensor) -> tuple[Tensor, Tensor]:
        """See KVFormat."""
        k_words, v_words, scale = (buffer[slots] for buffer in buffers)
        k_scales, v_scales = scale.split(2, -1)
        return self.k.unpack(k_words, k_scales), self.v.unpack(v_words, v_scales)
