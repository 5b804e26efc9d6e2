"""The product with weights that lie row by row, in 16 bits, fp32 or int8 codes, on any GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qrt.kernels.act_mul.kernel import act_times
from qrt.kernels.gpu import overlaps
from qrt.kernels.launch import COMPILED, variant
from qrt.kernels.linear.int8.plans import BlockPlan
from qrt.kernels.linear.shared.device import in_panels, places_of, rows_of, split_evenly, sum_splits
from qrt.kernels.linear.shared.places import Grouped
from qrt.kernels.linear.tiles.device import dot_type
from qrt.kernels.sizes import cdiv


@triton.jit(do_not_specialize=["M"])
def multiply_rows(  # noqa: C901 -- its branches are constants
    X, TOKEN_SCALES, W, SCALES, BIAS, Y, PARTS, ARRIVALS, ORDER, EXPERTS, WEIGHTS, M, N, K, share,
    BIASED: tl.constexpr, DOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PANEL: tl.constexpr, SPLITS: tl.constexpr, SHARED: tl.constexpr, ACT: tl.constexpr, ASM: tl.constexpr,
    READS: tl.constexpr, SHARES: tl.constexpr, launch_pdl: tl.constexpr,
):  # fmt: skip
    """Multiply over a grid (cdiv(M, BM) * cdiv(N, BN), SPLITS), `share` inputs a split, in whole blocks.

    Y.T = W [N, K] @ X [M, K].T, so that few tokens waste little of the tensor cores. Codes int8 have SCALES
    and TOKEN_SCALES; numbers are multiplied in DOT. If SHARED, Y [SPLITS, M, N] takes the sum of each split.

    With EXPERTS the grid is (cdiv(N, BN), SPLITS, blocks of places of M assignments). With an ACT half the
    rows of a program are a gate, the others its up: Y [M, N / 2].
    """
    HALF: tl.constexpr = BN // 2
    if EXPERTS is None:
        token, row = in_panels(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), PANEL)
        m = token * BM + tl.arange(0, BM)
        real = m < M
        source, target = m.to(tl.int64), m.to(tl.int64)
        counter = tl.program_id(0)
    else:
        if launch_pdl:
            gdc_wait()
        expert, m, place, real = places_of(ORDER, EXPERTS, tl.program_id(2), M, BM)
        if expert < 0:
            return
        row = tl.program_id(0)
        source, target = rows_of(m, place, M, READS, SHARES)
        W += expert.to(tl.int64) * N * K
        if SCALES is not None:
            SCALES += expert * N
        if BIASED:
            BIAS += expert * N
        counter = 0
        if SPLITS > 1:  # an expert may have several blocks
            counter = expert * N + tl.program_id(2) * tl.num_programs(0) + row
    r = tl.arange(0, BN)
    if ACT is None:
        n = row * BN + r
        inside = n < N
    else:
        n = row * HALF + r % HALF
        inside = n < N // 2
        n += r // HALF * (N // 2)
    k = tl.arange(0, BK)
    split = tl.program_id(1)
    x = X + source[None, :] * K + k[:, None] + split * share
    w = W + n.to(tl.int64)[:, None] * K + k[None, :] + split * share
    acc = tl.zeros([BN, BM], tl.float32 if SCALES is None else tl.int32)
    if launch_pdl and EXPERTS is None:
        gdc_wait()
    for start in range(split * share, tl.minimum(split * share + share, K), BK):
        there = k < K - start
        left = tl.load(w, mask=inside[:, None] & there[None, :], other=0)
        right = tl.load(x, mask=real[None, :] & there[:, None], other=0)
        if SCALES is None:
            acc = tl.dot(left.to(DOT), right.to(DOT), acc, input_precision="ieee")
        else:
            acc = tl.dot(left, right, acc, out_dtype=tl.int32)
        x += BK
        w += BK
    if launch_pdl:  # not earlier, or programs of the next kernel would take the places of this one's
        gdc_launch_dependents()
    whole = real[None, :] & inside[:, None]
    at = m.to(tl.int64)[None, :] * N + n[:, None]
    last = True
    if SHARED:
        Y += split.to(tl.int64) * M * N
    elif SPLITS > 1:
        acc, last = sum_splits(acc, PARTS, ARRIVALS + counter, at, whole, M * N, split, SPLITS)
    if last:
        y = acc.to(tl.float32)
        if SCALES is not None:
            y *= tl.load(TOKEN_SCALES + source, mask=real, other=0.0)[None, :]
            y *= tl.load(SCALES + n, mask=inside, other=0.0)[:, None]
        if BIASED:
            y += tl.load(BIAS + n, mask=inside, other=0.0).to(tl.float32)[:, None]
        if WEIGHTS is not None:
            y *= tl.load(WEIGHTS + m, mask=real, other=0.0)[None, :]
        y = y.to(Y.dtype.element_ty)
        if ACT is None:
            tl.store(Y + target[None, :] * N + n[:, None], y, mask=whole)
        else:
            gate, up = tl.split(tl.permute(tl.reshape(y, (2, HALF, BM)), (1, 2, 0)))
            column = row * HALF + tl.arange(0, HALF)
            there = real[None, :] & (column < N // 2)[:, None]
            tl.store(
                Y + target[None, :] * (N // 2) + column[:, None], act_times(gate, up, ACT, ASM), mask=there
            )


def grouped_rows(
    x: Tensor, token_scale: Tensor | None, weight: Sequence[Tensor], bias: Tensor | None, y: Tensor,
    plan: BlockPlan, act: str | None, group: Grouped,
) -> None:  # fmt: skip
    """Multiply blocks of places by the weights of their experts, stacked [E, N, K], to y.

    The weights are those of `Layout.PLAIN`, or with token_scale those of `Layout.INT8_ROWS`, and x codes.
    With `act`, y [.., N / 2] is act(gate) * up.
    """
    matrix, scale, arrivals = weight if len(weight) == 3 else (weight[0], None, None)
    (_, n, k), places = matrix.shape, group.places
    columns = cdiv(n // 2, plan.outputs // 2) if act else cdiv(n, plan.outputs)
    share, splits = split_evenly(cdiv(k, plan.inputs), plan.splits, 0, 0)
    parts = None
    if splits > 1:
        parts = torch.empty(splits * n * places.assignments, dtype=torch.int32, device=x.device)
    kernel = variant(
        multiply_rows, BIASED=bias is not None, DOT=tl.int8 if scale is not None else dot_type(x),
        BM=plan.tokens, BN=plan.outputs, BK=plan.inputs, PANEL=1, SPLITS=splits, SHARED=False, ACT=act,
        ASM=COMPILED, READS=group.reads, SHARES=group.partial_sums, num_warps=plan.warps,
        num_stages=plan.stages,
        launch_pdl=overlaps(x.device),
    )  # fmt: skip
    kernel.launch(
        (columns, splits, len(places.experts)), x, token_scale, matrix, scale, bias, y, parts, arrivals,
        places.order, places.experts, group.weights, places.assignments, n, k, share * plan.inputs,
    )  # fmt: skip
