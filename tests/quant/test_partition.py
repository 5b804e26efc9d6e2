"""Weights cut along their inputs: the parts compute what the whole does, whatever the order of its inputs."""

import pytest
import torch

from qrt.arch.shard import Shard, channels
from qrt.quant.weight import WEIGHT_SCHEMES, WeightData
from qrt.quant.weight.partition import inputs
from random_weights import random_mxfp4, random_weight

CPU = torch.device("cpu")


def summed(weight, edges, x):
    """The sum in fp64 of the parts' products, each with its inputs."""
    parts = [inputs(weight, *pair) for pair in zip(edges, edges[1:], strict=False)]
    return parts, sum(
        x[:, first : first + part.dequantize().shape[1]] @ part.dequantize().double().T
        for first, part in zip(edges, parts, strict=False)
    )


@pytest.mark.parametrize("seed", range(40))
def test_parts_compute_the_whole(seed):
    """Random sizes, groups, ranks and symmetry; half of them in an order of their own."""
    random = torch.Generator().manual_seed(seed)

    def draw(*choices):
        return choices[int(torch.randint(len(choices), (), generator=random))]

    group, bits, ranks, n = draw(32, 64, 128, None), draw(4, 8), draw(2, 3, 4, 8), draw(1, 5, 48)
    k = draw(8, 11, 29) * (group or 128)
    perm, symmetric = group is not None and seed % 2 == 0, draw(True, False)
    weight = random_weight(n, k, bits, group, symmetric=symmetric, perm=perm, seed=seed)
    if draw(True, False):  # heads, else units of an mlp
        edges = [k * rank // ranks // 8 * 8 for rank in range(ranks)] + [k]
    else:
        edges = [channels(k, Shard(rank, ranks)).start for rank in range(ranks)] + [k]
    x = torch.randn(3, k, generator=random, dtype=torch.float64)
    want = x @ weight.dequantize().double().T
    parts, got = summed(weight, edges, x)
    assert (got - want).abs().max() <= 1e-12 * want.abs().max()
    whole = weight.dequantize()
    assert torch.equal(torch.cat([part.dequantize() for part in parts], 1), whole)
    assert all(part.in_features % 32 == 0 for part in parts) or group is None


@pytest.mark.parametrize("symmetric", [True, False])
def test_whole_groups_stay_as_they_are(symmetric):
    weight = random_weight(48, 640, 4, 128, symmetric=symmetric)
    part = inputs(weight, 256, 640)
    assert part.perm is None and torch.equal(part.values, weight.values[:, 256:])
    assert torch.equal(part.scale, weight.scale[:, 2:])
    assert symmetric or torch.equal(part.zero, weight.zero[:, 2:])


def test_parted_groups_become_smaller():
    part = inputs(random_weight(8, 512, 4, 128), 64, 320)
    assert part.perm is None and part.scale.shape == (8, 4) and part.in_features == 256


def test_unquantized_and_mxfp4():
    values = torch.randn(4, 96)
    assert torch.equal(inputs(WeightData(values), 32, 80).values, values[:, 32:80])
    floats = random_mxfp4(8, 128)
    for first, last in ((32, 96), (16, 80)):  # at the edges of groups, and inside them
        got = inputs(floats, first, last)
        assert torch.equal(got.dequantize(), floats.dequantize()[:, first:last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name, symmetric", [
    ("w4a16", False), ("w4a16", True), ("w8a16", True), ("w4a8", False), ("w4a8", True),
])  # fmt: skip
def test_schemes_multiply_parts_with_padding(name, symmetric, dtype):
    """`prepare` and the CPU's own layouts take more columns than there are inputs."""
    scheme = WEIGHT_SCHEMES[name]
    weight = random_weight(
        64, 512, scheme.spec.bits, 128, symmetric=symmetric, perm=True, dtype=dtype,
        progressive=scheme.spec.progressive,
    )  # fmt: skip
    part = inputs(weight, 128, 256)
    assert part.in_features > 128 == int(part.perm.max()) + 1
    x = torch.randn(5, 128).to(dtype)
    want = x.double() @ part.dequantize().double().T
    for tensors in (scheme.prepare(part, CPU, dtype), scheme.prepare_cpu(part, dtype)):
        got = scheme.linear_cpu(x, tensors, None).double()
        exact = dtype == torch.float32 and not scheme.int8_tokens
        assert (got - want).norm() < (1e-5 if exact else 2e-2) * want.norm()
