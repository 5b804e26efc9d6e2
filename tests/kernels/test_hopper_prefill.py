"""The Hopper kernel of prefill_attention against fp64 attention; what is not a chunk's is NaN all around."""

from types import SimpleNamespace

import pytest
import torch
from attention_truth import attend, bound, error, whole_rotation

from qrt.kernels.attention_rule import LOG2_E, AttentionRule
from qrt.kernels.device import signs
from qrt.kernels.gpu import is_hopper
from qrt.kernels.prefill_attention import hopper_kernel, kernel
from qrt.kernels.prefill_attention.hopper_kernel import fits, hopper_prefill
from qrt.kernels.prefill_attention.tiles import Queries, plan_tiles
from qrt.quant.kv import KV_FORMATS

BF16, FP16 = torch.bfloat16, torch.float16
PLAIN = AttentionRule(1.0)
BEFORE, AFTER, UNUSED = 3, 2, 9  # tokens around the chunks, tiles behind theirs


@pytest.fixture
def hopper(device, monkeypatch):
    """Three programs, so that each takes several tiles."""
    if not is_hopper(device):
        pytest.skip("wgmma needs a Hopper GPU")
    monkeypatch.setattr(hopper_kernel, "multiprocessors", lambda device: 3)


def ragged(numbers, device):
    return torch.tensor([0, *numbers]).cumsum(0).int().to(device)


class Chunks:
    """Chunks of `own[i]` tokens behind `cached[i]` others, in views of the product that qkv is."""

    def __init__(self, own, cached, Hq, Hkv, D, dtype, cached_dtype, attend_cache, rotated, device):
        draw = torch.Generator().manual_seed(sum(own))
        seen = [n + c for n, c in zip(own, cached, strict=True)] if attend_cache else cached
        T, heads = sum(own), Hq + 2 * Hkv
        qkv = torch.full((BEFORE + T + AFTER, heads, D), torch.nan)
        qkv[BEFORE : BEFORE + T] = torch.randn(T, heads, D, generator=draw) * 1.5
        qkv[:, Hq + Hkv :] = qkv[:, Hq + Hkv :] / 1.5 + 0.3
        self.q, self.k, self.v = qkv.to(dtype).to(device).split((Hq, Hkv, Hkv), 1)
        kv = torch.randn(2, sum(seen), Hkv, D, generator=draw) + torch.tensor([0, 0.3]).view(2, 1, 1, 1)
        beyond = torch.full((2, 7, Hkv, D), torch.nan)
        self.cached_k, self.cached_v = torch.cat((kv, beyond), 1).to(cached_dtype).to(device)
        self.own, self.attend_cache, self.rotated = own, attend_cache, rotated
        self.start, self.cached_start = ragged(own, device) + BEFORE, ragged(seen, device)
        queries = Queries.of(Hq, Hkv, D, self.q.itemsize)
        tiles = plan_tiles(own, cached, queries, int(queries.tiles(own).sum()) + UNUSED)
        self.tiles = torch.from_numpy(tiles).to(device)

    def run(self, window=0, softcap=0.0, sinks=None, segment=0):
        """Return what the kernel writes, whose other tokens must be as they were."""
        D, out = self.q.shape[2], torch.full_like(self.q, torch.nan, memory_format=torch.contiguous_format)
        rule = AttentionRule(D**-0.5 * LOG2_E, window, softcap=softcap * LOG2_E, sinks=sinks, segment=segment)
        arguments = SimpleNamespace(
            q=self.q, k=self.k, v=self.v, tiles=self.tiles, query_start=self.start,
            cached_start=self.cached_start, out=out, attend_cache=self.attend_cache,
        )  # fmt: skip
        rotation = signs(D, out.device) if self.rotated else None
        hopper_prefill(arguments, (self.cached_k, self.cached_v), rotation, rule)
        assert out[:BEFORE].isnan().all() and out[-AFTER:].isnan().all()
        return out[BEFORE:-AFTER]

    def truth(self, window=0, softcap=0.0, sinks=None, segment=0):
        D, outs = self.q.shape[2], []
        for i in range(len(self.own)):
            a, b = self.start[i : i + 2].tolist()
            first, end = self.cached_start[i : i + 2].tolist()
            k, v = self.cached_k[first:end].double(), self.cached_v[first:end].double()
            if not self.attend_cache:
                k, v = torch.cat((k, self.k[a:b].double())), torch.cat((v, self.v[a:b].double()))
            outs.append(attend(self.q[a:b], k, v, D**-0.5, window, softcap, None, sinks, segment))
        turned = whole_rotation(D).T.to(self.q.device) if self.rotated else None
        return torch.cat(outs) if turned is None else torch.cat(outs) @ turned


