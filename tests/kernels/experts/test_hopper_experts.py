"""`experts` by Hopper's kernel for many tokens, as PTX on the CPU or on the GPU, against a loop in fp64."""

import pytest
import torch
from experts_truth import inputs, mixture, truth

from qrt.kernels.experts import choose, kernel
from random_weights import relative

BOUND = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
INT8_BOUND = {torch.float16: 1e-2, torch.bfloat16: 2e-2}  # a rounding may turn into another int8 code
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory", "small_gpu", "copies", "wide")]


@pytest.fixture
def wide(monkeypatch):
    """Few assignments take the kernel of many, and nothing else multiplies."""
    monkeypatch.setattr(choose, "FUSED", 0)
    monkeypatch.delattr(kernel, "fused_gemm")


def check(found, x, chosen, weights):
    args = x, chosen, weights, *found.args(x.dtype, x.device)
    want = truth(x, chosen, weights, found).to(x.device)
    bound = (INT8_BOUND if found.scheme == "w4a8" else BOUND)[x.dtype]
    partial_sums = kernel.experts_partial(*args)
    assert partial_sums.dtype == torch.float32 and relative(partial_sums, want) < bound
    y = kernel.experts(*args)
    assert y.dtype == x.dtype and relative(y, want.sum(0)) < bound
    assert torch.equal(y, kernel.experts(*args))


@pytest.mark.ptx(scheme=["w4a16"], block=[128])
@pytest.mark.ptx(scheme=["w8a16"], block=[32])
@pytest.mark.ptx(scheme=["mxfp4"], block=[64])
@pytest.mark.parametrize("block", [32, 64, 128, 256])
@pytest.mark.parametrize("scheme", ["w4a16", "w8a16", "mxfp4"])
def test_plans_of_every_block(device, monkeypatch, scheme, block):
    monkeypatch.setattr(choose, "expert_block", lambda *sizes: block)
    found = mixture(5, 256, 128, scheme, torch.bfloat16, 128, False, device=device)
    check(found, *inputs(20, 256, 5, 2, torch.bfloat16, device, among=[0, 1, 4]))


@pytest.mark.ptx(block=[128])
@pytest.mark.ptx(block=[64], kind=[{}])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("kind", [
    {}, {"on_input": True, "symmetric": False}, {"biased": True, "act": "swiglu_oai"},
], ids=["plain", "on_input", "swiglu_oai"])  # fmt: skip
def test_int8_tokens_in_blocks_of_many(device, monkeypatch, kind, block):
    """Each channel of each expert has a scale, and each token; padding has none."""
    monkeypatch.setattr(choose, "expert_block", lambda *sizes: block)
    found = mixture(4, 256, 128, "w4a8", torch.bfloat16, 128, device=device, **kind)
    x, chosen, weights = inputs(20, 256, 4, 1 if "on_input" in kind else 2, torch.bfloat16, device, [0, 1, 3])
    args = found.args(x.dtype, device)
    assert all("int8" in why for why in kernel.explain(x, chosen.shape[1], args[0], args[2], "w4a8"))
    check(found, x, chosen, weights)


@pytest.mark.ptx
def test_inputs_that_are_not_the_weights_are_refused(device):
    found = mixture(2, 256, 128, "w4a16", torch.bfloat16, 128, device=device)
    x, chosen, weights = inputs(9, 512, 2, 2, torch.bfloat16, device)
    with pytest.raises(ValueError, match=r"x: expected shape \[T K\].*, got \[9, 512\]"):
        kernel.experts(x, chosen, weights, *found.args(x.dtype, device))


@pytest.mark.ptx
@pytest.mark.parametrize("kind", [
    {"biased": True, "act": "swiglu_oai"}, {"on_input": True, "perm": True, "symmetric": False},
], ids=["swiglu_oai", "on_input"])  # fmt: skip
def test_kinds_of_experts(device, kind):
    found = mixture(4, 128, 64, "w4a16", torch.float16, device=device, **kind)
    check(found, *inputs(9, 128, 4, 1 if "on_input" in kind else 3, torch.float16, device))


@pytest.mark.ptx
def test_inner_sizes_that_fill_no_row_block(device):
    """act(gate) * up is a kernel of its own, and results have a ragged last block."""
    found = mixture(3, 160, 96, "w4a16", torch.float16, biased=True, device=device)
    check(found, *inputs(9, 160, 3, 2, torch.float16, device))


@pytest.mark.ptx
def test_many_summands_are_rounded_before_they_are_added(device, monkeypatch):
    monkeypatch.setattr(kernel, "WIDE_BYTES", 0)
    found = mixture(4, 64, 64, "w4a16", torch.float16, device=device)
    x, chosen, weights = inputs(5, 64, 4, 3, torch.float16, device)
    y = kernel.experts(x, chosen, weights, *found.args(x.dtype, device))
    assert relative(y, truth(x, chosen, weights, found).sum(0).to(device)) < BOUND[x.dtype]
