"""LayerNorm: (x - mean(x)) / std(x) * weight + bias (Ba et al. 2016, arXiv:1607.06450).

layernorm(x [..., K], weight [K] | None, bias [K] | None, eps) -> [..., K]
    leading dimensions may be strided, as q and k in qkv are
add_layernorm(residual [T, K], x [T, K], weight, bias, eps, inner, inner_eps, scale, peers) -> norm [T, K] of
    the sum of `rmsnorm.add_normed`, which changes residual in place; x may be split sums, or of several ranks
add_layernorm_int8(the same) -> that norm as codes int8 [T, K], scale fp32 [T], by `affine.quantize_tokens`

All is fp32 before the one rounding to x's dtype.
"""

from __future__ import annotations

from qrt.kernels.layernorm import ref
from qrt.kernels.op import define
from qrt.kernels.rmsnorm import fake, fake_add, fake_int8

layernorm = define(
    ref.layernorm,
    triton="qrt.kernels.layernorm.kernel:layernorm",
    fake=fake,
)

add_layernorm = define(
    ref.add_layernorm,
    triton="qrt.kernels.layernorm.kernel:add_layernorm",
    fake=fake_add,
    mutates=["residual"],
)

add_layernorm_int8 = define(
    ref.add_layernorm_int8,
    triton="qrt.kernels.layernorm.kernel:add_layernorm_int8",
    fake=fake_int8,
    mutates=["residual"],
)
