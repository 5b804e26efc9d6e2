"""The hidden states between layers: of the exact model and of the one that is being rounded, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

SHARE_OF_GPU = 0.4  # of its free memory that both streams may take
SHARE_OF_RAM = 0.4  # of what is available
Run = Callable[[Tensor], Tensor]


class Streams:
    """Hidden states [B, T, H] fp32 of B windows, where the next layer begins.

    exact      in the original model
    rounded    in the model whose layers so far are rounded
    calibrating    how many of the windows calibrate; the others only evaluate

    They lie on the GPU if both fit there, else in RAM, else in files in `folder` (mapped).
    """

    def __init__(self, hidden: Tensor, calibrating: int, device: torch.device, folder: Path) -> None:
        self.calibrating = calibrating
        self.exact = place(hidden, device, folder / "hidden-exact")
        self.rounded = place(hidden, device, folder / "hidden-rounded")

    def calibration(self, windows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The windows that calibrate, `windows` at a time: (exact, rounded)."""
        parts = self.exact[: self.calibrating].split(windows), self.rounded[: self.calibrating].split(windows)
        yield from zip(*parts, strict=True)

    def advance(self, exact: Run, rounded: Run, windows: int) -> float:
        """Replace the hidden states by a layer's outputs; returns how far apart they are, relative to the
        exact ones."""
        apart = size = 0.0
        for stream, run in ((self.exact, exact), (self.rounded, rounded)):
            for part in stream.split(windows):
                part.copy_(run(part))
        for exact_part, rounded_part in zip(
            self.exact.split(windows), self.rounded.split(windows), strict=True
        ):
            apart += float((rounded_part - exact_part).square().sum())
            size += float(exact_part.square().sum())
        return (apart / size) ** 0.5 if size else 0.0


def stream_bytes(windows: int, seqlen: int, hidden_size: int) -> int:
    """What one stream takes."""
    return windows * seqlen * hidden_size * 4


def available_ram() -> int:
    """Bytes that can be taken without swapping; a large number where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1 << 62
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(found[0][1]) * 1024 if found else 1 << 62


def place(hidden: Tensor, device: torch.device, path: Path) -> Tensor:
    """A copy of `hidden` on the device, in RAM or in a mapped file."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if hidden.nbytes < SHARE_OF_GPU / 2 * free:
            return hidden.to(device, copy=True)
    if hidden.nbytes < SHARE_OF_RAM / 2 * available_ram():
        return hidden.clone()
    mapped = torch.from_file(str(path), shared=True, size=hidden.numel(), dtype=hidden.dtype)
    return mapped.view(hidden.shape).copy_(hidden)
