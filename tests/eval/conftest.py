"""Define `--shape small`, which runs in a moment, and shorten what else takes long."""

from pydoc_data import topics

import pytest

from qrt_eval.inputs import shapes
from qrt_eval.speed import latency

SMALL = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
    "tie_word_embeddings": True, "rope_theta": 10000.0,
}  # fmt: skip


@pytest.fixture
def small_shape(monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "small", ("LlamaForCausalLM", SMALL))


@pytest.fixture(scope="module", autouse=True)
def short_pydoc():
    """Let `pydoc` be its first 36 topics, 170,000 of 465,000 characters: nothing here reads more of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topics, "topics", {name: topics.topics[name] for name in sorted(topics.topics)[:36]})
        yield


@pytest.fixture(autouse=True)
def small_memory(monkeypatch):
    """Measure the bandwidth of 1 MiB, not of 1 GiB."""
    monkeypatch.setattr(latency, "READ_BYTES", 1 << 20)
