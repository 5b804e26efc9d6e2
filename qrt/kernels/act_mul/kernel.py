"""act(gate) * up, or act(x): a program per token and block of outputs, or per token if its maximum counts."""

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
def _erfc(z):
    """Return 1 - erf(z) of z >= 0 to 1.5e-7, without a branch (Abramowitz and Stegun 1964, 7.1.26)."""
    t = 1.0 / (1.0 + 0.3275911 * z)
    series = 1.421413741 + t * (-1.453152027 + t * 1.061405429)
    return t * (0.254829592 + t * (-0.284496736 + t * series)) * tl.exp(-z * z)


@triton.jit
def activated(x, ACT: tl.constexpr, ASM: tl.constexpr):
    """Compute the activation ACT of x in fp32, and round it to x's dtype.

    The exponential and the reciprocal of inline assembly flush values below 2^-126 to zero: silu of inputs
    below -87. tanh is written as a logistic function: gelu_tanh(x) = x / (1 + exp(-2 u)).
    """
    wide = x.to(tl.float32)
    if ACT == "silu":
        if ASM:
            y = tl.inline_asm_elementwise(
                """{ .reg .f32 t; mul.f32 t, $1, 0fbfb8aa3b; ex2.approx.ftz.f32 t, t;
                add.f32 t, t, 0f3f800000; rcp.approx.ftz.f32 t, t; mul.f32 $0, $1, t; }""",
                "=f,f", [wide], dtype=tl.float32, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            y = wide / (1.0 + tl.exp(-wide))
    elif ACT == "gelu_tanh":
        # 2 u, with 2 sqrt(2 / pi) and that times 0.044715
        twice = wide * (1.5957691216057308 + 0.07135481627260025 * wide * wide)
        y = wide / (1.0 + tl.exp(-twice))
    elif ACT == "gelu":
        far = tl.abs(wide)
        y = tl.maximum(wide, 0.0, propagate_nan=tl.PropagateNan.ALL)
        y -= far * (0.5 * _erfc(far * 0.7071067811865476))
    else:
        tl.static_assert(ACT == "relu" or ACT == "relu2", "an activation without a kernel")
        y = tl.maximum(wide, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if ACT == "relu2":
            y = y * y
    return y.to(x.dtype)


@triton.jit
def _swiglu_oai(gate, up):
    """Compute gpt-oss's pair function in fp32."""
    gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(up, -7.0, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, 7.0, propagate_nan=tl.PropagateNan.ALL)
    return (up + 1.0) * gate / (1.0 + tl.exp(-1.702 * gate))


@triton.jit
def act_times(gate, up, ACT: tl.constexpr, ASM: tl.constexpr):
    """Multiply `activated` gate by up, and round again; a pair function ACT makes one number of both."""
    if ACT == "swiglu_oai":
        return _swiglu_oai(gate.to(tl.float32), up.to(tl.float32)).to(gate.dtype)
    else:
        return (activated(gate, ACT, ASM).to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _act_of(X, row, i, I, ACT: tl.constexpr, GATED: tl.constexpr, ASM: tl.constexpr):
    """Return outputs i of a row of X [T, 2*I], or of X [T, I] if not GATED; 0 beyond I."""
    if GATED:
        gate = tl.load(X + row * 2 * I + i, mask=i < I, other=0.0)
        up = tl.load(X + row * 2 * I + I + i, mask=i < I, other=0.0)
        return act_times(gate, up, ACT, ASM)
    else:
        return activated(tl.load(X + row * I + i, mask=i < I, other=0.0), ACT, ASM)


@triton.jit
def _act_mul(
    X, Y, I, ACT: tl.constexpr, GATED: tl.constexpr, ASM: tl.constexpr, BLOCK: tl.constexpr,
    launch_pdl: tl.constexpr,
):  # fmt: skip
    """Grid (T, cdiv(I, BLOCK))."""
    after_previous(launch_pdl)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = _act_of(X, row, i, I, ACT, GATED, ASM)
    tl.store(Y + row * I + i, y, mask=i < I)


@triton.jit
def _act_mul_int8(
    X, CODES, SCALES, I, ACT: tl.constexpr, GATED: tl.constexpr, ASM: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, launch_pdl: tl.constexpr,
):  # fmt: skip
    """Grid (T,): the BLOCKS blocks of a row's outputs stay in registers until their maximum is known."""
    after_previous(launch_pdl)
    row = tl.program_id(0).to(tl.int64)
    outputs = ()
    for b in tl.static_range(BLOCKS):
        outputs = outputs + (_act_of(X, row, b * BLOCK + tl.arange(0, BLOCK), I, ACT, GATED, ASM),)
    store_token(outputs, CODES + row * I, SCALES + row, I, BLOCK, ASM)


def act_mul(x: Tensor, act: str, gated: bool = True) -> Tensor:
    """Run `qrt::act_mul` on CUDA tensors."""
    tokens, width = x.shape[0], x.shape[1] // (1 + gated)
    y = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    if tokens:
        grid = (tokens, cdiv(width, _BLOCK))
        kernel = variant(
            _act_mul, ACT=act, GATED=gated, ASM=COMPILED, BLOCK=_BLOCK, launch_pdl=overlaps(y.device)
        )
        kernel.launch(grid, x.contiguous(), y, width)
    return y


def act_mul_int8(x: Tensor, act: str, gated: bool = True) -> tuple[Tensor, Tensor]:
    """Run `qrt::act_mul_int8` on CUDA tensors."""
    tokens, width = x.shape[0], x.shape[1] // (1 + gated)
    codes = torch.empty(tokens, width, dtype=torch.int8, device=x.device)
    scale = torch.empty(tokens, dtype=torch.float32, device=x.device)
    if tokens:
        blocks, each = next(row[1:] for row in _ROWS if tokens <= row[0])
        block = min(max(128, next_power_of_2(width) // blocks), _MOST_BLOCK)
        kernel = variant(
            _act_mul_int8, ACT=act, GATED=gated, ASM=COMPILED, BLOCK=block, BLOCKS=cdiv(width, block),
            num_warps=min(32, max(1, block // each)), launch_pdl=overlaps(codes.device),
        )  # fmt: skip
        kernel.launch((tokens,), x.contiguous(), codes, scale, width)
    return codes, scale
