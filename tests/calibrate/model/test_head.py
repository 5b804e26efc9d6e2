"""--head-bits 8: the head is rounded by definition, every reader finds it, and what is said of it is true."""

import json
import re

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import qrt
from qrt.errors import ConfigError
from qrt.quant import affine
from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.checkpoint.compressed_tensors import target_of
from qrt.text.tokenizer import Tokenizer
from qrt_calibrate import cli, pipeline
from qrt_calibrate.estimate.preflight import preflight
from qrt_calibrate.job.plan import plan
from qrt_calibrate.pipeline import calibrate
from qrt_calibrate.recipe.recipe_file import recipe_of
from qrt_calibrate.text.text import cut_windows
from qrt_calibrate.tuning import training, tune
from tiny_models import altered

CPU = torch.device("cpu")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
RTN = {"method": "rtn", "eval_samples": 0, "head_bits": 8}
IDS = torch.randint(0, 258, (2, 40), generator=torch.Generator().manual_seed(1))


def by_definition(weight, dtype):
    """Signed codes and scales [V, 1] of weight [V, H]: absmax over 127.5, stored in `dtype`."""
    scale = (weight.float().abs().amax(1, keepdim=True) / 127.5).to(dtype)
    return (weight.float() / scale.float()).round().clamp(-128, 127), scale


def stored(folder):
    """Signed codes and scales of the head as they lie in the file."""
    read = open_checkpoint(folder)
    if read.has(HEAD):
        return read.tensor(HEAD).float(), read.tensor("lm_head.weight_scale")
    words = read.tensor("lm_head.weight_packed").view(torch.uint8)
    rows, columns = read.tensor("lm_head.weight_shape").tolist()
    return words.view(rows, -1)[:, :columns].float() - 128, read.tensor("lm_head.weight_scale")


def by_hand(source, out, int8_tokens):
    """transformers' model of `source` with the values of the codes of `out` in all Linears, whose input is
    rounded token by token if asked for."""
    read = open_checkpoint(out)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, tie_word_embeddings=False)
    state = {name: read.tensor(name) for name in read.names() if name in model.state_dict()}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            state[f"{name}.weight"] = read.linear(name)[1].dequantize()
    model.load_state_dict(state)
    for module in model.modules() if int8_tokens else ():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, arguments: rounded_tokens(*arguments))
    return model


def rounded_tokens(x):
    codes, scale = affine.quantize_tokens(x)
    return codes * scale


