"""KVStorage: the tensors of the slots, one KV format per layer over the slot ids of its group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from qrt.errors import QrtError
from qrt.kernels.decode_attention.blocks import measured_block
from qrt.kernels.step import KVLayer
from qrt.mem.sizing import GIB, PAD_SLOTS, slot_bytes
from qrt.quant.kv.base import KVFormat
from qrt.quant.spec import TensorSpec


class KVStorage:
    """The K/V of `num_slots` tokens for all layers; layers of window groups have slots of their own.

    After them comes `pad_slot` (= num_slots). It takes the writes of padded rows and belongs to no request.
    All bytes are zero at first, so that a padded row that reads a slot sees no NaN.

    slots   the number of slots of each group of layers, which is also its pad slot
    """

    def __init__(
        self,
        formats: Sequence[KVFormat],
        num_slots: int | Sequence[int],
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        smoothing: Sequence[Tensor] | None = None,
        *,
        groups: Sequence[int] | None = None,
    ) -> None:
        """Allocate the tensors; QrtError when there is not enough memory.

        formats     [layers]
        num_slots   those of each group of layers (`qrt.mem.windows`); a number if there is one
        dtype       the model's
        smoothing   [layers], used by those that quantize with a rotation
        groups      [layers], each one's group; None: all are in the first
        """
        self.slots = (num_slots,) if isinstance(num_slots, int) else tuple(num_slots)
        self.num_slots = self.pad_slot = self.slots[0]
        groups = groups or [0] * len(formats)
        self._num_kv_heads = num_kv_heads
        # decode attention is planned once for all layers, for the format that most of them have
        self._usual = Counter(formats).most_common(1)[0][0]
        self._layers = []
        try:
            for i, format in enumerate(formats):
                slots = self.slots[groups[i]] + PAD_SLOTS
                specs = format.buffers(slots, num_kv_heads, head_dim, dtype)
                buffers = [_zeros(spec, device) for spec in specs.values()]
                table = smoothing[i] if smoothing and format.rotated else None
                self._layers.append(KVLayer(format.name, buffers, table, groups[i]))
        except (torch.OutOfMemoryError, MemoryError) as error:
            size = sum(
                (self.slots[group] + PAD_SLOTS) * slot_bytes([format], num_kv_heads, head_dim, dtype)
                for format, group in zip(formats, groups, strict=True)
            )
            raise QrtError(
                f"KV pool: expected {size / GIB:.2f} GiB free on {device} for {self.num_slots} tokens in "
                f"{len(formats)} layers, got {self.num_bytes / GIB:.2f} GiB; lower "
                f"--kv-cache-memory-bytes or --gpu-memory-utilization ({str(error).splitlines()[0]})"
            ) from error

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self._layers)

    def heads_per_sm(self, requests: int, num_heads: int) -> int:
        """Return `heads_per_sm` of decode attention for `plan_kv_splits`."""
        return measured_block(self._usual, requests, num_heads, self._num_kv_heads).heads_per_sm

    def layer(self, index: int) -> KVLayer:
        """Return the format and tensors of layer `index`."""
        return self._layers[index]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, pad slots included."""
        return sum(buffer.nbytes for layer in self._layers for buffer in layer.buffers)


def _zeros(spec: TensorSpec, device: torch.device | str) -> Tensor:
    if torch.device(device).type != "cpu":
        return spec.zeros(device)
    # numpy's zeros take memory when they are first written, torch's at once
    return torch.from_numpy(np.zeros(spec.num_bytes, np.uint8)).view(spec.dtype).view(spec.shape)
