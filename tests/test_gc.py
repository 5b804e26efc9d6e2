"""Garbage collections while an engine runs in its user's process."""

import gc

import pytest

from qrt.gc import short_collections

pytestmark = pytest.mark.usefixtures("unfrozen")


def test_objects_stay_frozen_until_the_last_holder_ends():
    first, second = short_collections(), short_collections()
    first.__enter__()
    assert gc.get_freeze_count() > 1000
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_freeze_count() > 1000
    second.__exit__(None, None, None)
    assert gc.get_freeze_count() == 0
    with pytest.raises(KeyError), short_collections():
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_new_garbage_is_still_collected():
    with short_collections():
        cycle: list = []
        cycle.append(cycle)
        del cycle
        assert gc.collect() >= 1


def test_users_own_gc_freeze_is_kept():
    gc.freeze()
    with short_collections():
        pass
    assert gc.get_freeze_count() > 1000
