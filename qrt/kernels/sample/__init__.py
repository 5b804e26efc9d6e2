"""`sample`: pick a token from each row of logits, greedily or at random. Stores no noise and sorts nothing.

sample(logits [S, V], rows [S] int64, temperature fp32 [R], seed int64 [R], position int [R],
       least fp32 [S] | None, masks int32 [C, W] | None, mask_at int32 [S] | None) -> [S] int64

logits are fp16, bf16 or fp32, with dense rows. Row s uses the parameters at rows[s] of the tables of R
requests. The tables stay on the device, so a launch fits a CUDA graph.

Temperature 0 is greedy: the token with the largest logit. Any other temperature draws from softmax(logits /
temperature). Tokens with logits / temperature below `least` are not drawn; greedy rows ignore `least`.

Masks have a bit for each token, 32 a word, the lowest first; W is at least V / 32. Row s draws only tokens
whose bit is set in masks[mask_at[s]], or any token if mask_at[s] is negative. A row without any token to draw
gets an arbitrary one.

A row that holds NaN or infinity, allowed or not, gets NOT_FINITE, a negative number, instead of a token. -inf
is a logit like others.

A draw has two stages. First, groups of 8 tokens race. Group i has the weight w = sum of e^(logit /
temperature) and scores log w + g, with Gumbel noise g = -log(-log(1 - u)). That is distributed as the best
score of its tokens (Maddison et al., arXiv:1411.0030), so one u serves 8 tokens. Second, a token of the
winning group is drawn: the first whose cumulative share of w exceeds another u. Among equal scores the lowest
token, or group, wins.

u is a hash of (seed, position, i), and for the second stage of the complement of i. There is no generator
with a state: a seeded request gets the same noise whatever it is batched with, on CPU and GPU, and also after
a pause. u is the same to the bit everywhere. Sums and logarithms are fp32: a group's score is within
SCORE_ERROR * (1 + its magnitude) of the exact one, and a cumulative share within SHARE_ERROR. So two
implementations draw different tokens only where the two best scores, or a share and u, are that close.

packed_samples(logits [S, n], rows, temperature, seed, position, first) -> [S] int64

is what one of several ranks draws, which has the n logits of the vocabulary from token `first` on, a multiple
of 8. A word holds score and token, so that the largest of the ranks' words holds the token that `sample`
draws from all logits: `token_of`. Words of two implementations are not comparable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.kernels.op import define
from qrt.kernels.sample import ref

SCORE_ERROR = 1e-6
SHARE_ERROR = 1e-6
NOT_FINITE = ref.NOT_FINITE


def _fake(logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


def token_of(words: Tensor) -> Tensor:
    """Return the token of each of `packed_samples`, int64; NOT_FINITE where a rank gave that."""
    return ref.LAST - (words & ref.LOW)


sample = define(
    ref.sample,
    triton="qrt.kernels.sample.kernel:sample",
    fake=_fake,
)
packed_samples = define(
    ref.packed_samples,
    triton="qrt.kernels.sample.kernel:packed_samples",
    fake=_fake,
)
