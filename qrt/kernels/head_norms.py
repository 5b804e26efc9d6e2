"""RMSNorm of each head of q and of k before RoPE, as `kv_write` and `append_attention` take it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from qrt.checks import expect


class HeadNorms(NamedTuple):
    """The weights [D] of one dtype, of q's heads and of k's, and what is added to the mean square."""

    q: Tensor
    k: Tensor
    eps: float


def checked(
    q_norm: Tensor | None, k_norm: Tensor | None, eps: float, head_dim: int
) -> tuple[Tensor, Tensor, float] | None:
    """Return the norms as a kernel takes them, or None if both are None; ValueError if they do not suit."""
    if q_norm is None and k_norm is None:
        return None
    if q_norm is None or k_norm is None:
        there, missing = ("k_norm", "q_norm") if q_norm is None else ("q_norm", "k_norm")
        raise ValueError(f"{missing}: expected a weight beside {there}, got None; pass both or neither")
    expect(q_norm, "D", name="q_norm", D=head_dim)
    expect(k_norm, "D", q_norm.dtype, "k_norm", D=head_dim)
    return q_norm, k_norm, eps
