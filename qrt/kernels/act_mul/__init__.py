"""`act_mul` and `act_mul_int8`: the activation of an mlp (GLU variants, Shazeer 2020, arXiv:2002.05202).

act_mul(x [T, 2*I], act, gated=True) -> [T, I] = act(x[:, :I]) * x[:, I:]
act_mul(x [T, I], act, gated=False) -> [T, I] = act(x)
act_mul_int8(the same) -> codes int8 [T, I], scale fp32 [T]     the same, by `affine.quantize_tokens`

`act` is a name of `layers.activations`. It is computed in fp32 and rounded to the dtype before the product,
as transformers does. A pair function (PAIRS there) takes gate and up, both in fp32, and is rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.kernels.act_mul import ref
from qrt.kernels.op import define


def _fake(x: Tensor, gated: bool) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // (1 + gated))


act_mul = define(
    ref.act_mul,
    triton="qrt.kernels.act_mul.kernel:act_mul",
    fake=_fake,
)


def _fake_int8(x: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(x.shape[0], x.shape[1] // (1 + gated), dtype=torch.int8)
    return codes, x.new_empty(x.shape[0], dtype=torch.float32)


act_mul_int8 = define(
    ref.act_mul_int8,
    triton="qrt.kernels.act_mul.kernel:act_mul_int8",
    fake=_fake_int8,
)
