"""What a KV format is: the buffers of one layer, how K and V become bits, and the basis they live in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from qrt.quant import rotation
from qrt.quant.spec import TensorSpec


class KVFormat(ABC):
    """How one token's K and V are stored in a slot. Stateless objects in KV_FORMATS.

    K is stored after RoPE. Where `rotated` is true q, k and v are in the basis of `rotation.rotate` while
    they are in or meet the cache, and the attention output is rotated back. Where `appends` is true its
    device's `encode` takes vectors of K and of V at once and writes the same bytes whichever threads add up a
    vector, so that `append_attention` may store it.
    """

    name: ClassVar[str]
    bits: ClassVar[int]  # per value; 16 stands for the model dtype
    rotated: ClassVar[bool]
    appends: ClassVar[bool] = False

    @property
    def widths(self) -> tuple[int, int]:
        """Bits of a value of K and of one of V."""
        return self.bits, self.bits

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