@pytest.mark.gpu
@pytest.mark.ptx
@pytest.mark.usefixtures("copies", "hopper")
@pytest.mark.parametrize("own, cached, heads, dtypes, attend_cache, rotated", [
    pytest.param([45, 0, 9], [21, 5, 130], (4, 1, 128), (BF16, FP16), False, True, id="in two dtypes"),
    pytest.param([150, 5, 1], [0, 20, 300], (2, 2, 64), (BF16, FP16), False, True, id="one query head each"),
    pytest.param([70, 40], [0, 128], (4, 2, 128), (FP16, FP16), False, False, id="fp16"),
    pytest.param([37, 90], [0, 20], (7, 1, 64), (BF16, FP16), False, True, id="tiles of parts of tokens"),
    pytest.param([200, 60], [100, 0], (1, 1, 64), (BF16, BF16), True, False, id="all from the cache"),
    pytest.param([37, 90], [128, 20], (4, 1, 128), (BF16, FP16), True, True, id="all converted"),
    pytest.param([129, 128, 127], [0, 0, 0], (1, 1, 64), (BF16, BF16), False, False, id="nothing cached"),
])  # fmt: skip
def test_chunks_of_all_kinds(device, own, cached, heads, dtypes, attend_cache, rotated):
    """Ends on and off the tiles, of rows and of keys."""
    chunks = Chunks(own, cached, *heads, *dtypes, attend_cache, rotated, device)
    if not any(cached):
        chunks.cached_k, chunks.cached_v = chunks.cached_k[:0], chunks.cached_v[:0]
    assert error(chunks.run(), chunks.truth()) < bound("fp16", dtypes[0])


@pytest.mark.gpu
@pytest.mark.ptx(window=[40, 100])
@pytest.mark.usefixtures("copies", "hopper")
@pytest.mark.parametrize("own, cached, heads, dtypes, attend_cache, rotated, window, softcap", [
    pytest.param([150, 0, 9], [21, 5, 300], (4, 1, 128), (BF16, FP16), False, True, 40, 0.0, id="short"),
    pytest.param([290, 3], [70, 200], (1, 1, 64), (BF16, BF16), False, False, 130, 0.0, id="over a tile"),
    pytest.param([140, 260], [0, 20], (7, 1, 64), (BF16, FP16), False, True, 129, 0.0, id="parts of tokens"),
    pytest.param([200, 60], [150, 300], (2, 1, 64), (BF16, BF16), True, False, 100, 5.0, id="from the cache"),
    pytest.param([60], [300], (4, 1, 64), (BF16, FP16), False, True, 1, 0.0, id="itself alone"),
    pytest.param([45, 0, 9], [21, 5, 130], (4, 1, 128), (BF16, FP16), False, True, 0, 2.0, id="capped"),
    pytest.param([70, 40], [0, 128], (4, 2, 128), (FP16, FP16), False, False, 999, 2.0, id="wider than all"),
])  # fmt: skip
def test_windows_and_softcap(device, own, cached, heads, dtypes, attend_cache, rotated, window, softcap):
    """Edges of windows on and off the tiles, among cached keys and among the chunk's own."""
    chunks = Chunks(own, cached, *heads, *dtypes, attend_cache, rotated, device)
    rule = window, softcap
    assert error(chunks.run(*rule), chunks.truth(*rule)) < bound("fp16", dtypes[0])
    assert error(chunks.run(*rule), chunks.truth()) > 0.1 or window == 999


@pytest.mark.gpu
@pytest.mark.ptx(window=[40])
@pytest.mark.usefixtures("copies", "hopper")
@pytest.mark.parametrize("heads, window, softcap, attend_cache", [
    pytest.param((4, 1, 64), 0, 0.0, False, id="all tokens"),
    pytest.param((6, 2, 64), 40, 0.0, False, id="a window, tiles of parts of tokens"),
    pytest.param((2, 2, 128), 0, 3.0, True, id="capped, from the cache"),
])  # fmt: skip
def test_sinks(device, heads, window, softcap, attend_cache):
    """One that weighs nothing, one that weighs all, and some between."""
    chunks = Chunks([45, 0, 70], [21, 5, 130], *heads, BF16, FP16, attend_cache, True, device)
    sinks = torch.tensor([-200.0, 2.0, 0.0, 200.0, 1.0, -1.0])[: heads[0]].to(device)
    rule = window, softcap, sinks
    assert error(chunks.run(*rule), chunks.truth(*rule)) < bound("fp16", BF16)
    assert error(chunks.run(*rule), chunks.truth(window, softcap)) > 0.1


