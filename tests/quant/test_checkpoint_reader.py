"""open_checkpoint and Checkpoint: what is refused, in one line that says what to do, and what it costs."""

import json
import os
import re
import shutil
import struct
from pathlib import Path

import pytest
import torch
import transformers
from damage import edit, grid, in_group, refuse
from safetensors.torch import load_file, save_file

from qrt.assets import model_path
from qrt.errors import CheckpointError, UnsupportedError
from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.spec import Granularity, QuantSpec
from qrt.text.tokenizer import Tokenizer
from tiny_models import random_checkpoint

W4 = QuantSpec(4, False, Granularity.GROUP, 64)
Q = "model.layers.0.self_attn.q_proj"


def test_opens_and_tells_without_reading(made):
    checkpoint = open_checkpoint(str(made / "plain"))
    tensors = load_file(made / "plain/model.safetensors")
    assert checkpoint.path == made / "plain" and checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert checkpoint.names() == sorted(tensors)
    assert checkpoint.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    for name, tensor in tensors.items():
        spec = checkpoint.spec(name)
        assert checkpoint.has(name) and spec.shape == tensor.shape and spec.dtype == tensor.dtype
        assert torch.equal(checkpoint.tensor(name), tensor)
    assert not checkpoint.has("nothing")
    scheme, weight = checkpoint.linear(Q)
    assert scheme == "fp16" and weight.bits == 0 and torch.equal(weight.values, tensors[f"{Q}.weight"])


