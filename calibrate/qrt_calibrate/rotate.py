"""Rotations that are folded into the weights: the model computes the same, its weights are spread evenly.

R1 turns the residual stream: the embedding and what writes to the stream gets Q behind it, what reads from it
Q^-1 before it. A norm commutes with Q when its gain is one, so gains go into their readers first (QuaRot,
arXiv:2404.00456). R2 turns the value heads, and back in the output projection (SpinQuant, arXiv:2405.16406).
Both are randomized Hadamard matrices. What a checkpoint's rotation leaves is a plain checkpoint again.

Tensors are rotated when they are read, in fp64 and a block of rows at a time, so nothing but the tensor that
is asked for is in memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from qrt.arch import Arch, ModelConfig
from qrt.errors import QrtError, UnsupportedError
from qrt.quant.checkpoint import Checkpoint
from qrt.quant.rotation import hadamard, signs
from qrt.quant.spec import TensorSpec
from qrt_calibrate.decoder import Decoder
from qrt_calibrate.fold import TOLERANCE
from qrt_calibrate.precision import EXACT, products
from qrt_calibrate.untie import UntiedCheckpoint

VALUE, OUTPUT = "self_attn.v_proj", "self_attn.o_proj"
BLOCK = 1 << 22  # elements that are rotated at a time
WIDEST_FACTOR = 64
GATE_TOKENS = 64


def turn(x: Tensor) -> Tensor:
    """x [..., n] @ Q, Q the orthogonal matrix of size n: fp64 [..., n].

    Q = diag(signs) (C ⊗ H ⊗ H ...): Hadamard matrices for the powers of two in n, the orthonormal cosines C
    for its odd part. Applied factor by factor, Q itself is never there.
    """
    size = x.shape[-1]
    turned, rest = x.double() * signs(size).to(x.device), size
    for factor in _factors(size):
        factor = factor.to(x.device)
        rest //= len(factor)
        if rest == 1:
            turned = turned.reshape(-1, len(factor)) @ factor
        else:
            turned = factor.T @ turned.reshape(-1, len(factor), rest)
    return turned.reshape(x.shape)


@lru_cache(maxsize=8)
def _factors(size: int) -> tuple[Tensor, ...]:
    power = size & -size
    factors = [_cosines(size // power)] if size > power else []
    while power > 1:
        width = min(power, WIDEST_FACTOR)
        factors.append(hadamard(width).double() * width**-0.5)
        power //= width
    return tuple(factors)


def _cosines(n: int) -> Tensor:
    """The orthonormal DCT-II matrix [n, n]."""
    positions = torch.arange(n, dtype=torch.float64)
    matrix = torch.cos(torch.outer(positions + 0.5, positions) * math.pi / n) * math.sqrt(2 / n)
    matrix[:, 0] = n**-0.5
    return matrix


class RotatedCheckpoint(Checkpoint):
    """A checkpoint as its rotations make it: other values under the same names, all else as `base` has it.

    A tied embedding is untied by R1, because the gain of the last norm goes into the head alone: there is a
    head then, and config.json says so. Weights in `exact` are given in fp32; they are to be rounded anyway.
    What else is rotated has its stored dtype. `device` computes, tensors come on the CPU.

    turns_stream   whether R1 is one of its rotations
    """

    def __init__(
        self,
        base: Checkpoint,
        arch: Arch,
        rotations: tuple[str, ...],
        exact: frozenset[str] = frozenset(),
        device: torch.device | str = "cpu",
    ) -> None:
        """UnsupportedError for a layer with a norm whose readers the architecture does not name."""
        if "R1" in rotations:
            base = UntiedCheckpoint(base, arch)
        self.path, self.quantization, self.base = base.path, base.quantization, base
        self.config = dict(base.config)
        self._shard_of = dict(base._shard_of)
        self._arch, self._exact, self._device = arch, exact, device
        self.turns_stream, self._turns_heads = "R1" in rotations, "R2" in rotations
        self._head_dim = ModelConfig.from_hf(base.config, arch).head_dim
        pairs = [pair for pair in arch.smooth if pair.source not in arch.projections]
        self._gain_of = {reader: pair.source for pair in pairs for reader in pair.readers}
        if self.turns_stream:
            self._check_norms()

    def spec(self, name: str) -> TensorSpec:
        """As stored: of the head that was the embedding, the embedding's."""
        return self.base.spec(name)

    def tensor(self, name: str, *checks: Any, **sizes: Any) -> Tensor:
        """A tensor as rotated, in its stored dtype, or in fp32 if it is one of `exact`; see TensorFolder for
        what is checked of the stored one."""
        self.base.tensor(name, *checks, **sizes)
        return self.rotated(name, torch.float32 if name in self._exact else self.spec(name).dtype)

    def rotated(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor as rotated, in `dtype`."""
        tensor = self.base.tensor(name)
        module, _, part = name.rpartition(".")
        inside = f"{self._arch.layers}."
        place = module.removeprefix(inside).partition(".")[2] if module.startswith(inside) else module
        if place in {self._arch.norm, *self._gain_of.values()}:
            return torch.ones_like(tensor, dtype=dtype) if self.turns_stream else tensor.to(dtype)
        if place == self._arch.embed and self.turns_stream:
            return self._turn_rows(tensor, None, dtype)
        if place == self._arch.head and self.turns_stream:
            return self._turn_rows(tensor, self.base.tensor(f"{self._arch.norm}.weight"), dtype)
        if place in self._arch.projections:
            return self._projection(tensor, module.removesuffix(place), place, part).to(dtype)
        return tensor.to(dtype)

    def _projection(self, tensor: Tensor, layer: str, place: str, part: str) -> Tensor:
        """A Linear of a layer, weight [N, K] or bias [N]: fp32 where anything is done."""
        if part == "weight" and place == OUTPUT and self._turns_heads:
            tensor = self._turn_rows(tensor.view(-1, self._head_dim), None, torch.float32).view(tensor.shape)
        if self.turns_stream and place in self._gain_of and part == "weight":
            gain = self.base.tensor(f"{layer}{self._gain_of[place]}.weight")
            tensor = self._turn_rows(tensor, gain, torch.float32)
        if self.turns_stream and place not in self._gain_of:  # it writes to the stream
            tensor = self._turn_columns(tensor)
        if place == VALUE and self._turns_heads:
            heads = tensor.view(-1, self._head_dim, *tensor.shape[1:])
            tensor = torch.stack([self._turn_columns(head) for head in heads]).view(tensor.shape)
        return tensor

    def _turn_rows(self, x: Tensor, gain: Tensor | None, dtype: torch.dtype) -> Tensor:
        """x [N, K] times `gain` [K], each row @ Q: `dtype` [N, K] on the CPU, block by block."""
        out = torch.empty(x.shape, dtype=dtype)
        rows = max(1, BLOCK // x.shape[-1])
        for own, block in zip(out.split(rows), x.split(rows), strict=True):
            block = block.to(self._device, torch.float64)
            own.copy_(turn(block if gain is None else block * gain.to(block)))
        return out

    def _turn_columns(self, x: Tensor) -> Tensor:
        """Q^T @ x [N, K], or x [N] @ Q: fp32."""
        return self._turn_rows(x.view(len(x), -1).T, None, torch.float32).T.reshape(x.shape)

    def _check_norms(self) -> None:
        """Every norm over the stream has readers; those over heads are left alone."""
        hidden = self.base.spec(f"{self._arch.norm}.weight").shape
        for name in self.base.names():
            layer, _, place = name.removeprefix(f"{self._arch.layers}.").partition(".")
            norm = place.removesuffix(".weight")
            inside = layer.isdigit() and place.endswith("norm.weight")
            if inside and norm not in self._gain_of.values() and self.base.spec(name).shape == hidden:
                raise UnsupportedError(
                    f"--rotations R1: {name} is a norm whose readers {self._arch.name} does not name; "
                    "leave R1 out"
                )


class Gate:
    """Runs layers as they were and as they are rotated, on random hidden states."""

    def __init__(self, checkpoint: RotatedCheckpoint, arch: Arch, device: torch.device) -> None:
        self._checkpoint, self._arch = checkpoint, arch
        self._decoder = Decoder(checkpoint, arch, GATE_TOKENS, device)

    @torch.no_grad()
    def check(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """QrtError unless rotated layer `index`, read as `tensors` (names inside it), adds to the rotated
        stream what the layer adds to the stream, in fp32."""
        checkpoint, prefix = self._checkpoint, f"{self._arch.layers}.{index}."
        width = checkpoint.spec(f"{self._arch.norm}.weight").shape[0]
        hidden = torch.randn(1, GATE_TOKENS, width, generator=torch.Generator().manual_seed(index))
        before = self._added(index, {n: checkpoint.base.tensor(f"{prefix}{n}") for n in tensors}, hidden)
        turned = {
            n: t if t.dtype == torch.float32 else checkpoint.rotated(f"{prefix}{n}", torch.float32)
            for n, t in tensors.items()
        }
        if checkpoint.turns_stream:
            before, hidden = turn(before), turn(hidden).float()
        after = self._added(index, turned, hidden)
        change = float((after - before).norm() / before.norm())
        if not change <= TOLERANCE:  # NaN is a change too
            raise QrtError(
                f"{prefix[:-1]}: rotating changed what the layer adds by {change:.1e} of it (at most "
                f"{TOLERANCE:.0e}): {self._arch.name} does not keep its function; leave --rotations out"
            )

    def _added(self, index: int, tensors: dict[str, Tensor], hidden: Tensor) -> Tensor:
        """fp64 on the CPU."""
        with products(EXACT):
            layer = self._decoder.load(index, tensors)
            return self._decoder.run(index, layer, hidden).cpu().double() - hidden
