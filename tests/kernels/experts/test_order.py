"""The order of assignments by expert against a sort in Python."""

import pytest
import torch

from qrt.kernels.experts import order_kernel
from qrt.kernels.experts.order_kernel import most_blocks, order

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def check(chosen, experts, block):
    """By expert, then by assignment; each expert's padded to whole blocks, blocks beyond the last too."""
    places = order(chosen, experts, block)
    count, assignments = chosen.numel(), [[] for _ in range(experts)]
    for a, expert in enumerate(chosen.flatten().tolist()):
        assignments[expert].append(a)
    want, owners = [], []
    for expert, own in enumerate(assignments):
        whole = -(-len(own) // block)
        want += own + [count] * (whole * block - len(own))
        owners += [expert] * whole
    left = most_blocks(count, experts, block) - len(owners)
    assert left >= 0 and (places.block, places.assignments) == (block, count)
    assert places.experts.tolist() == owners + [-1] * left
    assert places.order.tolist() == want + [count] * (left * block)
    return left


@pytest.mark.ptx
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("tokens, top_k, experts, block", [
    (1, 1, 8, 8), (5, 2, 8, 8), (33, 3, 12, 16), (70, 2, 5, 32), (9, 8, 128, 8), (150, 1, 3, 64),
    (40, 1, 300, 8), (64, 8, 128, 8),
])  # fmt: skip
def test_order(device, monkeypatch, tokens, top_k, experts, block, many):
    monkeypatch.setattr(order_kernel, "FEW", 0 if many else 1 << 16)
    monkeypatch.setattr(order_kernel, "CHUNK", 8 if many else 64)
    monkeypatch.setattr(order_kernel, "MOST_CHUNK", 32)
    monkeypatch.setattr(order_kernel, "PROGRAMS", 8)
    check(torch.rand(tokens, experts).argsort(1)[:, :top_k].int().to(device), experts, block)


@pytest.mark.parametrize("many", [False, True])
def test_all_tokens_to_one_expert(device, monkeypatch, many):
    monkeypatch.setattr(order_kernel, "FEW", 0 if many else 1 << 16)
    for expert in (0, 5, 7):
        check(torch.full((75, 1), expert, dtype=torch.int32, device=device), 8, 8)


def test_the_fullest_case_fits(device):
    """Each expert has one assignment more than whole blocks: no block is left."""
    chosen = torch.arange(8, device=device).repeat(9)[:, None].int()
    assert check(chosen, 8, 8) == 0
    assert check(chosen[:8], 8, 8) == 0
    assert check(chosen[:3], 8, 8) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, top_k, experts, block", [
    (64, 8, 128, 8), (1024, 8, 128, 64), (8192, 8, 128, 128), (8192, 8, 256, 64), (8192, 10, 512, 64),
    (8192, 1, 16, 128),
])  # fmt: skip
def test_model_sizes(device, tokens, top_k, experts, block):
    chosen = torch.rand(tokens, experts, device=device).argsort(1)[:, :top_k].int()
    check(chosen, experts, block)
    chosen[:] = torch.arange(top_k, device=device)
    check(chosen, experts, block)
