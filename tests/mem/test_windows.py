"""Slots of window groups: who holds them, which prefixes are found, and how memory is divided."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import one_in
from qrt.errors import ConfigError
from qrt.mem import windows
from qrt.mem.manager import KVManager
from qrt.mem.sizing import GIB, pool_size
from qrt.mem.windows import MARGIN, NONE, LayerGroups, WindowSlots, held_slots, longest_prefix
from qrt.quant.kv import KV_FORMATS

GEMMA_3_27B = [1024 if (i + 1) % 6 else 0 for i in range(62)]
SHAPE = (16, 128, torch.bfloat16)


def ids(*tokens):
    return np.array(tokens, np.int32)


@given(
    st.lists(st.lists(st.booleans(), min_size=20, max_size=20), min_size=1, max_size=2), st.integers(0, 20)
)
def test_longest_prefix_is_the_last_whole_window(gaps, length):
    sizes = [4, 1][: len(gaps)]
    found = [np.where(gap[:length], NONE, 7).astype(np.int32) for gap in gaps]

    def usable(n):
        pairs = zip(found, sizes, strict=True)
        return all((slots[max(0, n - window + 1) : n] != NONE).all() for slots, window in pairs)

    assert longest_prefix(found, sizes, length) == max(n for n in range(length + 1) if usable(n))


def test_groups_are_windows_that_free_something():
    limit = 8 + held_slots(1024, 1 << 20)
    assert LayerGroups.of([0, 1024, 0, 1024], limit) == LayerGroups((0, 1024), (0, 1, 0, 1))
    assert LayerGroups.of([1024, 16, 16], limit) == LayerGroups((0, 16, 1024), (2, 1, 1))
    assert LayerGroups.of([0, 1024], limit - 8) == LayerGroups((0,), (0, 0))


def test_reach_frees_what_passed_and_takes_what_is_there(monkeypatch):
    monkeypatch.setattr(windows, "MARGIN", 0)
    pool = WindowSlots(32, 8)
    kv = KVManager(256, [pool], prefix_caching=False)
    seq = kv.start(np.arange(100, dtype=np.int32))
    assert kv.reach(seq, 0, 24)[0] == 24 and pool.available == 8
    end, (given,) = kv.reach(seq, 24, 64)  # 16 to 23 stay
    assert (end, given.group, given.start, len(given.slots), pool.available) == (48, 1, 24, 24, 0)
    assert kv.reach(seq, 48, 49)[0] == 49 and seq.windows[0].first == 40
    kv.check()
    other = kv.start(np.arange(50, dtype=np.int32))
    assert kv.reach(other, 0, 50)[0] == 23 and kv.reach(other, 23, 50)[0] == 38
    kv.release(seq, ids(), keep=False)
    kv.release(other, ids(), keep=False)
    kv.check()
    assert pool.available == 32


def test_prefix_hits_need_the_last_window_of_tokens(monkeypatch):
    """Slots that nobody holds are taken from cached tokens, whose prefix is then found less far."""
    monkeypatch.setattr(windows, "MARGIN", 0)
    pool = WindowSlots(32, 8)
    kv, prompt = KVManager(256, [pool]), np.arange(30, dtype=np.int32)
    seq = kv.start(prompt)
    assert kv.reach(seq, 0, 30)[0] == 30
    kv.publish(seq, prompt)
    kv.release(seq, prompt)
    assert pool.num_free == 2 and pool.available == 32 and kv.cached(prompt) == 29
    assert kv.cached(ids(*range(12), 99)) == 12
    other = kv.start(ids(*range(100, 122)), reuse=False)
    assert kv.reach(other, 0, 22)[0] == 22  # takes those of the first 20 tokens
    kv.check()
    assert kv.cached(prompt) == 29 and kv.cached(ids(*range(12), 99)) == 0
    hit = kv.start(prompt)
    assert hit.num_cached == 29 and hit.windows[0].first == 22 and len(hit.windows[0].slots) == 7
    assert pool.available == 3, "what a request attends is not taken"
    kv.release(hit, prompt)
    kv.release(other, ids(), keep=False)
    again = kv.start(ids(*range(12), 99))
    assert again.num_cached == 0 and kv.reach(again, 0, 13)[0] == 13
    kv.publish(again, ids(*range(12)))
    assert kv.cached(ids(*range(12), 99)) == 12, "tokens that were computed again have their slots again"
    kv.check()


@pytest.mark.parametrize("seed", one_in(2, range(6)))
def test_every_slot_is_held_or_free(seed, monkeypatch):
    """Random requests with shared beginnings; what a request attends is never given to another one."""
    rng = random.Random(seed)
    monkeypatch.setattr(windows, "MARGIN", rng.choice([0, 5]))
    pools = [WindowSlots(64, 4, rng.choice([1, 16])), WindowSlots(96, 11)]
    kv = KVManager(160, pools, run=rng.choice([1, 16]))
    running = []
    for _ in range(600):
        if rng.random() < 0.3 and len(running) < 3:
            tokens = np.array([rng.randrange(2) for _ in range(rng.randrange(1, 50))], np.int32)
            if (seq := kv.start(tokens)) is not None:
                running.append([seq, tokens, seq.num_cached, {}])
        elif running:
            work = rng.choice(running)
            seq, tokens, done, written = work
            end = min(len(tokens), done + rng.randrange(1, 9))
            reached, given = kv.reach(seq, done, end)
            for new in given:
                written |= {(new.group, new.start + i): slot for i, slot in enumerate(new.slots.tolist())}
            work[2] = done = reached
            for group, (pool, held) in enumerate(zip(pools, seq.windows, strict=True), 1):
                assert held.first <= max(0, done - pool.window + 1) and held.end >= done
                assert len(held.slots) <= pool.kept + 9
                for i, slot in enumerate(held.slots.tolist()):
                    assert written.setdefault((group, held.first + i), slot) == slot
            if rng.random() < 0.5 and done:
                kv.publish(seq, tokens[:done])
            if done == len(tokens) or rng.random() < 0.1:
                kv.release(seq, tokens[: max(0, done - 1)], keep=rng.random() < 0.8)
                running.remove(work)
        kv.check()
    for seq, *_ in running:
        kv.release(seq, ids(), keep=False)
    kv.reset()
    kv.check()
    assert all(pool.num_free == pool.capacity for pool in pools) and kv.available == 160


def gemma(budget, max_num_seqs, kv="fp16", length=32_768):
    formats = [KV_FORMATS[kv]] * 62
    groups = LayerGroups.of(GEMMA_3_27B, length)
    limits = {"max_model_len": length, "max_num_seqs": max_num_seqs}
    return pool_size(formats, *SHAPE, budget_bytes=int(budget * GIB), **limits, groups=groups)


def test_gemma_3_27b_keeps_a_fifth():
    """10 layers keep all of 32,768 tokens; 52 keep 1,024, what kernels read beside them, and one chunk."""
    kept = 1024 + 128 + 64
    for requests, share in ((1, 0.25), (64, 0.2)):
        size, slots = gemma(1000, requests), (requests * 32_768, requests * kept + 2048)
        assert size.slots == slots and size.concurrency == requests
        assert size.num_bytes == 8192 * (10 * (slots[0] + 16) + 52 * (slots[1] + 16))
        assert size.num_bytes < share * requests * 32_768 * 62 * 8192
    assert str(gemma(1000, 64)).endswith(
        "as fp16; a request keeps 81,920 bytes of every token and 425,984 bytes of each of the last 1,216 "
        "tokens, in 79,872 slots (window 1,024)"
    )


@settings(max_examples=60, deadline=None)
@given(
    budget=st.floats(4, 400),
    max_num_seqs=st.integers(1, 300),
    length=st.integers(1300, 40_000),
    kv=st.sampled_from(["fp16", "int4"]),
)
def test_division_of_memory(budget, max_num_seqs, length, kv):
    """One request fits, no group has more than all can use, and half of the best of any length are there."""
    try:
        size = gemma(budget, max_num_seqs, kv, length)
    except ConfigError:
        assert budget < 8
        return
    all_bytes, window_bytes = size.all_bytes, size.windows[0][2]
    assert size.num_bytes <= budget * GIB and size.fitting(length) >= 1
    most = -(-max_num_seqs * length // 16) * 16, max_num_seqs * held_slots(1024, length) + 2048 + 16
    assert size.slots[0] <= most[0] and size.slots[1] <= most[1]
    single = length * all_bytes + (held_slots(1024, length) + 2048) * window_bytes
    if single * 2 > budget * GIB:  # one request needs more than its half of a group
        return
    for tokens in (100, 1024, 5000, length):
        if tokens <= length:
            best = budget * GIB / (tokens * all_bytes + held_slots(1024, tokens) * window_bytes)
            room = 7 / 8  # the rest is for a step
            assert size.fitting(tokens) >= 0.98 * min(room * best / 2, max_num_seqs)


def test_model_of_windows_alone_has_no_memory_for_other_layers():
    groups = LayerGroups.of([4096] * 32, 32_768)
    sizes = {"budget_bytes": 4 * GIB, "max_model_len": 32_768, "max_num_seqs": 256}
    size = pool_size([KV_FORMATS["fp16"]] * 32, 8, 128, torch.bfloat16, **sizes, groups=groups)
    window, slots, per_slot = size.windows[0]
    assert size.all_bytes == 0 and size.num_slots / 32_768 == pytest.approx(slots / 4288, rel=1e-3)
    assert (window, per_slot, slots) == (4096, 32 * 4096, (4 * GIB // per_slot - 16) // 16 * 16)
    assert size.concurrency == pytest.approx((slots - 2048) / (4096 + MARGIN + 64))


def test_remedies_for_a_pool_of_windows():
    with pytest.raises(ConfigError) as error:
        gemma(2, 8)
    message = str(error.value)
    fits = int(message.split("--max-model-len to ")[1].split(",")[0])
    assert gemma(2, 8, length=fits).concurrency >= 1 and "choose --kv int8" in message
    with pytest.raises(ConfigError):
        gemma(2, 8, length=fits + 17)
    enough = int(message.split("--kv-cache-memory-bytes to ")[1].split()[0])
    assert gemma(enough / GIB, 8).num_bytes == enough
