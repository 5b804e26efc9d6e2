"""Hidden states between layers, of the exact model and of the model that is being rounded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from qrt.errors import CheckpointError
from qrt_calibrate.model.devices import at_once, replica
from qrt_calibrate.model.executor import BATCH_TOKENS

SHARE_OF_GPU = 0.4  # share of its free memory that both streams may take
SHARE_OF_RAM = 0.4  # share of the available memory
LARGEST_TOKEN = "largest token"  # title of the figure that shows massive activations
Run = Callable[[Tensor], Tensor]
Result = TypeVar("Result")


class Share:
    """The windows of one device: their hidden states [b, T, H], fp32, before the next layer.

    exact, rounded    in the original model, and in the model whose layers so far are rounded
    numbers           [b] int64, ascending: the numbers of its windows among all windows
    calibrating       how many of its windows calibrate, the first ones
    gradients         [L, g, T, H] the loss's gradients at every layer's output, for its first g windows; None
                      until `loss_gradients` sets them
    """

    def __init__(
        self,
        exact: Tensor,
        rounded: Tensor,
        numbers: Tensor,
        calibrating: int,
        batch: int,
        device: torch.device,
    ) -> None:
        self.exact, self.rounded, self.numbers, self.device = exact, rounded, numbers, device
        self.calibrating = self.among(calibrating)
        self.gradients: Tensor | None = None
        self._batch = batch

    def among(self, first: int) -> int:
        """Return how many of its windows are among the `first` of all."""
        return int((self.numbers < first).sum())

    def batches(self, *streams: Tensor) -> Iterator[tuple[Any, ...]]:
        """Yield batches of its first windows.

        Each item has 0 or 1, the half of the moments that the batch belongs to, and the batch of each of
        `streams` [b, T, H].
        """
        numbers = self.numbers[: len(streams[0])].split(self._batch)
        for own, *parts in zip(numbers, *(stream.split(self._batch) for stream in streams), strict=True):
            yield int(own[0]) // self._batch % 2, *parts

    def advance(self, stream: Tensor, run: Run, ahead: bool = False) -> None:
        """Replace hidden states, `exact` or `rounded`, by a layer's outputs.

        With `ahead` the windows that calibrate are behind the layer already. They run in the batches of
        `batches`, because kernels may round by the batch.
        """
        first, rest = stream[: self.calibrating], stream[self.calibrating :]
        parts = [] if ahead else [*first.split(self._batch)]
        parts += rest.split(max(1, BATCH_TOKENS // stream.shape[1]))
        for part in parts:
            if len(part):
                part.copy_(run(part))

    def drift(self) -> Tensor:
        """Return per token the squared difference of the two, and the exact one's square: [2, b * T].

        The result is on the CPU.
        """
        found = []
        for exact_part, rounded_part in zip(
            self.exact.split(self._batch), self.rounded.split(self._batch), strict=True
        ):
            apart = (rounded_part - exact_part).square().sum(-1)
            found.append(torch.stack((apart, exact_part.square().sum(-1))).flatten(1).cpu())
        return torch.cat(found, 1)


class Streams:
    """Hidden states of B windows [B, T, H]; the first `calibrating` calibrate, the others only evaluate.

    Batches of windows are dealt to the devices in turn, so that each gets some of both kinds. A share lies on
    its GPU if it fits there, else in RAM, else in mapped files in `folder`. `stored` is the dtype of the
    embedding that the rounded model begins with.
    """

    def __init__(
        self,
        hidden: Tensor,
        calibrating: int,
        devices: Sequence[torch.device],
        folder: Path,
        stored: torch.dtype = torch.float32,
    ) -> None:
        count, self.seqlen, _ = hidden.shape
        self.calibrating = calibrating
        batch = max(1, min(BATCH_TOKENS // self.seqlen, (calibrating + 1) // 2))
        batches = torch.arange(count).split(batch)
        used = devices[: len(batches)]
        self.shares = []
        for begin, device in enumerate(used):
            numbers = torch.cat(batches[begin :: len(used)])
            own = hidden if len(used) == 1 else hidden[numbers]
            exact, rounded = (
                place(states, device, folder / f"hidden-{name}-{begin}", len(used))
                for name, states in (("exact", own), ("rounded", own.to(stored).float()))
            )
            self.shares.append(Share(exact, rounded, numbers, calibrating, batch, device))

    def each(self, work: Callable[..., Result], *layers: nn.Module) -> list[Result]:
        """Call `work(share, *layers)` for all shares at once, and return the results in their order.

        The layers are on the share's device: the first share has `layers` themselves, the others replicas.
        """
        copies = [
            (share, *(replica(own, share.device) if number else own for own in layers))
            for number, share in enumerate(self.shares)
        ]
        return at_once(lambda arguments: work(*arguments), copies)

    def in_order(self, begin: int, end: int) -> Iterator[tuple[Share, int]]:
        """Yield the share of each window from `begin` to `end`, and the window's index in it."""
        places = {
            int(window): (share, place) for share in self.shares for place, window in enumerate(share.numbers)
        }
        yield from (places[window] for window in range(begin, end))


def drift_figures(squares: Tensor) -> dict[str, float]:
    """Return how far the rounded stream is from the exact one, by the squares [2, T] of `Share.advance`.

    The drift is relative, for all tokens together and for the median token. The third figure is the size of
    the largest exact token in units of the median.
    """
    apart, size = squares.double()
    tokens = size.sqrt()
    median, typical = float(tokens.median()), float((apart / size.clamp_min(1e-30)).median())
    return {
        "drift": float(apart.sum() / size.sum()) ** 0.5 if size.any() else 0.0,
        "median drift": typical**0.5,
        LARGEST_TOKEN: float(tokens.max()) / median if median else 0.0,
    }


def stream_bytes(windows: int, seqlen: int, hidden_size: int) -> int:
    """Return the bytes of one stream."""
    return windows * seqlen * hidden_size * 4


def available_ram() -> int:
    """Return the bytes available without swapping; a large number if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1 << 62
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(found[0][1]) * 1024 if found else 1 << 62


def place(hidden: Tensor, device: torch.device, path: Path, shares: int = 1) -> Tensor:
    """Copy `hidden`, one of `shares` like it, to the device, to RAM or to a mapped file."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if hidden.nbytes < SHARE_OF_GPU / 2 * free:
            return hidden.to(device, copy=True)
    if hidden.nbytes < SHARE_OF_RAM / 2 / shares * available_ram():
        return hidden.to("cpu", copy=True)
    _reserve(path, hidden.nbytes)
    mapped = torch.from_file(str(path), shared=True, size=hidden.numel(), dtype=hidden.dtype)
    return mapped.view(hidden.shape).copy_(hidden)


def _reserve(path: Path, num_bytes: int) -> None:
    """Make a file and reserve its blocks on the disk; CheckpointError if the disk is full.

    Without that, a full disk ends the process with SIGBUS when it writes into the mapped file.
    """
    try:
        with path.open("wb") as file:
            if hasattr(os, "posix_fallocate"):  # macOS has none
                os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        raise CheckpointError(
            f"{path}: no room for {num_bytes / 1e9:.2f} GB ({error.strerror}); free some, or give fewer "
            "--n-samples or a shorter --seqlen"
        ) from None
