"""A plan as tensors, of its own size or padded: every array against numbers written by hand."""

from dataclasses import replace

import numpy as np
import torch
from fake_decoder import FakeDecoder

from qrt.arch.layer import Reach
from qrt.engine.schedule.plan import (
    Adjustment,
    Admission,
    Ban,
    Chunk,
    Decode,
    Placement,
    Plan,
    SamplingRules,
    Scoring,
)
from qrt.engine.step.adjustments import Adjustments
from qrt.engine.step.batch import build
from qrt.engine.step.padded import PaddedInputs
from qrt.engine.step.sample_batch import is_plain
from qrt.engine.step.table import RequestTable
from qrt.engine.step.transfer import Fetch, to_device
from qrt.kernels.prefill_attention.tiles import Queries
from qrt.mem.storage import KVStorage
from qrt.quant.kv import KV_FORMATS

CPU = torch.device("cpu")
GREEDY = SamplingRules(0.0, 0, 1.0, 0, None)
PUNISHED = Adjustment({}, None, 1.2, 0.0, 0.0, None)


def ints(*values):
    return np.array(values, np.int32)


def table() -> RequestTable:
    """Rows whose position p has slot 100 * row + p."""
    t = RequestTable(6, 100, 999, CPU)
    t.last_token[:6] = torch.arange(6) + 40
    t.length[:6] = torch.arange(6, dtype=torch.int32) + 20
    t.slot_table[:6] = torch.arange(6)[:, None] * 100 + torch.arange(128)
    return t


def mixed_plan() -> Plan:
    """Two decodes, a chunk in the middle of a prompt, the end of one, and a whole one with cached prefix."""
    random, top = SamplingRules(0.5, 0, 1.0, 11, 2), SamplingRules(0.7, 5, 0.9, -3, None, 0.25, PUNISHED)
    return Plan(
        admitted=(Admission(5, top, ints(3, 3, 6, 7, 8)),),
        placed=(Placement(3, 22, ints(7)), Placement(5, 0, ints(90, 91, 80, 81, 82))),
        decodes=(Decode("a", 3, random), Decode("b", 1, GREEDY, (Ban(4), Ban(9, after=2)))),
        chunks=(
            Chunk("c", 0, 10, ints(1, 2, 3), False, GREEDY),
            Chunk("d", 2, 5, ints(8), True, GREEDY, (), Scoring(0, ints(17), 0)),
            Chunk("e", 5, 2, ints(6, 7, 8), True, top, (Ban(1),)),
        ),
    )


def batch_of(plan, t=None, **options):
    """What the runner does before the model."""
    t = t or table()
    adjustments = Adjustments(60, [7], CPU)
    if plan.admitted:
        t.admit(plan.admitted)
        adjustments.admit(plan.admitted)
    if plan.placed:
        t.write_slots(plan.placed)
    options = {
        "queries": Queries(2, 32),
        "num_kv_heads": 2,
        "heads_per_sm": 12,
        "reaches": (Reach(),),
        "attend_cache": False,
    } | options
    return build(plan, t, adjustments, **options)


