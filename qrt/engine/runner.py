"""Runner: a plan through the model to tokens. Holds the device state; never edits a Request."""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.engine.batch import Batch, build
from qrt.engine.logprobs import Scores, concat, score
from qrt.engine.plan import Plan, StepResult
from qrt.engine.sampler import sample
from qrt.engine.table import RequestTable
from qrt.mem.storage import KVStorage
from qrt.model.decoder import Decoder

SCORED_ROWS = 1024  # logits of prompt tokens exist for this many rows at a time


class Runner:
    """The model, its K/V and the request table on one device."""

    def __init__(
        self, model: Decoder, kv: KVStorage, table: RequestTable, *, attend_cache: bool = False
    ) -> None:
        self.model = model
        self.kv = kv
        self.table = table
        self.attend_cache = attend_cache

    @torch.inference_mode()
    def run(self, plan: Plan) -> StepResult:
        """Compute the step's tokens and sample. Waits for the device only to fetch the result."""
        heads = self.model.config.num_kv_heads
        batch = build(
            plan,
            self.table,
            num_kv_heads=heads,
            attend_cache=self.attend_cache,
            programs_per_sm=self.kv.programs_per_sm,
        )
        hidden = self.model.hidden(batch.step, self.kv)
        prompt_scores = self._score_prompts(plan, batch, hidden)
        tokens, logprobs = self._sample(plan, batch, hidden)
        return StepResult(tokens, logprobs, prompt_scores)

    def _sample(self, plan: Plan, batch: Batch, hidden: Tensor) -> tuple[list[int], dict[int, Scores]]:
        if batch.sample is None:
            return [], {}
        logits = self.model.logits(hidden[batch.step.logit_rows])
        tokens = sample(logits, self.table, batch.sample)
        self.table.advance(batch.sample.rows, tokens)
        logprobs = {}
        if batch.logprobs is not None:
            scores = score(logits[batch.logprobs].float(), tokens[batch.logprobs], batch.num_top).cpu()
            wanted = [(i, work.sampling.num_logprobs) for i, work in enumerate(plan.sampled)]
            asking = [(i, num_top) for i, num_top in wanted if num_top is not None]
            logprobs = {i: scores.part(n, n + 1, num_top) for n, (i, num_top) in enumerate(asking)}
        return tokens.tolist(), logprobs

    def _score_prompts(self, plan: Plan, batch: Batch, hidden: Tensor) -> dict[str, Scores]:
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
                scores[chunk.request_id] = concat(parts).cpu()
            start += len(chunk.tokens)
        return scores
