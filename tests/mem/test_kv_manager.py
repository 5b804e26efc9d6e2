"""KVManager against a model written from the definition: one dictionary entry per cached token."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qrt.mem.manager import KVManager

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=24)


class Model:
    """A cached token is known by the ids up to and including it: ids[:i+1] -> its slot and last use."""

    def __init__(self, capacity):
        self.capacity, self.clock = capacity, 0
        self.slot, self.used = {}, {}
        self.running = {}  # SequenceKV -> its ids, its shared prefix

    def cached_prefix(self, ids):
        n = 0
        while n < len(ids) and tuple(ids[: n + 1]) in self.slot:
            n += 1
        return n

    def touch(self, ids, n):
        self.clock += 1
        self.used |= {tuple(ids[: i + 1]): self.clock for i in range(n)}

    def locked(self):
        return {shared[: i + 1] for _, shared in self.running.values() for i in range(len(shared))}

    def evict(self, n):
        """Token by token: the least recently used of those that nobody reads and nothing follows."""
        for _ in range(n):
            parents = {key[:-1] for key in self.slot}
            leaves = [key for key in self.slot if key not in parents and key not in self.locked()]
            gone = min(leaves, key=self.used.__getitem__)
            del self.slot[gone], self.used[gone]

    def private(self):
        return {slot for kv in self.running for slot in kv.slots[kv.num_cached :].tolist()}

    def free(self):
        return self.capacity - len(self.slot) - len(self.private())

    def available(self):
        return self.capacity - len(self.locked()) - len(self.private())


class ManagerMachine(RuleBasedStateMachine):
    """Requests start, grow, end, pause and come back in a pool that is often too small."""

    @initialize(capacity=st.sampled_from([8, 24, 40, 64, 100]), run=st.sampled_from([1, 4, 16]))
    def make(self, capacity, run):
        self.kv, self.model, self.seen = KVManager(capacity, run=run), Model(capacity), [[0]]

    def snapshot(self):
        return self.kv.stats, self.dump(), [seq.slots.tolist() for seq in self.model.running]

    def dump(self):
        """The cache as the model writes it."""
        every = {}
        for node in self.kv._cache.nodes():
            above, up = [], node.parent
            while up is not None:
                above, up = up.key.tolist() + above, up.parent
            for i, slot in enumerate(node.slots.tolist()):
                every[(*above, *node.key[: i + 1].tolist())] = slot
        return every

    def follow_eviction(self, need, free, whole):
        """The manager says how much it evicted, the model which tokens that must have been."""
        stats = self.kv.stats
        evicted = len(self.model.slot) - stats.evictable_slots - stats.locked_slots
        assert evicted >= need - free
        if need <= whole:
            assert evicted == 0
        batch = self.kv._evict_slots
        assert evicted <= -(-need // batch) * batch
        self.model.evict(evicted)

    def begin(self, ids, reuse=True):
        model, before = self.model, self.snapshot()
        n = model.cached_prefix(ids[:-1]) if reuse else 0
        shared = tuple(ids[:n])
        newly_locked = len({shared[: i + 1] for i in range(n)} - model.locked())
        fits = len(ids) - n <= model.available() - newly_locked
        free, whole = model.free(), self.kv._slots.num_whole
        assert fits or len(ids) > model.available()
        seq = self.kv.start(ids, reuse=reuse)
        assert (seq is not None) == fits
        if seq is None:
            assert self.snapshot() == before
            return None
        assert (seq.num_cached, len(seq), seq.slots.dtype) == (n, len(ids), np.int32)
        assert seq.slots[:n].tolist() == [model.slot[shared[: i + 1]] for i in range(n)]
        others = model.private()
        model.running[seq] = (list(ids), shared)
        self.follow_eviction(len(ids) - n, free, whole)
        new = set(seq.slots[n:].tolist())
        assert len(new) == len(ids) - n and not new & others and not new & set(model.slot.values())
        self.seen.append(list(ids))
        return seq

    def end(self, seq, written, keep):
        model = self.model
        ids, shared = model.running.pop(seq)
        slots = seq.slots.tolist()
        self.kv.release(seq, np.array(ids[:written], np.int32), keep=keep)
        if keep:
            for i in range(written):
                model.slot.setdefault(tuple(ids[: i + 1]), slots[i])
            model.touch(ids, written)
        model.touch(shared, len(shared))
        with pytest.raises(ValueError, match="released twice"):
            self.kv.release(seq, ids, keep=keep)
        return ids

    def pick(self, which):
        return list(self.model.running)[which % len(self.model.running)]

    @rule(
        tail=TOKENS, which=st.integers(0, 99), share=st.sampled_from([0, 0.4, 1, 1]), reuse=st.integers(0, 4)
    )
    def start(self, tail, which, share, reuse):
        old = self.seen[which % len(self.seen)]
        self.begin(old[: round(share * len(old))] + tail, reuse=reuse > 0)

    @precondition(lambda self: self.model.running)
    @rule(tokens=TOKENS, which=st.integers(0, 99))
    def extend(self, tokens, which):
        seq, model, before = self.pick(which), self.model, self.snapshot()
        old, others = seq.slots.tolist(), model.private() | set(model.slot.values())
        free, whole, fits = model.free(), self.kv._slots.num_whole, len(tokens) <= model.available()
        got = self.kv.extend(seq, len(tokens))
        assert (got is not None) == fits
        if got is None:
            assert self.snapshot() == before
            return
        assert seq.slots.tolist() == old + got.tolist()
        self.follow_eviction(len(tokens), free, whole)
        assert not set(got.tolist()) & ((others & model.private()) - set(got.tolist()))
        assert not set(got.tolist()) & (set(old) | set(model.slot.values()))
        model.running[seq][0].extend(tokens)

    @precondition(lambda self: self.model.running)
    @rule(which=st.integers(0, 99), part=st.sampled_from([0.3, 0.7, 1, 1]))
    def publish(self, which, part):
        """The first tokens become everyone's; those that are already lose the slots of the sequence."""
        seq, model = self.pick(which), self.model
        ids, shared = model.running[seq]
        n, before, own = round(part * len(ids)), self.snapshot(), seq.slots.tolist()
        found = model.cached_prefix(ids[:n])
        taken = self.kv.publish(seq, np.array(ids[:n], np.int32)).tolist()
        if n <= len(shared) or found == n:
            assert self.snapshot() == before and not taken
            return
        assert taken == [model.slot[tuple(ids[: i + 1])] for i in range(len(shared), found)]
        assert seq.slots.tolist() == own[: len(shared)] + taken + own[found:]
        for i in range(found, n):
            model.slot[tuple(ids[: i + 1])] = own[i]
        model.touch(ids, n)
        model.touch(shared, len(shared))
        model.running[seq] = (ids, tuple(ids[:n]))
        assert seq.num_cached == n

    @precondition(lambda self: self.model.running)
    @rule(which=st.integers(0, 99), missing=st.integers(0, 3), keep=st.booleans())
    def release(self, which, missing, keep):
        seq = self.pick(which)
        self.end(seq, max(0, len(seq) - missing), keep)

    @precondition(lambda self: self.model.running)
    @rule(which=st.integers(0, 99))
    def pause_and_resume(self, which):
        """With nothing in between, all but the last token is found again."""
        seq = self.pick(which)
        ids = self.end(seq, len(seq) - 1, keep=True)
        again = self.begin(ids)
        assert again is not None and again.num_cached == len(ids) - 1

    @rule(tail=TOKENS)
    def preempt_all_for_one(self, tail):
        """Once everything else is paused, a request that fits alone fits."""
        for seq in list(self.model.running):
            self.end(seq, len(seq), keep=True)
        ids = (tail * 9)[: self.model.capacity]
        assert self.begin(ids) is not None

    @rule()
    def reset(self):
        self.kv.reset()
        locked = self.model.locked()
        self.model.evict(len(self.model.slot) - len(locked))
        assert set(self.model.slot) == locked

    @invariant()
    def agrees(self):
        if not hasattr(self, "kv"):
            return
        self.kv.check()
        model, stats = self.model, self.kv.stats
        assert self.dump() == model.slot
        for seq, (ids, shared) in model.running.items():
            assert len(seq) == len(ids)
            assert seq.slots[: len(shared)].tolist() == [
                model.slot[shared[: i + 1]] for i in range(len(shared))
            ]
        assert stats.locked_slots == len(model.locked())
        assert stats.locked_slots + stats.evictable_slots == len(model.slot)
        assert stats.private_slots == len(model.private())
        assert stats.free_slots == model.free()
        assert self.kv.available == model.available()

    def teardown(self):
        """No leak."""
        if hasattr(self, "kv"):
            for seq in list(self.model.running):
                self.end(seq, len(seq), keep=True)
            self.kv.reset()
            self.kv.check()
            assert self.kv.stats.free_slots == self.model.capacity


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def ids_of(n, seed=0):
    return np.random.default_rng(seed).integers(0, 100_000, n, dtype=np.int32)


