"""`from_attention` and `to_attention`, which stand around a mixture, against fp64."""

import pytest
import torch
from operators import check_operator

from qrt.kernels import chain as package
from qrt.kernels.chain import (
    FromAttention,
    ToAttention,
    fits_from_attention,
    fits_to_attention,
    from_attention,
    kernel,
    ref,
    to_attention,
)
from qrt.kernels.linear.tiles.make_digits_kernel import make_digits
from qrt.quant.digits import MOST_TOKENS, room_for
from qrt.quant.weight import WEIGHT_SCHEMES
from random_weights import random_weight, reference, relative

EPS = 1e-5
CPU = torch.device("cpu")
# hidden, heads * head_dim, q and k and v; 30b: Qwen3-30B-A3B; ragged: tiles with half of their inputs
SIZES = {"30b": (2048, 4096, 5120), "small": (512, 256, 768), "ragged": (1152, 384, 1216)}
KINDS = {
    "plain": {},
    "behind": {"behind": True},
    "scaled": {"scale": 0.22},
    "wide": {"wide": True, "behind": True},
}


def weight(n, k, scheme="w4a16", group=128, dtype=torch.bfloat16, device=CPU, **others):
    """A random weight with zero points: in canonical form, and its run-time tensors."""
    kind = WEIGHT_SCHEMES[scheme]
    own = random_weight(n, k, kind.bits, group, symmetric=False, dtype=dtype, device=device, **others)
    return own, kind.prepare(own, torch.device(device), dtype)


def draw(*shape, device, dtype=torch.bfloat16, seed=0):
    gen = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=gen, device=device).to(dtype) + 0.3


def norms(hidden, device, dtype=torch.bfloat16, behind=False, wide=False, scale=1.0):
    """The weight of the norm in front of the next product, and the rest of a link."""
    own = [1 + draw(hidden, device=device, dtype=dtype, seed=seed) / 4 for seed in (5, 6)]
    if wide:
        own = [norm.float() * 1.001 for norm in own]  # no numbers of 16 bits
    return own[0], {"behind": own[1] if behind else None, "scale": scale}


