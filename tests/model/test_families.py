"""Every registered architecture beside transformers: logits and greedy tokens, beyond every window."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import transformers.models.auto.modeling_auto as auto
from safetensors.torch import load_file, save_file

from hand_steps import Requests
from qrt.arch import ARCHS
from qrt.model.build import norm_layer
from qrt.model.fused import FusedDecoder
from qrt.quant.kv import KV_FORMATS
from ranks import Ranks, loaded
from truth import ours, relative
from zoo import MODELS, WINDOW, make

PROMPT = torch.randint(4, 512, (40,), generator=torch.Generator().manual_seed(7)).tolist()
STEPS = 12
PLAIN = {"apertus"}  # architectures whose layers run one operator at a time
JUMPS = {
    "phimoe",
    "phimoe-published",
}  # whose experts' weights jump where logits come close to each other, by rounding too


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory):
    """The name, transformers' model, and qrt's of the same folder; and the folder."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make(request.param, folder)
    return request.param, model, ours(folder), folder


@torch.inference_mode()
def truth(model, tokens):
    """Return transformers' logits [T, V]."""
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()


def log_probabilities(logits, tokens):
    return logits[:-1].log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def test_prompt_and_greedy_tokens_are_those_of_transformers(case):
    """A prompt in two chunks, then decodes one by one; one forward of transformers checks them all."""
    name, model, decoder, _ = case
    assert len(PROMPT) > 2 * WINDOW and isinstance(decoder, FusedDecoder) == (name not in PLAIN)
    requests = Requests(decoder)
    logits = [requests.run([(0, PROMPT[:23])])[0], requests.run([(0, PROMPT[23:])])[0]]
    tokens = [int(logits[-1][-1].argmax())]
    for _ in range(STEPS - 1):
        logits.append(requests.run([(0, tokens[-1:])])[0])
        tokens.append(int(logits[-1][-1].argmax()))
    whole = PROMPT + tokens[:-1]
    want = truth(model, whole)
    error = (log_probabilities(torch.cat(logits), whole) - log_probabilities(want, whole)).abs().max()
    assert error < 1e-4
    assert want[len(PROMPT) - 1 :].argmax(-1).tolist() == tokens


def test_two_ranks_compute_what_one_does(case):
    """Each reads its heads, its channels of every mlp, its rows of the head; sums are those of the whole."""
    _, _, decoder, folder = case
    models = loaded(folder, 2)
    assert [model.num_bytes < decoder.num_bytes for model in models] == [True, True]
    got, want = (each.run([(0, PROMPT)])[0] for each in (Ranks(models), Requests(decoder)))
    assert relative(got, want) < 1e-5


@pytest.mark.parametrize("kv", ["int8", pytest.param("int4", marks=pytest.mark.exhaustive)])
def test_quantized_kv_loses_as_little_as_with_llama(case, kv):
    """Each format's own loss: the decodes see K and V as they are stored."""
    name, model, decoder, _ = case
    requests = Requests(decoder, kv)
    logits = [requests.run([(0, PROMPT[:30])])[0]]
    logits += [requests.run([(0, [token])])[0] for token in PROMPT[30:]]
    got, want = torch.cat(logits).log_softmax(-1), truth(model, PROMPT).log_softmax(-1)
    divergence = (want.exp() * (want - got)).sum(-1)[30:].mean()
    bound = {"int8": 2e-2 if name in JUMPS else 2e-3, "int4": 0.25}[kv]
    assert divergence < bound and KV_FORMATS[kv].quantized


class StoredNorm:
    """What a checkpoint in bf16 holds of a norm, by the module that transformers makes of it."""

    dtype = torch.bfloat16

    def __init__(self, module):
        self.stored = {f"norm.{name}": weight for name, weight in module.named_parameters()}

    def has(self, name):
        return name in self.stored

    def tensor(self, name, shape):
        assert self.stored[name].shape == shape
        return self.stored[name]


@torch.inference_mode()
def test_norms_round_in_bf16_where_those_of_transformers_do(case):
    """Before the weight multiplies or after (`Norm.wide`), which fp32 does not show and a tenth of bf16 does.

    Sums in another order may round a few values otherwise.
    """
    _, model, decoder, _ = case
    arch, hidden = decoder.arch, decoder.arch.hidden_size
    shapes = [] if arch.norm.kind == "unit" else [(hidden,)]
    norms = {
        type(module): module
        for module in model.get_decoder().modules()
        if "Norm" in type(module).__name__ and [x.shape for x in module.parameters()][:1] == shapes
    }
    x = torch.randn(64, hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    for module in norms.values():
        module = deepcopy(module).bfloat16()
        norm = norm_layer(arch, StoredNorm(module), "norm", hidden)
        assert (norm(x) != module(x)).float().mean() < 0.01, type(module).__name__
    assert norms


def test_every_architecture_that_runs_has_a_model_here():
    """A family that is added to the registry comes with a row."""
    text, images = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    made = {spec.name or (images if spec.images else text)[spec.kind] for spec in MODELS.values()}
    assert made == set(ARCHS)


def other_names(folder, change):
    """Store the tensors of a folder under other names."""
    tensors = load_file(folder / "model.safetensors")
    renamed = {change(name): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})


def test_old_gpt2_names_and_masks(tmp_path):
    model = make("gpt2", tmp_path)
    other_names(tmp_path, lambda name: name.removeprefix("transformer."))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 256, 256).tril() for i in range(4)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    got = Requests(ours(tmp_path)).run([(0, PROMPT)])[0]
    torch.testing.assert_close(got, truth(model, PROMPT), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("qwen2_5_vl", "model.", "model.language_model."),
        ("llava", "language_model.model.", "model.language_model."),
    ],
)
def test_text_halves_are_found_in_both_places(name, old, new, tmp_path):
    model = make(name, tmp_path)
    images = ("visual.", "vision_tower.", "multi_modal_projector.", "model.visual.")
    keep = lambda stored: stored if stored.startswith(images) else stored.replace(old, new, 1)  # noqa: E731
    if not any(stored.startswith(new) for stored in load_file(tmp_path / "model.safetensors")):
        other_names(tmp_path, keep)
    got = Requests(ours(tmp_path)).run([(0, PROMPT)])[0]
    torch.testing.assert_close(got, truth(model, PROMPT), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama4", "gpt_oss", "glm4_moe"])
def test_default_dtype_of_torch_changes_nothing(name, tmp_path):
    make(name, tmp_path)
    want = Requests(ours(tmp_path)).run([(0, PROMPT)])[0]
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = Requests(ours(tmp_path)).run([(0, PROMPT)])[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got, want)
