"""The all-reduce of ranks: its protocol, and its kernels on ranks whose memory is all here."""

import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from operators import check_operator

from backends import COMPILED, GPU, PTX
from ptx.values import Fault
from qrt.kernels import peer_memory
from qrt.kernels import tensor_parallel as peers_module
from qrt.kernels.all_reduce import int8_kernel, reduce, reduce_max, ref
from qrt.kernels.all_reduce import kernel as all_reduce_kernel
from qrt.kernels.peer_memory import EMPTY, Memory, places_bytes, row_bytes_for, rows_for
from qrt.kernels.rmsnorm import kernel
from qrt.kernels.rmsnorm import ref as rmsnorm_ref
from qrt.kernels.tensor_parallel import EXACT_TOKENS, TensorParallelGroup
from qrt.quant import affine
from rank_memory import Ranks, forked
from thread_ranks import Meeting, ThreadPeers

EPS = 1e-5


def states(ranks, exchanges, copies):
    """Every state that ranks can reach which push, wait, read and empty, each step on its own.

    Returns the number of states, how many are stuck, and how many reads gave another exchange's row. All
    exchange one row. `copies` is the number of places that are used in turn.
    """
    nothing = (-1,) * ranks
    start = ((0, 0, 0),) * ranks, ((nothing,) * copies,) * ranks
    seen, left, stuck, wrong = {start}, deque([start]), 0, 0

    def put(memory, owner, copy, source, value):
        line = memory[owner][copy]
        line = (*line[:source], value, *line[source + 1 :])
        own = (*memory[owner][:copy], line, *memory[owner][copy + 1 :])
        return (*memory[:owner], own, *memory[owner + 1 :])

    while left:
        at, memory = left.popleft()
        moved = False
        for rank, (number, phase, step) in enumerate(at):
            if number == exchanges:
                continue
            copy, other = number % copies, (rank + 1 + step) % ranks
            last = step == ranks - 2
            if phase == 0:  # write to one of the others
                after = put(memory, other, copy, rank, number)
                to = (number, 1, 0) if last else (number, 0, step + 1)
            elif memory[rank][copy][other] < 0:
                continue  # not come yet
            else:  # read, and empty
                wrong += memory[rank][copy][other] != number
                after = put(memory, rank, copy, other, -1)
                to = (number + 1, 0, 0) if last else (number, 1, step + 1)
            moved = True
            reached = (*at[:rank], to, *at[rank + 1 :]), after
            if reached not in seen:
                seen.add(reached)
                left.append(reached)
        stuck += not moved and any(number < exchanges for number, _, _ in at)
    return len(seen), stuck, wrong


@pytest.mark.parametrize("ranks, exchanges", [(2, 5), (3, 3)])
def test_no_order_of_steps_loses_a_row(ranks, exchanges):
    """With two copies in turn; with one, a rank overwrites what another has not read."""
    count, stuck, wrong = states(ranks, exchanges, copies=2)
    assert count > 30 and not stuck and not wrong
    _, stuck, wrong = states(ranks, exchanges, copies=1)
    assert stuck or wrong


def as_words(x):
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def empty(dtype):
    return EMPTY if dtype == torch.float32 else -(1 << 15)


