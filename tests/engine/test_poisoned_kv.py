"""What no running request has written is never read: every slot that is free, and the one that padded rows
write to, holds NaN at every step."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from qrt import LLM, SamplingParams
from qrt.engine.schedule import admission
from qrt.engine.step.graphs import TokenSteps
from qrt.mem.sizing import PAD_SLOTS
from qrt.quant.kv import KV_FORMATS
from tiny_models import shallow

pytestmark = pytest.mark.model
PROMPTS = [
    "When a function is called, the",
    "In",
    "When a function is called, its arguments are",
    "A list " * 20,
]
SMALL = {"max_num_batched_tokens": 24, "max_model_len": 128, "max_num_seqs": 5}
SLOTS = 128


def poison(engine) -> int:
    """NaN, or the largest words, into every slot that nobody holds; how many those are."""
    slots = engine.scheduler.kv._slots
    free = np.setdiff1d(np.arange(slots.capacity + PAD_SLOTS), slots.in_use())
    for i in range(len(engine.runner.kv)):
        for buffer in engine.runner.kv.layer(i).buffers:
            buffer[torch.from_numpy(free)] = torch.nan if buffer.is_floating_point() else -1
    return len(free)


FORMATS = [
    pytest.param(kv, marks=[] if kv in ("fp16", "int4") else [pytest.mark.exhaustive]) for kv in KV_FORMATS
]


@pytest.fixture(autouse=True)
def one_layer(tmp_path_factory):
    with shallow(tmp_path_factory.getbasetemp()):
        yield


@pytest.mark.parametrize("kv", FORMATS)
def test_free_slots_are_never_read(kv, monkeypatch):
    """Chunks, pauses, shared prompts and prefixes found again, with overlap; two rounds over one pool."""
    monkeypatch.setattr(admission, "expected_output", lambda done, most, conservative: done)
    num_bytes = (SLOTS + PAD_SLOTS) * KV_FORMATS[kv].bytes_per_slot(2, 64, torch.float32)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    asked = [params, replace(params, n=2, temperature=1.0, seed=3), params, params]

    def run(poisoned: bool):
        llm = LLM("tiny", kv=kv, device="cpu", overlap=True, kv_cache_memory_bytes=num_bytes, **SMALL)
        runner = llm.engine.runner
        runner.token_steps = TokenSteps(runner.model, runner.kv, runner.table, [8])  # padded, as on a GPU
        step, poisoned_slots = llm.engine.step, []

        def poisoning_step():
            poisoned_slots.append(poison(llm.engine))
            return step()

        if poisoned:
            monkeypatch.setattr(llm.engine, "step", poisoning_step)
        outputs = [llm.generate(PROMPTS, asked, use_tqdm=False) for _ in range(2)]
        found = [(c.token_ids, c.cumulative_logprob) for round in outputs for o in round for c in o.outputs]
        return found, poisoned_slots, llm.engine.scheduler.num_pauses

    clean, _, _ = run(False)
    among_nan, slots, pauses = run(True)
    assert among_nan == clean and np.isfinite([logprob for _, logprob in clean]).all()
    assert min(slots) < 40 and max(slots) == SLOTS + PAD_SLOTS and pauses
