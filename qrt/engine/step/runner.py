"""Runner: run a plan on the model and sample its tokens. Holds the device state; never edits a Request."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qrt.engine.schedule.plan import Plan, StepResult
from qrt.engine.step.adjustments import Adjustments
from qrt.engine.step.batch import Batch, build
from qrt.engine.step.graphs import TokenSteps
from qrt.engine.step.logprobs import ScoreTensors, joined, score
from qrt.engine.step.masks import MaskBuffer
from qrt.engine.step.pooler import Pooler
from qrt.engine.step.sample_batch import SampleBatch, is_plain, make_sample_batch
from qrt.engine.step.sampler import sample
from qrt.engine.step.table import RequestTable
from qrt.engine.step.timeline import StepKind, Timeline
from qrt.engine.step.transfer import Fetch
from qrt.kernels.gpu import launches_on
from qrt.mem.storage import KVStorage
from qrt.model.decoder import Decoder

if TYPE_CHECKING:  # only ranks need what they import
    from qrt.engine.ranks.group import RankGroup
    from qrt.engine.ranks.orders import OrderKind

SCORED_ROWS = 1024  # logits of prompt tokens exist for this many rows at a time


@dataclass(frozen=True)
class Launched:
    """A step that the device works on, whose result is being copied to the host.

    asking   index into the tokens and number of likeliest ones, of each row of `logprobs`
    """

    fetch: Fetch
    tokens: Tensor | None
    asking: Sequence[tuple[int, int]]
    logprobs: ScoreTensors | None
    prompt_scores: Mapping[str, ScoreTensors]
    pooled: Mapping[str, Tensor]

    def result(self) -> StepResult:
        """Wait for the step and return its result."""
        self.fetch.wait()
        tokens = [] if self.tokens is None else self.tokens.tolist()
        logprobs = {}
        if self.logprobs is not None:
            scores = self.logprobs.on_host()
            logprobs = {i: scores.part(n, n + 1, num_top) for n, (i, num_top) in enumerate(self.asking)}
        prompt_scores = {request_id: scores.on_host() for request_id, scores in self.prompt_scores.items()}
        pooled = {request_id: vectors.numpy() for request_id, vectors in self.pooled.items()}
        return StepResult(tokens, logprobs, prompt_scores, pooled)


@dataclass(frozen=True)
class Forwarded:
    """A step whose hidden states the device computes, and whose tokens have not been sampled.

    samples   how they are; None in a padded step, which has its own inputs
    """

    plan: Plan
    hidden: Tensor
    samples: SampleBatch | None
    fetch: Fetch
    prompt_scores: Mapping[str, ScoreTensors]
    padded: bool
    host_s: float


class Runner:
    """Runs steps on the model, its K/V and the request table of one device.

    token_steps   runs the plans that fit padded steps; None: no plan is padded
    pooler        makes the vectors of a model that pools
    timeline      if set, records every step (on a GPU)
    group         the ranks that run every step of this one too; None: there are none, or this is not rank 0
    """

    def __init__(
        self,
        model: Decoder,
        kv: KVStorage,
        table: RequestTable,
        adjustments: Adjustments,
        *,
        attend_cache: bool = False,
        token_steps: TokenSteps | None = None,
        pooler: Pooler | None = None,
    ) -> None:
        self.model = model
        self.kv = kv
        self.table = table
        self.adjustments = adjustments
        self.attend_cache = attend_cache
        self.token_steps = token_steps
        self.pooler = pooler
        self.timeline: Timeline | None = None
        self.group: RankGroup | None = None

    def _together(self, kind: OrderKind, plan: Plan | None = None) -> AbstractContextManager[None]:
        """Have the other ranks run what this context runs."""
        return nullcontext() if self.group is None else self.group.order(kind, plan)

    def forget(self) -> None:
        """Drop the recorded steps, before a group of ranks is left."""
        if self.token_steps is not None:
            self.token_steps.forget()

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Launched:
        """Launch a step without waiting for the device.

        The next step may be launched before the result of this one is read.
        """
        with self._together("launch", plan), launches_on(self.table.device):
            started = time.perf_counter()
            self._admit(plan)
            steps = self.token_steps
            if steps is not None and steps.handles(plan) and plan.sampled and is_plain(plan):
                launched = self._whole(steps, plan)
            else:
                launched = self._finish(self._forward(plan))
            if self.timeline is not None:
                self._note(self.timeline, plan, time.perf_counter() - started)
            return launched

    @torch.inference_mode()
    def forward(self, plan: Plan) -> Forwarded:
        """Launch a step up to its hidden states; `sample` then samples, before any other step."""
        with self._together("forward", plan), launches_on(self.table.device):
            started = time.perf_counter()
            self._admit(plan)
            return replace(self._forward(plan), host_s=time.perf_counter() - started)

    @torch.inference_mode()
    def sample(self, forwarded: Forwarded, masked: Sequence[int], skipped: Collection[int]) -> Launched:
        """Sample the tokens of a step, those of the indices `masked` into `plan.sampled` by their masks.

        The masks are the first of `mask_rows()`. The tokens of the indices `skipped` are discarded.
        """
        with self._together("sample"), launches_on(self.table.device):
            started = time.perf_counter()
            self.masks.send(masked, len(forwarded.plan.sampled))
            launched = self._finish(forwarded, self.masks, skipped)
            if self.timeline is not None:
                host_s = forwarded.host_s + time.perf_counter() - started
                self._note(self.timeline, forwarded.plan, host_s)
            return launched

    def mask_rows(self) -> NDArray[np.int32]:
        """Return rows int32 [n, W] of the host, to be filled with the next masks for `sample`."""
        return self.masks.rows()

    @cached_property
    def masks(self) -> MaskBuffer:
        """The masks of the step that is being launched."""
        if self.token_steps is not None:
            return self.token_steps.masks
        return MaskBuffer(self.table.pad_row, self.model.arch.vocab_size, self.table.device)

    def _note(self, timeline: Timeline, plan: Plan, host_s: float) -> None:
        """Tell the timeline about the step that has just been launched."""
        steps = self.token_steps
        recorded = steps is not None and steps.handles(plan) and steps.is_recorded(plan)
        prompt_tokens = sum(len(chunk.tokens) for chunk in plan.chunks)
        timeline.end(StepKind(bool(plan.chunks), recorded), host_s, len(plan.decodes), prompt_tokens)

    def _admit(self, plan: Plan) -> None:
        """Send what is new of the plan's requests."""
        if plan.admitted:
            self.table.admit(plan.admitted)
            self.adjustments.admit(plan.admitted)
        if plan.placed:
            self.table.write_slots(plan.placed)

    def _whole(self, steps: TokenSteps, plan: Plan) -> Launched:
        """Launch a padded step whose graph includes plain sampling."""
        fetch = Fetch(self.table.device)
        steps.send(plan)
        self._begin()
        tokens = fetch.take(steps.sample(plan))
        fetch.sent()
        return Launched(fetch, tokens, (), None, {}, {})

    def _begin(self) -> None:
        if self.timeline is not None:
            self.timeline.begin()

    def _forward(self, plan: Plan) -> Forwarded:
        fetch, steps = Fetch(self.table.device), self.token_steps
        if steps is not None and steps.handles(plan):
            steps.send(plan)
            self._begin()
            return Forwarded(plan, steps.forward(plan), None, fetch, {}, padded=True, host_s=0.0)
        batch = build(
            plan,
            self.table,
            self.adjustments,
            queries=self.model.queries,
            num_kv_heads=self.model.arch.num_kv_heads,
            attend_cache=self.attend_cache,
            heads_per_sm=self.kv.heads_per_sm(len(plan.decodes), self.model.arch.num_heads),
            reaches=self.model.arch.reaches,
        )
        self._begin()
        hidden = self.model.hidden(batch.step, self.kv)
        prompt_scores = self._score_prompts(plan, batch, hidden, fetch)
        return Forwarded(plan, hidden, batch.samples, fetch, prompt_scores, padded=False, host_s=0.0)

    def _finish(
        self, forwarded: Forwarded, masks: MaskBuffer | None = None, skipped: Collection[int] = ()
    ) -> Launched:
        plan, fetch, steps = forwarded.plan, forwarded.fetch, self.token_steps
        tokens: Tensor | None = None
        logprobs: ScoreTensors | None = None
        if forwarded.padded and masks is not None and is_plain(plan):
            assert steps is not None
            tokens = fetch.take(steps.sample_masked(plan))
        else:
            samples = forwarded.samples
            if forwarded.padded or skipped:
                samples = make_sample_batch(plan, self.adjustments, self.table.device, skipped)
            tokens, logprobs = self._sample(samples, forwarded.hidden, fetch, masks)
        pooled = {} if self.pooler is None else self.pooler(plan, forwarded.hidden, fetch)
        fetch.sent()
        asked = [(i, work.sampling.num_logprobs) for i, work in enumerate(plan.sampled)]
        asking = [(i, num_top) for i, num_top in asked if num_top is not None]
        return Launched(fetch, tokens, asking, logprobs, forwarded.prompt_scores, pooled)

    def _sample(
        self, samples: SampleBatch | None, hidden: Tensor, fetch: Fetch, masks: MaskBuffer | None
    ) -> tuple[Tensor | None, ScoreTensors | None]:
        """Sample from the step's hidden states; return tokens and log-probabilities, as in `Launched`."""
        if samples is None:
            return None, None
        logits = self.model.logits(hidden[samples.tokens])
        tokens = sample(logits, self.table, self.adjustments, samples.meta, masks)
        if self.model.peers is not None:  # rank 0 has the masks, and sorts and adds in an order of its own
            tokens = self.model.peers.broadcast(tokens)
        self.table.advance(samples.meta.rows, tokens)
        logprobs: ScoreTensors | None = None
        if samples.logprobs is not None:
            parts = [
                score(logits[some].float(), tokens[some].clamp(min=0), samples.num_top)
                for some in samples.logprobs.split(SCORED_ROWS)
            ]
            logprobs = joined(parts, fetch.take)
        return fetch.take(tokens), logprobs

    def _score_prompts(
        self, plan: Plan, batch: Batch, hidden: Tensor, fetch: Fetch
    ) -> dict[str, ScoreTensors]:
        scores = {}
        start = len(plan.decodes)
        for chunk in plan.chunks:
            if wanted := chunk.scoring:
                first = start + wanted.first
                targets = batch.targets[chunk.request_id].split(SCORED_ROWS)
                rows = hidden[first : first + len(wanted.targets)].split(SCORED_ROWS)
                parts = [
                    score(self.model.logits(states).float(), ids, wanted.num_top)
                    for states, ids in zip(rows, targets, strict=True)
                ]
                scores[chunk.request_id] = joined(parts, fetch.take)
            start += len(chunk.tokens)
        return scores
