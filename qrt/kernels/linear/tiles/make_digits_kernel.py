"""Turn activations into `Digits` where the kernel before does not write them so."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qrt.kernels.device import after_previous
from qrt.kernels.gpu import overlaps
from qrt.kernels.launch import variant
from qrt.kernels.linear.shared.places import Grouped
from qrt.kernels.sizes import cdiv
from qrt.quant import digits
from qrt.quant.device import GROUP, store_digits
from qrt.quant.digits import Digits

_GROUPS = 4  # groups of a program


@triton.jit(do_not_specialize=["TOKENS"])
def _make_digits(
    X, CODES, FACTS, ORDER, WEIGHTS, TOKENS, K, ROOM: tl.constexpr, N: tl.constexpr, READS: tl.constexpr,
    launch_pdl: tl.constexpr,
):  # fmt: skip
    """Store X [TOKENS, K] as `Digits`; grid (TOKENS, cdiv(K, N)).

    With ORDER the rows are places of TOKENS assignments, and X has a row for READS of those. Each ROOM places
    are digits of their own. WEIGHTS multiply what is read, which is rounded again.
    """
    after_previous(launch_pdl)
    row, first = tl.program_id(0), tl.program_id(1) * N
    k = first + tl.arange(0, N)
    source = row
    if ORDER is not None:
        assignment = tl.load(ORDER + row)
        if assignment >= TOKENS:
            return
        source, block = assignment // READS, row // ROOM
        CODES += block.to(tl.int64) * (K * 2 * ROOM)
        FACTS += block * (K // GROUP * 2 * ROOM)
        row, TOKENS = row % ROOM, ROOM
    x = tl.load(X + source * K + k, mask=k < K, other=0.0)
    if WEIGHTS is not None:
        x = (x.to(tl.float32) * tl.load(WEIGHTS + assignment)).to(x.dtype)
    x = x.to(tl.float32)
    group = first // GROUP + tl.arange(0, N // GROUP)
    store_digits(x[None, :], CODES, FACTS, row + tl.arange(0, 1), group, TOKENS, K // GROUP, ROOM)


def make_digits(x: Tensor, room: int) -> Digits:
    """Return x [T, K] as `Digits`; x is contiguous, T <= room, K in whole groups."""
    tokens, k = x.shape
    made, n = Digits.empty(tokens, k, room, x.device), _GROUPS * digits.GROUP
    kernel = variant(_make_digits, ROOM=room, N=n, READS=0, num_warps=1, launch_pdl=overlaps(x.device))
    kernel.launch((tokens, cdiv(k, n)), x, made.codes, made.facts, None, None, tokens, k)
    return made


def place_digits(x: Tensor, group: Grouped, weights: Tensor | None = None) -> Digits:
    """Return what places read of x, which is contiguous, a `Digits` a block; blocks have 8 or 16 places.

    Places without an assignment stay as they are. `weights` [T * k] multiply what is read.
    """
    (order, experts, room, count), k = group.places, x.shape[1]
    assert order is not None
    made, n = Digits.empty(len(order), k, room, x.device, len(experts)), _GROUPS * digits.GROUP
    kernel = variant(
        _make_digits, ROOM=room, N=n, READS=group.reads, num_warps=1, launch_pdl=overlaps(x.device)
    )
    kernel.launch((len(order), cdiv(k, n)), x, made.codes, made.facts, order, weights, count, k)
    return made
