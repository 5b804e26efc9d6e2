"""Products by digits for the tokens of several experts, against fp64 on the canonical weights."""

import pytest
import torch
from linear_truth import UNIT
from test_linear_experts import UNEVEN, chosen_of, places_of, read_by, stack_of

from backends import GPU
from qrt.kernels.linear.shared.places import Grouped
from qrt.kernels.linear.tiles import digits_kernel
from qrt.kernels.linear.tiles.digits_kernel import digits_experts, gated_digits_experts
from qrt.kernels.linear.tiles.make_digits_kernel import place_digits
from qrt.layers.activations import ACTIVATIONS
from random_weights import relative

BF16 = torch.bfloat16
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory", "two_multiprocessors", "copies")]


@pytest.fixture
def two_multiprocessors(monkeypatch):
    """Programs take several outputs in turn."""
    monkeypatch.setattr(digits_kernel, "multiprocessors", lambda device: 2)


CASES = [(8, 256, 200, UNEVEN), (16, 640, 384, UNEVEN), (8, 384, 256, [0, 0, 48, 0])]


@pytest.mark.ptx(symmetric=[False])
@pytest.mark.parametrize("block, hidden, n, counts", CASES)
@pytest.mark.parametrize("symmetric, biased, weighted", [(True, False, True), (False, True, False)])
def test_rows_of_assignments(device, symmetric, biased, weighted, block, hidden, n, counts):
    """Each token is read where it lies, and its product stored where its assignment belongs."""
    stack = stack_of(len(counts), n, hidden, 4, 128, symmetric, BF16, device)
    places = places_of(chosen_of(counts, 16, device), len(counts), block)
    _, expert, assignment = read_by(places)
    x = (torch.randn(16, hidden, device=device) + 0.3).to(BF16)
    weights = torch.rand(48, device=device)
    bias = torch.randn(len(counts), n, device=device).to(BF16) if biased else None
    want = torch.einsum("pk,pnk->pn", x[assignment // 3].double(), stack.matrices[expert])
    if bias is not None:
        want += bias[expert].double()
    if weighted:
        want *= weights[assignment, None]
    row, made = assignment % 3 * 16 + assignment // 3, place_digits(x, Grouped(places, 3))
    group = Grouped(places, 0, 3, weights if weighted else None)
    for result in (torch.float32, BF16):
        y, again = torch.empty(2, 48, n, dtype=result, device=device)
        digits_experts(made, stack.tiles, bias, 4, y, group)
        assert relative(y[row], want) < (1e-4 if result is torch.float32 else UNIT[BF16])
        for _ in range(3 if GPU else 1):
            digits_experts(made, stack.tiles, bias, 4, again, group)
            assert torch.equal(again, y)


@pytest.mark.ptx
@pytest.mark.parametrize("block, inner", [(8, 128), (16, 384)])
def test_gate_and_up_leave_as_digits(device, block, inner):
    """Rounded as in bf16; of weighted input too."""
    stack = stack_of(len(UNEVEN), 2 * inner, 640, 4, 128, False, BF16, device)
    places = places_of(chosen_of(UNEVEN, 16, device), len(UNEVEN), block)
    live, expert, assignment = read_by(places)
    x, weights = torch.randn(16, 640, device=device).to(BF16), torch.rand(48, device=device)
    for given in (None, weights):
        read = x[assignment // 3]
        if given is not None:
            read = (read.float() * given[assignment, None]).to(BF16)
        made = place_digits(x, Grouped(places, 3), given)
        y = gated_digits_experts(made, stack.tiles, None, 4, "silu", Grouped(places, 0))
        gate, up = torch.einsum("pk,pnk->pn", read.double(), stack.matrices[expert]).chunk(2, dim=1)
        read_back = [y._replace(codes=c, facts=f, tokens=block).read() for c, f in zip(*y[:2], strict=True)]
        assert relative(torch.cat(read_back)[live], ACTIVATIONS["silu"](gate) * up) < 4 * UNIT[BF16]
