"""Turn activations into `Digits` where the kernel before does not write them so."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qrt.kernels.device import after_previous
from qrt.kernels.gpu import overlaps
from qrt.kernels.launch import variant
from qrt.kernels.sizes import cdiv
from qrt.quant import digits
from qrt.quant.device import GROUP, store_digits
from qrt.quant.digits import Digits

_GROUPS = 4  # groups of a program


@triton.jit(do_not_specialize=["TOKENS"])
def _make_digits(
    X, CODES, FACTS, TOKENS, K, ROOM: tl.constexpr, N: tl.constexpr, launch_pdl: tl.constexpr
):  # fmt: skip
    """Store X [TOKENS, K] as `Digits`; grid (TOKENS, cdiv(K, N))."""
    after_previous(launch_pdl)
    row, first = tl.program_id(0), tl.program_id(1) * N
    k = first + tl.arange(0, N)
    x = tl.load(X + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    group = first // GROUP + tl.arange(0, N // GROUP)
    store_digits(x[None, :], CODES, FACTS, row + tl.arange(0, 1), group, TOKENS, K // GROUP, ROOM)


def make_digits(x: Tensor, room: int) -> Digits:
    """Return x [T, K] as `Digits`; x is contiguous, T <= room, K in whole groups."""
    tokens, k = x.shape
    made, n = Digits.empty(tokens, k, room, x.device), _GROUPS * digits.GROUP
    kernel = variant(_make_digits, ROOM=room, N=n, num_warps=1, launch_pdl=overlaps(x.device))
    kernel.launch((tokens, cdiv(k, n)), x, made.codes, made.facts, tokens, k)
    return made
