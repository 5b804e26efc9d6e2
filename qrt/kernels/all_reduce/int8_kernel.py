"""What ranks add up in int8 groups: packed before it crosses the link, and summed behind it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qrt.kernels.all_reduce.ref import INT8_GROUP
from qrt.kernels.device import after_previous
from qrt.kernels.gpu import overlaps
from qrt.kernels.launch import COMPILED, variant
from qrt.kernels.sizes import cdiv
from qrt.quant.device import token_codes, token_scale

_GROUPS = 16  # a program has so many


@triton.jit(do_not_specialize=["COUNT"])
def _pack(
    X, CODES, SCALES, COUNT, GROUP: tl.constexpr, GROUPS: tl.constexpr, ASM: tl.constexpr,
    launch_pdl: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(COUNT, GROUPS),): write the codes and scales of COUNT groups of X."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    after_previous(launch_pdl)
    x = tl.load(X + at, mask=(group < COUNT)[:, None], other=0.0).to(tl.float32)
    scale = token_scale(tl.max(tl.abs(x), 1))
    tl.store(CODES + at, token_codes(x, scale[:, None], ASM), mask=(group < COUNT)[:, None])
    tl.store(SCALES + group, scale, mask=group < COUNT)


@triton.jit(do_not_specialize=["COUNT"])
def _unpack(
    CODES, SCALES, Y, COUNT, RANKS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    launch_pdl: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(COUNT, GROUPS),): write the sum of RANKS parts of COUNT groups each, in their order."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    k = tl.arange(0, GROUP)
    after_previous(launch_pdl)
    total = tl.zeros([GROUPS, GROUP], tl.float32)
    for rank in tl.static_range(RANKS):
        own = group + tl.cast(COUNT, tl.int64) * rank
        codes = tl.load(CODES + own[:, None] * GROUP + k[None, :], mask=(group < COUNT)[:, None], other=0)
        scale = tl.load(SCALES + own, mask=group < COUNT, other=0.0)
        total += codes.to(tl.float32) * scale[:, None]
    at = group[:, None] * GROUP + k[None, :]
    tl.store(Y + at, total.to(Y.dtype.element_ty), mask=(group < COUNT)[:, None])


def pack_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Run `qrt::pack_int8` on CUDA tensors."""
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty(len(x), x.shape[1] // INT8_GROUP, dtype=torch.float32, device=x.device)
    if scale.numel():
        kernel = variant(
            _pack, GROUP=INT8_GROUP, GROUPS=_GROUPS, ASM=COMPILED, num_warps=4, launch_pdl=overlaps(x.device)
        )
        kernel.launch((cdiv(scale.numel(), _GROUPS),), x.contiguous(), codes, scale, scale.numel())
    return codes, scale


def unpack_int8(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Run `qrt::unpack_int8` on CUDA tensors."""
    y = torch.empty(codes.shape[1:], dtype=dtype, device=codes.device)
    groups = y.numel() // INT8_GROUP
    if groups:
        kernel = variant(
            _unpack, RANKS=len(codes), GROUP=INT8_GROUP, GROUPS=_GROUPS, num_warps=4,
            launch_pdl=overlaps(codes.device),
        )  # fmt: skip
        kernel.launch((cdiv(groups, _GROUPS),), codes.contiguous(), scale.contiguous(), y, groups)
    return y
