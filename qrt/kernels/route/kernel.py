"""`route` in one kernel: the product with the router in fp32 sums, then scores and rounds of arg-max.

A token of bf16 meets 128 experts of 2,048 inputs: 512 KB, which takes 32 programs 1 to 2 us. So columns and K
are split for few tokens. The last program of a block of tokens to arrive adds the sums of K in a fixed order
and chooses, with each row in one warp, so that the rounds meet no barrier. 8,192 tokens have 128 programs of
64 tokens, which read the router from the L2 cache: 34 MB of x and 4.3 GFLOP, 11 us each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qrt.checks import expect
from qrt.definitions import router
from qrt.kernels.gpu import overlaps
from qrt.kernels.launch import variant
from qrt.kernels.linear.shared.device import split_evenly
from qrt.kernels.linear.tiles.device import dot_type
from qrt.kernels.op import takes
from qrt.kernels.route.counters import COUNTERS, counters_of
from qrt.kernels.route.device import NEVER, choose, scores_of, sparsemixer
from qrt.kernels.sizes import cdiv, next_power_of_2


class RoutePlan(NamedTuple):
    """How the kernel is launched.

    tokens    tokens of a block
    columns   columns of a program, the tile's padded experts or a share of them
    inputs    inputs that are multiplied at once
    share     blocks of inputs of a split
    splits    splits of K
    warps     warps of a program
    """

    tokens: int
    columns: int
    inputs: int
    share: int
    splits: int
    warps: int


def plan(tokens: int, hidden: int, columns: int) -> RoutePlan:
    """Return a plan by a rule of thumb: about a program for each of 132 SMs, at most 4 splits of K.

    More splits take the last program longer, as it reads all their sums.
    """
    block = 16
    while cdiv(tokens, block) > COUNTERS and block < 64 and 2 * block * columns <= 16384:
        block *= 2
    blocks, each = cdiv(tokens, block), columns
    while each > 16 and 2 * blocks * (columns // each) <= COUNTERS:
        each //= 2
    inputs = min(max(8192 // max(each, block), 32), 512)  # three stages fit shared memory, in fp32 too
    most = max(1, COUNTERS // (blocks * (columns // each)))
    share, splits = split_evenly(cdiv(hidden, inputs), min(4, most), blocks, COUNTERS)
    few = tokens <= 4 and columns <= 256  # more rows are shared by eight warps
    return RoutePlan(block, each, inputs, share, splits, 4 if few else 8)


@triton.jit
def _expert_of(column, GROUPS: tl.constexpr, EACH: tl.constexpr, EP: tl.constexpr):
    """Return the expert of each column of a tile of groups of EP, and whether there is one."""
    return column // EP * EACH + column % EP, (column // EP < GROUPS) & (column % EP < EACH)


@triton.jit(do_not_specialize=["T"])
def _route(
    X, W, BIAS, CORRECTION, WEIGHTS, CHOSEN, PARTS, ARRIVALS, T, factor, jitter,
    H: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, SCORE: tl.constexpr, RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, GROUP_TOP: tl.constexpr, DOT: tl.constexpr, GP: tl.constexpr,
    EP: tl.constexpr, KP: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SHARE: tl.constexpr, SPLITS: tl.constexpr, launch_pdl: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(T, BM), GP * EP / BN, SPLITS), SHARE blocks of inputs a split.

    The tile has GP groups of EP columns. Where a block has several programs, the last one chooses for ROWS
    tokens, of which T are left at most.
    """
    EACH: tl.constexpr = E // GROUPS
    PROGRAMS: tl.constexpr = GP * EP // BN * SPLITS
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    expert, real = _expert_of(column, GROUPS, EACH, EP)
    first, split = tl.program_id(0) * BM, tl.program_id(2)
    t = first + tl.arange(0, BM)
    live = t < T
    k = split * SHARE * BK + tl.arange(0, BK)
    xp = X + t.to(tl.int64)[:, None] * H + k[None, :]
    wp = W + expert[None, :] * H + k[:, None]
    acc = tl.zeros([BM, BN], tl.float32)
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
    rules = (BIAS, CORRECTION, WEIGHTS, CHOSEN, T, factor, jitter)
    if PROGRAMS == 1:
        _choose(acc, rules, first, E, TOP_K, SCORE, RENORMALIZE, GROUPS, KEPT, GROUP_TOP, GP, EP, KP)
    else:
        part = PARTS + t[:, None] * E + expert[None, :]
        tl.store(part + split * T * E, acc, mask=live[:, None] & real[None, :])
        tl.debug_barrier()  # every thread's part is stored before this program counts as arrived
        arrived = tl.atomic_add(ARRIVALS + tl.program_id(0), 1, sem="acq_rel", scope="gpu")
        if arrived == PROGRAMS - 1:
            tl.store(ARRIVALS + tl.program_id(0), 0)
            logits = _sum(PARTS, first, T, ROWS, E, EACH, GROUPS, GP, EP, SPLITS)
            _choose(logits, rules, first, E, TOP_K, SCORE, RENORMALIZE, GROUPS, KEPT, GROUP_TOP, GP, EP, KP)


