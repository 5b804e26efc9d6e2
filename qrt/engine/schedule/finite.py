"""Say that a model gave NaN or infinity where an answer needs numbers."""

from __future__ import annotations

import numpy as np

from qrt.engine.schedule.logprobs import LogprobRows, Vectors

REMEDY = "take --dtype float32 or bfloat16 and --kv fp16, or check the weights"


def token_fault(token: int, index: int, logprobs: LogprobRows | None) -> str | None:
    """Return what is wrong with output token `index`, counted from 1; None: nothing.

    `token` is negative (`qrt.kernels.sample.NOT_FINITE`) where the logits are not finite.
    """
    if token >= 0 and (logprobs is None or not np.isnan(logprobs.logprobs).any()):
        return None
    return f"logits of output token {index}: expected finite numbers, got NaN or infinity; {REMEDY}"


def prompt_fault(first: int, scores: LogprobRows | None, pooled: Vectors | None) -> str | None:
    """Return what is wrong with what a step made of a prompt; None: nothing.

    `first` is the position of the first token that `scores` are of.
    """
    if pooled is not None and not np.isfinite(pooled).all():
        return f"vector of the prompt: expected finite numbers, got NaN or infinity; {REMEDY}"
    if scores is not None and (wrong := np.isnan(scores.logprobs)).any():
        at = first + int(wrong.argmax())
        return f"logits of prompt token {at}: expected finite numbers, got NaN or infinity; {REMEDY}"
    return None
