"""What is said of a model's products is what runs, for every scheme and number of tokens."""

import logging

import pytest
import torch

from fake_gpu import META, fake_gpu, meta_weight
from qrt.arch.read import read_arch
from qrt.kernels.linear.product import Epilogue, Kernel
from qrt.layers.linear import Linear
from qrt.model import fused, merged
from qrt.model.build import build
from qrt.model.links import Links
from qrt.model.products import CHAINED, ENDS, STARTS, explain_products
from qrt.model.random import RandomWeights
from qrt.offline.llm import LLM
from qrt.quant.weight import WEIGHT_SCHEMES

CONFIG = read_arch(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 3,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 128,
    },
    "model",
)  # fmt: skip
SIZES = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}


class MetaWeights:
    """A WeightSource of sizes without data; `mix` names other schemes by parts of a module's name."""

    device, dtype = META, torch.bfloat16

    def __init__(self, scheme, mix):
        self.scheme, self.mix = scheme, mix

    def linear(self, stack):
        scheme = next((to for part, to in self.mix.items() if part in stack.modules[0]), self.scheme)
        return Linear(scheme, meta_weight(scheme, stack.in_features, sum(stack.outs)))

    def head(self, stack, *, unit):
        return Linear("fp16", meta_weight("fp16", stack.in_features, sum(stack.outs)))

    def has(self, name):
        return False

    def tensor(self, name, shape):
        return torch.empty(shape, dtype=self.dtype, device=META)


def products(monkeypatch, scheme, tokens, mix=None, **gpu):
    """Return what is said of a model on a faked GPU, by product, first layer and least tokens."""
    fake_gpu(monkeypatch, **gpu)
    monkeypatch.setattr(
        merged, "splits", lambda linear, x: merged.takes_int8(linear) and len(x) <= merged.SPLIT_TOKENS
    )
    model = build(CONFIG, MetaWeights(scheme, mix or {}), progress="")
    return {(each.name, each.layers[:1], each.tokens[0]): each for each in explain_products(model, tokens)}


@pytest.mark.parametrize("scheme", list(WEIGHT_SCHEMES))
def test_every_product_and_number_of_tokens_is_explained_once(monkeypatch, scheme):
    tokens = [1, 2, 16, 17, 64, 65, 300]
    found = products(monkeypatch, scheme, tokens).values()
    told = [
        (each.name, layer, count)
        for each in found
        for layer in each.layers or ("head",)
        for count in tokens
        if each.tokens[0] <= count <= each.tokens[1]
    ]
    assert len(told) == len(set(told)) == len(tokens) * (3 * len(SIZES) + 1)
    assert {each.name: each.sizes for each in found} == SIZES | {"head": (4096, 128256)}
    assert {each.scheme for each in found} == {scheme, "fp16"}


def test_chained_layers_are_called_so(monkeypatch):
    """All but the first q, k and v, and with many tokens none."""
    found = products(monkeypatch, "w4a16", [1, 16, 17])
    chained = {key for key, each in found.items() if each.why == CHAINED}
    assert chained == {("qkv", (1,), 1), ("o", (0,), 1), ("gate_up", (0,), 1), ("down", (0,), 1)}
    assert found["o", (0,), 1].layers == (0, 1, 2) and found["o", (0,), 1].tokens == (1, 16)
    assert Kernel.DIGITS.value[1:] in found["qkv", (0,), 1].why
    elsewhere = products(monkeypatch, "w4a16", [1, 16], hopper=False, measured={})
    assert not any(each.why == CHAINED for each in elsewhere.values())


def test_int8_tokens_are_told_where_they_come_as_codes(monkeypatch):
    """The first norm gives 16 bits, which few tokens keep; the others give codes where there is no chain."""
    found = products(monkeypatch, "w4a8", [1, 16, 17], {"layers.1.self_attn.o_proj": "w8a16"})
    digits, codes = (kernel.value[1:] for kernel in (Kernel.DIGITS, Kernel.WIDE_INT8))
    assert digits in found["qkv", (0,), 1].why and codes in found["qkv", (0,), 17].why
    assert found["gate_up", (0,), 1].why == found["qkv", (1,), 1].why == CHAINED
    for key in (("gate_up", (1,), 1), ("down", (1,), 1), ("qkv", (2,), 1), ("o", (0,), 17)):
        assert codes in found[key].why, key


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
@pytest.mark.parametrize("tokens, own", [(5, {"qkv"}), (300, {"qkv", "down"})])
def test_products_behind_a_norm_or_act_take_codes(monkeypatch, scheme, tokens, own):
    """Those that are called plainly; what is left in split sums, and gate_up, takes codes in any case."""
    products(monkeypatch, scheme, [1], hopper=False, measured={})
    layer, called = build(CONFIG, MetaWeights(scheme, {}), progress="").fused[0], []
    plain = merged.linear_int8
    monkeypatch.setattr(merged, "linear_int8", lambda *args: called.append(args[2]) or plain(*args))
    sums = torch.empty(1, tokens, 4096, device=META)
    for name in ("linear_partial", "linear_int8_partial"):
        monkeypatch.setattr(merged, name, lambda *args: sums)
    residual = torch.empty(tokens, 4096, dtype=torch.bfloat16, device=META)
    layer.after_attention([torch.empty_like(residual)], residual, Links())
    weights = {"qkv": layer.next_qkv.tensors, "down": layer.layer.mlp.dense.down.tensors}
    assert {name for name, weight in weights.items() if any(weight is it for it in called)} == own
    assert len(called) == len(own)


