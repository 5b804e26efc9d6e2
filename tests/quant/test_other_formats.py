"""AWQ, GPTQ and fp8 checkpoints as their writers lay them out, written here from the definition."""

import json
import logging

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from packed_words import awq_tensors, gptq_tensors
from qrt.errors import CheckpointError, UnsupportedError
from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.checkpoint.awq import pack_columns, unpack_columns
from tiny_models import random_checkpoint

K, N, G = 256, 64, 64
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def weight():
    """Codes and zeros [in, out], scales, and the group of each input in some order."""
    rng = np.random.default_rng(0)

    def make(bits, symmetric=False, ordered=True):
        codes = rng.integers(0, 1 << bits, (K, N))
        zeros = rng.integers(0, 1 << bits, (K // G, N))
        if symmetric:
            zeros[:] = 1 << (bits - 1)
        scales = (rng.random((K // G, N)) + 0.5).astype(np.float16)
        index = np.arange(K) // G
        if not ordered:
            rng.shuffle(index)
        wanted = (codes - zeros[index]) * scales[index].astype(np.float32)
        return codes, zeros, scales, index.astype(np.int32), torch.tensor(wanted.T)

    return make


def save(folder, tensors, quantization, separate=None):
    folder.mkdir()
    config = {} if separate else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    if separate:
        (folder / separate).write_text(json.dumps(quantization))
    tensors = {f"{Q}.{key}": torch.from_numpy(np.array(t, order="C")) for key, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq(weight, tmp_path, bits, version, symmetric, ordered):
    codes, zeros, scales, index, wanted = weight(bits, symmetric, ordered)
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": G, "sym": symmetric, "desc_act": not ordered,
        "checkpoint_format": {1: "gptq", 2: "gptq_v2"}[version], "meta": {"quantizer": ["gptqmodel:7"]},
    }  # fmt: skip
    read = save(tmp_path / "m", gptq_tensors(codes, zeros, scales, index, bits, version), config)
    scheme, got = read.linear(Q)
    assert scheme == f"w{bits}a16" and (got.zero is None) == symmetric and (got.perm is None) == ordered
    assert torch.equal(got.dequantize(), wanted)


def test_gptq_zero_points_borrow_from_field_to_field(weight, tmp_path):
    """The true zeros 8, 0, 7, 3, 15, 1, 0, 9 are stored as 0x7f0e25f7 (docs/checkpoint-formats.md#gptq)."""
    codes, zeros, scales, index, _ = weight(4)
    zeros[:] = np.tile([8, 0, 7, 3, 15, 1, 0, 9], N // 8)
    tensors = gptq_tensors(codes, zeros, scales, index, 4, version=1)
    assert (tensors["qzeros"].view(np.uint32) == 0x7F0E25F7).all()
    config = {"quant_method": "gptq", "bits": 4, "group_size": G, "sym": False}
    assert torch.equal(save(tmp_path / "m", tensors, config).linear(Q)[1].zero, torch.tensor(zeros.T))


def test_gptq_variants(weight, tmp_path, caplog):
    codes, zeros, scales, index, wanted = weight(4, symmetric=True)
    tensors = gptq_tensors(codes, zeros, scales, index, 4, version=1)
    plain = {"quant_method": "gptq", "bits": 4, "group_size": G, "sym": True}
    without = {key: tensor for key, tensor in tensors.items() if key != "g_idx"}
    zeroed = {**tensors, "g_idx": 0 * index}
    for number, variant in enumerate((without, zeroed)):
        assert torch.equal(save(tmp_path / str(number), variant, plain).linear(Q)[1].dequantize(), wanted)
    old = {"bits": 4, "group_size": G, "sym": True, "desc_act": False}
    read = save(tmp_path / "old", tensors, old, separate="quantize_config.json")
    assert torch.equal(read.linear(Q)[1].dequantize(), wanted)
    asymmetric = weight(4)
    direct = gptq_tensors(*asymmetric[:4], 4, version=2)
    read = save(
        tmp_path / "format", direct, {**plain, "sym": False, "format": "gptq_v2"}
    )  # GPTQModel's newer key
    assert torch.equal(read.linear(Q)[1].dequantize(), asymmetric[4])
    rules = {"-:.*mlp.*": {}, r"+:.*self_attn\.q_proj": {"bits": 4, "group_size": G}}
    read = save(tmp_path / "rules", tensors, {**plain, "bits": 8, "group_size": 32, "dynamic": rules})
    assert torch.equal(read.linear(Q)[1].dequantize(), wanted)
    with caplog.at_level(logging.WARNING):
        save(tmp_path / "asym", tensors, {**plain, "sym": False})
    assert "zero points of 0 may be damaged" in caplog.text
    with pytest.raises(CheckpointError, match="qzeros holds zero points, but its config says sym"):
        save(tmp_path / "v", tensors, {**plain, "checkpoint_format": "gptq_v2"}).linear(Q)


@pytest.mark.parametrize("symmetric", [True, False])
def test_awq(weight, tmp_path, symmetric):
    codes, zeros, scales, _, wanted = weight(4, symmetric)
    tensors = awq_tensors(codes, zeros, scales)
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": G,
        "zero_point": not symmetric,
        "version": "GEMM",
    }
    scheme, got = save(tmp_path / "m", tensors, config).linear(Q)
    assert scheme == "w4a16" and (got.zero is None) == symmetric
    assert torch.equal(got.dequantize(), wanted)
    old = {"w_bit": 4, "q_group_size": G, "zero_point": not symmetric}
    read = save(tmp_path / "old", tensors, old, separate="quant_config.json")
    assert torch.equal(read.linear(Q)[1].dequantize(), wanted)


def test_awq_golden_word():
    """Columns 0 to 7 holding codes 0 to 7 (docs/checkpoint-formats.md#one-packer)."""
    word = pack_columns(torch.arange(8, dtype=torch.uint8)[None])
    assert word.tolist() == [[0x75316420]] and unpack_columns(word).tolist() == [list(range(8))]


REFUSED = [
    ({"quant_method": "awq", "version": "gemv"}, "version: expected 'gemm', got 'gemv'"),
    ({"quant_method": "awq", "version": "new"}, "version: expected 'gemm', got 'new'"),
    ({"quant_method": "awq", "bits": 8}, "expected AWQ with 4 bits, got 8; start .* qrt-calibrate"),
    (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
        "checkpoint_format: expected gptq or gptq_v2, got 'marlin'",
    ),
    (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": ["gptq"]},
        r"checkpoint_format: expected .*, got \"\['gptq'\]\"",
    ),
    (
        {"quant_method": "gptq", "bits": 4, "is_marlin_format": True},
        "checkpoint_format: expected gptq or gptq_v2, got 'marlin'",
    ),
    ({"quant_method": "awq", "format": "gemv"}, "version: expected 'gemm', got 'gemv'"),
    ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}, "pack_dtype: expected 'int32', got 'int16'"),
    ({"quant_method": "gptq", "bits": 3, "group_size": G}, "expected GPTQ with 4 or 8 bits, got 3; start"),
]


@pytest.mark.parametrize("config, message", REFUSED, ids=[message for _, message in REFUSED])
def test_other_layouts_are_refused_by_name(weight, tmp_path, config, message):
    codes, zeros, scales, index, _ = weight(4)
    with pytest.raises(UnsupportedError, match=message):
        save(tmp_path / "m", gptq_tensors(codes, zeros, scales, index, 4, 2), config).linear(Q)


@pytest.mark.parametrize("meta", ["x", [1], 7])
def test_gptq_meta_is_an_object(weight, tmp_path, meta):
    config = {"quant_method": "gptq", "bits": 4, "group_size": G, "sym": False, "meta": meta}
    with pytest.raises(CheckpointError, match="quantization_config.meta: expected an object, got "):
        save(tmp_path / "m", gptq_tensors(*weight(4)[:4], 4, 1), config)


def test_gptq_scales_without_dimensions(weight, tmp_path):
    tensors = {**gptq_tensors(*weight(4)[:4], 4, 1), "scales": np.float16(1)}
    config = {"quant_method": "gptq", "bits": 4, "group_size": G}
    with pytest.raises(CheckpointError, match=rf"{Q}\.scales: expected shape \[K/64 N\] with K=256, N=64"):
        save(tmp_path / "m", tensors, config).linear(Q)


FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
DYNAMIC = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}


def save_fp8(folder, weight, scale, **arguments):
    folder.mkdir()
    entry = {"targets": ["Linear"], "weights": {**FP8, **arguments}, "input_activations": DYNAMIC}
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"g": entry},
    }
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_file({f"{Q}.weight": weight, f"{Q}.weight_scale": scale}, folder / "model.safetensors")
    return open_checkpoint(folder)


