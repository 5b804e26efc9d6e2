"""What is calibrated or converted is found by transformers, by whichever names a model's modules go."""

import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.quantizers.quantizers_utils import should_convert_module

import qrt
from byte_tokenizer import save_tokenizer
from hand_steps import Requests
from qrt.errors import ConfigError
from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.module_names import below
from qrt_calibrate.convert import convert
from tiny_models import random_checkpoint
from tool_files import quantize_as
from truth import ours, relative
from zoo import make

IDS = torch.arange(5, 25)
W4 = {"method": "rtn", "bits": 4, "group_size": 32, "symmetric": True, "eval_samples": 0, "device": "cpu"}


def stored_as(name, way, folder):
    """Make an image model, saved as transformers does or by its modules' names; return its class."""
    model = make(name, folder)
    save_tokenizer(folder)
    if way == "modules":
        tensors = {n: t.contiguous() for n, t in model.state_dict().items() if n != "lm_head.weight"}
        if not model.config.tie_word_embeddings:
            tensors["lm_head.weight"] = model.lm_head.weight.data
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return type(model)


@torch.no_grad()
def logits(kind, folder):
    return kind.from_pretrained(folder, dtype=torch.float32).eval()(IDS[None]).logits[0].float()


def as_qrt(folder):
    return Requests(ours(folder)).run([(0, IDS.tolist())])[0]


@pytest.mark.parametrize(
    "name, way, override, ignore",
    [
        ("llava", "modules", "down_proj", "o_proj"),
        ("gemma3-images", "saved", r"re:model\.language_model\..*down_proj", "language_model.layers.0.mlp.*"),
        ("qwen2_5_vl", "modules", "model.layers.0.self_attn.*", r"re:language_model\.model\.layers\.1\..*"),
        ("internvl", "saved", "layers.0.mlp.*", r"re:model\.layers\.1\.self_attn.*"),
    ],
)
def test_transformers_finds_what_patterns_mean(name, way, override, ignore, tmp_path):
    kind = stored_as(name, way, tmp_path / "m")
    assert relative(as_qrt(tmp_path / "m"), logits(kind, tmp_path / "m")) < 1e-4
    settings = {"override": [f"{override}=w8a16"], "ignore": [ignore, "re:.*vis(ion|ual).*"]}
    qrt.calibrate(tmp_path / "m", tmp_path / "out", **W4, **settings)
    assert relative(as_qrt(tmp_path / "out"), logits(kind, tmp_path / "out")) < 1e-4
    read = open_checkpoint(tmp_path / "out")
    stems = {n.rpartition(".")[0] for n in read.names() if n.endswith("weight_scale")}
    assert {read.linear(stem)[0] for stem in stems} == {"w4a16", "w8a16"}


@pytest.mark.parametrize("name, part", [("llava", "vision_tower"), ("qwen2_5_vl", "visual")])
def test_what_reads_images_may_be_ignored_by_its_name(name, part, tmp_path):
    """As recipes of other tools have it; it is left out anyway, so the same bytes are written."""
    stored_as(name, "saved", tmp_path / "m")
    for number, ignore in enumerate(([], [part], [f"model.{part}", f"{part}.*"])):
        qrt.calibrate(tmp_path / "m", tmp_path / f"out{number}", ignore=ignore, **W4)
    first, *others = [(tmp_path / f"out{n}" / "model.safetensors").read_bytes() for n in range(3)]
    assert all(other == first for other in others)
    for wrong in (f"{part}s", "layers.0"):
        with pytest.raises(ConfigError, match=f"--ignore '{wrong}' matches no Linear"):
            qrt.calibrate(tmp_path / "m", tmp_path / "refused", ignore=[wrong], **W4)