@pytest.mark.ptx(ranks=[2], dtype=[torch.bfloat16])
@pytest.mark.parametrize(
    "ranks, dtype", [(2, torch.float32), (4, torch.float16), (2, torch.float16), (2, torch.bfloat16)]
)
def test_every_form_adds_up_all_ranks(device, ranks, dtype):
    """All ranks get the same bits, near fp64; they read what the others have sent, and no more."""
    width = 256
    all_ranks = Ranks(ranks, width, device)
    weight = (torch.rand(width, device=device) + 0.5).to(dtype)
    exact = COMPILED or dtype != torch.bfloat16  # the interpreter truncates to bf16
    for number, (partial_sums, tokens) in enumerate([(0, 3), (2, 3), (2, 6), (0, 6), (0, 1)]):
        shape = (partial_sums, tokens, width) if partial_sums else (tokens, width)
        xs = [torch.randn(shape, device=device) for _ in range(ranks)]
        xs = xs if partial_sums else [x.to(dtype) for x in xs]
        for x in xs:
            as_words(x)[..., 0, :5] = empty(x.dtype)  # what stands for a value that has not come
        sums = [sum(x, torch.zeros_like(x[0])) if partial_sums else x for x in xs]
        sent = [x.float() if tokens <= EXACT_TOKENS else x.to(dtype) for x in sums]
        residual = torch.randn(tokens, width, device=device).to(dtype)
        total = sum(x.double() for x in xs).sum(0) if partial_sums else sum(x.double() for x in xs)
        results = []
        for rank, memory in enumerate(all_ranks.memories):
            assert memory.takes(xs[rank])
            own, results_here = [], []
            for form in (_norm, _int8, _sum):
                all_ranks.arrive(rank, [torch.where(as_words(x) == empty(x.dtype), 0.0, x) for x in sent])
                results_here += form(residual.clone(), xs[rank], weight, memory.words)
                assert all_ranks.is_empty(rank)
                for to in set(range(ranks)) - {rank}:
                    got = all_ranks.sent(rank, to, sent[rank])
                    if exact:
                        torch.testing.assert_close(got, sent[rank], rtol=0, atol=1e-40)
                        assert (as_words(got) != empty(got.dtype)).all()
                    own.append(got)
                    all_ranks.take_away(rank, to)
            results.append(results_here)
        bound = {torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-4}[dtype] * ranks
        if exact:
            for found in results[1:]:
                for one, other in zip(results[0], found, strict=True):
                    assert torch.equal(one, other)
        added, normal, again, codes, scale, alone = results[0]
        assert (added.double() - residual.double() - total).abs().max() < bound and torch.equal(added, again)
        assert (alone.double() - total).abs().max() < bound
        want = rmsnorm_ref.rmsnorm(added, weight, EPS)
        assert (normal.double() - want.double()).abs().max() < bound
        if exact and not GPU:
            assert torch.equal(codes, affine.quantize_tokens(normal)[0])
        assert (scale > 0).all()
        assert (all_ranks.counts[0][:1] == 3 * (number + 1)).all()


def _norm(residual, x, weight, words):
    return residual, kernel.add_rmsnorm(residual, x, weight, EPS, None, 0.0, 1.0, words)


def _int8(residual, x, weight, words):
    return residual, *kernel.add_rmsnorm_int8(residual, x, weight, EPS, None, 0.0, 1.0, words)


def _sum(residual, x, weight, words):
    return (all_reduce_kernel.all_reduce(x, words, residual.dtype),)


@pytest.mark.skipif(not COMPILED, reason="the interpreter has no bf16")
@pytest.mark.ptx
def test_digits_of_the_sum(device):
    ranks = Ranks(2, 256, device)
    xs = [torch.randn(3, 5, 256, device=device) for _ in range(2)]
    weight, residual = (
        torch.ones(256, device=device).bfloat16(),
        torch.zeros(5, 256, device=device).bfloat16(),
    )
    other, words = residual.clone(), ranks.memories[0].words
    sent = [x.sum(0).bfloat16() for x in xs]
    ranks.arrive(0, sent)
    want = kernel.add_rmsnorm(residual, xs[0], weight, EPS, None, 0.0, 1.0, words)
    ranks.take_away(0, 1)
    ranks.arrive(0, sent)
    digits = kernel.add_rmsnorm_digits(other, xs[0], weight, EPS, 8, None, 1.0, words)
    assert torch.equal(other, residual) and (digits.read() - want.float()).abs().max() < 1e-3


@pytest.mark.ptx
def test_largest_of_all_ranks(device):
    ranks = Ranks(3, 64, device)
    for tokens in (1, 5, 8):
        xs = [torch.randint(-(2**62), 2**62, (tokens,), device=device) & ~(1 << 31) for _ in range(3)]
        for rank, memory in enumerate(ranks.memories):
            ranks.arrive(rank, [x[:, None] for x in xs])
            got = all_reduce_kernel.all_reduce_max(xs[rank], memory.words)
            assert torch.equal(got, torch.stack(xs).amax(0)) and ranks.is_empty(rank)
            for to in set(range(3)) - {rank}:
                assert torch.equal(ranks.sent(rank, to, xs[rank][:, None])[:, 0], xs[rank])
                ranks.take_away(rank, to)


