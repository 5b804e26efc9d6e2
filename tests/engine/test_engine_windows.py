"""Models whose layers slide windows: a request frees what its windows have passed, and nothing else changes.

The engine runs zoo models with small pools: chunks of prompts, pauses, shared prompts, prefixes found again,
aborts, overlap and padded steps. Every slot that is free holds NaN at every step.
"""

from __future__ import annotations

import pytest
import torch

from qrt.config import EngineConfig
from qrt.engine.engine import Engine
from qrt.engine.schedule import admission, lookahead
from qrt.engine.step.graphs import TokenSteps
from qrt.mem import sizing, windows
from qrt.mem.windows import LayerGroups, held_slots
from qrt.request.sampling import SamplingParams
from zoo import WINDOW, make

OUTPUT = 24
# mistral has no layer without a window; llama4's attend segments of as many tokens
NAMES = ["gpt_oss", "llama4", "mistral"]
OTHERS = ("gemma2", "gemma3", "ministral", "cohere2")
NAMES += [pytest.param(name, marks=pytest.mark.exhaustive) for name in OTHERS]


def prompts():
    """Return prompts longer than a window; two are equal, and two begin alike beyond a window."""
    generator = torch.Generator().manual_seed(3)
    long, short, other = (torch.randint(4, 512, (n,), generator=generator).tolist() for n in (90, 21, 60))
    return [long, short, long, long[:70] + other, other, long + short]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    """Let requests keep hardly more than their windows, and expect too short outputs, so that some pause."""
    monkeypatch.setattr(windows, "MARGIN", 2)
    monkeypatch.setattr(windows, "AHEAD", 12)
    monkeypatch.setattr(lookahead, "GROW_TOKENS", 4)
    monkeypatch.setattr(windows, "STEP_TOKENS", 16)
    monkeypatch.setattr(admission, "expected_output", lambda done, most, conservative: done)


