"""MaskBuffer: the masks of a step on the device, at fixed addresses that a recorded draw reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

RING = 3  # host buffers in turn: a copy may still be on its way when the next masks are written


class MaskBuffer:
    """Room for masks of `rows` samples over a vocabulary, W = ceil(vocabulary / 32) words each.

    masks   int32 [rows, W]   as in `qrt.kernels.sample`
    at      int32 [rows]      index of the mask of each sample; negative: none
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self.masks = torch.zeros(rows, -(-vocab_size // 32), dtype=torch.int32, device=device)
        self.at = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self._next: tuple[Tensor, Tensor, torch.cuda.Event | None]
        self._host: list[tuple[Tensor, Tensor, torch.cuda.Event | None]] = []
        self._turn = 0

    def rows(self) -> NDArray[np.int32]:
        """Return rows int32 [rows, W] of the host for the next masks, which `send` sends."""
        self._next = self._buffers()
        return self._next[0].numpy()

    def send(self, indices: Sequence[int], samples: int) -> None:
        """Send the first masks of `rows()`, those of `indices` among so many samples, without waiting."""
        bits, at, sent = self._next
        at[:samples] = -1
        at.numpy()[indices] = np.arange(len(indices), dtype=np.int32)
        self.masks[: len(indices)].copy_(bits[: len(indices)], non_blocking=True)
        self.at[:samples].copy_(at[:samples], non_blocking=True)
        if sent is not None:
            sent.record()

    def _buffers(self) -> tuple[Tensor, Tensor, torch.cuda.Event | None]:
        """Return host buffers that no copy reads any more, and the event that marks the end of theirs."""
        pinned = self.masks.is_cuda
        if len(self._host) < RING:
            buffers = (torch.empty_like(x, device="cpu", pin_memory=pinned) for x in (self.masks, self.at))
            bits, at = buffers
            self._host.append((bits, at, torch.cuda.Event() if pinned else None))
            return self._host[-1]
        self._turn = (self._turn + 1) % RING
        found = self._host[self._turn]
        if found[2] is not None:
            found[2].synchronize()
        return found
