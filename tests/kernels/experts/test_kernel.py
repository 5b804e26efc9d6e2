"""`experts` in Triton (the GPU, the interpreter, or PTX on the CPU) against a loop in fp64."""

from dataclasses import replace

import pytest
import torch
from experts_truth import inputs, mixture, truth

from backends import COMPILED
from qrt.kernels.experts import choose, explain, kernel, ref
from qrt.kernels.experts.choose import ExpertSizes
from qrt.kernels.linear.int8.plans import BlockPlan
from qrt.kernels.linear.tiles.plans import FusedPlan, WidePlan
from qrt.quant.weight.base import Layout
from random_weights import relative

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SCHEMES = ["w4a16", "w8a16", "mxfp4", "fp16", "w8a8"]
# norms of errors: one rounding between the products, one behind; the interpreter truncates to bf16
BOUND = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3 if COMPILED else 2e-2}
INT8_BOUND = {  # what differs by a rounding may become another code of int8
    torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 2e-2 if COMPILED else 5e-2
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def check(found, x, chosen, weights):
    """Both operators; the second call finds counters at 0 and gives the same bits."""
    args = x, chosen, weights, *found.args(x.dtype, x.device)
    want = truth(x, chosen, weights, found)
    bound = INT8_BOUND[x.dtype] if found.scheme == "w8a8" else BOUND[x.dtype]
    partial_sums = kernel.experts_partial(*args)
    assert partial_sums.dtype == torch.float32 and partial_sums.shape == want.shape
    assert relative(partial_sums, want) < bound
    y = kernel.experts(*args)
    assert y.dtype == x.dtype and relative(y, want.sum(0)) < bound
    assert torch.equal(y, kernel.add(partial_sums, x.dtype))
    return partial_sums, args


@pytest.mark.pairs
@pytest.mark.ptx(dtype=[torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, experts", [(1, 4), (2, 16), (5, 4)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_few_tokens(device, scheme, tokens, experts, dtype):
    """Assignments that are blocks of their own, with and without sharing an expert; then an order."""
    found = mixture(experts, 128, 64, scheme, dtype, device=device)
    check(found, *inputs(tokens, 128, experts, 2, dtype, device))


@pytest.mark.pairs
@pytest.mark.ptx(kind=[{"biased": True, "act": "swiglu_oai"}], tokens=[9])
@pytest.mark.parametrize("kind", [
    {"biased": True, "act": "swiglu_oai"}, {"on_input": True, "biased": True}, {"act": "relu"},
])  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_kinds_of_experts(device, scheme, tokens, kind):
    found = mixture(4, 64, 64, scheme, torch.float16, device=device, **kind)
    check(found, *inputs(tokens, 64, 4, 1 if "on_input" in kind else 3, torch.float16, device))


@pytest.mark.ptx(scheme=["w4a16", "fp16"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("hidden, inner", [(96, 32), (72, 100)])
def test_odd_widths(device, scheme, hidden, inner):
    """Halves of rows that fill no tile, and inputs that fill none."""
    group = None if inner == 100 else 32
    if group is None and scheme == "mxfp4":
        pytest.skip("its groups have 32 inputs")
    found = mixture(3, hidden, inner, scheme, torch.float16, device=device, group=group, biased=True)
    for tokens in (1, 4):
        check(found, *inputs(tokens, hidden, 3, 2, torch.float16, device))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_tokens_to_one_expert_and_none_to_others(device, scheme):
    found = mixture(6, 64, 64, scheme, torch.float16, device=device)
    for among in ([0], [5], [1, 4]):
        check(found, *inputs(20, 64, 6, len(among), torch.float16, device, among=among))


@pytest.mark.parametrize("group, symmetric", [(32, False), (64, False), (128, True), (None, False)])
@pytest.mark.parametrize("scheme", ["w4a16", "w8a16"])
def test_grids_of_codes(device, scheme, group, symmetric):
    """Every run count, with zero points and without."""
    found = mixture(3, 256, 128, scheme, torch.float16, group, symmetric, device=device)
    check(found, *inputs(3, 256, 3, 2, torch.float16, device))


@pytest.mark.ptx(tokens=[6])
@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("tokens", [1, 6])
def test_act_order(device, tokens, on_input):
    """Each expert reads its inputs in an order of its own, in both products."""
    found = mixture(
        4, 128, 64, "w4a16", torch.float16, symmetric=False, perm=True, device=device, on_input=on_input
    )
    check(found, *inputs(tokens, 128, 4, 1 if on_input else 2, torch.float16, device))


@pytest.mark.ptx(scheme=["w4a16"])
@pytest.mark.parametrize("scheme, hidden", [("w4a16", 1024), ("w8a8", 512)])
def test_split_sums_repeat_bit_for_bit(device, monkeypatch, scheme, hidden):
    """Of tokens that share an expert, too: counters are 0 again."""
    monkeypatch.setattr(choose, "SHARE", 1)
    found = mixture(16, hidden, 128, scheme, torch.bfloat16, device=device, group=128)
    x, chosen, weights = inputs(2, hidden, 16, 1, torch.bfloat16, device)
    chosen[1] = chosen[0]
    partial_sums, args = check(found, x, chosen, weights)
    assert "splits 1," not in kernel.explain(x, 1, args[3], args[5], scheme)[0]
    for _ in range(3):
        assert torch.equal(kernel.experts_partial(*args), partial_sums)
    assert not args[3][-1].any() and not args[5][-1].any()


@pytest.mark.ptx
@pytest.mark.parametrize("scheme", SCHEMES)
def test_wide_blocks(device, monkeypatch, scheme):
    """The blocks of many tokens, met by few."""
    monkeypatch.setattr(choose, "block_of", lambda sizes: 64)
    found = mixture(3, 96, 128, scheme, torch.float16, device=device)
    check(found, *inputs(30, 96, 3, 2, torch.float16, device))


def test_int8_tokens_are_those_of_the_definition(device):
    """In fp32 they round as the reference does, but for ties."""
    found = mixture(4, 128, 96, "w8a8", device=device)
    x, chosen, weights = inputs(9, 128, 4, 2, device=device)
    args = x, chosen, weights, *found.args(x.dtype, device)
    assert relative(kernel.experts_partial(*args), ref.experts_partial(*args)) < 1e-4


@pytest.mark.parametrize("tokens", [1, 9])
def test_w4a8_multiplies_as_w4a16(device, tokens):
    """Few tokens stay in 16 bits: their kernels are bound by reading weights, not by products."""
    found = mixture(4, 128, 64, "w4a8", torch.float16, symmetric=False, device=device)
    x, chosen, weights = inputs(tokens, 128, 4, 2, torch.float16, device)
    both = (found, replace(found, scheme="w4a16"))
    args = [one.args(x.dtype, device) for one in both]
    assert torch.equal(*(kernel.experts_partial(x, chosen, weights, *own) for own in args))


def test_many_summands_are_rounded_before_they_are_added(device, monkeypatch):
    monkeypatch.setattr(kernel, "WIDE_BYTES", 0)
    found = mixture(4, 64, 64, "fp16", torch.float16, device=device)
    x, chosen, weights = inputs(5, 64, 4, 3, torch.float16, device)
    y = kernel.experts(x, chosen, weights, *found.args(x.dtype, device))
    assert relative(y, truth(x, chosen, weights, found).sum(0)) < BOUND[x.dtype]


def test_strided_inputs(device):
    found = mixture(4, 64, 64, "w4a16", torch.float16, device=device)
    x, chosen, weights = inputs(6, 128, 4, 4, torch.float16, device)
    check(found, x[:, 64:], chosen[:, :2], weights[:, 1:3])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_tokens(device, scheme):
    found = mixture(2, 64, 64, scheme, device=device)
    x, chosen, weights = inputs(0, 64, 2, 2, device=device)
    args = x, chosen, weights, *found.args(x.dtype, device)
    assert kernel.experts(*args).shape == (0, 64)
    assert kernel.experts_partial(*args).shape == (2, 0, 64)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_inputs_that_are_not_the_weights_are_refused(device, scheme):
    found = mixture(2, 64, 64, scheme, device=device)
    x, chosen, weights = inputs(3, 320, 2, 2, device=device)
    args = found.args(x.dtype, device)
    with pytest.raises(ValueError, match=r"x: expected shape \[T K\].*, got \[3, 320\]"):
        kernel.experts(x, chosen, weights, *args)
    with pytest.raises(ValueError, match="chosen: expected dtype torch.int32"):
        kernel.experts(x[:, :64], chosen.long(), weights, *args)
    with pytest.raises(ValueError, match=r"weights: expected shape \[T k\]"):
        kernel.experts(x[:, :64], chosen, weights[:, :1], *args)


@pytest.mark.parametrize("scheme, what", [
    ("w4a16", "unpacks every weight once"), ("mxfp4", "unpacks every weight once"),
    ("fp16", "weights row by row"), ("w8a8", "codes by codes"),
])  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 9])
def test_explain_names_what_runs(device, monkeypatch, scheme, what, tokens):
    plans = []
    for name in ("fused_gemm", "grouped_rows"):
        monkeypatch.setattr(
            kernel, name, lambda *args: plans.extend(x for x in args if isinstance(x, FusedPlan | BlockPlan))
        )
    found = mixture(4, 128, 64, scheme, torch.float16, device=device)
    x, chosen, weights = inputs(tokens, 128, 4, 2, torch.float16, device)
    args = found.args(x.dtype, device)
    kernel.experts_partial(x, chosen, weights, *args)
    said = kernel.explain(x, 2, args[0], args[2], scheme)
    for words, how in zip(said, plans, strict=True):
        assert what in words and ("of its own" in words) == (tokens == 1)
        assert ", ".join(f"{name} {value}" for name, value in how._asdict().items()) in words
    assert "Act(gate) * up" in said[0] or "act(gate) * up is part of it" in said[0]


def test_explain_on_a_cpu_tells_of_each_expert():
    found = mixture(4, 128, 64, "fp16")
    x, *_ = inputs(3, 128, 4, 2)
    args = found.args(x.dtype)
    assert explain(x, 2, args[0], args[2], "fp16") == ("Torch multiplies. One expert follows the other.",) * 2


@pytest.mark.parametrize("tokens, experts, top_k, ordered", [
    (1, 128, 8, False), (1, 8, 2, False), (2, 128, 8, False), (2, 8, 2, True), (4, 32, 4, True),
    (16, 128, 8, True),
])  # fmt: skip
def test_few_assignments_are_not_ordered(tokens, experts, top_k, ordered):
    sizes = ExpertSizes(Layout.TILES, torch.bfloat16, tokens, top_k, experts, 2048, 768, (8, 3), (64, 64))
    assert choose.plan(sizes).ordered == ordered


QWEN3, MIXTRAL, GPT_OSS = (  # top_k, experts, hidden, inner, steps, words
    (8, 128, 2048, 768, (8, 3), (64, 64)), (2, 8, 4096, 14336, (16, 56), (64, 64)),
    (4, 32, 2880, 2880, (23, 23), (32, 32)),
)  # fmt: skip


@pytest.mark.parametrize("model, tokens, block, gate_up, down", [
    (QWEN3, 1, 8, (2, 1, 4, 3), (1, 1, 2, 4)), (QWEN3, 16, 8, (2, 1, 4, 3), (2, 1, 4, 3)),
    (QWEN3, 64, 8, (2, 1, 4, 3), (2, 1, 4, 3)), (MIXTRAL, 1, 8, (2, 2, 4, 3), (1, 4, 2, 3)),
    (MIXTRAL, 16, 8, (2, 1, 4, 3), (2, 1, 4, 3)), (GPT_OSS, 1, 8, (2, 4, 2, 3), (1, 4, 2, 3)),
    (GPT_OSS, 16, 8, (2, 1, 2, 4), (1, 1, 2, 4)), (GPT_OSS, 64, 16, (2, 1, 2, 4), (1, 1, 2, 4)),
])  # fmt: skip
def test_few_tokens_of_models_have_the_plans_that_won(model, tokens, block, gate_up, down):
    how = choose.plan(ExpertSizes(Layout.TILES, torch.bfloat16, tokens, *model, sms=132))
    assert (how.block, how.gate_up, how.down) == (block, gate_up, down)


@pytest.mark.parametrize("singles, programs, steps", [(2, 128, 8), (8, 12, 64), (1, 3, 5), (4, 500, 64)])
def test_splits_of_k_make_no_crowd(singles, programs, steps):
    splits = choose._splits(programs, singles, steps, 1 << 14)
    assert splits == 1 or (splits <= steps and singles * programs * splits <= choose.PROGRAMS)
    assert choose._splits(programs, 0, steps, 1 << 14) == choose._splits(programs, singles, steps, 0) == 1


@pytest.mark.parametrize("tokens, wide", [(1, False), (128, False), (172, True), (8192, True)])
def test_more_than_ten_assignments_take_hoppers_kernel(tokens, wide):
    how = choose.plan(ExpertSizes(Layout.TILES, torch.bfloat16, tokens, *QWEN3, sms=132))
    assert isinstance(how.gate_up, WidePlan) == isinstance(how.down, WidePlan) == wide
    assert not wide or how.block == how.gate_up.tokens > choose.FUSED


@pytest.mark.parametrize("layout, dtype, most", [
    (Layout.TILES, torch.bfloat16, 64), (Layout.TILES, torch.float32, 16),
    (Layout.PLAIN, torch.bfloat16, 128), (Layout.PLAIN, torch.float32, 32),
    (Layout.INT8_ROWS, torch.float32, 128),
])  # fmt: skip
def test_blocks_widen_with_tokens_of_an_expert(layout, dtype, most):
    blocks = [
        choose.plan(ExpertSizes(layout, dtype, tokens, 8, 128, 2048, 768, (2048, 768), (64, 64))).block
        for tokens in (1, 16, 64, 256, 1024, 8192)
    ]
    assert blocks == sorted(blocks) and blocks[0] in (8, 16) and blocks[-1] == most


BF16, FP16 = torch.bfloat16, torch.float16
SIZES = [  # tokens, experts, top_k, H, I, dtype; kernels are compiled for each H and I
    (1, 128, 8, 2048, 768, BF16), (16, 128, 8, 2048, 768, FP16), (64, 128, 8, 2048, 768, BF16),
    (1024, 128, 8, 2048, 768, BF16), (300, 8, 2, 2048, 768, BF16), (8192, 8, 1, 1024, 512, BF16),
    pytest.param(8192, 128, 8, 2048, 768, BF16, marks=pytest.mark.alone),  # gigabytes of summands
    (513, 256, 8, 1024, 512, FP16), (77, 32, 4, 2880, 736, BF16), (3, 16, 1, 4000, 1000, BF16),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, experts, top_k, hidden, inner, dtype", SIZES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_model_sizes(device, scheme, tokens, experts, top_k, hidden, inner, dtype):
    """Summands of many tokens are rounded before they are added."""
    group = 32 if inner % 128 or hidden % 128 else 128
    if scheme in ("w4a16", "w8a16") and (inner % group or hidden % group):
        group = None
    if scheme == "mxfp4" and (inner % 32 or hidden % 32):
        pytest.skip("its groups have 32 inputs")
    found = mixture(experts, hidden, inner, scheme, dtype, group, scheme in ("w8a16", "w8a8"), device=device)
    x, chosen, weights = inputs(tokens, hidden, experts, top_k, dtype, device)
    args = x, chosen, weights, *found.args(dtype, device)
    want = truth(x, chosen, weights, found)
    bound = INT8_BOUND[dtype] if scheme == "w8a8" else BOUND[dtype]
    y, partial_sums = kernel.experts(*args), kernel.experts_partial(*args)
    assert relative(partial_sums, want) < bound and relative(y, want.sum(0)) < bound
    assert torch.equal(kernel.experts(*args), y) and torch.equal(kernel.experts_partial(*args), partial_sums)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 200])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_recorded_graph_serves_any_choice(device, scheme, tokens):
    found = mixture(16, 512, 256, scheme, torch.bfloat16, device=device)
    first, other = (inputs(tokens, 512, 16, 2, torch.bfloat16, device, among) for among in (None, [3, 9]))
    args = found.args(torch.bfloat16, device)
    kernel.experts(*first, *args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernel.experts(*first, *args)
    want = kernel.experts(*other, *args)
    for kept, new in zip(first, other, strict=True):
        kept.copy_(new)
    graph.replay()
    assert torch.equal(y, want)
