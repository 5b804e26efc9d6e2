"""Measure the inputs of a layer's Linears, and the loss's gradients at their outputs, on all windows."""

from __future__ import annotations

from torch import nn

from qrt_calibrate.model.streams import Share
from qrt_calibrate.rounding.fold import linear
from qrt_calibrate.rounding.observe import Moments, norm_weights
from qrt_calibrate.steps.bench import Bench, Parts, Stage
from qrt_calibrate.steps.sensitivity import OutputMoments, output_moments


def gradient_moments(bench: Bench, stages: list[Parts]) -> dict[Parts, OutputMoments]:
    """Measure the moments of the loss's gradients at each stage's output; {} if there are no gradients.

    Folds do not change them, because a fold that divides an output comes after its stage.
    """

    def measure(share: Share, exact: nn.Module) -> dict[Parts, OutputMoments]:
        if share.gradients is None:
            return {}
        gradients = share.gradients[bench.index]
        windows = share.batches(share.exact[: len(gradients)], gradients)
        return output_moments(bench.executor, bench.index, exact, stages, windows)

    found, *others = bench.streams.each(measure, bench.exact)
    for other in others:
        for parts, moments in found.items():
            moments.join(other[parts])
    return found


def stage_moments(bench: Bench, stage: Stage, ahead: bool = False) -> Moments:
    """Measure the moments of a stage's input over the calibration windows.

    If its output is added to the residual stream, those of the stream are measured too. With `ahead` the
    exact stream's windows that calibrate go through the block; no stage of it may be measured afterwards.
    """
    arch, streams, reader = bench.arch, bench.streams, stage.parts[0]
    part = reader
    first, closes = linear(bench.rounded, part), part not in arch.readers
    adds = closes and _adds(bench, stage)
    if arch.is_expert(reader):  # an expert sees only the tokens sent to it; the block sees all
        assert arch.experts is not None
        reader = arch.experts.module
    total, scale = streams.calibrating * streams.seqlen, arch.residual_scale

    def measure(share: Share, exact: nn.Module, rounded: nn.Module) -> Moments:
        weight = linear(rounded, part).weight if adds else None
        moments = Moments(first.in_features, weight, share.device)
        hidden_states = (stream[: share.calibrating] for stream in (share.exact, share.rounded))
        for half, exact_hidden, hidden in share.batches(*hidden_states):
            (x,) = bench.inputs(rounded, [reader], hidden)
            if ahead:
                exact_x, output = bench.through(exact, reader, exact_hidden)
            else:
                (exact_x,) = bench.inputs(exact, [reader], exact_hidden)
            both, weights = None, None
            if closes and stage.out_norm is not None:  # which divides a token by the size of this output
                weights = norm_weights(linear(exact, part)(exact_x), bench.eps)
            elif closes:
                stream, behind = (own.to(share.device).flatten(0, -2) for own in (hidden, exact_hidden))
                if adds:
                    both = stream / scale, behind / scale
                    behind = behind + scale * linear(exact, part)(exact_x)
                weights = norm_weights(behind, bench.eps)
            moments.add(x, exact_x, total, half, both, weights)
            if ahead:
                exact_hidden.copy_(output)
        return moments

    moments, *others = streams.each(measure, bench.exact, bench.rounded)
    for other in others:
        moments.join(other)
    return moments


def _adds(bench: Bench, stage: Stage) -> bool:
    """Whether the output of a stage that ends its block is added to the residual stream as it is.

    Not so behind a norm, nor where a router weights it. Of two parallel blocks only attention makes up for
    what the stream lacks.
    """
    arch = bench.arch
    weighted = arch.experts is not None and not stage.in_attention
    return stage.out_norm is None and not weighted and (stage.in_attention or not arch.parallel)
