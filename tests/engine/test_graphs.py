"""Padded decode steps against the engine without them, on a CPU; recording is tested on a GPU."""

import pytest

from qrt import EngineConfig, SamplingParams
from qrt.engine.engine import Engine
from qrt.engine.graphs import DecodeSteps, default_sizes
from qrt.errors import ConfigError
from tiny_models import random_checkpoint

WAYS = [
    {"temperature": 0}, {"temperature": 0.8}, {"temperature": 1.2, "top_p": 0.9, "top_k": 40},
    {"temperature": 0, "logprobs": 2}, {"temperature": 0, "min_tokens": 9},
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("graphs"), "LlamaForCausalLM", vocab_size=512)


def tokens(folder, kv, sizes):
    engine = Engine(EngineConfig(str(folder), kv=kv, device="cpu", kv_cache_memory_bytes=8 << 20))
    runner = engine.runner
    if sizes:
        runner.decode_steps = DecodeSteps(runner.model, runner.kv, runner.table, sizes)
    for i in range(11):
        params = SamplingParams(**WAYS[i % 5], seed=i, max_tokens=4 + 2 * i, ignore_eos=i % 2 == 0)
        engine.add(str(i), [i + 3] * (5 * i + 1), params)
    deltas = []
    while engine.has_work:
        deltas += engine.step()
        assert int(runner.table.length[-1]) == 0  # the padding row knows no tokens
    assert not [delta.error for delta in deltas if delta.error]
    return {str(i): [t for d in deltas if d.request_id == str(i) for t in d.token_ids] for i in range(11)}


@pytest.mark.parametrize("kv", ["fp16", "int8"])
def test_padding_changes_no_token(folder, kv):
    """Batches of every size down from 11; those of 9 and more are not padded."""
    plain = tokens(folder, kv, None)
    assert tokens(folder, kv, [1, 2, 4, 8]) == plain
    assert tokens(folder, kv, [16]) == plain


def test_default_sizes():
    assert default_sizes(1) == [1] and default_sizes(3) == [1, 2, 4] and default_sizes(9) == [1, 2, 4, 8, 16]
    assert default_sizes(256) == default_sizes(1000) == [1, 2, 4, *range(8, 257, 8)]


def test_bad_sizes_are_refused():
    with pytest.raises(ConfigError, match="cudagraph_capture_sizes: got 0"):
        EngineConfig("tiny", cudagraph_capture_sizes=(4, 0))
