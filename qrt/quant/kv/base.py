"""The interface of KV formats: the buffers of a layer, the encoding of K and V, and the basis they are in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor

from qrt.errors import UnsupportedError
from qrt.quant import rotation
from qrt.quant.spec import TensorSpec


class KVFormat(ABC):
    """How one token's K and V are stored in a slot. Formats are stateless objects in KV_FORMATS.

    K is stored after RoPE.

    quantized  K and V are rounded; else the cache holds them in the model's dtype
    rotated    q, k and v are in the basis of `rotation.rotate` in the cache and in attention with it; the
               attention output is rotated back
    appends    `append_attention` may store the format: its device's `encode` takes vectors of K and V at
               once and writes the same bytes whichever threads add up a vector
    """

    name: ClassVar[str]
    quantized: ClassVar[bool] = True
    rotated: ClassVar[bool]
    appends: ClassVar[bool] = False

    @property
    @abstractmethod
    def widths(self) -> tuple[int, int]:
        """Bits per value of K and per value of V; 16 stands for the model's dtype."""

    @abstractmethod
    def buffers(
        self, num_slots: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> dict[str, TensorSpec]:
        """Return the tensors of one layer with `num_slots` slots; `dtype` is the model's.

        The order is fixed: operators receive `list(buffers.values())`.
        """

    def bytes_per_slot(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Return the bytes of one token's K and V in one layer: all heads, scales included."""
        many = 64  # so many fill whole words in every layout
        specs = self.buffers(many, num_kv_heads, head_dim, dtype).values()
        return sum(spec.num_bytes for spec in specs) // many

    def to_basis(self, x: Tensor) -> Tensor:
        """Return x [..., D] of the model's basis in the basis of the cache, fp32."""
        return rotation.rotate(x) if self.rotated else x.float()

    def from_basis(self, x: Tensor) -> Tensor:
        """Undo `to_basis`."""
        return rotation.unrotate(x) if self.rotated else x.float()

    @abstractmethod
    def encode_ref(self, k: Tensor, v: Tensor, buffers: Sequence[Tensor], slots: Tensor) -> None:
        """Write k, v [T, Hkv, D] (in the cache's basis) into `slots` [T] of the layer's buffers."""

    @abstractmethod
    def decode_ref(self, buffers: Sequence[Tensor], slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return k, v fp32 [n, Hkv, D] of `slots` [n], in the cache's basis."""

    @cached_property
    def device(self) -> Any:
        """The format's Triton functions, a KVDevice: DEVICE of the `device.py` beside it.

        It is imported on first use. UnsupportedError where there is none.
        """
        if not self.has_device:
            raise UnsupportedError(
                f"KV format {self.name}: expected Triton functions in {self._device_module}, found no such "
                "module; run it on a CPU"
            )
        return import_module(self._device_module).DEVICE

    @property
    def has_device(self) -> bool:
        """Whether a `device.py` lies beside the format. Without it a CPU runs the format's definition."""
        return find_spec(self._device_module) is not None

    @property
    def _device_module(self) -> str:
        return f"{type(self).__module__.rpartition('.')[0]}.device"
