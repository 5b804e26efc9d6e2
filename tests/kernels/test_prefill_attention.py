"""prefill_attention against fp64 attention over the cached prefix and the chunk's own K and V."""

from dataclasses import replace

import pytest
import torch
from attention_truth import (
    DTYPES,
    WITH_KERNELS,
    Chunks,
    attend,
    bound,
    cache,
    chunks,
    error,
    far_slot,
    from_basis,
)
from operators import check_operator
from torch.nn import functional as F

from backends import GPU
from qrt.kernels.prefill_attention import kernel, prefill_attention, ref
from qrt.kernels.prefill_attention.tiles import FIELDS, NONE, Queries, plan_tiles, tile_rows
from qrt.quant.kv import KV_FORMATS

BOTH = pytest.mark.parametrize("attention", [ref.prefill_attention, kernel.prefill_attention],
                               ids=["ref", "triton"])  # fmt: skip
FORMATS = pytest.mark.parametrize("name", KV_FORMATS)
CACHED = pytest.mark.parametrize("attend_cache", [False, True], ids=["raw", "cached"])
pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.pairs
@pytest.mark.ptx(dtype=[torch.bfloat16], attention=[kernel.prefill_attention], attend_cache=[False])
@BOTH
@CACHED
@FORMATS
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefixes_and_chunks_of_all_kinds(device, attention, attend_cache, name, dtype):
    """No prefix, a prefix, one token of many, one token alone; ends on and off the tiles."""
    case = chunks(name, [37, 75, 64, 1], [37, 11, 1, 1], 4, 2, 64, dtype, device)
    out = case.run(attention, attend_cache)
    assert out.dtype == dtype and out.is_contiguous()
    assert error(out, case.truth(attend_cache)) < bound(name, dtype)


@FORMATS
@pytest.mark.parametrize("Hq,Hkv,D", [(3, 1, 80), (16, 1, 64), (2, 2, 96), (7, 1, 128), (2, 1, 256)])
def test_heads_and_head_dims(device, name, Hq, Hkv, D):
    case = chunks(name, [45], [20], Hq, Hkv, D, torch.float16, device)
    for attention in (ref.prefill_attention, kernel.prefill_attention):
        assert error(case.run(attention), case.truth()) < bound(name, torch.float16)


@pytest.mark.parametrize("group", range(1, 17))
def test_query_heads_of_a_kv_head(device, group):
    """GQA 1 to 16: a tile's rows are (token, query head), and most groups do not divide it."""
    for name in WITH_KERNELS if GPU else [WITH_KERNELS[group % len(WITH_KERNELS)]]:
        case = chunks(name, [41], [29], group, 1, 64, torch.float16, device)
        assert error(case.run(kernel.prefill_attention), case.truth()) < bound(name, torch.float16)


@FORMATS
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_no_worse_than_torch_in_16_bits(device, name, dtype):
    """torch attends K and V dequantized to the dtype; ours may lose a tenth more, and loses less on a CPU."""

    def attend_16(q, k, v, scale):
        seen = torch.ones(len(q), len(k), dtype=torch.bool, device=device).tril(len(k) - len(q))
        heads = (x.to(dtype).transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)

    case = chunks(name, [150], [60], 4, 2, 128, dtype, device)
    exact = case.truth()
    lost = (case.run(kernel.prefill_attention).double() - exact).norm()
    assert lost <= 1.1 * (case.truth(attend=attend_16).to(dtype).double() - exact).norm()


@CACHED
@FORMATS
def test_a_chunk_of_several_tiles(device, attend_cache, name):
    case = chunks(name, [300], [170], 2, 1, 64, torch.float16, device)
    assert error(case.run(kernel.prefill_attention, attend_cache), case.truth(attend_cache)) < bound(
        name, torch.float16
    )


@CACHED
@FORMATS
def test_chunks_with_no_and_with_many_cached_tokens(device, attend_cache, name):
    """In one call: tiles of the cache and of the chunk that no mask is needed for, and none at all."""
    case = chunks(name, [150, 20, 420, 9], [150, 5, 130, 9], 2, 2, 64, torch.float16, device)
    assert error(case.run(kernel.prefill_attention, attend_cache), case.truth(attend_cache)) < bound(
        name, torch.float16
    )


@FORMATS
@pytest.mark.parametrize("around", [-1, 0, 1])
def test_chunks_around_the_tile(device, name, around):
    """Chunk and prefix end on, before and after a tile of keys, the chunk a tile of rows too."""
    tile = kernel.TILINGS[2, True]
    own, prefix = tile_rows(2, 64) // 2 + around, tile.tokens + around
    case = chunks(name, [own + prefix, tile.tokens + around], [own, tile.tokens + around], 2, 1, 64,
                  torch.float16, device)  # fmt: skip
    assert error(case.run(kernel.prefill_attention), case.truth()) < bound(name, torch.float16)


