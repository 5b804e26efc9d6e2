"""The engine on a GPU: pool sized by measurement, results near those of the CPU."""

import gc

import numpy as np
import pytest
import torch

from qrt import EngineConfig, SamplingParams
from qrt.engine.engine import Engine
from tiny_models import random_checkpoint

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("gpu"), "LlamaForCausalLM", vocab_size=512)


def run(engine, requests, **options):
    for name, (prompt, params) in requests.items():
        engine.add(name, prompt, params, **options)
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    assert not [delta.error for delta in deltas if delta.error]
    return {name: [d for d in deltas if d.request_id == name] for name in requests}


@pytest.mark.alone
def test_the_measured_pool_leaves_room_for_the_largest_step(folder):
    """Take a tenth of the GPU beyond what is in use; other test processes' CUDA contexts count as in use."""
    share = 0.1
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    before = torch.cuda.memory_allocated()
    config = EngineConfig(
        str(folder), dtype="bfloat16", gpu_memory_utilization=1 - free / total + share, max_num_seqs=64
    )
    engine = Engine(config)
    torch.cuda.reset_peak_memory_stats()
    params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=8, prompt_logprobs=1)
    run(engine, {str(i): ([i + 3] * 300, params) for i in range(64)})
    assert torch.cuda.max_memory_allocated() - before < share * total
    assert engine.pool.num_slots >= 512


@pytest.mark.parametrize("kv", ["fp16", "int8", "int4"])
def test_scores_are_near_those_of_the_cpu(folder, kv):
    prompts = {str(n): (list(range(3, 3 + n)), SamplingParams(prompt_logprobs=0)) for n in (2, 65, 300)}
    scores = {}
    for device, dtype in (("cpu", "float32"), ("cuda", "float32")):
        config = EngineConfig(
            str(folder), kv=kv, device=device, dtype=dtype, attend_cache=True, kv_cache_memory_bytes=32 << 20,
            enforce_eager=True,
        )  # fmt: skip
        deltas = run(Engine(config), prompts, generate=False)
        scores[device] = np.concatenate([d.prompt_scores.logprobs for own in deltas.values() for d in own])
    assert float(np.abs(scores["cpu"] - scores["cuda"]).mean()) < 0.05


@pytest.mark.parametrize("heads", [9, 12, 16])
def test_many_query_heads_of_a_kv_head(tmp_path, heads):
    """One request, and more together: what each decodes is as likely as the CPU finds in fp32.

    GLM-4.5 has groups of 12, GLM-4 of 16.
    """
    sizes = {"num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": 128}
    folder = random_checkpoint(tmp_path, "Qwen3ForCausalLM", **sizes)
    decoded, loss = {}, {"fp16": 0.05, "int8": 0.05, "int4": 0.2}
    for kv in ("fp16", "int8", "int4"):
        config = EngineConfig(str(folder), dtype="bfloat16", kv=kv, kv_cache_memory_bytes=64 << 20)
        engine = Engine(config)
        for count in (1, 2, 4, 16):
            prompts = {f"{kv} {count} {i}": list(range(3 + i, 23 + 9 * i)) for i in range(count)}
            params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
            deltas = run(engine, {name: (prompt, params) for name, prompt in prompts.items()})
            for name, own in deltas.items():
                tokens = [token for delta in own for token in delta.token_ids]
                found = np.concatenate([d.logprobs.logprobs for d in own if d.logprobs is not None])
                decoded[name] = prompts[name] + tokens, found
    config = EngineConfig(str(folder), dtype="float32", device="cpu", kv_cache_memory_bytes=64 << 20)
    params = SamplingParams(prompt_logprobs=0)
    truth = run(Engine(config), {name: (own, params) for name, (own, _) in decoded.items()}, generate=False)
    for name, (_, found) in decoded.items():
        want = np.concatenate([d.prompt_scores.logprobs for d in truth[name]])[-len(found) :]
        assert len(found) == 24 and np.abs(found - want).mean() < loss[name.split()[0]], name


@pytest.mark.parametrize("kv", ["fp16", "int8", "int4"])
def test_recorded_steps_give_the_tokens_of_eager_ones(folder, kv):
    """Batches of every size down from 21, of which 17 and more are not recorded; every way of drawing."""
    ways = [{}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9}, {"logprobs": 2}, {"min_tokens": 9}]
    requests = {
        str(i): (
            [i + 3] * (5 * i + 1),
            SamplingParams(**{"temperature": 0} | ways[i % 5], seed=i, max_tokens=8 + 3 * i),
        )
        for i in range(21)
    }
    results = []
    for eager in (True, False):
        config = EngineConfig(
            str(folder), dtype="bfloat16", kv=kv, kv_cache_memory_bytes=64 << 20, enforce_eager=eager,
            cudagraph_capture_sizes=(1, 2, 4, 8, 16),
        )  # fmt: skip
        deltas = run(Engine(config), requests)
        results.append({name: [t for d in own for t in d.token_ids] for name, own in deltas.items()})
    assert results[0] == results[1]


