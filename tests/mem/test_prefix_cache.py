"""RadixCache, piece by piece; the whole is tested through the manager against a model."""

import numpy as np

from qrt.mem.prefix import RadixCache


def array(*values):
    return np.array(values, np.int32)


def put(cache, ids, slots):
    """Insert; returns how many of the slots were duplicates."""
    match = cache.match(array(*ids))
    cache.insert(match, array(*ids), array(*slots))
    cache.check()
    return match.length


def found(cache, ids):
    """The slots of the longest cached prefix."""
    match = cache.match(array(*ids))
    end = cache.lock(match)
    slots = cache.slots(end)
    cache.unlock(end)
    cache.check()
    assert len(slots) == match.length
    return slots.tolist()


def test_nodes_split_where_sequences_part():
    cache = RadixCache()
    assert put(cache, (1, 2, 3, 4), (10, 11, 12, 13)) == 0
    assert put(cache, (1, 2, 7, 8), (20, 21, 22, 23)) == 2
    assert [node.key.tolist() for node in cache.nodes()] == [[1, 2], [7, 8], [3, 4]]
    assert found(cache, (1, 2, 3, 4, 5)) == [10, 11, 12, 13]
    assert found(cache, (1, 2, 7, 8)) == [10, 11, 22, 23]
    assert put(cache, (1, 2, 3), (30, 31, 32)) == 3
    assert found(cache, (1, 2, 3)) == [10, 11, 12]
    assert found(cache, (2,)) == found(cache, ()) == []
    assert cache.evictable == 6


def test_match_inside_a_node_stops_there():
    cache = RadixCache()
    put(cache, (1, 2, 3), (10, 11, 12))
    put(cache, (1, 2, 3, 7), (20, 21, 22, 23))
    assert found(cache, (1, 2, 7)) == [10, 11] == found(cache, (1, 2, 7, 7))


def test_a_lock_survives_splits_above_and_below_it():
    cache = RadixCache()
    put(cache, (1, 2, 3, 4), (10, 11, 12, 13))
    end = cache.lock(cache.match(array(1, 2, 3)))
    assert (cache.locked, cache.evictable) == (3, 1)
    put(cache, (1, 9), (20, 21))
    put(cache, (1, 2, 3, 4, 5), (30, 31, 32, 33, 34))
    assert cache.slots(end).tolist() == [10, 11, 12]
    assert sorted(cache.evict(99).tolist()) == [13, 21, 34]
    assert cache.slots(end).tolist() == [10, 11, 12]
    cache.unlock(end)
    assert (cache.locked, cache.evictable) == (0, 3)
    assert sorted(cache.evict(99).tolist()) == [10, 11, 12]
    assert not list(cache.nodes())
    cache.check()


def test_match_counts_unlocked_tokens_and_changes_nothing():
    cache = RadixCache()
    put(cache, (1, 2, 3, 4), (10, 11, 12, 13))
    end = cache.lock(cache.match(array(1, 2)))
    match = cache.match(array(1, 2, 3, 8))
    assert (match.length, match.unlocked) == (3, 1)
    assert len(list(cache.nodes())) == 2
    cache.unlock(end)
    assert cache.match(array(1, 2, 3, 8)).unlocked == 3


def test_eviction_takes_the_oldest_leaf_from_its_end():
    cache = RadixCache()
    put(cache, (1, 1, 1), (10, 11, 12))
    put(cache, (2, 2, 2), (20, 21, 22))
    put(cache, (3, 3, 3), (30, 31, 32))
    assert found(cache, (1, 1, 1)) == [10, 11, 12]  # a use
    cache.match(array(2, 2, 2))  # a look
    assert cache.evict(2).tolist() == [21, 22]
    assert found(cache, (2, 2, 2)) == [20]  # now 3 is the oldest, then 1, then 2
    assert cache.evict(4).tolist() == [30, 31, 32, 12]
    cache.check()
    assert cache.evict(99).tolist() == [10, 11, 20]


def test_a_parent_goes_after_its_children():
    cache = RadixCache()
    put(cache, (1, 2, 3), (10, 11, 12))
    put(cache, (1, 2, 4), (20, 21, 22))
    assert [cache.evict(1).tolist() for _ in range(4)] == [[12], [22], [11], [10]]


def test_eviction_does_not_look_at_the_whole_tree(count_lines):
    """20,000 leaves below two parents; each eviction costs what it frees."""
    cache = RadixCache()
    for leaf in range(20_000):
        ids, slots = array(leaf % 2, leaf, 7), array(3 * leaf, 3 * leaf + 1, 3 * leaf + 2)
        cache.insert(cache.match(ids), ids, slots)
    for _ in range(50):
        lines, freed = count_lines(cache.evict, 16)
        assert len(freed) == 16 and lines < 500
    cache.check()


def test_stale_queue_entries_stay_bounded():
    """Using a prefix again and again leaves one queue entry per node, not one per use."""
    cache = RadixCache()
    put(cache, (1, 2, 3), (0, 1, 2))
    for _ in range(100):
        assert found(cache, (1, 2, 3)) == [0, 1, 2]
    assert len(cache._queue) == 1


def test_long_prompts_take_few_steps(count_lines):
    """Two prompts of 32k tokens that part in the middle."""
    cache = RadixCache()
    a = np.random.default_rng(0).integers(0, 128_000, 32_768, dtype=np.int32)
    b = a.copy()
    b[20_000:] += 1
    slots = np.arange(65_536, dtype=np.int32)
    cache.insert(cache.match(a), a, slots[:32_768])
    lines, match = count_lines(cache.match, b)
    assert match.length == 20_000 and lines < 50
    lines, _ = count_lines(cache.insert, match, b, slots[32_768:])
    assert lines < 100
    lines, freed = count_lines(cache.evict, 60_000)
    assert len(freed) == 45_536 and lines < 100
    cache.check()