@pytest.mark.parametrize("settings", [{"scheme": "w8a8"}, {"bits": 8}])
@pytest.mark.parametrize("architecture", ["LlamaForSequenceClassification", "Qwen3ForSequenceClassification"])
def test_a_head_of_labels_stays_as_it_is(architecture, settings, tmp_path):
    source = random_checkpoint(tmp_path / "m", architecture, num_labels=3, pad_token_id=0)
    save_tokenizer(source)
    plain = {key: W4[key] for key in ("method", "eval_samples", "device")}
    qrt.calibrate(source, tmp_path / "out", ignore=["score"], **plain, **settings)
    kind = transformers.AutoModelForSequenceClassification
    wanted = logits(kind, source)
    assert relative(logits(kind, tmp_path / "out"), wanted) < 0.2  # 1 where the head is lost
    stored = [open_checkpoint(folder).tensor("score.weight") for folder in (source, tmp_path / "out")]
    assert torch.equal(*stored)


def test_a_body_is_found_alone_and_in_a_model(tmp_path):
    """Embedders are saved without "model.", and run by AutoModel; engines put them into a causal model."""
    source = random_checkpoint(tmp_path / "m", "Qwen3ForCausalLM", tie_word_embeddings=True)
    save_tokenizer(source)
    tensors = load_file(source / "model.safetensors")
    save_file(
        {below(n): t for n, t in tensors.items()}, source / "model.safetensors", metadata={"format": "pt"}
    )
    override = ["model.layers.0.*=w8a16"]
    qrt.calibrate(source, tmp_path / "out", ignore=["layers.1.self_attn.*"], override=override, **W4)
    alone = transformers.AutoModel.from_pretrained(tmp_path / "out")
    inside = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        hidden = inside(IDS[None], output_hidden_states=True).hidden_states[-1]
        assert relative(alone(IDS[None]).last_hidden_state, hidden) < 1e-5
    assert relative(as_qrt(tmp_path / "out"), inside(IDS[None]).logits[0].detach()) < 1e-4


def test_a_pattern_counts_by_one_way_of_naming(tmp_path):
    """Names of the file first: what they exclude is not meant under others."""
    source = random_checkpoint(tmp_path / "m", "LlamaForCausalLM")
    save_tokenizer(source)
    qrt.calibrate(source, tmp_path / "out", ignore=[r"re:(?!model\.layers\.0\.).*"], **W4)
    read = open_checkpoint(tmp_path / "out")
    assert [read.linear(f"model.layers.{i}.mlp.up_proj")[0] for i in (0, 1)] == ["w4a16", "fp16"]


@pytest.mark.parametrize(
    "name, way", [("qwen2_vl", "modules"), ("mistral3", "saved"), ("mistral3", "modules")]
)
def test_converted_models_leave_out_what_reads_images(name, way, tmp_path):
    kind = stored_as(name, way, tmp_path / "m")
    names = open_checkpoint(tmp_path / "m").names()
    linears = [n.removesuffix(".weight") for n in names if re.search(r"_proj\.weight$", n) and "vis" not in n]
    chosen = [module for module in linears if "layers.1.self_attn" not in module]
    quantize_as("awq-sym", tmp_path / "m", tmp_path / "awq", tmp_path / "floats", chosen, group=32)
    wanted = logits(kind, tmp_path / "floats")
    convert(tmp_path / "awq", "compressed-tensors", tmp_path / "ct")
    assert relative(logits(kind, tmp_path / "ct"), wanted) < 1e-4
    assert relative(as_qrt(tmp_path / "ct"), wanted) < 1e-4
    model = kind.from_pretrained(tmp_path / "m")
    modules = [
        n for n, module in model.named_modules() if isinstance(module, torch.nn.Linear) and n != "lm_head"
    ]
    expected = [n for n in modules if below(n) in map(below, chosen)]
    for to in ("awq", "gptq"):
        convert(tmp_path / "ct", to, tmp_path / f"to {to}")
        assert relative(as_qrt(tmp_path / f"to {to}"), wanted) < 1e-4
    left = open_checkpoint(tmp_path / "to awq").quantization["modules_to_not_convert"]
    assert [n for n in modules if should_convert_module(n, left)] == expected
    rules = [
        rule.removeprefix("-:") for rule in open_checkpoint(tmp_path / "to gptq").quantization["dynamic"]
    ]
    assert [n for n in modules if not any(re.match(rule, n) for rule in rules)] == expected
