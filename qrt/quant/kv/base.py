"""What a KV format is: the buffers of one layer, how K and V become bits, and the basis they live in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from qrt.quant import rotation
from qrt.quant.spec import TensorSpec

DOT_COLUMNS = 8  # of a tensor core's, at least; heads that do not fill them cost as much


class DecodeBlock(NamedTuple):
    """How decode attention goes through a format: tokens of a tile, tiles in flight, warps, registers of a
    thread, KV heads of a program, whether it loads the first tiles before the query is there, and whether it
    stores the newest tokens (`append_attention`). The fastest of some on an H200 at 32 query and 8 KV heads
    of 128 (docs/kernels-journal.md)."""

    tokens: int
    stages: int
    warps: int
    registers: int
    heads: int = 1
    ahead: bool = False
    appends: bool = False

    @property
    def heads_per_sm(self) -> int:
        """KV heads that a multiprocessor attends at once, by the 16 Ki registers of each of its quarters."""
        warps = 4 * ((1 << 14) // (32 * self.registers))
        return warps // self.warps * self.heads


class KVFormat(ABC):
    """How one token's K and V are stored in a slot. Stateless objects in KV_FORMATS.

    K is stored after RoPE. Where `rotated` is true q, k and v are in the basis of `rotation.rotate` while
    they are in or meet the cache, and the attention output is rotated back.
    """

    name: ClassVar[str]
    bits: ClassVar[int]  # per value; 16 stands for the model dtype
    rotated: ClassVar[bool]
    decode_blocks: ClassVar[dict[int, DecodeBlock]]  # of so many requests and more
    # the same in pairs of KV heads, by the columns of a dot that the two heads' queries take
    pair_blocks: ClassVar[dict[int, dict[int, DecodeBlock]]] = {}

    def block(self, requests: int, num_heads: int, num_kv_heads: int) -> DecodeBlock:
        """How decode attention goes through so many requests."""
        group = num_heads // num_kv_heads
        columns = max(DOT_COLUMNS, 2 << (group - 1).bit_length())
        pairs = self.pair_blocks.get(columns) if num_kv_heads % 2 == 0 else None
        blocks = pairs or self.decode_blocks
        return blocks[max(least for least in blocks if least <= max(requests, 1))]

    @property
    def appends(self) -> bool:
        """Whether `append_attention` takes it: its bytes do not depend on which threads add up a vector."""
        return any(block.appends for block in self.decode_blocks.values())

    @abstractmethod
    def buffers(
        self, num_slots: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> dict[str, TensorSpec]:
        """The tensors of one layer that hold `num_slots` slots; `dtype` is the model's. Order is fixed:
        ops receive `list(buffers.values())`."""

    def bytes_per_slot(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one token's K and V in one layer, all heads, scales included."""
        many = 64  # whole words whatever the layout
        specs = self.buffers(many, num_kv_heads, head_dim, dtype).values()
        return sum(spec.num_bytes for spec in specs) // many

    def to_basis(self, x: Tensor) -> Tensor:
        """x [..., D] in the model's basis -> the basis of the cache, fp32."""
        return rotation.rotate(x) if self.rotated else x.float()

    def from_basis(self, x: Tensor) -> Tensor:
        """The inverse of `to_basis`."""
        return rotation.unrotate(x) if self.rotated else x.float()

    @abstractmethod
    def encode_ref(self, k: Tensor, v: Tensor, buffers: Sequence[Tensor], slots: Tensor) -> None:
        """Write k, v [T, Hkv, D] (in the cache's basis) into `slots` [T] of the layer's buffers."""

    @abstractmethod
    def decode_ref(self, buffers: Sequence[Tensor], slots: Tensor) -> tuple[Tensor, Tensor]:
        """k, v fp32 [n, Hkv, D] of `slots` [n], in the cache's basis."""

    @cached_property
    def device(self) -> Any:
        """The format's Triton device functions, a KVDevice: DEVICE of `device.py` beside it, imported on
        first use."""
        return import_module(f"{type(self).__module__.rpartition('.')[0]}.device").DEVICE
