"""`experts` and `experts_partial` against a loop in fp64, on canonical weights."""

import pytest
import torch
from experts_truth import inputs, mixture, truth
from operators import check_operator

from qrt.kernels.experts import cpu, experts, experts_partial, ref
from random_weights import relative

BOUND = {
    "fp16": 1e-6,
    "w4a16": 1e-6,
    "w8a16": 1e-6,
    "w8a8": 2e-2,
    "w4a8": 2e-2,
    "mxfp4": 1e-6,
}  # in fp32; w8a8 and w4a8 round activations
SCHEMES = list(BOUND)
KINDS = [{}, {"biased": True}, {"on_input": True}, {"act": "swiglu_oai", "biased": True}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("implementation", [ref, cpu], ids=["ref", "cpu"])
def test_references_match_fp64(implementation, scheme, kind):
    found = mixture(8, 64, 96, scheme, **kind)
    x, chosen, weights = inputs(11, 64, 8, 3, among=[0, 1, 2, 4, 7])
    args = x, chosen, weights, *found.args(x.dtype, cpu=implementation is cpu)
    want = truth(x, chosen, weights, found)
    partial_sums = implementation.experts_partial(*args)
    assert partial_sums.shape == want.shape and partial_sums.dtype == torch.float32
    assert relative(partial_sums, want) < BOUND[scheme]
    y = implementation.experts(*args)
    assert y.shape == x.shape and relative(y, want.sum(0)) < BOUND[scheme]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_packed_products_of_a_cpu_serve_bf16(scheme):
    """With the tensors that `linear` prepares for a CPU, stacked."""
    found = mixture(4, 128, 64, scheme, dtype=torch.bfloat16)
    x, chosen, weights = inputs(5, 128, 4, 2, dtype=torch.bfloat16)
    y = cpu.experts(x, chosen, weights, *found.args(x.dtype, cpu=True))
    assert y.dtype == x.dtype
    assert relative(y, truth(x, chosen, weights, found).sum(0)) < 3e-2


@pytest.mark.parametrize("scheme", ["w4a16", "w4a8"])
def test_act_order(scheme):
    found = mixture(4, 64, 64, scheme, perm=True, symmetric=False)
    x, chosen, weights = inputs(5, 64, 4, 2)
    y = ref.experts(x, chosen, weights, *found.args(x.dtype))
    assert relative(y, truth(x, chosen, weights, found).sum(0)) < BOUND[scheme]


@pytest.mark.parametrize("on_input", [False, True])
def test_equals_transformers(on_input):
    """Qwen3-MoE's experts; Llama 4's, which read weighted input."""
    if on_input:
        from transformers import Llama4TextConfig as Config
        from transformers.models.llama4.modeling_llama4 import Llama4TextExperts as Experts

        theirs = Experts(Config(hidden_size=32, intermediate_size=48, num_local_experts=4))
    else:
        from transformers import Qwen3MoeConfig as Config
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts as Experts

        theirs = Experts(Config(hidden_size=32, moe_intermediate_size=48, num_experts=4))
    found = mixture(4, 32, 48, "fp16", on_input=on_input)
    for name, parts in (("gate_up_proj", found.gate_up), ("down_proj", found.down)):
        values = torch.stack([part.values for part in parts])
        getattr(theirs, name).data = values.transpose(1, 2).contiguous() if on_input else values
    x, chosen, weights = inputs(6, 32, 4, 2)
    with torch.no_grad():
        if on_input:
            scores = torch.zeros(6, 4).scatter_(1, chosen.long(), weights)
            want = theirs(x.repeat(4, 1) * scores.T.reshape(-1, 1)).view(4, 6, 32).sum(0)
        else:
            want = theirs(x, chosen.long(), weights)
    torch.testing.assert_close(experts(x, chosen, weights, *found.args(x.dtype)), want, rtol=1e-4, atol=1e-5)


def test_no_tokens():
    found = mixture(4, 32, 32, "fp16")
    x, chosen, weights = inputs(0, 32, 4, 2)
    assert experts(x, chosen, weights, *found.args(x.dtype)).shape == (0, 32)
    assert experts_partial(x, chosen, weights, *found.args(x.dtype)).shape == (2, 0, 32)


def test_operator():
    found = mixture(4, 32, 32, "w4a16", biased=True)
    x, chosen, weights = inputs(3, 32, 4, 2)
    for name in ("experts", "experts_partial"):
        check_operator(name, [x, chosen, weights, *found.args(x.dtype)])
