"""Windows, segments, caps, ALiBi and sinks in the attention kernels, against their definitions in fp64."""

import pytest
import torch
from attention_truth import attend, bound, cache, chunks, error, from_basis, queries, to_basis

from backends import COMPILED
from qrt.kernels.decode_attention import kernel as decode
from qrt.kernels.decode_attention import ref as decode_ref
from qrt.kernels.decode_attention.plan import plan_kv_splits
from qrt.kernels.prefill_attention import kernel as prefill
from qrt.kernels.prefill_attention import ref as prefill_ref
from qrt.quant.kv import KV_FORMATS

DTYPE = torch.bfloat16 if COMPILED else torch.float16
APPENDS = [name for name in KV_FORMATS if KV_FORMATS[name].appends]
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.03125])
SINKS = torch.tensor([1.5, -3.0, 200.0, 0.0])  # 2^(200 * 1.44) is beyond fp32
RULES = {
    "itself": (1, 0, False, False, 0),
    "window": (17, 0, False, False, 0),
    "window-cap": (64, 3.0, False, False, 0),
    "window-alibi": (129, 0, True, False, 0),
    "cap": (0, 2.5, False, False, 0),
    "alibi": (0, 0, True, False, 0),
    "sinks": (0, 0, False, True, 0),
    "window-sinks": (128, 0, False, True, 0),
    "all": (500, 4.0, True, True, 0),
    "segments-of-one": (0, 0, False, False, 1),
    "segments": (0, 0, False, False, 16),
    "segments-cap-sinks": (0, 2.5, False, True, 50),
    "segments-of-tiles": (0, 0, False, False, 128),
}
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def by_rule(names, first, *others):
    """Parametrize a test by these names and a rule.

    Each rule comes with the values `first` and with those of one of the others; the rest is exhaustive.
    """
    cases = []
    for number, (title, rule) in enumerate(RULES.items()):
        for values in (first, *others):
            some = values in (first, others[number % len(others)])
            marks = [] if some else [pytest.mark.exhaustive]
            cases.append(
                pytest.param(*values, *rule, id=f"{'-'.join(map(str, values))}-{title}", marks=marks)
            )
    return pytest.mark.parametrize(f"{names}, window, softcap, alibi, sinks, segment", cases)


def rule_of(window, softcap, alibi, sinks, segment, device):
    slopes, sinks = SLOPES.to(device) if alibi else None, SINKS.to(device) if sinks else None
    return window, float(softcap), slopes, sinks, segment


@pytest.mark.ptx(name=["int8"], window=[64, 128, 500], attention=[decode])
@pytest.mark.ptx(name=["int8"], segment=[50], attention=[decode])
@by_rule("name", ("int8",), *((name,) for name in KV_FORMATS if name != "int8"))
@pytest.mark.parametrize("attention", [decode_ref, decode], ids=["ref", "triton"])
def test_decode(device, attention, name, window, softcap, alibi, sinks, segment):
    lens = [1, 16, 130, 333]
    held, q = cache(name, lens, 2, 64, DTYPE, device), queries(4, 4, 64, DTYPE, device, name)
    rule = rule_of(window, softcap, alibi, sinks, segment, device)
    kv_splits = plan_kv_splits(held.rows, held.kv_lens, 2, 8, window, segment)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    where = held.slot_table, held.rows, held.kv_lens, kv_splits, out
    attention.decode_attention(q, held.buffers, *where, name, 0.4, True, *rule)
    want = [from_basis(name, attend(q[i : i + 1], *held.decoded(i), 0.4, *rule)) for i in range(len(lens))]
    assert error(out, torch.cat(want)) < bound(name, DTYPE)


@by_rule("name", ("int8",), *((name,) for name in APPENDS if name != "int8"))
def test_append(device, name, window, softcap, alibi, sinks, segment):
    """Each request's newest token is stored and attended with the others."""
    lens = [2, 60, 200]
    held = cache(name, lens, 2, 64, DTYPE, device)
    q, k, v = torch.randn(3, 3, 4, 64, generator=torch.Generator().manual_seed(1)).to(device, DTYPE)
    k, v = k[:, :2], v[:, :2]
    still = torch.zeros(max(lens), 32, device=device)
    rule = rule_of(window, softcap, alibi, sinks, segment, device)
    kv_splits = plan_kv_splits(held.rows, held.kv_lens, 2, 8, window, segment)
    out = torch.empty(3, 4, 64, dtype=DTYPE, device=device)
    where = held.slot_table, held.rows, held.kv_lens, kv_splits
    decode.append_attention(
        q, k, v, still.cos(), still.sin(), held.buffers, None, *where, [out], name, 0.4, *rule[:4], None,
        segment,
    )  # fmt: skip
    turned = to_basis(name, q)
    want = [from_basis(name, attend(turned[i : i + 1], *held.decoded(i), 0.4, *rule)) for i in range(3)]
    assert error(out, torch.cat(want)) < max(1.5 * bound(name, DTYPE), 4e-3)  # a turned query is rounded


@pytest.mark.ptx(name=["int8"], window=[64, 128, 500], attention=[prefill], attend_cache=[False])
@pytest.mark.ptx(name=["int8"], segment=[50, 128], attention=[prefill], attend_cache=[False])
@by_rule(
    "name, attend_cache", ("int8", False), ("fp16", True), ("int4", True), ("fp16", False), ("int4", False),
    ("int8", True),
)  # fmt: skip
@pytest.mark.parametrize("attention", [prefill_ref, prefill], ids=["ref", "triton"])
def test_prefill(device, attention, name, attend_cache, window, softcap, alibi, sinks, segment):
    """No prefix, a prefix within and beyond the window, chunks shorter and longer than it."""
    case = chunks(name, [90, 275, 64, 1], [90, 45, 1, 1], 4, 2, 64, DTYPE, device)
    rule = rule_of(window, softcap, alibi, sinks, segment, device)
    got = case.run(attention.prefill_attention, attend_cache, rule)
    want = case.truth(attend_cache, lambda q, k, v, scale: attend(q, k, v, scale, *rule))
    assert error(got, want) < bound(name, DTYPE)


@pytest.mark.parametrize(
    "window, segment", [(1, 0), (63, 0), (64, 0), (1000, 0), (0, 1), (0, 64), (0, 700), (0, 9999)]
)
def test_parts_cover_what_is_attended(device, window, segment):
    """The parts of a request hold its last tokens, each once and in order."""
    lens = torch.tensor([1, 64, 700, 5000, 0, -1], dtype=torch.int32, device=device)
    kv_splits = plan_kv_splits(torch.arange(6, device=device).int(), lens, 2, 8, window, segment)
    for request, length in enumerate(lens.tolist()):
        own = kv_splits[kv_splits[:, 0] == request][:, 2:4].tolist()
        seen = [token for start, end in own for token in range(start, end)]
        first = (length - 1) // segment * segment if segment else length - window
        assert seen == list(range(max(first, 0), max(length, 0)))
