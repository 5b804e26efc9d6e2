"""`sample`: logits to tokens, greedy or at random, row by row; no noise is kept and nothing is sorted.

sample(logits [S, V], rows [S] int64, temperature fp32 [R], seed int64 [R], position int [R],
       least fp32 [S] | None) -> [S] int64

logits may be fp16, bf16 or fp32, rows dense. Row s draws with the parameters at rows[s] of tables of R
requests, which stay on the device: a launch fits a CUDA graph. temperature 0 is greedy: the largest logit.
Otherwise a draw is Gumbel-max: argmax(logits / temperature + g), g = -log(-log(1 - u)) independent per token,
which has the distribution softmax(logits / temperature) (Gumbel 1954; Maddison et al., arXiv:1411.0030).
u is a hash of (seed, position, token), not the output of a generator with state: a seeded request gets the
same noise whatever it is batched with, on CPU and GPU, resumed after a pause or not. Tokens with logits /
temperature below `least` are not drawn; greedy rows ignore it. Of equal scores the lowest token wins.

u is the same to the bit everywhere. The logarithms are fp32: a token's score is within SCORE_ERROR * (1 +
its magnitude) of the exact one, so two implementations draw differently only where the best two scores are
that close.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.kernels.op import define
from qrt.kernels.sample import ref

SCORE_ERROR = 1e-6


def _fake(
    logits: Tensor, rows: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, least: Tensor | None
) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


sample = define(
    "sample(Tensor logits, Tensor rows, Tensor temperature, Tensor seed, Tensor position, Tensor? least) "
    "-> Tensor",
    ref=ref.sample,
    triton="qrt.kernels.sample.kernel:sample",
    fake=_fake,
)
