"""`route` in Triton."""

from __future__ import annotations

from torch import Tensor


def route(
    x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None, top_k: int, score: str,
    renormalize: bool, factor: float, groups: int, kept: int, group_top: int, jitter: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`qrt::route` on CUDA tensors."""
    raise NotImplementedError("route: expected CPU tensors; the kernel comes with the next change")
