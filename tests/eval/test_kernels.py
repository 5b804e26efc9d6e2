"""`qrt-eval kernels`: every cell is measured and counted rightly, on a machine without a GPU too."""

import json

import pytest
import torch

from qrt.kernels import tuned
from qrt_eval import shapes
from qrt_eval.cli import main
from qrt_eval.kernels import timer
from qrt_eval.kernels.timer import COLD_BYTES, Rates, copies, microseconds
from qrt_eval.kernels.tune import trials

SMALL = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "rope_theta": 1e4, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "small", ("LlamaForCausalLM", SMALL))


def test_the_whole_table(small, tmp_path, capsys):
    out = tmp_path / "kernels.json"
    words = "kernels --shape small --tokens 1 8 --decode 2x64 --prefill 32x0 32x32 --compare --json"
    assert main([*words.split(), str(out)]) == 0
    result = json.loads(out.read_text())
    cells = {(row["op"], row["what"], row["at"]): row for row in result["kernels"]}
    assert len(cells) == len(result["kernels"]) and {key[0] for key in cells} == {
        "linear", "decode", "prefill", "kv_write", "rmsnorm", "silu_mul",
    }  # fmt: skip
    for row in cells.values():
        assert row["us"] > 0 and row["floor_us"] > 0 and row["num_bytes"] > 0
    # 128 -> 2 * 256 in int4: codes, a scale and a zero word a group of 128, x and y in fp32
    gate_up = cells["linear", "w4a16 gate_up", "M=8"]
    assert gate_up["flops"] == 2 * 8 * 128 * 512
    assert cells["linear", "w4a16 sum", "M=8"]["us"] == pytest.approx(
        sum(cells["linear", f"w4a16 {name}", "M=8"]["us"] for name in ("qkv", "o", "gate_up", "down"))
    )
    # 2 x 64 tokens, 2 heads of K and V: 64 codes in 4 bits and two fp16 scales each
    assert cells["decode", "int4", "2 x 64"]["num_bytes"] == 2 * 64 * 2 * 2 * (64 // 2 + 4)
    assert "linear" in capsys.readouterr().out


def test_time_is_of_one_call(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    clock = [0.0]
    monkeypatch.setattr(timer.time, "perf_counter", lambda: clock[0])

    def work(seconds):
        clock[0] += seconds

    assert microseconds(work, [(0.01,), (0.02,), (0.03,)]) == pytest.approx(2e4)


def test_operands_do_not_fit_the_cache_together():
    for size in (1000, 10 << 20, 200 << 20):
        assert copies(size) >= 2 and (copies(size) * size >= COLD_BYTES or copies(size) == 64)


def test_floor_is_the_slower_of_bytes_and_work():
    rates = Rates(bytes_per_s=1e12, flops_per_s=1e14, int8_ops_per_s=2e14)
    assert rates.floor_us(1e6) == pytest.approx(1) and rates.floor_us(1e6, 1e9) == pytest.approx(10)
    assert rates.floor_us(1e6, int8_ops=1e9) == pytest.approx(5)


@pytest.mark.parametrize("words", ["--decode 16", "--prefill ax3", "--decode 0x10"])
def test_a_size_that_is_none_is_refused(small, words, capsys):
    assert main(["kernels", "--shape", "small", "--op", "decode", "prefill", *words.split()]) == 1
    assert "wanted two numbers like 16x4096" in capsys.readouterr().err


def test_tuning_without_a_gpu_is_refused(capsys):
    if not torch.cuda.is_available():
        assert main(["kernels", "--tune", "llama-3-8b"]) == 1
        assert "no GPU is here" in capsys.readouterr().err


def test_every_key_has_several_trials_and_none_twice():
    for k, n in ((4096, 6144), (14336, 4096), (1024, 3072)):
        todo = list(trials(k, n))
        assert len(todo) == len(set(todo))
        by_key = {key: sum(t.key == key for t in todo) for key in {t.key for t in todo}}
        assert min(by_key.values()) >= 1 and len(by_key) == 2 * 8 + 9


def test_files_of_measured_block_sizes_are_whole():
    for file in tuned.FOLDER.glob("*.json"):
        table = json.loads(file.read_text())
        assert table and all(
            key.startswith(("tiles ", "int8 ")) and all(isinstance(n, int) and n > 0 for n in plan)
            for key, plan in table.items()
        )
    assert tuned.path("NVIDIA H200").name == "nvidia_h200.json"
    assert tuned.configs(torch.device("cpu")) == {}
