"""Estimate how long a calibration takes: time parts of its work, then count them. Writing is left out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from qrt.arch import Arch
from qrt.quant.spec import QuantSpec
from qrt_calibrate.estimate.bits import WINDOWS
from qrt_calibrate.estimate.budget import Budget
from qrt_calibrate.job.plan import Job
from qrt_calibrate.model.executor import BATCH_TOKENS, LayerExecutor, read_layer
from qrt_calibrate.model.head import PlainHead
from qrt_calibrate.model.reference import mixture_of
from qrt_calibrate.recipe.method import Method, Scales
from qrt_calibrate.recipe.recipe import LinearRecipe
from qrt_calibrate.rounding.factor import Factor
from qrt_calibrate.rounding.gptq import ROW_BLOCKS, block_width, round_columns
from qrt_calibrate.rounding.grid import choose_grid
from qrt_calibrate.rounding.rtn import round_weight
from qrt_calibrate.rounding.search import GRID, STRENGTHS
from qrt_calibrate.steps.bench import SEARCH_TOKENS
from qrt_calibrate.steps.sensitivity import block_sizes, gradient_windows
from qrt_calibrate.tuning.training import TEXT_WINDOWS, Training

SLICE = 256  # columns that GPTQ rounds for timing, and rows whose clipping is searched
ROWS = 4096  # rows that GPTQ rounds for timing, and rows of a head
ORDER = 512  # order of the Hessian that is factorized for timing
TOKENS = 128  # tokens that a CPU runs through a layer or a head; a GPU runs a batch of whole windows
ENOUGH = 0.1  # seconds spent on timing one part
LEAST_CALLS, MOST_CALLS = 2, 8


@torch.no_grad()
def expected_seconds(job: Job, budget: Budget | None = None) -> float:
    """Return the seconds for all layers and the head; with a `budget`, its measurement too."""
    torch.mm(*torch.ones(2, ORDER, ORDER, device=job.device))  # starts threads and libraries
    seconds = 0.0
    for alike in job.alike:
        tensors = read_layer(job.checkpoint, job.layer_name(alike[0]))
        seconds += _all_rounding(job, alike, tensors)
        if any(job.recipe.windows):
            windows = _Windows(job, alike[0], tensors)
            seconds += len(alike) * windows.layer() / len(job.devices)
    if any(job.recipe.windows):
        seconds += windows.ends(budget) / len(job.devices)
    if job.recipe.head is not None:
        weight = job.checkpoint.tensor(f"{job.arch.names.head}.weight")
        few = weight[:SLICE].to(job.device, torch.float32)
        seconds += _nearest(few, job.recipe.head.spec, job.scale_dtype) * len(weight) / len(few)
    return seconds


def _all_rounding(job: Job, alike: list[int], tensors: Mapping[str, Tensor]) -> float:
    """Time the rounding of the layers `alike`; `tensors` are those of one."""
    arch, rules, seconds = job.arch.at(alike[0]), job.recipe.rules, 0.0
    for fused, parts in arch.fuse:
        times = _experts(arch, fused, job.recipe.moe_calibrate_all_experts)
        weight = torch.cat([tensors[f"{part}.weight"] for part in parts[: len(parts) // times]])
        grids = Counter(job.grids[f"{job.layer_name(index)}.{parts[0]}"] for index in alike)
        for grid, count in grids.items():
            if grid is not None:
                whole = weight.to(job.device, torch.float32)
                own = replace(rules, rows=rules.rows and not arch.is_expert(fused))
                seconds += count * times * _rounding(own, grid, whole, job.scale_dtype)
    return seconds


def in_words(seconds: float) -> str:
    """Return an estimate in words, such as "about 12 minutes"."""
    minutes = seconds / 60
    if minutes < 0.75:
        return "less than a minute"
    if minutes < 90:
        count = round(minutes) if minutes < 20 else 5 * round(minutes / 5)
        return "about a minute" if count == 1 else f"about {count} minutes"
    hours = minutes / 60
    if hours < 36:
        return f"about {round(2 * hours) / 2 if hours < 5 else round(hours):g} hours"
    return f"about {round(2 * hours / 24) / 2:g} days"


def _nearest(few: Tensor, spec: QuantSpec, dtype: torch.dtype) -> float:
    """Time rounding some rows to nearest."""
    return _seconds(lambda: round_weight(few, spec, dtype).dequantize(), few)


def _experts(arch: Arch, fused: str, every: bool) -> int:
    """Return how many inputs the parts of `fused` have: one, or one for each expert.

    `every` expert is calibrated with all tokens, so that their first Linears have one input.
    """
    if arch.experts is None or not arch.is_expert(fused):
        return 1
    return 1 if every and fused.endswith("gate_up_proj") else arch.experts.count


def _rounding(method: Method, grid: LinearRecipe, weight: Tensor, dtype: torch.dtype) -> float:
    """Time the search and the rounding of one stack of weights [N, K]: slices of it, times their number."""
    spec = grid.spec
    rows, columns = weight.shape
    few = weight[:SLICE]
    nearest = _nearest(few, spec, dtype) * rows / len(few)
    if not method.needs_text:
        return nearest
    seconds = 2 * nearest  # the result, and rounding to nearest for its error
    tried = replace(spec, progressive=False) if method.gptq and method.scales is Scales.AWQ else spec
    seconds += _candidates(method.scales) * _nearest(few, tried, dtype) * rows / len(few)
    if method.clip:
        cost = torch.ones(columns, device=weight.device)
        found = _seconds(lambda: choose_grid(few, spec, dtype, cost), few)
        seconds += found * rows / len(few)
    if method.gptq:
        seconds += _gptq(weight, grid, dtype, method.rows, refactored=method.scales is not Scales.NONE)
    return seconds


def _candidates(scales: Scales) -> int:
    """Return how many scales are tried for a smoothing pair."""
    return {Scales.NONE: 0, Scales.AWQ: GRID, Scales.SMOOTHQUANT: 1 + len(STRENGTHS)}[scales]


def _gptq(weight: Tensor, grid: LinearRecipe, dtype: torch.dtype, coupled: bool, refactored: bool) -> float:
    """Time a Hessian's factorization and the walk over the columns.

    refactored   the Hessian is factorized again after a fold
    coupled      rows compensate too: their moments are factorized, the walk is longer, and errors go to later
                 rows
    """
    rows, columns = weight.shape
    order = min(columns, ORDER)
    hessian = torch.eye(order, device=weight.device)
    factorized = _seconds(lambda: Factor.of(hessian, 0.01), weight) / order**3
    width = min(columns, max(SLICE, grid.spec.group_of(columns)))
    part = weight[: rows if weight.is_cuda else ROWS, :width]
    plain = round_weight(part, grid.spec, dtype)
    assert plain.scale is not None
    scale, zero = plain.scale, plain.zero
    eye = Factor(torch.arange(width, device=weight.device), torch.eye(width, device=weight.device), 0.0)
    walked = _seconds(lambda: round_columns(part, eye, scale, zero, grid.spec), part) * rows / len(part)
    spread = _seconds(lambda: part @ part.T[:, :SLICE], part) / (
        2 * len(part) * width * min(SLICE, len(part))
    )
    cubes, steps, sent = (1 + refactored) * columns**3, columns, rows * columns**2
    if coupled:
        cubes += sum(size**3 for size in block_sizes(rows))
        steps += (ROW_BLOCKS - 1) * block_width(weight)
        sent += sum(size**2 for size in block_sizes(rows)) * columns
    return factorized * cubes + walked * steps / width + spread * sent


class _Windows:
    """Time the work that depends on the text: forwards over the windows, moments and the head.

    All devices are assumed to be equal and to have the same number of windows.

    forward   seconds of one window through a layer
    """

    def __init__(self, job: Job, index: int, tensors: Mapping[str, Tensor]) -> None:
        self._job, self._arch, self._seqlen = job, job.arch.at(index), job.recipe.seqlen
        self._every = job.recipe.moe_calibrate_all_experts
        on_cpu = job.device.type == "cpu"
        tokens = min(self._seqlen, TOKENS) if on_cpu and self._arch.experts is None else self._seqlen
        batch = 1 if on_cpu else max(1, BATCH_TOKENS // self._seqlen)
        self._executor = LayerExecutor(job.checkpoint, job.arch, tokens, job.device)
        self._index, self._layer = index, self._executor.load(index, tensors)
        self._hidden = torch.randn(batch, tokens, job.arch.hidden_size, device=job.device)
        self._shapes = {name: tensors[f"{name}.weight"].shape for name in self._arch.projections}
        weights = sum(shape.numel() for shape in self._shapes.values())
        width = job.arch.num_heads * job.arch.head_dim
        per_token = (2 * weights + 4 * width * length for length in (self._seqlen, tokens))
        more = next(per_token) / next(per_token)  # tokens of a longer window attend to more tokens
        self._times = self._seqlen / tokens / batch  # timed pieces of work in one window
        self.forward = more * self._window(lambda: self._executor.run(self._index, self._layer, self._hidden))
        self._more = more

    def _window(self, work: Callable[[], object]) -> float:
        """Return the seconds of `work`, which takes `_hidden`, for a whole window."""
        return self._times * _seconds(work, self._hidden)

    def layer(self) -> float:
        """Return the seconds of one layer."""
        job = self._job
        calibrating, evaluating = job.recipe.windows
        seconds = 2 * self.forward * (calibrating + evaluating)  # exact and rounded, to the next layer
        if calibrating:
            seconds += self._moments() * calibrating + self._judging()
        if windows := gradient_windows(job.recipe):
            seconds += self._gradients() * windows
        return seconds + self._training(job.training)

    def ends(self, budget: Budget | None) -> float:
        """Return the seconds of what is measured behind the last layer."""
        gradients, evaluated = self._head()
        seconds = evaluated * self._job.recipe.windows[1] + gradients * gradient_windows(self._job.recipe)
        return seconds + (0.0 if budget is None else self._measured_bits(budget, evaluated))

    def _moments(self) -> float:
        """Time the moments of one window's inputs, and the forwards to them in the rounded model.

        The exact model's are those that take its states through the layer.
        """
        total, before, seconds = sum(shape.numel() for shape in self._shapes.values()), 0, 0.0
        for number, (fused, parts) in enumerate(self._arch.fuse):
            if number == 2 and not self._arch.parallel:  # the second block
                before = 0
            seconds += self.forward * before / total  # from the block's beginning up to the Linears' input
            before += sum(self._shapes[part].numel() for part in parts)
            x = torch.randn(
                self._hidden.shape[:2].numel(), self._shapes[parts[0]][1], device=self._hidden.device
            )
            moments = 2 * self._window(partial(torch.mm, x.T, x))  # Hessian and drift
            if (count := _experts(self._arch, fused, self._every)) > 1:
                if fused.endswith("down_proj"):  # the forward to it, in both copies
                    read = mixture_of(self._layer).read
                    moments += 2 * self._window(partial(read, 0, self._hidden.flatten(0, 1), None, True))
                assert self._arch.experts is not None
                moments *= count if self._every else self._arch.experts.router.top_k
            seconds += moments
        return seconds

    def _judging(self) -> float:
        """Time the forwards of a layer's sample.

        These are the exact layer, the rounded one, the one rounded to nearest, a check of each fold, and, if
        no Hessian judges candidates, the runs that do (both of a block, half a layer).
        """
        recipe, folds = self._job.recipe, len(self._arch.smooth)
        forwards = 3.0
        if recipe.rules.scales is not Scales.NONE:
            judged = not (recipe.rules.gptq and recipe.rules.scales is Scales.AWQ)
            forwards += folds * (1 + _candidates(recipe.rules.scales) * judged) / 2
        return forwards * self.forward * min(recipe.n_samples, max(1, SEARCH_TOKENS // self._seqlen))

    def _gradients(self) -> float:
        """Time one window's gradients at a layer: a forward, twice forward and back, once with moments."""
        back = self._more * self._window(
            lambda: self._executor.backward(self._index, self._layer, self._hidden, self._hidden)
        )
        seconds = self.forward + 2 * back
        for fused, parts in self._arch.fuse:
            if not self._arch.is_expert(fused):
                for size in block_sizes(sum(self._shapes[part][0] for part in parts)):
                    g = torch.randn(self._hidden.shape[:2].numel(), size, device=self._hidden.device)
                    seconds += self._window(partial(torch.mm, g.T, g))
        return seconds

    def _training(self, training: Training) -> float:
        """Time one layer in training: drawing, the original forward, the rounded forward and back."""
        windows = training.steps * training.batch * training.length / self._seqlen
        return (2 + 1 + 1 + 2 + (1 + 2) / TEXT_WINDOWS) * self.forward * windows

    def _head(self) -> tuple[float, float]:
        """Time one window's gradient after the last layer, and its evaluation in both models."""
        job, device = self._job, self._hidden.device
        vocab, width = job.checkpoint.spec(f"{job.arch.names.embed}.weight").shape
        tokens = min(self._seqlen, TOKENS)
        head = PlainHead(torch.randn(min(vocab, ROWS), width, dtype=job.scale_dtype, device=device))
        x = torch.randn(tokens, width, device=device)

        def gradient() -> Tensor:
            wrong = head.logits(x).softmax(-1)
            torch.multinomial(wrong, 1)
            return wrong @ head.weight.float()

        def evaluation() -> Tensor:
            p, q = (F.log_softmax(head.logits(x), -1) for _ in range(2))
            return F.kl_div(q, p, reduction="sum", log_target=True)

        times = vocab / len(head.weight) * self._seqlen / tokens
        return times * _seconds(gradient, x), times * _seconds(evaluation, x)

    def _measured_bits(self, budget: Budget, evaluated: float) -> float:
        """Time the measurement of a budget: each unit and width is a stream from its layer to the last."""
        layers = self._job.arch.num_layers
        streams = len(budget.units) * sum(grid is not None for grid in budget.grids.values())
        return WINDOWS * streams * (self.forward * (layers + 1) / 2 + evaluated)


def _seconds(work: Callable[[], object], beside: Tensor) -> float:
    """Return the time of `work` on `beside`'s device, with nothing else running.

    On a busy CPU threads wait for each other, which can take a hundred times the CPU time of one thread; the
    smaller of the two counts.
    """
    if beside.is_cuda:
        return _shortest(work, partial(_device_time, beside.device))
    together, threads = _shortest(work, time.perf_counter), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return min(together, _shortest(work, time.process_time))
    finally:
        torch.set_num_threads(threads)


def _device_time(device: torch.device) -> float:
    torch.cuda.synchronize(device)
    return time.perf_counter()


def _shortest(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the shortest time of several calls, by `clock`."""
    times: list[float] = []
    until = time.perf_counter() + ENOUGH
    while len(times) < LEAST_CALLS or (len(times) < MOST_CALLS and time.perf_counter() < until):
        began = clock()
        work()
        times.append(clock() - began)
    return min(times)
