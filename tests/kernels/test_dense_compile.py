"""The kernels of linear, the norms and act_mul compile for a GPU, on a machine that has none."""

import pytest
import torch
from offline_cuda import compiled

CODE = """
import torch
from qrt.kernels import gpu
gpu.overlaps = lambda device: True  # as on the GPU that is compiled for
from random_weights import random_weight
from qrt.kernels.linear import choose, kernel
from qrt.kernels.linear.int8.hopper_kernel import hopper_product
from qrt.kernels.linear.int8.plans import HopperPlan
from qrt.kernels.linear.tiles import plans as tile_plans
from qrt.kernels.linear.tiles.device import constants_of
from qrt.kernels.linear.shared.places import Grouped, Places
from qrt.kernels.linear.tiles.wide_kernel import wide_experts, wide_product
from qrt.kernels.all_reduce.kernel import all_reduce_max
from qrt.kernels.layernorm.kernel import add_layernorm
from qrt.kernels.peer_memory import Memory
from qrt.kernels.rmsnorm.kernel import add_rmsnorm, embed_rmsnorm, rmsnorm
from qrt.kernels.act_mul.kernel import act_mul, act_mul_int8
from qrt.quant.tokens import QuantizedTokens
from qrt.quant.weight import WEIGHT_SCHEMES
from qrt.quant.weight.tiles import TiledWeight

torch.mm = lambda *a, **k: None  # of a many-token product only the dequantization is wanted
BF16, FP16 = torch.bfloat16, torch.float16
for scheme, bits, symmetric, group, dtype, tokens in (
    ("w4a16", 4, False, 128, BF16, 1), ("w4a16", 4, True, 32, FP16, 64), ("w8a16", 8, False, 128, BF16, 16),
    ("w8a8", 8, True, None, BF16, 1), ("w8a16", 8, True, None, FP16, 200),
    ("w4a16", 4, True, 32, FP16, 300), ("w8a16", 8, True, None, BF16, 300),
    ("w4a16", 4, False, 128, BF16, 200), ("w8a8", 8, True, None, FP16, 100),
)[::STEP]:
    weight = random_weight(128, 1024, bits, group, symmetric=symmetric, dtype=dtype)
    tensors = WEIGHT_SCHEMES[scheme].prepare(weight, torch.device("cpu"), dtype)
    kernel.linear(torch.empty(tokens, 1024, dtype=dtype), tensors, None, scheme)
choose.tile_plan = lambda *weight: choose.Product(choose.Kernel.FUSED, "", tile_plans.FusedPlan(2, 1, 4, 3))
for scheme, bits, tokens in (("w4a16", 4, 16), ("w8a16", 8, 32)):
    weight = random_weight(256, 1024, bits, 128, symmetric=False, dtype=BF16)
    tensors = WEIGHT_SCHEMES[scheme].prepare(weight, torch.device("cpu"), BF16)
    kernel.linear_act(torch.empty(tokens, 1024, dtype=BF16), tensors, None, scheme, "silu")
for scheme, symmetric, group, dtype, plan in (
    ("w4a16", False, 128, BF16, (256, 2, 1, 1, 4, 2, 1, 1)), ("w8a16", True, 128, BF16, (128, 1, 2, 2, 3, 3)),
    ("w4a16", False, 32, FP16, (64, 1, 1, 2, 3, 3)), ("w4a16", False, 128, BF16, (64, 4, 1, 2, 3, 4, 4)),
    ("w4a16", False, 128, BF16, (128, 1, 2, 2, 2, 2, 2)),
)[::STEP]:
    weight = random_weight(128, 1024, int(scheme[1]), group, symmetric=symmetric, dtype=dtype)
    scheme, plan = WEIGHT_SCHEMES[scheme], tile_plans.WidePlan(*plan)
    gated = bool(plan.persistent or plan.blocks == 4)
    act = "silu" if gated else None
    x, y = torch.empty(300, 1024, dtype=dtype), torch.empty(300, 128 // (1 + gated), dtype=dtype)
    tensors = TiledWeight(*scheme.prepare(weight, torch.device("cpu"), dtype))
    constants = constants_of(tensors, scheme.bits, scheme.unpacker())
    wide_product(x, tensors, None, constants, plan, act)(x, None, y)
for block, bits, group, act in (
    (32, 4, 32, "silu"), (32, 8, 128, "silu"), (64, 4, 128, None), (128, 4, 128, None), (256, 4, 128, "silu"),
)[::STEP]:
    scheme, dtype = WEIGHT_SCHEMES[f"w{bits}a16"], torch.float32 if act is None else BF16
    weight, order = random_weight(128, 512, bits, group, dtype=BF16), torch.zeros(block, dtype=torch.int32)
    one = TiledWeight(*scheme.prepare(weight, torch.device("cpu"), BF16))
    weight = TiledWeight(*(tensor[None] for tensor in one))
    shares = (0, None) if act else (2, torch.empty(block))
    places = Grouped(Places(order, order[:1], block, block), 0, *shares)
    plan = tile_plans.expert_plan(block, 128, 24, one.packed.shape[3], 132)
    x, y = torch.empty(block, 512, dtype=BF16), torch.empty(block, 64 if act else 128, dtype=dtype)
    constants = constants_of(one, bits, scheme.unpacker())
    wide_experts(x, weight, None, constants, plan, act, places)(x, None, y, places)
x = QuantizedTokens(torch.empty(300, 1024, dtype=torch.int8), torch.empty(300), BF16)
weight = torch.empty(128, 1024, dtype=torch.int8), torch.empty(128), torch.zeros(128, dtype=torch.int32)
for plan, gated, shares in (
    ((128, 256, 1, 4), False, False), ((64, 128, 2, 6), False, False),
    ((64, 64, 2, 12), False, True), ((16, 64, 2, 8), False, True),
    ((128, 256, 1, 4), True, False), ((64, 128, 1, 6), True, False), ((16, 128, 1, 6), True, False),
    ((128, 128, 1, 3, 2), True, False),
)[::STEP]:
    plan = HopperPlan(*plan)
    hopper_product(x, weight, None, plan, "silu" if gated else None, shares)(x, None)
rmsnorm(torch.empty(9, 12, 128, dtype=BF16)[:, :8], torch.empty(128, dtype=BF16), 1e-5)
add_rmsnorm(*torch.empty(2, 9, 8192, dtype=FP16), torch.empty(8192, dtype=FP16), 1e-5)
add_layernorm(*torch.empty(2, 9, 8192, dtype=BF16), *torch.empty(2, 8192, dtype=BF16), 1e-5)
add_rmsnorm(torch.empty(9, 8192, dtype=FP16), torch.empty(2, 9, 8192), torch.empty(8192, dtype=FP16), 1e-5)
table = torch.empty(99, 4096, dtype=BF16)
embed_rmsnorm(torch.zeros(9, dtype=torch.int64), table, table[0], 1e-5)
words = Memory.of([16, 32], 0, 16, 32768, table.device).words
for tokens in (1, 9):
    x, residual = torch.empty(2, tokens, 8192), torch.empty(tokens, 8192, dtype=BF16)
    add_rmsnorm(residual, x, residual[0], 1e-5, None, 0.0, 1.0, words)
all_reduce_max(torch.zeros(9, dtype=torch.int64), words)
act_mul(torch.empty(9, 28672, dtype=BF16), "silu")
act_mul_int8(torch.empty(9, 28672, dtype=BF16), "silu")
"""


ALL = {
    "_fused": 5, "wide": 10, "_dequantize": 4, "_quantize_tokens": 2, "multiply_rows": 2, "_hopper_int8": 8,
    "_rmsnorm": 7, "_largest": 1, "_act_mul": 1, "_act_mul_int8": 1,
}  # fmt: skip
SOME = ALL | {
    "_fused": 3, "wide": 4, "_dequantize": 1, "_quantize_tokens": 1, "multiply_rows": 1, "_hopper_int8": 3,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile for the GPU that is here")
@pytest.mark.parametrize(
    "step, counts", [(3, SOME), pytest.param(1, ALL, marks=pytest.mark.exhaustive)], ids=["some", "all"]
)
def test_dense_kernels_compile(step, counts):
    """Every kernel, for every third of the sizes; all are exhaustive."""
    assert compiled(f"STEP = {step}\n{CODE}") == counts
