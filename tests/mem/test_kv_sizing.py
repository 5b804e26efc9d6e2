"""The arithmetic of the pool, from the definition: the largest one that fits."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qrt.errors import ConfigError, UnsupportedError
from qrt.mem.sizing import GIB, PAD_SLOTS, default_num_seqs, kv_budget_bytes, pool_bytes, pool_size
from qrt.mem.slots import RUN
from qrt.quant.kv import KV_FORMATS

FP16, INT8, INT4 = (KV_FORMATS[name] for name in ("fp16", "int8", "int4"))
LLAMA_8B = (8, 128, torch.bfloat16)


def test_bytes_per_token_of_an_8b_model():
    """K and V of one token-head at D = 128 take 512, 264 and 136 bytes."""
    for kv_format, per_head in ((FP16, 512), (INT8, 264), (INT4, 136)):
        assert pool_bytes([kv_format] * 32, 1000, *LLAMA_8B) == (1000 + PAD_SLOTS) * 32 * 8 * per_head


def test_default_number_of_requests():
    """By what fits of requests of 1,024 tokens, or of shorter ones where the context is; powers of two."""
    assert default_num_seqs(1 << 30, 1 << 14, 4096) == 256, "64 fit"
    assert default_num_seqs(600 << 24, 1 << 14, 4096) == 512, "600 fit"
    assert default_num_seqs(1 << 40, 1 << 14, 4096) == 1024
    assert default_num_seqs(600 << 20, 1 << 12, 256) == 512
    assert default_num_seqs(1 << 40, 1 << 14, 1 << 18) == 512, "the request table would be 1 GiB of 1,024"
    assert default_num_seqs(1 << 40, 1 << 14, 1 << 21) == 256


@settings(max_examples=100, deadline=None)
@given(
    budget=st.integers(1, 40_000_000),
    layers=st.lists(st.sampled_from([FP16, INT8, INT4]), min_size=1, max_size=4),
    max_model_len=st.integers(1, 400),
    max_num_seqs=st.integers(1, 40),
)
def test_the_largest_pool_that_fits(budget, layers, max_model_len, max_num_seqs):
    def fits(num_slots):
        return pool_bytes(layers, num_slots, 2, 64, torch.float32) <= budget

    def make():
        return pool_size(
            layers, 2, 64, torch.float32,
            budget_bytes=budget, max_model_len=max_model_len, max_num_seqs=max_num_seqs,
        )  # fmt: skip

    most = -(-max_model_len * max_num_seqs // RUN) * RUN
    if not fits(-(-max_model_len // RUN) * RUN):
        with pytest.raises(ConfigError):
            make()
        return
    size = make()
    assert size.num_slots % RUN == 0 and fits(size.num_slots) and size.num_slots >= max_model_len
    assert size.num_slots == most or not fits(size.num_slots + RUN)
    assert size.num_slots <= most
    assert size.num_bytes == pool_bytes(layers, size.num_slots, 2, 64, torch.float32)


def test_the_start_up_line():
    size = pool_size([INT8] * 32, *LLAMA_8B, budget_bytes=20 * GIB, max_model_len=32_768, max_num_seqs=256)
    assert size.num_slots == (20 * GIB // (32 * 8 * 264) - 16) // 16 * 16 == 317_728
    assert str(size) == (
        "KV pool: 317,728 tokens, 9.7x concurrent requests of 32,768 tokens, 20.00 GiB as int8"
    )
    mixed = pool_size(
        [FP16, *[INT4] * 30, FP16], *LLAMA_8B, budget_bytes=GIB, max_model_len=64, max_num_seqs=1
    )
    assert (mixed.num_slots, mixed.kv, mixed.concurrency) == (64, "fp16+int4", 1.0)


def test_too_small_names_sizes_and_remedies():
    with pytest.raises(ConfigError) as error:
        pool_size([FP16] * 32, *LLAMA_8B, budget_bytes=GIB, max_model_len=32_768, max_num_seqs=8)
    message = str(error.value)
    fitting = (GIB // (32 * 8 * 512) - 16) // 16 * 16
    for part in (
        "1.00 GiB",
        f"{fitting} tokens",
        "fp16",
        "131072 bytes",
        "32768",
        "--gpu-memory-utilization",
    ):
        assert part in message
    assert "\n" not in message and "--kv " not in message, "no format holds that many"
    with pytest.raises(ConfigError, match="hold 0 tokens"):
        pool_size([FP16], *LLAMA_8B, budget_bytes=1, max_model_len=1, max_num_seqs=1)


@pytest.mark.parametrize(
    "layers, head_dim, budget_bytes",
    [
        ([FP16] * 4, 128, 3_000_000),
        ([FP16] * 4, 128, 20_000_000),
        ([FP16] * 4, 66, 20_000_000),  # heads that int4 does not hold
        ([INT8] * 4, 128, 20_000_000),
        ([FP16, INT4], 128, 3_000_000),
    ],
)
def test_each_remedy_of_a_pool_that_is_too_small_helps(layers, head_dim, budget_bytes):
    def size(budget_bytes=budget_bytes, max_model_len=4000, formats=layers):
        settings = {"budget_bytes": budget_bytes, "max_model_len": max_model_len, "max_num_seqs": 1}
        return pool_size(formats, 8, head_dim, torch.bfloat16, **settings)

    with pytest.raises(ConfigError) as error:
        size()
    message = str(error.value)
    assert size(max_model_len=int(re.search(r"--max-model-len to (\d+)", message)[1]))
    enough = int(re.search(r"--kv-cache-memory-bytes to (\d+)", message)[1])
    assert size(enough)
    with pytest.raises(ConfigError):
        size(enough - 1)
    advised = re.findall(r"--kv (\w+)", message)
    for name in KV_FORMATS:
        try:
            helps = size(formats=[KV_FORMATS[name]] * len(layers)) is not None
        except (ConfigError, UnsupportedError):
            helps = False
        assert helps == (name in advised), name


def budget(device, **more):
    settings = {"gpu_memory_utilization": 0.9, "reserve_bytes": 2 * GIB, **more}
    return kv_budget_bytes(torch.device(device), **settings)


def test_budget_of_a_gpu(monkeypatch):
    """80 GiB, of which 24 are in use: 72 - 24 - 2 are left."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (56 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert budget("cuda") == 46 * GIB
    assert budget("cuda", gpu_memory_utilization=0.5, reserve_bytes=0) == 16 * GIB
    assert budget("cuda", kv_cache_memory_bytes=123) == 123
    with pytest.raises(
        ConfigError, match=r"24\.00 GiB in use and 2\.00 GiB .* 80\.00 GiB x .* 0\.3; raise it"
    ):
        budget("cuda", gpu_memory_utilization=0.3)


def test_budget_of_a_cpu():
    assert budget("cpu") == 4 * GIB
    assert budget("cpu", kv_cache_memory_bytes=10) == 10


@pytest.mark.gpu
@pytest.mark.alone  # what other processes take meanwhile counts too
def test_budget_of_this_gpu():
    before = torch.cuda.mem_get_info()[0]
    blocks = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    held = budget("cuda", reserve_bytes=0)
    del blocks
    freed = budget("cuda", reserve_bytes=0)  # what torch keeps of `blocks` is not counted as used
    assert freed - held >= GIB - (64 << 20) and freed <= before
