"""`silu_mul` and `silu_mul_int8`: the activation of a gated MLP (SwiGLU, Shazeer 2020, arXiv:2002.05202).

silu_mul(gate_up [T, 2*I]) -> [T, I] = silu(gate_up[:, :I]) * gate_up[:, I:]
silu_mul_int8(gate_up [T, 2*I]) -> codes int8 [T, I], scale fp32 [T]     the same, by `affine.quantize_tokens`

silu is computed in fp32 and rounded to the dtype before the product, as transformers does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.kernels.op import define
from qrt.kernels.silu_mul import ref


def _fake(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


silu_mul = define(
    ref.silu_mul,
    triton="qrt.kernels.silu_mul.kernel:silu_mul",
    fake=_fake,
)


def _fake_int8(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    codes = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=torch.int8)
    return codes, gate_up.new_empty(gate_up.shape[0], dtype=torch.float32)


silu_mul_int8 = define(
    ref.silu_mul_int8,
    triton="qrt.kernels.silu_mul.kernel:silu_mul_int8",
    fake=_fake_int8,
)
