"""chain against its operators one by one, and both against fp64."""

import pytest
import torch
from offline_cuda import compiled
from operators import check_operator

from backends import GPU, PTX
from qrt.definitions.activations import ACTIVATIONS
from qrt.kernels import chain as package
from qrt.kernels.chain import Link, chain, fits, kernel, one_token_kernel, ref
from qrt.kernels.linear import choose
from qrt.kernels.linear.tiles import digits_kernel
from qrt.kernels.linear.tiles.make_digits_kernel import make_digits
from qrt.kernels.tensor_parallel import EXACT_TOKENS
from qrt.quant.digits import MOST_TOKENS, room_for
from qrt.quant.weight import WEIGHT_SCHEMES
from random_weights import random_weight, reference, relative
from rank_memory import Ranks, forked

EPS = 1e-5
# hidden, heads * head_dim, inner, q and k and v; odd: of units and of tiles, halves: half of a tile more,
# small: a few tiles, long: more of them than any product has on its way
SIZES = {
    "8b": (4096, 4096, 14336, 6144), "0.6b": (1024, 2048, 3072, 4096), "32b": (5120, 8192, 25600, 10240),
    "odd": (1040, 384, 1168, 592), "halves": (1152, 384, 1664, 1216), "small": (512, 256, 1024, 768),
    "long": (2816, 2048, 256, 128), "9b": (3584, 4096, 14336, 8192),
}  # fmt: skip

NAMES = [pytest.param(name, marks=[pytest.mark.alone] * (name == "32b")) for name in SIZES if name != "9b"]
WHOLE = [name for name in NAMES if name.values != ("odd",)]  # of groups of 128 inputs and of tiles


def four(sizes, bits, symmetric, device, group=128):
    hidden, attended, inner, width = sizes
    shapes = (hidden, attended), (2 * inner, hidden), (hidden, inner), (width, hidden)
    grid = {"symmetric": symmetric, "dtype": torch.bfloat16, "device": device}
    return [
        random_weight(n, k, bits, group if k % group == 0 else None, seed=i, **grid)
        for i, (n, k) in enumerate(shapes)
    ]


def operands(sizes, weights, scheme, device, dtype=torch.bfloat16, tokens=1, draw=0):
    gen = torch.Generator(device).manual_seed(9 + draw)
    hidden, attended, *_ = sizes
    x = torch.randn(tokens, attended, generator=gen, device=device).to(dtype) + 0.3  # as zero points meet
    residual = torch.randn(tokens, hidden, generator=gen, device=device).to(dtype)
    norms = [1 + torch.randn(hidden, generator=gen, device=device).to(dtype) / 4 for _ in range(2)]
    prepared = [WEIGHT_SCHEMES[scheme].prepare(w, torch.device(device), dtype) for w in weights]
    return x, residual, prepared, norms


