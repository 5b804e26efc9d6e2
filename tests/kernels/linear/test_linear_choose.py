"""Test `choose`: which kernel multiplies, that it is the one that runs, and what `explain` says of it."""

import pytest
import torch

from fake_gpu import H200, META, fake_gpu, meta_weight
from qrt.kernels.linear import choose, explain, kernel, prepare
from qrt.kernels.linear.int8 import plans as int8_plans
from qrt.kernels.linear.product import Epilogue, Kernel
from qrt.kernels.linear.tiles import plans as tile_plans
from qrt.quant.tokens import QuantizedTokens
from qrt.quant.weight import WEIGHT_SCHEMES, WeightData
from random_weights import random_weight

BF16 = torch.bfloat16
LAUNCHED = {
    Kernel.NOTHING: set(), Kernel.TORCH: set(), Kernel.DEFINITION: set(), Kernel.FUSED: {"_fused"},
    Kernel.WIDE: {"wide"},
    Kernel.DIGITS: {"_make_digits", "_digits_product"}, Kernel.DEQUANTIZE: {"_dequantize"},
    Kernel.INT8_HOPPER: {"_hopper_int8"}, Kernel.INT8_BLOCK: {"multiply_rows"},
    Kernel.FEW_16_BIT: {"_hopper_16bit"}, Kernel.WIDE_INT8: {"wide"}, Kernel.TILES_INT8: {"_int8_tiles"},
}  # fmt: skip
A100 = {"hopper": False, "multiprocessors": 108, "measured": {}}
H20 = {"multiprocessors": 78, "measured": {}}


def inputs(tokens, k=4096, dtype=BF16):
    return torch.empty(tokens, k, dtype=dtype, device=META)


def quantized(tokens, k=4096):
    codes = torch.empty(tokens, k, dtype=torch.int8, device=META)
    return QuantizedTokens(codes, torch.empty(tokens, device=META), BF16)


@pytest.mark.parametrize("gpu", [{}, H20, A100], ids=["h200", "h20", "a100"])
@pytest.mark.parametrize("scheme", list(WEIGHT_SCHEMES))
@pytest.mark.parametrize("k, n", [(4096, 6144), (576, 960), (4096, 128256)])
def test_chosen_kernel_runs(monkeypatch, gpu, scheme, k, n):
    """Whatever is chosen, `linear` and `linear_act` launch it, and `act_mul` only where it is not joined."""
    launched, weight = fake_gpu(monkeypatch, **gpu), meta_weight(scheme, k, n)
    for tokens in (0, 1, 2, 16, 17, 64, 65, 300, 2048):
        x = inputs(tokens, k)
        for epilogue, multiply, act in (
            (Epilogue.PLAIN, kernel.linear, ()),
            (Epilogue.ACT_MUL, kernel.linear_act, ("silu",)),
        ):
            launched.clear()
            multiply(x, list(weight), None, scheme, *act)
            chosen = choose.choose(WEIGHT_SCHEMES[scheme], x, weight, epilogue)
            wanted = set(LAUNCHED[chosen.kernel])
            if tokens and WEIGHT_SCHEMES[scheme].int8_tokens and chosen.kernel is not Kernel.DIGITS:
                wanted.add("_quantize_tokens")
            if tokens and epilogue is Epilogue.ACT_MUL and not chosen.joined:
                wanted.add("_act_mul")
            assert set(launched) == wanted, (tokens, chosen)


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
@pytest.mark.parametrize("tokens", [1, 17, 300])
def test_silu_of_int8_tokens_is_joined_as_chosen(monkeypatch, scheme, tokens):
    launched, weight, x = fake_gpu(monkeypatch), meta_weight(scheme, 4096, 28672), quantized(tokens)
    kernel.linear_act_int8(x.codes, x.scale, list(weight), None, scheme, BF16, "silu")
    chosen = choose.choose(WEIGHT_SCHEMES[scheme], x, weight, Epilogue.ACT_MUL)
    last = "_quantize_tokens" if chosen.joined else "_act_mul_int8"
    assert set(launched) == {*LAUNCHED[chosen.kernel], last}


