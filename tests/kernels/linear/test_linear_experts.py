"""Hopper's product over tiles for the tokens of several experts, against fp64 on the canonical weights."""

from typing import NamedTuple

import pytest
import torch
from linear_truth import HALF, UNIT
from torch import Tensor

from backends import GPU, PTX
from qrt.definitions.activations import ACTIVATIONS
from qrt.kernels.linear.shared.places import Grouped, Places
from qrt.kernels.linear.tiles import wide_kernel
from qrt.kernels.linear.tiles.device import constants_of
from qrt.kernels.linear.tiles.plans import WidePlan
from qrt.quant.weight import WEIGHT_SCHEMES, WeightData
from qrt.quant.weight.tiles import TiledWeight
from random_weights import random_weight, relative

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory", "small_gpu", "copies")]


def places_of(chosen: Tensor, experts: int, block: int) -> Places:
    """Return assignments by expert, each expert's padded to whole blocks, and three blocks too many."""
    order, owners, flat = [], [], chosen.flatten()
    for expert in range(experts):
        mine = (flat == expert).nonzero().flatten()
        filled = -(-len(mine) // block)
        order += [mine, mine.new_full((filled * block - len(mine),), len(flat))]
        owners += [expert] * filled
    order.append(flat.new_full((3 * block,), len(flat)))
    owners = torch.tensor(owners + [-1] * 3, dtype=torch.int32, device=chosen.device)
    return Places(torch.cat(order).int(), owners, block, len(flat))


def read_by(places: Places) -> tuple[Tensor, Tensor, Tensor]:
    """Return which places are live, the expert of each of those, and its assignment."""
    live = places.order < places.assignments
    return live, places.experts.repeat_interleave(places.block)[live], places.order[live].long()


def chosen_of(counts: list[int], tokens: int, device) -> Tensor:
    """Return experts [tokens, k] that so many assignments each have chosen, in random order."""
    flat = torch.cat([torch.full((count,), expert) for expert, count in enumerate(counts)])
    return flat[torch.randperm(len(flat))].view(tokens, -1).int().to(device)


class Stack(NamedTuple):
    """Weights of experts, stacked as they run, and as fp64 matrices."""

    tiles: TiledWeight
    constants: object
    matrices: Tensor


def stack_of(experts, n, k, bits, group, symmetric, dtype, device) -> Stack:
    scheme = WEIGHT_SCHEMES[f"w{bits}a16"]
    weights: list[WeightData] = [
        random_weight(n, k, bits, group, symmetric=symmetric, dtype=dtype, device=device, seed=seed)
        for seed in range(experts)
    ]
    made = [TiledWeight(*scheme.prepare(weight, device, dtype)) for weight in weights]
    tiles = TiledWeight(*(torch.stack(tensors) for tensors in zip(*made, strict=True)))
    matrices = torch.stack([weight.dequantize().double() for weight in weights])
    return Stack(tiles, constants_of(made[0], bits, scheme.unpacker()), matrices)


UNEVEN = [9, 0, 1, 30, 0, 8]  # 48 assignments
PLANS = [  # N, K, group and a plan: ragged last programs, both widths of a tile, every kind of group
    (4, 200, 640, 128, (8, 4, 1, 4, 2, 3, 4, 1)), (4, 70, 320, 32, (16, 2, 1, 2, 3, 2, 2, 1)),
    (8, 130, 448, 64, (8, 1, 1, 2, 3, 3, 1, 2)), (4, 190, 384, None, (32, 2, 1, 1, 4, 2, 1, 1)),
    (8, 70, 256, 128, (64, 4, 1, 2, 2, 2, 2, 1)),
]  # fmt: skip


@pytest.mark.ptx(symmetric=[False], dtype=HALF[1:], counts=[UNEVEN])
@pytest.mark.ptx(symmetric=[True], dtype=HALF[:1], n=[70], counts=[[0, 0, 0, 48, 0, 0]])
@pytest.mark.parametrize("counts", [UNEVEN, [0, 0, 0, 48, 0, 0]], ids=["uneven", "one"])
@pytest.mark.parametrize("bits, n, k, group, plan", PLANS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_rows_of_assignments(device, dtype, symmetric, bits, n, k, group, plan, counts):
    """Each row is multiplied by its expert, weighted, and stored where its assignment belongs."""
    stack = stack_of(len(counts), n, k, bits, group, symmetric, dtype, device)
    chosen, plan = chosen_of(counts, 16, device), WidePlan(*plan)
    places = places_of(chosen, len(counts), plan.tokens)
    x = torch.empty(len(places.order), k, dtype=dtype, device=device)  # NaN where it is padding
    live, expert, assignment = read_by(places)
    x[live] = torch.randn(len(assignment), k, device=device).to(dtype)
    bias = torch.randn(len(counts), n, device=device).to(dtype)
    weights = torch.rand(48, device=device)
    want = torch.einsum("pk,pnk->pn", x[live].double(), stack.matrices[expert]) + bias[expert].double()
    row = assignment % 3 * 16 + assignment // 3
    kinds = [(None, torch.float32), (weights, dtype), (None, dtype), (weights, torch.float32)]
    for given, result in kinds[: 2 if PTX else 4]:
        y, group = torch.empty(48, n, dtype=result, device=device), Grouped(places, 0, 3, given)
        multiply = wide_kernel.wide_experts(x, stack.tiles, bias, stack.constants, plan, None, group)
        multiply(x, bias, y, group)
        exact = want if given is None else want * given[assignment, None]
        assert relative(y[row], exact) < 2 * UNIT[dtype]


@pytest.mark.ptx(bits=[4], symmetric=[False])
@pytest.mark.ptx(bits=[8], symmetric=[True], inner=[64])
@pytest.mark.parametrize("inner, plan", [
    (64, (8, 2, 1, 2, 4, 3, 2, 1)), (192, (16, 4, 1, 2, 3, 2, 4, 1)), (128, (32, 2, 1, 2, 3, 2, 1, 1)),
    (128, (64, 4, 1, 1, 3, 2, 2, 1)),
])  # fmt: skip
@pytest.mark.parametrize("bits, symmetric", [(4, False), (8, True)])
def test_gate_and_up_of_experts(device, bits, symmetric, inner, plan):
    dtype, counts, plan = HALF[1], UNEVEN, WidePlan(*plan)
    stack = stack_of(len(counts), 2 * inner, 384, bits, 128, symmetric, dtype, device)
    places = places_of(chosen_of(counts, 16, device), len(counts), plan.tokens)
    x = torch.empty(len(places.order), 384, dtype=dtype, device=device)
    live, expert, assignment = read_by(places)
    x[live] = torch.randn(len(assignment), 384, device=device).to(dtype)
    bias = torch.randn(len(counts), 2 * inner, device=device).to(dtype)
    product = torch.einsum("pk,pnk->pn", x[live].double(), stack.matrices[expert])
    for given in (None, bias):
        y = torch.empty(len(x), inner, dtype=dtype, device=device)
        group = Grouped(places, 0)
        multiply = wide_kernel.wide_experts(x, stack.tiles, given, stack.constants, plan, "silu", group)
        multiply(x, given, y, group)
        exact = product if given is None else product + bias[expert].double()
        gate, up = exact.chunk(2, dim=1)
        assert relative(y[live], ACTIVATIONS["silu"](gate) * up) < 8 * UNIT[dtype]
        again = torch.empty_like(y)
        for _ in range(3 if GPU else 1):
            multiply(x, given, again, group)
            assert torch.equal(again[live], y[live])
