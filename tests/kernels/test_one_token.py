"""one_token against its operators one by one, and both against fp64."""

import pytest
import torch
from torch.nn import functional as F

from offline_cuda import compiled
from qrt.kernels import one_token as package
from qrt.kernels.one_token import fits, one_token, ref
from qrt.quant.weight import WEIGHT_SCHEMES
from random_weights import random_weight, reference, relative

EPS = 1e-5
# hidden, heads * head_dim, inner, q and k and v; odd: of units and of tiles
SIZES = {
    "8b": (4096, 4096, 14336, 6144), "0.6b": (1024, 2048, 3072, 4096), "32b": (5120, 8192, 25600, 10240),
    "odd": (1040, 384, 1168, 592),
}  # fmt: skip


def four(sizes, bits, symmetric, device, group=128):
    hidden, attended, inner, width = sizes
    shapes = (hidden, attended), (2 * inner, hidden), (hidden, inner), (width, hidden)
    grid = {"symmetric": symmetric, "dtype": torch.bfloat16, "device": device}
    return [
        random_weight(n, k, bits, group if k % group == 0 else None, seed=i, **grid)
        for i, (n, k) in enumerate(shapes)
    ]


def operands(sizes, weights, scheme, device, dtype=torch.bfloat16):
    gen = torch.Generator(device).manual_seed(9)
    hidden, attended, *_ = sizes
    x = torch.randn(1, attended, generator=gen, device=device).to(dtype) + 0.3  # a mean, as zero points meet
    residual = torch.randn(1, hidden, generator=gen, device=device).to(dtype)
    norms = [1 + torch.randn(hidden, generator=gen, device=device).to(dtype) / 4 for _ in range(2)]
    prepared = [WEIGHT_SCHEMES[scheme].prepare(w, torch.device(device), dtype) for w in weights]
    return x, residual, prepared, norms


def exact(x, residual, weights, norms):
    """In fp64 without rounding: residual and result."""
    o, gate_up, down, qkv = weights

    def normal(y, weight):
        return y / (y.square().mean() + EPS).sqrt() * weight.double()

    residual = residual.double() + reference(x, o)
    gate, up = reference(normal(residual, norms[0]), gate_up).chunk(2, -1)
    residual = residual + reference(F.silu(gate) * up, down)
    return residual, reference(normal(residual, norms[1]), qkv)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("bits, symmetric", [(4, False), (4, True), (8, False), (8, True)])
def test_no_worse_than_the_operators(device, name, bits, symmetric):
    sizes, scheme = SIZES[name], f"w{bits}a16"
    weights = four(sizes, bits, symmetric, device)
    x, residual, prepared, norms = operands(sizes, weights, scheme, device)
    assert fits(residual, prepared, [None] * 4, scheme)
    want_residual, want = exact(x, residual, weights, norms)
    ours, theirs = residual.clone(), residual.clone()
    got = one_token(x, ours, *prepared, *norms, EPS, scheme)
    plain = ref.one_token(x, theirs, *prepared, *norms, EPS, scheme)
    assert got.shape == want.shape and got.dtype == x.dtype
    assert relative(got, want) <= 1.05 * relative(plain, want) + 1e-4
    assert relative(ours, want_residual) <= 1.05 * relative(theirs, want_residual) + 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("name", SIZES)
def test_behind_the_last_layer(device, name):
    """Without qkv: the norm, and the residual is the same bit for bit."""
    weights = four(SIZES[name], 4, False, device)
    x, residual, (*prepared, qkv), norms = operands(SIZES[name], weights, "w4a16", device)
    assert fits(residual, prepared, [None] * 3, "w4a16")
    ours, theirs = residual.clone(), residual.clone()
    got = one_token(x, ours, *prepared, [], *norms, EPS, "w4a16")
    one_token(x, theirs, *prepared, qkv, *norms, EPS, "w4a16")
    assert torch.equal(ours, theirs)
    want = ours.double()
    want = want / (want.square().mean() + EPS).sqrt() * norms[1].double()
    assert got.shape == want.shape and relative(got, want) < 2**-7