def test_dtypes_empty_tensors_and_scalars(tmp_path):
    dtypes = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
    dtypes += [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    tensors = {str(dtype): (torch.randn(3, 5) * 9).to(dtype) for dtype in dtypes}
    tensors |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    for name, tensor in tensors.items():
        got = checkpoint.tensor(name)
        assert got.dtype == tensor.dtype and torch.equal(got, tensor), name


@pytest.mark.parametrize("config, dtype", [({}, "float16"), ({"torch_dtype": "bfloat16"}, "bfloat16")])
def test_a_config_without_a_dtype_has_that_of_the_embedding(tmp_path, config, dtype):
    """As in transformers; fp16 weights in bf16 would lose three bits."""
    tensors = {"model.norm.weight": torch.ones(4), "model.embed_tokens.weight": torch.ones(4, 4).half()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = open_checkpoint(tmp_path).config
    assert found == (config or {"dtype": dtype}) and dtype in found.values()
    assert open_checkpoint(tmp_path, weights=False).config == config


def test_the_file_is_never_changed(made):
    """Tensors are copy-on-write: writing to one is allowed and stays in memory."""
    checkpoint = open_checkpoint(made / "plain")
    before = checkpoint.tensor("model.norm.weight").clone()
    checkpoint.tensor("model.norm.weight").zero_()
    assert torch.equal(checkpoint.tensor("model.norm.weight"), before)


def resident_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc/self/status")
def test_memory_is_about_one_tensor(tmp_path):
    """16 tensors of 16 MB in one (sparse) file, each read in turn: resident memory grows by one or two."""
    size, count = 16 << 20, 16
    header = {
        f"t{i}": {"dtype": "F32", "shape": [size // 4], "data_offsets": [i * size, (i + 1) * size]}
        for i in range(count)
    }
    text = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + count * size)
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    before, most = resident_mb(), 0.0
    for name in checkpoint.names():
        assert checkpoint.tensor(name).sum() == 0
        most = max(most, resident_mb())
    tensor = checkpoint.tensor("t3")
    tensor.sum()
    assert resident_mb() - before > 12, "the measure sees a mapped tensor"
    assert most - before < 40


# -- folders ---------------------------------------------------------------------------------------------


def test_folders_that_are_not_checkpoints(made, copy, tmp_path):
    refuse(tmp_path / "nowhere", CheckpointError, "nowhere: no such folder; give .*Hugging Face Hub")
    refuse(made / "plain/config.json", CheckpointError, "not a folder")
    plain = copy("plain")
    (plain / "config.json").write_text("{ not json")
    refuse(plain, CheckpointError, r"config\.json: not JSON.*download")
    (plain / "config.json").write_bytes(b"\xff\xfe\x00")
    refuse(plain, CheckpointError, r"config\.json: not JSON")
    (plain / "config.json").write_text("[]")
    refuse(plain, CheckpointError, r"config\.json: expected a JSON object, got list")
    (plain / "config.json").unlink()
    refuse(plain, CheckpointError, r"no config\.json")


@pytest.mark.parametrize(
    "file, message",
    [
        ("adapter_config.json", r"no config\.json; an adapter, .* merge_and_unload"),
        ("model-Q4_K_M.gguf", r"no config\.json; model-Q4_K_M\.gguf is GGUF.* safetensors it was made from"),
        ("snapshots/0a1b/config.json", r"no config\.json; .*cache; give .*/snapshots/0a1b$"),
    ],
)
def test_error_names_what_a_wrong_folder_is(file, message, tmp_path):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_bytes(b"")
    refuse(tmp_path, CheckpointError, message)


def test_remedy_for_bin_weights_gives_a_loadable_model(copy, tmp_path):
    old, new = copy("plain"), tmp_path / "new"
    tensors = load_file(old / "model.safetensors")
    torch.save(tensors, old / "pytorch_model.bin")
    (old / "model.safetensors").unlink()
    for file in Path(model_path("tiny")).glob("tokenizer*"):
        shutil.copy(file, old)
    with pytest.raises(CheckpointError, match=r"AutoModelForCausalLM\.from_pretrained.* AutoTokenizer$"):
        open_checkpoint(old)
    transformers.AutoModelForCausalLM.from_pretrained(old).save_pretrained(new)
    transformers.AutoTokenizer.from_pretrained(old).save_pretrained(new)
    assert Tokenizer(new).encode("a b") == Tokenizer(model_path("tiny")).encode("a b")
    converted = open_checkpoint(new)
    assert all(torch.equal(converted.tensor(name), tensor) for name, tensor in tensors.items())


def test_folders_without_safetensors(copy):
    plain = copy("plain")
    (plain / "model.safetensors").rename(plain / "model-00001-of-00002.safetensors")
    refuse(plain, CheckpointError, r"neither model\.safetensors nor .*index\.json; download the index")
    (plain / "model-00001-of-00002.safetensors").rename(plain / "pytorch_model.bin")
    refuse(plain, CheckpointError, r"only pytorch_model\.bin.*convert with transformers.*save_pretrained")
    (plain / "pytorch_model.bin").rename(plain / "model.gguf")
    refuse(plain, CheckpointError, r"model\.gguf is GGUF, .* safetensors it was made from")
    (plain / "model.gguf").unlink()
    refuse(plain, CheckpointError, "no weights; expected model.safetensors")


def test_files_called_after_their_grid(made, copy):
    """As AutoGPTQ calls them, one or in shards with an index; an index that is missing is asked for."""
    wanted, sharded = open_checkpoint(made / "plain"), copy("sharded")
    single, name = copy("plain"), "gptq_model-4bit-128g"
    (single / "model.safetensors").rename(single / f"{name}.safetensors")
    index = sharded / "model.safetensors.index.json"
    index.rename(sharded / f"{name}.safetensors.index.json")
    for read in (open_checkpoint(single), open_checkpoint(sharded)):
        assert read.names() == wanted.names()
        assert torch.equal(read.tensor("model.norm.weight"), wanted.tensor("model.norm.weight"))
    (single / f"{name}.safetensors").rename(single / f"{name}-00001-of-00002.safetensors")
    refuse(single, CheckpointError, "download the index")
    (single / f"{name}.safetensors").symlink_to("gone")
    refuse(single, CheckpointError, f"{name}.safetensors: a link to gone, which is gone")


def test_index_files(copy):
    sharded = copy("sharded")
    index = sharded / "model.safetensors.index.json"
    files = sorted(sharded.glob("*.safetensors"))
    good = json.loads(index.read_text())
    for name in ("../plain/model.safetensors", "/etc/passwd", "..", "sub/model.safetensors"):
        edit(index, lambda value, name=name: value["weight_map"].update({"model.norm.weight": name}))
        refuse(sharded, CheckpointError, "expected plain file names inside the folder, got ")
    index.write_text(json.dumps(good))
    edit(index, lambda value: value["weight_map"].update({"no.such": files[0].name}))
    refuse(sharded, CheckpointError, r"tensor 'no\.such' is not in model-00001")
    edit(index, lambda value: value.update(weight_map=[1]))
    refuse(sharded, CheckpointError, "weight_map")
    index.write_text(json.dumps(good))
    files[1].unlink()
    refuse(sharded, CheckpointError, r"names 'model-00002.*not there; download the missing shard")


def test_links_inside_the_folder_are_fine(copy, tmp_path):
    """The Hugging Face cache links every file to a blob elsewhere."""
    sharded = copy("sharded")
    for number, path in enumerate(sharded.glob("*.safetensors")):
        path.rename(tmp_path / f"blob{number}")
        path.symlink_to(tmp_path / f"blob{number}")
    assert open_checkpoint(sharded).linear(Q)[0] == "fp16"


@pytest.mark.parametrize("base, file", [
    ("plain", "config.json"), ("plain", "model.safetensors"), ("plain", "quantize_config.json"),
    ("sharded", "model.safetensors.index.json"), ("sharded", "model-00001-of-00004.safetensors"),
])  # fmt: skip
def test_a_link_to_a_file_that_is_gone_says_so(copy, base, file):
    """What a pruned Hugging Face cache leaves behind."""
    path = copy(base) / file
    path.unlink(missing_ok=True)
    path.symlink_to("../../blobs/0123")
    refuse(path.parent, CheckpointError, rf"/{file}: a link to \.\./\.\./blobs/0123, which is gone; download")


@pytest.mark.parametrize(
    "base, file", [("plain", "config.json"), ("sharded", "model.safetensors.index.json")]
)
def test_a_file_that_would_fill_the_memory_is_not_read(copy, base, file):
    path = copy(base) / file
    os.truncate(path, 2**40)
    refuse(path.parent, CheckpointError, rf"/{file}: expected at most .*, got 1099511627776")


def test_a_name_that_is_too_long_for_a_file(copy):
    sharded = copy("sharded")
    name = "a" * 5000
    index = sharded / "model.safetensors.index.json"
    edit(index, lambda value: value["weight_map"].update({"model.norm.weight": name}))
    refuse(sharded, CheckpointError, r"aaa: cannot be read \(File name too long\)")


# -- safetensors files ------------------------------------------------------------------------------------


def test_truncated_at_any_length(copy):
    path = copy("plain") / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    for length in (0, 5, 8, 100, header - 1, header, header + 1000, len(whole) - 1):
        path.write_bytes(whole[:length])
        refuse(path.parent, CheckpointError, r"model\.safetensors: truncated or not a safetensors.*again")


def test_damaged_headers(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    good = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    cases = [
        (b"not json", "not a JSON object"),
        (b"[1, 2]", "not a JSON object"),
        (b"[" * 100_000, "not a JSON object"),
        ({"a": 3}, "no dtype, shape or data_offsets"),
        ({"a": {**good, "dtype": []}}, r"tensor 'a' has dtype \[\]"),
        ({"a": {**good, "dtype": {}}}, r"tensor 'a' has dtype \{\}"),
        ({"a": {**good, "data_offsets": [0]}}, "no dtype, shape or data_offsets"),
        ({"a": {**good, "shape": [2, 3]}}, "expected 24 bytes, got 16"),
        ({"a": {**good, "shape": [-2, -2]}}, r"shape \[-2, -2\]"),
        ({"a": {**good, "shape": [10**4299, 10**4299]}}, r"tensor 'a' has shape \[10{100}"),
        ({"a": {**good, "shape": [2**62] * 300}}, r"tensor 'a' has shape \[4611686018427387904, "),
        ({"a": good, "b": good}, r"tensor 'b' begins at byte \d+, inside another"),
        ({"a": {**good, "shape": ["2", 2]}}, "shape"),
        ({"a": {**good, "data_offsets": [-16, 0]}}, "data_offsets"),
        ({"a": {**good, "data_offsets": [16, 32]}}, "ends at byte"),
        ({"a": {**good, "shape": [1 << 62, 4], "data_offsets": [0, 1 << 66]}}, "ends at byte"),
    ]
    for header, pattern in cases:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
        refuse(tmp_path, CheckpointError, pattern)
    text = json.dumps({"a": {**good, "dtype": "F4"}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    refuse(tmp_path, UnsupportedError, "tensor 'a': expected dtype .*, got F4; start from the original")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 63) + bytes(100))
    refuse(tmp_path, CheckpointError, "a header of 9223372036854775808 bytes")
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    refuse(tmp_path, CheckpointError, "Git LFS pointer.*git lfs pull")


# -- tensors ----------------------------------------------------------------------------------------------


def test_an_absent_tensor_names_the_nearest(made):
    with pytest.raises(
        CheckpointError, match="no tensor 'model.norm.weigth'; did you mean 'model.norm.weight'"
    ):
        open_checkpoint(made / "plain").tensor("model.norm.weigth")
    refuse(
        made / "plain",
        CheckpointError,
        "no tensor 'model.layers.9.mlp.up_proj.weight'",
        "model.layers.9.mlp.up_proj",
    )


def test_a_dtype_is_checked_without_a_shape_too(made):
    checkpoint = open_checkpoint(made / "plain")
    assert checkpoint.tensor("model.norm.weight", dtype=torch.float32).shape == (128,)
    with pytest.raises(
        CheckpointError, match="norm.weight: expected dtype torch.int8, got torch.float32; the weights"
    ):
        checkpoint.tensor("model.norm.weight", dtype=torch.int8)


def replaced(folder: Path, name: str, change) -> Path:
    """The checkpoint with one tensor changed (None drops it)."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = change(tensors[name])
    tensors = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "base, suffix, change",
    [
        ("plain", "weight", lambda t: t.to(torch.int8)),
        ("plain", "weight", lambda t: t[0].clone()),
        ("w4", "weight_packed", lambda t: t[:, :-1].clone()),
        ("w4", "weight_packed", lambda t: t.to(torch.int64)),
        ("w4", "weight_packed", lambda t: None),
        ("w4", "weight_scale", lambda t: t[:, :1].clone()),
        ("w4", "weight_scale", lambda t: t.to(torch.float64)),
        ("w4", "weight_zero_point", lambda t: t[:1].clone()),
        ("w4", "weight_zero_point", lambda t: None),
        ("w4", "weight_shape", lambda t: None),
        ("w4", "weight_shape", lambda t: t[:1].clone()),
        ("w4", "weight_shape", lambda t: t * -1),
        ("w4", "weight_shape", lambda t: t * (1 << 40)),
        ("w8a8", "weight", lambda t: t.to(torch.uint8)),
        ("w8a8", "weight_scale", lambda t: t.repeat(1, 2)),
        ("w8a8", "weight_scale", lambda t: None),
    ],
)
def test_tensors_that_do_not_fit_the_config(copy, base, suffix, change):
    name = f"{Q}.{suffix}"
    refuse(replaced(copy(base), name, change), CheckpointError, re.escape(f"{Q}.weight"), Q)


def added(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """The checkpoint with more tensors of Q, by suffix."""
    held = load_file(folder / "model.safetensors")
    held |= {f"{Q}.{suffix}": tensor for suffix, tensor in tensors.items()}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_zero_points_of_weights_that_the_config_calls_symmetric(copy):
    w4 = copy("w4")
    edit(w4 / "config.json", lambda v: grid("symmetric", True)(v["quantization_config"]))
    refuse(w4, CheckpointError, f"{Q}.weight_zero_point holds zero points, but its weights are symmetric", Q)
    words = torch.full((256 // 8, 2), 0x88888888 - (1 << 32), dtype=torch.int32)  # 8 in every nibble
    scheme, weight = open_checkpoint(added(w4, {"weight_zero_point": words})).linear(Q)
    assert scheme == "w4a16" and weight.zero is None

    w8a8, zero = copy("w8a8"), torch.zeros(256, 1, dtype=torch.int8)
    assert open_checkpoint(added(w8a8, {"weight_zero_point": zero})).linear(Q)[1].zero is None
    zero[7] = -1
    refuse(added(w8a8, {"weight_zero_point": zero}), CheckpointError, "holds zero points", Q)


@pytest.mark.parametrize(
    "base, suffix",
    [("plain", "weight_scale"), ("w4", "weight"), ("w4", "weight_global_scale"), ("w4", "qweight")],
)
def test_a_tensor_of_a_linear_that_nothing_reads_is_refused(copy, base, suffix):
    folder = added(copy(base), {suffix: torch.ones(256, 1)})
    refuse(folder, CheckpointError, rf"{Q}\.{suffix}: of no use to quant_method .*config\.json", Q)


def test_scales_of_activations_are_no_matter(made, copy):
    scales = {"input_scale": torch.ones(1), "input_zero_point": torch.zeros(1), "output_scale": torch.ones(1)}
    got = open_checkpoint(added(copy("w8a8"), scales)).linear(Q)[1]
    assert torch.equal(got.dequantize(), open_checkpoint(made / "w8a8").linear(Q)[1].dequantize())


def test_a_group_that_does_not_divide(copy):
    w4 = copy("w4")
    edit(
        w4 / "config.json",
        lambda v: v["quantization_config"]["config_groups"]["group_0"]["weights"].update(group_size=48),
    )
    refuse(w4, CheckpointError, f"{Q}: group_size 48 does not divide its 128 input features", Q)


def test_a_weight_without_inputs(copy):
    w4 = copy("w4")
    weights = {"num_bits": 4, "strategy": "channel"}
    edit(w4 / "config.json", lambda v: in_group(weights=weights)(v["quantization_config"]))
    replaced(w4, f"{Q}.weight_shape", torch.zeros_like)
    refuse(w4, CheckpointError, f"{Q}: group_size -1 does not divide its 0 input features", Q)


def test_a_bias_of_another_length(made, tmp_path):
    random_checkpoint(tmp_path, "LlamaForCausalLM", attention_bias=True, num_hidden_layers=1)
    replaced(tmp_path, f"{Q}.bias", lambda t: t[:-1].clone())
    refuse(tmp_path, CheckpointError, re.escape(f"{Q}.bias: expected shape [N] with N=256, got [255]"), Q)


# -- quantization_config -----------------------------------------------------------------------------------
