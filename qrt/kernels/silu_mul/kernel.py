"""silu(gate) * up: one program per token and block of outputs, or per token if its maximum is needed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qrt.kernels.device import after_previous
from qrt.kernels.gpu import overlaps
from qrt.kernels.launch import COMPILED, variant
from qrt.kernels.sizes import cdiv, next_power_of_2
from qrt.quant.device import store_token

_BLOCK = 1024
_MOST_BLOCK = 16384  # more does not fit in registers
# How one program holds a row: (for at most so many tokens, blocks of the row, outputs per warp of a block)
_ROWS = ((128, 1, 512), (1024, 4, 128), (1 << 31, 8, 256))


@triton.jit
def silu_times(gate, up, ASM: tl.constexpr):
    """Compute silu(gate) in fp32, round it to gate's dtype, multiply it by up, and round again.

    The exponential and the reciprocal flush values below 2^-126 to zero: silu of inputs below -87.
    """
    wide = gate.to(tl.float32)
    if ASM:
        silu = tl.inline_asm_elementwise(
            """{ .reg .f32 t; mul.f32 t, $1, 0fbfb8aa3b; ex2.approx.ftz.f32 t, t;
            add.f32 t, t, 0f3f800000; rcp.approx.ftz.f32 t, t; mul.f32 $0, $1, t; }""",
            "=f,f", [wide], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        silu = wide / (1.0 + tl.exp(-wide))
    return (silu.to(gate.dtype).to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _silu_mul(GATE_UP, Y, I, ASM: tl.constexpr, BLOCK: tl.constexpr, launch_pdl: tl.constexpr):
    """Grid (T, cdiv(I, BLOCK))."""
    after_previous(launch_pdl)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(GATE_UP + row * 2 * I + i, mask=i < I, other=0.0)
    up = tl.load(GATE_UP + row * 2 * I + I + i, mask=i < I, other=0.0)
    tl.store(Y + row * I + i, silu_times(gate, up, ASM), mask=i < I)


@triton.jit
def _silu_mul_int8(
    GATE_UP, CODES, SCALES, I, ASM: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    launch_pdl: tl.constexpr,
):  # fmt: skip
    """Grid (T,): the BLOCKS blocks of a row's outputs stay in registers until their maximum is known."""
    after_previous(launch_pdl)
    row = tl.program_id(0).to(tl.int64)
    outputs = ()
    for b in tl.static_range(BLOCKS):
        i = b * BLOCK + tl.arange(0, BLOCK)
        gate = tl.load(GATE_UP + row * 2 * I + i, mask=i < I, other=0.0)
        up = tl.load(GATE_UP + row * 2 * I + I + i, mask=i < I, other=0.0)
        outputs = outputs + (silu_times(gate, up, ASM),)
    store_token(outputs, CODES + row * I, SCALES + row, I, BLOCK, ASM)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Run `qrt::silu_mul` on CUDA tensors."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        grid = (tokens, cdiv(width, _BLOCK))
        kernel = variant(_silu_mul, ASM=COMPILED, BLOCK=_BLOCK, launch_pdl=overlaps(y.device))
        kernel.launch(grid, gate_up.contiguous(), y, width)
    return y


def silu_mul_int8(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Run `qrt::silu_mul_int8` on CUDA tensors."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    codes = torch.empty(tokens, width, dtype=torch.int8, device=gate_up.device)
    scale = torch.empty(tokens, dtype=torch.float32, device=gate_up.device)
    if tokens:
        blocks, each = next(row[1:] for row in _ROWS if tokens <= row[0])
        block = min(max(128, next_power_of_2(width) // blocks), _MOST_BLOCK)
        kernel = variant(
            _silu_mul_int8, ASM=COMPILED, BLOCK=block, BLOCKS=cdiv(width, block),
            num_warps=min(32, max(1, block // each)), launch_pdl=overlaps(codes.device),
        )  # fmt: skip
        kernel.launch((tokens,), gate_up.contiguous(), codes, scale, width)
    return codes, scale
