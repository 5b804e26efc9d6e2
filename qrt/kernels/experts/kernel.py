"""The operators of `qrt.kernels.experts` on the GPU."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def experts(
    x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Sequence[Tensor], gate_up_bias: Tensor | None,
    down: Sequence[Tensor], down_bias: Tensor | None, scheme: str, act: str, on_input: bool,
) -> Tensor:  # fmt: skip
    """`qrt::experts` on CUDA tensors."""
    raise NotImplementedError("experts: expected CPU tensors; the kernels come with the next change")


def experts_shares(
    x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Sequence[Tensor], gate_up_bias: Tensor | None,
    down: Sequence[Tensor], down_bias: Tensor | None, scheme: str, act: str, on_input: bool,
) -> Tensor:  # fmt: skip
    """`qrt::experts_shares` on CUDA tensors."""
    raise NotImplementedError("experts_shares: expected CPU tensors; the kernels come with the next change")
