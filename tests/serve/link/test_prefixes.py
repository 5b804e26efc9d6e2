"""Prefixes of prompts as hashes, and the table that says who took them."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qrt.serve.link.prefixes import CHUNK, SLOTS, Prefixes, prefix_hashes

prompts = st.lists(st.integers(0, 2), max_size=4).map(
    lambda chunks: [token for chunk in chunks for token in [chunk] * (CHUNK - 1) + [7]]
)
salts = st.sampled_from([None, "", "a", "b"])


def common(one: list, other: list) -> int:
    """Tokens that both begin with."""
    return len(os.path.commonprefix([one, other]))


@given(prompts, prompts, st.integers(0, CHUNK - 1), salts, salts)
def test_prompts_share_the_hashes_of_what_they_share(one, other, rest, salt, salt_of_other):
    """Whole chunks from the start, and only those of one salt."""
    ours, theirs = prefix_hashes(one + [9] * rest, salt), prefix_hashes(other, salt_of_other)
    assert (len(ours), len(theirs)) == (len(one) // CHUNK, len(other) // CHUNK)
    shared = common(one, other) // CHUNK if salt == salt_of_other else 0
    assert common(ours, theirs) == shared == len(set(ours) & set(theirs))


def test_ids_that_no_model_has_share_nothing():
    assert prefix_hashes([2**70] * 200, None) == []
    assert len(prefix_hashes([-1, 2**63 - 1] * CHUNK, None)) == 2


@given(st.lists(st.tuples(prompts, st.integers(0, 3)), max_size=12), prompts, st.sets(st.integers(0, 3)))
def test_who_took_the_longest_prefix_last(history, prompt, living):
    """By definition: the one of the living that took the longest common part in whole chunks last."""
    table = Prefixes()
    last: dict[tuple[int, ...], int] = {}
    for taken, engine in history:
        table.note(prefix_hashes(taken, None), engine)
        for end in range(CHUNK, len(taken) + 1, CHUNK):
            last[tuple(taken[:end])] = engine
    parts = [tuple(prompt[:end]) for end in range(len(prompt), 0, -CHUNK)]
    expected = next((last[part] for part in parts if last.get(part) in living), None)
    assert table.find(prefix_hashes(prompt, None), living) == expected


def test_processes_share_one_table(tmp_path):
    path = str(tmp_path / "prefixes")
    one, other = Prefixes(path), Prefixes(path)
    hashes = prefix_hashes([5] * CHUNK * 3, "salt")
    one.note(hashes, 63)
    assert other.find(hashes, range(64)) == 63
    assert other.find(prefix_hashes([5] * CHUNK * 3, None), range(64)) is None
    assert os.stat(path).st_size == SLOTS * 8 and os.stat(path).st_mode & 0o077 == 0


@pytest.mark.parametrize("salt", ["\ud800", "Ünï"])
def test_any_salt_is_a_root(salt):
    assert len(set(prefix_hashes([1] * CHUNK, salt) + prefix_hashes([1] * CHUNK, None))) == 2
