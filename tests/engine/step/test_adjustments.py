"""Adjusted logits against their definitions, token by token in float64."""

import numpy as np
import pytest
import torch

from qrt.engine.schedule.plan import Adjustment, Admission, SamplingRules
from qrt.engine.step.adjustments import Adjustments
from qrt.errors import ConfigError
from qrt.request.sampling import SamplingParams

VOCAB, EOS = 29, 5


def expected(logits, prompt, output, params):
    """The definitions that SamplingParams names, one token at a time."""
    result = []
    for token, x in enumerate(logits):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            result.append(-np.inf)
            continue
        x = x + params.logit_bias.get(token, 0.0)
        if token in prompt or token in output:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
        if token == EOS and (decay := params.exponential_decay_length_penalty):
            x += abs(x) * (decay[1] ** max(len(output) - decay[0], 0) - 1)
        result.append(x)
    return result


@pytest.mark.parametrize("short_at", range(4))
def test_a_place_that_has_no_memory_is_none(monkeypatch, short_at):
    """The next request finds all as it was, and grows it."""
    adjustments = Adjustments(VOCAB, [EOS], torch.device("cpu"))
    sampling = SamplingRules(
        0.0, 0, 1.0, 0, None, adjustment=Adjustment.of(SamplingParams(presence_penalty=0.5), 1)
    )
    new = [Admission(row, sampling, np.array([1], np.int32)) for row in range(3)]
    adjustments.admit(new[:1])
    calls, cat = [], torch.cat

    def short(tensors):
        calls.append(tensors)
        if len(calls) == short_at + 1:
            raise torch.OutOfMemoryError
        return cat(tensors)

    monkeypatch.setattr(torch, "cat", short)
    with pytest.raises(torch.OutOfMemoryError):
        adjustments.admit(new[1:2])
    adjustments.admit(new[2:])
    entry, logits = torch.tensor(adjustments.entries([2])), torch.zeros(1, VOCAB)
    adjustments.count(entry, torch.tensor([4]))
    assert adjustments.apply(logits, entry, torch.ones(1))[0].tolist() == [
        -0.5 * (i == 4) for i in range(VOCAB)
    ]


WAYS = [
    {"repetition_penalty": 1.3}, {"presence_penalty": 0.7}, {"frequency_penalty": -1.1},
    {"logit_bias": {3: 2.5, 4: -100.0}}, {"allowed_token_ids": [1, 2, 3, EOS]},
    {"exponential_decay_length_penalty": (3, 1.5)},
    {"repetition_penalty": 0.8, "presence_penalty": -1, "frequency_penalty": 1.5, "logit_bias": {7: 1.0},
     "allowed_token_ids": range(3, 20), "exponential_decay_length_penalty": (0, 1.1)},
]  # fmt: skip


def admission(row, params, prompt, output=()):
    sampling = SamplingRules(0.0, 0, 1.0, 0, None, 0.0, Adjustment.of(params, len(prompt)))
    return Admission(row, sampling, np.array(prompt, np.int32), tuple(output))


def test_adjustments_match_the_definition(device):
    """All ways at once, some resumed with output, tokens counted as they come."""
    rng = np.random.default_rng(0)
    adjustments = Adjustments(VOCAB, [EOS], device)
    params = [SamplingParams(**way) for way in WAYS]
    prompts = [rng.integers(0, VOCAB, 6).tolist() for _ in WAYS]
    outputs = [rng.integers(0, VOCAB, i % 3).tolist() for i in range(len(WAYS))]
    rows = [10 + i for i in range(len(WAYS))]
    adjustments.admit([admission(*new) for new in zip(rows, params, prompts, outputs, strict=True)])
    entries = torch.tensor(adjustments.entries(rows), device=device)
    assert len(set(entries.tolist())) == len(rows)
    for _ in range(8):
        logits = rng.normal(0, 3, (len(WAYS), VOCAB)).astype(np.float32)
        lengths = torch.tensor(
            [len(p) + len(o) for p, o in zip(prompts, outputs, strict=True)], device=device
        )
        got = adjustments.apply(torch.tensor(logits, device=device), entries, lengths).cpu().numpy()
        wanted = [
            expected(*each) for each in zip(logits.astype(float), prompts, outputs, params, strict=True)
        ]
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
        drawn = rng.integers(0, VOCAB, len(WAYS))
        adjustments.count(entries, torch.tensor(drawn, device=device))
        for output, token in zip(outputs, drawn, strict=True):
            output.append(int(token))


def test_reused_row_forgets_its_last_request():
    adjustments = Adjustments(VOCAB, [EOS], torch.device("cpu"))
    first, second = SamplingParams(logit_bias={1: 5.0}), SamplingParams(repetition_penalty=2.0)
    adjustments.admit([admission(3, first, [1, 2]), admission(4, first, [1, 2])])
    adjustments.admit([admission(3, SamplingParams(), [4])])
    adjustments.admit([admission(3, second, [6])])
    with pytest.raises(KeyError):
        adjustments.entries([5])
    entry = torch.tensor(adjustments.entries([3]))
    got = adjustments.apply(torch.ones(1, VOCAB), entry, torch.tensor([1]))
    assert got[0].tolist() == [0.5 if token == 6 else 1.0 for token in range(VOCAB)]
    assert len(adjustments.bias) == 2, "entries are used again"


def test_two_large_factors_stay_finite():
    """Infinity would look like a model's own."""
    params = SamplingParams(repetition_penalty=1e-30, exponential_decay_length_penalty=(0, 1e30))
    adjustments = Adjustments(VOCAB, [EOS], torch.device("cpu"))
    sampling = SamplingRules(0.0, 0, 1.0, 0, None, adjustment=Adjustment.of(params, 1))
    adjustments.admit([Admission(0, sampling, np.array([EOS], np.int32))])
    got = adjustments.apply(torch.ones(1, VOCAB), torch.tensor(adjustments.entries([0])), torch.tensor([9]))
    assert got.isfinite().all() and got.argmax() == EOS


def test_nothing_asked_for_is_no_adjustment():
    assert Adjustment.of(SamplingParams(min_p=0.3, top_k=4, bad_words=["x"]), 5) is None


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ({"min_p": 1.5}, "min_p: expected 0 to 1, got 1.5"),
        ({"presence_penalty": float("nan")}, "presence_penalty: expected -2 to 2, got nan"),
        ({"repetition_penalty": 0}, "repetition_penalty: expected above 0, got 0"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: expected an integer of at least 0, got -1"),
        ({"logit_bias": {3: 101}}, "logit_bias of token 3: expected -100 to 100, got 101"),
        ({"allowed_token_ids": []}, "allowed_token_ids: expected at least one token id.*got none"),
        ({"bad_words": [""]}, "bad_words: expected non-empty strings, got ''"),
        ({"best_of": 2, "n": 3}, "best_of: expected an integer of at least 3, got 2"),
        ({"best_of": 3, "temperature": 0}, "best_of: expected at most n with temperature 0.*, got 3"),
        (
            {"exponential_decay_length_penalty": (1, 0.5)},
            r"exponential_decay_length_penalty: expected .*, got \(1, 0.5\)",
        ),
        ({"logit_bias": dict.fromkeys(range(2000), 1.0)}, "expected at most 1024, got 2000"),
    ],
)
def test_bad_values_are_refused_by_name(way, message):
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**way)
