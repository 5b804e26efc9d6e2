"""Read a part of a Linear: some outputs, some inputs, and of every tensor what belongs to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from qrt.checks import Dimension, dimension
from qrt.quant.checkpoint.folder import TensorFolder, mismatch
from qrt.quant.checkpoint.shard import ShardFile

BLOCK = 32  # outputs that are read together: whole words, whatever the width of a code
Ranges = tuple[tuple[int, int], ...]


class Cut(NamedTuple):
    """What is read of a Linear of N outputs and K inputs, in ranges (first, behind the last) that ascend."""

    n: int
    k: int
    outputs: Ranges
    inputs: Ranges

    @classmethod
    def of(
        cls, sizes: tuple[int, int], rows: Tensor | None = None, inputs: tuple[int, int] | None = None
    ) -> Cut:
        """Return the outputs `rows`, int64, and a few beside them, and the range `inputs`; None: all.

        `sizes` are N and K.
        """
        n, k = sizes
        return cls(n, k, ((0, n),) if rows is None else _blocks(rows, n), (inputs or (0, k),))

    @property
    def rows(self) -> Tensor:
        """The outputs that are read, int64."""
        return _numbers(self.outputs)

    @property
    def turned(self) -> Cut:
        """The same of a weight that is stored [K, N]."""
        return Cut(self.k, self.n, self.inputs, self.outputs)


class InsideGroup(Exception):
    """A cut of the inputs parts what lies together in a tensor: a word, or a group that shares a scale."""


class Slices(TensorFolder):
    """The tensors of one Linear as if there were only the outputs and inputs of a cut.

    A format names what a dimension counts: N outputs, or K inputs (`TensorFolder.tensor`). Of those
    dimensions only the slices are read, others and tensors without a shape are whole.
    """

    def __init__(self, folder: TensorFolder, module: str, cut: Cut) -> None:
        self.path, self._shard_of = folder.path, folder._shard_of
        self._folder, self._module, self._cut = folder, module, cut

    def shard(self, name: str) -> ShardFile:
        return self._folder.shard(name)

    def name_in_messages(self, name: str) -> str:
        return self._folder.name_in_messages(name)

    def sizes(
        self,
        name: str,
        shape: str | None,
        dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
        **sizes: int,
    ) -> Mapping[str, int]:
        found = super().sizes(name, shape, dtype, **sizes)
        if {"N", "K"} <= found.keys() and (found["N"], found["K"]) != self._cut[:2]:
            raise mismatch(self.path, self._module, [found["N"], found["K"]], self._cut[:2])
        return found

    def tensor(
        self,
        name: str,
        shape: str | None = None,
        dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
        **sizes: int,
    ) -> Tensor:
        tensor = super().tensor(name, shape, dtype, **sizes)
        for axis, own in enumerate(map(dimension, (shape or "").split())):
            if own.letter in ("N", "K") and tensor.shape[axis] > 1:  # a scale of all inputs is that of some
                tensor = self._sliced(tensor, axis, own)
        return tensor

    def outputs(self, count: int) -> Tensor:
        return self._cut.rows

    def inputs(self, count: int) -> Tensor:
        return _numbers(self._cut.inputs)

    def _sliced(self, tensor: Tensor, axis: int, own: Dimension) -> Tensor:
        """Return the slices of an axis that counts `own`; the same tensor where they are all of it."""
        n, k, outputs, inputs = self._cut
        whole, ranges = (n, outputs) if own.letter == "N" else (k, inputs)
        slices = []
        for first, last in ranges:
            if first * own.times % own.over or (last < whole and last * own.times % own.over):
                raise InsideGroup
            begin = first * own.times // own.over
            slices.append(tensor.narrow(axis, begin, own.of(last) - begin))
        return slices[0].contiguous() if len(slices) == 1 else torch.cat(slices, axis)


def _blocks(rows: Tensor, size: int) -> Ranges:
    """Return the ranges of whole blocks that hold `rows` of `size`; the last block may be shorter."""
    blocks = torch.unique(rows // BLOCK)
    gap = blocks.diff() > 1
    firsts, lasts = torch.cat((blocks[:1], blocks[1:][gap])), torch.cat((blocks[:-1][gap], blocks[-1:]))
    pairs = zip(firsts.tolist(), lasts.tolist(), strict=True)
    return tuple((first * BLOCK, min((last + 1) * BLOCK, size)) for first, last in pairs)


def _numbers(ranges: Ranges) -> Tensor:
    """Return the numbers in the ranges, int64."""
    return torch.cat([torch.arange(*edges) for edges in ranges])