def test_mixed_step():
    batch = batch_of(mixed_plan(), attend_cache=True)
    step = batch.step
    assert step.tokens.tolist() == [43, 41, 1, 2, 3, 8, 6, 7, 8]
    assert step.positions.tolist() == [22, 20, 10, 11, 12, 5, 2, 3, 4]
    assert step.slots.tolist() == [7, 120, 10, 11, 12, 205, 80, 81, 82]
    assert batch.samples.tokens.tolist() == [0, 1, 5, 8]
    assert step.num_decodes == 2
    assert step.decode.rows.tolist() == [3, 1] and step.decode.kv_lens.tolist() == [23, 21]
    assert step.decode.kv_splits[0][:2, :6].tolist() == [[0, 3, 0, 23, 0, 1], [1, 1, 0, 21, 0, 1]]
    assert step.prefill.rows.tolist() == [0, 2, 5] and step.prefill.attend_cache
    assert step.prefill.query_start.tolist() == [2, 5, 6, 9]
    assert step.prefill.cached_start.tolist() == [0, 13, 19, 24] and step.prefill.num_cached == 24
    assert step.prefill.tiles.tolist() == [[0, 0], [1, 0], [2, 0]]
    expected = table().slot_table
    expected[3, 22] = 7
    expected[5, :5] = torch.tensor([90, 91, 80, 81, 82])
    assert torch.equal(step.slot_table, expected) and (expected[-1] == 999).all()
    dtypes = (step.tokens, step.positions, step.slots, batch.samples.tokens, step.decode.kv_lens)
    assert [x.dtype for x in dtypes] == [torch.int64, torch.int32, torch.int32, torch.int64, torch.int32]


def test_only_prefixes_are_cached_without_attend_cache():
    prefill = batch_of(mixed_plan()).step.prefill
    assert prefill.cached_start.dtype == torch.int32 and prefill.cached_start.tolist() == [0, 10, 15, 17]
    assert prefill.num_cached == 17


def test_padded_step_equals_the_step_plus_padding():
    plan, t = replace(mixed_plan(), admitted=()), table()
    t.write_slots(plan.placed)
    kv = KVStorage([KV_FORMATS["fp16"]], 999, 1, 16, torch.float32, "cpu")
    inputs = PaddedInputs(4, 16, FakeDecoder(), kv, t, num_cached=50, attend_cache=True)
    inputs.send(plan, 16, 4)
    padded, own = inputs.chunks(16, 4, torch.zeros(16, 1, 16)), batch_of(mixed_plan(), attend_cache=True).step
    for name, pad in (("tokens", 0), ("positions", 0), ("slots", 999)):
        values = getattr(padded, name)
        assert torch.equal(values[:9], getattr(own, name)) and values[9:].tolist() == [pad] * 7
    assert padded.decode.kv_lens[:2].tolist() == [23, 21] and (padded.decode.kv_lens[2:] == -1).all()
    chunks, pad_row = padded.prefill, t.pad_row
    assert chunks.rows.tolist() == [0, 2, 5] + [pad_row] * 3
    assert chunks.query_start.tolist() == [2, 5, 6, 9, 9, 9, 9]
    assert chunks.cached_start.tolist() == [0, 13, 19, 24, 24, 24, 24] and chunks.num_cached == 50
    assert t.length[[0, 2, 5]].tolist() == [13, 6, 5], "the table knows the ends of the chunks"


def test_sampling_of_a_mixed_step():
    t = table()
    batch = batch_of(mixed_plan(), t)
    sample = batch.samples.meta
    assert sample.rows.tolist() == [3, 1, 2, 5]
    assert sample.custom_rows.tolist() == [1, 3], "what is plain is not among them"
    assert sample.filtered.tolist() == [1] and sample.max_top_k == 5
    assert sample.banned.tolist() == [[0, 0, 1], [4, 9, 1], [-1, 2, -1]]
    assert sample.adjusted.tolist() == [[1], [0]]
    assert batch.samples.logprobs.tolist() == [0] and batch.samples.num_top == 2
    assert {name: ids.tolist() for name, ids in batch.targets.items()} == {"d": [17]}
    assert (t.top_k[5], t.seed[5], t.min_p[5]) == (5, -3, 0.25) and float(t.top_p[5]) == np.float32(0.9)
    # the position of the next token: known tokens of decodes, ends of chunks
    assert t.length[[3, 1, 2, 5]].tolist() == [23, 21, 6, 5]
    t.advance(sample.rows, torch.tensor([10, 11, 12, 13]))
    assert t.length[:6].tolist() == [13, 22, 7, 24, 24, 6]
    assert t.last_token[[3, 1, 2, 5]].tolist() == [10, 11, 12, 13]


