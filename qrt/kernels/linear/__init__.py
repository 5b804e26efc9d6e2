"""`linear`: x @ W.T + bias for a weight in the run-time layout of any scheme.

linear(x [T, K], weight: tensors of the scheme, bias [N] | None, scheme: str) -> [T, N] in x's dtype

Sums and the bias are fp32 before the one rounding to x's dtype (fp16, bf16 or fp32). T may be 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qrt.kernels.linear import ref
from qrt.kernels.op import define
from qrt.quant.weight import WEIGHT_SCHEMES


def _fake(x: Tensor, weight: Sequence[Tensor], bias: Tensor | None, scheme: str) -> Tensor:
    return x.new_empty(x.shape[0], WEIGHT_SCHEMES[scheme].out_features(weight))


linear = define(
    "linear(Tensor x, Tensor[] weight, Tensor? bias, str scheme) -> Tensor",
    ref=ref.linear,
    triton="qrt.kernels.linear.kernel:linear",
    fake=_fake,
)