@pytest.mark.parametrize("kv", ["fp16", "int8"])
def test_recorded_mixed_steps_give_the_tokens_of_eager_ones(tmp_path, kv):
    """Prompts alone, many at once, behind cached ones and beside requests that decode, in several chunks."""
    folder = random_checkpoint(tmp_path, "LlamaForCausalLM", vocab_size=512, max_position_embeddings=4096)
    results = []
    for eager in (True, False):
        config = EngineConfig(
            str(folder), dtype="bfloat16", kv=kv, kv_cache_memory_bytes=256 << 20, enforce_eager=eager,
            max_num_seqs=24, max_num_batched_tokens=2048,
        )  # fmt: skip
        engine, deltas = Engine(config), []
        for some in ((600,), (640, 641), range(30, 49), (1500, 7, 7), (1700,), (2500, 100)):
            for n in some:
                prompt = [5 + i % 300 if i < 100 else 5 + i * n % 490 for i in range(n)]
                params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
                engine.add(f"{n} {len(deltas)}", prompt, params)
                deltas += engine.step() + engine.step()  # the next ones come while these decode
            while engine.has_work and len(some) > 2:
                deltas += engine.step()
        while engine.has_work:
            deltas += engine.step()
        tokens = {delta.request_id: [] for delta in deltas}
        for delta in deltas:
            tokens[delta.request_id] += delta.token_ids
        recorded = {name for name, _ in engine.runner.token_steps._recorded}
        bodies = {"_mixed", "_prompts", "_forward", "_sample", "_sample_masked", "_step"}
        assert recorded == (set() if eager else bodies)
        results.append(tokens)
    assert results[0] == results[1] and {len(own) for own in results[0].values()} == {12}


def test_the_same_batch_gives_the_same_tokens(folder):
    requests = {
        str(i): ([i + 3] * (7 * i + 1), SamplingParams(temperature=t, seed=i, max_tokens=40, ignore_eos=True))
        for i, t in enumerate([0, 0.7, 1.0, 0, 1.3])
    }
    results = []
    for _ in range(2):
        config = EngineConfig(
            str(folder), dtype="bfloat16", kv="int8", kv_cache_memory_bytes=32 << 20, max_num_seqs=8
        )
        deltas = run(Engine(config), requests)
        results.append({name: [t for d in own for t in d.token_ids] for name, own in deltas.items()})
    assert results[0] == results[1] and all(len(tokens) == 40 for tokens in results[0].values())


def test_deleted_engine_frees_its_memory(folder):
    """At once: its weights and its pool may be most of the GPU, and the next one asks for them."""
    config = EngineConfig(
        str(folder), dtype="bfloat16", kv="int8", kv_cache_memory_bytes=512 << 20, max_num_seqs=8
    )
    run(Engine(config), {"first": ([3, 4, 5], SamplingParams(max_tokens=4))})  # leaves what is kept for ever
    gc.collect()
    before = torch.cuda.memory_allocated()
    gc.disable()
    try:
        run(Engine(config), {"again": ([3, 4, 5], SamplingParams(max_tokens=4))})
        assert torch.cuda.memory_allocated() < before + (64 << 20)
    finally:
        gc.enable()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_engines_on_two_devices(folder):
    """Of one process; neither need be the thread's current one, which stays."""
    engines = [
        Engine(
            EngineConfig(
                str(folder), device=f"cuda:{i}", dtype="bfloat16", kv="int8", kv_cache_memory_bytes=32 << 20,
                max_num_seqs=8, enable_prefix_caching=False,
            )
        )
        for i in range(2)
    ]  # fmt: skip
    requests = {
        str(n): ([n % 500] * n, SamplingParams(temperature=n % 2, seed=n, max_tokens=8, ignore_eos=True))
        for n in (1, 70, 400)
    }
    results = [run(engine, requests) for engine in (*engines, *engines)]
    answers = [{name: [t for d in own for t in d.token_ids] for name, own in r.items()} for r in results]
    assert answers == answers[:1] * 4 and torch.cuda.current_device() == 0