CASES = [
    ("LlamaForCausalLM", {"vocab_size": 509}, {"bits": 4, "group_size": 64}, "w8a16"),
    ("Qwen2ForCausalLM", {"tie_word_embeddings": True}, {"bits": 8}, "w8a16"),
    ("Qwen3ForCausalLM", {"vocab_size": 259, "hidden_size": 96, "intermediate_size": 192},
     {"bits": 8, "group_size": 32}, "w8a16"),
    ("MistralForCausalLM", {"tie_word_embeddings": True, "vocab_size": 333}, {"scheme": "w8a8"}, "w8a8"),
    ("LlamaForCausalLM", {}, {"scheme": "w8a8"}, "w8a8"),
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("architecture, config, entries, scheme", CASES)
def test_the_head_is_rounded_and_everyone_reads_it(
    architecture, config, entries, scheme, make_checkpoint, tmp_path
):
    source, out = make_checkpoint(architecture, **config), tmp_path / "out"
    report = calibrate(str(source), recipe_of({**entries, **RTN}), out, CPU)
    plain, read = open_checkpoint(source), open_checkpoint(out)
    head = plain.tensor(HEAD if plain.has(HEAD) else EMBEDDING)
    wanted = by_definition(head, torch.bfloat16)
    assert all(torch.equal(*pair) for pair in zip(stored(out), wanted, strict=True))
    assert torch.equal(read.tensor(EMBEDDING), plain.tensor(EMBEDDING))
    assert read.config["tie_word_embeddings"] is False
    settings = read.config["quantization_config"]
    targets = [group["targets"] for group in settings["config_groups"].values()]
    assert targets == ([["Linear", "lm_head"]] if scheme == "w8a8" else [["Linear"], ["lm_head"]])
    assert settings["ignore"] == [] and settings["qrt"]["head_bits"] == 8
    assert report.stored_bytes == preflight(report.job).output_bytes
    assert f", head {scheme} by rtn" in report.title and report.to_json()["linears"][scheme][-1] == "lm_head"

    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded(IDS).logits.isfinite().all()  # codes become weights with the first call
    assert torch.equal(loaded.lm_head.weight, (wanted[0] * wanted[1].float()).bfloat16())
    assert torch.equal(loaded.model.embed_tokens.weight, plain.tensor(EMBEDDING))
    truth = by_hand(source, out, scheme == "w8a8")
    llm = qrt.LLM(str(out), dtype="float32", max_model_len=64)
    model = llm.engine.model
    assert (model.head.scheme, model.arch.tied_embeddings) == (scheme, False)
    assert f"(head {scheme})" in str(model)
    for ids in IDS.tolist():
        wanted = truth(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        wanted = wanted.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        apart = (llm.score([ids])[0] - wanted).abs()
        # a token's code on the edge between two may fall either way, and moves those behind it
        assert apart.median() < 1e-4 and (apart.max() < 1e-3 or scheme == "w8a8")


@pytest.fixture(scope="module")
def rough(llama, tmp_path_factory):
    """The Llama with a head that int8 does not hold well: in every row one weight is 64 times too large, and
    its input is as much too small."""

    def roughen(tensors):
        tensors[HEAD][:, 7] *= 64
        tensors["model.norm.weight"][7] /= 64

    return altered(llama, tmp_path_factory.mktemp("rough") / "model", roughen)


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["w8a16", "w8a8"])
def test_the_reported_cost_is_that_with_the_rounded_head(rough, calib, scheme, tmp_path):
    entries = {"scheme": scheme, "method": "rtn", "calib": str(calib), "seqlen": 64, "eval_samples": 4}
    costs = [
        calibrate(str(rough), recipe_of({**entries, "head_bits": bits}), tmp_path / str(bits), CPU).cost
        for bits in (16, 8)
    ]
    truth = by_hand(rough, tmp_path / "8", scheme == "w8a8")
    windows = cut_windows([calib.read_text()], Tokenizer(rough), 4, 64, seed=0)
    exact = AutoModelForCausalLM.from_pretrained(rough, dtype=torch.float32)
    p, q = (model(windows).logits[:, :-1].log_softmax(-1) for model in (exact, truth))
    assert costs[1].kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=0.03)
    loss = F.nll_loss(q.flatten(0, 1), windows[:, 1:].flatten())
    assert costs[1].ppl == pytest.approx(float(loss.exp()), rel=1e-3)
    assert costs[1].exact_ppl == costs[0].exact_ppl and costs[1].kl > 1.5 * costs[0].kl


def repeated(source, out, factor):
    """A copy of a tied checkpoint that stores a head too."""
    return altered(source, out, lambda tensors: tensors.update({HEAD: factor * tensors[EMBEDDING]}))


@pytest.mark.parametrize("factor", [1, 2])
def test_stored_head_of_a_tied_model_is_rounded(make_checkpoint, factor, tmp_path):
    tied = make_checkpoint("LlamaForCausalLM", tie_word_embeddings=True)
    source = repeated(tied, tmp_path / "source", factor)
    calibrate(str(source), recipe_of({"bits": 4, **RTN}), tmp_path / "out", CPU)
    wanted = by_definition(factor * open_checkpoint(tied).tensor(EMBEDDING), torch.bfloat16)
    assert all(torch.equal(*pair) for pair in zip(stored(tmp_path / "out"), wanted, strict=True))
    assert open_checkpoint(tmp_path / "out").config["tie_word_embeddings"] is False


