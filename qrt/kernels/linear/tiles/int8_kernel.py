"""Multiply int4 codes of progressive groups by int8 tokens on any GPU: int8 tensor cores, sums in int32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qrt.kernels.device import after_previous
from qrt.kernels.gpu import multiprocessors, overlaps
from qrt.kernels.launch import variant
from qrt.kernels.linear.shared.device import in_panels, split_evenly, sum_splits
from qrt.kernels.linear.tiles.plans import even_splits, width_of
from qrt.kernels.sizes import cdiv
from qrt.quant.tokens import QuantizedTokens
from qrt.quant.weight.tiles import TILE_ROWS, TiledWeight
from qrt.quant.weight.w4a8.device import int8_bytes

MOST_TOKENS = 64  # of a program: more of them spill
PANEL = 8  # token blocks of a panel
STAGES = 3


@triton.jit(do_not_specialize=["M", "tiles", "share"])
def _int8_tiles(
    X, TOKEN_SCALES, W, STEPS, CHANNEL, BIAS, Y, PARTS, ARRIVALS, M, N, K, tiles, share,
    ROWS: tl.constexpr, J: tl.constexpr, RUNS: tl.constexpr, BYTES: tl.constexpr, BM: tl.constexpr,
    SPLITS: tl.constexpr, SHARED: tl.constexpr, PANEL: tl.constexpr, STAGES: tl.constexpr,
    launch_pdl: tl.constexpr,
):  # fmt: skip
    """Multiply over a grid (cdiv(M, BM) * cdiv(N, ROWS), SPLITS), `share` tiles a split.

    A row of a tile has BYTES of STEPS. If SHARED, Y [SPLITS, M, N] takes the sum of each split.
    """
    PLANES: tl.constexpr = 4
    token, block = in_panels(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, ROWS), PANEL)
    m, row, word = token * BM + tl.arange(0, BM), tl.arange(0, ROWS), tl.arange(0, J)
    n, real, split = block * ROWS + row, m < M, tl.program_id(1)
    first = split * share
    place = ((block * tiles + first) * ROWS + row).to(tl.int64)
    w = W + place[:, None] * J + word[None, :]
    steps = STEPS + place[:, None] * BYTES
    k = first * (PLANES * J) + word
    x = X + m.to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros([ROWS, BM], tl.int32)
    after_previous(launch_pdl)
    for _ in tl.range(0, tl.minimum(share, tiles - first), num_stages=STAGES):
        words = tl.load(w)
        for p in tl.static_range(PLANES):
            of_run = steps + p * RUNS // PLANES * 2
            step, offset = tl.load(of_run), tl.load(of_run + 1)
            weights = int8_bytes(words, step, offset, p)
            tokens = tl.load(x + p * J, mask=real[None, :] & (k < K - p * J)[:, None], other=0)
            acc = tl.dot(weights, tokens, acc, out_dtype=tl.int32)
        w += ROWS * J
        steps += ROWS * BYTES
        x += PLANES * J
        k += PLANES * J
    inside = real[None, :] & (n < N)[:, None]
    last = True
    if SHARED:
        Y += split.to(tl.int64) * M * N
    elif SPLITS > 1:
        at = m.to(tl.int64)[None, :] * N + n[:, None]
        acc, last = sum_splits(acc, PARTS, ARRIVALS + tl.program_id(0), at, inside, M * N, split, SPLITS)
    if last:
        y = acc.to(tl.float32) * tl.load(TOKEN_SCALES + m, mask=real, other=0.0)[None, :]
        y *= tl.load(CHANNEL + n, mask=n < N, other=0.0)[:, None]
        if BIAS is not None:
            y += tl.load(BIAS + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        tl.store(Y + m.to(tl.int64)[None, :] * N + n[:, None], y.to(Y.dtype.element_ty), mask=inside)


def int8_tiles_gemm(
    x: QuantizedTokens, weight: TiledWeight, bias: Tensor | None, partial_sums: bool = False
) -> Tensor:
    """Return x [T, K] @ W.T + bias, [T, N] in x's dtype; the sum over K is exact.

    With `partial_sums`, and without bias, it is the sum of each split of K, fp32 [S, T, N].
    """
    (blocks, tiles, _, words), (tokens, k), n = weight.packed.shape, x.codes.shape, weight.out_features
    width, device = max(16, min(width_of(tokens), MOST_TOKENS)), x.codes.device
    outputs = cdiv(tokens, width) * blocks
    splits = even_splits(max(1, 2 * multiprocessors(device) // outputs), tiles)
    share, splits = split_evenly(tiles, splits, outputs, n)
    size, dtype = ((splits, tokens, n), torch.float32) if partial_sums else ((tokens, n), x.dtype)
    y = torch.empty(size, dtype=dtype, device=device)
    summed = splits > 1 and not partial_sums
    parts = torch.empty(splits * n * tokens, dtype=torch.int32, device=device) if summed else None
    kernel = variant(
        _int8_tiles, ROWS=TILE_ROWS, J=words, RUNS=weight.runs, BYTES=weight.steps.shape[3], BM=width,
        SPLITS=splits, SHARED=partial_sums, PANEL=PANEL, STAGES=STAGES, num_warps=4,
        launch_pdl=overlaps(device),
    )  # fmt: skip
    kernel.launch(
        (outputs, splits), x.codes.contiguous(), x.scale, weight.packed, weight.steps, weight.channel, bias,
        y, parts, weight.arrivals, tokens, n, k, tiles, share,
    )  # fmt: skip
    return y
