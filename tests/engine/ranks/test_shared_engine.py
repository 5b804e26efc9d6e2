"""Ranks that share a model give the tokens of one process, whatever the scheduler does."""

import random
from dataclasses import replace

import pytest
import torch

from qrt.config import EngineConfig
from qrt.engine.schedule import admission
from qrt.kernels import tensor_parallel as peers
from qrt.quant.spec import Granularity, QuantSpec
from qrt.request.sampling import SamplingParams
from thread_ranks import ThreadPeers, shared_engine
from tiny_models import quantize_checkpoint, random_checkpoint

GROUPS = QuantSpec(4, False, Granularity.GROUP, 32)
W8A8 = QuantSpec(8, True, Granularity.CHANNEL)
STEPS = 400
POOL_BYTES = {"fp16": 300_000, "int8": 100_000, "int4": 60_000}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints by scheme: two KV heads, and an mlp of five units."""
    root = tmp_path_factory.mktemp("ranks")
    plain = random_checkpoint(
        root / "fp16", "Qwen3ForCausalLM", vocab_size=200, hidden_size=128, intermediate_size=160,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_hidden_layers=2,
    )  # fmt: skip
    quantize_checkpoint(plain, root / "w4a16", "w4a16", GROUPS)
    quantize_checkpoint(plain, root / "w8a8", "w8a8", W8A8)
    return root


def config_of(folder, ranks, kv):
    """Settings whose pool has as many tokens for any number of ranks."""
    return EngineConfig(
        str(folder), device="cpu", dtype="float32", max_model_len=160, max_num_seqs=6,
        max_num_batched_tokens=48, overlap=True, kv=kv,
        kv_cache_memory_bytes=POOL_BYTES[kv] // min(ranks, 2),
    )  # fmt: skip


def params_of(rng):
    return SamplingParams(
        temperature=rng.choice([0, 0.8]),
        seed=rng.randrange(100),
        top_k=rng.choice([0, 0, 20]),
        frequency_penalty=rng.choice([0, 0, 0.5]),
        logprobs=rng.choice([None, None, 2]),
        max_tokens=rng.randrange(1, 50),
        ignore_eos=True,
    )


def driven(config, ranks, seed, arrivals=30):
    """Tokens and log-probabilities of every request under one random load."""
    rng, found = random.Random(seed), {}
    shared = [rng.randrange(200) for _ in range(60)]
    with shared_engine(config, ranks) as (engine, group):
        for step in range(STEPS):
            if step < arrivals and rng.random() < 0.5:
                name = str(len(found))
                prompt = shared[: rng.choice([0, 20, 60])] + [
                    rng.randrange(200) for _ in range(rng.randrange(1, 90))
                ]
                engine.add(name, prompt, params_of(rng))
                found[name] = []
            if found and rng.random() < 0.03:
                name = rng.choice(list(found))
                engine.abort(name)
            for delta in engine.step():
                assert not delta.error, delta.error
                found[delta.request_id] += delta.token_ids
            if not engine.has_work and step > arrivals:
                break
        else:
            pytest.fail("the load has not ended")
    if group is not None:
        for runner in group.others:  # they have ended
            for name in ("last_token", "length", "slot_tables"):
                own, whole = getattr(runner.table, name), getattr(engine.runner.table, name)
                assert torch.equal(own, whole), name
    return found


@pytest.mark.parametrize(
    ("scheme", "kv", "ranks"),
    [("fp16", "int4", 2), ("w4a16", "int8", 2), ("w4a16", "int4", 4)],
)
def test_ranks_give_the_tokens_of_one(folders, monkeypatch, scheme, kv, ranks):
    monkeypatch.setattr(admission, "EXPECTED_TOKENS", 4)  # so that some are paused
    found = [driven(config_of(folders / scheme, ranks=n, kv=kv), n, seed=1) for n in (1, ranks)]
    assert found[0] == found[1]


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
def test_ranks_agree_on_sums_in_int8(folders, monkeypatch, scheme):
    monkeypatch.setattr(peers, "INT8_BYTES", 6 * 2 * 128)
    packed = []

    def swap(self, x):
        packed.append(x.dtype)
        return own(self, x)

    own = ThreadPeers.all_to_all
    monkeypatch.setattr(ThreadPeers, "all_to_all", swap)
    config = replace(config_of(folders / scheme, ranks=2, kv="int8"), all_reduce_dtype="int8")
    found = driven(config, 2, seed=2, arrivals=4)
    assert all(found.values()) and {torch.int8, torch.float32} == set(packed)


@pytest.mark.parametrize("ranks", [2, 4])
def test_long_steps_in_own_rows_change_no_token(folders, monkeypatch, ranks):
    config = config_of(folders / "w8a8", ranks=ranks, kv="int8")
    want = driven(config, ranks, seed=2, arrivals=8)
    monkeypatch.setattr(peers, "OWN_ROWS_BYTES", 6 * 2 * 128)  # six rows: some steps are shorter
    dtypes = set()

    def whole(self, own, rows):
        dtypes.add(own.dtype)
        return peers.TensorParallelGroup.all_gather(self, own, rows)

    monkeypatch.setattr(ThreadPeers, "all_gather", whole)
    assert driven(config, ranks, seed=2, arrivals=8) == want
    assert dtypes == {torch.int8, torch.float32}  # codes, and with them scales; the last norm