def test_report_says_that_a_tied_model_gets_a_head(make_checkpoint, tmp_path):
    source = make_checkpoint("LlamaForCausalLM", tie_word_embeddings=True)
    facts = calibrate(str(source), recipe_of({"bits": 4, **RTN}), tmp_path / "out", CPU).to_json()
    assert facts["source_bytes"] == open_checkpoint(source).num_bytes
    assert any("quantized head is stored beside the embedding" in found for found in facts["findings"])


def test_mixed_grids_name_the_head_with_its_like(llama, tmp_path):
    entries = {"bits": 4, "override": [{"match": "mlp.*", "scheme": "w8a16", "group_size": -1}], **RTN}
    calibrate(str(llama), recipe_of(entries), tmp_path / "out", CPU)
    fours, eights = open_checkpoint(tmp_path / "out").config["quantization_config"]["config_groups"].values()
    assert "lm_head" in eights["targets"]
    names = open_checkpoint(llama).names()
    modules = [name.removesuffix(".weight") for name in names if "_proj" in name]
    for group, inside in ((eights, "mlp"), (fours, "self_attn")):
        own = [module for module in modules if target_of(module, group["targets"])]
        assert own == [module for module in modules if inside in module] and "Linear" not in group["targets"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out")(IDS).logits.isfinite().all()
    assert qrt.quant.checkpoint.open_checkpoint(tmp_path / "out", weights=False).grid("lm_head")[0] == "w8a16"


@torch.no_grad()
def test_tuning_goes_against_the_rounded_head(make_checkpoint, calib, tmp_path, monkeypatch):
    """Of a tied model, whose embedding stays."""
    source, seen = make_checkpoint("LlamaForCausalLM", tie_word_embeddings=True), []
    backward = tune._backward

    def record(model, tensors, drawn, text, share):
        found = backward(model, tensors, drawn, text, share)
        with torch.no_grad():
            body = torch.func.functional_call(
                model.model, {k.removeprefix("model."): v for k, v in tensors.items() if k != HEAD}, (drawn,)
            )
            logits = body.last_hidden_state @ tensors[HEAD].T
            p, q = model(drawn).logits.log_softmax(-1), logits.log_softmax(-1)
        seen.append((found, float((p.exp() * (p - q)).sum(-1).mean()), tensors[HEAD]))
        return found

    monkeypatch.setattr(tune, "_backward", torch.enable_grad()(record))
    for name, value in (("BATCH", 4), ("DRAWN", 8), ("WINDOW", 48)):
        monkeypatch.setattr(training, name, value)
    cut = {"calib": str(calib), "n_samples": 4, "seqlen": 64, "eval_samples": 2}
    entries = {"bits": 4, "group_size": 64, "method": "gptq", "tune": 2, "head_bits": 8, **cut}
    report = calibrate(str(source), recipe_of(entries), tmp_path / "out", CPU)
    codes, scale = stored(tmp_path / "out")
    assert len(seen) == 2 and report.tuned is not None
    for found, wanted, head in seen:
        assert torch.equal(head, codes * scale.float()) and found == pytest.approx(wanted, rel=1e-4)
    assert seen[0][2].requires_grad is False


@pytest.mark.parametrize("where", ["round_head", "measure_cost"])
def test_interrupted_run_resumes_to_the_same_bytes(llama, calib, where, tmp_path, monkeypatch):
    def command(out):
        cut = ["--n-samples", 4, "--seqlen", 64, "--eval-samples", 2, "--calib", calib]
        words = ["--model", llama, "--bits", 4, "--method", "gptq", "--head-bits", 8, *cut, "--out", out]
        return cli.main([str(word) for word in words])

    def stop(*arguments):
        raise KeyboardInterrupt

    assert command(tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, where, stop)
        assert command(tmp_path / "out") == 130
    assert (tmp_path / "out.partial").is_dir() and command(tmp_path / "out") == 0
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name


def test_head_counts_in_max_size_not_in_bits_per_weight(llama, calib, tmp_path):
    most = int(0.6 * open_checkpoint(llama).num_bytes)
    found = []
    for bits in (16, 8):
        cut = {"calib": str(calib), "seqlen": 64, "eval_samples": 4, "method": "rtn", "head_bits": bits}
        out = tmp_path / str(bits)
        report = calibrate(str(llama), recipe_of({"max_size": most / 1e9, **cut}), out, CPU)
        read = open_checkpoint(out)
        own = sum(
            read.spec(name).num_bytes
            for name in read.names()
            if re.search("_proj.weight(_packed|_scale|_zero_point|)$", name)
        )
        weights = sum(read.linear(name)[1].values.numel() for name in report.job.grids)
        assert report.bits_per_weight == pytest.approx(8 * own / weights)
        assert 0.85 * most < report.stored_bytes == read.num_bytes <= most
        found.append(report.bits_per_weight)
    assert found[1] > found[0] + 0.5  # what the head saves goes to the layers


def test_without_it_nothing_is_written_differently(llama, tmp_path):
    for name, entries in (("left", {}), ("given", {"head_bits": 16})):
        settings = {"bits": 4, "method": "rtn", "eval_samples": 0, **entries}
        calibrate(str(llama), recipe_of(settings), tmp_path / name, CPU)
    for path in (tmp_path / "left").iterdir():
        assert (tmp_path / "given" / path.name).read_bytes() == path.read_bytes()
    config = json.loads((tmp_path / "left/config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head"] and "head_bits" not in config["qrt"]
    assert [group["targets"] for group in config["config_groups"].values()] == [["Linear"]]


def test_quantize_takes_it_too(llama):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(llama), AutoTokenizer.from_pretrained(llama)
    folder = qrt.quantize(model, tokenizer, bits=4, head_bits=8)
    assert open_checkpoint(folder).linear("lm_head")[0] == "w8a16"


def test_what_is_refused(llama, tmp_path, capsys):
    with pytest.raises(ConfigError, match="--head-bits: expected one of 8, 16, got 4"):
        recipe_of({"bits": 4, "head_bits": 4})
    with pytest.raises(ConfigError, match="head_bits: expected int, got '8'"):
        recipe_of({"bits": 4, "head_bits": "8"})
    for pattern in ("lm_head", "*head"):
        with pytest.raises(ConfigError, match="means lm_head, which --head-bits 8 rounds; leave out one"):
            plan(open_checkpoint(llama), recipe_of({"bits": 4, "ignore": [pattern], **RTN}), CPU)
    calibrate(str(llama), recipe_of({"bits": 4, **RTN}), tmp_path / "out", CPU)
    for to in ("awq", "gptq"):
        words = ["convert", "--model", tmp_path / "out", "--to", to, "--out", tmp_path / "converted"]
        assert cli.main([str(word) for word in words]) == 1
        error = capsys.readouterr().err
        assert f"lm_head: cannot become {to} without loss" in error and "with --head-bits 16" in error
    assert not (tmp_path / "converted").exists()


def test_converted_to_its_own_format_it_stays(llama, tmp_path):
    for name, entries in (("w4", {"bits": 4, "group_size": 64}), ("w8a8", {"scheme": "w8a8"})):
        source, out = tmp_path / name, tmp_path / f"{name}-again"
        calibrate(str(llama), recipe_of({**entries, **RTN}), source, CPU)
        words = ["convert", "--model", source, "--to", "compressed-tensors", "--out", out]
        assert cli.main([str(word) for word in words]) == 0
        assert all(torch.equal(*pair) for pair in zip(stored(source), stored(out), strict=True))
        before, after = (open_checkpoint(each).config["quantization_config"] for each in (source, out))
        assert before["config_groups"] == after["config_groups"] and after["ignore"] == []
