"""Layers run fused against the plain ones: every weight scheme, KV format and mix of schemes.

Where there is no GPU the references of the kernels that only a Hopper GPU is given run too.
"""

import logging
from dataclasses import replace

import pytest
import torch

from cases import one_in
from hand_steps import Requests
from qrt.arch.read import read_arch
from qrt.kernels import chain
from qrt.kernels.peer_memory import Memory
from qrt.kernels.tensor_parallel import TensorParallelGroup
from qrt.layers.mlp import MLP
from qrt.model import fused, merged
from qrt.model.build import build
from qrt.model.decoder import Decoder
from qrt.model.fused import FusedDecoder
from qrt.model.merged import takes_int8
from qrt.model.random import RandomWeights
from qrt.quant.kv import KV_FORMATS
from qrt.quant.weight import WEIGHT_SCHEMES
from truth import prompt, relative

CPU = torch.device("cpu")
CONFIG = read_arch(
    {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 500,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "max_position_embeddings": 128,
    },
    "model",
)
LAST = 17  # requests that decode in the last step: one more than `chain` takes


def make(scheme, mix=(), config=CONFIG, device=CPU, dtype=torch.float32):
    """A fused decoder in `scheme`; `mix` are (part of a name, the scheme of such Linears)."""

    def grid(module):
        name = "fp16" if module == "lm_head" else scheme
        name = next((other for part, other in mix if part in module), name)
        return name, WEIGHT_SCHEMES[name].spec

    weights = RandomWeights(grid, device, dtype)
    return build(config, weights, progress="Making weights")


def plain(model):
    return Decoder(model.arch, model.embed, model.layers, model.norm, model.head, model.ropes)


def logits(model, kv="fp16"):
    """Of prompts, of decodes beside prompts, and of one to LAST decodes alone, after each step."""
    lengths = {0: 70, 1: 9} | dict.fromkeys(range(4, LAST), 3)
    requests = Requests(model, kv, num=LAST, max_len=80)
    steps = [[(i, n) for i, n in lengths.items()], [(0, 1), (1, 1), (2, 6), (3, 2)]]
    steps += [[(i, 1) for i in range(count)] for count in (1, 3, LAST - 1, LAST)]
    ran = []
    for step in steps:
        ran.append(torch.cat(requests.run([(i, prompt(n, seed=i, vocab=500)) for i, n in step])).cpu())
    return ran


def distance(model, kv="fp16", measure=relative):
    """The largest of all steps between fused and plain."""
    return max(map(measure, logits(model, kv), logits(plain(model), kv)))


def of_norms(ours, truth):
    """|ours - truth| / |truth|: what a rounding that went the other way does to one logit counts little."""
    return ((ours - truth).norm() / truth.norm()).item()