@pytest.mark.parametrize("scheme, tokens, gpu, kernel", [
    ("w4a16", 1, {}, Kernel.DIGITS), ("w4a16", 16, {}, Kernel.DIGITS), ("w4a16", 17, A100, Kernel.FUSED),
    ("w4a16", 65, H20, Kernel.WIDE), ("w4a16", 65, A100, Kernel.DEQUANTIZE), ("w8a16", 1, A100, Kernel.FUSED),
    ("w8a16", 2048, {}, Kernel.WIDE), ("w8a8", 2048, H20, Kernel.INT8_HOPPER),
    ("w8a8", 16, H20, Kernel.INT8_BLOCK), ("w8a8", 2048, A100, Kernel.INT8_BLOCK),
    ("w4a8", 16, {}, Kernel.DIGITS), ("w4a8", 17, {}, Kernel.WIDE_INT8), ("w4a8", 9, A100, Kernel.TILES_INT8),
    ("fp16", 300, {}, Kernel.TORCH), ("w4a16", 0, {}, Kernel.NOTHING), ("w8a8", 0, {}, Kernel.NOTHING),
])  # fmt: skip
def test_kernel_follows_tokens_and_gpu(monkeypatch, scheme, tokens, gpu, kernel):
    fake_gpu(monkeypatch, **gpu)
    assert choose.choose(WEIGHT_SCHEMES[scheme], inputs(tokens), meta_weight(scheme)).kernel is kernel


def test_few_or_many_16_bit_outputs_are_ours(monkeypatch):
    """All blocks of 6,144 rows run at once, 128,256 rows are many for each program; cuBLAS has the rest."""
    fake_gpu(monkeypatch)
    shapes = (4096, 6144), (4096, 128256), (4096, 28672), (14336, 4096)
    weights = [meta_weight("fp16", k, n) for k, n in shapes]
    found = [
        choose.choose(WEIGHT_SCHEMES["fp16"], torch.empty(1, k, dtype=torch.bfloat16, device="meta"), weight)
        for (k, _), weight in zip(shapes, weights, strict=True)
    ]
    ours, other = Kernel.FEW_16_BIT, Kernel.TORCH
    assert [product.kernel for product in found] == [ours, ours, other, other]


@pytest.mark.parametrize("scheme, key", [
    ("w8a16", tile_plans.tuning_key(4096, 6144, 8, 32)), ("w8a8", int8_plans.tuning_key(4096, 6144, 32)),
    ("w4a8", tile_plans.int8_tuning_key(4096, 6144, 32)),
])  # fmt: skip
def test_measured_plan_is_taken_and_called_so(monkeypatch, scheme, key):
    fake_gpu(monkeypatch)
    found = choose.choose(WEIGHT_SCHEMES[scheme], inputs(32), meta_weight(scheme))
    assert found.measured and list(found.plan) == [*H200[key][1:], *found.plan[len(H200[key]) - 1 :]]
    assert "was measured" in found.explain()
    fake_gpu(monkeypatch, measured={})
    assert "rule of thumb" in choose.choose(WEIGHT_SCHEMES[scheme], inputs(32), meta_weight(scheme)).explain()


def test_explanation_names_kernel_reason_and_epilogue(monkeypatch):
    fake_gpu(monkeypatch)
    weight = meta_weight("w4a16", 4096, 28672)
    said = explain(inputs(300), weight, "w4a16", Epilogue.ACT_MUL)
    assert Kernel.WIDE.value[1:] in said and "fastest for this shape" in said and "part of it" in said
    assert "a kernel of its own" in explain(inputs(4), weight, "w4a16", Epilogue.ACT_MUL)


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
@pytest.mark.parametrize("tokens", [9, 300])
def test_int8_scheme_is_explained_with_and_without_codes(monkeypatch, scheme, tokens):
    fake_gpu(monkeypatch)
    kind, weight = WEIGHT_SCHEMES[scheme], meta_weight(scheme, 4096, 28672)
    for x, coded in ((inputs(tokens), False), (quantized(tokens), True)):
        wanted = choose.choose(kind, x, weight, Epilogue.ACT_MUL)
        said = explain(inputs(tokens), weight, scheme, Epilogue.ACT_MUL, coded=coded)
        assert said == wanted.explain() and wanted.joined == coded


@pytest.mark.parametrize("scheme, dtype, said", [
    ("w4a16", BF16, "packed.py"), ("w8a16", BF16, "packed.py"), ("w4a16", torch.float32, "linear_ref"),
    ("w8a8", BF16, "quantized first"), ("fp16", BF16, "Torch multiplies"),
])  # fmt: skip
def test_cpu_is_explained_by_how_the_weight_lies(scheme, dtype, said):
    weight = WeightData(torch.randn(64, 128))
    if scheme != "fp16":
        weight = random_weight(64, 128, int(scheme[1]), dtype=dtype)
    tensors = prepare(scheme, weight, torch.device("cpu"), dtype)
    assert said in explain(torch.empty(3, 128, dtype=dtype), tensors, scheme)
