"""Many cases alike: some of them always run, the others under `make exhaustive`."""

import itertools

import pytest


def one_in(count, *axes):
    """All combinations of the axes' values, for `parametrize`: one in `count` always runs.

    The rest is exhaustive. Each value is among those that run if two axes have at least `count` values.
    """
    cases = []
    for combination in itertools.product(*map(enumerate, axes)):
        always = sum(place for place, _ in combination) % count == 0
        marks = [] if always else [pytest.mark.exhaustive]
        cases.append(pytest.param(*(value for _, value in combination), marks=marks))
    return cases
