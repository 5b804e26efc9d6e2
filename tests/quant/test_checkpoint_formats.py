"""What is written is the documented layout, and qrt, numpy and transformers read the same weights from it."""

import importlib.util
import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from damage import edit, refuse
from safetensors import safe_open
from safetensors.torch import save_file

from qrt.errors import CheckpointError, UnsupportedError
from qrt.model.loader import load_model
from qrt.quant.checkpoint import CheckpointWriter, open_checkpoint
from qrt.quant.spec import Granularity, QuantSpec
from qrt.quant.weight import WeightData
from random_weights import round_to_nearest
from tiny_models import quantize_checkpoint, random_checkpoint

NPCT = Path(__file__).parents[3] / "shared/prototypes/weights/npct.py"


def group(bits: int, symmetric: bool, size: int) -> QuantSpec:
    return QuantSpec(bits, symmetric, Granularity.GROUP, size)


def channel(bits: int, symmetric: bool) -> QuantSpec:
    return QuantSpec(bits, symmetric, Granularity.CHANNEL)


CASES = {
    "w4a16-g128-asym": ("w4a16", group(4, False, 128)),
    "w4a16-g128-sym": ("w4a16", group(4, True, 128)),
    "w4a16-g32-asym": ("w4a16", group(4, False, 32)),
    "w4a16-g32-sym": ("w4a16", group(4, True, 32)),
    "w4a16-channel-asym": ("w4a16", channel(4, False)),
    "w4a16-channel-sym": ("w4a16", channel(4, True)),
    "w8a16-g128-sym": ("w8a16", group(8, True, 128)),
    "w8a16-g128-asym": ("w8a16", group(8, False, 128)),
    "w8a16-channel-sym": ("w8a16", channel(8, True)),
    "w8a8": ("w8a8", channel(8, True)),
    "w4a8-g128-asym": ("w4a8", replace(group(4, False, 128), progressive=True)),
    "w4a8-g32-sym": ("w4a8", replace(group(4, True, 32), progressive=True)),
    "w4a8-channel-sym": ("w4a8", replace(channel(4, True), progressive=True)),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """bf16, GQA, tied, with q/k/v biases."""
    folder = tmp_path_factory.mktemp("plain")
    return random_checkpoint(folder, "Qwen2ForCausalLM", dtype=torch.bfloat16, tie_word_embeddings=True)


@pytest.fixture(scope="module", params=CASES)
def written(request, source, tmp_path_factory):
    """A quantized checkpoint: its folder, scheme, grid and the weights that went in."""
    scheme, spec = CASES[request.param]
    out = tmp_path_factory.mktemp(request.param) / "out"
    return out, scheme, spec, quantize_checkpoint(source, out, scheme, spec)


def assert_same(got: WeightData, wanted: WeightData):
    assert got.bits == wanted.bits and got.perm is None
    for name in ("values", "scale", "zero", "bias"):
        a, b = getattr(got, name), getattr(wanted, name)
        assert (a is None) == (b is None), name
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b)), name


def test_round_trip_is_exact(written, source):
    out, scheme, _, weights = written
    read, plain = open_checkpoint(out), open_checkpoint(source)
    assert any(weight.bias is not None for weight in weights.values())
    for module, weight in weights.items():
        got_scheme, got = read.linear(module)
        assert got_scheme == scheme
        assert_same(got, weight)
    for name in plain.names():
        if not name.rpartition(".")[0].endswith("_proj"):
            assert torch.equal(read.tensor(name), plain.tensor(name)), name
    assert not read.has("lm_head.weight")


def numpy_tensors(path: Path) -> dict[str, np.ndarray]:
    """safetensors by its definition; bf16 comes back as its bit pattern."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    dtypes = {"I32": "<i4", "I64": "<i8", "I8": "i1", "BF16": "<u2"}
    header.pop("__metadata__")
    found = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        found[name] = np.frombuffer(raw[begin:end], dtypes[entry["dtype"]]).reshape(entry["shape"])
    return found


def from_bits(words: np.ndarray, bits: int, n: int) -> np.ndarray:
    """n unsigned codes of a little-endian bit stream along the last axis, one bit at a time."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    stream = np.unpackbits(octets, axis=-1, bitorder="little")[..., : n * bits]
    return stream.reshape(*stream.shape[:-1], n, bits).astype(np.int32) @ (1 << np.arange(bits))


