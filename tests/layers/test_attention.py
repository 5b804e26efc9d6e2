"""Which norms of heads run together with RoPE, and the heads that a layer gives either way."""

from types import SimpleNamespace

import pytest
import torch

from qrt.kernels.attention_rule import AttentionRule
from qrt.layers.attention import Attention, Heads
from qrt.layers.linear import Linear
from qrt.layers.norm import LayerNorm, RMSNorm, WholeNorm
from qrt.quant.weight import WeightData

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM = 4, 2, 32
WEIGHT = torch.linspace(0.5, 2.0, DIM)


class Doubled(RMSNorm):
    def __call__(self, x):
        return 2 * super().__call__(x)


OTHERS = {
    "no norms": {"q_norm": None, "k_norm": None},
    "behind RoPE": {"early_rope": (torch.full((9, DIM // 2), 0.6), torch.full((9, DIM // 2), 0.8))},
    "clipped": {"clip": 0.5},
    "q scaled by position": {"q_scale": torch.linspace(1.0, 2.0, 9)},
    "LayerNorm": {"q_norm": LayerNorm(WEIGHT, None, 1e-5), "k_norm": LayerNorm(WEIGHT, None, 1e-5)},
    "one over all heads": {"q_norm": WholeNorm(RMSNorm(WEIGHT.repeat(HEADS), 1e-5))},
    "other eps": {"k_norm": RMSNorm(WEIGHT, 1e-6)},
    "other dtype": {"k_norm": RMSNorm(WEIGHT.half(), 1e-5)},
    "of another class": {"k_norm": Doubled(WEIGHT, 1e-5)},
}


def attention(**changes):
    norms = {"q_norm": RMSNorm(WEIGHT, 1e-5), "k_norm": RMSNorm(WEIGHT.flip(0), 1e-5)}
    linear = Linear.pack("fp16", WeightData(torch.eye(HEADS * DIM)), CPU, torch.float32)
    return Attention(linear, linear, Heads(HEADS, KV_HEADS, DIM, AttentionRule(1.0), **(norms | changes)))


def tokens():
    gen = torch.Generator().manual_seed(0)
    step = SimpleNamespace(positions=torch.tensor([1, 5, 8]), rope_positions=None)
    return torch.randn(3, (HEADS + 2 * KV_HEADS) * DIM, generator=gen), step


def test_norms_right_before_rope_run_with_it():
    layer, (qkv, step) = attention(), tokens()
    assert layer.norms.q is layer.spec.q_norm.weight and layer.norms.k is layer.spec.k_norm.weight
    assert layer.norms.eps == 1e-5
    raw = qkv.view(3, -1, DIM).split((HEADS, KV_HEADS, KV_HEADS), 1)
    assert all(map(torch.equal, layer.parts(qkv, step), raw))
    for got, x, weight in zip(layer.heads(qkv, step), raw, (WEIGHT, WEIGHT.flip(0), None), strict=True):
        wide = x.double()
        if weight is not None:
            wide = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        torch.testing.assert_close(got.double(), wide, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_other_norms_run_by_themselves(changes):
    layer, (qkv, step) = attention(**changes), tokens()
    assert layer.norms is None
    assert all(map(torch.equal, layer.parts(qkv, step), layer.heads(qkv, step)))
