"""Compile `route` and `experts` at users' sizes for a GPU that is not there."""

import pytest
import torch
from offline_cuda import compiled

CODE = """
import torch
from qrt.kernels import gpu
gpu.overlaps = lambda device: True  # as on the GPU that is compiled for
from experts_truth import inputs, mixture
from qrt.kernels.experts import kernel, order_kernel
from qrt.kernels.route.kernel import route

BF16, EXPERTS = torch.bfloat16, 4
for tokens, experts in ((1, 128), (64, 512), (8192, 128)):
    x, weight = torch.zeros(tokens, 2048, dtype=BF16), torch.zeros(experts, 2048, dtype=BF16)
    route(x, weight, None, None, 8, "softmax", True, 1.0, 1, 1, 1, 0.0)
    order_kernel.order(torch.zeros(tokens, 8, dtype=torch.int32), experts, 64)
for scheme in ("w4a16", "fp16", "w8a8"):
    one = mixture(1, 2048, 768, scheme, BF16, 128).args(BF16)
    stacked = [[torch.stack([t[0]] * EXPERTS) for t in one[at]] for at in (0, 2)]
    for tokens in (1, 1024):
        x, chosen, weights = inputs(tokens, 2048, EXPERTS, 2, BF16)
        kernel.experts(x, chosen, weights, stacked[0], None, stacked[1], None, *one[4:])
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile for the GPU that is here")
def test_kernels_compile():
    found = compiled(CODE)
    assert found.keys() == {
        "_route", "_count", "_place", "_fused", "multiply_rows", "_quantize_tokens", "_sum",
    }  # fmt: skip
    assert found["_route"] == 3 and found["_fused"] >= 4 and found["multiply_rows"] >= 2 * 4
