"""`sample` against the definition in fp64: greedy rows exactly, draws within the error of fp32 logarithms."""

import pytest
import torch
import triton
import triton.language as tl
from offline_cuda import compiled
from operators import check_operator
from torch.nn import functional as F

from backends import GPU
from qrt.kernels.sample import NOT_FINITE, SCORE_ERROR, SHARE_ERROR, kernel, ref, sample, token_of

INF = float("inf")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BOTH = pytest.mark.parametrize("implementation", [ref.sample, kernel.sample], ids=["ref", "triton"])


@pytest.fixture(autouse=True)
def nothing_is_left_behind(device):
    """After every call the next one finds no best score and no arrivals."""
    yield
    for capacity in (1024, 4096):
        shared = kernel._shared(device, capacity)
        assert not shared[:, 0].any() and (shared[:, 1] == -(2**31)).all()


def parameters(rows, device, temperature=None, seed=0):
    """Tables of twice as many requests, in another order than the rows: rows, temperature, seed, position."""
    gen = torch.Generator().manual_seed(seed)
    tables = (
        torch.randperm(2 * rows, generator=gen)[:rows],
        torch.rand(2 * rows, generator=gen) * 2 + 0.1 if temperature is None else torch.tensor(temperature),
        torch.randint(-(2**63), 2**63 - 1, (2 * rows,), generator=gen),
        torch.randint(0, 131072, (2 * rows,), generator=gen, dtype=torch.int32),
    )
    return tuple(table.to(device) for table in tables)


def race64(logits, rows, temperature, seed, position, least=None):
    """In fp64, of the u that fp32 holds: logits / temperature by group, the groups' scores, u of each group
    in the race and u of the draw within it."""
    scaled = logits.double() / temperature[rows, None].double()
    if least is not None:
        scaled = scaled.masked_fill((logits.float() / temperature[rows, None]) < least[:, None], -INF)
    groups = F.pad(scaled, (0, -scaled.shape[1] % ref.GROUP), value=-INF).unflatten(1, (-1, ref.GROUP))
    index = torch.arange(groups.shape[1], dtype=torch.int32, device=logits.device)
    u, within = (ref.uniform(seed[rows], position[rows], i).double() for i in (index, ~index))
    return groups, groups.logsumexp(-1) - torch.log(-torch.log1p(-u)), within


def check(tokens, logits, *tables):
    """No group's score beats that of the drawn token's by more than two errors, and within the group u lies
    in the token's share of (0, 1), give or take an error."""
    groups, scores, within = race64(logits, *tables)
    best, group = scores.amax(-1), tokens[:, None] // ref.GROUP
    drawn = scores.gather(1, group)[:, 0]
    assert tokens.dtype == torch.int64 and (drawn >= best - 2 * SCORE_ERROR * (1 + best.abs())).all()
    partial_sums = groups[torch.arange(len(groups)), group[:, 0]].softmax(-1)
    at, u = tokens[:, None] % ref.GROUP, within.gather(1, group)[:, 0]
    end, share = partial_sums.cumsum(-1).gather(1, at)[:, 0], partial_sums.gather(1, at)[:, 0]
    assert (share > 0).all() and (u < end + SHARE_ERROR).all() and (u > end - share - SHARE_ERROR).all()


@pytest.mark.ptx(dtype=[torch.bfloat16], implementation=[kernel.sample])
@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, vocab", [(1, 1), (2, 1000), (3, 257), (0, 50), (1, 2600)])
def test_draws(device, implementation, dtype, rows, vocab):
    logits = (torch.randn(rows, vocab, device=device) * 2).to(dtype)
    tables = parameters(rows, device)
    check(implementation(logits, *tables, None), logits, *tables)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_takes_the_first_of_the_largest(device, implementation, dtype):
    logits = torch.randn(4, 3000, device=device).mul(2).round().clamp(max=5).to(dtype)  # many ties
    logits[1] = -INF
    logits[2] = 0
    logits[2, 1:9] = -0.0
    logits[3, :1500] = -INF
    tables = parameters(4, device, [0.0] * 8)
    want = logits.argmax(-1)
    assert (logits[0] == logits[0, want[0]]).sum() > 1 and want[1] == want[2] == 0
    assert torch.equal(implementation(logits, *tables, None), want)


