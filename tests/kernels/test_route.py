"""`route` against transformers' own routers and against a plain loop in fp64."""

import math

import pytest
import torch
from operators import check_operator

from qrt.definitions import router as ref
from qrt.kernels.route import kernel, route

PLAIN = {
    "correction": None, "bias": None, "score": "softmax", "renormalize": False, "factor": 1.0, "groups": 1,
    "kept": 1, "group_top": 2, "jitter": 0.0,
}  # fmt: skip


def run(function, x, weight, top_k, **rules):
    rules = PLAIN | rules
    bias, correction = rules.pop("bias"), rules.pop("correction")
    return function(x, weight, bias, correction, top_k, **rules)


def truth(x, weight, top_k, **rules):
    """Return weights and experts of every token, from the definition, in Python's floats."""
    rules = PLAIN | rules
    logits = x.double() @ weight.double().T
    if rules["bias"] is not None:
        logits = logits + rules["bias"].double()
    rows = [_one(row, top_k, **rules) for row in logits.tolist()]
    return torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])


def _softmax(values):
    powers = [math.exp(value - max(values)) for value in values]
    return [power / sum(powers) for power in powers]


def _one(logits, top_k, *, score, correction, groups, kept, group_top, renormalize, factor, jitter, bias):
    experts = range(len(logits))
    scores = {
        "softmax": lambda: _softmax(logits),
        "sigmoid": lambda: [1 / (1 + math.exp(-logit)) for logit in logits],
        "top": lambda: logits,
    }[score]()
    judged = (
        scores if correction is None else [a + b for a, b in zip(scores, correction.tolist(), strict=True)]
    )
    allowed = set(experts)
    if groups > 1:
        size = len(logits) // groups
        parts = [sorted(judged[g * size : (g + 1) * size], reverse=True) for g in range(groups)]
        worth = [sum(part[:group_top]) for part in parts]
        stay = sorted(range(groups), key=lambda g: (-worth[g], g))[:kept]
        allowed = {e for e in experts if e // size in stay}
    chosen = sorted(allowed, key=lambda e: (-judged[e], e))[:top_k]
    weights = [scores[e] for e in chosen]
    if score == "top":
        weights = _softmax(weights)
    elif renormalize:
        weights = [weight / (sum(weights) + 1e-20) for weight in weights]
    return [weight * factor for weight in weights], chosen


CASES = [  # experts, top_k, rules
    (8, 2, {"renormalize": True}),
    (12, 4, {}),
    (128, 8, {"renormalize": True}),
    (5, 5, {"score": "top", "bias": True}),
    (32, 4, {"score": "top", "bias": True}),
    (16, 1, {"score": "sigmoid"}),
    (96, 8, {"score": "sigmoid", "correction": True, "renormalize": True, "factor": 2.5}),
    (64, 6, {"score": "sigmoid", "correction": True, "groups": 8, "kept": 3, "renormalize": True}),
    (48, 6, {"score": "softmax", "groups": 6, "kept": 2, "group_top": 1, "factor": 16.0}),
    (64, 6, {"score": "softmax", "correction": True, "renormalize": True}),
]


def case(experts, rules, tokens, hidden, device="cpu", dtype=torch.float32):
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    weight = (torch.randn(experts, hidden, device=device) * 3 / hidden**0.5).to(dtype)
    made = dict(rules)
    if made.get("bias"):
        made["bias"] = torch.randn(experts, device=device).to(dtype)
    if made.get("correction"):
        made["correction"] = torch.rand(experts, device=device) - 0.5
    return x, weight, made


def check(function, x, weight, top_k, **rules):
    weights, chosen = run(function, x, weight, top_k, **rules)
    cpu = {name: value.cpu() if torch.is_tensor(value) else value for name, value in rules.items()}
    want, experts = truth(x.cpu(), weight.cpu(), top_k, **cpu)
    assert weights.dtype == torch.float32 and chosen.dtype == torch.int32
    assert chosen.tolist() == experts.tolist()
    torch.testing.assert_close(weights.cpu().double(), want.double(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("experts, top_k, rules", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_matches_fp64(experts, top_k, rules, dtype):
    x, weight, made = case(experts, rules, 9, 96, dtype=dtype)
    check(ref.route, x, weight, top_k, **made)


@pytest.mark.ptx(dtype=[torch.bfloat16])
@pytest.mark.parametrize("experts, top_k, rules", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernel_matches_fp64(device, experts, top_k, rules, dtype):
    """With K split, and an odd number of inputs."""
    x, weight, made = case(experts, rules, 5, 2 * 8192 // 16 + 40, device, dtype)
    check(kernel.route, x, weight, top_k, **made)


@pytest.mark.parametrize("tokens, hidden", [(1, 64), (40, 48), (17, 300)])
def test_blocks_of_tokens(device, tokens, hidden):
    x, weight, made = case(24, {"renormalize": True}, tokens, hidden, device)
    check(kernel.route, x, weight, 3, **made)


def test_sums_of_splits_repeat_bit_for_bit(device):
    """Counters are 0 again, and belong to the router."""
    x, weight, _ = case(128, {}, 3, 2048, device, torch.bfloat16)
    how = kernel.plan(3, 2048, 128)
    assert (how.splits, how.columns) == (4, 16)  # 32 programs
    first = run(kernel.route, x, weight, 8)
    for _ in range(3):
        assert all(map(torch.equal, run(kernel.route, x, weight, 8), first))
    assert not weight.qrt_arrivals.any()


def test_a_router_in_fp32_is_not_rounded(device):
    """Nor are logits, of activations in bf16: they differ by less than bf16 tells apart."""
    x = torch.ones(2, 64, device=device).bfloat16()
    weight = torch.ones(8, 64, device=device)
    weight[3:5, 7] += torch.tensor([1e-3, 2e-3], device=device)
    assert run(kernel.route, x, weight, 2)[1].tolist() == [[4, 3]] * 2
    assert run(ref.route, x, weight, 2)[1].tolist() == [[4, 3]] * 2


@pytest.mark.ptx
@pytest.mark.parametrize("top_k, rules", [
    (4, {"score": "sigmoid", "correction": True, "groups": 3, "kept": 2}), (4, {"score": "softmax"}),
    (4, {"score": "top"}), (2, {"score": "sparsemixer", "jitter": 0.01}),
])  # fmt: skip
def test_tokens_that_are_not_numbers_choose_experts_that_exist(device, top_k, rules):
    x, weight, made = case(12, rules, 3, 32, device)
    before = run(kernel.route, x, weight, top_k, **made)
    x[1] = float("nan")
    for implementation in (kernel, ref):
        _, chosen = run(implementation.route, x, weight, top_k, **made)
        assert ((chosen >= 0) & (chosen < 12)).all()
        assert torch.equal(chosen[::2], before[1][::2])


@pytest.mark.parametrize("tokens, hidden, columns", [
    (1, 2048, 128), (16, 2880, 32), (64, 2048, 128), (8192, 2048, 128), (8192, 2048, 512), (1000, 4096, 16),
    (8192, 4096, 16),
])  # fmt: skip
def test_plans_cover_all_inputs(tokens, hidden, columns):
    how = kernel.plan(tokens, hidden, columns)
    assert how.share * how.splits * how.inputs >= hidden > how.share * (how.splits - 1) * how.inputs
    blocks = -(-tokens // how.tokens)
    assert how.splits == 1 or blocks * how.splits <= kernel.COUNTERS
    assert how.tokens * columns <= 16384
    assert 3 * (how.tokens + how.columns) * how.inputs * 4 <= 227 << 10  # stages in fp32


@pytest.mark.parametrize("implementation", [ref, kernel], ids=["ref", "triton"])
def test_of_equal_experts_the_lower_index_is_chosen(device, implementation):
    x, weight = torch.ones(3, 4, device=device), torch.zeros(8, 4, device=device)
    rules = {"groups": 4, "kept": 2, "score": "sigmoid"}
    assert run(implementation.route, x, weight, 3, **rules)[1].tolist() == [[0, 1, 2]] * 3
    weight[5:7] = 1.0
    assert run(implementation.route, x, weight, 4)[1].tolist() == [[5, 6, 0, 1]] * 3


def test_no_tokens():
    weights, chosen = run(route, torch.empty(0, 4), torch.zeros(8, 4), 2)
    assert weights.shape == chosen.shape == (0, 2)


def test_operator():
    x, weight, made = case(16, {"score": "sigmoid", "correction": True}, 3, 32)
    check_operator("route", [x, weight, None, made["correction"], 4, "sigmoid", True, 1.5, 4, 2, 2, 0.0])


HIDDEN, TOKENS = 32, 40


def mixtral():
    from transformers import MixtralConfig as Config
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter as Router

    router = Router(Config(hidden_size=HIDDEN, num_local_experts=8, num_experts_per_tok=2))
    return router, 2, {"renormalize": True}, ()


def qwen3(norm=True):
    from transformers import Qwen3MoeConfig as Config
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter as Router

    router = Router(Config(hidden_size=HIDDEN, num_experts=64, num_experts_per_tok=8, norm_topk_prob=norm))
    return router, 8, {"renormalize": norm}, ()


def qwen3_not_normalized():
    return qwen3(False)


def deepseek_v3():
    from transformers import DeepseekV3Config as Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter as Router

    config = Config(
        hidden_size=HIDDEN, n_routed_experts=64, num_experts_per_tok=6, n_group=8, topk_group=3,
        routed_scaling_factor=2.5, norm_topk_prob=True,
    )  # fmt: skip
    router = Router(config)
    router.e_score_correction_bias.copy_(torch.rand(64))
    rules = {
        "score": "sigmoid", "correction": router.e_score_correction_bias, "groups": 8, "kept": 3,
        "renormalize": True, "factor": 2.5,
    }  # fmt: skip
    return router, 6, rules, ()


def glm4():
    from transformers import Glm4MoeConfig as Config
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter as Router

    config = Config(
        hidden_size=HIDDEN, n_routed_experts=16, num_experts_per_tok=4, n_group=1, topk_group=1,
        routed_scaling_factor=1.0, norm_topk_prob=True,
    )  # fmt: skip
    router = Router(config)
    router.e_score_correction_bias.copy_(torch.rand(16))
    rules = {"score": "sigmoid", "correction": router.e_score_correction_bias, "renormalize": True}
    return router, 4, rules, ()


def minimax_m2():
    from transformers import MiniMaxM2Config as Config
    from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter as Router

    correction = torch.rand(32)
    router = Router(Config(hidden_size=HIDDEN, num_local_experts=32, num_experts_per_tok=4))
    return router, 4, {"score": "sigmoid", "correction": correction, "renormalize": True}, (correction,)


def ernie():
    from transformers import Ernie4_5_MoeConfig as Config
    from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter as Router

    router = Router(Config(hidden_size=HIDDEN, moe_num_experts=32, moe_k=6))
    correction = torch.rand(32) / 10
    router.moe_statics.e_score_correction_bias.data.copy_(correction[None])
    return router, 6, {"correction": correction, "renormalize": True}, ()


def phimoe():
    from transformers import PhimoeConfig as Config
    from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter as Router

    router = Router(Config(hidden_size=HIDDEN, num_local_experts=16, router_jitter_noise=0.2))
    return router, 2, {"score": "sparsemixer", "jitter": 0.2}, ()


def gpt_oss():
    from transformers import GptOssConfig as Config
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter as Router

    router = Router(Config(hidden_size=HIDDEN, num_local_experts=32, num_experts_per_tok=4))
    torch.nn.init.normal_(router.bias)
    return router, 4, {"score": "top", "bias": router.bias}, ()


ROUTERS = [
    mixtral, qwen3, qwen3_not_normalized, deepseek_v3, glm4, minimax_m2, ernie, phimoe, gpt_oss
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("implementation", [ref, kernel], ids=["ref", "triton"])
@pytest.mark.parametrize("router", ROUTERS)
def test_equals_transformers(device, implementation, router):
    """Experts may come in another order there."""
    theirs, top_k, rules, others = router()
    theirs.eval()
    weight = torch.nn.init.normal_(theirs.weight)
    x = torch.randn(TOKENS, HIDDEN) * 0.3
    _, want, experts = (None, *theirs(x, *others)[-2:])
    rules = {name: rule.to(device) if torch.is_tensor(rule) else rule for name, rule in rules.items()}
    found = run(implementation.route, x.to(device), weight.to(device), top_k, **rules)
    weights, chosen = (tensor.cpu() for tensor in found)
    size = TOKENS, weight.shape[0]
    ours = torch.zeros(size).scatter_(1, chosen.long(), weights)
    torch.testing.assert_close(ours, torch.zeros(size).scatter_(1, experts, want), rtol=1e-5, atol=1e-7)


@torch.no_grad()
def test_equals_llama4():
    """Its router gives sigmoids of all experts, 0 where one is not chosen."""
    from transformers import Llama4TextConfig as Config
    from transformers.models.llama4.modeling_llama4 import Llama4Router

    router = Llama4Router(Config(hidden_size=HIDDEN, num_local_experts=16, num_experts_per_tok=2))
    x = torch.randn(TOKENS, HIDDEN)
    weights, chosen = run(route, x, router.weight, 2, score="sigmoid")
    ours = torch.zeros(TOKENS, 16).scatter_(1, chosen.long(), weights)
    torch.testing.assert_close(ours, router(x)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts, top_k", [(8, 2), (128, 8), (256, 8), (512, 10)])
@pytest.mark.parametrize("tokens", [1, 16, 100, 1024, 8192])
def test_model_sizes(device, tokens, experts, top_k, dtype):
    """Experts that differ by less than the error of fp32 sums may change places."""
    x, weight, _ = case(experts, {}, tokens, 2048, device, dtype)
    logits = x.double() @ weight.double().T
    weights, chosen = run(kernel.route, x, weight, top_k)
    picked, best = logits.gather(1, chosen.long()), logits.topk(top_k).values
    torch.testing.assert_close(picked, best, rtol=0, atol=2e-5)
    want = logits.softmax(1).gather(1, chosen.long())
    torch.testing.assert_close(weights.double(), want, rtol=1e-4, atol=1e-9)
    assert all(map(torch.equal, run(kernel.route, x, weight, top_k), (weights, chosen)))
