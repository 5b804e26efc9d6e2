"""`experts`, `experts_partial`: the mlps of a mixture, each over the tokens that chose it.

experts(x [T, H], chosen int32 [T, k], weights fp32 [T, k], gate_up: tensors, gate_up_bias [E, 2I] | None,
        down: tensors, down_bias [E, H] | None, scheme, act, on_input) -> [T, H] in x's dtype
experts_partial(the same) -> fp32 [k, T, H]
    what each of a token's k experts adds; `add_rmsnorm` and its kind sum them

    y = sum over i of weights[:, i] * down(act(gate) * up), of expert chosen[:, i]
    on_input    an expert reads x * weight, rounded to x's dtype, and the sum is not weighted (Llama 4)

The tensors of gate_up and down are those of one expert (`WeightScheme.prepare`), stacked: expert e has t[e].
gate_up has the rows of the gate, then those of up. `act` is a name that `act_mul` takes. The sum is fp32, in
the order of k, and rounded once. T may be 0.

On a CPU each expert runs as `linear` does there. QRT_KERNEL_BACKEND=ref runs the definition. `explain` says
which kernels multiply, and why.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qrt.config import ENV, KernelBackend
from qrt.kernels.experts import cpu, ref
from qrt.kernels.op import define
from qrt.quant.weight import WEIGHT_SCHEMES

_PACKED_ON_CPU = ENV.kernel_backend is KernelBackend.AUTO


def explain(
    x: Tensor, top_k: int, gate_up: Sequence[Tensor], down: Sequence[Tensor], scheme: str
) -> tuple[str, str]:
    """Return which kernel runs each of the two products for x [T, H] and why, in a few sentences.

    It asks x for its shape, dtype and device only.
    """
    if ENV.kernel_backend is KernelBackend.REF:
        why = f"The definition of {scheme} (linear_ref) multiplies, because QRT_KERNEL_BACKEND is ref."
        return why, why
    if x.device.type == "cpu" and _PACKED_ON_CPU:
        kind = WEIGHT_SCHEMES[scheme]
        first, second = (kind.explain_cpu([tensor[0] for tensor in one]) for one in (gate_up, down))
        return f"{first} One expert follows the other.", f"{second} One expert follows the other."
    from qrt.kernels.experts import kernel  # it imports Triton

    return kernel.explain(x, top_k, gate_up, down, scheme)


def _fake(x: Tensor) -> Tensor:
    return torch.empty_like(x)


experts = define(
    cpu.experts if _PACKED_ON_CPU else ref.experts,
    triton="qrt.kernels.experts.kernel:experts",
    fake=_fake,
)


def _fake_partial(x: Tensor, chosen: Tensor) -> Tensor:
    return x.new_empty(chosen.shape[1], *x.shape, dtype=torch.float32)


experts_partial = define(
    cpu.experts_partial if _PACKED_ON_CPU else ref.experts_partial,
    triton="qrt.kernels.experts.kernel:experts_partial",
    fake=_fake_partial,
)
