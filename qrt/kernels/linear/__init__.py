"""`linear`, `linear_int8`: x @ W.T + bias for a weight in the run-time layout of any scheme.

linear(x [T, K], weight: tensors of the scheme, bias [N] | None, scheme: str) -> [T, N] in x's dtype
linear_int8(codes int8 [T, K], token_scale fp32 [T], weight, bias, scheme, dtype) -> [T, N] in `dtype`
    the same for x = codes * token_scale, for schemes with `int8_tokens`
linear_act(x [T, K], weight, bias, scheme, act) -> [T, N / 2] in x's dtype
    `act_mul` of `linear`, for a weight that stacks a gate over its up
linear_act_int8(codes, token_scale, weight, bias, scheme, dtype, act) -> codes int8 [T, N / 2], scale fp32 [T]
    `act_mul_int8` of `linear_int8`, likewise
linear_partial(x [T, K], weight, scheme) -> fp32 [S, T, N]
linear_int8_partial(codes int8 [T, K], token_scale fp32 [T], weight, scheme) -> fp32 [S, T, N]
    the sums of each of S splits of K, without a bias; the kernel chooses S. `add_rmsnorm` adds them, so that
    no program waits for others; for schemes with `int8_tokens`

Sums and the bias are fp32 before the one rounding to the dtype (fp16, bf16 or fp32). T may be 0.
`explain` says which kernel multiplies, and why.

On a CPU torch's own packed products run where it has them: `prepare` lays a weight out for them, and they
round as the scheme's layout says (`packed.py`). QRT_KERNEL_BACKEND=ref runs the definition.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qrt.config import ENV, KernelBackend
from qrt.kernels.linear import cpu, ref
from qrt.kernels.linear.product import Epilogue
from qrt.kernels.op import define
from qrt.quant.weight import WEIGHT_SCHEMES, WeightData

_PACKED_ON_CPU = ENV.kernel_backend is KernelBackend.AUTO


def prepare(scheme: str, weight: WeightData, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the tensors that make `linear` fastest on `device`; raises as `WeightScheme.prepare`."""
    if _PACKED_ON_CPU and device.type == "cpu":
        return WEIGHT_SCHEMES[scheme].prepare_cpu(weight, dtype)
    return WEIGHT_SCHEMES[scheme].prepare(weight, device, dtype)


def explain(
    x: Tensor, weight: Sequence[Tensor], scheme: str, epilogue: Epilogue = Epilogue.PLAIN, *,
    coded: bool = False,
) -> str:  # fmt: skip
    """Return which kernel multiplies x [T, K] by `weight` and why, in a sentence or two.

    It asks x for its shape, dtype and device only. With `coded` x comes as codes, to `linear_int8` or its
    kind, and has the dtype of the result.
    """
    if ENV.kernel_backend is KernelBackend.REF:
        return f"The definition of {scheme} (linear_ref) multiplies, because QRT_KERNEL_BACKEND is ref."
    kind = WEIGHT_SCHEMES[scheme]
    if x.device.type == "cpu" and ENV.kernel_backend is KernelBackend.AUTO:
        return kind.explain_cpu(weight)
    from qrt.kernels.linear.choose import as_codes, choose  # it imports Triton

    return choose(kind, as_codes(x) if coded else x, weight, epilogue).explain()


def _fake(x: Tensor, weight: Sequence[Tensor], scheme: str) -> Tensor:
    return x.new_empty(x.shape[0], WEIGHT_SCHEMES[scheme].out_features(weight))


linear = define(
    cpu.linear if _PACKED_ON_CPU else ref.linear,
    triton="qrt.kernels.linear.kernel:linear",
    fake=_fake,
)


def _fake_act(x: Tensor, weight: Sequence[Tensor], scheme: str) -> Tensor:
    return x.new_empty(x.shape[0], WEIGHT_SCHEMES[scheme].out_features(weight) // 2)


linear_act = define(
    cpu.linear_act if _PACKED_ON_CPU else ref.linear_act,
    triton="qrt.kernels.linear.kernel:linear_act",
    fake=_fake_act,
)


def _fake_int8(codes: Tensor, weight: Sequence[Tensor], scheme: str, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(codes.shape[0], WEIGHT_SCHEMES[scheme].out_features(weight), dtype=dtype)


linear_int8 = define(
    ref.linear_int8,
    triton="qrt.kernels.linear.kernel:linear_int8",
    fake=_fake_int8,
)


def _fake_partial(x: Tensor, weight: Sequence[Tensor], scheme: str) -> Tensor:
    splits = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(splits, x.shape[0], WEIGHT_SCHEMES[scheme].out_features(weight), dtype=torch.float32)


linear_partial = define(
    ref.linear_partial,
    triton="qrt.kernels.linear.kernel:linear_partial",
    fake=_fake_partial,
)


def _fake_int8_partial(codes: Tensor, weight: Sequence[Tensor], scheme: str) -> Tensor:
    return _fake_partial(codes, weight, scheme)


linear_int8_partial = define(
    ref.linear_int8_partial,
    triton="qrt.kernels.linear.kernel:linear_int8_partial",
    fake=_fake_int8_partial,
)


def _fake_act_int8(
    codes: Tensor, token_scale: Tensor, weight: Sequence[Tensor], scheme: str
) -> tuple[Tensor, Tensor]:
    return _fake_act(codes, weight, scheme), torch.empty_like(token_scale)


linear_act_int8 = define(
    ref.linear_act_int8,
    triton="qrt.kernels.linear.kernel:linear_act_int8",
    fake=_fake_act_int8,
)