def normal(y, weight):
    y = y.double()
    return y if weight is None else y / (y.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_memory", "copies")
@pytest.mark.ptx(name=["small"], kind=["plain", "wide"], tokens=[1, 9])
@pytest.mark.parametrize("tokens", [1, 3, 9, 16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SIZES)
def test_from_attention_matches_fp64(device, name, kind, tokens):
    """Whether what the heads attended comes as digits or not, bit for bit."""
    hidden, attended, _ = SIZES[name]
    canonical, o = weight(hidden, attended, device=device)
    norm, others = norms(hidden, device, **KINDS[kind])
    x, residual = draw(tokens, attended, device=device), draw(tokens, hidden, device=device, seed=1)
    sums = residual.double() + others["scale"] * normal(reference(x, canonical), others["behind"])
    ours, theirs = residual.clone(), residual.clone()
    got = kernel.from_attention([x], ours, o, norm, EPS, "w4a16", **others)
    assert got.dtype == x.dtype and relative(got, normal(sums, norm)) < 2**-7
    assert relative(ours, sums) < 2**-8
    codes, facts, _ = make_digits(x, room_for(tokens))
    assert torch.equal(kernel.from_attention([codes, facts], theirs, o, norm, EPS, "w4a16", **others), got)
    assert torch.equal(ours, theirs)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_memory", "copies")
@pytest.mark.ptx(name=["small"], kind=["plain", "wide"], tokens=[1, 9], experts=[0, 3])
@pytest.mark.parametrize("experts", [0, 3, 8])
@pytest.mark.parametrize("tokens", [1, 3, 9, 16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SIZES)
def test_to_attention_matches_fp64(device, name, kind, tokens, experts):
    """With the outputs of so many experts, or with their sum; with and without bias and norm in front."""
    hidden, _, width = SIZES[name]
    canonical, qkv = weight(width, hidden, device=device)
    norm, others = norms(hidden, device, **KINDS[kind])
    y, residual = draw(tokens, hidden, device=device), draw(tokens, hidden, device=device, seed=1)
    if experts:
        y = draw(experts, tokens, hidden, device=device, dtype=torch.float32)
    bias = draw(width, device=device, seed=2) if tokens > 1 else None
    norm = norm if tokens != 3 else None
    added = y.double().sum(0) if experts else y
    sums = residual.double() + others["scale"] * normal(added, others["behind"])
    want = reference(normal(sums, norm), canonical, bias)
    got = kernel.to_attention(y, residual, qkv, bias, norm, EPS, "w4a16", **others)
    assert got.dtype == residual.dtype and relative(got, want) < 2**-7
    assert relative(residual, sums) < 2**-8


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_layers_in_a_graph_give_the_same_bits_every_time(device, tokens):
    """Launches that follow each other share memory, and start before the one before is done."""
    hidden, attended, width = SIZES["30b"]
    norm, _ = norms(hidden, device)
    start = FromAttention(weight(hidden, attended, device=device)[1], norm, EPS, "w4a16")
    end = ToAttention(weight(width, hidden, device=device)[1], None, norm, EPS, "w4a16")
    x, residual = draw(tokens, attended, device=device), draw(tokens, hidden, device=device, seed=1)

    def layers(stream):
        y = x
        for _ in range(20):
            y = to_attention(from_attention([y], stream, start), stream, end)[:, :attended]
        return y

    alone = residual.clone()
    want = layers(alone)
    stream, graph = residual.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers(stream)
    for _ in range(50):
        stream.copy_(residual)
        graph.replay()
        assert torch.equal(out, want) and torch.equal(stream, alone)


def test_what_fits(monkeypatch):
    monkeypatch.setattr(package, "is_hopper", lambda device: True)

    def fits(tokens=16, hidden=512, attended=256, width=768, scheme="w4a16", dtype=torch.bfloat16, **others):
        """Whether the kernels take o, and whether they take qkv."""
        residual, norm = torch.zeros(tokens, hidden, dtype=dtype), torch.ones(hidden, dtype=dtype)
        o = weight(hidden, attended, scheme, **others)[1]
        qkv = weight(width, hidden, scheme, **others)[1]
        start = FromAttention(o, norm, EPS, scheme)
        end = ToAttention(qkv, torch.zeros(width), norm, EPS, scheme)
        return fits_from_attention(attended, residual, start), fits_to_attention(residual, end)

    assert fits() == fits(tokens=1) == (True, True)
    assert fits(tokens=MOST_TOKENS + 1) == fits(tokens=0) == (False, False)
    assert fits(dtype=torch.float16) == fits(scheme="w8a16") == (False, False)
    assert fits(perm=True) == fits(group=32) == (False, False)
    assert fits(attended=320, group=64) == (False, False)
    assert fits(attended=192, group=None) == (False, True)  # half a group of digits
    assert fits(hidden=576, group=None) == (True, False)
    assert fits(hidden=528, group=None) == (False, False)  # a quarter of a row block too
    assert fits(width=784) == (True, False)
    monkeypatch.setattr(package, "is_hopper", lambda device: False)
    assert fits() == (False, False)


@pytest.mark.parametrize("kind", KINDS)
def test_operators(kind):
    """The references in fp32."""
    dtype, tokens, (hidden, attended, width) = torch.float32, 5, SIZES["small"]
    (first, o), (last, qkv) = weight(hidden, attended, dtype=dtype), weight(width, hidden, dtype=dtype)
    norm, others = norms(hidden, CPU, dtype, **KINDS[kind])
    x, residual = (draw(tokens, size, device=CPU, dtype=dtype) for size in (attended, hidden))
    bias = draw(width, device=CPU, dtype=dtype, seed=2)
    check_operator("from_attention", ([x], residual.clone(), o, norm, EPS, "w4a16", *others.values()))
    sums = residual.double() + others["scale"] * normal(reference(x, first), others["behind"])
    got = ref.from_attention([x], residual, o, norm, EPS, "w4a16", **others)
    assert relative(got, normal(sums, norm)) < 1e-5 and relative(residual, sums) < 1e-5
    y = draw(3, tokens, hidden, device=CPU, dtype=dtype, seed=4)
    args = qkv, bias, norm, EPS, "w4a16", *others.values()
    check_operator("to_attention", (y, residual.clone(), *args))
    sums = residual.double() + others["scale"] * normal(y.sum(0), others["behind"])
    got = ref.to_attention(y, residual, *args)
    assert relative(got, reference(normal(sums, norm), last, bias)) < 1e-5
    assert relative(residual, sums) < 1e-5
