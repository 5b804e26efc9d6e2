"""Tile-major run-time layout of weight-only codes: one packing for any number of tokens.

A tile is 64 outputs x (planes * J) inputs, planes = 16 / bits. It has 64 rows of J int16 words. A word has
one code of each plane: plane p of word j belongs to input p*J + j of the tile. So a plane meets J consecutive
inputs, and one `tl.dot` takes it as it leaves the unpacker: no shuffle, no permuted x. Tiles of one row block
follow each other in memory, each in one piece (8 KB for J = 64).

    bits of word j, 4-bit codes:  15..12 | 11..8 | 7..4 | 3..0        8-bit codes:  15..8 | 7..0
    input within the tile:         3J+j  |  J+j  | 2J+j |  j                         J+j  |  j

The low halves of a word's bytes are the first two planes, whose inputs mostly share a scale; the high halves
are the others. 8-bit codes have 64 words a row only where both bytes share a scale.
`qrt.kernels.linear.tiles.digits_kernel` multiplies such bytes as they are.

A run is the inputs of one tile that share a scale: the whole tile, a half or a quarter of it. A group longer
than a run repeats its scale in every run. N and K are padded to whole tiles; the padding is never read back.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qrt.errors import UnsupportedError
from qrt.quant import e2m1, progressive
from qrt.quant.spec import Codes, QuantSpec
from qrt.quant.weight.base import Layout, WeightData, WeightScheme

TILE_ROWS = 64
_WORD_BITS = 16
PLACES = {4: (0, 8, 4, 12), 8: (0, 8)}  # first bit of each plane in a word, by bits of a code
BF16_UNIT = 2.0**-24  # planes in bf16 are in this unit
_SCALE_LIMIT = 2.0**18  # below it a bf16 scale times 2^109, which makes a code a unit, is finite
_ZEROS_PER_ROW = 4  # the most runs of a tile; four int8 zeros are one 32-bit load


class TiledWeight(NamedTuple):
    """Run-time tensors of a weight in Nb x Kt tiles, in this order; an absent tensor has no elements.

    packed    [Nb, Kt, 64, J] int16         J = 64 or 32 words a row
    scale     [Nb, Kt, R/V, 64, V]          R runs a tile; V scales that fill 32 bits (16-bit: 2, fp32: 1)
    zero      [Nb, Kt, 64, 4] int8          zero - 2^(bits-1) of each run; absent when symmetric
    perm      [K] int64                     as in WeightData; absent when the identity
    arrivals  [N] int32                     0 between calls: the kernel's split-K counters. Its length is N
    steps     [Nb, Kt, 64, 2V] uint8        of progressive groups (`qrt.quant.progressive`), else absent: step
                                            and offset of each run, V = R, but at least 2; padding has 0, 128
    channel   [N] fp32                      scale of each row of progressive groups; else absent
    """

    packed: Tensor
    scale: Tensor
    zero: Tensor
    perm: Tensor
    arrivals: Tensor
    steps: Tensor
    channel: Tensor

    @property
    def out_features(self) -> int:
        """Return N."""
        return self.arrivals.shape[0]

    @property
    def runs(self) -> int:
        """Return how many runs a tile has: 1, 2 or 4."""
        return self.scale.shape[2] * self.scale.shape[4]

    @property
    def has_whole_groups(self) -> bool:
        """Return whether 128 inputs (a group of `Digits`) or more share a scale, and scales have 16 bits."""
        return self.packed.shape[3] == 64 and self.runs == 2 and self.scale.itemsize == 2

    def gather(self, x: Tensor) -> Tensor:
        """Return x [T, K] with its columns in the order of the codes."""
        return x.index_select(1, self.perm) if self.perm.numel() else x

    def dequantize(self, bits: int, in_features: int, kind: Codes = Codes.INTEGERS) -> Tensor:
        """Return the weight, as its codes of this kind mean it, as fp32 [N, K], columns in their order."""
        blocks, tiles, rows, _ = self.packed.shape
        codes, midpoint = self._codes(bits), 1 << (bits - 1)
        weight = e2m1.numbers(codes) if kind is Codes.E2M1 else codes.float().sub_(midpoint)
        if self.zero.numel():
            weight -= self.zero[..., : self.runs, None].transpose(1, 2)
        weight *= self.scale.permute(0, 3, 1, 2, 4).reshape(blocks, rows, tiles, self.runs, 1)
        return weight.view(blocks * rows, -1)[: self.out_features, :in_features]

    def int8_codes(self, in_features: int) -> Tensor:
        """Return (code - zero) * step of progressive groups as int8 [N, K], columns in their order."""
        codes, by_row = self._codes(progressive.BITS), self.steps.transpose(1, 2)[..., : 2 * self.runs, None]
        rows = progressive.int8_codes(codes, by_row[..., ::2, :], by_row[..., 1::2, :])
        return rows.flatten(0, 1).flatten(1)[: self.out_features, :in_features]

    def _codes(self, bits: int) -> Tensor:
        """Return the codes as uint8 [Nb, 64, Kt, R, inputs of a run]."""
        blocks, tiles, rows, words = self.packed.shape
        size = (blocks, rows, tiles, len(PLACES[bits]), words)
        codes = torch.empty(size, dtype=torch.uint8, device=self.packed.device)
        by_row = self.packed.transpose(1, 2)
        for plane, place in enumerate(PLACES[bits]):
            codes[:, :, :, plane] = (by_row >> place) & ((1 << bits) - 1)
        return codes.view(blocks, rows, tiles, self.runs, -1)


def tile(
    weight: WeightData, device: torch.device, split: progressive.Progressive | None = None
) -> TiledWeight:
    """Repack a weight of 4 or 8 bits on `device`; its groups have K or a multiple of 32 inputs.

    `split` is what they are progressive by, for a scheme that multiplies by int8 codes.
    """
    assert weight.scale is not None
    group = weight.in_features // weight.scale.shape[1]
    planes = _WORD_BITS // weight.bits
    words = 64 if group % (16 * weight.bits) == 0 or group == weight.in_features else 32
    lanes = 4 // weight.scale.itemsize
    runs = _runs(group, words, planes, weight.in_features, lanes)
    blocks, tiles = -(-weight.out_features // TILE_ROWS), -(-weight.in_features // (planes * words))
    codes = _pad(weight.values.to(device), blocks * TILE_ROWS, tiles * planes * words)
    planar = codes.view(blocks, TILE_ROWS, tiles, planes, words).transpose(1, 2)
    packed = planar[..., 0, :].to(torch.int16)
    for plane in range(1, planes):
        packed |= planar[..., plane, :].to(torch.int16) << PLACES[weight.bits][plane]

    first_input = torch.arange(tiles * runs, device=device) * (planes * words // runs)

    def by_run(of_group: Tensor) -> Tensor:
        group_of_run = (first_input // group).clamp(max=of_group.shape[1] - 1)
        of_run = _pad(of_group.to(device)[:, group_of_run], blocks * TILE_ROWS, tiles * runs)
        return of_run.view(blocks, TILE_ROWS, tiles, runs).transpose(1, 2)

    scale = _dense(by_run(weight.scale).unflatten(-1, (-1, lanes)).transpose(2, 3))
    zero = torch.empty(0, dtype=torch.int8, device=device)
    if weight.zero is not None:
        offsets = weight.zero.to(torch.int16) - (1 << (weight.bits - 1))
        zero = _dense(F.pad(by_run(offsets.to(torch.int8)), (0, _ZEROS_PER_ROW - runs)))
    perm = torch.empty(0, dtype=torch.int64) if weight.perm is None else weight.perm
    arrivals = torch.zeros(weight.out_features, dtype=torch.int32, device=device)
    steps = torch.empty(0, dtype=torch.uint8, device=device)
    channel = torch.empty(0, device=device)
    if split is not None:
        padded = (F.pad(own, (0, 1)) for own in (split.steps, split.offsets ^ 128))  # for runs behind K
        step, offset = (F.pad(by_run(own), (0, max(0, 2 - runs))) for own in padded)
        steps, channel = torch.stack((step, offset ^ 128), -1).flatten(-2), split.channel.to(device)
    return TiledWeight(_dense(packed), scale, zero, perm.to(device), arrivals, steps, channel)


def _runs(group: int, words: int, planes: int, in_features: int, lanes: int) -> int:
    """Return the fewest runs of a tile that no group boundary cuts; scales fill 32 bits, `lanes` each."""
    if group == in_features:
        return lanes
    return next(runs for runs in (1, 2, 4) if runs >= lanes and group % (planes * words // runs) == 0)


def _pad(matrix: Tensor, rows: int, columns: int) -> Tensor:
    return F.pad(matrix, (0, columns - matrix.shape[1], 0, rows - matrix.shape[0]))


def _dense(tensor: Tensor) -> Tensor:
    """Return it row-major also where a dimension is 1, so that a launcher may view it as words."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _described(bits: int, codes: Codes) -> str:
    return f"{bits}-bit {'e2m1 ' if codes is Codes.E2M1 else ''}codes"


