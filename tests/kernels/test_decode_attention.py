"""decode_attention against fp64 attention on what the cache holds, and against exact attention."""

import heapq
from dataclasses import replace

import pytest
import torch
from attention_truth import (
    DTYPES,
    WITH_KERNELS,
    Cache,
    attend,
    bound,
    cache,
    error,
    far_slot,
    from_basis,
    queries,
)
from operators import check_operator
from torch.nn import functional as F

from backends import COMPILED, GPU
from cases import one_in
from qrt.kernels.decode_attention import decode_attention, kernel, plan, ref
from qrt.kernels.decode_attention.blocks import measured_block
from qrt.kernels.decode_attention.plan import cut, max_cuts, max_parts, plan_kv_splits
from qrt.kernels.kv_write import kernel as kv_write_kernel
from qrt.kernels.kv_write.kernel import kv_write
from qrt.quant.kv import KV_FORMATS

BOTH = pytest.mark.parametrize("attention", [ref.decode_attention, kernel.decode_attention],
                               ids=["ref", "triton"])  # fmt: skip
FORMATS = pytest.mark.parametrize("name", KV_FORMATS)
PROGRAMS = 12  # an SM; fewer run at once where a program takes more registers
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def run(attention, q, held: Cache, splits: int | list[int] = 1):
    """Each request cut into so many parts, whatever their length; more entries than there are parts."""
    splits = torch.tensor(splits, device=q.device).expand(len(q))
    lengths = -(-held.kv_lens // splits)
    kv_splits = cut(held.rows, held.kv_lens, lengths, int(splits.sum()) + 2)
    return run_parts(attention, q, held, kv_splits)


def run_parts(attention, q, held: Cache, kv_splits, newest=True):
    scale = q.shape[-1] ** -0.5
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    attention(
        q, held.buffers, held.slot_table, held.rows, held.kv_lens, kv_splits, out, held.name, scale, newest
    )
    return out


def truth(q, held: Cache, attend=attend) -> torch.Tensor:
    """From the cache's own K and V, in fp64 unless `attend` does otherwise."""
    return torch.cat([
        from_basis(held.name, attend(q[i : i + 1], *held.decoded(i), q.shape[-1] ** -0.5))
        for i in range(len(q))
    ])  # fmt: skip


@pytest.mark.pairs
@pytest.mark.ptx(dtype=[torch.bfloat16], attention=[kernel.decode_attention])
@BOTH
@FORMATS
@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_around_a_tile(device, attention, name, dtype):
    tile = kernel.block_of(measured_block(KV_FORMATS[name], 5, 4, 2), 64, dtype).tokens
    lens = [1, tile - 1, tile, tile + 1, 3 * tile + 5]
    held, q = cache(name, lens, 2, 64, dtype, device), queries(5, 4, 64, dtype, device, name)
    out = run(attention, q, held, [1, 2, 1, 2, 3])
    assert out.dtype == dtype and out.is_contiguous()
    assert error(out, truth(q, held)) < bound(name, dtype)


@pytest.mark.ptx
@FORMATS
@pytest.mark.parametrize("requests", [1, 5])
def test_right_after_its_last_token_is_written(device, name, requests):
    """What is loaded before kv_write is done must be older than what that one writes."""
    dtype = torch.bfloat16 if COMPILED else torch.float16
    tile = kernel.block_of(measured_block(KV_FORMATS[name], requests, 4, 2), 64, dtype).tokens
    held = cache(name, [n * tile + 1 for n in range(5)][-requests:], 2, 64, dtype, device)
    fused = torch.randn(requests, 8 * 64, generator=torch.Generator().manual_seed(requests))
    q, k, v = fused.to(device, dtype).unflatten(1, (8, 64)).split((4, 2, 2), 1)
    angles = torch.full((1, 32), 0.6, device=device)
    slots = held.slot_table[held.rows, held.kv_lens - 1]
    kv_write(q, k, v, angles.cos(), angles.sin(), torch.zeros_like(slots), slots, held.buffers, None, name)
    assert error(run(kernel.decode_attention, q, held), truth(q, held)) < bound(name, dtype)


@pytest.mark.ptx
@pytest.mark.parametrize("name, cached, count", [("fp16", 0, 72), ("int8", 125, 6), ("k8v4", 250, 8)])
def test_several_newest_tokens_of_one_request(device, monkeypatch, name, cached, count):
    """As a short chunk runs: each of its tokens attends on its own, those of the chunk before it too, which
    a kernel that still runs writes."""
    monkeypatch.setattr(kv_write_kernel, "multiprocessors", lambda device: 132)
    dtype = torch.bfloat16 if COMPILED else torch.float16
    held = cache(name, [cached + count], 2, 64, dtype, device)
    held = replace(
        held,
        rows=held.rows.repeat(count),
        kv_lens=torch.arange(cached + 1, cached + count + 1, dtype=torch.int32, device=device),
    )
    fused = torch.randn(count, 8 * 64, generator=torch.Generator().manual_seed(count))
    q, k, v = fused.to(device, dtype).unflatten(1, (8, 64)).split((4, 2, 2), 1)
    still = torch.zeros(cached + count, 32, device=device)
    positions = held.kv_lens - 1
    slots = held.slot_table[held.rows.long(), positions.long()]
    kv_write(q, k, v, still.cos(), still.sin(), positions, slots, held.buffers, None, name)
    block = kernel.block_of(measured_block(KV_FORMATS[name], count, 4, 2), 64, dtype)
    kv_splits = plan_kv_splits(held.rows, held.kv_lens, 2, block.heads_per_sm)
    got = run_parts(kernel.decode_attention, q, held, kv_splits, newest=False)
    whole = replace(held, rows=held.rows[:1], kv_lens=held.kv_lens[-1:])
    want = from_basis(name, attend(q, *whole.decoded(0), 64**-0.5))
    assert error(got, want) < bound(name, dtype)


@pytest.mark.pairs
@pytest.mark.parametrize("name, heads", one_in(2, KV_FORMATS, [
    (3, 1, 80), (16, 1, 64), (7, 7, 96), (14, 2, 128), (4, 2, 256),
    (6, 2, 80), (4, 4, 64), (16, 4, 96), (4, 2, 128),  # where KV heads may be attended in pairs
]))  # fmt: skip
def test_heads_and_head_dims(device, name, heads):
    Hq, Hkv, D = heads
    held = cache(name, [40, 7], Hkv, D, torch.float16, device)
    q = queries(2, Hq, D, torch.float16, device, name)
    for attention in (ref.decode_attention, kernel.decode_attention):
        assert error(run(attention, q, held, 2), truth(q, held)) < bound(name, torch.float16)


@pytest.mark.parametrize("group", range(1, 17))
def test_query_heads_of_a_kv_head(device, group):
    """GQA 1 to 16, of which a dot has rows to spare, or takes those of two KV heads."""
    for name in WITH_KERNELS if GPU else [WITH_KERNELS[group % len(WITH_KERNELS)]]:
        for Hkv in (1, 2):
            q = queries(2, group * Hkv, 64, torch.float16, device, name)
            held = cache(name, [70, 5], Hkv, 64, torch.float16, device)
            got = run(kernel.decode_attention, q, held, 2)
            assert error(got, truth(q, held)) < bound(name, torch.float16)


GROUPS = {8: 7, 16: 9, 32: 17}  # query heads of a KV head, by the columns that they take
BLOCKS = sorted({
    (name, columns, heads, measured_block(KV_FORMATS[name], requests, heads * group, heads))
    for name in WITH_KERNELS
    for columns, group in GROUPS.items()
    for requests in (1, 2, 4, 17, 33, 48, 128, 192)
    for heads in (1, 2)
})  # fmt: skip
ALONE = {(name, columns, block) for name, columns, heads, block in BLOCKS if heads == 1}
BLOCKS = [each for each in BLOCKS if each[2] == 1 or (each[0], each[1], each[3]) not in ALONE]


@pytest.mark.ptx
@pytest.mark.parametrize("name, columns, heads, block", BLOCKS)
def test_every_block_with_all_its_columns(device, monkeypatch, name, columns, heads, block):
    """Whatever number of requests it is for; also where query heads leave columns empty."""
    monkeypatch.setattr(kernel, "block_of", lambda *_: block)
    group, dtype = GROUPS[columns], torch.bfloat16 if COMPILED else torch.float16
    held = cache(name, [block.tokens + 6, 3], heads, 64, dtype, device)
    q = queries(2, heads * group, 64, dtype, device, name)
    assert error(run(kernel.decode_attention, q, held), truth(q, held)) < bound(name, dtype)


def test_no_block_multiplies_by_warp_groups():
    """ptxas 12.8 computes where their operands are from registers that hold something else."""
    for name, columns, _, block in BLOCKS:
        assert columns == 8 or block.warps < 4 and block.tokens <= 64, (name, columns, block)
    assert any(block.warps == 4 for *_, block in BLOCKS)


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("group", [1, 3, 4, 5, 8, 9, 12, 16])
@pytest.mark.parametrize("requests", [1, 2, 4, 16, 17, 33, 48, 128, 192])
def test_measured_block_of_every_group(device, name, group, requests):
    """A compiler may fail at a block that others run; odd numbers of KV heads are not attended in pairs."""
    for Hkv in (1, 2):
        lens = [300 - i for i in range(requests)]
        held = cache(name, lens, Hkv, 128, torch.bfloat16, device)
        q = queries(requests, group * Hkv, 128, torch.bfloat16, device, name)
        heads = measured_block(KV_FORMATS[name], requests, group * Hkv, Hkv).heads_per_sm
        kv_splits = plan_kv_splits(held.rows, held.kv_lens, Hkv, heads)
        got = run_parts(kernel.decode_attention, q, held, kv_splits)
        assert error(got, truth(q, held)) < bound(name, torch.bfloat16)


def test_which_heads_go_in_pairs():
    """int4's where two share the columns of a dot, of many requests, and not an odd number of them."""
    shapes = ((32, 8), (16, 16), (12, 4), (64, 8), (32, 2), (12, 3))
    for requests, wanted in {1: [1] * 6, 2: [2, 2, 2, 2, 1, 1], 256: [2, 2, 2, 1, 1, 1]}.items():
        assert [measured_block(KV_FORMATS["int4"], requests, *heads).heads for heads in shapes] == wanted


@FORMATS
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_no_worse_than_torch_in_16_bits(device, name, dtype):
    """torch attends K and V dequantized to the dtype; ours may lose a tenth more, and loses less on a CPU."""

    def attend_16(q, k, v, scale):
        heads = (x.to(dtype).transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(*heads, scale=scale, enable_gqa=True)[0].transpose(0, 1)

    held, q = cache(name, [300, 90], 2, 128, dtype, device), queries(2, 8, 128, dtype, device, name)
    exact = truth(q, held)
    lost = (run(kernel.decode_attention, q, held, 2).double() - exact).norm()
    assert lost <= 1.1 * (truth(q, held, attend_16).to(dtype).double() - exact).norm()


@FORMATS
def test_splits_do_not_change_the_result(device, name):
    """Also more of them than one program merges, than a group of groups, and parts of single tokens."""
    held = cache(name, [4 * 32, 3], 1, 64, torch.float32, device)
    q = queries(2, 2, 64, torch.float32, device, name)
    whole = run(kernel.decode_attention, q, held)
    most = [[plan.CUTS[1], 1]] if GPU or name == "fp16" else []  # merged alike, and long in the interpreter
    for splits in (3, kernel.FAN_IN + 1, *most):
        out = run(kernel.decode_attention, q, held, splits)
        torch.testing.assert_close(out, whole, atol=1e-3, rtol=0)
        if device.type == "cuda":  # whoever arrives last; the interpreter runs them in order
            assert torch.equal(run(kernel.decode_attention, q, held, splits), out)


@pytest.mark.parametrize("tokens", [1, 80, 200])
def test_the_reference_decodes_some_requests_at_a_time(device, tokens, monkeypatch):
    monkeypatch.setattr(ref, "GATHER_TOKENS", tokens)
    held = cache("int8", [40, 3, 25, 1, 33], 2, 64, torch.float32, device)
    q = queries(5, 4, 64, torch.float32, device, "int8")
    assert error(run(ref.decode_attention, q, held), truth(q, held)) < bound("int8", torch.float32)


@BOTH
@FORMATS
def test_where_the_slots_are_does_not_matter(device, attention, name):
    q = queries(2, 2, 64, torch.float16, device, name)
    here = cache(name, [70, 9], 2, 64, torch.float16, device)
    there = cache(name, [70, 9], 2, 64, torch.float16, device, seed=1)
    assert not torch.equal(here.slot_table, there.slot_table)
    assert torch.equal(run(attention, q, here, 2), run(attention, q, there, 2))


@BOTH
@FORMATS
def test_padding_rows_are_zero_and_read_nothing(device, attention, name):
    held, q = (
        cache(name, [33, 5, 8], 1, 64, torch.float32, device),
        queries(3, 1, 64, torch.float32, device, name),
    )
    full = run(attention, q, held)
    held.kv_lens[1] = 0
    held.slot_table[held.rows[1]] = 2**30
    q[1] = torch.nan
    out = run(attention, q, held)
    assert not out[1].any()
    torch.testing.assert_close(out[[0, 2]], full[[0, 2]], atol=1e-6, rtol=0)
    held.kv_lens[:] = 0
    assert not run(attention, q, held).any()


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("v_scale", [1e-4, 1e4])
@FORMATS
def test_small_and_large_v_survive(device, attention, name, v_scale, dtype):
    held = cache(name, [100], 1, 64, dtype, device, v_scale=v_scale)
    q = queries(1, 2, 64, dtype, device, name)
    assert error(run(attention, q, held, 2), truth(q, held)) < bound(name, dtype)


@FORMATS
def test_one_token_with_a_huge_v_does_not_drown_the_rest(device, name):
    """V of very different sizes in one tile: what the fp16 dot multiplies must not underflow."""
    held = cache(name, [64], 1, 64, torch.float32, device)
    held.k[0][5] = 0  # of no weight to speak of
    held.v[0][5] = 1e4
    q = 8 * held.k[0][-1:].repeat(1, 2, 1) / held.k[0][-1:].norm() ** 2 * 64**0.5
    KV_FORMATS[name].encode_ref(held.k[0], held.v[0], held.buffers, held.slot_table[held.rows[0], :64].long())
    assert error(run(kernel.decode_attention, q, held), truth(q, held)) < bound(name, torch.float32)


@BOTH
@FORMATS
def test_against_exact_attention(device, attention, name):
    """What the format itself costs: K and V before they were stored; the narrower of them decides."""
    held = cache(name, [300], 1, 128, torch.float32, device)
    q = queries(1, 8, 128, torch.float32, device, name)
    exact = from_basis(name, attend(q, held.k[0], held.v[0], 128**-0.5))
    got = run(attention, q, held, 2).double()
    assert (got - exact).norm() / exact.norm() < 3 / 2 ** min(KV_FORMATS[name].widths)


def done_after(lengths, heads, slots):
    """Tokens' time until parts of these lengths are attended, each by the first free of `slots` programs."""
    free = [0.0] * slots
    for length in lengths:
        for _ in range(heads):
            heapq.heapreplace(free, free[0] + length + plan.STARTUP)
    return max(free)


def cut_evenly(lens, cuts):
    """Lengths of the parts if the longest request were cut into so many, the others alike."""
    most = max(-(-max(lens) // cuts), 1)
    return [min(most, n - start) for n in lens for start in range(0, max(n, 1), most)]


def test_plan_fills_the_gpu_and_stays_within_the_grid(device, monkeypatch):
    monkeypatch.setattr(plan, "multiprocessors", lambda device: 132)
    slots = 132 * PROGRAMS
    for lens in ([1], [4096], [32768], [131072] + [100] * 63, [4096] * 64, [0, 0, 5], [1024] * 256,
                 [32768] * 16, list(range(64, 4160, 64)), [150] * 512):  # fmt: skip
        room = max_parts(len(lens), 8, PROGRAMS, device)
        kv_lens = torch.tensor(lens, dtype=torch.int32, device=device)
        kv_splits = plan_kv_splits(torch.arange(len(lens), device=device).int(), kv_lens, 8, PROGRAMS)
        assert (
            kv_splits.dtype == torch.int32 and kv_splits.device.type == device.type and len(kv_splits) == room
        )
        assert_covers(kv_splits, lens)
        some = [cut_evenly(lens, cuts) for cuts in (1, 2, 3, 4, 8, 16, 64) if cuts <= max_cuts(len(lens))]
        best = min(done_after(lengths, 8, slots) for lengths in some if len(lengths) <= room)
        taken = done_after([e - s for r, _, s, e, *_ in kv_splits.tolist() if r >= 0], 8, slots)
        assert taken <= max(1.1 * best, plan.MIN_PART + plan.UNIT)
    one = torch.zeros(1, dtype=torch.int32, device=device)
    assert int(plan_kv_splits(one, one + 32768, 8, PROGRAMS)[0, 5]) >= 100
    assert int(plan_kv_splits(one, one + 100, 8, PROGRAMS)[0, 5]) == 1
    assert (plan_kv_splits(one[:0], one[:0], 8, PROGRAMS)[:, 0] == -1).all()


@pytest.mark.parametrize("requests", [1, 64, 65, 128, 129, 300, 1024, 1025, 5000])
def test_cuts_are_as_many_as_one_program_weighs(requests):
    """A power of two of requests times cuts: 8192 at most, but never fewer than 8 cuts, or more than 128."""
    tile = next(2**i for i in range(20) if 2**i >= requests)
    assert max_cuts(requests) == min(128, max(8, 8192 // tile))


def assert_covers(kv_splits, lens):
    """Every token of every request is in one part, in order; what follows the parts is empty."""
    live = [part for part in kv_splits.tolist() if part[0] >= 0]
    want = [(request, n) for request, n in enumerate(lens)]
    at = 0
    for request, n in want:
        end, count = 0, live[at][5]
        for index in range(count):
            assert live[at][:3] == [request, request, end] and live[at][4:6] == [index, count]
            end = live[at][3]
            at += 1
        assert end == n
    assert at == len(live) and not (kv_splits[at:, 0] >= 0).any()


def test_operator(device):
    held, q = (
        cache("int4", [20, 3], 1, 64, torch.float32, device),
        queries(2, 2, 64, torch.float32, device, "int4"),
    )
    args = (
        q,
        held.buffers,
        held.slot_table,
        held.rows,
        held.kv_lens,
        plan_kv_splits(held.rows, held.kv_lens, 1, PROGRAMS),
        torch.empty_like(q),
        "int4",
        0.125,
        True,
    )
    decode_attention(*args)
    assert error(args[6], truth(q, held)) < bound("int4", torch.float32)
    check_operator("decode_attention", args)


@BOTH
def test_a_query_of_no_decode_is_left_alone(device, attention):
    """One that a recorded step has among those that may decode; a request without tokens gets zeros."""
    held, q = (
        cache("int8", [90, 40, 7], 2, 64, torch.float16, device),
        queries(3, 4, 64, torch.float16, device, "int8"),
    )
    for lens in ([90, -1, 0], [-1, -1, 7], [-1, -1, -1]):
        held.kv_lens.copy_(torch.tensor(lens))
        kv_splits = plan_kv_splits(held.rows, held.kv_lens, 2, PROGRAMS)
        assert int((kv_splits[:, 0] >= 0).sum()) == sum(n >= 0 for n in lens)
        out = torch.full_like(q, 5.0)
        attention(
            q, held.buffers, held.slot_table, held.rows, held.kv_lens, kv_splits, out, "int8", 0.125, True
        )
        for n, row in zip(lens, out, strict=True):
            assert (row == 5.0).all() if n < 0 else not row.any() if n == 0 else (row != 5.0).any()


def plain(name, lens, Hkv, D, dtype, device, extra=0) -> Cache:
    """Random bits in consecutive slots, from slot `extra` on: big caches, quickly."""
    total = sum(lens)
    buffers = [spec.zeros(device) for spec in KV_FORMATS[name].buffers(total + extra, Hkv, D, dtype).values()]
    for buffer in buffers:
        for part in buffer.view(-1).split(1 << 28):
            if not buffer.is_floating_point():
                part.random_(-(2**15), 2**15)
            else:
                part.normal_() if name == "fp16" else part.uniform_(0.005, 0.025)
    ends = torch.tensor(lens).cumsum(0).tolist()
    table = torch.zeros(len(lens), max(lens), dtype=torch.int32, device=device)
    for row, (end, n) in enumerate(zip(ends, lens, strict=True)):
        table[row, :n] = torch.arange(end - n, end) + extra
    rows = torch.arange(len(lens), dtype=torch.int32, device=device)
    return Cache(name, buffers, table, rows, torch.tensor(lens, dtype=torch.int32, device=device), [], [])


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("lens,Hq,Hkv,D", [
    pytest.param([4096] * 64, 32, 8, 128, marks=pytest.mark.alone),
    pytest.param([131072], 32, 8, 128, marks=pytest.mark.alone),
    pytest.param([131072] + [17] * 30, 8, 2, 128, marks=pytest.mark.alone),
    ([1000, 31, 64, 65, 0, 4095], 28, 4, 128), ([3000] * 7, 16, 16, 64), ([2048] * 5, 16, 2, 256),
    ([777] * 9, 20, 20, 80), ([778] * 9, 12, 4, 96), ([17, 300, 1000] * 70, 32, 8, 128),
])  # fmt: skip
def test_sizes_of_users(device, name, lens, Hq, Hkv, D):
    dtype = torch.bfloat16
    held, q = plain(name, lens, Hkv, D, dtype, device), queries(len(lens), Hq, D, dtype, device, name)
    kv_splits = plan_kv_splits(held.rows, held.kv_lens, Hkv, PROGRAMS)
    out = run_parts(kernel.decode_attention, q, held, kv_splits)
    assert out.isfinite().all()
    some = [i for i, n in enumerate(lens) if n][:4]
    want = torch.cat([
        from_basis(name, attend(q[i : i + 1], *held.decoded(i), D**-0.5)) for i in some
    ])  # fmt: skip
    assert error(out[some], want) < bound(name, dtype)
    assert not out[[i for i, n in enumerate(lens) if not n]].any()


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.slow
@FORMATS
def test_pool_beyond_2_to_the_31_elements(device, name):
    extra = far_slot(name, 8, 128) + 100_000
    held = plain(name, [1000], 8, 128, torch.float16, device, extra)
    assert held.buffers[0].numel() > 2**31
    q = queries(1, 32, 128, torch.float16, device, name)
    out = run(kernel.decode_attention, q, held, 4)
    assert error(out, truth(q, held)) < bound(name, torch.float16)
    buffers = [x.narrow(0, extra, 1000).clone() for x in held.buffers]
    near = replace(held, buffers=buffers, slot_table=held.slot_table - extra)
    assert torch.equal(run(kernel.decode_attention, q, near, 4), out)


@pytest.mark.gpu
@FORMATS
def test_a_captured_graph_serves_other_lengths(device, name):
    held = plain(name, [5000, 5000], 2, 128, torch.bfloat16, device)
    q = queries(2, 8, 128, torch.bfloat16, device, name)
    kv_splits = plan_kv_splits(held.rows, held.kv_lens, 2, PROGRAMS)
    out = torch.empty_like(q)
    args = (q, held.buffers, held.slot_table, held.rows, held.kv_lens, kv_splits, out, name, 128**-0.5, True)
    decode_attention(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_attention(*args)
    for lens in ([5000, 1], [0, 63], [257, 4096]):
        held.kv_lens.copy_(torch.tensor(lens))
        kv_splits.copy_(plan_kv_splits(held.rows, held.kv_lens, 2, PROGRAMS))
        graph.replay()
        replayed = out.clone()
        decode_attention(*args)
        assert torch.equal(replayed, out)
