"""`route`: which experts of a mixture read a token, and how much each of them counts.

route(x [T, H], weight [E, H], bias [E] | None, correction fp32 [E] | None, top_k, score, renormalize, factor,
      groups, kept, group_top, jitter) -> weights fp32 [T, k], chosen int32 [T, k]

    logits = x @ weight.T + bias, fp32, never rounded to 16 bits
    score         "softmax"        softmax of all logits
                  "sigmoid"        sigmoid of each logit
                  "top"            softmax of the chosen logits (gpt-oss)
                  "sparsemixer"    PhiMoE's: see `ref.sparsemixer`; top_k is 2
    judged        score + correction; without a correction the logits have the same order
    groups        above 1: experts come in so many groups of equal size. A group is judged by the sum of its
                  `group_top` best experts, and only those of the `kept` best groups can be chosen
    chosen        the top_k of judged, best first; of equal ones the lower index
    weights       the score of the chosen, without the correction
    renormalize   divide the weights by their sum + 1e-20, unless score is "top" or "sparsemixer"
    factor        multiplies the weights in the end
    jitter        of "sparsemixer" alone
"""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.definitions import router as ref
from qrt.kernels.op import define


def _fake(x: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    size = x.shape[0], top_k
    return x.new_empty(size, dtype=torch.float32), x.new_empty(size, dtype=torch.int32)


route = define(
    ref.route,
    triton="qrt.kernels.route.kernel:route",
    fake=_fake,
)