@pytest.mark.gpu
@pytest.mark.ptx(segment=[40, 1])
@pytest.mark.usefixtures("copies", "hopper")
@pytest.mark.parametrize("own, cached, heads, attend_cache, segment", [
    pytest.param([150, 0, 9], [21, 5, 300], (4, 1, 128), False, 40, id="short, begun among cached keys"),
    pytest.param([290, 3], [70, 200], (1, 1, 64), False, 128, id="of whole tiles"),
    pytest.param([140, 100], [0, 20], (7, 1, 64), False, 33, id="parts of tokens"),
    pytest.param([200, 60], [150, 300], (2, 1, 64), True, 100, id="from the cache"),
    pytest.param([40], [30], (4, 1, 64), False, 1, id="itself alone"),
])  # fmt: skip
def test_segments(device, own, cached, heads, attend_cache, segment):
    """Rows of a tile in one segment and in several, behind keys that none of them attends."""
    dtypes = (BF16, BF16) if attend_cache else (BF16, FP16)
    chunks = Chunks(own, cached, *heads, *dtypes, attend_cache, not attend_cache, device)
    assert error(chunks.run(segment=segment), chunks.truth(segment=segment)) < bound("fp16", BF16)
    assert error(chunks.run(segment=segment), chunks.truth()) > 0.1


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("rule", [(0, 0.0), (512, 0.0), (4096, 50.0)])
def test_the_same_bits_every_time(device, rule):
    """Of many tiles, as a copy that comes early or late would change some of them."""
    chunks = Chunks([700, 1, 129, 1777], [0, 130, 4096, 64], 32, 8, 128, BF16, FP16, False, True, device)
    first = chunks.run(*rule)
    assert error(first, chunks.truth(*rule)) < bound("fp16", BF16)
    for _ in range(20):
        assert torch.equal(chunks.run(*rule), first)


def test_what_the_copy_engine_cannot_read_does_not_fit(monkeypatch):
    monkeypatch.setattr(hopper_kernel, "is_hopper", lambda device: True)

    def takes(D=64, dtype=BF16, between=0, begin=0):
        x = torch.empty(begin + 9 * (6 * D + between), dtype=dtype)[begin:]
        qkv = x.view(9, -1)[:, : 6 * D].unflatten(1, (6, D))
        return fits(*qkv.split((2, 2, 2), 1), PLAIN)

    assert takes() and takes(D=128) and takes(dtype=FP16, between=8)
    assert not takes(D=80) and not takes(dtype=torch.float32)
    assert not takes(between=4) and not takes(begin=4)
    other = torch.empty(2, 9, 64, dtype=BF16).transpose(0, 1)  # a token's heads apart
    here = torch.empty(9, 2, 64, dtype=BF16)
    assert fits(here, here, here, PLAIN) and fits(here, here, here, AttentionRule(1.0, 16, softcap=30.0))
    assert fits(here, here, here, AttentionRule(1.0, sinks=torch.ones(2), segment=16))
    assert not fits(other, here, here, PLAIN) and not fits(here, here, other, PLAIN)
    assert not fits(here, here, here, AttentionRule(1.0, slopes=torch.ones(2)))
    monkeypatch.setattr(hopper_kernel, "is_hopper", lambda device: False)
    assert not takes()


@pytest.mark.gpu
def test_a_recorded_call_attends_the_chunks_there_are(device):
    """Recorded once with room for more; replayed for others, for whole prompts and for none at all."""
    name, Hq, Hkv, D, T = "int8", 8, 2, 128, 300
    buffers = [spec.zeros(device) for spec in KV_FORMATS[name].buffers(999, Hkv, D, BF16).values()]
    k, v = torch.randn(2, 999, Hkv, D, device=device, dtype=BF16)
    KV_FORMATS[name].encode_ref(k, v, buffers, torch.arange(999, device=device))
    table = torch.arange(3 * 333, dtype=torch.int32, device=device).view(3, 333)
    rows = torch.arange(3, dtype=torch.int32, device=device)
    q, k, v = torch.randn(T, Hq + 2 * Hkv, D, device=device, dtype=BF16).split((Hq, Hkv, Hkv), 1)
    shape = Queries.of(Hq, Hkv, D, q.itemsize)

    def planned(own, cached):
        tiles = torch.from_numpy(plan_tiles(own, cached, shape, 40)).to(device)
        return ragged(own, device), ragged(cached, device), tiles

    def run(starts, out):
        arguments = rows, *starts, out, 1000, False, name, D**-0.5
        kernel.prefill_attention(q, k, v, buffers, table, *arguments)

    held, out = planned([0, 0, 0], [0, 0, 0]), torch.empty(T, Hq, D, device=device, dtype=BF16)
    run(held, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(held, out)
    for own, cached in (([100, 7, 150], [200, 0, 33]), ([300, 0, 0], [0, 0, 0]), ([0, 0, 0], [0, 0, 0])):
        for there, new in zip(held, planned(own, cached), strict=True):
            there.copy_(new)
        out.fill_(3.0)
        want = out.clone()
        graph.replay()
        run(planned(own, cached), want)
        assert torch.equal(out, want) and (out[sum(own) :] == 3.0).all()
        assert not (out[: sum(own)] == 3.0).all(-1).any()