@pytest.mark.pairs
@FORMATS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [64, 80, 128])
def test_what_is_gathered_is_what_the_format_decodes(device, name, dtype, D):
    """To the bit, rounded to the dtype; packed, and no token of another request or slot."""
    held = cache(name, [70, 3, 64], 2, D, dtype, device)
    cached = [65, 0, 64]
    starts = torch.tensor([0, 65, 65, 129], dtype=torch.int32, device=device)
    k, v = torch.empty(2, 129, 2, D, dtype=dtype, device=device)
    kernel.gather(held.buffers, held.slot_table, held.rows, starts, KV_FORMATS[name], k, v)
    wanted = zip(*(held.decoded(i) for i in range(3)), strict=True)
    for got, want in zip((k, v), wanted, strict=True):
        assert torch.equal(got, torch.cat([x[:n] for x, n in zip(want, cached, strict=True)]).to(dtype))


def test_the_reference_takes_its_queries_in_blocks(device, monkeypatch):
    case = chunks("int8", [50], [40], 4, 2, 64, torch.float32, device)
    whole = case.run(ref.prefill_attention)
    monkeypatch.setattr(ref, "QUERIES", 7)
    torch.testing.assert_close(case.run(ref.prefill_attention), whole, atol=1e-6, rtol=0)


@BOTH
@FORMATS
def test_chunked_is_whole_when_the_cache_is_attended(device, attention, name):
    held = cache(name, [60], 2, 64, torch.float32, device)
    whole = Chunks(held, [60], 4)
    out = whole.run(attention, True)
    for n in (13, 44):
        part = Chunks(held, [60 - n], 4)
        part.q = whole.q[n:]
        assert error(part.run(attention, True), out[n:].double()) < bound(name, torch.float32)


@BOTH
@FORMATS
def test_a_chunk_is_attended_raw(device, attention, name):
    """Without a prefix the cache is not read at all."""
    case = chunks(name, [40], [40], 2, 1, 64, torch.float32, device)
    case.held.slot_table.fill_(2**30)
    exact = from_basis(name, attend(case.q, case.k, case.v, case.scale))
    assert error(case.run(attention), exact) < bound("fp16", torch.float32)


@pytest.mark.pairs
@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("v_scale", [1e-4, 1e4])
@FORMATS
def test_small_and_large_v_survive(device, attention, name, v_scale, dtype):
    case = chunks(name, [70], [20], 2, 1, 64, dtype, device, v_scale=v_scale)
    assert error(case.run(attention), case.truth()) < bound(name, dtype)


@BOTH
@CACHED
def test_tokens_before_the_first_chunk_are_passed_over(device, attention, attend_cache):
    """Those that decode in the same step."""
    case = chunks("int8", [70, 9], [40, 9], 4, 2, 64, torch.float32, device)
    alone = case.run(attention, attend_cache)
    decoding = 3
    for name in ("q", "k", "v"):
        tokens = getattr(case, name)
        setattr(case, name, torch.cat((torch.full_like(tokens[:decoding], torch.nan), tokens)))
    arguments = list(case.args(attend_cache))
    arguments[6] = case.start + decoding
    arguments[9] = torch.full_like(case.q, 3.0)
    attention(*arguments)
    assert torch.equal(arguments[9][decoding:], alone) and (arguments[9][:decoding] == 3.0).all()


@BOTH
@CACHED
def test_padded_chunks_tiles_and_cached_tokens_change_nothing(device, attention, attend_cache):
    """As a recorded step has it: empty chunks behind, and among, those there are."""
    case = chunks("int8", [70, 9, 40], [40, 9, 1], 4, 2, 64, torch.float16, device)
    alone = case.run(attention, attend_cache)
    args = list(case.args(attend_cache))
    rows, query_start, cached_start, tiles = args[5:9]
    args[5] = torch.cat((rows[:1], rows[:1], rows[1:], rows[:1].expand(3)))
    args[6] = torch.cat((query_start[:2], query_start[1:], query_start[-1:].expand(3)))
    args[7] = torch.cat((cached_start[:2], cached_start[1:], cached_start[-1:].expand(3)))
    moved = torch.where(tiles[:, :1] > 0, tiles + torch.tensor([1, 0], device=device), tiles).int()
    args[8] = torch.cat((moved, torch.full((5, FIELDS), NONE, dtype=torch.int32, device=device)))
    args[10] += 1000
    attention(*args)
    assert torch.equal(args[9], alone)


@pytest.mark.ptx
def test_no_cached_tokens_where_there_is_room_for_some(device):
    """As a recorded step of whole prompts has it, or one of padding alone."""
    case = chunks("int8", [70, 9], [70, 9], 4, 2, 64, torch.float16, device)
    alone = case.run(kernel.prefill_attention)
    args = list(case.args())
    args[10] = 300
    kernel.prefill_attention(*args)
    assert torch.equal(args[9], alone)
    args[6], args[8], args[9] = (
        args[6].clone().fill_(3),
        torch.full_like(args[8], NONE),
        torch.zeros_like(alone),
    )
    kernel.prefill_attention(*args)
    assert not args[9].any()