def test_products_around_a_mixture_are_called_so(monkeypatch):
    fake_gpu(monkeypatch)
    monkeypatch.setattr("qrt.kernels.linear._PACKED_ON_CPU", False)
    sizes = {
        "vocab_size": 64, "hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "max_position_embeddings": 128,
        "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 128, "mlp_only_layers": [1],
    }  # fmt: skip
    config = read_arch({"architectures": ["Qwen3MoeForCausalLM"], **sizes}, "model")
    weights = RandomWeights(lambda name: ("w4a16", WEIGHT_SCHEMES["w4a16"].spec), torch.device("cpu"),
                            torch.bfloat16)  # fmt: skip
    told = list(explain_products(build(config, weights, progress=""), [1, 16, 17]))
    around = {(each.name, each.layers, each.tokens): each.why for each in told if "operator" in each.why}
    assert around == {
        ("o", (0, 2), (1, 16)): STARTS, ("qkv", (1,), (1, 16)): ENDS, ("qkv", (2,), (1, 16)): CHAINED,
        ("o", (1,), (1, 16)): CHAINED, ("gate_up", (1,), (1, 16)): CHAINED, ("down", (1,), (1, 16)): CHAINED,
    }  # fmt: skip


@pytest.mark.parametrize("scheme, mix, told", [
    ("w4a16", {}, True), ("w8a8", {}, True), ("w4a8", {}, True), ("w8a8", {"down_proj": "w8a16"}, False),
])  # fmt: skip
def test_act_is_told_of_gate_up_where_it_goes_with_it(monkeypatch, scheme, mix, told):
    found = products(monkeypatch, scheme, [100], mix)
    assert ("act(gate)" in found["gate_up", (0,), 100].why) is told
    assert not any("act(gate)" in each.why for each in found.values() if each.name != "gate_up")


def test_layers_of_another_scheme_are_told_apart(monkeypatch):
    found = products(monkeypatch, "w8a16", [300], {"layers.1.self_attn.o_proj": "w8a8"})
    lines = [str(each) for each in found.values() if each.name == "o"]
    assert [line.partition(":")[0] for line in lines] == [
        "o of layers 0, 2 (w8a16, 4096 x 4096), tokens 300", "o of layer 1 (w8a8, 4096 x 4096), tokens 300",
    ]  # fmt: skip


@pytest.mark.parametrize("scheme", list(WEIGHT_SCHEMES))
@pytest.mark.parametrize("tokens", [5, 300])
def test_epilogues_are_those_of_the_operators_that_run(monkeypatch, scheme, tokens):
    """The operators that a layer calls with these tokens, on a GPU without `chain`."""
    products(monkeypatch, scheme, [1], hopper=False, measured={})
    model = build(CONFIG, MetaWeights(scheme, {}), progress="")
    layer, called = model.fused[0], []

    def note(epilogue, operator):
        return lambda *args: called.append(epilogue) or operator(*args)

    for name in ("linear_act", "linear_act_int8"):
        monkeypatch.setattr(fused, name, note(Epilogue.ACT_MUL, getattr(fused, name)))
    sums = torch.empty(1, tokens, 4096, device=META)  # torch cannot tell how many splits there are
    for name in ("linear_partial", "linear_int8_partial"):
        monkeypatch.setattr(merged, name, note(Epilogue.PARTIAL_SUMS, lambda *args: sums))
    residual = torch.empty(tokens, 4096, dtype=torch.bfloat16, device=META)
    layer.after_attention([torch.empty_like(residual)], residual, Links())
    wanted = [each for each in layer.epilogues(residual).values() if each is not Epilogue.PLAIN]
    assert sorted(called, key=str) == sorted(wanted, key=str) and Epilogue.ACT_MUL in wanted


def test_debug_log_of_the_engine_has_a_line_per_weight_shape(caplog):
    with caplog.at_level(logging.DEBUG, "qrt.engine.build"):
        LLM("tiny", max_model_len=64)
    lines = [line for line in caplog.messages if "tokens 1 to" in line]
    assert [line.split()[0] for line in lines] == ["qkv", "o", "gate_up", "down", "head"]
    caplog.clear()
    with caplog.at_level(logging.INFO, "qrt.engine.build"):
        LLM("tiny", max_model_len=64)
    assert caplog.messages and not any("tokens 1 to" in line for line in caplog.messages)