def test_a_finished_prompt_serves_the_next_one():
    kv = KVManager(256)
    prompt = ids_of(40)
    first = kv.start(prompt)
    answer = kv.extend(first, 3)
    written = np.concatenate([prompt, ids_of(3, 1)])
    slots = first.slots.copy()
    assert slots[-3:].tolist() == answer.tolist()
    kv.release(first, written)
    again = kv.start(written)
    assert again.num_cached == 42 and again.slots[:42].tolist() == slots[:42].tolist()
    assert (kv.stats.hit_tokens, kv.stats.query_tokens) == (42, 83)
    fresh = kv.start(written, reuse=False)
    assert fresh.num_cached == 0 and not set(fresh.slots.tolist()) & set(again.slots.tolist())
    assert kv.stats.query_tokens == 83


def test_duplicates_are_freed_when_two_compute_the_same():
    kv = KVManager(256)
    prompt = ids_of(50)
    a, b = kv.start(prompt), kv.start(prompt)
    kept = a.slots.copy()
    kv.release(a, prompt)
    kv.release(b, prompt)
    assert (kv.stats.evictable_slots, kv.stats.free_slots) == (50, 206)
    assert kv.start(prompt).slots[:49].tolist() == kept[:49].tolist()
    kv.check()


def test_unwritten_slots_are_not_kept():
    kv = KVManager(64)
    prompt = ids_of(40)
    kv.release(kv.start(prompt), prompt[:25])  # ended in the middle of its prefill
    assert (kv.stats.evictable_slots, kv.stats.free_slots) == (25, 39)
    aborted = kv.start(prompt)
    kv.release(aborted, prompt[:10], keep=True)  # fewer than it shares
    assert (kv.stats.evictable_slots, kv.stats.free_slots) == (25, 39)
    kv.release(kv.start(prompt), prompt, keep=False)
    assert (kv.stats.evictable_slots, kv.stats.free_slots) == (25, 39)
    kv.check()


