"""Test `--compare` of kernels, with stand-ins for what needs a GPU or is not installed."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from errors import assert_names
from qrt.arch.read import read_arch
from qrt_eval.speed.kernels import peers
from qrt_eval.speed.kernels.timer import Rates

RATES = Rates(bytes_per_s=1e12, flops_per_s=1e14, int8_ops_per_s=2e14)
SMALL = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
}  # fmt: skip
CONFIG = read_arch({"architectures": ["LlamaForCausalLM"], **SMALL}, "small")
CPU = torch.device("cpu")


def run(*ops, tokens=(1, 32)):
    """Return the cells of the table by (name, size)."""
    rows = list(peers.rows(CONFIG, ops, tokens, [(2, 40)], [(16, 0), (16, 32)], RATES, CPU))
    cells = {(row.what, row.at): row for row in rows}
    assert len(cells) == len(rows) and not any(row.ours for row in rows)
    return cells


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """Use two copies of every operand and one call each, compile nothing, and hide all packages."""
    monkeypatch.setattr(peers, "copies", lambda num_bytes: 2)
    monkeypatch.setattr(
        peers, "microseconds", lambda operator, operands: [operator(*some) for some in operands] and 5.0
    )
    monkeypatch.setattr(peers, "WORKSPACE_BYTES", 64)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    for package in ("torchao", "gemlite", "flashinfer"):
        monkeypatch.setitem(sys.modules, package, None)


def put(monkeypatch, name, **members):
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def test_missing_packages_are_named_once(capsys):
    cells = run("linear", "decode", "prefill")
    assert {what.split()[0] for what, _ in cells} <= {"torch._int_mm", "tinygemm"}
    lines = capsys.readouterr().err.splitlines()
    for package in ("torchao", "gemlite", "flashinfer"):
        assert sum(f"{package} left out" in line for line in lines) == 1


def test_failing_peer_does_not_stop_the_others(monkeypatch, capsys):
    def fail(k, n, device):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(peers, "PEERS", (peers.Peer("torch", "broken", fail), peers.PEERS[1]))
    assert ("torch._int_mm (without quantizing) sum", "M=32") in run("linear")
    assert_names(capsys.readouterr().err, "--compare", "broken", "RuntimeError: no kernel image")


def test_torchs_int8_product(monkeypatch):
    """It has rows only for the token counts it supports, and its int8 bytes are counted."""
    monkeypatch.setattr(peers, "PEERS", peers.PEERS[1:2])
    cells = run("linear")
    name = "torch._int_mm (without quantizing)"
    assert {at for _, at in cells} == {"M=32"} and cells[f"{name} sum", "M=32"].us == 20.0
    row = cells[f"{name} gate_up", "M=32"]  # 128 -> 512
    assert row.num_bytes == 128 * 512 + 32 * 128 + 2 * 32 * 512
    assert row.floor_us == max(row.num_bytes / 1e12, row.flops / 2e14) * 1e6


def test_tinygemm(monkeypatch):
    def multiply(x, codes, group, scale_and_zero):
        assert scale_and_zero.shape == (x.shape[1] // group, len(codes), 2)
        return F.linear(x, codes.repeat(1, 2).to(x.dtype))

    aten = torch.ops.aten
    monkeypatch.setattr(aten, "_convert_weight_to_int4pack", lambda codes, tiles: codes, raising=False)
    monkeypatch.setattr(aten, "_weight_int4pack_mm", multiply, raising=False)
    monkeypatch.setattr(peers, "PEERS", peers.PEERS[:1])
    cells = run("linear", tokens=(1, 64, 256))
    assert {at for _, at in cells} == {"M=1", "M=64"}
    o = cells["tinygemm int4 o", "M=1"]  # 256 -> 128
    assert o.num_bytes == 256 * 128 // 2 + 4 * 256 * 128 // 128 + 2 * (256 + 128)


def test_torchao(monkeypatch):
    """Three configs each quantize a weight of every product once per copy."""
    made = []
    configs = ("Int4WeightOnlyConfig", "Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig")
    put(monkeypatch, "torchao")
    put(monkeypatch, "torchao.quantization", quantize_=lambda layer, config: made.append(config),
        **{name: lambda name=name, **settings: (name, settings) for name in configs})  # fmt: skip
    monkeypatch.setattr(peers, "PEERS", peers.PEERS[2:5])
    cells = run("linear", tokens=(1, 256))
    assert [made.count((name, peers._INT4 if "4W" in name else {})) for name in configs] == [8, 8, 8]
    sums = {(what, at) for what, at in cells if what.endswith("sum")}
    assert sums == {
        ("torchao int4 sum", "M=1"),
        ("torchao int8 sum", "M=1"),
        ("torchao int8 dynamic sum", "M=256"),
    }
    weight_only, dynamic = cells["torchao int8 qkv", "M=1"], cells["torchao int8 dynamic qkv", "M=256"]
    assert dynamic.num_bytes - weight_only.num_bytes == 255 * 2 * (128 + 512)  # the other tokens' x and y
    assert dynamic.flops == 256 * weight_only.flops


def test_gemlite(monkeypatch):
    class Layer:
        def __init__(self, bits, **sizes):
            self.bits, self.sizes = bits, sizes

        def pack(self, codes, scale, zero, bias):
            assert codes.shape == (self.sizes["out_features"], self.sizes["in_features"])
            assert codes.max() < 2**self.bits and scale.shape == zero.shape and bias is None
            self.weight = codes.to(scale.dtype)

        def __call__(self, x):
            return F.linear(x, self.weight)

    def int8(device, dtype):
        return SimpleNamespace(from_linear=lambda layer: layer)

    loaded = []
    put(monkeypatch, "gemlite", GemLiteLinear=Layer, DType=SimpleNamespace(BF16=0), load_config=loaded.append,
        __file__="/packages/gemlite/__init__.py")  # fmt: skip
    monkeypatch.setattr(peers, "is_hopper", lambda device: True)
    put(monkeypatch, "gemlite.helper", A8W8_INT8_dynamic=int8)
    monkeypatch.setattr(peers, "PEERS", peers.PEERS[5:])
    cells = run("linear")
    for name in ("gemlite w4a16", "gemlite w8a8"):
        assert cells[f"{name} sum", "M=1"].us == 20.0
    # gemlite finds it only for a GPU named H100
    assert set(loaded) == {"/packages/gemlite/configs/h100.json"}
    assert cells["gemlite w4a16 down", "M=32"].num_bytes < cells["gemlite w8a8 down", "M=32"].num_bytes


class Decode:
    """Take the arguments of flashinfer's wrapper, and attend."""

    def __init__(self, workspace, layout, **settings):
        assert layout == "NHD" and settings["use_cuda_graph"] and workspace.dtype == torch.uint8

    def plan(self, starts, pages, last, heads, kv_heads, dim, page, *, q_data_type, kv_data_type):
        self.starts, self.pages, self.last, self.type = starts, pages.long(), last, kv_data_type
        assert (heads, kv_heads, dim) == (4, 2, 64) and q_data_type == torch.bfloat16

    def run(self, q, cache):
        assert cache.dtype == self.type
        for i in range(len(q)):
            mine = cache[self.pages[self.starts[i] : self.starts[i + 1]]]
            tokens = (len(mine) - 1) * mine.shape[2] + self.last[i]
            k, v = mine.to(q.dtype).transpose(0, 1).flatten(1, 2)[:, :tokens].transpose(1, 2)
            assert k.shape == (2, 40, 64)
            F.scaled_dot_product_attention(q[i][None, :, None], k[None], v[None], enable_gqa=True)


def test_flashinfer(monkeypatch):
    chunks = []

    def prefill(q, k, v, causal):
        chunks.append((q.shape[0], k.shape[0]))
        assert causal and v.shape == k.shape == (k.shape[0], 2, 64) and q.shape[1:] == (4, 64)

    put(
        monkeypatch,
        "flashinfer",
        BatchDecodeWithPagedKVCacheWrapper=Decode,
        single_prefill_with_kv_cache=prefill,
    )
    cells = run("decode", "prefill")
    bf16, fp8 = (cells[f"flashinfer {name}, pages of 16", "2 x 40"] for name in ("bf16", "fp8"))
    assert bf16.num_bytes - fp8.num_bytes == 2 * 2 * 40 * 2 * 64
    assert {at for what, at in cells if what == "flashinfer, contiguous"} == {"16 + 0", "16 + 32"}
    assert chunks == [(16, 16)] * 2 + [(16, 48)] * 2