@pytest.mark.ptx
def test_a_pattern_that_does_not_come_is_counted(device):
    ranks = Ranks(2, 64, device)
    wrong = torch.zeros(1, dtype=torch.int32, device=device)
    for number in range(3):
        for memory in ranks.memories:
            all_reduce_kernel.probe(memory, wrong, number, write=True)
        for memory in ranks.memories:
            all_reduce_kernel.probe(memory, wrong, number, write=False)
        assert wrong == 0 and all(ranks.is_empty(rank) for rank in range(2))
    for memory in ranks.memories:
        all_reduce_kernel.probe(memory, wrong, 3, write=True)
    ranks.places[1][1, 0, 2, 3:5] += 1
    all_reduce_kernel.probe(ranks.memories[1], wrong, 3, write=False)
    assert wrong == 2


@pytest.mark.skipif(not PTX, reason="the interpreter has no clock; test_all_reduce_gpu ends a process")
@pytest.mark.ptx
def test_a_wait_that_is_too_long_traps():
    ranks = Ranks(2, 64, torch.device("cpu"))
    ranks.memories[0].wait(1e-6)
    with pytest.raises(Fault, match="trap"):
        all_reduce_kernel.all_reduce(torch.ones(3, 64).bfloat16(), ranks.memories[0].words, torch.bfloat16)


@pytest.mark.skipif(GPU or PTX, reason="test_all_reduce_gpu has processes that meet on GPUs")
def test_two_processes_that_wait_for_each_other():
    """Each interprets its kernels, one pauses now and then; both end with the same residual."""
    ranks = Ranks(2, 64, torch.device("cpu"), shared=True)
    residuals = torch.zeros(2, 5, 64).share_memory_()
    xs = torch.randn(2, 12, 5, 64)
    with forked() as rank:
        for number in range(12):
            tokens = (5, 2, 3)[number % 3]
            if number % 4 == rank:
                time.sleep(0.02)
            x, residual = xs[rank, number, :tokens].contiguous(), residuals[rank, :tokens]
            kernel.add_normed(residual, x, None, 0.0, 1.0, ranks.memories[rank].words)
            words = torch.tensor([rank, -rank])
            assert all_reduce_kernel.all_reduce_max(words, ranks.memories[rank].words).tolist() == [1, 0]
    assert torch.equal(*residuals)
    want = sum(xs[:, number].sum(0)[:2] for number in range(12))
    torch.testing.assert_close(residuals[0, :2], want, rtol=1e-5, atol=1e-5)


def test_what_the_memory_takes():
    memory = Memory(torch.empty(0), 32, row_bytes_for(1000))
    assert memory.takes(torch.empty(32, 1000)) and memory.takes(torch.empty(3, 32, 1000))
    assert not memory.takes(torch.empty(33, 8)) and not memory.takes(torch.empty(1, 1001))
    assert rows_for(2, 8192, 132) == 256 and rows_for(4, 8192, 132) == 64 and rows_for(8, 8192, 132) == 16
    assert rows_for(2, 1024, 132) == 264 and rows_for(8, 1 << 20, 132) == 1
    assert row_bytes_for(33) == 144 and places_bytes(2, 8, 16) % 4 == 0


def test_patience_is_a_word_on_the_device():
    memory = Memory.of([16, 32, 48], 1, 8, 16, torch.device("cpu"))
    assert memory.words.tolist() == [peer_memory.START_SECONDS * 10**9, 1, 9, 16, 32, 48, 16]
    memory.wait(0.5)
    assert memory.words[0] == 500_000_000 and peer_memory.ranks_of(memory.words) == 3


