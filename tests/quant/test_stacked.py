"""One expert of tensors that hold all of them: the same weight as from files with a Linear for each."""

import json

import pytest
import torch
from safetensors.torch import save_file

from mxfp4_files import MAGNITUDES, pack_mxfp4
from qrt.errors import CheckpointError
from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.checkpoint.cut import Cut
from qrt.quant.checkpoint.folder import ExpertTensors
from qrt.quant.spec import Codes

E, N, K = 3, 160, 256
IN = "model.layers.0.block_sparse_moe.input_linear"
UP = "model.layers.0.mlp.experts.gate_up_proj"
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "channel"}
CHANNELS = {"quant_method": "compressed-tensors", "format": "float-quantized",
            "config_groups": {"a": {"targets": ["Linear"], "weights": FP8}}}  # fmt: skip
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def save(folder, tensors, entry=None):
    folder.mkdir()
    config = {"dtype": "float32"} | ({"quantization_config": entry} if entry else {})
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("stack, bias", [(UP, f"{UP}_bias"), (f"{IN}.weight", f"{IN}.bias")])
def test_unquantized(tmp_path, stack, bias, transposed):
    weights, biases = torch.randn(E, N, K), torch.randn(E, N)
    stored = weights.transpose(1, 2).contiguous() if transposed else weights
    checkpoint = save(tmp_path / "m", {stack: stored, bias: biases})
    checkpoint.expect_experts(stack, E)
    for index in range(E):
        scheme, weight = checkpoint.expert(stack, index, transposed=transposed)
        assert scheme == "fp16" and weight.values.is_contiguous()
        assert torch.equal(weight.values, weights[index]) and torch.equal(weight.bias, biases[index])


@pytest.mark.parametrize("stack, scale", [(f"{IN}.weight", f"{IN}.weight_scale"), (UP, f"{UP}_scale")])
@pytest.mark.parametrize("shape", [(E, N, 1), (E,), (E, 1)])
def test_fp8_of_compressed_tensors(tmp_path, stack, scale, shape):
    """A scale for each row, or one of each expert."""
    per_row = len(shape) == 3
    entry = json.loads(json.dumps(CHANNELS).replace("channel", "channel" if per_row else "tensor"))
    weights, scales = torch.randn(E, N, K).to(torch.float8_e4m3fn), torch.rand(shape) + 0.5
    checkpoint = save(tmp_path / "m", {stack: weights, scale: scales}, entry)
    for index in range(E):
        scheme, weight = checkpoint.expert(stack, index)
        assert scheme == "fp16"
        assert torch.equal(weight.values, weights[index].float() * scales[index].reshape(-1, 1))


@pytest.mark.parametrize(
    "stack, scale", [(f"{IN}.weight", f"{IN}.weight_scale_inv"), (UP, f"{UP}_scale_inv")]
)
def test_fp8_in_blocks(tmp_path, stack, scale):
    weights, scales = torch.randn(E, N, K).to(torch.float8_e4m3fn), torch.rand(E, 2, 2) + 0.5
    checkpoint = save(tmp_path / "m", {stack: weights, scale: scales}, BLOCKS)
    spread = scales.repeat_interleave(128, 1)[:, :N].repeat_interleave(128, 2)
    for index in range(E):
        assert torch.equal(checkpoint.expert(stack, index)[1].values, (weights.float() * spread)[index])


def test_fp8_that_is_transposed(tmp_path):
    """As Qwen3-VL-MoE is published: weights [E, in, out], and a scale for each block of them as they lie."""
    weights, scales = torch.randn(E, K, N).to(torch.float8_e4m3fn), torch.rand(E, 2, 2) + 0.5
    biases = torch.randn(E, N)
    tensors = {UP: weights, f"{UP}_scale_inv": scales, f"{UP}_bias": biases}
    checkpoint = save(tmp_path / "m", tensors, BLOCKS)
    spread = scales.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :, :N]
    for index in range(E):
        weight = checkpoint.expert(UP, index, transposed=True)[1]
        assert torch.equal(weight.bias, biases[index])
        part = checkpoint.expert(UP, index, transposed=True, cut=Cut.of((N, K), torch.arange(32, 64)))[1]
        assert torch.equal(part.values, weight.values[32:64]) and torch.equal(part.bias, biases[index, 32:64])
        assert torch.equal(weight.values, (weights.float() * spread)[index].T)
        assert weight.values.is_contiguous()


def test_scales_of_static_activations_are_not_read(tmp_path):
    tensors = {UP: torch.randn(E, N, K).to(torch.float8_e4m3fn), f"{UP}_scale_inv": torch.rand(E, 2, 2)}
    tensors |= {f"{UP}_{kind}_scale": torch.ones(E) for kind in ("input", "activation")}
    checkpoint = save(tmp_path / "m", tensors, BLOCKS)
    assert checkpoint.expert(UP, 1)[1].values.shape == (N, K)


