"""The peak estimate against a simulation, slot by slot."""

import numpy as np
import pytest

from qrt.engine.admission import expected_output, peak_slots


def simulated(held, left):
    """Every request takes a slot a step until it has grown, and gives all back then."""
    live, most = list(zip(held, left, strict=True)), 0
    for step in range(max(left, default=0) + 1):
        live = [(h, n) for h, n in live if n >= step]
        most = max(most, sum(h + step for h, _ in live))
    return most


@pytest.mark.parametrize("seed", range(20))
def test_the_peak_is_that_of_the_simulation(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 30))
    held, left = rng.integers(0, 50, n), rng.integers(0, 40, n)
    assert peak_slots(held, left) == simulated(held.tolist(), left.tolist())


@pytest.mark.parametrize("seed", range(20))
def test_no_request_that_is_late_or_has_slots_ahead_exceeds_the_peak(seed):
    """Of so many steps and slots together."""
    rng = np.random.default_rng(seed)
    n, late, ahead = int(rng.integers(1, 12)), int(rng.integers(0, 9)), int(rng.integers(0, 9))
    held, left, slack = rng.integers(0, 50, n), rng.integers(0, 40, n), late + ahead
    peak = peak_slots(held, left, slack)
    for _ in range(200):
        begin = rng.integers(0, late + 1, n)
        for step in range(50):
            grown = np.minimum(left, np.maximum(step - begin, 0) + rng.integers(0, ahead + 1, n))
            assert ((held + grown) * (step <= left + begin)).sum() <= peak
    exact = max(int((held + np.minimum(left, t + slack))[left >= t].sum()) for t in range(41))
    assert peak == exact


def test_expected_outputs():
    assert expected_output(0, 5000, conservative=False) == 1024
    assert expected_output(0, 30, conservative=False) == 30
    assert expected_output(2000, 5000, conservative=False) == 2200
    assert expected_output(2000, 5000, conservative=True) == 5000
    assert peak_slots([], []) == 0
