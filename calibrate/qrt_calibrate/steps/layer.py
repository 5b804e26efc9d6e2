"""One decoder layer on the bench: its fused Linears in the order they run, each searched, folded and rounded.

Two copies of the layer stand side by side: `exact`, folded but never rounded, and `rounded`, whose Linears
are replaced one after the other. A Linear is thus fitted to the inputs that it will really have, and to the
output that the exact model has in its place: W' = W + t (W E[(x' - x) x^T] + E[(r' - r) x^T]) H^-1 undoes
what a linear map can of the error that came before, in the input (GPTAQ, arXiv:2504.02692) and, for the
Linears whose output is added to it, in the residual stream r. The trust t is measured: a correction that
the two halves of the windows do not agree on would be fitted to their noise.

Errors of what is added to the residual stream count as the next norm sees them: divided by the token's size.
Summed as they are, those of a token with massive activations would hide all others.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os.path import commonprefix

import torch
from torch import Tensor, nn

from qrt.arch.base import Smooth
from qrt.quant.affine import choose_qparams
from qrt.quant.weight import WEIGHT_SCHEMES, WeightData
from qrt_calibrate.job.plan import Job
from qrt_calibrate.model.decoder import Decoder
from qrt_calibrate.model.experts import EXPERT_BYTES, inside
from qrt_calibrate.model.streams import Share, Streams
from qrt_calibrate.recipe.method import Scales
from qrt_calibrate.recipe.recipe import Grid
from qrt_calibrate.rounding.clip import search_clip
from qrt_calibrate.rounding.fold import Pair, check_unchanged, linear
from qrt_calibrate.rounding.gptq import Factor, round_columns
from qrt_calibrate.rounding.observe import Moments, inputs_of, norm_weights, record_call
from qrt_calibrate.rounding.rtn import for_writer, round_weight, split
from qrt_calibrate.rounding.search import (
    ColumnCost,
    RoundedCost,
    awq_candidates,
    round_input,
    smooth_candidates,
)
from qrt_calibrate.steps.sensitivity import OutputMoments, output_moments

SEARCH_TOKENS = 4096  # that judge a candidate of AWQ and SmoothQuant; the moments come from all tokens
OWN_DAMPING = 0.01  # share of each column's own diagonal that is added to it
ROW_DAMPING = 0.08  # share of the gradients' moments' diagonal that is added to it


@dataclass(frozen=True)
class LayerResult:
    """A finished layer; names are relative to it and tensors lie on the CPU.

    linears   quantized weights with their biases
    tensors   everything else, in its stored dtype
    figures   what the report shows of the layer, by column title
    """

    linears: dict[str, WeightData]
    tensors: dict[str, Tensor]
    figures: dict[str, float]


class LayerWork:
    """Layer `index`, whose stored tensors are `tensors` (names relative to the layer)."""

    def __init__(
        self,
        job: Job,
        decoder: Decoder | None,
        index: int,
        tensors: Mapping[str, Tensor],
        streams: Streams | None,
    ) -> None:
        self.job, self.name, self.grids = job, job.layer_name(index), job.layer_grids(index)
        self._decoder, self._index, self._tensors, self._streams = decoder, index, tensors, streams
        pairs = [pair for pair in job.arch.smooth if pair.source not in job.arch.projections]
        self._norms = {reader: pair.source for pair in pairs for reader in pair.readers}
        self._norm = ""  # the last norm before the Linears at work; it reads the residual stream
        self.done: dict[str, WeightData] = {}
        self.figures: dict[str, float] = {}

    @torch.no_grad()
    def quantize(self) -> LayerResult:
        """Round every Linear of the layer that has a grid."""
        if not self.job.recipe.steps.needs_text:
            return self._round_all()
        assert self._decoder is not None and self._streams is not None
        self.exact = self._decoder.load(self._index, self._tensors)
        self.rounded = copy.deepcopy(self.exact)
        first, windows = self._streams.shares[0], max(1, SEARCH_TOKENS // self._streams.seqlen)
        self._sample = first.rounded[: first.calibrating][:windows].to(self.job.device)
        self._wanted = self._run(self.exact)
        felt = self._output_moments()
        for _, parts in self.job.arch.fuse:
            self._norm = self._norms.get(parts[0], self._norm)
            if parts[0] in self.grids:
                self._quantize_stage(parts, felt.pop(parts, None))
        errors = {"output error": self._output_error(self.rounded), "output error, rtn": self._rtn_error()}
        return LayerResult(self._finished(), self._remaining(), {**errors, **self.figures})

    # -- stages --------------------------------------------------------------------------------------------

    def _quantize_stage(self, parts: tuple[str, ...], felt: OutputMoments | None) -> None:
        """Round the Linears `parts`, which read one input; `felt` is what the loss feels of the output, None
        where rows are rounded each for itself."""
        if self.job.arch.is_expert(parts[0]) and parts[0] not in self._norms:
            for own in self._measured_inside(parts):
                self._quantize_linears(*own, None)
        else:
            self._quantize_linears(parts, self._measure(parts), felt)

    def _quantize_linears(self, parts: tuple[str, ...], moments: Moments, felt: OutputMoments | None) -> None:
        """Fold and round `parts`, whose input has `moments`."""
        grid = self.grids[parts[0]]
        gptq = self.job.recipe.steps.gptq
        factor = self._factor(moments) if gptq else None
        smooth = self._pair_of(parts)
        if smooth is not None and self._fold(smooth, moments, factor, grid) and gptq:
            factor = self._factor(moments)  # of D^-1 H D^-1, in its own order
        weights = [linear(self.rounded, part).weight for part in parts]
        data = self._round(torch.cat(weights), moments, factor, felt, grid)
        rows = [linear(self.rounded, part).out_features for part in parts]
        for part, own in zip(parts, split(data, rows), strict=True):
            self.done[part] = own
            linear(self.rounded, part).weight.copy_(own.dequantize())
            if WEIGHT_SCHEMES[grid.scheme].int8_tokens:
                round_input(linear(self.rounded, part))
        self._note("damping", factor.damping if factor else 0.0)

    def _factor(self, moments: Moments) -> Factor | None:
        return Factor.of(moments.hessian, OWN_DAMPING, self.job.recipe.damping)

    def _output_moments(self) -> dict[tuple[str, ...], OutputMoments]:
        """What the loss feels of each stage's output, where the method asks. Folds do not change it: those
        that divide an output come after its stage."""
        assert self._decoder is not None and self._streams is not None
        decoder, index = self._decoder, self._index
        stages = [
            parts
            for _, parts in self.job.arch.fuse
            if parts[0] in self.grids
            and not self.job.arch.is_expert(parts[0])  # they feel only what is sent to them
        ]

        def measure(share: Share, exact: nn.Module) -> dict[tuple[str, ...], OutputMoments]:
            if share.gradients is None:
                return {}
            gradients = share.gradients[index]
            windows = share.batches(share.exact[: len(gradients)], gradients)
            return output_moments(decoder, index, exact, stages, windows)

        found, *others = self._streams.each(measure, self.exact)
        for other in others:
            for parts, moments in found.items():
                moments.join(other[parts])
        return found

    def _measure(self, parts: tuple[str, ...]) -> Moments:
        """Moments of the input of `parts`, and of the residual stream if their output is added to it, over
        the calibration windows."""
        assert self._streams is not None
        first, closes = linear(self.rounded, parts[0]), parts[0] not in self._norms
        adds = closes and not self._is_weighted(parts[0])
        reader = parts[0]
        if self.job.arch.is_expert(reader):  # it would see no more than is sent to it
            assert self.job.arch.experts is not None
            reader = self.job.arch.experts
        names = [self._norm, reader] if closes else [reader]
        total, eps = self._streams.calibrating * self._streams.seqlen, self.job.config.rms_norm_eps

        def measure(share: Share, exact: nn.Module, rounded: nn.Module) -> Moments:
            weight = linear(rounded, parts[0]).weight if adds else None
            moments = Moments(first.in_features, weight, share.device)
            streams = (stream[: share.calibrating] for stream in (share.exact, share.rounded))
            for half, exact_hidden, hidden in share.batches(*streams):
                *stream, x = self._inputs(rounded, names, hidden)
                *exact_stream, exact_x = self._inputs(exact, names, exact_hidden)
                both, weights = None, None
                if closes:
                    behind = exact_stream[0]
                    if adds:
                        both, behind = (stream[0], behind), behind + linear(exact, parts[0])(exact_x)
                    weights = norm_weights(behind, eps)
                moments.add(x, exact_x, total, half, both, weights)
            return moments

        moments, *others = self._streams.each(measure, self.exact, self.rounded)
        for other in others:
            moments.join(other)
        return moments

    def _measured_inside(self, parts: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Moments]]:
        """Moments of the input of each of `parts`, the experts' last Linears, over all calibration tokens,
        wherever they are sent, weighted by the stream before the experts; as many at a time as EXPERT_BYTES
        hold."""
        assert self._streams is not None and self.job.arch.experts is not None
        width = linear(self.rounded, parts[0]).in_features
        names = [self._norm, self.job.arch.experts]
        total, eps = self._streams.calibrating * self._streams.seqlen, self.job.config.rms_norm_eps

        def measure(
            some: Sequence[str], share: Share, exact: nn.Module, rounded: nn.Module
        ) -> dict[str, Moments]:
            moments = {part: Moments(width, None, share.device) for part in some}
            streams = (stream[: share.calibrating] for stream in (share.exact, share.rounded))
            for half, exact_hidden, hidden in share.batches(*streams):
                _, x = self._inputs(rounded, names, hidden)
                exact_stream, exact_x = self._inputs(exact, names, exact_hidden)
                weights = norm_weights(exact_stream, eps)
                for part, own in moments.items():
                    own.add(
                        inside(rounded, part, x), inside(exact, part, exact_x), total, half, weights=weights
                    )
            return moments

        step = max(1, EXPERT_BYTES // (3 * 4 * width**2))
        for begin in range(0, len(parts), step):
            work = partial(measure, parts[begin : begin + step])
            found, *others = self._streams.each(work, self.exact, self.rounded)
            for part, own in found.items():
                for other in others:
                    own.join(other[part])
                yield (part,), own

    def _is_weighted(self, name: str) -> bool:
        """Whether a router weights what the Linear `name` adds to the residual stream."""
        block = (self.job.arch.experts or "").rpartition(".")[0]
        return block != "" and name.startswith(f"{block}.")

    def _inputs(self, layer: nn.Module, names: list[str], hidden: Tensor) -> list[Tensor]:
        return inputs_of(layer, names, lambda: self._run(layer, hidden))

    def _pair_of(self, parts: tuple[str, ...]) -> Smooth | None:
        """The smoothing pair whose readers begin with `parts`, if scales are searched and its source may
        change."""
        if self.job.recipe.steps.scales is Scales.NONE:
            return None
        left_alone = set(self.job.arch.projections) - set(self.grids)
        found = (pair for pair in self.job.arch.smooth if pair.readers[0] == parts[0])
        return next((pair for pair in found if pair.source not in left_alone), None)

    def _fold(self, smooth: Smooth, moments: Moments, factor: Factor | None, grid: Grid) -> bool:
        """Search the pair's scales, fold them into both copies, check; whether anything changed."""
        job = self.job
        pair, rounded = (Pair(layer, smooth, job.config.head_dim) for layer in (self.exact, self.rounded))
        powers = job.recipe.exact_folds
        if job.recipe.steps.scales is Scales.SMOOTHQUANT:
            candidates = smooth_candidates(pair, moments.max_abs, powers)
        else:
            candidates = awq_candidates(pair, moments.mean_abs, grid.spec, powers)
        if factor is not None and job.recipe.steps.scales is Scales.AWQ:
            cost: ColumnCost | RoundedCost = ColumnCost(pair, factor, grid.spec)
        else:  # a lone reader is judged by its own output, several by that of the block they are in
            block = ".".join(commonprefix([reader.split(".") for reader in smooth.readers]))
            call = record_call(self.exact, block, lambda: self._run(self.exact))
            int8_tokens = WEIGHT_SCHEMES[grid.scheme].int8_tokens
            weights = self._sample_weights() if call.output.shape[:-1] == self._sample.shape[:-1] else None
            cost = RoundedCost(pair, call, grid.spec, job.scale_dtype, int8_tokens, weights)
        if powers:
            candidates = (scales for scales in candidates if self._is_exact(rounded, smooth.source, scales))
        scales = min(candidates, key=cost)  # the first one, the identity, unless another is better
        self._note("largest scale", float(scales.max()))
        if (scales == 1).all():
            return False
        for one in (pair, rounded):
            one.fold(scales)
        if smooth.source in self.done:  # rounded already: its rows are divided by dividing their scales
            self.done[smooth.source] = _divided(self.done[smooth.source], scales)
        check_unchanged(self._wanted, self._run(self.exact), self._sample, self.name, smooth)
        moments.divide(pair.spread(scales))
        return True

    def _sample_weights(self) -> Tensor:
        """Return [T, 1]: what a squared error costs in each of the sample's tokens behind the block that the
        Linears at work are in, as the next norm sees it."""
        norms = list(dict.fromkeys(self._norms.values()))
        after = norms[norms.index(self._norm) + 1 :]
        if not after:
            behind = self._wanted.flatten(0, -2)
        else:
            (behind,) = inputs_of(self.exact, after[:1], lambda: self._run(self.exact))
        return norm_weights(behind, self.job.config.rms_norm_eps)

    def _is_exact(self, pair: Pair, source: str, scales: Tensor) -> bool:
        """Whether the model dtype holds what the fold makes of the source (fp16 can underflow)."""
        if not pair.is_exact(scales, self.job.scale_dtype):
            return False
        done = self.done.get(source)
        if done is None or done.scale is None:
            return True
        divided = _divided(done, scales).scale
        assert divided is not None
        return torch.equal(divided.float() * scales[:, None], done.scale.float())

    def _round(
        self,
        weight: Tensor,
        moments: Moments,
        factor: Factor | None,
        felt: OutputMoments | None,
        grid: Grid,
    ) -> WeightData:
        """The stacked weight [N, K] on its grid."""
        spec, dtype, steps = grid.spec, self.job.scale_dtype, self.job.recipe.steps
        if factor is None:
            if steps.gptq:
                self._note("rounded to nearest", 1.0)
            shrink = search_clip(weight, moments.hessian.diagonal(), spec, dtype) if steps.clip else 1.0
            return round_weight(weight, spec, dtype, shrink)
        correction, trust = moments.take_correction(weight, factor.solve)
        most = torch.finfo(dtype).max / 2  # a loader would make infinity of more; a dead input asks for it
        weight = correction.mul_(trust).add_(weight).clamp_(-most, most)
        shrink = search_clip(weight, factor.importance(), spec, dtype) if steps.clip else 1.0
        scale, zero = choose_qparams(weight, spec, dtype, shrink)
        rows = [Factor.of(block, ROW_DAMPING) for block in felt.trusted((weight != 0).any(1))] if felt else []
        known = [factor for factor in rows if factor is not None]
        if not rows or len(known) < len(rows):
            self._note("rows each for itself", float(bool(rows)))
            return round_columns(weight, factor, scale, zero, spec)
        return round_columns(weight, factor, scale, zero, spec, known)

    def _round_all(self) -> LayerResult:
        """Round to nearest, one weight after the other; no activations are looked at."""
        wrong = size = 0.0
        grids = {f"{name}.weight" for name in self.grids}
        rest = {name: self._restored(name, own) for name, own in self._tensors.items() if name not in grids}
        for name, grid in self.grids.items():
            weight = self._tensors[f"{name}.weight"].to(self.job.device, torch.float32)
            data = round_weight(weight, grid.spec, self.job.scale_dtype)
            wrong += float((data.dequantize() - weight).square().sum())
            size += float(weight.square().sum())
            self.done[name] = for_writer(data, rest.pop(f"{name}.bias", None))
        return LayerResult(self.done, rest, {"weight error": (wrong / size) ** 0.5 if size else 0.0})

    # -- what comes out ------------------------------------------------------------------------------------

    def _finished(self) -> dict[str, WeightData]:
        """The quantized Linears, with their folded biases, or those of zeros that are stored beside them."""
        found = {}
        for name in self.grids:
            bias, stored = linear(self.rounded, name).bias, self._tensors.get(f"{name}.bias")
            stored = stored if bias is None else self._restored(f"{name}.bias", bias)
            found[name] = for_writer(self.done[name], stored)
        return found

    def _remaining(self) -> dict[str, Tensor]:
        """Every stored tensor of the layer that is not part of a quantized Linear, as folded."""
        done = {f"{name}.{part}" for name in self.grids for part in ("weight", "bias")}
        now = self.rounded.state_dict()
        return {
            name: self._restored(name, now.get(name, tensor))
            for name, tensor in self._tensors.items()
            if name not in done
        }

    def _restored(self, name: str, tensor: Tensor) -> Tensor:
        """`tensor` on the CPU in the dtype it was stored in."""
        return tensor.to("cpu", self.job.checkpoint.spec(f"{self.name}.{name}").dtype)

    # -- figures -------------------------------------------------------------------------------------------

    def _run(self, layer: nn.Module, hidden: Tensor | None = None) -> Tensor:
        assert self._decoder is not None
        return self._decoder.run(self._index, layer, self._sample if hidden is None else hidden)

    def _output_error(self, layer: nn.Module) -> float:
        """Error of `layer`'s output on the sample as the next norm sees it, relative to what the exact layer
        adds to its input, or to that where it adds nothing."""
        root = norm_weights(self._wanted, self.job.config.rms_norm_eps).sqrt()
        error = ((self._run(layer) - self._wanted) * root).norm()
        added = ((self._wanted - self._sample) * root).norm()
        size = added if added else (self._sample * root).norm()
        return float(error / size if size else error)

    def _rtn_error(self) -> float:
        """`_output_error` of this layer rounded to nearest."""
        assert self._decoder is not None
        layer = self._decoder.load(self._index, self._tensors)
        for name, grid in self.grids.items():
            module = linear(layer, name)
            module.weight.copy_(round_weight(module.weight, grid.spec, self.job.scale_dtype).dequantize())
            if WEIGHT_SCHEMES[grid.scheme].int8_tokens:
                round_input(module)
        return self._output_error(layer)

    def _note(self, title: str, value: float) -> None:
        """Keep the largest of the layer's stages."""
        self.figures[title] = max(value, self.figures.get(title, 0.0))


def _divided(data: WeightData, scales: Tensor) -> WeightData:
    """A quantized source after a fold: its rows divided by `scales`, its codes as they are."""
    assert data.scale is not None
    return replace(data, scale=(data.scale.float() / scales[:, None]).to(data.scale.dtype))