def exact(x, residual, weights, norms, act="silu", attention_out=None, mlp_out=None, scale=1.0):
    """In fp64 without rounding: residual and result."""
    o, gate_up, down, qkv = weights

    def normal(y, weight):
        if weight is None:
            return y
        return y / (y.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()

    residual = residual.double() + scale * normal(reference(x, o), attention_out)
    gate, up = reference(normal(residual, norms[0]), gate_up).chunk(2, -1)
    y = reference(ACTIVATIONS[act](gate) * up, down)
    residual = residual + scale * normal(y, mlp_out)
    return residual, reference(normal(residual, norms[1]), qkv)


# what layers have beside Llama's: an activation, norms behind the blocks, none in front, fp32 norms, a scale
KINDS = {
    "llama": {},
    "wide": {"wide": True, "act": "gelu_tanh"},
    "both": {"wide": True, "behind": True, "act": "gelu_tanh"},
    "behind": {"behind": True, "front": False},
    "scaled": {"scale": 0.22, "act": "gelu"},
    "all": {"behind": True, "scale": 0.5, "act": "relu2"},
}


def layer(norms, behind=False, front=True, wide=False, scale=1.0, act="silu"):
    """The norms in front of gate_up and q, k and v, and what else a Link has."""
    if wide:
        norms = [norm.float() * 1.001 for norm in norms]  # no numbers of 16 bits
    out = [norm.flip(0).contiguous() / 2 for norm in norms] if behind else [None, None]
    others = {"act": act, "attention_out": out[0], "mlp_out": out[1], "scale": scale}
    return norms if front else [None, None], others


def check(sizes, bits, symmetric, device, tokens, spread=None, biased=False, kind="llama"):
    """No worse than the operators one by one, in 16 bits; `spread` multiplies inputs of x, `biased` q, k, v.

    Of one token in one draw the errors' ratio is 1 +- 0.07 (384 tokens of `small`), so that a GPU, which runs
    some thousand, judges by several draws.
    """
    weights = four(sizes, bits, symmetric, device)
    draws = [
        _errors(sizes, weights, bits, device, tokens, draw, spread, biased, kind)
        for draw in range(4 if GPU else 1)
    ]
    ours, theirs = torch.tensor(draws).square().mean(0).sqrt()
    assert ours[0] <= 1.05 * theirs[0] + 1e-4
    assert ours[1] <= 1.05 * theirs[1] + 1e-5
    assert (ours[2:] <= 1.25 * theirs[2:] + 1e-4).all()


def _errors(sizes, weights, bits, device, tokens, draw, spread, biased, kind):
    """Ours, the operators': of the result, of the residual, of each token of the result."""
    scheme = f"w{bits}a16"
    x, residual, prepared, norms = operands(sizes, weights, scheme, device, tokens=tokens, draw=draw)
    if spread is not None:
        x *= spread
    bias = torch.randn(sizes[3], device=device).to(x.dtype) if biased else None
    norms, others = layer(norms, **KINDS[kind])
    link = Link(*prepared, bias, *norms, EPS, scheme, **others)
    assert fits(x.shape[1], residual, link)
    want_residual, want = exact(x, residual, weights, norms, **others)
    want += 0 if bias is None else bias.double()
    ours, theirs = residual.clone(), residual.clone()
    got = kernel.chain([x], ours, *link)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits_kernel, "fits", lambda x, weight, bits: False)  # operators in 16 bits
        patch.setattr(choose, "configs", lambda device: {})  # that do not round the weights
        plain = ref.chain([x], theirs, *link)
    assert got.shape == want.shape and got.dtype == x.dtype
    return [
        [float(relative(y, want)), float(relative(residual, want_residual))]
        + [float(relative(y[t], want[t])) for t in range(tokens)]
        for y, residual in ((got, ours), (plain, theirs))
    ]


@pytest.mark.gpu
@pytest.mark.ptx(name=["small"], bits=[4], symmetric=[False])
@pytest.mark.ptx(name=["small"], bits=[8], symmetric=[True])
@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bits, symmetric", [(4, False), (4, True), (8, False), (8, True)])
def test_one_token_is_no_worse_than_the_operators(device, name, bits, symmetric):
    check(SIZES[name], bits, symmetric, device, 1)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_memory", "copies")
@pytest.mark.ptx(name=["long"], tokens=[7], bits=[8], symmetric=[True])
@pytest.mark.ptx(name=["long"], tokens=[16], bits=[4], symmetric=[False])
@pytest.mark.parametrize("tokens", [2, 7, 8, 9, 16])
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("bits, symmetric", [(4, False), (4, True), (8, False), (8, True)])
def test_few_tokens_are_no_worse_than_the_operators(device, name, bits, symmetric, tokens):
    check(SIZES[name], bits, symmetric, device, tokens)


@pytest.mark.gpu
@pytest.mark.usefixtures("copies")
@pytest.mark.ptx(name=["small"], kind=["both", "behind", "scaled"], tokens=[1])
@pytest.mark.ptx(name=["small"], kind=["both", "behind", "scaled"], tokens=[3])
@pytest.mark.parametrize(
    ("name", "tokens"),  # several tokens take whole groups, which "odd" does not have
    [("odd", 1), *((name, tokens) for name in ("small", "halves", "9b") for tokens in (1, 3, 16))],
)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "llama"])
def test_other_layers_are_no_worse_than_the_operators(device, kind, name, tokens):
    check(SIZES[name], 4, False, device, tokens, kind=kind)


@pytest.mark.gpu
@pytest.mark.ptx(name=["small"], tokens=[1, 16])
@pytest.mark.parametrize("tokens", [1, 8, 16])
@pytest.mark.parametrize("name", ["small", "halves", "0.6b"])
def test_bias_of_q_k_and_v(device, name, tokens):
    check(SIZES[name], 4, False, device, tokens, biased=True)