def test_few_rows_go_through_memory(monkeypatch):
    peers = TensorParallelGroup(0, 2, torch.device("cpu"))
    monkeypatch.setattr(peers, "all_reduce", lambda x: x.sum(0))
    few, many = torch.randn(3, 8, 64), torch.randn(3, 9, 64)
    assert torch.equal(peers.through(few)[0], few.sum(0)) and peers.through(few)[1] is None
    peers.memory = Memory.of([0, 0], 0, 8, 256, peers.device)
    assert peers.through(few) == (few, peers.memory.words)
    assert torch.equal(peers.through(many)[0], many.sum(0)) and peers.through(many)[1] is None


@pytest.mark.parametrize("rows", [1, 8, 9])
def test_own_rows_together_are_the_sum(rows):
    meeting, xs = Meeting(4), torch.randn(4, rows, 3)

    def of_rank(rank):
        peers = ThreadPeers(rank, 4, meeting)
        own = peers.reduce_scatter(xs[rank])
        return own, peers.all_gather(own, rows), peers.own_rows(rows)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(of_rank, range(4)))
    want = xs[0] + xs[1] + xs[2] + xs[3]
    for own, whole, places in results:
        assert torch.equal(own, want[places]) and torch.equal(whole, want)


@pytest.mark.ptx
def test_packed_groups_and_their_sum(device):
    sizes = torch.logspace(-2, 2, 5, device=device)[:, None]
    xs = (torch.randn(3, 5, 384, device=device) * sizes).half()
    xs[0, 0, :128] = 0
    packed = [int8_kernel.pack_int8(x) for x in xs]
    for x, (codes, scale) in zip(xs, packed, strict=True):
        want, its_scale = ref.pack_int8(x)
        assert torch.equal(codes, want)
        torch.testing.assert_close(scale, its_scale, rtol=2**-23 * COMPILED, atol=0)  # a GPU's fast division
    codes, scale = (torch.stack(parts) for parts in zip(*packed, strict=True))
    got = int8_kernel.unpack_int8(codes, scale, torch.float16)
    assert COMPILED or torch.equal(got, ref.unpack_int8(codes, scale, torch.float16))  # else by FMA
    bound = (scale.sum(0) / 2 * 1.01).repeat_interleave(128, 1)
    assert ((got.double() - xs.double().sum(0)).abs() <= bound + 2**-10 * got.abs()).all()


@pytest.mark.parametrize("rows", [4, 9])
def test_sums_in_int8_are_close_on_all_ranks(rows, monkeypatch):
    monkeypatch.setattr(peers_module, "INT8_BYTES", 2 * 4 * 256)
    meeting, xs = Meeting(4), torch.randn(4, rows, 256)

    def of_rank(rank):
        peers = ThreadPeers(rank, 4, meeting)
        peers.int8 = True
        return reduce(xs[rank], peers), reduce(xs[rank, :3], peers)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(of_rank, range(4)))
    want = xs[0] + xs[1] + xs[2] + xs[3]
    for long, short in results:
        assert torch.equal(long, results[0][0]) and torch.equal(short, want[:3])
        assert 0 < (long - want).abs().max() < 4 * 0.5 * 4.5 / 127


def test_operators():
    """Schemas, fakes, and the definition over a group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        peers = TensorParallelGroup(0, 1, torch.device("cpu"))
        words = Memory.of([0], 0, 8, 256, peers.device).words
        x = torch.randn(2, 3, 64)
        check_operator("all_reduce", (x, words, torch.float32))
        check_operator("pack_int8", (torch.randn(3, 256),))
        check_operator("unpack_int8", (*map(torch.stack, zip(ref.pack_int8(x[0].repeat(1, 2)))), x.dtype))
        check_operator("all_reduce_max", (torch.tensor([3, -4]), words))
        check_operator("add_rmsnorm", (x[0].clone(), x, x[0, 0], EPS, None, 0.0, 1.0, words))
        assert torch.equal(ref.all_reduce(x, words, torch.float16), x.sum(0).half())
        assert reduce_max(torch.tensor([3, -4]), peers).tolist() == [3, -4]
    finally:
        dist.destroy_process_group()