@triton.jit
def _sum(
    PARTS, first, T, ROWS: tl.constexpr, E: tl.constexpr, EACH: tl.constexpr, GROUPS: tl.constexpr,
    GP: tl.constexpr, EP: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Return the sum of PARTS [SPLITS, T, E] of the tokens from `first` on, [ROWS, GP * EP]."""
    expert, real = _expert_of(tl.arange(0, GP * EP), GROUPS, EACH, EP)
    t = first + tl.arange(0, ROWS)
    part = PARTS + t[:, None] * E + expert[None, :]
    there = (t < T)[:, None] & real[None, :]
    total = tl.zeros([ROWS, GP * EP], tl.float32)
    for s in tl.static_range(SPLITS):
        total += tl.load(part + s * T * E, mask=there, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _choose(
    logits, rules, first, E: tl.constexpr, TOP_K: tl.constexpr, SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, GROUP_TOP: tl.constexpr,
    GP: tl.constexpr, EP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Choose by logits [ROWS, GP * EP] of the tokens from `first` on, and store experts and weights."""
    BIAS, CORRECTION, WEIGHTS, CHOSEN, T, factor, jitter = rules
    EACH: tl.constexpr = E // GROUPS
    column = tl.arange(0, GP * EP)
    expert, real = _expert_of(column, GROUPS, EACH, EP)
    if BIAS is not None:
        logits += tl.load(BIAS + expert, mask=real, other=0.0).to(tl.float32)[None, :]
    logits = tl.where(real[None, :] & (logits == logits), logits, NEVER)
    if SCORE == "sparsemixer":
        weights, chosen = sparsemixer(logits, column, jitter)
    else:
        correction = None
        if CORRECTION is not None:
            correction = tl.load(CORRECTION + expert, mask=real, other=0.0)[None, :]
        picked, chosen = choose(logits, correction, column, TOP_K, KP, SCORE, KEPT, GROUP_TOP, GP, EP)
        weights = scores_of(picked, picked if SCORE == "top" else logits, SCORE)
        if RENORMALIZE and SCORE != "top":
            weights /= tl.sum(weights, 1)[:, None] + 1e-20
    t = first + tl.arange(0, logits.shape[0])
    slot = tl.arange(0, KP)
    at = t.to(tl.int64)[:, None] * TOP_K + slot[None, :]
    inside = (t < T)[:, None] & (slot < TOP_K)[None, :]
    tl.store(WEIGHTS + at, weights * factor, mask=inside)
    tl.store(CHOSEN + at, chosen // EP * EACH + chosen % EP, mask=inside)


@takes(router.route)
def route(a: Any) -> tuple[Tensor, Tensor]:
    """Run `qrt::route` on CUDA tensors."""
    (tokens, hidden), experts = a.x.shape, a.weight.shape[0]
    expect(a.weight, "E H", name="weight", H=hidden)
    weights = torch.empty(tokens, a.top_k, dtype=torch.float32, device=a.x.device)
    chosen = torch.empty(tokens, a.top_k, dtype=torch.int32, device=a.x.device)
    if not tokens:
        return weights, chosen
    group_width, each = next_power_of_2(a.groups), next_power_of_2(experts // a.groups)
    each = max(each, 16 // group_width)  # what a dot needs
    how = plan(tokens, hidden, group_width * each)
    column_blocks = group_width * each // how.columns
    parts = arrivals = None
    if column_blocks * how.splits > 1:
        parts = torch.empty(how.splits * tokens * experts, dtype=torch.float32, device=a.x.device)
        arrivals = counters_of(a.weight)
    kernel = variant(
        _route, H=hidden, E=experts, TOP_K=a.top_k, SCORE=a.score, RENORMALIZE=a.renormalize, GROUPS=a.groups,
        KEPT=a.kept, GROUP_TOP=a.group_top, DOT=dot_type(a.x) if a.x.dtype == a.weight.dtype else tl.float32,
        GP=group_width, EP=each, KP=next_power_of_2(a.top_k), BM=how.tokens,
        ROWS=min(how.tokens, next_power_of_2(tokens)), BN=how.columns, BK=how.inputs, SHARE=how.share,
        SPLITS=how.splits, num_warps=how.warps, num_stages=3, launch_pdl=overlaps(a.x.device),
    )  # fmt: skip
    kernel.launch(
        (cdiv(tokens, how.tokens), column_blocks, how.splits), a.x.contiguous(), a.weight, a.bias,
        a.correction, weights, chosen, parts, arrivals, tokens, float(a.factor), float(a.jitter),
    )  # fmt: skip
    return weights, chosen
