"""Loads: how many requests a steady one runs, and how its first ones begin."""

from types import SimpleNamespace

import pytest

from qrt_eval.lengths import Fixed
from qrt_eval.workload import FULL, Load, begun, running_at_once, warmup


def engine(seqs=10**6, slots=10**9, tokens=10**9):
    limits = SimpleNamespace(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    return SimpleNamespace(scheduler=SimpleNamespace(limits=limits), pool=SimpleNamespace(num_slots=slots))


def test_what_limits_the_requests_that_run():
    """2,048 in and 128 out: their K/V are 2,112 tokens on average; a step of 8,192 tokens in which R decode
    brings (8,192 - R) / 2,048 new requests and ends R / 128, as many at R = 481.9."""
    assert running_at_once(engine(seqs=100), 2048, 128) == 100
    assert running_at_once(engine(slots=211_200), 2048, 128) == int(100 * FULL)
    assert running_at_once(engine(tokens=8192), 2048, 128) == 481
    assert running_at_once(engine(slots=5), 2048, 128) == 1


def test_the_first_requests_are_evenly_spread_over_their_outputs():
    plain = Fixed(7, 50).requests(25, 3, 1000)
    found = begun(plain, 10, 3, 1000)
    assert found[10:] == plain[10:] and begun(plain, 10, 3, 1000) == found != begun(plain, 10, 4, 1000)
    for request, before in zip(found, plain, strict=True):
        assert request.ids[:7] == before.ids and len(request.ids) + request.output_len == 57
        assert max(request.ids) < 1000
    outputs = [request.output_len for request in found[:10]]
    assert sorted(outputs) == [5, 10, 15, 20, 25, 30, 35, 40, 45, 50] != outputs


@pytest.mark.parametrize("in_flight, want", [(3, 3), (None, 6)])
def test_a_warm_up_is_short(monkeypatch, in_flight, want):
    requests = Fixed(10, 9).requests(20, 0, 50)
    load = Load({"batch": 3}, requests, in_flight)
    found = warmup(engine(seqs=6), load)
    assert [request.ids for request in found] == [request.ids for request in requests[:want]]
    assert {request.output_len for request in found} == {4}
    monkeypatch.setattr("qrt_eval.workload.WARMUP_PROMPT_TOKENS", 25)
    assert 1 <= len(warmup(engine(seqs=6), load)) <= 3
    monkeypatch.setattr("qrt_eval.workload.WARMUP_PROMPT_TOKENS", 1)
    assert len(warmup(engine(seqs=6), load)) == 1