def test_decodes_alone_and_chunks_alone():
    plan = mixed_plan()
    step = batch_of(Plan((), (), plan.decodes, ())).step
    assert step.prefill is None and step.tokens.tolist() == [43, 41] and step.slots.tolist() == [322, 120]
    batch = batch_of(Plan((), (), (), plan.chunks[:1]))
    assert batch.step.decode is None and batch.samples is None
    assert batch.step.tokens.tolist() == [1, 2, 3]


def test_is_plain():
    ways = [
        (GREEDY, True),
        (SamplingRules(0.5, 0, 1.0, 1, None), True),
        (SamplingRules(0.5, 2, 1.0, 1, None), False),
    ]
    ways += [(SamplingRules(0.5, 0, 1.0, 1, 0), False), (SamplingRules(0.5, 0, 1.0, 1, None, 0.1), False)]
    ways += [
        (SamplingRules(0.0, 5, 0.5, 1, None), True),
        (SamplingRules(0.0, 0, 1.0, 0, None, 0.0, PUNISHED), False),
    ]
    for sampling, plain in ways:
        assert is_plain(Plan((), (), (Decode("a", 0, GREEDY), Decode("b", 1, sampling)), ())) is plain
    assert not is_plain(Plan((), (), (Decode("a", 0, GREEDY, (Ban(3),)),), ()))


def test_top_k_of_some_rows_needs_the_full_sort():
    both = tuple(
        Decode(str(i), i, SamplingRules(1.0, k, p, 0, None)) for i, (k, p) in enumerate([(5, 1.0), (0, 0.9)])
    )
    assert batch_of(Plan((), (), both, ())).samples.meta.max_top_k == 0


def test_each_extra_rule_makes_a_custom_row():
    ways = [SamplingRules(1.0, 5, 1.0, 0, None), GREEDY, replace(GREEDY, adjustment=PUNISHED), GREEDY]
    bans = [(), (), (), (Ban(4),)]
    decodes = tuple(Decode(str(i), i, way, ban) for i, (way, ban) in enumerate(zip(ways, bans, strict=True)))
    meta = batch_of(Plan((Admission(2, ways[2], ints(1)),), (), decodes, ())).samples.meta
    assert meta.custom_rows.tolist() == [0, 2, 3] and meta.filtered.tolist() == [0]
    assert meta.adjusted.tolist() == [[1], [0]] and meta.banned[:2].tolist() == [[2], [4]]


def test_the_padding_row_stays_on_the_pad_slot():
    t = RequestTable(4, 70, 123, CPU)
    assert t.pad_row == 4 and (t.slot_table[t.pad_row] == 123).all()
    assert t.slot_table.stride(0) % 16 == 0 and t.slot_table.shape[1] >= 70


def test_each_group_of_layers_has_a_table_of_its_own():
    t = RequestTable(4, 70, [123, 9], CPU)
    assert (t.slot_tables[0] == 123).all() and (t.slot_tables[1] == 9).all()
    t.write_slots([Placement(2, 3, ints(5, 6)), Placement(2, 4, ints(7, 8), 1)])
    assert t.slot_table[2, 2:6].tolist() == [123, 5, 6, 123]
    rows, positions = torch.tensor([2, 2, 4]), torch.tensor([4, 5, 0])
    (window,) = t.windows(rows, positions)
    assert t.slots(rows, positions).tolist() == [6, 123, 123] and window.slots.tolist() == [7, 8, 9]
    assert window.slot_table.data_ptr() == t.slot_tables[1].data_ptr() and t.slot_tables[1, 2, 3] == 9


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


def test_fetched_tensors_keep_their_values_at_fetch_time(device):
    fetch, source = Fetch(device), torch.arange(1000, device=device)
    first = fetch.take(source * 2)
    fetch.sent()
    fetch.wait()
    assert first.device.type == "cpu" and first.tolist() == list(range(0, 2000, 2))
