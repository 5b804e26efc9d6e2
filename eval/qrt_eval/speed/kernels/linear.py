"""Time the four products of one decoder layer, and the head's, in every weight scheme."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from qrt.arch import Arch
from qrt.definitions.stacks import Stack, stacks
from qrt.kernels.linear import linear
from qrt.layers.linear import Linear
from qrt.model.random import RandomWeights
from qrt.quant.weight import WEIGHT_SCHEMES
from qrt_eval.speed.kernels.row import KernelRow
from qrt_eval.speed.kernels.timer import Rates, activation_dtype, copies, microseconds


def in_int8(scheme: str) -> bool:
    """Return whether the scheme's products are of int8 by int8."""
    return WEIGHT_SCHEMES[scheme].int8_tokens


def heads() -> set[str]:
    """Return the schemes that a head may have."""
    return {WEIGHT_SCHEMES[name].head or name for name in WEIGHT_SCHEMES}


def products(config: Arch) -> dict[str, tuple[int, int]]:
    """Return (K, N) of the fused Linears of the first layer that all tokens go through, by name."""
    found = stacks(config, 0)
    return {name: (stack.in_features, sum(stack.outs)) for name, stack in found.items()}


def head(config: Arch) -> tuple[int, int]:
    """Return (K, N) of the head."""
    return config.hidden_size, config.vocab_size


def rows(config: Arch, tokens: Sequence[int], rates: Rates, device: torch.device) -> Iterator[KernelRow]:
    """Yield a row per scheme, product and number of tokens, the sum of the four, and the head's row.

    Unquantized products are torch's. On a GPU, qrt's own unquantized head has rows too.
    """
    for scheme in WEIGHT_SCHEMES:
        plain = WEIGHT_SCHEMES[scheme].spec is None
        name = "bf16" if plain and device.type == "cuda" else scheme
        multiply = _by_torch if plain else linear
        cells = [
            row
            for product, size in products(config).items()
            for row in _product(scheme, f"{name} {product}", size, tokens, rates, device, multiply)
        ]
        yield from cells
        yield from sums(cells, name, tokens)
        if scheme in heads():
            yield from _product(scheme, f"{name} head", head(config), tokens, rates, device, multiply)
    if device.type == "cuda":
        yield from _product("fp16", "bf16 by qrt head", head(config), tokens, rates, device, linear)


def _product(
    scheme: str,
    name: str,
    size: tuple[int, int],
    tokens: Sequence[int],
    rates: Rates,
    device: torch.device,
    multiply: Callable[..., Tensor],
) -> Iterator[KernelRow]:
    k, n = size
    weights = cold_copies(random_linear(scheme, k, n, device))
    weight_bytes = _num_bytes(weights[0])
    for m in tokens:
        x = torch.randn(m, k, device=device, dtype=activation_dtype(device))
        us = microseconds(multiply, [(x, weight.tensors, None, scheme) for weight in weights])
        flops, num_bytes = 2 * m * n * k, weight_bytes + m * (n + k) * x.itemsize
        floor_us = rates.floor_us(num_bytes, flops, in_int8(scheme))
        yield KernelRow("linear", name, f"M={m}", us, floor_us, num_bytes, flops, ours=multiply is linear)


def _by_torch(x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None, scheme: str) -> Tensor:
    return F.linear(x, tensors[0], bias)


def random_linear(scheme: str, k: int, n: int, device: torch.device) -> Linear:
    """Make a weight [N, K] with the scheme's default grid."""
    weights = RandomWeights(
        lambda module: (scheme, WEIGHT_SCHEMES[scheme].spec), device, activation_dtype(device)
    )
    return weights.linear(Stack(("weight",), (n,), k))


def cold_copies(first: Linear) -> list[Linear]:
    """Return `first` and enough copies of it that none is read from the cache."""
    clones = (tuple(t.clone() for t in first.tensors) for _ in range(copies(_num_bytes(first)) - 1))
    return [first, *(Linear(first.scheme, tensors, first.bias) for tensors in clones)]


def sums(cells: Sequence[KernelRow], name: str, tokens: Sequence[int]) -> Iterator[KernelRow]:
    """Yield a row per number of tokens: what the products of `cells` take together."""
    for m in tokens:
        same = [cell for cell in cells if cell.at == f"M={m}"]
        yield KernelRow(
            "linear",
            f"{name} sum",
            f"M={m}",
            sum(cell.us for cell in same),
            sum(cell.floor_us for cell in same),
            sum(cell.num_bytes for cell in same),
            sum(cell.flops for cell in same),
            all(cell.ours for cell in same),
        )


def _num_bytes(weight: Linear) -> int:
    return sum(tensor.nbytes for tensor in weight.tensors)