def test_without_prefix_caching_nothing_is_kept():
    kv = KVManager(64, prefix_caching=False)
    seq = kv.start([1, 2, 3])
    kv.publish(seq, np.array([1, 2], np.int32))
    assert seq.num_cached == 0
    kv.release(seq, [1, 2, 3], keep=True)
    assert kv.stats.free_slots == 64
    assert kv.start([1, 2, 3]).num_cached == 0
    assert kv.stats.query_tokens == 0


def test_a_refused_start_does_not_refresh_its_prefix():
    kv = KVManager(32, run=1)
    old, new = [1] * 8, [2] * 8
    for ids in (old, new):
        kv.release(kv.start(ids), ids)
    assert kv.start(old + [3] * 40) is None
    big = kv.start([5] * 16)
    kv.extend(big)  # one slot short: the oldest leaf loses its end
    kv.release(big, [], keep=False)
    assert kv.start([*new, 9]).num_cached == 8
    assert kv.start([*old, 9]).num_cached == 7


def test_a_prefix_to_be_read_is_no_room():
    """24 slots, 20 of them cached: a sequence that reads these 20 can have 4 more, not 24."""
    kv = KVManager(24, run=4)
    ids = list(range(20))
    kv.release(kv.start(ids), ids)
    assert kv.available == 24
    assert kv.start([*ids, 1, 2, 3, 4, 5]) is None
    assert kv.start([*ids, 1, 2, 3, 4]).num_cached == 20


def test_a_locked_prefix_is_not_evicted():
    kv = KVManager(48, run=4)
    shared = list(range(16))
    kv.release(kv.start(shared), shared)
    reader = kv.start([*shared, 99])
    assert kv.available == 31
    big = kv.start(list(range(100, 131)))
    assert big is not None and kv.available == 0
    assert kv.start([7]) is None and kv.extend(reader) is None
    kv.reset()
    kv.release(big, [], keep=False)
    assert kv.start([*shared, 98]).slots[:16].tolist() == reader.slots[:16].tolist()
    kv.check()


