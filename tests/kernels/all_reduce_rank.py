"""A rank of the all-reduce's tests on several GPUs: python all_reduce_rank.py WHAT STORE RANK SIZE."""

import os
import random
import sys
import time
from pathlib import Path

import torch

from qrt.kernels.all_reduce import all_reduce, reduce_max, through
from qrt.kernels.all_reduce.choose import choose
from qrt.kernels.chain import Link, chain, fits
from qrt.kernels.rmsnorm import add_rmsnorm, add_rmsnorm_int8
from qrt.kernels.rmsnorm.kernel import add_rmsnorm_digits
from qrt.kernels.tensor_parallel import TensorParallelGroup
from qrt.quant.weight import WEIGHT_SCHEMES
from random_weights import random_weight, reference, relative

WIDTH, EPS = 8192, 1e-5
BF16 = torch.bfloat16


def everyones(peers: TensorParallelGroup, shape: tuple[int, ...], number: int) -> list[torch.Tensor]:
    """What each rank has, fp32; all ranks can make it."""
    made = [torch.Generator(peers.device).manual_seed(1000 * number + rank) for rank in range(peers.size)]
    return [torch.randn(shape, generator=one, device=peers.device) for one in made]


def same(peers: TensorParallelGroup, *results: torch.Tensor) -> None:
    """Assert that all ranks have the same bits."""
    for result in results:
        bits = result.contiguous().view(torch.uint8).long()
        weights = torch.arange(bits.numel(), device=bits.device).view(bits.shape) % 8191 + 1
        sums = peers.all_gather_int(int((bits * weights).sum()))
        assert len(set(sums)) == 1, sums


def check(peers: TensorParallelGroup) -> None:
    """Every form against fp64, and its bits on all ranks."""
    words = peers.memory.words
    weight = torch.rand(WIDTH, device=peers.device).add(0.5).to(BF16)
    peers.broadcast(weight)
    for number, tokens in enumerate((1, 2, 4, 5, 16, 33, peers.memory.rows) * 2):
        for partial_sums in (0, 3):
            xs = everyones(peers, (partial_sums, tokens, WIDTH) if partial_sums else (tokens, WIDTH), number)
            xs = xs if partial_sums else [x.to(BF16) for x in xs]
            mine = xs[peers.rank]
            before = everyones(peers, (tokens, WIDTH), 77)[0].to(BF16)
            total = sum((x.sum(0) if partial_sums else x).double() for x in xs)
            exact = before.double() + total
            bound = 2**-7 * (exact.abs() + peers.size * 8)
            residuals = [before.clone() for _ in range(3)]
            y = add_rmsnorm(residuals[0], mine, weight, EPS, None, 0.0, 1.0, words)
            codes, scale = add_rmsnorm_int8(residuals[1], mine, weight, EPS, None, 0.0, 1.0, words)
            alone = all_reduce(mine, words, BF16)
            results = [*residuals[:2], y, codes, scale, alone]
            if tokens <= 16:
                digits = add_rmsnorm_digits(residuals[2], mine, weight, EPS, 16, None, 1.0, words)
                normal = digits.read()
                assert ((normal - y).abs() <= 2**-7 * y.abs() + 1e-3 * normal.abs().amax()).all()
                results += [residuals[2], normal]
            for residual in residuals[: 2 + (tokens <= 16)]:
                assert ((residual.double() - exact).abs() <= bound).all()
            assert ((alone.double() - total).abs() <= bound).all()
            wide = residuals[0].double()
            want = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
            assert ((y.double() - want).abs() <= 2**-7 * want.abs() + 1e-6).all()
            assert ((codes * scale[:, None]).double() - want).abs().max() <= 0.02 * want.abs().max()
            same(peers, *results)
    for tokens in (512, 1001):
        xs = [x.to(BF16) for x in everyones(peers, (tokens, WIDTH), tokens)]
        whole = peers.all_gather(peers.reduce_scatter(xs[peers.rank]), tokens)
        want = sum(x.double() for x in xs)
        assert ((whole.double() - want).abs() <= peers.size * 2**-8 * (want.abs() + 4)).all()
        peers.int8 = True
        rounded, _ = through(xs[peers.rank], peers)
        peers.int8 = False
        bound = sum(x.float().abs().unflatten(1, (-1, 128)).amax(-1) for x in xs) / 250  # of half a step
        wrong = (rounded.double() - want).abs().unflatten(1, (-1, 128)).amax(-1)
        assert (wrong <= bound + 0.05).all() and wrong.max() > 0
        same(peers, whole, rounded)
    for tokens in (1, 31, 32, 100, peers.memory.rows, 1000):
        numbers = [torch.randint(-(2**62), 2**62, (tokens,), generator=torch.Generator().manual_seed(r))
                   & ~(1 << 31) for r in range(peers.size)]  # fmt: skip
        got = reduce_max(numbers[peers.rank].to(peers.device), peers)
        assert torch.equal(got.cpu(), torch.stack(numbers).amax(0))