@pytest.fixture
def as_on_a_hopper_gpu(monkeypatch):
    """All that is chosen by what the GPU is and where tensors are: the operators' references run."""
    monkeypatch.setattr("qrt.kernels.linear._PACKED_ON_CPU", False)
    monkeypatch.setattr(chain, "is_hopper", lambda device: True)
    monkeypatch.setattr(chain, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(
        merged,
        "splits",
        lambda linear, x: takes_int8(linear) and linear.bias is None and len(x) <= merged.SPLIT_TOKENS,
    )
    monkeypatch.setattr(merged, "leaves_sums", lambda mixture, x: mixture.shared is None)


@pytest.fixture
def called(monkeypatch):
    """Names of the fused operators that run."""
    names = set()

    def note(name, operator):
        return lambda *args: names.add(name) or operator(*args)

    for module, operators in (
        (fused, ("chain", "from_attention", "to_attention", "append", "linear_act_int8")),
        (merged, ("linear_partial", "linear_int8_partial", "add_normed")),
    ):
        for name in operators:
            monkeypatch.setattr(module, name, note(name, getattr(module, name)))
    return names


@pytest.mark.parametrize(("scheme", "kv"), one_in(2, WEIGHT_SCHEMES, KV_FORMATS))
def test_fused_is_plain(scheme, kv):
    """Bit for bit: on a CPU the references of both round alike."""
    assert distance(make(scheme), kv) == 0


MIXES = {
    "down": [("down_proj", "fp16")],
    "gate and up": [("gate_proj", "fp16")],
    "o": [("o_proj", "w4a16")],
    "q, k and v": [("q_proj", "w4a16")],
    "a layer": [("layers.1.", "w8a16")],
}
BIASED = replace(CONFIG, name="LlamaForCausalLM", o_bias=True, mlp_bias=True)


@pytest.mark.parametrize("config", [CONFIG, BIASED], ids=["", "biased"])
@pytest.mark.parametrize("mix", MIXES)
def test_layers_of_several_schemes(mix, config):
    """Whichever of the products read codes: those of w8a8, and others beside them."""
    assert distance(make("w8a8", MIXES[mix], config), "int8") == 0


@pytest.mark.usefixtures("as_on_a_hopper_gpu")
@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
def test_biases_are_added_once(scheme, called):
    """By a product that is neither split nor chained."""
    assert distance(make(scheme, config=BIASED, dtype=torch.bfloat16)) < 0.02
    assert not called & {"chain", "linear_partial", "linear_int8_partial"}


@pytest.mark.usefixtures("as_on_a_hopper_gpu")
def test_a_layer_of_several_schemes_is_not_chained(called):
    assert distance(make("w4a16", MIXES["a layer"], dtype=torch.bfloat16)) < 0.02
    assert "chain" in called, "the last layer's parts are all alike"
    called.clear()
    assert distance(make("w4a16", MIXES["down"], dtype=torch.bfloat16)) < 0.02
    assert "chain" not in called


# norms behind blocks (alone or also in front), norms in fp32, scaled embeddings and blocks, other mlps;
# LayerNorm with bias, without and without weight, blocks side by side; experts, also beside a shared mlp,
# with sinks and biases, and such that read scaled input
OTHERS = {
    "Gemma2ForCausalLM": {}, "GemmaForCausalLM": {}, "Glm4ForCausalLM": {}, "Olmo2ForCausalLM": {},
    "Exaone4ForCausalLM": {}, "ArceeForCausalLM": {}, "PhiForCausalLM": {}, "CohereForCausalLM": {},
    "Starcoder2ForCausalLM": {}, "OlmoForCausalLM": {}, "GPTNeoXForCausalLM": {},
    "GraniteForCausalLM": {"residual_multiplier": 0.22, "embedding_multiplier": 12.0},
    # all experts are chosen, as another choice by another rounding would say nothing
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 4},
    "Qwen2MoeForCausalLM": {
        "num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "decoder_sparse_step": 2,
        "shared_expert_intermediate_size": 128},
    "GptOssForCausalLM": {
        "num_local_experts": 4, "num_experts_per_tok": 4, "sliding_window": 16,
        "rope_parameters": {"rope_type": "default"}},
    "Llama4ForCausalLM": {
        "num_local_experts": 2, "num_experts_per_tok": 2, "intermediate_size_mlp": 384, "floor_scale": 16,
        "interleave_moe_layer_step": 2, "no_rope_layer_interval": 3, "attention_chunk_size": 16},
}  # fmt: skip

AROUND_MIXTURES = {  # gpt-oss has a bias of o; each mixture but the last layer's leads to another attention
    "from_attention": {"MixtralForCausalLM", "Qwen2MoeForCausalLM", "Llama4ForCausalLM"},
    "to_attention": {
        "MixtralForCausalLM", "Qwen2MoeForCausalLM", "Llama4ForCausalLM", "GptOssForCausalLM"},
}  # fmt: skip


def other(name):
    """A small architecture of this name."""
    sizes = {
        "vocab_size": 500, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "max_position_embeddings": 128,
        "pad_token_id": 0,
    }  # fmt: skip
    return read_arch({"architectures": [name], **sizes, **OTHERS[name]}, "model")


def with_random_norms(model):
    """Norms of ones would hide which of them a row went through."""
    gen = torch.Generator(model.device).manual_seed(3)
    for layer in model.layers:
        for norm in (*layer.norms, layer.attention.spec.q_norm, layer.attention.spec.k_norm):
            for part in () if norm is None else norm.parameters():
                part.mul_(1 + torch.rand(part.shape, generator=gen, device=model.device))
    return model


@pytest.mark.parametrize(("name", "scheme"), one_in(3, OTHERS, ["fp16", "w4a16", "w8a8"]))
def test_other_layers_fused_are_plain(name, scheme):
    assert distance(with_random_norms(make(scheme, config=other(name))), "int8") == 0


@pytest.mark.usefixtures("as_on_a_hopper_gpu")
@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_for_a_gpu_are_plain(name, scheme, called):
    model = with_random_norms(make(scheme, config=other(name), dtype=torch.bfloat16))
    assert distance(model) < 0.04
    layer, chained = model.layers[0], model.fused[0].links.whole is not None
    assert ("chain" in called) == (scheme == "w4a16" and chained)
    for operator, names in AROUND_MIXTURES.items():
        assert (operator in called) == (scheme == "w4a16" and name in names)
    summed = layer.parallel or (scheme == "w4a16" and layer.norms.mlp_in is None)  # without a norm or codes
    assert ("add_normed" in called) == summed
    if scheme == "w8a8":
        assert ("linear_partial" in called) == (layer.attention.o.bias is None)


