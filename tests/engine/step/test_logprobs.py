"""Scores against log_softmax in float64."""

import numpy as np
import torch

from qrt.engine.schedule.logprobs import concat
from qrt.engine.step.logprobs import joined, score


def test_scores_are_log_softmax_with_ranks():
    torch.manual_seed(0)
    logits = torch.randn(17, 90) * 4 + 100
    logits[3] = torch.round(logits[3])  # ties
    targets = torch.randint(0, 90, (17,))
    scores = score(logits, targets, 5)
    truth = logits.double().log_softmax(-1)
    chosen = truth.gather(1, targets[:, None])
    torch.testing.assert_close(scores.logprobs.double(), chosen[:, 0], rtol=0, atol=2e-5)
    assert scores.ranks.tolist() == ((truth > chosen).sum(1) + 1).tolist()
    torch.testing.assert_close(scores.top_logprobs.double(), truth.topk(5).values, rtol=0, atol=2e-5)
    assert torch.equal(logits.gather(1, scores.top_ids), logits.topk(5).values)


def test_parts_join_again():
    logits = torch.randn(6, 20)
    whole = score(logits, torch.arange(6), 3).on_host()
    again = concat([whole.part(0, 2, 3), whole.part(2, 6, 3)])
    parts = [score(logits[rows], torch.arange(6)[rows], 3) for rows in (slice(0, 2), slice(2, 6))]
    for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
        assert np.array_equal(getattr(again, name), getattr(whole, name))
        assert np.array_equal(getattr(joined(parts, torch.clone).on_host(), name), getattr(whole, name))
    less = whole.part(1, 3, 1)
    assert len(again) == 6 and less.top_ids.shape == less.top_logprobs.shape == (2, 1)