def numpy_weight(tensors: dict[str, np.ndarray], module: str, spec: QuantSpec) -> np.ndarray:
    """(q - z) * s in fp32, from the documented tensors only."""
    scale = (tensors[f"{module}.weight_scale"].astype(np.uint32) << 16).view(np.float32)
    if f"{module}.weight" in tensors:
        codes = tensors[f"{module}.weight"].astype(np.int32) + spec.midpoint
    else:
        n, k = tensors[f"{module}.weight_shape"]
        codes = from_bits(tensors[f"{module}.weight_packed"], spec.bits, k)
        assert codes.shape == (n, k)
    n, k = codes.shape
    zero = np.full(scale.shape, spec.midpoint)
    if not spec.symmetric:
        zero = from_bits(tensors[f"{module}.weight_zero_point"].T, spec.bits, n).T
    grouped = codes.reshape(n, scale.shape[1], -1) - zero[..., None]
    return (grouped.astype(np.float32) * scale[..., None]).reshape(n, k)


def test_numpy_from_the_definition_agrees(written):
    out, _, spec, weights = written
    tensors = numpy_tensors(out / "model.safetensors")
    for module, weight in weights.items():
        assert np.array_equal(numpy_weight(tensors, module, spec), weight.dequantize().numpy()), module


def test_research_reader_agrees(written):
    if not NPCT.is_file():
        pytest.skip(f"{NPCT} is not there")
    loader = importlib.util.spec_from_file_location("npct", NPCT)
    npct = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(npct)
    out, _, _, weights = written
    tensors = npct.read_safetensors(out / "model.safetensors")
    entry = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    for module, weight in weights.items():
        values, _, _ = npct.dequant(tensors, module, entry["weights"])
        assert np.array_equal(values, weight.dequantize().bfloat16().float().numpy()), module


