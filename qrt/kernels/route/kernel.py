"""`route` in one kernel: the product with the router in fp32 sums, then scores and rounds of arg-max.

A token of bf16 meets 128 experts of 2,048 inputs: 512 KB, which takes 32 programs 1 to 2 us. So K is split
for few tokens. The last program of a block of tokens to arrive adds the sums in a fixed order and chooses.
8,192 tokens have 128 programs of 64 tokens, which read the router from the L2 cache: 34 MB of x and
4.3 GFLOP, 11 us each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qrt.checks import expect
from qrt.kernels.gpu import overlaps
from qrt.kernels.launch import variant
from qrt.kernels.linear.shared.device import split_evenly, sum_splits
from qrt.kernels.linear.tiles.device import dot_type
from qrt.kernels.route.counters import COUNTERS, counters_of
from qrt.kernels.route.device import NEVER, choose, scores_of, sparsemixer
from qrt.kernels.sizes import cdiv, next_power_of_2


class Plan(NamedTuple):
    """How the kernel is launched: tokens and inputs of a block, blocks of inputs a split, splits, warps."""

    tokens: int
    inputs: int
    share: int
    splits: int
    warps: int


def plan(tokens: int, hidden: int, columns: int) -> Plan:
    """Return a plan by a rule of thumb: about a program for each of 132 SMs, at most 32 splits."""
    block = 16
    while cdiv(tokens, block) > COUNTERS and block < 64 and 2 * block * columns <= 16384:
        block *= 2
    blocks, inputs = cdiv(tokens, block), min(max(8192 // columns, 32), 256)
    share, splits = split_evenly(cdiv(hidden, inputs), min(32, max(1, COUNTERS // blocks)), blocks, COUNTERS)
    return Plan(block, inputs, share, splits, 4 if block * columns <= 4096 else 8)


@triton.jit(do_not_specialize=["T"])
def _route(  # noqa: C901 -- its branches are constants
    X, W, BIAS, CORRECTION, WEIGHTS, CHOSEN, PARTS, ARRIVALS, T, factor, jitter,
    H: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, SCORE: tl.constexpr, RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, GROUP_TOP: tl.constexpr, BIASED: tl.constexpr,
    CORRECTED: tl.constexpr, DOT: tl.constexpr, GP: tl.constexpr, EP: tl.constexpr, KP: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, SHARE: tl.constexpr, SPLITS: tl.constexpr,
    launch_pdl: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(T, BM), SPLITS), SHARE blocks of inputs a split. The tile has GP groups of EP columns."""
    EACH: tl.constexpr = E // GROUPS
    column = tl.arange(0, GP * EP)
    expert = column // EP * EACH + column % EP
    real = (column // EP < GROUPS) & (column % EP < EACH)
    t = tl.program_id(0) * BM + tl.arange(0, BM)
    live = t < T
    split = tl.program_id(1)
    k = split * SHARE * BK + tl.arange(0, BK)
    xp = X + t.to(tl.int64)[:, None] * H + k[None, :]
    wp = W + expert[None, :] * H + k[:, None]
    acc = tl.zeros([BM, GP * EP], tl.float32)
    if SHARE == 1:  # the router does not wait for the kernel before
        w = tl.load(wp, mask=real[None, :] & (k < H)[:, None], other=0.0)
        if launch_pdl:
            gdc_wait()
        x = tl.load(xp, mask=live[:, None] & (k < H)[None, :], other=0.0)
        acc = tl.dot(x.to(DOT), w.to(DOT), acc, input_precision="ieee")
    else:
        if launch_pdl:
            gdc_wait()
        for i in range(SHARE):
            x = tl.load(xp + i * BK, mask=live[:, None] & (k < H - i * BK)[None, :], other=0.0)
            w = tl.load(wp + i * BK, mask=real[None, :] & (k < H - i * BK)[:, None], other=0.0)
            acc = tl.dot(x.to(DOT), w.to(DOT), acc, input_precision="ieee")
    if launch_pdl:
        gdc_launch_dependents()
    last = True
    if SPLITS > 1:
        part = t[:, None] * E + expert[None, :]
        there = live[:, None] & real[None, :]
        acc, last = sum_splits(acc, PARTS, ARRIVALS + tl.program_id(0), part, there, T * E, split, SPLITS)
    if last:
        if BIASED:
            acc += tl.load(BIAS + expert, mask=real, other=0.0).to(tl.float32)[None, :]
        logits = tl.where(real[None, :] & (acc == acc), acc, NEVER)
        if SCORE == "sparsemixer":
            weights, chosen = sparsemixer(logits, column, jitter)
        else:
            correction = None
            if CORRECTED:
                correction = tl.load(CORRECTION + expert, mask=real, other=0.0)[None, :]
            picked, chosen = choose(logits, correction, column, TOP_K, KP, SCORE, KEPT, GROUP_TOP, GP, EP)
            weights = scores_of(picked, picked if SCORE == "top" else logits, SCORE)
            if RENORMALIZE and SCORE != "top":
                weights /= tl.sum(weights, 1)[:, None] + 1e-20
        slot = tl.arange(0, KP)
        at = t.to(tl.int64)[:, None] * TOP_K + slot[None, :]
        inside = live[:, None] & (slot < TOP_K)[None, :]
        tl.store(WEIGHTS + at, weights * factor, mask=inside)
        tl.store(CHOSEN + at, chosen // EP * EACH + chosen % EP, mask=inside)


def route(
    x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None, top_k: int, score: str,
    renormalize: bool, factor: float, groups: int, kept: int, group_top: int, jitter: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run `qrt::route` on CUDA tensors."""
    (tokens, hidden), experts = x.shape, weight.shape[0]
    expect(weight, "E H", name="weight", H=hidden)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=x.device)
    chosen = torch.empty(tokens, top_k, dtype=torch.int32, device=x.device)
    if not tokens:
        return weights, chosen
    group_width, each = next_power_of_2(groups), next_power_of_2(experts // groups)
    each = max(each, 16 // group_width)  # what a dot needs
    how = plan(tokens, hidden, group_width * each)
    parts = arrivals = None
    if how.splits > 1:
        parts = torch.empty(how.splits * tokens * experts, dtype=torch.float32, device=x.device)
        arrivals = counters_of(weight)
    kernel = variant(
        _route, H=hidden, E=experts, TOP_K=top_k, SCORE=score, RENORMALIZE=renormalize, GROUPS=groups,
        KEPT=kept, GROUP_TOP=group_top, BIASED=bias is not None, CORRECTED=correction is not None,
        DOT=dot_type(x) if x.dtype == weight.dtype else tl.float32, GP=group_width, EP=each,
        KP=next_power_of_2(top_k), BM=how.tokens, BK=how.inputs, SHARE=how.share, SPLITS=how.splits,
        num_warps=how.warps, num_stages=3, launch_pdl=overlaps(x.device),
    )  # fmt: skip
    kernel.launch(
        (cdiv(tokens, how.tokens), how.splits), x.contiguous(), weight, bias, correction, weights, chosen,
        parts, arrivals, tokens, float(factor), float(jitter),
    )  # fmt: skip
    return weights, chosen