@pytest.mark.parametrize("group,rows", [(1, 32), (4, 128), (7, 128), (16, 32)])
def test_tiles_hold_every_row_once_and_the_longest_first(group, rows):
    own, before, queries = [1, 0, 37, 200, 5], [0, 9, 900, 20, 3], Queries(group, rows)
    tiles = plan_tiles(own, before, queries, 300)
    live = tiles[tiles[:, 0] != NONE]
    assert len(tiles) == 300 and len(live) == queries.tiles(own).sum()
    held = sorted((c, row) for c, first in live.tolist() for row in range(first, first + rows)
                  if row < own[c] * group)  # fmt: skip
    assert held == [(c, row) for c, n in enumerate(own) for row in range(n * group)]
    seen = [before[c] + min((first + rows - 1) // group + 1, own[c]) for c, first in live.tolist()]
    assert seen == sorted(seen, reverse=True)
    with pytest.raises(ValueError, match="room: expected at least"):
        plan_tiles(own, before, queries, len(live) - 1)


@FORMATS
def test_where_the_slots_are_does_not_matter(device, name):
    here, there = (chunks(name, [50], [9], 2, 1, 64, torch.float16, device, seed=s) for s in (0, 1))
    assert torch.equal(here.run(kernel.prefill_attention), there.run(kernel.prefill_attention))


def test_operator(device):
    case = chunks("int4", [30, 8], [12, 8], 2, 1, 64, torch.float32, device)
    args = case.args()
    assert error(case.run(prefill_attention), case.truth()) < bound("int4", torch.float32)
    check_operator("prefill_attention", args)


@pytest.mark.gpu
@CACHED
@FORMATS
@pytest.mark.parametrize("lens,own,Hq,Hkv,D", [
    pytest.param([4096, 3000, 777], [4096, 1000, 3], 32, 8, 128, marks=pytest.mark.alone),
    ([9000], [128], 28, 4, 128), ([2000, 130], [600, 130], 16, 16, 64), ([1500], [1024], 8, 4, 256),
    ([1500], [500], 6, 6, 80), ([1500], [500], 6, 2, 96),
])  # fmt: skip
def test_sizes_of_users(device, attend_cache, name, lens, own, Hq, Hkv, D):
    dtype = torch.bfloat16
    case = chunks(name, lens, own, Hq, Hkv, D, dtype, device)
    assert error(case.run(kernel.prefill_attention, attend_cache), case.truth(attend_cache)) < bound(
        name, dtype
    )


@pytest.mark.gpu
@pytest.mark.alone
@FORMATS
def test_a_prompt_of_32k_tokens(device, name):
    """As one chunk, against the truth of some of its rows; nothing of the size of its score matrix."""
    case = chunks(name, [32768], [32768], 32, 8, 128, torch.bfloat16, device)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = case.run(kernel.prefill_attention)
    assert torch.cuda.max_memory_allocated() - before < 2 * out.nbytes
    for end in (1, 129, 20000, 32768):
        rows = slice(max(0, end - 5), end)
        want = from_basis(name, attend(case.q[rows], case.k[:end], case.v[:end], case.scale))
        assert error(out[rows], want) < bound(name, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.alone
@CACHED
@FORMATS
def test_a_chunk_after_128k_tokens(device, attend_cache, name):
    """A context of 131,072 tokens, against the truth of some rows of its last 1,000."""
    case = chunks(name, [131072], [1000], 16, 2, 128, torch.bfloat16, device)
    out = case.run(kernel.prefill_attention, attend_cache)
    k, v = case.held.decoded(0)
    if not attend_cache:
        k[-1000:], v[-1000:] = case.k, case.v
    for end in (1, 65, 513, 1000):
        rows = slice(max(0, end - 9), end)
        first = len(k) - 1000
        want = from_basis(name, attend(case.q[rows], k[: first + end], v[: first + end], case.scale))
        assert error(out[rows], want) < bound(name, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.slow
@CACHED
@FORMATS
def test_pool_beyond_2_to_the_31_elements(device, attend_cache, name):
    """The same bits from slots at its end as from the first ones."""
    case = chunks(name, [900, 700], [400, 1], 32, 8, 128, torch.float16, device)
    held, want = case.held, case.run(kernel.prefill_attention, attend_cache)
    slots, extra = len(held.buffers[0]), far_slot(name, 8, 128)
    specs = KV_FORMATS[name].buffers(extra + slots, 8, 128, torch.float16).values()
    pool = [spec.zeros(device) for spec in specs]
    for far, near in zip(pool, held.buffers, strict=True):
        far[extra:] = near
    assert pool[0].numel() > 2**31
    case.held = replace(held, buffers=pool, slot_table=held.slot_table + extra)
    assert torch.equal(case.run(kernel.prefill_attention, attend_cache), want)
