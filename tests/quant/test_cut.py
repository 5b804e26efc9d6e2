"""A cut of a Linear is read, from every format, as the same part of the whole."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mxfp4_files import pack_mxfp4
from packed_words import awq_tensors, gptq_tensors
from qrt.errors import CheckpointError
from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.checkpoint.cut import Cut, InsideGroup
from qrt.quant.checkpoint.layout import IntQuantized, PackQuantized
from qrt.quant.spec import Granularity, QuantSpec
from random_weights import round_to_nearest

N, K, G, E = 160, 512, 64, 3
Q = "model.layers.0.self_attn.q_proj"
UP = "model.layers.0.mlp.experts.gate_up_proj"
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}


def compressed(layout, spec):
    """Tensors and config of a weight that compressed-tensors stores."""
    weight = torch.randn(N, K)
    stored = layout.encode(round_to_nearest(weight, spec, torch.float32))
    weights = {"num_bits": spec.bits, "type": "int", "symmetric": spec.symmetric}
    weights |= {"strategy": spec.granularity.value, "group_size": spec.group_size}
    group = {"targets": ["Linear"], "weights": weights, "format": layout.name}
    if layout.name == "int-quantized" or spec.progressive:
        group["input_activations"] = {"num_bits": 8, "strategy": "token", "dynamic": True}
    return stored, {"quant_method": "compressed-tensors", "config_groups": {"a": group}}


def packed(method, bits=4, **entries):
    """Tensors and config of a weight that GPTQ's or AWQ's tools store."""
    rng = np.random.default_rng(0)
    codes, zeros = (rng.integers(0, 1 << bits, (rows, N)) for rows in (K, K // G))
    scales = (rng.random((K // G, N)) + 0.5).astype(np.float16)
    if method == "awq":
        stored = awq_tensors(codes, zeros, scales)
    else:
        stored = gptq_tensors(codes, zeros, scales, (np.arange(K) // G).astype(np.int32), bits, 1)
    config = {"quant_method": method, "bits": bits, "group_size": G} | entries
    return {key: torch.from_numpy(np.array(t, order="C")) for key, t in stored.items()}, config


def fp8(shape, config):
    return {"weight": torch.randn(N, K).to(torch.float8_e4m3fn), **shape}, config


def channels(strategy):
    group = {"targets": ["Linear"], "weights": FP8 | {"strategy": strategy}, "format": "float-quantized"}
    return {"quant_method": "compressed-tensors", "config_groups": {"a": group}}


def mxfp4():
    blocks, scales = pack_mxfp4(torch.randn(N, K))
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "format": "mxfp4-pack-quantized"}
    config = {"quant_method": "compressed-tensors", "config_groups": {"a": group}}
    return {"weight_packed": blocks.flatten(1), "weight_scale": scales}, config


CHANNEL, GROUP = Granularity.CHANNEL, Granularity.GROUP
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
KINDS = {
    "plain": lambda: ({"weight": torch.randn(N, K)}, None),
    "w4a16": lambda: compressed(PackQuantized(), QuantSpec(4, False, GROUP, G)),
    "w4a16-channel": lambda: compressed(PackQuantized(), QuantSpec(4, False, CHANNEL)),
    "w4a8": lambda: compressed(PackQuantized(), QuantSpec(4, False, GROUP, G, progressive=True)),
    "w8a16": lambda: compressed(PackQuantized(), QuantSpec(8, True, GROUP, G)),
    "w8a8": lambda: compressed(IntQuantized(), QuantSpec(8, True, CHANNEL)),
    "awq": lambda: packed("awq", version="gemm", zero_point=True),
    "gptq": lambda: packed("gptq", sym=False),
    "gptq-int8": lambda: packed("gptq", 8, sym=False),
    "fp8-blocks": lambda: fp8({"weight_scale_inv": torch.rand(2, 4) + 0.5}, BLOCKS),
    "fp8-rows": lambda: fp8({"weight_scale": torch.rand(N, 1) + 0.5}, channels("channel")),
    "fp8-tensor": lambda: fp8({"weight_scale": torch.rand(1) + 0.5}, channels("tensor")),
    "mxfp4": mxfp4,
}  # fmt: skip


def save(folder, tensors, entry):
    folder.mkdir()
    config = {"dtype": "float32"} | ({"quantization_config": entry} if entry else {})
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return open_checkpoint(folder)


ROWS = [None, torch.arange(40, 72), torch.tensor([0, 1, 70, 159]), torch.arange(96, 160)]
INPUTS = [None, (0, 128), (64, 192), (448, 512)]


def check(read, whole):
    """Compare cuts, which `read` reads, with parts of the whole."""
    dense = whole.dequantize()
    for rows in ROWS:
        for own in INPUTS:
            cut = Cut.of((N, K), rows, own)
            scheme, part = read(cut)
            first, last = own or (0, K)
            assert rows is None or set(rows.tolist()) <= set(cut.rows.tolist())
            assert rows is None or len(cut.rows) <= 32 * len(set((rows // 32).tolist()))
            assert torch.equal(part.dequantize(), dense[cut.rows, first:last])
            assert (part.bias is None) == (whole.bias is None)
            assert whole.bias is None or torch.equal(part.bias, whole.bias[cut.rows])


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_is_a_part_of_the_whole(kind, tmp_path):
    tensors, entry = KINDS[kind]()
    tensors = {f"{Q}.{suffix}": tensor for suffix, tensor in tensors.items()}
    checkpoint = save(tmp_path / "m", tensors | {f"{Q}.bias": torch.randn(N)}, entry)
    check(lambda cut: checkpoint.linear(Q, cut=cut), checkpoint.linear(Q)[1])


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("kind", ["plain", "fp8-blocks", "mxfp4"])
def test_a_cut_of_one_expert(kind, transposed, tmp_path):
    """Of weights that are stored [E, K, N] too, and of fp8 whose scales lie so."""
    endings = {
        "weight": "",
        "weight_scale_inv": "_scale_inv",
        "weight_packed": "_blocks",
        "weight_scale": "_scales",
    }
    each, entry = [KINDS[kind]()[0] for _ in range(E)], KINDS[kind]()[1]
    stacks = {f"{UP}{endings[name]}": torch.stack([one[name] for one in each]) for name in each[0]}
    if kind == "mxfp4":
        entry, transposed = {"quant_method": "mxfp4"}, True  # codes never are
        stacks[f"{UP}_blocks"] = stacks[f"{UP}_blocks"].unflatten(-1, (-1, 16))
    elif transposed:
        stacks = {name: stack.transpose(1, 2) for name, stack in stacks.items()}
    checkpoint = save(tmp_path / "m", stacks, entry)
    whole = checkpoint.expert(UP, 1, transposed=transposed)[1]
    check(lambda cut: checkpoint.expert(UP, 1, transposed=transposed, cut=cut), whole)


@pytest.mark.parametrize("kind, first", [("w4a16", 32), ("gptq", 4), ("mxfp4", 16), ("awq", 96)])
def test_inputs_that_part_a_group_or_a_word(kind, first, tmp_path):
    tensors, entry = KINDS[kind]()
    checkpoint = save(tmp_path / "m", {f"{Q}.{suffix}": t for suffix, t in tensors.items()}, entry)
    with pytest.raises(InsideGroup):
        checkpoint.linear(Q, cut=Cut.of((N, K), None, (first, 256)))


@pytest.mark.parametrize("kind", KINDS)
def test_another_size_of_the_whole_is_named(kind, tmp_path):
    tensors, entry = KINDS[kind]()
    checkpoint = save(tmp_path / "m", {f"{Q}.{suffix}": t for suffix, t in tensors.items()}, entry)
    for sizes in ((N + 32, K), (N, K + 128)):
        with pytest.raises(
            CheckpointError, match=rf"{Q}: expected shape \[{sizes[0]}, {sizes[1]}\].* got \[160, 512\]"
        ):
            checkpoint.linear(Q, cut=Cut.of(sizes, torch.arange(32)))
