"""load_model: what a checkpoint must hold, and a one-line error that names what it does not."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qrt.errors import CheckpointError, UnsupportedError
from qrt.model.loader import load_model
from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.spec import Granularity, QuantSpec
from tiny_models import altered, quantize_checkpoint, random_checkpoint

CPU = torch.device("cpu")
G32 = QuantSpec(4, False, Granularity.GROUP, 32)
Q = "model.layers.1.self_attn.q_proj"


def load(folder, dtype=torch.float32):
    return load_model(folder, device=CPU, dtype=dtype)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """Checkpoints that the tests copy before they break them."""
    base = tmp_path_factory.mktemp("saved")
    return {
        "plain": random_checkpoint(base / "plain", "LlamaForCausalLM"),
        "tied": random_checkpoint(base / "tied", "LlamaForCausalLM", tie_word_embeddings=True),
        "biased": random_checkpoint(base / "biased", "Qwen2ForCausalLM"),
    }


@pytest.fixture
def broken(saved, tmp_path):
    """broken(kind, tensors=..., config=...): a copy whose tensors and config.json a function has changed."""

    def make(kind="plain", tensors=None, config=None) -> Path:
        folder = shutil.copytree(saved[kind], tmp_path / "model")
        file = folder / "model.safetensors"
        if tensors:
            held = {name: tensor.clone() for name, tensor in load_file(file).items()}
            tensors(held)
            save_file(held, file)
        if config:
            path = folder / "config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
        return folder

    return make


def refuses(folder, error, text) -> None:
    with pytest.raises(error, match=text) as raised:
        load(folder)
    assert "\n" not in str(raised.value)


def test_weights_are_fused_cast_and_counted(saved):
    tensors = load_file(saved["plain"] / "model.safetensors")
    model = load(saved["plain"], torch.bfloat16)
    attention = model.layers[1].attention
    stacked = torch.cat([tensors[Q.replace("q_proj", f"{x}_proj") + ".weight"] for x in "qkv"])
    assert torch.equal(attention.qkv.tensors[0], stacked.bfloat16())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.num_bytes == sum(2 * t.numel() for t in tensors.values())
    assert model.schemes == {"fp16": 8}
    assert str(model).startswith("LlamaForCausalLM, 2 layers, fp16 (head fp16), 0.00 GiB, torch.bfloat16")


def test_a_progress_bar_goes_to_stderr(saved, capsys):
    load(saved["plain"])
    out, err = capsys.readouterr()
    assert out == "" and "Loading weights: 100%" in err and "2/2" in err


def test_a_tied_head_is_the_embedding(saved):
    for dtype in (torch.float32, torch.bfloat16):
        model = load(saved["tied"], dtype)
        assert model.head.tensors[0].data_ptr() == model.embed.weight.data_ptr()
        held = load_file(saved["tied"] / "model.safetensors")
        assert model.num_bytes == dtype.itemsize * sum(t.numel() for t in held.values())


def test_a_tied_head_that_is_stored_too_is_accepted(broken):
    def store(held):
        held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()

    model = load(broken("tied", store))
    assert model.head.tensors[0].data_ptr() == model.embed.weight.data_ptr()


def test_a_stored_head_that_differs_wins_over_the_config(broken, caplog):
    def store(held):
        held["lm_head.weight"] = 2 * held["model.embed_tokens.weight"]

    model = load(broken("tied", store))
    assert torch.equal(model.head.tensors[0], 2 * model.embed.weight)
    assert not model.arch.tied_embeddings
    assert "lm_head is stored apart" in caplog.text


def test_tied_embedding_stored_only_as_head_is_missing(broken):
    def rename(held):
        held["lm_head.weight"] = held.pop("model.embed_tokens.weight")

    refuses(broken("tied", rename), CheckpointError, r"1 missing .*: model\.embed_tokens; correct")


def test_derived_buffers_and_zero_biases_of_old_tools_are_fine(broken):
    def add(held):
        held["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(32)
        held[f"{Q}.bias"] = torch.zeros(256)

    model = load(broken("plain", add))
    assert not any(linear.bias is not None for linear in model.linears()), "they would only cost time"


def test_kv_cache_scheme_is_refused_attention_scales_unread(saved, tmp_path):
    """compressed-tensors, vLLM, ModelOpt and Quark round q, K, V and probabilities by these scales."""
    quantize_checkpoint(saved["plain"], tmp_path / "model", "w4a16", G32)
    names = [f"{name}_{what}" for name in "qkv" for what in ("scale", "zero_point")]
    names += ["kv_scale", "output_scale", "attn.q_scale", "attn.prob_scale", "prob_output_scale"]
    names += ["k_proj.k_scale", "v_proj.v_scale", "q_proj.output_scale", "o_proj.input_scale"]
    scales = {f"model.layers.1.self_attn.{name}": torch.full((1,), 3.0) for name in names}
    folder = altered(tmp_path / "model", tmp_path / "scales", lambda held: held.update(scales))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    (folder / "config.json").write_text(json.dumps(config))
    refuses(folder, UnsupportedError, "kv_cache_scheme is not read; delete the entry")
    del config["quantization_config"]["kv_cache_scheme"]
    (folder / "config.json").write_text(json.dumps(config))
    pairs = zip(load(folder).parameters(), load(tmp_path / "model").parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    folder = altered(saved["plain"], tmp_path / "plain", lambda held: held.update(scales))
    pairs = zip(load(folder).parameters(), load(saved["plain"]).parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_missing_tensors_are_named(broken):
    def drop(held):
        del held[f"{Q}.weight"], held["model.norm.weight"]

    refuses(broken("plain", drop), CheckpointError, rf"2 missing .*{Q}, model\.norm; correct")


def test_a_missing_bias_is_named(broken):
    def drop(held):
        del held[f"{Q}.bias"]

    refuses(broken("biased", drop), CheckpointError, rf"1 missing .*{Q}\.bias; correct")


def test_unused_tensors_are_named(broken):
    def add(held):
        held["model.layers.0.self_attn.q_norm.weight"] = torch.ones(64)
        held[f"{Q}.bias"] = torch.ones(256)

    refuses(broken("plain", add), CheckpointError, rf"2 tensors .* use: .*q_norm.weight, {Q}.bias; correct")


def test_more_layers_stored_than_the_config_says(broken):
    folder = broken(config={"num_hidden_layers": 1})
    refuses(folder, CheckpointError, r"9 tensors .* model\.layers\.1\..* and 5 more; correct")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"intermediate_size": 300},
            r"layers\.0\.mlp\.gate_proj: expected shape \[300, 128\], .*, got \[256, 128\]",
        ),
        ({"num_key_value_heads": 1}, r"self_attn\.k_proj: expected shape \[64, 128\], .*, got \[128, 128\]"),
        ({"head_dim": 32}, r"q_proj: expected shape \[128, 128\], .*, got \[256, 128\]"),
        (
            {"vocab_size": 400},
            r"embed_tokens\.weight: expected shape \[400, 128\], .*, got \[512, 128\]; correct",
        ),
    ],
)
def test_shapes_are_checked_against_the_config(broken, change, text):
    refuses(broken(config=change), CheckpointError, text)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"])
def test_codes_are_not_read_as_an_embedding_or_a_norm(broken, name, dtype):
    def quantize(held):
        held[name] = held[name].to(dtype)

    refuses(
        broken("plain", quantize), (CheckpointError, UnsupportedError), rf"{name}: expected .*, got {dtype}"
    )


@pytest.mark.parametrize("module", ["model.embed_tokens", "model.layers.0.input_layernorm", Q])
def test_unused_tensors_of_known_modules_are_named(broken, module):
    def add(held):
        held[f"{module}.weight_scale"] = torch.ones(1)

    refuses(broken("plain", add), CheckpointError, rf"{module}\.weight_scale: of no use to quant_method None")


def test_a_bad_config_reaches_the_user(broken):
    refuses(broken(config={"vocab_size": None}), CheckpointError, "vocab_size: expected .*, got None")


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        (
            ["GemmaNineForCausalLM"],
            UnsupportedError,
            "unknown architecture 'GemmaNineForCausalLM' .known: Llama",
        ),
        (None, CheckpointError, "architectures: expected a list of one name"),
    ],
)
def test_unknown_architecture(broken, name, error, text):
    refuses(broken(config={"architectures": name, "model_type": None}), error, text)


def test_a_models_own_code_is_not_run(broken, caplog):
    folder = broken(config={"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}})
    (folder / "modeling_own.py").write_text("raise SystemExit('this must not run')")
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert "auto_map" in caplog.text


def test_a_sliding_window_leaves_the_context_as_it_is(tmp_path):
    model = load(random_checkpoint(tmp_path / "model", "MistralForCausalLM", sliding_window=96))
    assert model.arch.max_position == 512 and model.ropes[0].cos.shape[0] == 512
    assert [layer.attention.scores.window for layer in model.layers] == [96] * len(model.layers)


def test_parts_of_a_fused_projection_must_be_quantized_alike(saved, tmp_path):
    quantize_checkpoint(saved["plain"], tmp_path, "w4a16", G32, ignore=["lm_head", Q])
    refuses(tmp_path, CheckpointError, rf"{Q} is fp16, .*k_proj is w4a16.*quantize or ignore them together")


def test_unsupported_grid_error_names_the_linear(saved, tmp_path):
    quantize_checkpoint(saved["plain"], tmp_path, "w4a16", QuantSpec(4, False, Granularity.GROUP, 16))
    refuses(tmp_path, UnsupportedError, rf"{tmp_path}: model\.layers\.0\.self_attn\.q_proj, .*groups of 16")


def test_layers_left_unquantized_are_logged_once_by_name(saved, tmp_path, caplog):
    o = "model.layers.0.self_attn.o_proj"
    quantize_checkpoint(saved["plain"], tmp_path / "some", "w4a16", G32, ignore=["lm_head", o])
    model = load(tmp_path / "some")
    assert model.schemes == {"w4a16": 7, "fp16": 1} and model.scheme == "fp16+w4a16"
    assert [r.message for r in caplog.records] == [f"left unquantized by the checkpoint: {o}"]
    caplog.clear()
    quantize_checkpoint(saved["plain"], tmp_path / "all", "w4a16", G32)
    whole = load(tmp_path / "all")
    assert whole.schemes == {"w4a16": 8} and whole.head.scheme == "fp16" and not caplog.records
    assert whole.num_bytes < load(saved["plain"]).num_bytes


def test_an_opened_checkpoint_is_taken_too(saved):
    model = load(open_checkpoint(saved["plain"]))
    assert model.arch.num_layers == 2 and model.device == CPU and model.dtype == torch.float32
