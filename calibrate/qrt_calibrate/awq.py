"""AWQ: before rounding, scale up the input channels that activations say matter (arXiv:2306.00978).

Layers run in order, each on the outputs of the quantized layers before it. In a layer, every smoothing pair
is searched, folded into the weights and checked; then weight ranges are clipped and the weights rounded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qrt.arch.base import Smooth
from qrt.errors import ConfigError
from qrt.quant.spec import Granularity
from qrt.quant.weight import WeightData
from qrt_calibrate.clip import search_clip
from qrt_calibrate.decoder import Decoder
from qrt_calibrate.fold import Pair, check_unchanged, linear
from qrt_calibrate.method import Job, LayerResult, Method
from qrt_calibrate.observe import InputStats, observe_inputs, record_call
from qrt_calibrate.rtn import round_weight, with_bias
from qrt_calibrate.search import search_scales
from qrt_calibrate.text import cut_windows, load_tokenizer, read_text

SEARCH_TOKENS = 4096  # tokens that judge a candidate; the statistics come from all of them


class Awq(Method):
    """AWQ over the architecture's smoothing pairs; the report compares it with rounding to nearest."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        recipe = job.recipe
        if recipe.spec.granularity is not Granularity.GROUP:
            raise ConfigError(f"--method awq: for weight-only schemes, not {recipe.scheme}; use --method rtn")
        if recipe.seqlen > job.config.max_position:
            raise ConfigError(
                f"--seqlen: got {recipe.seqlen}, the model holds {job.config.max_position} tokens"
            )
        text, source = read_text(recipe.calib)
        tokenizer = load_tokenizer(job.checkpoint.path)
        windows = cut_windows(text, tokenizer, recipe.n_samples, recipe.seqlen, recipe.seed)
        self._text = {"text": source, "sha256": hashlib.sha256(text.encode()).hexdigest()}
        self.decoder = Decoder(job.checkpoint, job.arch, recipe.seqlen, job.device)
        self.hidden = self.decoder.embed(windows)

    @property
    def metadata(self) -> dict[str, Any]:
        """The calibration text and how it was cut."""
        recipe = self.job.recipe
        shape = {"n_samples": recipe.n_samples, "seqlen": recipe.seqlen, "seed": recipe.seed}
        return {"calibration": {**self._text, **shape}}

    @torch.no_grad()
    def quantize(self, index: int, tensors: Mapping[str, Tensor]) -> LayerResult:
        """Search, fold, check, clip and round; then run the quantized layer to the inputs of the next."""
        work = LayerWork(self.job, self.decoder, index, tensors, self.hidden)
        rtn_error = work.rtn_error()
        work.observe()
        scales = [work.smooth(pair) for pair in work.pairs()]
        linears = {name: work.round(name) for name in work.names}
        figures = {
            "output error, rtn": rtn_error,
            "output error, awq": work.output_error(work.layer),
            "largest scale": max(scales, default=1.0),
        }
        if index + 1 < self.job.config.num_layers:
            work.advance()
        return LayerResult(linears, work.remaining(), figures)


class LayerWork:
    """One layer on the bench: its module in fp32, its input statistics, a sample and its exact output."""

    def __init__(
        self, job: Job, decoder: Decoder, index: int, tensors: Mapping[str, Tensor], hidden: Tensor
    ) -> None:
        self.job, self.names = job, job.projections(index)
        self.layer = decoder.load(index, tensors)
        self._decoder, self._index, self._tensors, self._hidden = decoder, index, tensors, hidden
        self._sample = hidden[: max(1, SEARCH_TOKENS // hidden.shape[1])].to(job.device)
        self._exact = self._run(self.layer)
        self.stats: dict[str, InputStats] = {}

    def _run(self, layer: nn.Module) -> Tensor:
        return self._decoder.run(self._index, layer, self._sample)

    def output_error(self, layer: nn.Module) -> float:
        """Error of `layer`'s output on the sample, relative to what the exact layer adds to its input."""
        return float((self._run(layer) - self._exact).norm() / (self._exact - self._sample).norm())

    def rtn_error(self) -> float:
        """`output_error` of this layer rounded to nearest."""
        layer = self._decoder.load(self._index, self._tensors)
        for name in self.names:
            weight = linear(layer, name).weight
            weight.copy_(round_weight(weight, self.job.recipe.spec, self.job.scale_dtype).dequantize())
        return self.output_error(layer)

    def observe(self) -> None:
        """Collect the statistics of the quantized Linears' inputs, once per input, over all windows."""
        fused = [parts for _, parts in self.job.arch.fuse if parts[0] in self.names]

        def run() -> None:
            for _ in self._decoder.outputs(self._index, self.layer, self._hidden):
                pass

        seen = observe_inputs(self.layer, [parts[0] for parts in fused], self.job.recipe.spec, run)
        self.stats = {part: seen[parts[0]] for parts in fused for part in parts}

    def pairs(self) -> list[Smooth]:
        """The smoothing pairs that touch no ignored projection: those are left as they are."""
        ignored = set(self.job.arch.projections) - set(self.names)
        return [pair for pair in self.job.arch.smooth if ignored.isdisjoint((pair.source, *pair.readers))]

    def smooth(self, smooth: Smooth) -> float:
        """Search, fold and check one pair; returns its largest scale."""
        job, reader = self.job, smooth.readers[0]
        pair = Pair(self.layer, smooth, job.config.head_dim)
        # a lone reader is judged by its own output, several by the output of the block they are in
        block = reader if len(smooth.readers) == 1 else reader.rpartition(".")[0]
        call = record_call(self.layer, block, lambda: self._run(self.layer))
        found = search_scales(pair, call, self.stats[reader].mean_abs, job.recipe.spec, job.scale_dtype)
        pair.fold(found.scales)
        after = self._run(self.layer)
        check_unchanged(self._exact, after, self._sample, job.layer_name(self._index), smooth)
        columns = pair.spread(found.scales)
        self.stats.update({name: self.stats[name].divided(columns) for name in smooth.readers})
        return float(found.scales.max())

    def round(self, name: str) -> WeightData:
        """Clip and round one Linear; the layer keeps the rounded weight."""
        module, spec, dtype = linear(self.layer, name), self.job.recipe.spec, self.job.scale_dtype
        shrink = search_clip(module.weight, self.stats[name].moment, spec, dtype)
        data = round_weight(module.weight, spec, dtype, shrink)
        module.weight.copy_(data.dequantize())
        bias = None if module.bias is None else self._restored(f"{name}.bias", module.bias)
        return with_bias(data, bias)

    def _restored(self, name: str, tensor: Tensor) -> Tensor:
        """`tensor` on the CPU in the dtype it was stored in."""
        return tensor.to("cpu", self._tensors[name].dtype)

    def remaining(self) -> dict[str, Tensor]:
        """Every stored tensor of the layer that is not part of a quantized Linear, as folded."""
        done = {f"{name}.{part}" for name in self.names for part in ("weight", "bias")}
        now = self.layer.state_dict()
        return {
            name: self._restored(name, now.get(name, tensor))
            for name, tensor in self._tensors.items()
            if name not in done
        }

    def advance(self) -> None:
        """Replace the hidden states by this layer's outputs."""
        for part, output in self._decoder.outputs(self._index, self.layer, self._hidden):
            part.copy_(output)