def test_wrong_calls_are_refused_and_change_nothing():
    kv = KVManager(64)
    ids = list(range(20))
    kv.release(kv.start(ids), ids)
    seq = kv.start(ids)
    before = kv.stats
    with pytest.raises(ValueError, match="differ from the cached prefix"):
        kv.release(seq, [5] * 20)
    with pytest.raises(ValueError, match="21 tokens written, but the sequence has 20"):
        kv.release(seq, range(21))
    with pytest.raises(ValueError, match="at least one token"):
        kv.start([])
    assert kv.stats == before
    kv.release(seq, ids)
    with pytest.raises(ValueError, match="released twice"):
        kv.release(seq, ids)
    with pytest.raises(ValueError, match="not running"):
        KVManager(64).release(kv.start(ids), ids)
    kv.check()


def test_one_slot_extends_are_cheap(count_lines):
    """256 sequences in a pool of 3 million slots, cache full: a few dozen lines, and no copy per token."""
    kv = KVManager(3_000_000)
    for i in range(92):
        prompt = ids_of(32_768, i)
        lines, seq = count_lines(kv.start, prompt)
        assert lines < 200
        lines, _ = count_lines(kv.release, seq, prompt)
        assert lines < 200
    assert kv.stats.free_slots < 40_000 and kv.stats.evictable_slots > 2_900_000
    seqs = [kv.start(ids_of(1000, 1000 + i)) for i in range(256)]
    lines, buffers = 0, set()
    for _ in range(100):
        for seq in seqs:
            more, got = count_lines(kv.extend, seq)
            lines += more
            assert len(got) == 1
        buffers.add(id(seqs[0].slots.base))
    assert lines < 100 * 256 * 50
    assert len(buffers) <= 2
    kv.check()


def test_publishing_reads_only_new_tokens(count_lines):
    """A prompt that is computed in a thousand steps."""
    kv, prompt = KVManager(20_000), ids_of(8000)
    seq = kv.start(prompt)
    for end in range(8, 8001, 8):
        lines, _ = count_lines(kv.publish, seq, prompt[:end])
        assert lines < 40
    assert seq.num_cached == 8000
    kv.check()


def test_sequences_lie_in_whole_runs_on_a_full_pool():
    """A busy server's cache is always full; sequences must not be scattered for it."""
    rng = np.random.default_rng(0)
    kv = KVManager(20_000)
    running = []
    for step in range(1500):
        if step % 5 == 0:
            if len(running) == 8:
                ids, seq = running.pop(0)
                written = np.concatenate([ids, rng.integers(0, 9999, len(seq) - len(ids), dtype=np.int32)])
                kv.release(seq, written)
            ids = rng.integers(0, 9999, rng.integers(100, 900), dtype=np.int32)
            running.append((ids, kv.start(ids)))
        for _, seq in running:
            kv.extend(seq)
    kv.check()
    touched = sum(len(np.unique(seq.slots // 16)) for _, seq in running)
    assert touched < 1.05 * sum(len(seq) / 16 + 1 for _, seq in running)
    assert kv.stats.free_slots < 20_000 // 10  # and the cache is not emptied for it


def test_gaps_are_used_when_they_are_many():
    """Short sequences leave most of each run free; eviction then keeps what it can."""
    kv = KVManager(1600)
    for i in range(1000):
        ids = ids_of(3, i)
        kv.release(kv.start(ids), ids)
    assert kv.stats.free_slots <= 1600 // 16 + 16
    assert all(kv.start(ids_of(3, i)).num_cached == 2 for i in range(999, 600, -8))
    kv.check()


def test_a_salt_keeps_prefixes_apart():
    kv = KVManager(64, run=1)
    ids = np.arange(12, dtype=np.int32)
    for salt in ("a", None, "b"):
        seq = kv.start(ids, salt=salt)
        assert seq.num_cached == 0
        kv.publish(seq, ids[:5])
        kv.release(seq, ids)
        assert kv.cached(ids, salt) == 11 and kv.stats.evictable_slots % 12 == 0
        kv.check()
    again = kv.start(
        np.append(ids[:7], [40, 41]).astype(np.int32), salt="a"
    )  # splits the edge that has the salt
    assert again.num_cached == 7
    kv.release(again, np.append(ids[:7], [40]))
    kv.check()
    assert kv.cached(ids, "a") == 11 and kv.cached(ids, "c") == 0
    assert kv.start(np.full(64, 3, np.int32)) is not None, "everything can be evicted"
    kv.check()
    assert [kv.cached(ids, salt) for salt in ("a", None, "b")] == [0, 0, 0]