def transformers_model(folder: Path) -> transformers.PreTrainedModel:
    """Load and run once: compressed-tensors unpacks the weights in the first forward pass."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        assert model(torch.arange(8)[None]).logits.isfinite().all()
    return model


def test_transformers_agrees(written, source):
    out, _, _, weights = written
    model = transformers_model(out)
    plain = transformers.AutoModelForCausalLM.from_pretrained(source)
    for name, parameter in plain.named_parameters():
        module = name.rpartition(".")[0]
        if name.endswith("weight") and module in weights:
            parameter = weights[module].dequantize().to(torch.bfloat16)
        assert torch.equal(model.get_parameter(name), parameter), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_model_dtypes(dtype, tmp_path):
    source = random_checkpoint(tmp_path / "plain", "MistralForCausalLM", dtype=dtype, num_hidden_layers=1)
    weights = quantize_checkpoint(source, tmp_path / "out", "w4a16", group(4, False, 64))
    model = transformers_model(tmp_path / "out")
    for module, weight in weights.items():
        assert weight.scale.dtype == dtype
        assert_same(open_checkpoint(tmp_path / "out").linear(module)[1], weight)
        assert torch.equal(model.get_submodule(module).weight, weight.dequantize().to(dtype))


@pytest.mark.parametrize("case", CASES)
def test_features_that_do_not_fill_a_word(case, tmp_path):
    """13 outputs: the last word of the zeros is half empty."""
    scheme, spec = CASES[case]
    weight = torch.randn(13, 256)
    data = round_to_nearest(weight, spec, torch.float32, torch.randn(13))
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/config.json").write_text("{}")
    save_file({"a.weight": weight, "a.bias": data.bias}, tmp_path / "plain/model.safetensors")
    plain = open_checkpoint(tmp_path / "plain")
    with CheckpointWriter(tmp_path / "out", plain, grid=(scheme, spec), ignore=[], metadata={}) as writer:
        writer.add_linear("a", data)
    assert_same(open_checkpoint(tmp_path / "out").linear("a")[1], data)


def test_golden_layout(tmp_path):
    """Names, dtypes, shapes and config as in docs/checkpoint-formats.md#what-is-written."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    source = random_checkpoint(tmp_path / "plain", "LlamaForCausalLM", dtype=torch.bfloat16, **sizes)
    shapes = {
        "self_attn.q_proj": (256, 256), "self_attn.k_proj": (128, 256), "self_attn.v_proj": (128, 256),
        "self_attn.o_proj": (256, 256), "mlp.gate_proj": (512, 256), "mlp.up_proj": (512, 256),
        "mlp.down_proj": (256, 512),
    }  # fmt: skip
    rest = {f"{name}.weight": ("BF16", [512, 256]) for name in ("lm_head", "model.embed_tokens")}
    norms = ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm")
    rest |= {f"{name}.weight": ("BF16", [256]) for name in norms}
    packed, whole = dict(rest), dict(rest)
    for name, (n, k) in shapes.items():
        module = f"model.layers.0.{name}"
        packed[f"{module}.weight_packed"] = ("I32", [n, k // 8])
        packed[f"{module}.weight_scale"] = ("BF16", [n, k // 128])
        packed[f"{module}.weight_shape"] = ("I64", [2])
        packed[f"{module}.weight_zero_point"] = ("I32", [n // 8, k // 128])
        whole[f"{module}.weight"] = ("I8", [n, k])
        whole[f"{module}.weight_scale"] = ("BF16", [n, 1])

    metadata = {"version": "0.1.0", "recipe": {"method": "rtn"}}
    quantize_checkpoint(source, tmp_path / "w4", "w4a16", group(4, False, 128), metadata=metadata)
    assert layout(tmp_path / "w4") == packed
    config = json.loads((tmp_path / "w4/config.json").read_text())
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 128}
    assert config.pop("quantization_config") == {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "format": "pack-quantized", "weights": weights}},
        "qrt": metadata,
    }
    theta = {"rope_theta": 10000.0}  # which transformers 4 reads
    assert config == json.loads((source / "config.json").read_text()) | theta

    quantize_checkpoint(source, tmp_path / "w8a8", "w8a8", channel(8, True))
    assert layout(tmp_path / "w8a8") == whole
    config = json.loads((tmp_path / "w8a8/config.json").read_text())["quantization_config"]
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    assert config["config_groups"]["group_0"] == {
        "targets": ["Linear"],
        "format": "int-quantized",
        "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        "input_activations": activations,
    }

    quantize_checkpoint(source, tmp_path / "w4a8", "w4a8", CASES["w4a8-g128-asym"][1])
    assert layout(tmp_path / "w4a8") == packed
    config = json.loads((tmp_path / "w4a8/config.json").read_text())["quantization_config"]
    assert config["format"] == "pack-quantized"
    assert config["config_groups"]["group_0"] == {
        "targets": ["Linear"],
        "format": "pack-quantized",
        "weights": weights,
        "input_activations": activations,
    }


def layout(folder: Path) -> dict[str, tuple[str, list[int]]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        slices = {name: file.get_slice(name) for name in file.keys()}
        return {name: (s.get_dtype(), s.get_shape()) for name, s in slices.items()}


GROUPS = {
    "attention": {
        "targets": ["re:.*self_attn.*", "model.layers.1.mlp.down_proj"],
        "format": "int-quantized",
        "weights": {"num_bits": 8, "strategy": "channel"},
        "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True},
    },
    "rest": {
        "targets": ["Linear"],
        "format": "pack-quantized",
        "weights": {"num_bits": 4, "group_size": 64, "symmetric": False},
    },
    "exact": {
        "targets": ["model.layers.0.self_attn.o_proj"],
        "format": "pack-quantized",
        "weights": {"num_bits": 8, "group_size": -1},
    },
    "values": {  # of regular expressions the first in the alphabet counts, whichever group is first
        "targets": ["re:.*[.]v_proj"],
        "format": "pack-quantized",
        "weights": {"num_bits": 4, "group_size": 32},
    },
}


def write_by_compressed_tensors(source: Path, out: Path, **config) -> dict[str, str]:
    """Round to nearest and write with the library itself; return the scheme of each Linear."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    full = QuantizationConfig.model_validate({"quantization_status": "frozen", **config})
    apply_quantization_config(model, full, show_progress=False)
    schemes = {}
    for name, module in model.named_modules():
        if (scheme := getattr(module, "quantization_scheme", None)) is not None:
            by_group = scheme.weights.strategy == "group"
            size = scheme.weights.group_size if by_group else module.in_features
            groups = module.weight.detach().unflatten(1, (-1, size))
            scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
            module.weight_scale.data.copy_(scale)
            module.weight_zero_point.data.copy_(zero)
            activations = 8 if scheme.input_activations else 16
            schemes[name] = f"w{scheme.weights.num_bits}a{activations}"
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(out)
    return schemes


def assert_read_alike(folder: Path, schemes: dict[str, str]):
    """qrt reads of every Linear the scheme and the weights that transformers unpacks."""
    read, loaded = open_checkpoint(folder), transformers_model(folder)
    for name, module in loaded.named_modules():
        if name.endswith("_proj"):
            scheme, weight = read.linear(name)
            assert scheme == schemes.get(name, "fp16"), name
            assert torch.equal(weight.dequantize().bfloat16(), module.weight), name
            assert (weight.bias is None) == (module.bias is None)
            assert weight.bias is None or torch.equal(weight.bias, module.bias)


def test_reads_what_compressed_tensors_writes(source, tmp_path):
    """Mixed precision, written by the library itself: the same scheme and the same weight of every Linear."""
    ignore = ["lm_head", "re:.*layers.1.mlp.up"]
    schemes = write_by_compressed_tensors(
        source, tmp_path, format="mixed-precision", config_groups=GROUPS, ignore=ignore
    )
    assert set(schemes.values()) == {"w4a16", "w8a16", "w8a8"}
    assert_read_alike(tmp_path, schemes)


def group_w4a8(layout: str, **weights) -> dict[str, object]:
    """An entry as llm-compressor's preset W4A8 makes it, in either layout."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False, **weights}
    tokens = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {"targets": ["Linear"], "format": layout, "weights": weights, "input_activations": tokens}


@pytest.mark.parametrize("layout", ["int-quantized", "pack-quantized"])
def test_w4a8_of_other_tools(layout, source, tmp_path):
    """One scale a channel runs; groups that nobody made progressive are read, and refused where they run."""
    ignore, cpu = ["lm_head"], torch.device("cpu")
    for name, strategy in (
        ("channel", {"strategy": "channel"}),
        ("group", {"strategy": "group", "group_size": 64}),
    ):
        entry = group_w4a8(layout, **strategy)
        schemes = write_by_compressed_tensors(
            source, tmp_path / name, format=layout, config_groups={"a": entry}, ignore=ignore
        )
        assert set(schemes.values()) == {"w4a8"}
        assert_read_alike(tmp_path / name, schemes)
    model = load_model(tmp_path / "channel", device=cpu, dtype=torch.bfloat16)
    assert set(model.schemes) == {"w4a8"}
    with pytest.raises(
        UnsupportedError, match=r"layers\.0\..*q_proj.*: group scales: .*convert --weight-only"
    ):
        load_model(tmp_path / "group", device=cpu, dtype=torch.bfloat16)


def test_bytes_of_more_bits_are_damage(source, tmp_path):
    """A config that says 4 bits of 8-bit codes."""
    quantize_checkpoint(source, tmp_path / "q", "w8a8", channel(8, True))
    edit(
        tmp_path / "q/config.json",
        lambda v: v["quantization_config"]["config_groups"]["group_0"]["weights"].update(num_bits=4),
    )
    refuse(
        tmp_path / "q",
        CheckpointError,
        "q_proj.weight holds more than 4 bits",
        "model.layers.0.self_attn.q_proj",
    )