def test_mxfp4(tmp_path):
    blocks, scales = pack_mxfp4(torch.randn(E, N, K))
    checkpoint = save(
        tmp_path / "m", {f"{UP}_blocks": blocks, f"{UP}_scales": scales}, {"quant_method": "mxfp4"}
    )
    low, high = blocks & 15, blocks >> 4
    codes = torch.stack((low, high), -1).flatten(2).int()
    values = torch.cat((MAGNITUDES, -MAGNITUDES))[codes].unflatten(2, (-1, 32))
    values *= torch.exp2(scales.float() - 127)[..., None]
    for index, transposed in ((0, True), (2, False)):  # however unquantized weights lie
        scheme, weight = checkpoint.expert(UP, index, transposed=transposed)
        assert (scheme, weight.codes, weight.scale.dtype) == ("mxfp4", Codes.E2M1, torch.bfloat16)
        assert torch.equal(weight.dequantize(), values[index].flatten(1)) and weight.bias is None


def test_tensors_of_a_module_for_each_projection(tmp_path):
    """As compressed-tensors may stack what it packs: the projection is a module with tensors of its own."""
    blocks, scales = pack_mxfp4(torch.randn(E, N, K))
    tensors = {f"{UP}.weight_packed": blocks.flatten(2), f"{UP}.weight_scale": scales}
    checkpoint = save(tmp_path / "m", tensors, mxfp4_entry())
    plain = save(tmp_path / "p", {f"{UP}_blocks": blocks, f"{UP}_scales": scales}, {"quant_method": "mxfp4"})
    checkpoint.expect_experts(UP, E)
    for index in range(E):
        want = plain.expert(UP, index)[1].dequantize()
        assert torch.equal(checkpoint.expert(UP, index)[1].dequantize(), want)


def mxfp4_entry(**changes):
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights | changes, "format": "mxfp4-pack-quantized"}
    return {"quant_method": "compressed-tensors", "config_groups": {"a": group}}


def test_only_one_expert_is_mapped(tmp_path):
    checkpoint = save(tmp_path / "m", {UP: torch.arange(float(E * N * K)).view(E, N, K)})
    one = ExpertTensors(checkpoint, UP, checkpoint.names(), 2)
    assert one.names() == [f"{UP}.weight"] and one.num_bytes == 4 * N * K
    assert one.tensor(f"{UP}.weight").untyped_storage().nbytes() <= 4 * N * K + 2**16
    assert one.tensor(f"{UP}.weight")[0, 0] == 2 * N * K


def test_a_neighbour_with_a_longer_name_is_no_part_of_it(tmp_path):
    tensors = {UP: torch.zeros(E, N, K), f"{UP}s": torch.zeros(1), f"{UP[:-3]}": torch.zeros(1)}
    checkpoint = save(tmp_path / "m", tensors)
    checkpoint.expect_experts(UP, E)
    assert checkpoint.expert(UP, 0)[1].values.shape == (N, K)


@pytest.mark.parametrize("tensors, text", [
    ({UP: (E, N)}, rf"{UP}: expected shape \[N K\], got \[{N}\]"),
    ({UP: (2, N, K)}, rf"{UP}: expected more than 2 experts, got 2"),
    ({UP: (E, N, K), f"{UP}_bias": ()}, rf"{UP}_bias: expected more than 2 experts, got one number"),
    ({UP: (E, N, K), f"{UP}_bias": (E, 9)}, rf"{UP}_bias: expected shape \[N\] with N={N}, got \[9\]"),
    ({UP: (E, N, K), f"{UP}_zeros": (E, 9)}, rf"{UP}_zeros: of no use to quant_method None"),
    ({f"{UP}_bias": (E, N)}, rf"no tensor '{UP}'"),
    ({f"{UP[:-3]}": (E, N, K)}, rf"no tensor '{UP}'; did you mean '{UP[:-3]}'"),
])  # fmt: skip
def test_what_does_not_fit_is_named_as_stored(tmp_path, tensors, text):
    checkpoint = save(tmp_path / "m", {name: torch.zeros(shape) for name, shape in tensors.items()})
    with pytest.raises(CheckpointError, match=text):
        checkpoint.expert(UP, 2)


def test_another_number_of_experts_is_named(tmp_path):
    checkpoint = save(tmp_path / "m", {UP: torch.zeros(E, N, K), f"{UP}_bias": torch.zeros(E + 1, N)})
    with pytest.raises(CheckpointError, match=f"{UP}_bias: expected 3 experts, got 4"):
        checkpoint.expect_experts(UP, E)
    with pytest.raises(CheckpointError, match=f"{UP}.*: expected 2 experts, got "):
        checkpoint.expect_experts(UP, 2)