def layer(peers: TensorParallelGroup) -> None:
    """A layer whose heads and inner channels are cut in parts, by `chain`."""
    hidden, attended, inner, width, words = 1024, 512, 1024, 768, peers.memory.words
    scheme, device = WEIGHT_SCHEMES["w4a16"], peers.device
    shapes = (hidden, attended), (2 * inner, hidden), (hidden, inner), (width, hidden)
    parts = [
        [random_weight(n, k, 4, 128, seed=10 * rank + i, symmetric=False, dtype=BF16, device=device)
         for i, (n, k) in enumerate(shapes)]
        for rank in range(peers.size)
    ]  # fmt: skip
    mine = [scheme.prepare(weight, device, BF16) for weight in parts[peers.rank]]
    norm = torch.ones(hidden, device=device, dtype=BF16)
    for tokens in (1, 2, 9, 16):
        xs = [x.to(BF16) for x in everyones(peers, (tokens, attended), tokens)]
        residual = everyones(peers, (tokens, hidden), 99)[0].to(BF16)
        want = residual.double() + sum(reference(x, w[0]) for x, w in zip(xs, parts, strict=True))
        outs = []
        for _, gate_up, down, _ in parts:
            gate, up = reference(normed(want), gate_up).chunk(2, -1)
            outs.append(reference(torch.nn.functional.silu(gate) * up, down))
        want = want + sum(outs)
        link = Link(*mine, None, norm, norm, EPS, "w4a16", peers=words)
        assert fits(attended, residual, link)
        got = chain([xs[peers.rank]], residual, link)
        assert relative(residual, want) < 2**-7
        assert relative(got, reference(normed(want), parts[peers.rank][3])) < 2**-6
        same(peers, residual)
    residual, graph = residual[:1].clone(), torch.cuda.CUDAGraph()
    peers.all_gather_int(0)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(20):  # of one token: its kernel leaves nothing behind that the next one reads
            residual.mul_(0.5)
            out = chain([xs[peers.rank][:1]], residual, link)
    dice = random.Random(peers.rank)
    for _ in range(200):
        graph.replay()
        if dice.random() < 0.1:
            time.sleep(dice.random() * 5e-3)
    torch.cuda.synchronize()
    assert residual.isfinite().all() and out.isfinite().all()
    same(peers, residual)


def normed(y: torch.Tensor) -> torch.Tensor:
    """Return the norm of y, fp64."""
    return y / (y.square().mean(-1, keepdim=True) + EPS).sqrt()


def soak(peers: TensorParallelGroup, launches: int = 100_000) -> None:
    """Replay a graph of all-reduces of several sizes, while each host sleeps as it likes."""
    words, sizes = peers.memory.words, (1, 7, 64, 2, 16, 1, 33, 5)
    weight = torch.ones(WIDTH, device=peers.device, dtype=BF16)
    xs = [[x.to(BF16) for x in everyones(peers, (tokens, WIDTH), tokens)] for tokens in sizes]
    residuals = [torch.zeros(tokens, WIDTH, device=peers.device, dtype=BF16) for tokens in sizes]
    word = torch.zeros(64, dtype=torch.int64, device=peers.device)
    results = []

    def step() -> None:
        word.add_(peers.rank + 1)
        for residual, x in zip(residuals, xs, strict=True):
            residual.mul_(0.5)
            results.append(add_rmsnorm(residual, x[peers.rank], weight, EPS, None, 0.0, 1.0, words))
        word.copy_(reduce_max(word, peers))

    step()
    graph = torch.cuda.CUDAGraph()
    results.clear()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(10):
            step()
    dice = random.Random(peers.rank)
    each = 10 * (len(sizes) + 1)
    for replay in range(-(-launches // each)):
        graph.replay()
        if dice.random() < 0.1:
            time.sleep(dice.random() * 5e-3)
        if replay % 12 == 0:
            same(peers, *residuals, word)
    same(peers, *residuals, *results, word)
    for residual, x in zip(residuals, xs, strict=True):  # r = r / 2 + x in the end: r = 2 x
        want = 2 * sum(one.double() for one in x)
        assert ((residual.double() - want).abs() <= 2**-5 * (want.abs() + 4)).all()


def stop(peers: TensorParallelGroup) -> None:
    """The last rank stops: the others end within the time that they are told."""
    weight = torch.ones(WIDTH, device=peers.device, dtype=BF16)
    x, residual = (torch.ones(3, WIDTH, device=peers.device, dtype=BF16) for _ in range(2))
    add_rmsnorm(residual, x, weight, EPS, None, 0.0, 1.0, peers.memory.words)
    peers.memory.wait(2.0)
    torch.cuda.synchronize()
    peers.all_gather_int(0)
    if peers.rank == peers.size - 1:
        time.sleep(8)
        os._exit(0)
    began = time.monotonic()
    try:
        add_rmsnorm(residual, x, weight, EPS, None, 0.0, 1.0, peers.memory.words)
        torch.cuda.synchronize()
    except RuntimeError as error:
        seconds = time.monotonic() - began
        print(f"stopped after {seconds:.2f} s: {str(error).splitlines()[0]}", flush=True)
        os._exit(3 if 1.5 < seconds < 6 else 4)
    os._exit(5)


def main(what: str, store: str, rank: int, size: int) -> None:
    """Run one of the tests as this rank."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    peers = TensorParallelGroup.join(Path(store), rank, size, device)
    with torch.inference_mode():
        peers.memory = choose(peers, WIDTH, "peer", BF16)
        {"check": check, "layer": layer, "soak": soak, "stop": stop}[what](peers)
        torch.cuda.synchronize()
    peers.all_gather_int(0)
    print("done", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
