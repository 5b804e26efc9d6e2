"""SampleBatch: which tokens a step samples, and how."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qrt.engine.schedule.plan import Plan
from qrt.engine.step.adjustments import Adjustments
from qrt.engine.step.sampler import SampleMeta
from qrt.engine.step.transfer import to_device


@dataclass(frozen=True)
class SampleBatch:
    """The S tokens that a step samples.

    tokens       int64 [S]: index of the step's token after which each is sampled
    meta         how each is sampled
    logprobs     int64 [l]: which of the S need log-probabilities; None: none
    num_top      likeliest tokens to name with each, the most that any of them asks for
    """

    tokens: Tensor
    meta: SampleMeta
    logprobs: Tensor | None
    num_top: int

    @classmethod
    def of(cls, plan: Plan, sent: Mapping[str, Tensor]) -> SampleBatch | None:
        """Make the batch of a plan from its `sample_arrays` on the device; None when nothing is sampled."""
        if not plan.sampled:
            return None
        ks = [work.sampling.top_k for work in plan.sampled if work.sampling.filtered]
        meta = SampleMeta(
            sent["sample_rows"],
            sent.get("custom_rows"),
            sent.get("adjusted"),
            sent.get("banned"),
            sent.get("filtered"),
            max(ks) if ks and min(ks) > 0 else 0,
        )
        num_top = max(work.sampling.num_logprobs or 0 for work in plan.sampled)
        return cls(sent["sampled_at"], meta, sent.get("logprobs"), num_top)


def make_sample_batch(
    plan: Plan, adjustments: Adjustments, device: torch.device, skipped: Collection[int] = ()
) -> SampleBatch | None:
    """Make the batch of a plan and send it to the device.

    Samples `skipped`, by their index into `plan.sampled`, do not count: none of their rules apply.
    """
    given = sample_arrays(plan, adjustments, skipped)
    return SampleBatch.of(plan, to_device({name: a for name, a in given.items() if a.size}, device))


def is_plain(plan: Plan) -> bool:
    """Return whether all samples of a plan need no more than temperature and seed."""
    return all(work.sampling.plain and not work.banned for work in plan.sampled)


def sample_arrays(
    plan: Plan, adjustments: Adjustments, skipped: Collection[int] = ()
) -> dict[str, NDArray[Any]]:
    """Return the arrays of a SampleBatch, by name; `skipped` as in `make_sample_batch`."""
    custom_rows: list[int] = []
    filtered: list[int] = []
    adjusted: list[tuple[int, int]] = []
    banned: list[tuple[int, int, int]] = []
    for index, work in enumerate(plan.sampled):
        sampling = work.sampling
        if index in skipped or not (sampling.filtered or sampling.adjustment or work.banned):
            continue
        if sampling.filtered:
            filtered.append(len(custom_rows))
        if sampling.adjustment:
            adjusted.append((len(custom_rows), work.row))
        banned += [(len(custom_rows), *ban) for ban in work.banned]
        custom_rows.append(index)
    scored = [i for i, work in enumerate(plan.sampled) if work.sampling.num_logprobs is not None]
    entries = adjustments.entries([row for _, row in adjusted])
    return {
        "sampled_at": np.array(plan.sampled_at, np.int64),
        "sample_rows": np.array([work.row for work in plan.sampled], np.int64),
        "custom_rows": np.array(custom_rows, np.int64),
        "filtered": np.array(filtered, np.int64),
        "adjusted": np.array([[index for index, _ in adjusted], entries], np.int64),
        "banned": np.array(banned, np.int64).reshape(-1, 3).T,
        "logprobs": np.array(scored, np.int64),
    }
