"""`covering`: each two values come together, in far fewer runs than there are."""

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from pairs import covering


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_every_pair_of_values_comes(sizes, data):
    """Of all combinations, and of some of them."""
    runs = [set(enumerate(run)) for run in product(*map(range, sizes))]
    runs = data.draw(st.lists(st.sampled_from(runs), min_size=1, unique_by=lambda run: tuple(sorted(run))))
    taken = [runs[number] for number in covering(runs)]
    every = {pair for run in runs for pair in combinations(sorted(run), 2)}
    assert {pair for run in taken for pair in combinations(sorted(run), 2)} == every
    assert {value for run in taken for value in run} == {value for run in runs for value in run}
    assert len(taken) <= len(runs)


def test_four_parameters_of_three_values_take_few_runs():
    """Nine are the least; the greedy choice comes near."""
    runs = [set(enumerate(run)) for run in product(range(3), repeat=4)]
    assert 9 <= len(covering(runs)) <= 13