BLOCKS = [  # of N, K; how the scale lies and what it covers
    (64, 256, "channel", None, (64, 1)),
    (64, 256, "tensor", None, (1,)),
    (64, 256, "tensor", None, ()),
    (64, 256, "block", [32, 64], (2, 4)),
    (192, 320, "block", [128, 128], (2, 3)),  # the last blocks are half of one
    (576, 128, "block", [128, 128], (5, 1)),
    (64, 96, "block", [128, 128], (1, 1)),  # less than a block
]


@pytest.mark.parametrize("n, k, strategy, block, shape", BLOCKS)
def test_fp8_is_read_as_16_bits_and_said_so(tmp_path, caplog, n, k, strategy, block, shape):
    torch.manual_seed(0)
    weight = torch.randn(n, k).to(torch.float8_e4m3fn)
    scale = (torch.rand(shape) + 0.5).bfloat16()
    with caplog.at_level(logging.WARNING):
        scheme, got = save_fp8(
            tmp_path / "m", weight, scale, strategy=strategy, block_structure=block
        ).linear(Q)
    assert "fp8 weights run as 16-bit weights" in caplog.text
    assert scheme == "fp16" and got.values.dtype == torch.bfloat16 and got.bits == 0
    rows, columns = block or (1 if strategy == "channel" else n, k)
    table = scale.float().numpy().reshape(-(-n // rows), -(-k // columns))
    wanted = weight.float().numpy() * table[np.arange(n)[:, None] // rows, np.arange(k) // columns]
    assert torch.equal(got.values, torch.from_numpy(wanted).bfloat16())


def test_fp8_by_its_old_name(tmp_path):
    weight, scale = torch.randn(N, K).to(torch.float8_e4m3fn), torch.rand(N, 1)
    wanted = save_fp8(tmp_path / "m", weight, scale, strategy="channel").linear(Q)[1]
    config = tmp_path / "m/config.json"
    config.write_text(config.read_text().replace("float-quantized", "naive-quantized"))
    assert torch.equal(open_checkpoint(tmp_path / "m").linear(Q)[1].values, wanted.values)


@pytest.mark.parametrize("n, k, strategy, block, shape", BLOCKS)
def test_fp8_agrees_with_compressed_tensors(tmp_path, n, k, strategy, block, shape):
    pytest.importorskip("compressed_tensors", reason="it is the truth here")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    torch.manual_seed(1)
    weight = torch.randn(n, k).to(torch.float8_e4m3fn)
    scale = torch.rand(shape) + 0.5
    got = save_fp8(tmp_path / "m", weight, scale, strategy=strategy, block_structure=block).linear(Q)[1]
    arguments = QuantizationArgs(**FP8, strategy=strategy, block_structure=block)
    assert torch.equal(got.values, dequantize(weight, scale, args=arguments))


@pytest.mark.parametrize(
    "strategy, block, shape",
    [
        ("block", [128, 128], (4, 2)),  # transposed
        ("block", [128, 128], (1,)),
        ("block", [64, 128], (2, 4)),
        ("channel", None, (64, 1)),
        ("channel", None, (1,)),
        ("tensor", None, (256, 1)),
    ],
)
def test_fp8_scales_of_another_shape_are_refused(tmp_path, strategy, block, shape):
    read = save_fp8(
        tmp_path / "m",
        torch.ones(256, 512).to(torch.float8_e4m3fn),
        torch.ones(shape),
        strategy=strategy,
        block_structure=block,
    )
    with pytest.raises(CheckpointError, match=r"q_proj\.weight_scale: expected shape \[B0 B1\] with B0="):
        read.linear(Q)


def test_fp8_zero_points_are_zero(tmp_path):
    save_fp8(tmp_path / "m", torch.ones(N, K).to(torch.float8_e4m3fn), torch.ones(1), strategy="tensor")
    path = tmp_path / "m/model.safetensors"
    tensors = {**load_file(path), f"{Q}.weight_zero_point": torch.zeros(1).to(torch.float8_e4m3fn)}
    save_file(tensors, path)
    assert open_checkpoint(tmp_path / "m").linear(Q)[0] == "fp16"
    tensors[f"{Q}.weight_zero_point"] = torch.ones(1).to(torch.float8_e4m3fn)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=f"{Q}.weight_zero_point holds zero points"):
        open_checkpoint(tmp_path / "m").linear(Q)


@pytest.mark.parametrize("block", [None, [128], [0, 128], [128, 64.0], "128x128"])
def test_fp8_blocks_need_their_sizes(tmp_path, block):
    weight, scale = torch.ones(N, K).to(torch.float8_e4m3fn), torch.ones(1, 2)
    with pytest.raises(CheckpointError, match="block_structure: expected two positive numbers, .*, got "):
        save_fp8(tmp_path / "m", weight, scale, strategy="block", block_structure=block)


def fp8_method(folder, weight, scale, suffix, **config):
    folder.mkdir()
    config = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", **config}}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {f"{Q}.weight": weight, f"{Q}.{suffix}": scale, f"{Q}.input_scale": torch.ones(1)}
    save_file({**tensors, "lm_head.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    return open_checkpoint(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size, shape, suffix", [
    ([128, 128], (2, 3), "weight_scale_inv"), ([64, 32], (3, 10), "weight_scale_inv"),
    (None, (), "weight_scale_inv"), (None, (1,), "weight_scale"), (None, (2, 3), "weight_scale_inv"),
    (None, (192,), "weight_scale"), (None, (192, 1), "weight_scale_inv"),
])  # fmt: skip
def test_fp8_of_deepseek_qwen_and_autofp8(tmp_path, caplog, size, shape, suffix, dtype):
    torch.manual_seed(0)
    weight = torch.randn(192, 320).to(torch.float8_e4m3fn)
    scale = (torch.rand(shape) + 0.5).to(dtype)
    with caplog.at_level(logging.WARNING):
        read = fp8_method(tmp_path / "m", weight, scale, suffix, weight_block_size=size)
    assert "fp8 weights run as 16-bit weights" in caplog.text
    said = {(2, 3): (128, 128), (192,): (1, 320), (192, 1): (1, 320)}  # where the config does not
    rows, columns = size or said.get(shape, (192, 320))
    table = scale.float().numpy().reshape(-(-192 // rows), -(-320 // columns))
    wanted = weight.float().numpy() * table[np.arange(192)[:, None] // rows, np.arange(320) // columns]
    scheme, got = read.linear(Q)
    assert scheme == "fp16" and torch.equal(got.values, torch.from_numpy(wanted).to(dtype))
    assert torch.equal(read.linear("lm_head")[1].values, torch.ones(2, 2)) and read.grid(Q) == ("fp16", None)


def test_fp8_that_does_not_fit_its_config_is_refused(tmp_path):
    weight = torch.ones(192, 320).to(torch.float8_e4m3fn)
    for number, (size, shape) in enumerate([(None, (3, 3)), ([128, 128], (1,)), ([128, 128], (3, 2))]):
        read = fp8_method(
            tmp_path / str(number), weight, torch.ones(shape), "weight_scale_inv", weight_block_size=size
        )
        with pytest.raises(CheckpointError, match=rf"{Q}\.weight_scale_inv: expected shape \[B0 B1\]"):
            read.linear(Q)
    with pytest.raises(
        CheckpointError, match="weight_block_size: expected two positive numbers, .*, got 128"
    ):
        fp8_method(tmp_path / "size", weight, torch.ones(1), "weight_scale", weight_block_size=128)
    with pytest.raises(CheckpointError, match=f"{Q}.weight: expected dtype .*, got torch.float8_e4m3fn"):
        fp8_method(tmp_path / "none", weight, torch.ones(1), "input_zero_point").linear(Q)


def test_old_compressed_tensors_with_a_group_index(tmp_path):
    """actorder "group" of old versions: columns in input order, groups by index."""
    from qrt.quant.spec import Granularity, QuantSpec
    from tiny_models import quantize_checkpoint

    plain = random_checkpoint(tmp_path / "plain", "LlamaForCausalLM", num_hidden_layers=1)
    spec = QuantSpec(4, False, Granularity.GROUP, 64)
    written = quantize_checkpoint(plain, tmp_path / "w4", "w4a16", spec)[Q]
    path = tmp_path / "w4/model.safetensors"
    tensors = load_file(path)
    index = torch.randperm(128, generator=torch.Generator().manual_seed(0)) % 2
    tensors[f"{Q}.weight_g_idx"] = index.to(torch.int32)
    save_file(tensors, path, metadata={"format": "pt"})
    wanted = (written.values.float() - written.zero.float()[:, index]) * written.scale.float()[:, index]
    got = open_checkpoint(tmp_path / "w4").linear(Q)[1]
    assert got.perm is not None and torch.equal(got.dequantize(), wanted)