@pytest.mark.gpu
def test_layers_in_a_graph_give_the_same_bits_every_time(device):
    """Launches that follow each other share counters and slots, and start before the one before is done."""
    sizes, scheme = SIZES["8b"], "w4a16"
    x, residual, prepared, norms = operands(sizes, four(sizes, 4, False, device), scheme, device)

    def layers(stream, count):
        y = x
        for _ in range(count):
            y = one_token(y[:, : x.shape[1]], stream, *prepared, *norms, EPS, scheme)
        return y

    alone = residual.clone()
    want = layers(alone, 20)
    stream, graph = residual.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers(stream, 20)
    for _ in range(50):
        stream.copy_(residual)
        graph.replay()
        assert torch.equal(out, want) and torch.equal(stream, alone)


def test_what_fits(device, monkeypatch):
    monkeypatch.setattr(package, "is_hopper", lambda device: True)
    weights = four(SIZES["odd"], 4, False, device)
    x, residual, prepared, _ = operands(SIZES["odd"], weights, "w4a16", device)
    none = [None] * 4
    assert fits(residual, prepared, none, "w4a16")
    assert not fits(residual.repeat(2, 1), prepared, none, "w4a16")
    assert not fits(residual.half(), prepared, none, "w4a16")
    assert not fits(residual, prepared, [None, None, None, residual[0]], "w4a16")
    for group, perm, dtype in (
        (32, False, torch.bfloat16),
        (128, True, torch.bfloat16),
        (128, False, torch.float32),
    ):
        other = random_weight(592, 1024, 4, group, symmetric=False, dtype=dtype, perm=perm, device=device)
        tensors = WEIGHT_SCHEMES["w4a16"].prepare(other, torch.device(device), torch.bfloat16)
        assert not fits(residual, [*prepared[:3], tensors], none, "w4a16")
    monkeypatch.setattr(package, "is_hopper", lambda device: False)
    assert not fits(residual, prepared, none, "w4a16")


def test_operator():
    sizes, device = (64, 32, 48, 96), torch.device("cpu")  # fp32 is not the kernel's
    weights = [
        random_weight(n, k, 4, symmetric=False, device=device)
        for n, k in ((64, 32), (96, 64), (64, 48), (96, 64))
    ]
    x, residual, prepared, norms = operands(sizes, weights, "w4a16", device, torch.float32)
    want_residual, want = exact(x, residual, weights, norms)
    args = (x, residual, *prepared, *norms, EPS, "w4a16")
    names = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.qrt.one_token.default, args, test_utils=names)
    x, residual, prepared, norms = operands(sizes, weights, "w4a16", device, torch.float32)
    got = ref.one_token(x, residual, *prepared, *norms, EPS, "w4a16")
    assert relative(got, want) < 1e-5 and relative(residual, want_residual) < 1e-5
    x, residual, prepared, norms = operands(sizes, weights, "w4a16", device, torch.float32)
    args = (x, residual, *prepared[:3], [], *norms, EPS, "w4a16")
    torch.library.opcheck(torch.ops.qrt.one_token.default, args, test_utils=names)
    got = ref.one_token(*args)
    want = residual.double()
    want = want / (want.square().mean() + EPS).sqrt() * norms[1].double()
    assert relative(got, want) < 1e-5 and relative(residual, want_residual) < 1e-5


CODE = """
import torch
from qrt.kernels.one_token import kernel
from qrt.quant.weight import WEIGHT_SCHEMES
from random_weights import random_weight

BF16, CPU = torch.bfloat16, torch.device("cpu")
kernel.multiprocessors = lambda device: 132
for bits, symmetric in ((4, False), (8, True)):
    scheme = f"w{bits}a16"
    weights = []
    for n, k in ((512, 256), (2048, 512), (512, 1024), (768, 512)):
        weight = random_weight(n, k, bits, 128, symmetric=symmetric, dtype=BF16)
        weights.append(WEIGHT_SCHEMES[scheme].prepare(weight, CPU, BF16))
    norm = torch.empty(512, dtype=BF16)
    x = torch.empty(1, 256, dtype=BF16)
    for qkv in weights[3], []:
        kernel.one_token(x, norm[None], *weights[:3], qkv, norm, norm, 1e-5, scheme)
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile for the GPU that is here")
def test_kernel_compiles():
    assert compiled(CODE) == {"_one_token": 4}
