"""StepDelta: what one step added to one request."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from qrt.engine.schedule.logprobs import LogprobRows, Vectors, concat
from qrt.engine.schedule.request import FinishReason


class Cause(Enum):
    """Why a request was given up."""

    REQUEST = "request"  # its shape and its other rules leave it no answer
    MODEL = "model"  # the model gave NaN or infinity for it
    STEP = "step"  # a step failed, for all that took part in it


class StepDelta(NamedTuple):
    """What a step added to a request. The engine forgets the request once `finish_reason` is set.

    token_ids       new tokens, an end-of-text or stop token included
    stop_reason     the stop token id that ended it (None: end-of-text)
    logprobs        one row per new token, where asked for
    prompt_scores   one row per prompt token scored in this step, where asked for; the first token has none
    num_cached      prompt tokens found in the prefix cache
    pooled          vectors, fp32 [n, D]: the prompt's one, or one for each token of a chunk
    error           why the engine gave the request up (finish_reason is ABORT)
    cause           what that comes from; None: no error
    is_whole        its grammar ended it (finish_reason is STOP): the last token belongs to the answer
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: LogprobRows | None = None
    prompt_scores: LogprobRows | None = None
    num_cached: int = 0
    error: str | None = None
    pooled: Vectors | None = None
    is_whole: bool = False
    cause: Cause | None = None


def merge(deltas: Sequence[StepDelta]) -> StepDelta:
    """Merge what consecutive steps added to one request."""
    last = deltas[-1]
    if len(deltas) == 1:
        return last
    scores = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    pooled = [delta.pooled for delta in deltas if delta.pooled is not None]
    prompt = [delta.prompt_scores for delta in deltas if delta.prompt_scores is not None]
    return last._replace(
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=concat(scores) if scores else None,
        prompt_scores=concat(prompt) if prompt else None,
        pooled=np.concatenate(pooled) if pooled else None,
        num_cached=max(delta.num_cached for delta in deltas),
    )
