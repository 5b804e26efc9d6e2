"""gpt-oss as published, with experts in MXFP4, beside transformers' model of the same file."""

import json
import shutil
from itertools import product

import pytest
import torch
from safetensors.torch import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hand_steps import Requests
from mxfp4_files import publish
from qrt.config import EngineConfig
from qrt.engine.engine import Engine
from qrt.errors import CheckpointError
from qrt.model.loader import load_model
from qrt.quant.checkpoint import open_checkpoint
from qrt.request.sampling import SamplingParams
from tiny_models import altered
from truth import ours, prompt, relative, theirs
from zoo import make

PROMPT = prompt(40)
EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt_oss")
    torch.manual_seed(0)
    make("gpt_oss", folder / "plain")
    return publish(folder / "plain", folder / "published")


@pytest.fixture(scope="module")
def plain(published, tmp_path_factory):
    """The same weights in fp32, as transformers dequantizes them."""

    def dequantize(tensors):
        for name in [name for name in tensors if name.endswith("_blocks")]:
            own = name.removesuffix("_blocks")
            packed = tensors.pop(name), tensors.pop(f"{own}_scales")
            tensors[own] = convert_moe_packed_tensors(*packed, dtype=torch.float32)

    out = altered(published, tmp_path_factory.mktemp("gpt_oss") / "dequantized", dequantize)
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.fixture(scope="module")
def truth(plain):
    """transformers' logits."""
    return theirs(plain, PROMPT)


def test_same_logits_as_transformers(published, truth):
    model = ours(published)
    assert model.schemes == {"fp16": 8, "mxfp4": 8}
    assert relative(Requests(model).run([(0, PROMPT)])[0], truth) < 1e-4


@pytest.mark.parametrize("kv", ["fp16", "int8", "int4"])
def test_greedy_tokens_are_those_of_transformers(published, plain, kv):
    """Behind a prompt in two chunks; quantized KV changes a few."""
    requests = Requests(ours(published), kv)
    requests.run([(0, PROMPT[:23])])
    tokens, _ = requests.greedy(PROMPT[23:], 12)
    wanted = theirs(plain, [*PROMPT, *tokens[:-1]])[len(PROMPT) - 1 :].argmax(-1).tolist()
    same = sum(own == their for own, their in zip(tokens, wanted, strict=True))
    assert same >= {"fp16": 12, "int8": 11, "int4": 6}[kv]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits(published, plain, truth, dtype):
    """As good as unquantized experts of the same numbers; the median, as rounding chooses other experts."""

    def error(folder):
        got = Requests(load_model(folder, device=torch.device("cpu"), dtype=dtype)).run([(0, PROMPT)])[0]
        return ((got.float() - truth).norm(dim=1) / truth.norm(dim=1)).median()

    assert error(published) < 1.5 * error(plain) < 0.1


def test_an_expert_is_that_of_transformers(published, plain):
    checkpoint, wanted = open_checkpoint(published), load_file(plain / "model.safetensors")
    for name, index in product(("gate_up_proj", "down_proj"), (0, 7)):
        scheme, weight = checkpoint.expert(f"{EXPERTS}.{name}", index, transposed=True)
        assert scheme == "mxfp4"
        assert torch.equal(weight.dequantize(), wanted[f"{EXPERTS}.{name}"][index].T)
        assert torch.equal(weight.bias, wanted[f"{EXPERTS}.{name}_bias"][index])


@pytest.mark.parametrize("change, text", [
    ({"down_proj_scales": None}, r"no tensor 'model\.layers\.1\.mlp\.experts\.down_proj_scales'"),
    ({"down_proj_scales": (8, 128, 5)}, r"down_proj_scales: .*shape \[N K/32\] with N=128, K=192, got "),
    ({"down_proj_blocks": (8, 128, 6, 8)}, r"down_proj_blocks: .*shape \[N K/32 16\], got \[128, 6, 8\]"),
    ({"down_proj_blocks": (9, 128, 6, 16)}, "down_proj_blocks: expected 8 experts, got 9"),
    ({"down_proj": (8, 192, 128)}, r"down_proj_blocks, .*down_proj_scales: of no use"),
    ({"down_proj_global_scale": (8,)}, r"down_proj_global_scale: of no use to quant_method 'mxfp4'"),
])  # fmt: skip
def test_what_does_not_fit_is_named(published, tmp_path, change, text):
    """None removes a tensor, a shape replaces it or adds one."""

    def edit(tensors):
        for name, shape in change.items():
            tensors.pop(f"{EXPERTS}.{name}", None)
            if shape is not None:
                dtype = torch.float32 if name == "down_proj" else torch.uint8
                tensors[f"{EXPERTS}.{name}"] = torch.zeros(shape, dtype=dtype)

    with pytest.raises(CheckpointError, match=text):
        ours(altered(published, tmp_path / "m", edit))


def test_a_scale_that_is_no_number_is_refused(published, tmp_path):
    name = f"{EXPERTS}.gate_up_proj_scales"
    altered(published, tmp_path / "m", lambda tensors: tensors[name][3, 7, 1].fill_(255))
    with pytest.raises(CheckpointError, match=f"{name}: expected powers of two, 0 to 254, got 255"):
        ours(tmp_path / "m")


def test_load_format_dummy_makes_experts_in_mxfp4(published, tmp_path):
    folder = shutil.copytree(published, tmp_path / "m", ignore=lambda *_: ["model.safetensors"])
    engine = Engine(EngineConfig(str(folder), load_format="dummy"))
    assert engine.model.schemes == {"fp16": 8, "mxfp4": 8}
    engine.add("a", [1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))
    while engine.has_work:
        engine.step()


def test_modules_that_are_left_out_of_the_config(published, tmp_path):
    """The experts of layer 1, for which the config alone tells a model without weights."""
    folder = shutil.copytree(published, tmp_path / "m", ignore=lambda *_: ["model.safetensors"])
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] += ["model.layers.1.mlp.experts"]
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(folder, weights=False)
    schemes = [checkpoint.grid(f"model.layers.{i}.mlp.experts.down_proj")[0] for i in range(3)]
    assert schemes == ["mxfp4", "fp16", "mxfp4"]
    assert checkpoint.grid("model.layers.0.self_attn.q_proj") == ("fp16", None)
    assert checkpoint.grid("model.layers.0.mlp.router") == ("fp16", None)
