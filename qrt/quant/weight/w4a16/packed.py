"""4-bit weights as torch multiplies them on a CPU: `aten::_weight_int4pack_mm_for_cpu`, in bf16.

torch packs R outputs together (64 with AVX-512, 32 with AVX2). Byte j of an input holds the code of output j
in its low four bits, and that of output R/2 + j in its high four. The kernel multiplies bf16 x by code' *
scale + zero, with code' = code - 8, in fp32, and rounds the sum to bf16 once. Scale and zero are bf16. In
fp32 and fp16 the kernel is a scalar loop, slower than multiplying a dequantized weight, so models in those
dtypes keep the tiles.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Self

import torch
from torch import Tensor

from qrt.quant.weight.base import WeightData
from qrt.quant.weight.product import product

GROUPS = (256, 128, 64, 32)  # group sizes that the kernel runs; a longer group repeats its scale
FEW_TOKENS = 64  # the kernel dequantizes for every four tokens; with more it is done once, here
SCRATCH_BYTES = 8 << 20  # dequantized weight: enough to multiply well, and still in the cache
PACKED_ROWS = 4096  # packed at a time, as the packer takes int32 codes
_MIDPOINT = 8


class PackedInt4(NamedTuple):
    """The run-time tensors, in this order.

    packed        [N, K/2] uint8        in torch's order
    scale_zero    [K/G, N, 2] bf16      scale and (8 - zero point) * scale, each rounded to bf16
    perm          [K] int64             as in WeightData; no elements when the identity
    """

    packed: Tensor
    scale_zero: Tensor
    perm: Tensor

    @classmethod
    def pack(cls, weight: WeightData, dtype: torch.dtype) -> Self | None:
        """Return the weight for a model in `dtype`; None where torch has no fast product on this CPU.

        It has none for dtypes other than bf16, groups that are not a multiple of 32 and an N that is not one
        of R.
        """
        if dtype != torch.bfloat16 or weight.bits != 4 or weight.scale is None or not block_rows():
            return None
        length = weight.in_features // weight.scale.shape[1]
        group = next((g for g in GROUPS if length % g == 0), None)
        if group is None or weight.out_features % block_rows():
            return None
        scale = weight.scale.float().bfloat16().repeat_interleave(length // group, 1)
        zero = torch.zeros_like(scale)
        if weight.zero is not None:
            offset = _MIDPOINT - weight.zero.float().repeat_interleave(length // group, 1)
            zero = (offset * scale.float()).bfloat16()
        perm = torch.empty(0, dtype=torch.int64) if weight.perm is None else weight.perm
        packed = torch.cat([_pack(part) for part in weight.values.split(PACKED_ROWS)])
        return cls(packed, torch.stack((scale.T, zero.T), -1), perm)

    @property
    def out_features(self) -> int:
        """Return N."""
        return self.packed.shape[0]

    @property
    def group(self) -> int:
        """Return G."""
        return 2 * self.packed.shape[1] // self.scale_zero.shape[0]

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply x [T, K] bf16: [T, N] bf16; a bias is added to the rounded sum."""
        x = (x.index_select(1, self.perm) if self.perm.numel() else x).contiguous()
        if 0 < x.shape[0] <= FEW_TOKENS:
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, self.group, self.scale_zero)
        else:
            step = max(1, SCRATCH_BYTES // (2 * x.shape[1] * block_rows())) * block_rows()
            y = torch.empty(x.shape[0], self.packed.shape[0], dtype=x.dtype)
            for first in range(0, self.packed.shape[0], step):
                weight = self.dequantize(slice(first, first + step))
                y[:, first : first + step] = product(x, weight.T, None)
        return y if bias is None else y.add_(bias)

    def dequantize(self, outputs: slice) -> Tensor:
        """Return (code - zero point) * scale, rounded once: bf16 [K, n], rows in the order of the codes.

        `outputs` begins at a multiple of R. The zero point comes back exactly: zero / scale is an integer
        of at most 8, apart from the one rounding of zero.
        """
        codes = unpack(self.packed[outputs], block_rows())
        scale, zero = self.scale_zero[:, outputs].float().unbind(-1)
        offset = (zero / scale).nan_to_num().round() - _MIDPOINT  # a scale of 0 gives 0 whatever the offset
        grouped = codes.unflatten(0, (-1, self.group))
        grouped += offset[:, None].to(torch.bfloat16)
        grouped *= scale[:, None].to(torch.bfloat16)
        return codes


def unpack(packed: Tensor, rows: int) -> Tensor:
    """Return the codes, as bf16 [K, n], of `packed` [n, K/2], which torch packed by `rows`."""
    blocks, half = packed.shape[0] // rows, rows // 2
    words = packed.view(blocks, -1, half).transpose(0, 1)  # [K, blocks, R/2]
    codes = torch.empty(words.shape[0], blocks, 2, half, dtype=torch.bfloat16)
    codes[:, :, 0] = words & 15
    codes[:, :, 1] = words >> 4
    return codes.flatten(1)


@lru_cache(maxsize=1)
def block_rows() -> int:
    """Return R on this machine, found by packing; 0 where torch packs in another way."""
    codes = torch.arange(64 * 32).square().floor_divide(7).remainder(16).view(64, 32)
    packed = _pack(codes)
    return next((rows for rows in (64, 32) if torch.equal(unpack(packed, rows).T, codes.bfloat16())), 0)


def _pack(codes: Tensor) -> Tensor:
    inner_k_tiles = 2  # for GPUs; ignored here
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), inner_k_tiles)
    return packed
