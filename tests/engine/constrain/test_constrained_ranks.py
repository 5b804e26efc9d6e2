"""Ranks take rank 0's tokens where it alone has the masks, and answers are those of one rank."""

import pytest
from fake_decoder import EOS
from fake_grammars import FakeBatch, FakeGrammars

from qrt.config import EngineConfig
from qrt.request.sampling import SamplingParams
from qrt.request.thinking import Thinking
from thread_ranks import shared_engine
from tiny_models import random_checkpoint

MARKS = Thinking(end=(3, 4), start=(5,), inside=True, budget=6, closing=(9, 3, 4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_checkpoint(
        tmp_path_factory.mktemp("ranks"), "LlamaForCausalLM", vocab_size=140, eos_token_id=EOS,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, intermediate_size=160,
    )  # fmt: skip


def answers(folder, ranks):
    config = EngineConfig(
        str(folder), device="cpu", dtype="float32", max_model_len=64, max_num_seqs=4, overlap=True,
        kv_cache_memory_bytes=100_000,
    )  # fmt: skip
    found = {}
    with shared_engine(config, ranks) as (engine, _):
        engine._constraints._load, engine._constraints._batch = FakeGrammars, FakeBatch()
        for index in range(6):
            shape = {"regex": f"{index}:12"} if index % 3 else None
            params = SamplingParams(
                temperature=index % 2, seed=index, max_tokens=20, top_k=(0, 0, 5)[index % 3],
                structured_outputs=shape,
            )  # fmt: skip
            engine.add(str(index), [index + 1, 2, 3], params, thinking=MARKS if index > 3 else None)
        while engine.has_work:
            for delta in engine.step():
                assert not delta.error, delta.error
                found.setdefault(delta.request_id, []).extend(delta.token_ids)
    return found


def test_constrained_answers_of_ranks_are_those_of_one(folder):
    found = answers(folder, 2)
    assert len(found) == 6 and found == answers(folder, 1)
