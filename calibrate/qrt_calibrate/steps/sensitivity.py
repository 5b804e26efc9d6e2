"""The loss's gradients at the outputs of layers and Linears, and their second moments E[g g^T].

The loss is that of tokens drawn from the exact model's own predictions. The moments are then a block of the
Fisher matrix, and half of tr(E[g g^T] D E[x x^T] D^T) is about the KL divergence that an error D of a Linear
costs (YAQA, arXiv:2505.22988). The moments of inputs, E[x x^T], are in `observe.Moments`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from qrt_calibrate.model.executor import BATCH_TOKENS, LayerExecutor
from qrt_calibrate.model.streams import Share, Streams, place
from qrt_calibrate.recipe.recipe import Recipe
from qrt_calibrate.rounding.fold import linear
from qrt_calibrate.rounding.observe import add_square

TOKENS = 32768  # tokens with gradients: enough to show where errors matter, which is all they are for
STORED = torch.bfloat16  # dtype of kept gradients, more precise than their moments need
COUPLED = 2048  # rows with common moments: bounds the memory


def gradient_windows(recipe: Recipe) -> int:
    """Return for how many calibration windows gradients are computed; 0 if the method uses none."""
    if not recipe.rules.rows:
        return 0
    return min(recipe.n_samples, max(1, TOKENS // recipe.seqlen))


def loss_gradients(executor: LayerExecutor, streams: Streams, windows: int, seed: int, folder: Path) -> None:
    """Set the `gradients` of every share of `streams`, whose hidden states are the embedding's.

    These are the gradients at every layer's output, [L, b, T, H] in STORED, for those of the share's windows
    that are among the first `windows` of all. They lie on the GPU or in RAM if they fit there, else in
    `folder`.

    The exact model runs forward and backward one layer at a time, so each layer is read twice.
    """
    states = {share: share.exact[: share.among(windows)].clone() for share in streams.shares}
    for number, (share, own) in enumerate(states.items()):
        room = own.to(STORED).expand(executor.num_layers, *own.shape)
        share.gradients = place(room, share.device, folder / f"gradients-{number}", len(states))
    _forward(executor, streams, states)
    generator = torch.Generator(executor.device).manual_seed(seed)
    for share, at in streams.in_order(0, windows):
        window = states[share][at]
        window.copy_(executor.loss_gradient(window, generator))
    executor.release_head()  # layers need its memory until the evaluation
    _backward(executor, streams, states)


def _forward(executor: LayerExecutor, streams: Streams, states: Mapping[Share, Tensor]) -> None:
    """Run `states` through all layers, and keep each layer's input in the place of its output's gradient."""
    step = max(1, BATCH_TOKENS // streams.seqlen)

    def run(index: int, share: Share, layer: nn.Module) -> None:
        assert share.gradients is not None
        share.gradients[index].copy_(states[share])
        for part in states[share].split(step):
            part.copy_(executor.run(index, layer, part))

    with torch.no_grad():
        for index in range(executor.num_layers):
            streams.each(partial(run, index), executor.load_stored(index))
            executor.expect_finite(executor.layer_name(index), *states.values())


def _backward(executor: LayerExecutor, streams: Streams, states: Mapping[Share, Tensor]) -> None:
    """Take gradients back through all layers, from `states`, the gradients after the last one."""
    step = max(1, BATCH_TOKENS // streams.seqlen)

    def run(index: int, share: Share, layer: nn.Module) -> None:
        assert share.gradients is not None
        for x, own in zip(share.gradients[index].split(step), states[share].split(step), strict=True):
            before = executor.backward(index, layer, x.float(), own)
            x.copy_(own)
            own.copy_(before)

    for index in range(executor.num_layers - 1, 0, -1):
        streams.each(partial(run, index), executor.load_stored(index))
        executor.expect_finite(f"{executor.layer_name(index)} (gradients)", *states.values())
    for share, own in states.items():
        assert share.gradients is not None
        share.gradients[0].copy_(own)


def block_sizes(rows: int) -> list[int]:
    """Return the sizes of the blocks of rows with common moments, for `rows` rows."""
    return [min(COUPLED, rows - begin) for begin in range(0, rows, COUPLED)]


class OutputMoments:
    """Moments [N, N] of the gradients at the output of stacked Linears.

    They are kept in blocks of at most COUPLED rows, in two shares with windows of their own: [2, n, n].
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.blocks = [torch.zeros(2, size, size, device=device) for size in block_sizes(rows)]

    def add(self, gradient: Tensor, half: int) -> None:
        """Count gradients [T, N] in share `half`, 0 or 1."""
        for block, own in zip(self.blocks, gradient.split(COUPLED, dim=1), strict=True):
            add_square(block[half], own)

    def join(self, other: OutputMoments) -> None:
        """Add what `other` has counted, on any device."""
        for own, more in zip(self.blocks, other.blocks, strict=True):
            own += more.to(own.device)

    def trusted(self, alive: Tensor) -> Iterator[Tensor]:
        """Yield each block [n, n]; off its diagonal it shrinks as far as the two shares disagree.

        Each share has noise of its own, as in `Moments.take_correction`. Rows that are not `alive` [N] (bool)
        stand alone: a row of zero weights has no grid on which it could compensate for others.
        """
        for (first, second), coupled in zip(self.blocks, alive.split(COUPLED), strict=True):
            whole = first + second
            diagonal = whole.diagonal().clone()
            weight = diagonal.clamp(min=torch.finfo(diagonal.dtype).tiny).rsqrt()
            beside = [(own * weight * weight[:, None]).fill_diagonal_(0) for own in (first, second)]
            agreed = 4 * float((beside[0] * beside[1]).sum())
            size = float((beside[0] + beside[1]).square().sum())
            trust = min(1.0, max(0.0, agreed / size)) if size > 0 else 0.0
            whole.mul_(trust).mul_(coupled).mul_(coupled[:, None]).diagonal().copy_(diagonal)
            yield whole


def output_moments(
    executor: LayerExecutor,
    index: int,
    layer: nn.Module,
    stages: Sequence[tuple[str, ...]],
    windows: Iterator[tuple[int, Tensor, Tensor]],
) -> dict[tuple[str, ...], OutputMoments]:
    """Return the moments at the outputs of each of `stages`, stacked Linears, summed over all tokens.

    Each of `windows` has the half that it counts in, inputs of layer `index` and the loss's gradients at its
    outputs, [B, T, H] each.
    """
    if not stages:
        return {}
    outputs: dict[str, Tensor] = {}

    def watch(name: str) -> torch.utils.hooks.RemovableHandle:
        def seen(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            outputs[name] = output

        return layer.get_submodule(name).register_forward_hook(seen)

    handles = [watch(part) for parts in stages for part in parts]
    found: dict[tuple[str, ...], OutputMoments] = {}
    for parts in stages:
        rows = sum(linear(layer, part).out_features for part in parts)
        found[parts] = OutputMoments(rows, linear(layer, parts[0]).weight.device)
    for half, hidden, gradient in windows:
        gradients = executor.gradients(index, layer, hidden, gradient, outputs)
        for parts, moments in found.items():
            moments.add(torch.cat([gradients[part].flatten(0, -2) for part in parts], 1), half)
    for handle in handles:
        handle.remove()
    return found