class TiledScheme(WeightScheme):
    """Weight-only codes of one width and kind in tiles. Its run-time tensors are a TiledWeight.

    packed    the layout for torch's own CPU product: a NamedTuple of another length, with `out_features`,
              `multiply` and `pack` (WeightData, dtype -> itself, or None where torch has no fast product)
    """

    layout = Layout.TILES
    packed: ClassVar[Any]

    @abstractmethod
    def unpacker(self) -> Any:
        """Return the Triton function `unpack(words, zero, PLANE, DTYPE, ASM, scale=None)` of `device.py`.

        It makes of int16 words the plane PLANE of code - 2^(bits-1) - zero in DTYPE, exact, in bf16 times
        `BF16_UNIT`. zero is int32, broadcast to the words, or 0; of e2m1 codes, which are numbers as they
        are, it is always 0. ASM False asks for plain Triton. In bf16 and without zero it may get a scale
        below 2^18, int32 of two equal bf16. It then multiplies the plane by that and rounds once.
        """

    def raw(self) -> tuple[Any, tuple[float, float]]:
        """Return a function as `unpacker`'s, without the zero point, with its offset and its factor.

        It is for integers in bf16, and for a kernel that takes zero points away from the sums. planes *
        factor - offset is code - 2^(bits-1).
        """
        raise NotImplementedError(f"{self.name} has no integers")

    @property
    def bits(self) -> int:
        """Return the width of a code."""
        return self._grid.bits

    @property
    def has_integers(self) -> bool:
        """Return whether codes are integers, which kernels may add up before they scale."""
        return self._grid.codes is Codes.INTEGERS

    @property
    def _grid(self) -> QuantSpec:
        assert self.spec is not None
        return self.spec

    def prepare(self, weight: WeightData, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        self._expect_grid(weight)
        scale = weight.scale
        if scale is not None and scale.dtype == torch.bfloat16 and scale.abs().max() >= _SCALE_LIMIT:
            weight = replace(weight, scale=scale.float())  # kernels take any fp32 scale
        return tile(weight, device, self._split(weight, device))

    def _expect_grid(self, weight: WeightData) -> None:
        """Raise UnsupportedError for a grid of another scheme."""
        groups = 1 if weight.scale is None else weight.scale.shape[1]
        group = weight.in_features // groups
        if (weight.bits, weight.codes) != (self.bits, self._grid.codes) or (groups > 1 and group % 32):
            raise UnsupportedError(
                f"{self.name}: expected {_described(self.bits, self._grid.codes)} in groups of a multiple of "
                f"32 or one per channel, got {_described(weight.bits, weight.codes)} in groups of {group}; "
                "quantize again with such a group size"
            )

    def _split(self, weight: WeightData, device: torch.device) -> progressive.Progressive | None:
        """Return what the groups are progressive by, if the scheme's are."""
        if not self._grid.progressive:
            return None
        assert weight.scale is not None
        zero = None if weight.zero is None else weight.zero.to(device)
        return progressive.split(weight.scale.to(device), zero)

    def prepare_cpu(self, weight: WeightData, dtype: torch.dtype) -> tuple[Tensor, ...]:
        self._expect_grid(weight)
        packed: tuple[Tensor, ...] | None = self.packed.pack(weight, dtype)
        return packed or super().prepare_cpu(weight, dtype)

    def linear_ref(self, x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        return self.unrounded_ref(x, tensors, bias)

    def unrounded_ref(self, x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """Do as `linear_ref` with x as it is, also where the scheme rounds it; few tokens stay so."""
        weight = self.tiles_for(x, tensors)
        x = weight.gather(x)
        matrix = weight.dequantize(self.bits, x.shape[1], self._grid.codes)
        return F.linear(x.float(), matrix, None if bias is None else bias.float()).to(x.dtype)

    def linear_cpu(self, x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        if not self._is_packed(tensors):
            return self.linear_ref(x, tensors, bias)
        y: Tensor = self.packed(*tensors).multiply(x, bias)
        return y

    def explain_cpu(self, tensors: Sequence[Tensor]) -> str:
        if not self._is_packed(tensors):
            return super().explain_cpu(tensors)
        return f"Torch's own product of {self.bits}-bit weights multiplies (packed.py)."

    def out_features(self, tensors: Sequence[Tensor]) -> int:
        layout = self.packed if self._is_packed(tensors) else TiledWeight
        n: int = layout(*tensors).out_features
        return n

    def tiles_for(self, x: Tensor, tensors: Sequence[Tensor]) -> TiledWeight:
        """Return the weight; ValueError unless its tiles are those of x's columns."""
        weight = TiledWeight(*tensors)
        most = weight.packed.shape[1] * weight.packed.shape[3] * (_WORD_BITS // self.bits)
        tile = most // weight.packed.shape[1]
        ordered = weight.perm.numel()
        least, most = (1, ordered) if ordered else (most - tile + 1, most)  # of a part some codes are padding
        if x.dim() != 2 or not least <= x.shape[1] <= most:
            raise ValueError(
                f"x: expected shape [T K] with K = {least} to {most}, as the weight's, got {list(x.shape)}"
            )
        return weight

    def _is_packed(self, tensors: Sequence[Tensor]) -> bool:
        return len(tensors) == len(self.packed._fields)
