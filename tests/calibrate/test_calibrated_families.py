"""Every architecture is calibrated by its own definition, and the result is what transformers loads too."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import qrt
from byte_tokenizer import save_tokenizer
from hand_steps import Requests
from qrt.arch.read import read_arch
from qrt.definitions.names import place_names
from qrt.definitions.stacks import part_rows
from qrt.errors import ConfigError, UnsupportedError
from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.checkpoint.compressed_tensors import target_of
from qrt_calibrate.estimate.preflight import preflight
from qrt_calibrate.job.plan import plan
from qrt_calibrate.model.executor import LayerExecutor
from qrt_calibrate.model.spelled import spelled_out
from qrt_calibrate.recipe.recipe_file import recipe_of
from qrt_calibrate.rounding.fold import Pair
from truth import ours
from zoo import MODELS, make

TOKENS = torch.randint(4, 256, (2, 40), generator=torch.Generator().manual_seed(7))  # longer than each window
FEW = {  # one for each way to store, to norm and to scale; the others are exhaustive
    "phi3": "w4a16", "neox": "w8a8", "gemma2": "w4a16", "cohere2": "w4a8", "olmo2": "w8a8",
    "qwen2_5_vl": "w4a16", "gpt_oss": "w4a8", "glm4_moe": "w4a16", "llama4-maverick": "w4a16",
}  # fmt: skip
REFUSED = {"gpt2"}
UNLOADED = {  # whose own classes fail to make a quantized Linear (transformers 5.17)
    "bigcode", "falcon-7b", "falcon-40b", "falcon-rw",
}  # fmt: skip
CASES = [
    pytest.param(name, scheme, marks=[] if FEW.get(name) == scheme else [pytest.mark.exhaustive])
    for name in MODELS
    for scheme in ("w4a16", "w8a8", "w4a8")
    if name not in REFUSED
]


def executor_of(folder):
    checkpoint = open_checkpoint(folder)
    arch = place_names(read_arch(checkpoint.config, "model"), checkpoint)
    checkpoint, arch = spelled_out(checkpoint, arch)
    return LayerExecutor(checkpoint, arch, TOKENS.shape[1], torch.device("cpu")), arch


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in MODELS if name not in REFUSED])
def test_layers_are_those_of_transformers_and_folds_are_exact(name, tmp_path):
    """Powers of two that are folded into every pair of a layer change no bit of what it computes."""
    model = make(name, tmp_path)
    executor, arch = executor_of(tmp_path)
    hidden = executor.embed(TOKENS)
    for index in range(arch.num_layers):
        layer = executor.load_stored(index)
        before, hidden = hidden, executor.run(index, layer, hidden)
        for smooth in arch.at(index).smooth:
            rows = None if smooth.part is None else part_rows(arch, smooth.part)
            count = len(layer.get_submodule(smooth.source).weight) if rows is None else len(rows)
            powers = torch.exp2(torch.randint(-4, 5, (count,)).float())
            weight = layer.get_submodule(smooth.source).weight.clone()
            Pair(layer, smooth, arch.head_dim, rows).fold(powers)
            assert not torch.equal(layer.get_submodule(smooth.source).weight, weight)
        assert torch.equal(executor.run(index, layer, before), hidden)
    got = torch.stack([executor.logits(own) for own in hidden])
    want = model(input_ids=TOKENS, use_cache=False).logits.float()
    assert (got.log_softmax(-1) - want.log_softmax(-1)).abs().max() < 1e-4


@pytest.mark.parametrize("name", [name for name in MODELS if name not in REFUSED][::7])
def test_loss_gradients_are_those_of_autograd(name, tmp_path):
    """At the hidden states behind the last layer, of a loss whose drawn tokens are known."""
    make(name, tmp_path)
    executor, arch = executor_of(tmp_path)
    hidden = torch.randn(12, arch.hidden_size)
    got = executor.loss_gradient(hidden, torch.Generator().manual_seed(3))
    leaf = hidden.clone().requires_grad_()
    with torch.enable_grad():
        logits = executor.logits(leaf)
        drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=torch.Generator().manual_seed(3))
        torch.nn.functional.cross_entropy(logits, drawn[:, 0], reduction="sum").backward()
    torch.testing.assert_close(got, leaf.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "scheme"), CASES)
def test_calibrated_checkpoint_runs_here_and_in_transformers(name, scheme, tmp_path, calib):
    model = make(name, tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    sizes = {} if scheme == "w8a8" else {"group_size": 32}
    text = {"calib": str(calib), "n_samples": 8, "seqlen": 48, "eval_samples": 2}
    report = qrt.calibrate(tmp_path / "model", tmp_path / "out", scheme=scheme, **sizes, **text)
    decoder, tokens = ours(tmp_path / "out"), TOKENS[0].tolist()
    got = Requests(decoder).run([(0, tokens)])[0].log_softmax(-1)
    assert decoder.scheme == scheme
    with torch.no_grad():
        exact = model(input_ids=TOKENS[:1], use_cache=False).logits[0].float().log_softmax(-1)
    assert report.cost.kl < 0.2 and (exact.exp() * (exact - got)).sum(-1).mean() < 1.0
    if name in UNLOADED or MODELS[name].name:  # no class of transformers' own reads it
        return
    if any(re.search("transformers (does not|loads no)", own) for own in report.to_json()["findings"]):
        return
    loaded = type(model).from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager"  # which alone caps scores
    )  # fmt: skip
    with torch.no_grad():
        theirs = loaded(input_ids=TOKENS[:1], use_cache=False).logits[0].float().log_softmax(-1)
    if scheme == "w4a16":
        assert (theirs - got).abs().max() < 1e-4
    else:  # a value between two codes of a token may fall to either
        assert (theirs.exp() * (theirs - got)).sum(-1).mean() < 2e-2


def test_transposed_weights_are_refused(tmp_path):
    make("gpt2", tmp_path / "model")
    with pytest.raises(UnsupportedError, match=r"GPT2LMHeadModel: .*stored \[in, out\]"):
        qrt.calibrate(tmp_path / "model", tmp_path / "out", method="rtn", eval_samples=0)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("baichuan2-7b", {"head_bits": 8}, "--head-bits: expected .*normalizes its rows"),
        ("neox", {"head_bits": 8}, "--head-bits: expected .*calls it embed_out"),
        ("gemma2", {"tune": 10}, "--tune: not known for Gemma2ForCausalLM"),
        ("internlm2", {"tune": 10}, "--tune: not known for InternLM2ForCausalLM"),
    ],
)
def test_what_a_family_does_not_take_is_named(name, settings, message, tmp_path, calib):
    make(name, tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    text = {"calib": str(calib), "n_samples": 8, "seqlen": 48, "bits": 4, "group_size": 32}
    with pytest.raises(UnsupportedError, match=message):
        qrt.calibrate(tmp_path / "model", tmp_path / "out", **text, **settings)


def test_layers_that_predict_further_tokens_are_copied(tmp_path):
    """And no pattern for them keeps other Linears from being read quantized."""
    make("glm4_moe", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    further = {f"model.layers.4.{name}.weight": torch.randn(128, 256) for name in ("eh_proj", "mlp.up_proj")}
    save_file(tensors | further, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    qrt.calibrate(tmp_path / "model", tmp_path / "out", method="rtn", bits=4, group_size=32)
    stored = open_checkpoint(tmp_path / "out")
    assert all(torch.equal(stored.tensor(name), tensor) for name, tensor in further.items())
    assert all(target_of(name.removesuffix(".weight"), stored.quantization["ignore"]) for name in further)
    assert ours(tmp_path / "out").scheme == "w4a16"


@pytest.mark.parametrize("name", [name for name in MODELS if "moe" in name or name in ("mixtral", "gpt_oss")])
def test_stacked_results_beyond_transformers_are_named(name, tmp_path):
    """It reads experts one by one where it writes them so, as it has written this checkpoint."""
    make(name, tmp_path)
    job = plan(open_checkpoint(tmp_path), recipe_of({"method": "rtn", "group_size": 32}), torch.device("cpu"))
    named = any("experts are written one by one" in own for own in preflight(job).findings)
    assert named == (not any(re.search(r"[.]experts[.]\d+[.]", own) for own in job.source.names()))


def test_only_mixtures_take_tokens_for_all_experts(tmp_path):
    make("llama", tmp_path)
    recipe = recipe_of({"moe_calibrate_all_experts": True})
    with pytest.raises(ConfigError, match="--moe-calibrate-all-experts: expected a mixture of experts"):
        plan(open_checkpoint(tmp_path), recipe, torch.device("cpu"))
