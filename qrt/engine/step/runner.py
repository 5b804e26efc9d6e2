"""Runner: run a plan on the model and sample its tokens. Holds the device state; never edits a Request."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qrt.engine.schedule.plan import Plan, StepResult
from qrt.engine.schedule.scores import Scores, Vectors, concat
from qrt.engine.step.adjustments import Adjustments
from qrt.engine.step.batch import Batch, build
from qrt.engine.step.graphs import TokenSteps
from qrt.engine.step.logprobs import score
from qrt.engine.step.pooler import Pooler
from qrt.engine.step.sample_batch import SampleBatch, is_plain, make_sample_batch
from qrt.engine.step.sampler import sample
from qrt.engine.step.table import RequestTable
from qrt.engine.step.timeline import Kind, Timeline
from qrt.engine.step.transfer import Fetch
from qrt.kernels.gpu import launches_on
from qrt.mem.storage import KVStorage
from qrt.model.decoder import Decoder

SCORED_ROWS = 1024  # logits of prompt tokens exist for this many rows at a time


@dataclass(frozen=True)
class Launched:
    """A step that the device works on, whose result is being copied to the host."""

    fetch: Fetch
    tokens: Tensor | None
    logprobs: Mapping[int, Scores]
    prompt_scores: Mapping[str, Scores]
    pooled: Mapping[str, Vectors]

    def result(self) -> StepResult:
        """Wait for the step and return its result."""
        self.fetch.wait()
        tokens = [] if self.tokens is None else self.tokens.tolist()
        return StepResult(tokens, self.logprobs, self.prompt_scores, self.pooled)


class Runner:
    """Runs steps on the model, its K/V and the request table of one device.

    token_steps   runs the plans that fit padded steps; None: no plan is padded
    pooler        makes the vectors of a model that pools
    timeline      if set, records every step (on a GPU)
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

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Launched:
        """Launch a step without waiting for the device.

        The next step may be launched before the result of this one is read.
        """
        with launches_on(self.table.device):
            started = time.perf_counter()
            launched = self._launch(plan)
            if self.timeline is not None:
                self._note(self.timeline, plan, time.perf_counter() - started)
            return launched

    def _note(self, timeline: Timeline, plan: Plan, host_s: float) -> None:
        """Tell the timeline about the step that has just been launched."""
        steps = self.token_steps
        recorded = steps is not None and steps.handles(plan) and steps.is_recorded(plan)
        prompt_tokens = sum(len(chunk.tokens) for chunk in plan.chunks)
        timeline.end(Kind(bool(plan.chunks), recorded), host_s, len(plan.decodes), prompt_tokens)

    def _launch(self, plan: Plan) -> Launched:
        if plan.admitted:
            self.table.admit(plan.admitted)
            self.adjustments.admit(plan.admitted)
        if plan.placed:
            self.table.write_slots(plan.placed)
        if self.token_steps is not None and self.token_steps.handles(plan):
            return self._padded(self.token_steps, plan)
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
        if self.timeline is not None:
            self.timeline.begin()
        hidden = self.model.hidden(batch.step, self.kv)
        fetch = Fetch(self.table.device)
        prompt_scores = self._score_prompts(plan, batch, hidden, fetch)
        pooled = {} if self.pooler is None else self.pooler(plan, hidden, fetch)
        tokens, logprobs = self._sample(plan, batch.samples, hidden, fetch)
        fetch.sent()
        return Launched(fetch, tokens, logprobs, prompt_scores, pooled)

    def _padded(self, steps: TokenSteps, plan: Plan) -> Launched:
        """Launch a padded step; its graph includes plain sampling."""
        fetch = Fetch(self.table.device)
        steps.send(plan)
        if self.timeline is not None:
            self.timeline.begin()
        tokens: Tensor | None = None
        logprobs: dict[int, Scores] = {}
        pooled: dict[str, Vectors] = {}
        if plan.sampled and is_plain(plan):
            tokens = fetch.take(steps.sample(plan))
        else:
            hidden = steps.forward(plan)
            if self.pooler is not None:
                pooled = self.pooler(plan, hidden, fetch)
            samples = make_sample_batch(plan, self.adjustments, self.table.device)
            tokens, logprobs = self._sample(plan, samples, hidden, fetch)
        fetch.sent()
        return Launched(fetch, tokens, logprobs, {}, pooled)

    def _sample(
        self, plan: Plan, samples: SampleBatch | None, hidden: Tensor, fetch: Fetch
    ) -> tuple[Tensor | None, dict[int, Scores]]:
        """Sample from the step's hidden states; return tokens and log-probabilities, as in `Launched`."""
        if samples is None:
            return None, {}
        logits = self.model.logits(hidden[samples.tokens])
        tokens = sample(logits, self.table, self.adjustments, samples.meta)
        self.table.advance(samples.meta.rows, tokens)
        logprobs: dict[int, Scores] = {}
        if samples.logprobs is not None:
            parts = [
                score(logits[some].float(), tokens[some], samples.num_top)
                for some in samples.logprobs.split(SCORED_ROWS)
            ]
            scores = concat(parts).map(fetch.take)
            wanted = [(i, work.sampling.num_logprobs) for i, work in enumerate(plan.sampled)]
            asking = [(i, num_top) for i, num_top in wanted if num_top is not None]
            logprobs = {i: scores.part(n, n + 1, num_top) for n, (i, num_top) in enumerate(asking)}
        return fetch.take(tokens), logprobs

    def _score_prompts(self, plan: Plan, batch: Batch, hidden: Tensor, fetch: Fetch) -> dict[str, Scores]:
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
                scores[chunk.request_id] = concat(parts).map(fetch.take)
            start += len(chunk.tokens)
        return scores