@pytest.mark.usefixtures("as_on_a_hopper_gpu")
@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_attention_that_appends_leaves_digits_for_a_mixture(tokens, monkeypatch):
    """For one token too."""
    passed, operator = [], fused.from_attention
    monkeypatch.setattr(fused, "_appends", lambda attention, q, step, kv: step.prefill is None)
    monkeypatch.setattr(fused, "from_attention", lambda x, *args: passed.append(len(x)) or operator(x, *args))
    model = make("w4a16", config=other("MixtralForCausalLM"), dtype=torch.bfloat16)
    requests = Requests(model, "fp16", num=tokens, max_len=8)
    for length, tensors in (3, 1), (1, 2):
        passed.clear()
        requests.run([(i, prompt(length, seed=i, vocab=500)) for i in range(tokens)])
        assert passed == [tensors] * 3 * (length * tokens <= 16)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_on_a_gpu_are_plain(name, scheme, device):
    model = with_random_norms(make(scheme, config=other(name), device=device, dtype=torch.bfloat16))
    assert distance(model, "int8", of_norms) < 0.03


@pytest.mark.parametrize("kv", KV_FORMATS)
def test_norms_of_heads_with_rope_are_those_before_it(kv):
    """Bit for bit what they give as operators of their own."""
    model = with_random_norms(make("fp16", config=replace(CONFIG, name="Qwen3ForCausalLM", qk_norm="head")))
    together = logits(model, kv)
    for layer in model.layers:
        assert layer.attention.norms is not None
        layer.attention.norms = None
    assert all(map(torch.equal, logits(model, kv), together))


class Doubled(MLP):
    """Stands in for a block that the fused kernels do not compute, such as experts or an adapter."""

    def __call__(self, x):
        return 2 * super().__call__(x)


def test_a_part_without_a_fused_kernel_is_named_and_runs_plainly(caplog):
    model = make("w4a16")
    last = model.layers[2]
    last.mlp = Doubled(last.mlp.gate_up, last.mlp.down)
    with caplog.at_level(logging.WARNING):
        assert FusedDecoder.of(plain(model)) is None
    assert "layer 2: mlp is a Doubled" in caplog.text
    assert max(map(relative, logits(plain(model)), logits(model))) > 0.01, "the fused one is not to be used"


def test_what_build_returns_runs_fused():
    model = make("w8a8")
    assert isinstance(model, FusedDecoder) and FusedDecoder.of(plain(model)) is not None
    assert isinstance(model.of_layers(2), FusedDecoder) and len(model.of_layers(2).fused) == 2


@pytest.mark.usefixtures("as_on_a_hopper_gpu")
@pytest.mark.parametrize(("scheme", "kv"), one_in(2, list(WEIGHT_SCHEMES), KV_FORMATS))
def test_fused_for_a_gpu_is_plain(scheme, kv, called):
    rounds = scheme == "w4a8"  # its plain layers round the few tokens that `chain` does not
    bound = 0.02 if not rounds else 0.2 if "4" in kv else 0.06
    assert distance(make(scheme, dtype=torch.bfloat16), kv) < bound
    chained = {"chain"} if scheme in ("w4a16", "w8a16", "w4a8") else set()
    int8 = (
        {"linear_partial", "linear_int8_partial", "linear_act_int8"} if scheme in ("w8a8", "w4a8") else set()
    )
    appended = {"append"} if KV_FORMATS[kv].appends else set()
    assert called == chained | int8 | appended


@pytest.mark.gpu
@pytest.mark.parametrize("kv", KV_FORMATS)
@pytest.mark.parametrize("scheme", WEIGHT_SCHEMES)
def test_fused_on_a_gpu_is_plain(scheme, kv, device):
    """In bf16; a K or V on the edge of a code may be stored as either neighbour."""
    model = make(scheme, device=device, dtype=torch.bfloat16)
    assert distance(model, kv) < (0.2 if "4" in kv else 0.05)


def test_ranks_whose_parts_differ_use_no_links(monkeypatch):
    """A chain on one rank would wait for a chain on another, which runs operators one by one."""
    links = fused.Links(whole=object())
    monkeypatch.setattr(fused.Links, "of", classmethod(lambda cls, *parts: links))
    monkeypatch.setattr(fused.Links, "fitting", lambda self, attended, residual: self)
    layer = make("w4a16").layers[0]
    layer.peers = TensorParallelGroup(0, 2, CPU)
    for others, kept in (([0b100100, 0b100100], True), ([0b100100, 0], False)):
        monkeypatch.setattr(layer.peers, "all_gather_int", lambda marks, others=others: [marks, *others[1:]])
        layer.peers.memory = Memory.of([0, 0], 0, 16, 1024, CPU)
        assert (fused.FusedLayer(layer, None, None).links is links) == kept
    layer.peers.memory = None
    monkeypatch.setattr(layer.peers, "all_gather_int", None)  # not asked
    assert fused.FusedLayer(layer, None, None).links is links
