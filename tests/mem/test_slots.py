"""SlotAllocator against a set of free slots."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qrt.mem.slots import SlotAllocator


class SlotMachine(RuleBasedStateMachine):
    """Owners come, grow and give back; the model is the set of free slots."""

    @initialize(capacity=st.sampled_from([1, 5, 16, 40, 64, 131]), run=st.sampled_from([1, 4, 16]))
    def make(self, capacity, run):
        self.slots = SlotAllocator(capacity, run)
        self.run, self.free, self.owners = run, set(range(capacity)), []

    def whole_runs(self) -> int:
        per_run = np.bincount([slot // self.run for slot in self.free], minlength=1)
        return int((per_run == self.run).sum())

    def take(self, n, tail=None):
        """alloc, checked: all or nothing, only free slots, tail and whole runs first."""
        follow, whole = [], self.whole_runs()
        if tail is not None:
            while (slot := tail + 1 + len(follow)) % self.run and slot in self.free and len(follow) < n:
                follow.append(slot)
        got = self.slots.alloc(n, tail)
        assert (got is None) == (n > len(self.free))
        if got is None:
            return None
        assert got.dtype == np.int32 and got.shape == (n,)
        assert len(set(got.tolist())) == n and set(got.tolist()) <= self.free
        assert got[: len(follow)].tolist() == follow
        rest = got[len(follow) :]
        if len(rest) <= whole * self.run:  # they come in aligned, ascending runs, each from its start
            place = np.arange(len(rest)) % self.run
            assert (rest % self.run == place).all()
            assert len(np.unique(rest // self.run)) == -(-len(rest) // self.run)
        self.free -= set(got.tolist())
        return got

    @rule(n=st.integers(0, 70))
    def start(self, n):
        got = self.take(n)
        if got is not None and n:
            self.owners.append(got)

    @precondition(lambda self: self.owners)
    @rule(n=st.integers(1, 20), which=st.integers(0, 99))
    def extend(self, n, which):
        which %= len(self.owners)
        got = self.take(n, tail=int(self.owners[which][-1]))
        if got is not None:
            self.owners[which] = np.concatenate([self.owners[which], got])

    @precondition(lambda self: self.owners)
    @rule(which=st.integers(0, 99), share=st.floats(0, 1), seed=st.integers(0, 9))
    def give_back(self, which, share, seed):
        own = np.random.default_rng(seed).permutation(self.owners.pop(which % len(self.owners)))
        back, kept = np.split(own, [round(share * len(own))])
        self.slots.free(back)
        self.free |= set(back.tolist())
        if len(kept):
            self.owners.append(kept)

    @precondition(lambda self: self.owners)
    @rule(which=st.integers(0, 99), kind=st.sampled_from(["free", "twice", "foreign", "negative"]))
    def refuse(self, which, kind):
        own = self.owners[which % len(self.owners)]
        if kind == "free" and not self.free:
            return
        bad = {
            "free": min(self.free, default=0),
            "twice": own[0],
            "foreign": self.slots.capacity,
            "negative": -1,
        }[kind]
        with pytest.raises(ValueError, match="free: "):
            self.slots.free(np.append(own, bad).astype(np.int32))

    @invariant()
    def agrees(self):
        if hasattr(self, "slots"):
            self.slots.check()
            assert self.slots.num_free == len(self.free)
            assert self.slots.num_whole == self.whole_runs() * self.run
            used = set(range(self.slots.capacity)) - self.free
            assert self.slots.in_use().tolist() == sorted(used)
            assert sorted(slot for own in self.owners for slot in own.tolist()) == sorted(used)


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_sequence_grows_inside_its_own_runs():
    slots = SlotAllocator(64, run=16)
    a, b = slots.alloc(5), slots.alloc(5)
    assert a.tolist() == [0, 1, 2, 3, 4] and b.tolist() == [16, 17, 18, 19, 20]
    assert slots.alloc(12, tail=4).tolist() == [*range(5, 16), 32]
    assert slots.alloc(1, tail=20).tolist() == [21]


def test_gaps_serve_when_no_run_is_whole():
    slots = SlotAllocator(32, run=16)
    every = slots.alloc(32)
    slots.free(every[1::3])
    got = slots.alloc(len(every[1::3]))
    assert sorted(got.tolist()) == every[1::3].tolist()
    assert slots.alloc(1) is None


def test_gap_takers_get_runs_of_their_own():
    slots = SlotAllocator(64, run=16)
    every = slots.alloc(64).reshape(4, 16)
    slots.free(every[:, 8:].reshape(-1))
    tails = [int(slots.alloc(1)[0]) for _ in range(4)]
    assert len({tail // 16 for tail in tails}) == 4
    assert [slots.alloc(1, tail).item() for tail in tails] == [tail + 1 for tail in tails]


def test_large_pools_take_few_steps(count_lines):
    """32k-token prompts in a pool of 3 million slots: no step per slot, whole or scattered."""
    slots = SlotAllocator(3_000_000)
    prompts = []
    for _ in range(91):
        lines, got = count_lines(slots.alloc, 32_768)
        assert lines < 100
        prompts.append(got)
    assert slots.num_free == 3_000_000 - 91 * 32_768 and slots.alloc(32_768) is None
    assert (np.diff(prompts[-1]) == 1).all()
    holes = np.concatenate([prompt[::5] for prompt in prompts])
    lines, _ = count_lines(slots.free, holes)
    assert lines < 100
    lines, scattered = count_lines(slots.alloc, slots.num_free)
    assert lines < 300 and slots.num_free == 0
    assert len(np.unique(scattered)) == len(scattered)
    lines, _ = count_lines(slots.free, np.random.default_rng(0).permutation(3_000_000).astype(np.int32))
    assert lines < 100
    slots.check()
    assert slots.num_whole == 3_000_000


def test_wrong_pools_are_refused():
    for capacity, run in ((0, 16), (16, 0)):
        with pytest.raises(ValueError, match="expected at least 1"):
            SlotAllocator(capacity, run)
