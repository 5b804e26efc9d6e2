"""The peak estimate against a simulation, slot by slot."""

import numpy as np
import pytest

from qrt.engine.schedule.admission import Growing, expected_output, peak_slots
from qrt.engine.schedule.request import Request
from qrt.mem.manager import SequenceKV
from qrt.request.sampling import SamplingParams


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
def test_peak_with_slack_is_never_exceeded(seed):
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


@pytest.mark.parametrize("seed", range(20))
def test_incremental_peak_equals_the_peak_of_all(seed):
    rng = np.random.default_rng(seed)
    running = [request(rng) for _ in range(int(rng.integers(0, 20)))]
    held = [r.length - r.seq.num_cached for r in running]
    left = [max(expected(r), r.seq.length - r.length) for r in running]
    slots = sum(r.seq.length - r.seq.num_cached for r in running)
    growing = Growing(running, conservative=False)
    assert growing.prefill == sum(max(0, r.prefill_len - r.num_computed) for r in running)
    for _ in range(10):
        new, need, slack = request(rng), int(rng.integers(1, 50)), int(rng.integers(0, 9))
        growing.add(new, need)
        held, left, slots = [*held, need], [*left, expected(new)], slots + need
        exact = peak_slots(held, left, slack) - slots
        assert growing.spare(slack, plenty=-(10**9)) == exact
        for plenty in (exact - 1, exact, exact + 50, 10**9):
            assert exact <= growing.spare(slack, plenty) <= max(exact, plenty)


def request(rng) -> Request:
    """One that runs, with some output, slots given ahead or a prompt not yet computed."""
    params = SamplingParams(max_tokens=None, ignore_eos=bool(rng.integers(0, 2)))
    prompt, output = np.zeros(int(rng.integers(1, 50)), np.int32), [0] * int(rng.integers(0, 40))
    length = len(prompt) + len(output)
    new = Request("r", prompt, params, None, frozenset(), length + int(rng.integers(0, 2000)), (0, 0))
    new.output, new.length, new.prefill_len = output, length, length
    new.num_computed = int(rng.integers(0, length + 1))
    slots = np.zeros(min(length + int(rng.integers(0, 16)), new.max_len), np.int32)
    cached = int(rng.integers(0, length))
    new.seq = SequenceKV(slots[:cached], slots[cached:], None, None)
    return new


def expected(new: Request) -> int:
    """Tokens that it is expected to grow by, from the definition."""
    done, most = len(new.output), new.max_len - len(new.prompt)
    return max(0, (most if new.params.ignore_eos else min(most, max(1024, int(1.1 * done)))) - done)


def test_expected_outputs():
    assert expected_output(0, 5000, conservative=False) == 1024
    assert expected_output(0, 30, conservative=False) == 30
    assert expected_output(2000, 5000, conservative=False) == 2200
    assert expected_output(2000, 5000, conservative=True) == 5000
    assert peak_slots([], []) == 0