@BOTH
@pytest.mark.parametrize("programs", [1, 4, 10**6])
def test_any_number_of_programs_draws_the_same(device, implementation, programs, monkeypatch):
    """What is skipped depends on what was seen before; what is drawn does not."""
    monkeypatch.setattr(kernel, "_PROGRAMS_PER_SM", programs)
    monkeypatch.setattr(kernel, "multiprocessors", lambda device: 1)
    logits = torch.randn(3, 2100, device=device)
    logits[1, 2000] = 30  # everything after it is skipped
    logits[2, 5] = 12
    tables = parameters(3, device, [1.0, 0.7, 1.0, 0.0, 1.3, 1.0])
    tokens = implementation(logits, *tables, None)
    assert tokens.tolist() == ref.sample(logits.cpu(), *(t.cpu() for t in tables), None).tolist()


@pytest.mark.ptx(implementation=[kernel])
@pytest.mark.parametrize("implementation", [ref, kernel], ids=["ref", "triton"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_best_word_of_ranks_holds_the_token(device, implementation, ranks):
    logits = torch.randn(6, 2000, device=device).mul(2).bfloat16()
    logits[5] = logits[5].round()  # many ties
    logits[4, 1500:] = -INF
    tables = parameters(6, device, [0.0, 1.0, 0.7] * 4)
    edges = [2000 // 8 * rank // ranks * 8 for rank in range(ranks + 1)]
    words = [
        implementation.packed_samples(logits[:, first:last], *tables, first)
        for first, last in zip(edges, edges[1:], strict=False)
    ]
    want = implementation.sample(logits, *tables, None)
    assert torch.equal(token_of(torch.stack(words).amax(0)), want)


@BOTH
def test_tokens_below_the_least_are_not_drawn(device, implementation):
    logits = torch.randn(6, 600, device=device).bfloat16()
    tables = parameters(6, device)
    scaled = logits.float() / tables[1][tables[0], None]
    least = scaled.sort(-1, descending=True).values[:, 4].contiguous()
    least[5] = -INF
    tokens = implementation(logits, *tables, least)
    check(tokens, logits, *tables, least)
    assert (scaled.gather(1, tokens[:, None])[:, 0] >= least).all()


@BOTH
def test_logits_of_minus_infinity_and_far_temperatures(device, implementation):
    logits = torch.full((4, 700), -INF, device=device)
    logits[0, 650] = -40.0
    logits[1, 300:302] = torch.tensor([3.0, 2.999])
    logits[2] = 0.0
    tables = parameters(4, device, [1.0, 1.0, 1e-5, 1e4, 1.0, 1.0, 1.0, 1e-5])
    tokens = implementation(logits, *(torch.arange(4, device=device), *tables[1:]), None)
    assert tokens[0] == 650 and tokens[1] in (300, 301) and 0 <= tokens[3] < 700
    check(tokens[2:3], logits[2:3], torch.tensor([2], device=device), *tables[1:])


@pytest.mark.pairs
@pytest.mark.ptx(implementation=[kernel.sample], dtype=[torch.bfloat16], vocab=[2600], rule=["none", "mask"])
@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [257, 2600])
@pytest.mark.parametrize("rule", ["none", "mask", "least"])
def test_rows_with_nan_or_infinity_get_no_token(device, implementation, dtype, vocab, rule):
    """Wherever it stands, in greedy rows and drawn ones, also at a token that no rule allows."""
    logits = (torch.randn(8, vocab, device=device) * 2).to(dtype)
    clean = logits.clone()
    nan = torch.tensor(float("nan"), dtype=dtype)
    for row, (at, value) in {0: (0, nan), 1: (vocab - 1, -nan), 2: (vocab // 2, INF), 5: (7, nan)}.items():
        logits[row, at] = value
    logits[7] = nan
    logits[3, 5:100] = clean[3, 5:100] = -INF
    tables = parameters(8, device, [0.0, 1.0, 0.7, 1.3] * 4)
    allowed = torch.zeros(1, vocab, dtype=torch.bool)
    allowed[0, 20:30] = True
    masks = (masks_of(allowed, device), torch.zeros(8, dtype=torch.int32, device=device))
    rules = {"none": (None,), "mask": (None, *masks), "least": (torch.full((8,), 0.5, device=device),)}[rule]
    tokens = implementation(logits, *tables, *rules)
    wrong = torch.tensor([1, 1, 1, 0, 0, 1, 0, 1], dtype=torch.bool, device=device)
    want = implementation(clean, *tables, *rules).masked_fill(wrong, NOT_FINITE)
    assert torch.equal(tokens, want) and (want[~wrong] >= 0).all()


@pytest.mark.ptx(implementation=[kernel])
@pytest.mark.parametrize("implementation", [ref, kernel], ids=["ref", "triton"])
def test_one_rank_s_nan_is_the_word_of_all(device, implementation):
    logits = torch.randn(4, 1600, device=device).bfloat16()
    tables = parameters(4, device, [0.0, 1.0] * 4)
    logits[1, 900], logits[2, 3], logits[3] = float("nan"), INF, 3e38
    parts = (0, 800), (800, 1600)
    words = [implementation.packed_samples(logits[:, a:b], *tables, a) for a, b in parts]
    tokens = token_of(torch.stack(words).amax(0))
    assert (tokens[1:3] == NOT_FINITE).all() and (tokens[[0, 3]] >= 0).all()


def test_rows_that_lie_apart(device):
    wide = torch.randn(4, 1200, device=device)
    tables = parameters(4, device)
    for logits in (wide[:, 100:800], torch.randn(700, 4, device=device).T):
        check(kernel.sample(logits, *tables, None), logits, *tables)


@triton.jit
def _noise(BITS, OUT, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(OUT + i, kernel._exponential(tl.load(BITS + i)))


def test_noise_is_within_its_error(device):
    edge = 2**31 - 1 - 2 ** torch.arange(31)
    bits = torch.cat([torch.arange(2048), 2 ** torch.arange(31), edge, torch.randint(2**31, (6082,))])
    bits = bits.to(torch.int32)
    u = bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24).double()
    want = -torch.log(-torch.log1p(-u))
    out = torch.empty(8192, device=device)
    _noise[(1,)](bits.to(device), out, 8192)
    assert ((-out.cpu().double().log() - want).abs() <= SCORE_ERROR / 4 * (1 + want.abs())).all()


@triton.jit
def _bits_of(KEY, OUT, first, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(OUT + i, kernel._uniform(kernel._bits(tl.load(KEY), first + i)))


def test_noise_of_the_kernel_is_the_reference_s(device):
    """Bit for bit, for the race (from 0 on) and for the draw within a group (below 0)."""
    seed, position = torch.tensor([-(2**62) + 12345]), torch.tensor([131071])
    key = ref._mix64(ref._mix64(seed) ^ position)
    for first in (0, 16032, -16032, -1024):
        out = torch.empty(1024, device=device)
        _bits_of[(1,)](key.to(device).view(torch.uint64), out, first, 1024)
        assert torch.equal(out.cpu(), ref.uniform(seed, position, torch.arange(1024).int() + first)[0])


def test_the_hash_of_seeds_is_splitmix64():
    """The first outputs of the generator with seed 1234567, as published (rosettacode.org)."""
    states = [(1234567 + i * 0x9E3779B97F4A7C15) % 2**64 for i in range(3)]
    mixed = ref._mix64(torch.tensor(states, dtype=torch.uint64).view(torch.int64))
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [x % 2**64 for x in mixed.tolist()] == published


def unmixed(x):
    """What the 32-bit finalizer makes x of: each of its steps undone, the last one first."""
    for multiplier, shift in ((0x846CA68B, 16), (0x7FEB352D, 15), (1, 16)):
        x ^= x >> shift ^ (x >> 30 if shift == 15 else 0)
        x = x * pow(multiplier, -1, 2**32) % 2**32
    return x


@pytest.mark.parametrize("bits, want", [(0, 2.0**-32), (2**31 - 1, 1 - 2.0**-24)])
def test_noise_never_reaches_0_or_1(device, bits, want):
    """In fp32 2^31 - 1/2 is 2^31. Drawn with u = 1, no share would exceed it."""
    key = ref._mix64(ref._mix64(torch.tensor([5])) ^ 7)
    low, high = int(key) % 2**32, int(key) >> 32 & 0xFFFFFFFF
    index = torch.tensor([unmixed(unmixed(bits) ^ high) ^ low]).int()
    assert ref.uniform(torch.tensor([5]), torch.tensor([7]), index).item() == want
    out = torch.empty(1, device=device)
    _bits_of[(1,)](key.to(device).view(torch.uint64), out, index.item(), 1)
    assert out.item() == want


def test_operator():
    """Schema and fake."""
    logits, tables = torch.randn(3, 50), parameters(3, torch.device("cpu"), [0.0, 1.0] * 3)
    for least in (None, torch.zeros(3)):
        arguments = (logits, *tables, least)
        check_operator("sample", arguments)


CODE = """
import torch
from qrt.kernels.sample.kernel import sample
for dtype, least in ((torch.bfloat16, None), (torch.float16, torch.ones(3)), (torch.float32, None)):
    rows, seed = torch.zeros(2, 3, dtype=torch.int64)
    sample(torch.empty(3, 128256, dtype=dtype), rows, torch.ones(3), seed, rows.int(), least)
"""


@pytest.mark.slow
@pytest.mark.skipif(GPU, reason="the other tests compile for the GPU that is here")
def test_compiles():
    assert compiled(CODE) == {"_sample": 3}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, vocab", [(1, 128256), (7, 151936), (64, 32000), (256, 128256), (4000, 1000)])
def test_model_sizes(device, dtype, rows, vocab):
    logits = torch.randn(rows, vocab, device=device) * torch.logspace(-1, 1.2, rows, device=device)[:, None]
    logits = logits.to(dtype)
    tables = parameters(rows, device)
    for _ in range(3):  # timing decides what is skipped, and nothing else
        tokens = sample(logits, *tables, None)
        check(tokens, logits, *tables)
        assert torch.equal(tokens, sample(logits, *tables, None))
    greedy = torch.zeros(2 * rows, device=device)
    assert torch.equal(sample(logits, tables[0], greedy, *tables[2:], None), logits.argmax(-1))


@pytest.mark.gpu
def test_replays_in_a_cuda_graph(device):
    """New logits and positions come in place; half of the rows are greedy."""
    logits = torch.randn(32, 128256, device=device).bfloat16()
    tables = parameters(32, device)
    tables[1][::2] = 0
    sample(logits, *tables, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample(logits, *tables, None)
    for _ in range(3):
        logits.normal_()
        tables[3].add_(1)
        graph.replay()
        assert torch.equal(tokens, sample(logits, *tables, None))


def masks_of(allowed, device):
    """int32 [C, W] of bool [C, V]."""
    padded = F.pad(allowed, (0, -allowed.shape[1] % 32)).unflatten(1, (-1, 32)).long()
    words = (padded << torch.arange(32)).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).int().to(device)


@pytest.mark.ptx(implementation=[kernel.sample], dtype=[torch.bfloat16], vocab=[2600])
@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [257, 2600])
def test_masked_logits_count_as_minus_infinity(device, implementation, dtype, vocab):
    """Greedy rows too, beside rows without a mask; the last masks leave one token."""
    logits = (torch.randn(7, vocab, device=device) * 2).to(dtype)
    tables = parameters(7, device, [1.0, 0.0, 0.7, 1.3, 1.0, 0.0, 1.0] * 2)
    allowed = torch.rand(4, vocab, generator=torch.Generator().manual_seed(3)) < 0.1
    allowed[2:] = False
    allowed[2, vocab - 1] = allowed[3, 8] = True
    at = torch.tensor([1, -1, 0, 2, -1, 3, 2], dtype=torch.int32)
    tokens = implementation(logits, *tables, None, masks_of(allowed, device), at.to(device))
    of_rows = torch.where((at < 0)[:, None], True, allowed[at]).to(device)
    assert of_rows.gather(1, tokens[:, None]).all() and tokens[3] == tokens[6] == vocab - 1
    assert torch.equal(tokens, implementation(logits.masked_fill(~of_rows, -INF), *tables, None))


@BOTH
def test_mask_and_least_both_apply(device, implementation):
    logits = torch.randn(5, 640, device=device)
    tables = parameters(5, device)
    least = (logits / tables[1][tables[0], None]).sort(-1, descending=True).values[:, 300].contiguous()
    allowed = torch.rand(5, 640, generator=torch.Generator().manual_seed(4)) < 0.2
    at = torch.arange(5, dtype=torch.int32, device=device)
    tokens = implementation(logits, *tables, least, masks_of(allowed, device), at)
    check(tokens, logits.masked_fill(~allowed.to(device), -INF), *tables, least)


@pytest.mark.gpu
def test_masks_of_a_whole_vocabulary(device):
    """10^5 draws of 256 rows: none outside its mask, padded ids included."""
    vocab = 151936
    logits = torch.randn(256, vocab, device=device, dtype=torch.bfloat16)
    allowed = torch.rand(256, vocab, device=device) < 1e-3
    allowed[:, 151669:] = False
    masks, at = masks_of(allowed.cpu(), device), torch.arange(256, dtype=torch.int32, device=device)
    tables = parameters(256, device)
    for step in range(400):
        position = tables[3] + step
        tokens = kernel.sample(logits, *tables[:3], position, None, masks, at)
        assert allowed.gather(1, tokens[:, None]).all()
