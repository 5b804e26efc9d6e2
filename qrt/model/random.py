"""A decoder with random weights, made on the device in seconds: users' sizes without a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from zlib import crc32

import torch
from torch import Tensor

from qrt.arch import Arch
from qrt.definitions.stacks import Stack
from qrt.layers.experts import ExpertLinear
from qrt.layers.linear import Linear
from qrt.model.build import build
from qrt.model.decoder import Decoder
from qrt.quant import e2m1
from qrt.quant.progressive import round_channel
from qrt.quant.spec import Codes, Granularity, QuantSpec
from qrt.quant.weight import WEIGHT_SCHEMES, WeightData
from qrt.quant.weight.head import head_grid

STEPS = (5, 15)  # of progressive groups, and behind the last: as spread as other scales, in int8 for any zero


def random_model(
    arch: Arch,
    scheme: str,
    group_size: int | None = None,
    symmetric: bool | None = None,
    *,
    head_bits: int = 16,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
) -> Decoder:
    """Make a decoder of `arch`'s sizes with random weights, its layers in `scheme`.

    The embedding stays in `dtype`, and so does the head, unless `head_bits` is 8 (`qrt.quant.weight.head`):
    then it is not tied, whatever `arch` says.

    Of a mixture in "mxfp4" only the experts are so quantized, as in the checkpoints that are published.
    `group_size` and `symmetric` replace those of the scheme's grid. Weights have variance 1/K, so activations
    stay of order one through any depth. Raises as the scheme does for a grid it does not run.
    """
    spec = WEIGHT_SCHEMES[scheme].spec
    if spec is not None and group_size is not None:
        spec = replace(spec, granularity=Granularity.GROUP, group_size=group_size)
    if spec is not None and symmetric is not None:
        spec = replace(spec, symmetric=symmetric)
    head = head_grid(scheme, head_bits)
    if head_bits != 16:
        arch = replace(arch, tied_embeddings=False)

    def grid(module: str) -> tuple[str, QuantSpec | None]:
        if module == arch.names.head:
            return head
        if spec is not None and spec.codes is Codes.E2M1 and not _is_expert(arch, module):
            return "fp16", None
        return scheme, spec

    return build(arch, RandomWeights(grid, device, dtype, seed), progress="Making weights")


def _is_expert(arch: Arch, module: str) -> bool:
    """Return whether `module` belongs to a mixture's experts; true of all modules without a mixture."""
    return arch.experts is None or f".{arch.experts.module}." in module


class RandomWeights:
    """A WeightSource: uniform codes, and scales that give the weight variance 1/K."""

    def __init__(
        self,
        grid: Callable[[str], tuple[str, QuantSpec | None]],
        device: torch.device,
        dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        """`grid` is the scheme and the grid (None: unquantized) of a Linear's name."""
        self.grid = grid
        self.device = device
        self.dtype = dtype
        self.seed, self.random = seed, torch.Generator(device)

    def linear(self, stack: Stack) -> Linear:
        """One Linear of all parts, on the grid of the first."""
        scheme, _ = self.grid(stack.modules[0])
        return Linear.pack(scheme, self._weight(stack), self.device, self.dtype)

    def experts(self, stacks: Sequence[Stack]) -> ExpertLinear:
        """Linears of all experts, on the grid of the first."""
        scheme, _ = self.grid(stacks[0].modules[0])
        each = (self._weight(stack) for stack in stacks)
        return ExpertLinear.pack(scheme, each, len(stacks), self.device, self.dtype)

    def _weight(self, stack: Stack) -> WeightData:
        out, in_features = stack.shape
        first = None if stack.places is None else int(stack.places[0])
        self._begin(*stack.modules, *map(str, (stack.expert, stack.inputs, first)))
        bias = self._normal((out,), 0.1) if stack.bias else None
        _, spec = self.grid(stack.modules[0])
        if spec is None:
            return WeightData(self._normal((out, in_features), in_features**-0.5), bias=bias)
        group = spec.group_of(stack.in_features)
        if group == stack.in_features:
            return self._codes(out, in_features, spec, 1, bias)
        group = math.gcd(group, *(stack.inputs or ()))  # one that a cut parts becomes smaller
        return self._codes(out, in_features, spec, in_features // group, bias)

    def head(self, stack: Stack, *, unit: bool) -> Linear:
        """Return a head as any Linear; its rows have nearly one length."""
        return self.linear(stack)

    def has(self, name: str) -> bool:
        """Return False: what a checkpoint may leave out is not there."""
        return False

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Norm weights and other vectors of one; an embedding of unit variance."""
        if math.prod(shape) == max(shape, default=1):
            return torch.ones(shape, device=self.device, dtype=self.dtype)
        self._begin(name)
        return self._normal(shape, 1.0)

    def _begin(self, *names: str) -> None:
        """Begin the random numbers of a tensor, so that ranks have the same ones of what is whole on each."""
        self.random.manual_seed(self.seed + crc32(" ".join(names).encode()))

    def _normal(self, shape: tuple[int, ...], deviation: float) -> Tensor:
        x = torch.empty(shape, device=self.device, dtype=self.dtype)
        return x.normal_(0, deviation, generator=self.random)

    def _codes(
        self, out: int, in_features: int, spec: QuantSpec, of_row: int, bias: Tensor | None
    ) -> WeightData:
        """Return uniform codes in `of_row` groups a row, integers but the lowest: zero on average.

        Else every product adds to one direction, in which all tokens agree after some layers: then they
        choose the same experts. The codes' variance is ((levels - 1)^2 - 1) / 12; scales make it about 1/K.
        """
        groups = (out, of_row)
        floats = spec.codes is Codes.E2M1
        codes = self._integers(0 if floats else 1, spec.levels, (out, in_features))
        zero = None if spec.symmetric else self._integers(spec.midpoint - 1, spec.midpoint + 2, groups)
        variance = e2m1.MEAN_SQUARE if floats else ((spec.levels - 1) ** 2 - 1) / 12
        scale = torch.rand(groups, generator=self.random, dtype=torch.float32, device=self.device) + 0.5
        scale *= (variance * in_features) ** -0.5
        if spec.progressive:
            steps = self._integers(*STEPS, groups)
            scale = steps * round_channel(scale[:, :1] * (2 / sum(STEPS)), self.dtype)
        scale = scale.log2().round().exp2().bfloat16() if floats else scale.to(self.dtype)
        return WeightData(codes, scale, zero, bias=bias, bits=spec.bits, codes=spec.codes)

    def _integers(self, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high, shape, generator=self.random, device=self.device, dtype=torch.uint8)
