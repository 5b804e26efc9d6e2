"""Runner: a plan through the model to tokens. Holds the device state; never edits a Request."""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.engine.batch import Batch, Draws, build, drawn_plainly, draws
from qrt.engine.graphs import DecodeSteps
from qrt.engine.logprobs import Scores, concat, score
from qrt.engine.plan import Plan, StepResult
from qrt.engine.sampler import sample
from qrt.engine.table import RequestTable
from qrt.mem.storage import KVStorage
from qrt.model.decoder import Decoder

SCORED_ROWS = 1024  # logits of prompt tokens exist for this many rows at a time


class Runner:
    """The model, its K/V and the request table on one device; `decode_steps` run the steps they take."""

    def __init__(
        self,
        model: Decoder,
        kv: KVStorage,
        table: RequestTable,
        *,
        attend_cache: bool = False,
        decode_steps: DecodeSteps | None = None,
    ) -> None:
        self.model = model
        self.kv = kv
        self.table = table
        self.attend_cache = attend_cache
        self.decode_steps = decode_steps

    @torch.inference_mode()
    def run(self, plan: Plan) -> StepResult:
        """Compute the step's tokens and sample. Waits for the device only to fetch the result."""
        if self.decode_steps is not None and self.decode_steps.take(plan):
            return self._decode(self.decode_steps, plan)
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
        if batch.draws is None:
            return StepResult([], {}, prompt_scores)
        tokens, logprobs = self._sample(plan, batch.draws, hidden[batch.step.logit_rows])
        return StepResult(tokens, logprobs, prompt_scores)

    def _decode(self, steps: DecodeSteps, plan: Plan) -> StepResult:
        """A step of decodes alone; what is drawn plainly is recorded with it."""
        hidden = steps.forward(plan)
        if drawn_plainly(plan):
            return StepResult(steps.draw(plan).tolist())
        return StepResult(*self._sample(plan, draws(plan, self.table.device), hidden))

    def _sample(self, plan: Plan, drawn: Draws, hidden: Tensor) -> tuple[list[int], dict[int, Scores]]:
        logits = self.model.logits(hidden)
        tokens = sample(logits, self.table, drawn.meta)
        self.table.advance(drawn.meta.rows, tokens)
        logprobs = {}
        if drawn.logprobs is not None:
            scores = score(logits[drawn.logprobs].float(), tokens[drawn.logprobs], drawn.num_top).cpu()
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
