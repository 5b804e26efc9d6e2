"""A plan as tensors: every array against a plain loop over the plan."""

import numpy as np
import torch

from qrt.engine.batch import build
from qrt.engine.plan import Chunk, Decode, Plan, Sampling, Scoring
from qrt.engine.table import RequestTable
from qrt.engine.transfer import to_device

CPU = torch.device("cpu")
GREEDY = Sampling(0.0, 0, 1.0, 0, None)


def ints(*values):
    return np.array(values, np.int32)


def table() -> RequestTable:
    t = RequestTable(6, 100, 999, CPU)
    t.last_token[:6] = torch.arange(6) + 40
    t.length[:6] = torch.arange(6, dtype=torch.int32) + 20
    return t


def mixed_plan() -> Plan:
    """Two decodes, a chunk in the middle of a prompt, the end of one, and a whole one with cached prefix."""
    random, top = Sampling(0.5, 0, 1.0, 11, 2), Sampling(0.7, 5, 0.9, -3, None)
    return Plan(
        admitted=((5, top),),
        decodes=(Decode("a", 3, 22, 7, random, ()), Decode("b", 1, 20, 70, GREEDY, (4, 9))),
        chunks=(
            Chunk("c", 0, 10, ints(1, 2, 3), ints(30, 31, 32), False, GREEDY, (), None),
            Chunk("d", 2, 5, ints(8), ints(50), True, GREEDY, (), Scoring(0, ints(17), 0)),
            Chunk("e", 5, 2, ints(6, 7, 8), ints(90, 91, 80, 81, 82), True, top, (1,), None),
        ),
    )


def test_mixed_step():
    t = table()
    batch = build(mixed_plan(), t, num_kv_heads=2, attend_cache=True)
    step = batch.step
    assert step.tokens.tolist() == [43, 41, 1, 2, 3, 8, 6, 7, 8]
    assert step.positions.tolist() == [22, 20, 10, 11, 12, 5, 2, 3, 4]
    assert step.slots.tolist() == [7, 70, 30, 31, 32, 50, 80, 81, 82]
    assert step.logit_rows.tolist() == [0, 1, 5, 8]
    assert step.num_decodes == 2
    assert step.decode.rows.tolist() == [3, 1] and step.decode.kv_lens.tolist() == [23, 21]
    assert step.decode.num_splits.shape == (2,)
    assert step.prefill.rows.tolist() == [0, 2, 5] and step.prefill.kv_lens.tolist() == [13, 6, 5]
    assert step.prefill.query_start.tolist() == [0, 3, 4, 7]
    assert step.prefill.max_query_len == 3 and step.prefill.attend_cache
    assert step.prefill.cached_start.tolist() == [0, 13, 19, 24]
    assert (step.prefill.num_cached, step.prefill.max_cached_len) == (24, 13)
    written = {(3, 22): 7, (1, 20): 70, (0, 10): 30, (0, 11): 31, (0, 12): 32, (2, 5): 50}
    written |= {(5, p): s for p, s in enumerate([90, 91, 80, 81, 82])}
    expected = torch.full((7, 128), 999, dtype=torch.int32)
    for (row, position), slot in written.items():
        expected[row, position] = slot
    assert torch.equal(step.slot_table, expected)
    dtypes = (step.tokens, step.positions, step.slots, step.logit_rows, step.decode.kv_lens)
    assert [x.dtype for x in dtypes] == [torch.int64, torch.int32, torch.int32, torch.int64, torch.int32]


def test_without_attend_cache_the_cached_tokens_are_the_prefixes():
    prefill = build(mixed_plan(), table(), num_kv_heads=2, attend_cache=False).step.prefill
    assert prefill.cached_start.dtype == torch.int32 and prefill.cached_start.tolist() == [0, 10, 15, 17]
    assert (prefill.num_cached, prefill.max_cached_len) == (17, 10)


def test_sampling_of_a_mixed_step():
    t = table()
    batch = build(mixed_plan(), t, num_kv_heads=2, attend_cache=False)
    sample = batch.draws.meta
    assert sample.rows.tolist() == [3, 1, 2, 5]
    assert sample.draws.tolist() == [0, 3] and sample.filtered.tolist() == [1] and sample.max_top_k == 5
    assert sample.banned.tolist() == [[1, 1, 3], [4, 9, 1]]
    assert batch.draws.logprobs.tolist() == [0] and batch.draws.num_top == 2
    assert {name: ids.tolist() for name, ids in batch.targets.items()} == {"d": [17]}
    assert (t.top_k[5], t.seed[5]) == (5, -3) and float(t.top_p[5]) == np.float32(0.9)
    # the position of the next token: known tokens of decodes, ends of chunks
    assert t.length[[3, 1, 2, 5]].tolist() == [23, 21, 6, 5]
    t.advance(sample.rows, torch.tensor([10, 11, 12, 13]))
    assert t.length[:6].tolist() == [13, 22, 7, 24, 24, 6]
    assert t.last_token[[3, 1, 2, 5]].tolist() == [10, 11, 12, 13]


def test_decodes_alone_and_chunks_alone():
    plan = mixed_plan()
    step = build(Plan((), plan.decodes, ()), table(), num_kv_heads=2, attend_cache=False).step
    assert step.prefill is None and step.tokens.tolist() == [43, 41] and step.slots.tolist() == [7, 70]
    batch = build(Plan((), (), plan.chunks[:1]), table(), num_kv_heads=2, attend_cache=False)
    assert batch.step.decode is None and batch.step.logit_rows.tolist() == []
    assert batch.draws is None and batch.step.tokens.tolist() == [1, 2, 3]


def test_a_top_k_of_some_and_not_all_needs_the_full_sort():
    both = tuple(
        Decode(str(i), i, 22, i, Sampling(1.0, k, p, 0, None), ())
        for i, (k, p) in enumerate([(5, 1.0), (0, 0.9)])
    )
    assert build(Plan((), both, ()), table(), num_kv_heads=1, attend_cache=False).draws.meta.max_top_k == 0


def test_the_padding_row_stays_on_the_pad_slot():
    t = RequestTable(4, 70, 123, CPU)
    assert t.pad_row == 4 and (t.slot_table[t.pad_row] == 123).all()
    assert t.slot_table.stride(0) % 16 == 0 and t.slot_table.shape[1] >= 70


def test_transfer_keeps_values_shapes_and_alignment(device):
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.integers(0, 9, 5).astype(np.int32),
        "b": rng.integers(0, 9, (3, 7)).astype(np.int64),
        "c": rng.random(1).astype(np.float32),
        "d": rng.integers(0, 9, 33).astype(np.int32),
        "e": rng.integers(0, 9, (2, 2)).astype(np.int32).T,
    }
    there = to_device(arrays, device)
    base = there["a"].data_ptr()
    for name, array in arrays.items():
        assert np.array_equal(there[name].cpu().numpy(), array)
        assert there[name].dtype == torch.from_numpy(array.copy()).dtype
    assert (there["d"].data_ptr() - base) % 64 == 0 and (there["e"].data_ptr() - base) % 64 == 0
