"""`sample`: logits to tokens, greedy or at random, row by row; no noise is kept and nothing is sorted.

sample(logits [S, V], rows [S] int64, temperature fp32 [R], seed int64 [R], position int [R],
       least fp32 [S] | None) -> [S] int64

logits may be fp16, bf16 or fp32, rows dense. Row s draws with the parameters at rows[s] of tables of R
requests, which stay on the device: a launch fits a CUDA graph. temperature 0 is greedy: the largest logit.
Otherwise a draw is an exponential race of groups of 8 tokens, then a draw within the group that wins: group
i, of weight w = sum of e^(logit / temperature), scores log w + g with Gumbel noise g = -log(-log(1 - u)), as
the best of its tokens would (Maddison et al., arXiv:1411.0030), so one u serves 8 tokens; in the winner the
first token is taken whose cumulative share of w exceeds another u. The distribution is softmax(logits /
temperature). u is a hash of (seed, position, i), and of the complement of i for the second, not the output of
a generator with state: a seeded request gets the same noise whatever it is batched with, on CPU and GPU,
resumed after a pause or not. Tokens with logits / temperature below `least` are not drawn; greedy rows ignore
it. Of equal scores the lowest token, or group, wins.

u is the same to the bit everywhere. The sums and logarithms are fp32: a group's score is within SCORE_ERROR *
(1 + its magnitude) of the exact one, a cumulative share within SHARE_ERROR, so two implementations draw
differently only where the best two scores, or a share and u, are that close.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.kernels.op import define
from qrt.kernels.sample import ref

SCORE_ERROR = 1e-6
SHARE_ERROR = 1e-6


def _fake(logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


sample = define(
    ref.sample,
    triton="qrt.kernels.sample.kernel:sample",
    fake=_fake,
)
