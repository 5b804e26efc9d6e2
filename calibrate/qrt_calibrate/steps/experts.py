"""The calibration tokens that count for each expert of a mixture, and the moments of what it reads of them.

An expert counts the tokens that the router sends to it in the rounded model. One that fewer than LEAST_TOKENS
choose also counts those that come closest to choosing it, so that its moments are not noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from qrt_calibrate.model.mixture import ReferenceMoE
from qrt_calibrate.model.reference import mixture_of
from qrt_calibrate.model.streams import Share
from qrt_calibrate.rounding.fold import linear
from qrt_calibrate.rounding.observe import Moments, norm_weights
from qrt_calibrate.steps.bench import Bench, Parts, Stage

LEAST_TOKENS = 512  # fewest tokens that count for an expert, if there are as many
EXPERT_BYTES = 4 << 30  # most bytes of experts' moments held at a time, but one expert's at least


@dataclass(frozen=True)
class Census:
    """How many calibration tokens each expert of a layer gets.

    chosen   int64 [E] tokens that choose each expert in the rounded model
    tokens   number of all tokens
    agree    share of the choices that the exact model makes too
    every    all tokens count for each expert, wherever the router sends them
    """

    chosen: Tensor
    tokens: int
    agree: float
    every: bool

    @property
    def lacking(self) -> Tensor:
        """Tokens [E] that count for an expert although they do not choose it."""
        least = self.tokens if self.every else min(LEAST_TOKENS, self.tokens)
        return (least - self.chosen).clamp(min=0)

    def figures(self) -> dict[str, float]:
        """Return the figures for the report."""
        found = {"fewest tokens": float(self.chosen.min()), "median tokens": float(self.chosen.median())}
        if not self.every:
            found["experts topped up"] = float((self.lacking > 0).sum())
        return found | {"same experts": self.agree}


def count_tokens(bench: Bench, every: bool) -> Census:
    """Count the tokens that choose each expert; the stages before the experts must be rounded."""
    spec, streams = bench.arch.experts, bench.streams
    assert spec is not None

    def count(share: Share, exact: nn.Module, rounded: nn.Module) -> tuple[Tensor, int]:
        chosen, same = torch.zeros(spec.count, dtype=torch.int64), 0
        streams = (stream[: share.calibrating] for stream in (share.exact, share.rounded))
        for _, exact_hidden, hidden in share.batches(*streams):
            both = []
            for layer, states in ((rounded, hidden), (exact, exact_hidden)):
                (x,) = bench.inputs(layer, [spec.module], states)
                _, own = mixture_of(layer).choose(x)
                both.append(x.new_zeros(len(x), spec.count).scatter_(1, own, 1.0))
            chosen += both[0].sum(0).long().cpu()
            same += int((both[0] * both[1]).sum())
        return chosen, same

    found = streams.each(count, bench.exact, bench.rounded)
    tokens = streams.calibrating * streams.seqlen
    total = sum((chosen for chosen, _ in found), torch.zeros(spec.count, dtype=torch.int64))
    return Census(total, tokens, sum(same for _, same in found) / int(total.sum()), every)


class Picker:
    """Picks the tokens of successive batches that count for each expert, on `device`."""

    def __init__(self, census: Census, device: torch.device) -> None:
        self._census, self._lacking = census, census.lacking.to(device)
        self._others = (census.tokens - census.chosen).clamp(min=1).to(device)  # that choose another expert
        self._seen = torch.zeros_like(self._others)

    def pick(self, mixture: ReferenceMoE, x: Tensor) -> Sequence[Tensor]:
        """Return for each expert the numbers of the tokens of x [T, H] that count for it, ascending."""
        if self._census.every:
            return [torch.arange(len(x), device=x.device)] * len(self._lacking)
        _, chosen = mixture.choose(x)
        member = torch.zeros(len(x), len(self._lacking), dtype=torch.bool, device=x.device)
        member.scatter_(1, chosen, True)
        more = self._more(len(x) - member.sum(0))
        if most := int(more.max()):
            judged = mixture.judged(x)
            margin = judged - judged.gather(1, chosen).amin(1, keepdim=True)
            closest = margin.masked_fill(member, float("-inf")).topk(most, 0).indices
            taken = torch.arange(most, device=x.device)[:, None] < more
            member[closest[taken], taken.nonzero()[:, 1]] = True
        return member.T.nonzero()[:, 1].split(member.sum(0).tolist())

    def _more(self, others: Tensor) -> Tensor:
        """Return how many of this batch's `others` [E] are taken: their share of what an expert lacks."""
        before, self._seen = self._seen, self._seen + others
        done, due = (-(-self._lacking * seen // self._others) for seen in (before, self._seen))
        return due - done


def expert_moments(bench: Bench, stage: Stage, census: Census) -> Iterator[tuple[list[Parts], list[Moments]]]:
    """Measure the moments of what each expert's parts of `stage` read of the tokens that count for it.

    Yields some experts at a time, with at most EXPERT_BYTES of moments. Those of the last Linears are
    weighted by the stream before the experts.
    """
    spec, streams = bench.arch.experts, bench.streams
    assert spec is not None
    each = len(stage.parts) // spec.count
    parts = [stage.parts[begin : begin + each] for begin in range(0, len(stage.parts), each)]
    step = chunk(spec.count, linear(bench.rounded, stage.parts[0]).in_features)
    for begin in range(0, spec.count, step):
        some = {number: parts[number] for number in range(begin, min(begin + step, spec.count))}
        work = partial(_measure, bench, stage, census, some)
        # no name holds them here, so that they can go before the next ones are measured
        yield list(some.values()), _joined(streams.each(work, bench.exact, bench.rounded))


def _joined(measured: list[dict[int, Moments]]) -> list[Moments]:
    """Return the moments of each expert, over all shares of the windows."""
    found, *others = measured
    for number, own in found.items():
        for other in others:
            own.join(other[number])
    return list(found.values())


def chunk(count: int, in_features: int) -> int:
    """Return how many of `count` experts have their moments held at a time."""
    most = max(1, EXPERT_BYTES // (3 * 4 * in_features**2))
    return -(-count // -(-count // most))


def _measure(
    bench: Bench,
    stage: Stage,
    census: Census,
    some: dict[int, Parts],
    share: Share,
    exact: nn.Module,
    rounded: nn.Module,
) -> dict[int, Moments]:
    """Measure the moments of `some` experts on a share's windows."""
    spec, first = bench.arch.experts, linear(rounded, stage.parts[0])
    assert spec is not None
    inner = stage.parts[0] not in bench.arch.readers
    totals = (census.chosen + census.lacking).clamp(min=1).tolist()
    moments = {number: Moments(first.in_features, None, share.device) for number in some}
    picker = Picker(census, share.device)
    streams = (stream[: share.calibrating] for stream in (share.exact, share.rounded))
    for half, exact_hidden, hidden in share.batches(*streams):
        (x,) = bench.inputs(rounded, [spec.module], hidden)
        (exact_x,) = bench.inputs(exact, [spec.module], exact_hidden)
        weights = None
        if inner and stage.norm is not None:
            weights = norm_weights(exact_hidden.to(share.device).flatten(0, -2), bench.eps)
        tokens = picker.pick(mixture_of(rounded), x)
        both = [(mixture_of(layer), read) for layer, read in ((rounded, x), (exact, exact_x))]
        scores = [mixture.on_input(read) for mixture, read in both]
        for number, own in moments.items():
            if len(at := tokens[number]):
                read, exact_read = (
                    mixture.read(number, states[at], None if score is None else score[at], inner)
                    for (mixture, states), score in zip(both, scores, strict=True)
                )
                of_each = None if weights is None else weights[at]
                own.add(read, exact_read, totals[number], half, weights=of_each)
    return moments