@pytest.fixture(scope="module", params=NAMES)
def case(request, tmp_path_factory):
    """The folder of a zoo model, and transformers' model of it."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make(request.param, folder)


def build(folder, kv="fp16", slots=(192, 128), **settings):
    """Return an engine with `slots` for both groups, which checks and poisons them at every step."""
    settings = {"max_model_len": 176, "max_num_seqs": 5, "max_num_batched_tokens": 24} | settings
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizing, "_divided", lambda *_: list(slots))
        engine = Engine(
            EngineConfig(str(folder), kv=kv, device="cpu", attend_cache=True, dtype="float32", **settings)
        )
    runner = engine.runner
    if settings.get("overlap", True):
        runner.token_steps = TokenSteps(
            runner.model,
            runner.kv,
            runner.table,
            [8],
            attend_cache=True,  # padded, as on a GPU
        )
    return engine


@torch.inference_mode()
def poison(engine):
    """Write NaN, or the largest words, into every slot that nobody holds."""
    kv, storage = engine.scheduler.kv, engine.runner.kv
    pools = [kv._slots, *(pool._slots for pool in kv.windows)]
    for i in range(len(storage)):
        layer = storage.layer(i)
        free = torch.ones(layer.buffers[0].shape[0], dtype=torch.bool, device=layer.buffers[0].device)
        free[torch.from_numpy(pools[layer.group].in_use()).to(free.device).long()] = False
        for buffer in layer.buffers:
            buffer[free] = torch.nan if buffer.is_floating_point() else -1


def answers(engine, rounds=2, aborts=True):
    """Return tokens and log-probabilities of each prompt and round, and what was found in the cache."""
    params = SamplingParams(
        temperature=0, max_tokens=OUTPUT, ignore_eos=True, logprobs=0, prompt_logprobs=None
    )
    found, cached = [], 0
    for turn in range(rounds):
        got = {}
        for i, prompt in enumerate(prompts()):
            engine.add(f"{turn}-{i}", prompt, params)
        if aborts:
            engine.add(f"{turn}-abort", prompts()[0][:50], params)
        steps = 0
        while engine.has_work:
            poison(engine)
            for delta in engine.step():
                assert delta.error is None
                tokens, scores = got.setdefault(delta.request_id, ([], []))
                tokens += delta.token_ids
                scores += delta.logprobs.logprobs.tolist() if delta.token_ids else []
                cached = max(cached, delta.num_cached)
            engine.scheduler.kv.check()
            steps += 1
            if aborts and steps == 9:
                engine.abort(f"{turn}-abort")
        found += [got[f"{turn}-{i}"] for i in range(len(prompts()))]
    kv = engine.scheduler.kv
    assert kv.available == kv.num_slots and all(pool.available == pool.capacity for pool in kv.windows)
    return [tokens for tokens, _ in found], torch.tensor([scores for _, scores in found]), cached


def without_groups(monkeypatch):
    monkeypatch.setattr(LayerGroups, "of", classmethod(lambda cls, own, _: cls((0,), (0,) * len(own))))


def test_engine_gives_the_tokens_of_transformers(case):
    folder, model = case
    engine = build(folder)
    assert [pool.window for pool in engine.scheduler.kv.windows] == [WINDOW]
    tokens, scores, cached = answers(engine)
    assert cached > 2 * WINDOW
    if engine.pool.all_bytes:  # else slots of the first group take no memory, and are enough
        assert engine.scheduler.num_pauses
    for got, own, prompt in zip(tokens, scores, prompts() * 2, strict=True):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt + got[:-1]]), use_cache=False).logits[0].float()
        logits = logits[len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == got
        want = logits.log_softmax(-1).gather(1, torch.tensor(got)[:, None])[:, 0]
        torch.testing.assert_close(own, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("kv", "settings"),
    [
        ("int8", {}),
        ("k8v4", {"overlap": False, "enable_prefix_caching": False}),
        pytest.param("int4", {}, marks=pytest.mark.exhaustive),
        pytest.param("k8v4", {"overlap": False}, marks=pytest.mark.exhaustive),
        pytest.param("int8", {"enable_prefix_caching": False}, marks=pytest.mark.exhaustive),
    ],
)
def test_quantized_answers_are_those_without_groups(kv, settings, tmp_path, monkeypatch):
    make("gemma3", tmp_path)
    rounds = 2 if settings.get("enable_prefix_caching", True) else 1
    tokens, scores, _ = answers(build(tmp_path, kv, **settings), rounds)
    without_groups(monkeypatch)
    plain = build(tmp_path, kv, slots=(1024,), **settings)
    assert not plain.scheduler.kv.windows
    expected = answers(plain, rounds)
    assert tokens == expected[0]
    torch.testing.assert_close(scores, expected[1], rtol=0, atol=1e-4)


def test_long_request_keeps_its_window_alone(tmp_path):
    """It never holds more than it is sized for, though it is as long as the model allows."""
    make("gemma3", tmp_path)
    engine = build(tmp_path, slots=(256, 64), max_model_len=256, enable_prefix_caching=False)
    (pool,), held = engine.scheduler.kv.windows, []
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    engine.add("long", prompts()[0], params)
    while engine.has_work:
        poison(engine)
        if engine.step():
            held.append(pool.capacity - pool.available)
    assert len(held) == 150 and max(held) <= held_slots(WINDOW, 256) + 24  # a chunk of the prompt
    assert WINDOW <= min(held[2:-2]) and max(held[2:]) <= held_slots(WINDOW, 256)


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["fp16", "int8", "int4"])
def test_recorded_steps_on_a_gpu_give_the_answers_without_groups(kv, tmp_path, monkeypatch):
    """Kernels read whole tiles: with the margin that they need, slots that nobody holds may hold NaN."""
    monkeypatch.setattr(windows, "MARGIN", 64)  # of 16-bit values a tile has 64 keys
    monkeypatch.setattr(windows, "STEP_TOKENS", 64)
    make("gemma3", tmp_path)
    generator = torch.Generator().manual_seed(5)
    asked = [torch.randint(4, 512, (n,), generator=generator).tolist() for n in (200, 150, 9, 200)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=0)

    def run(poisoned):
        limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 64 << 20}
        engine = Engine(EngineConfig(str(tmp_path), kv=kv, device="cuda", dtype="bfloat16", **limits))
        for i, prompt in enumerate(asked):
            engine.add(str(i), prompt, params)
        tokens, held = {}, 0
        while engine.has_work:
            if poisoned:
                torch.cuda.synchronize()
                poison(engine)
                (pool,) = engine.scheduler.kv.windows
                held = max(held, pool.capacity - pool.available)
            for delta in engine.step():
                assert delta.error is None
                tokens[delta.request_id] = tokens.get(delta.request_id, ()) + delta.token_ids
        return tokens, held

    with_groups, held = run(True)
    assert held < 3 * 200
    without_groups(monkeypatch)
    assert run(False)[0] == with_groups


def test_windows_that_free_nothing_are_no_group(tmp_path, monkeypatch):
    monkeypatch.undo()
    make("gemma3", tmp_path)
    engine = Engine(EngineConfig(str(tmp_path), device="cpu", max_model_len=WINDOW + 128 + 64))
    assert engine.scheduler.kv.windows == [] and len(engine.runner.kv.slots) == 1
    engine = Engine(EngineConfig(str(tmp_path), device="cpu", max_model_len=WINDOW + 128 + 65))
    assert [pool.window for pool in engine.scheduler.kv.windows] == [WINDOW]
