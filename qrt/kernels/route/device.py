"""How `route` scores experts and chooses among them, rows [BM] of columns [N], -inf where none is."""

import triton
import triton.language as tl

NEVER = tl.constexpr(float("-inf"))


@triton.jit
def scores_of(values, logits, SCORE: tl.constexpr):
    """Return the scores of `values`, which are some of the logits [BM, N]; "top" is their softmax."""
    if SCORE == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-values))
    else:
        high = tl.max(logits, 1)[:, None]
        return tl.exp(values - high) / tl.sum(tl.exp(logits - high), 1)[:, None]


@triton.jit
def in_best_groups(judged, KEPT: tl.constexpr, GROUP_TOP: tl.constexpr, GP: tl.constexpr, EP: tl.constexpr):
    """Return judged [BM, GP * EP] with -inf outside the KEPT groups whose GROUP_TOP best sum to most."""
    BM: tl.constexpr = judged.shape[0]
    grouped = tl.reshape(judged, (BM, GP, EP))
    place = tl.arange(0, EP)[None, None, :]
    left, worth = grouped, tl.zeros((BM, GP), tl.float32)
    for _ in tl.static_range(GROUP_TOP):
        best, at = tl.max(left, 2, return_indices=True)
        worth += best
        left = tl.where(place == at[:, :, None], NEVER, left)
    group = tl.arange(0, GP)[None, :]
    kept = tl.zeros((BM, GP), tl.int32)
    for _ in tl.static_range(KEPT):
        best, at = tl.max(worth, 1, return_indices=True)
        kept = tl.where(group == at[:, None], 1, kept)
        worth = tl.where(group == at[:, None], NEVER, worth)
    return tl.reshape(tl.where(kept[:, :, None] == 1, grouped, NEVER), (BM, GP * EP))


@triton.jit
def choose(
    logits, correction, column, TOP_K: tl.constexpr, KP: tl.constexpr, SCORE: tl.constexpr,
    KEPT: tl.constexpr, GROUP_TOP: tl.constexpr, GP: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """Return the logits and the columns of the TOP_K best, [BM, KP]; -inf behind them.

    They are the best by score and correction [1, N], in GP groups, if there is more than one. Of equal ones
    the lower column comes first.
    """
    APART: tl.constexpr = correction is not None or GP > 1  # else logits have the order of their scores
    judged = logits
    if APART and SCORE != "top":
        judged = scores_of(logits, logits, SCORE)
    if correction is not None:
        judged += correction
    judged = tl.where(logits > NEVER, judged, NEVER)
    if GP > 1:
        judged = in_best_groups(judged, KEPT, GROUP_TOP, GP, EP)
    slot = tl.arange(0, KP)[None, :]
    picked = tl.full((judged.shape[0], KP), NEVER, tl.float32)
    chosen = tl.zeros((judged.shape[0], KP), tl.int32)
    for i in tl.static_range(TOP_K):
        best, at = tl.max(judged, 1, return_indices=True)
        taken = column[None, :] == at[:, None]
        if APART:
            best = tl.sum(tl.where(taken, logits, 0.0), 1)
        judged = tl.where(taken, NEVER, judged)
        picked = tl.where(slot == i, best[:, None], picked)
        chosen = tl.where(slot == i, at[:, None], chosen)
    return picked, chosen


@triton.jit
def sparsemixer(logits, column, jitter):
    """Return the weights and the columns of the two best, [BM, 2]; see `ref.sparsemixer`."""
    slot = tl.arange(0, 2)[None, :]
    weights = tl.zeros((logits.shape[0], 2), tl.float32)
    chosen = tl.zeros((logits.shape[0], 2), tl.int32)
    left = tl.where(logits > NEVER, logits, NEVER)  # NaN would choose a column without an expert
    for i in tl.static_range(2):
        best, at = tl.max(left, 1, return_indices=True)
        top = best[:, None]
        far = (top - logits) / tl.maximum(tl.abs(logits), top) > 2.0 * jitter
        close = tl.sum(tl.where(far, 0.0, tl.exp(left - top)), 1)
        weights = tl.where(slot == i, (1.0 / close)[:, None], weights)
        chosen = tl.where(slot == i, at[:, None], chosen)
        left = tl.where(column[None, :] == at[:, None], NEVER, left)
    return weights, chosen