@pytest.mark.gpu
@pytest.mark.ptx(tokens=[3])
@pytest.mark.parametrize("tokens", [3, 16])
def test_what_comes_as_digits(device, tokens):
    """Is what they are made of, bit for bit."""
    sizes = SIZES["small"]
    x, residual, prepared, norms = operands(
        sizes, four(sizes, 4, False, device), "w4a16", device, tokens=tokens
    )
    ours, theirs = residual.clone(), residual.clone()
    codes, facts, _ = make_digits(x, room_for(tokens))
    got = kernel.chain([codes, facts], ours, *prepared, None, *norms, EPS, "w4a16")
    assert torch.equal(got, kernel.chain([x], theirs, *prepared, None, *norms, EPS, "w4a16"))
    assert torch.equal(ours, theirs)
    plain = ref.chain([codes, facts], residual, *prepared, None, *norms, EPS, "w4a16")
    assert relative(plain, got) < 2**-7


@pytest.mark.gpu
@pytest.mark.parametrize("inputs, times", [((5, None, 1024), 1e3), ((0, 128), 1e3), ((128, 384), 0.0)])
def test_inputs_far_apart(device, inputs, times):
    """One input in a thousand or a group of them huge, as down has them; groups of zeros."""
    sizes = SIZES["8b"]
    spread = torch.ones(sizes[1], device=device, dtype=torch.bfloat16)
    spread[slice(*inputs)] = times
    check(sizes, 4, False, device, 16, spread)


@pytest.mark.gpu
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_input_affects_only_its_token(device, value):
    sizes = SIZES["0.6b"]
    x, residual, prepared, norms = operands(sizes, four(sizes, 4, False, device), "w4a16", device, tokens=9)
    link = Link(*prepared, None, *norms, EPS, "w4a16")
    want = chain([x], residual.clone(), link)
    x[3, 200] = value
    got = chain([x], residual, link)
    assert not got[3].isfinite().any()
    others = [t for t in range(9) if t != 3]
    assert torch.equal(got[others], want[others])


@pytest.mark.gpu
@pytest.mark.ptx(name=["small"])
@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("name", WHOLE)
def test_behind_the_last_layer(device, name, tokens):
    """Without qkv: the norm, and the residual is the same bit for bit."""
    weights = four(SIZES[name], 4, False, device)
    x, residual, (*prepared, qkv), norms = operands(SIZES[name], weights, "w4a16", device, tokens=tokens)
    last = Link(*prepared, [], None, *norms, EPS, "w4a16")
    assert fits(x.shape[1], residual, last)
    ours, theirs = residual.clone(), residual.clone()
    got = chain([x], ours, last)
    chain([x], theirs, last._replace(qkv=qkv))
    assert torch.equal(ours, theirs)
    want = ours.double()
    want = want / (want.square().mean(-1, keepdim=True) + EPS).sqrt() * norms[1].double()
    assert got.shape == want.shape and relative(got, want) < 2**-7


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_layers_in_a_graph_give_the_same_bits_every_time(device, tokens):
    """Launches that follow each other share counters and slots, and start before the one before is done."""
    sizes, scheme = SIZES["8b"], "w4a16"
    x, residual, prepared, norms = operands(
        sizes, four(sizes, 4, False, device), scheme, device, tokens=tokens
    )

    link = Link(*prepared, None, *norms, EPS, scheme)

    def layers(stream, count):
        y = x
        for _ in range(count):
            y = chain([y[:, : x.shape[1]]], stream, link)
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
    monkeypatch.setattr(package, "multiprocessors", lambda device: 2)
    weights = four(SIZES["odd"], 4, False, device)
    x, residual, prepared, norms = operands(SIZES["odd"], weights, "w4a16", device)
    link = Link(*prepared, None, *norms, EPS, "w4a16")
    assert fits(x.shape[1], residual, link)
    assert not fits(x.shape[1], residual.repeat(2, 1), link)
    assert not fits(x.shape[1], residual.half(), link)
    assert fits(x.shape[1], residual, link._replace(bias=residual[0]))
    for bits, group, perm, dtype in (
        (4, 32, False, torch.bfloat16),
        (4, 128, True, torch.bfloat16),
        (4, 128, False, torch.float32),
        (8, 64, False, torch.bfloat16),  # half of the inputs of a token's scale
    ):
        scheme = WEIGHT_SCHEMES[f"w{bits}a16"]
        other = random_weight(592, 1024, bits, group, symmetric=False, dtype=dtype, perm=perm, device=device)
        tensors = scheme.prepare(other, torch.device(device), torch.bfloat16)
        assert not fits(x.shape[1], residual, link._replace(qkv=tensors, scheme=scheme.name))
    whole, most = SIZES["halves"], MOST_TOKENS
    for bits, tokens, sizes, want in (
        (4, 2, whole, True),
        (4, most, whole, True),
        (4, most + 1, whole, False),
        (8, 1, whole, True),
        (8, 2, whole, True),
        (4, 2, SIZES["odd"], False),
        (4, 2, (1152, 320, 1664, 1216), False),  # half a group of o's inputs
        (4, 2, (1152, 384, 1600, 1216), False),  # of down's
        (4, 2, (1152, 384, 1664, 1232), False),  # a quarter of a row block of q and k and v
    ):
        weights, scheme = four(sizes, bits, False, device), f"w{bits}a16"
        few, stream, tensors, own = operands(sizes, weights, scheme, device, tokens=tokens)
        found = fits(few.shape[1], stream, Link(*tensors, None, *own, EPS, scheme))
        assert found == want, (bits, tokens, sizes)
    monkeypatch.setattr(package, "multiprocessors", lambda device: 1)  # 73 units of down's inputs
    assert not fits(x.shape[1], residual, link)
    monkeypatch.setattr(package, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(package, "is_hopper", lambda device: False)
    assert not fits(x.shape[1], residual, link)


def test_operator():
    sizes, device = (64, 32, 48, 96), torch.device("cpu")  # fp32 is not the kernel's
    weights = [
        random_weight(n, k, 4, symmetric=False, device=device)
        for n, k in ((64, 32), (96, 64), (64, 48), (96, 64))
    ]
    x, residual, prepared, norms = operands(sizes, weights, "w4a16", device, torch.float32)
    want_residual, want = exact(x, residual, weights, norms)
    args = ([x], residual, *prepared, None, *norms, EPS, "w4a16")
    check_operator("chain", args)
    x, residual, prepared, norms = operands(sizes, weights, "w4a16", device, torch.float32)
    bias = torch.randn(96)
    got = ref.chain([x], residual, *prepared, bias, *norms, EPS, "w4a16")
    assert relative(got, want + bias) < 1e-5 and relative(residual, want_residual) < 1e-5
    x, residual, prepared, norms = operands(sizes, weights, "w4a16", device, torch.float32)
    own, others = layer(norms, **KINDS["both"])
    args = ([x], residual.clone(), *prepared, None, *own, EPS, "w4a16", *others.values())
    check_operator("chain", args)
    residual_now, (want_residual_now, want_now) = residual.clone(), exact(x, residual, weights, own, **others)
    got = ref.chain([x], residual_now, *args[2:])
    assert relative(got, want_now) < 1e-5 and relative(residual_now, want_residual_now) < 1e-5
    args = ([x], residual, *prepared[:3], [], None, *norms, EPS, "w4a16")
    check_operator("chain", args)
    got = ref.chain(*args)
    want = residual.double()
    want = want / (want.square().mean() + EPS).sqrt() * norms[1].double()
    assert relative(got, want) < 1e-5 and relative(residual, want_residual) < 1e-5


CODE = """
import torch
from qrt.kernels.chain import MOST_INPUTS, MOST_UNITS, UNIT, kernel, one_token_kernel
from qrt.kernels.linear.tiles import digits_kernel
from qrt.kernels.peer_memory import Memory
from qrt.quant.weight import WEIGHT_SCHEMES
from random_weights import random_weight

BF16, CPU = torch.bfloat16, torch.device("cpu")
one_token_kernel.multiprocessors = digits_kernel.multiprocessors = lambda device: 132
for bits, symmetric in ((4, False), (4, True), (8, True)):
    scheme = f"w{bits}a16"
    weights = []
    for n, k in ((512, 256), (2048, 512), (512, 1024), (768, 512)):
        weight = random_weight(n, k, bits, 128, symmetric=symmetric, dtype=BF16)
        weights.append(WEIGHT_SCHEMES[scheme].prepare(weight, CPU, BF16))
    norm = torch.empty(512, dtype=BF16)
    for tokens in (1, 8, 16):
        x, residual = torch.empty(tokens, 256, dtype=BF16), norm.repeat(tokens, 1)
        for qkv in weights[3], []:
            kernel.chain([x], residual, *weights[:3], qkv, None, norm, norm, 1e-5, scheme)
        wide = norm.float()
        kernel.chain([x], residual, *weights, None, wide, wide, 1e-5, scheme, "gelu_tanh", norm, norm, 0.5)
peers = Memory.of([16, 32], 0, 16, 32768, CPU).words
kernel.chain([x[:1]], norm[None], *weights, None, norm, norm, 1e-5, scheme, "silu", None, None, 1.0, peers)
one_token_kernel.multiprocessors = lambda device: MOST_INPUTS // UNIT // MOST_UNITS
weights = []  # what takes most shared memory
for n, k in ((128, 256), (2 * MOST_INPUTS, 128), (128, MOST_INPUTS), (256, 128)):
    weight = random_weight(n, k, 4, 128, symmetric=False, dtype=BF16)
    weights.append(WEIGHT_SCHEMES["w4a16"].prepare(weight, CPU, BF16))
x, norm = torch.empty(1, 256, dtype=BF16), torch.empty(128, dtype=BF16)
kernel.chain([x], norm[None], *weights, None, norm, norm, 1e-5, "w4a16")
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile for the GPU that is here")
def test_kernel_compiles():
    products = 3 * 2 * 4  # of weights; 8 or 16 tokens; plain, shares, gated with silu and with gelu
    assert compiled(CODE) == {"_one_token": 11, "_make_digits": 2, "_digits_product": products, "_rmsnorm": 5}


@pytest.mark.gpu
@pytest.mark.ptx(tokens=[9], qkv=[True])
@pytest.mark.parametrize("tokens", [2, 9])
@pytest.mark.parametrize("qkv", [True, False])
def test_products_are_summed_over_ranks(device, tokens, qkv):
    """What another rank has of o and of down lies in the memory when the kernels look for it."""
    sizes = SIZES["small"]
    weights = four(sizes, 4, False, device)
    x, residual, prepared, norms = operands(sizes, weights, "w4a16", device, tokens=tokens)
    parts = [torch.randn_like(residual) for _ in range(2)]
    ranks = Ranks(2, sizes[0], device, rows=16)
    sums = [part.float() if tokens <= EXACT_TOKENS else part for part in parts]
    for part in sums:
        ranks.arrive(0, [None, part])
        ranks.counts[0] += 1
    ranks.counts[0].zero_()
    args = *prepared[:3], prepared[3] if qkv else [], None, *norms, EPS, "w4a16"
    link = Link(*args, peers=ranks.memories[0].words)
    assert fits(x.shape[1], residual, link)
    want_residual, want = residual.double() + reference(x, weights[0]) + parts[0].double(), None
    gate, up = reference(normed(want_residual, norms[0]), weights[1]).chunk(2, -1)
    want_residual = want_residual + reference(ACTIVATIONS["silu"](gate) * up, weights[2]) + parts[1].double()
    want = normed(want_residual, norms[1])
    got = kernel.chain([x], residual, *link)
    assert relative(residual, want_residual) < 2**-8 and ranks.is_empty(0)
    assert relative(got, reference(want, weights[3]) if qkv else want) < 2**-6


def normed(y, weight):
    return y / (y.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.skipif(not PTX, reason="test_all_reduce_gpu has processes that meet on GPUs")
@pytest.mark.ptx
def test_one_token_of_two_ranks_that_wait_for_each_other(device, monkeypatch):
    """Twice, as what one launch leaves behind meets the next one; on all ranks the same bits."""
    monkeypatch.setattr(one_token_kernel, "multiprocessors", lambda device: 2)
    sizes = 256, 128, 256, 128
    weights = four(sizes, 4, False, device)
    x, residual, prepared, norms = operands(sizes, weights, "w4a16", device)
    ranks = Ranks(2, sizes[0], device, rows=4, shared=True)
    residuals = residual.repeat(2, 1, 1).share_memory_()
    results = torch.zeros(2, 1, sizes[3]).to(x.dtype).share_memory_()
    xs = [x, x.flip(1).contiguous()]
    with forked() as rank:
        link = Link(*prepared, None, *norms, EPS, "w4a16", peers=ranks.memories[rank].words)
        assert fits(x.shape[1], residual, link)
        for _ in range(2):
            results[rank] = kernel.chain([xs[rank]], residuals[rank], *link)
    want = residual.double()
    for _ in range(2):
        want = want + sum(reference(own, weights[0]) for own in xs)
        gate, up = reference(normed(want, norms[0]), weights[1]).chunk(2, -1)
        want = want + 2 * reference(ACTIVATIONS["silu"](gate) * up, weights[2])
    assert torch.equal(*residuals) and relative(residuals[0], want) < 2**-7
    assert relative(results[0], reference(normed(want, norms[1]), weights[3])) < 2**-6
    assert torch.equal(*results)
