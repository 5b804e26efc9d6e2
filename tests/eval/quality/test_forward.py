"""PromptReader beside transformers: prompts turn by their length, and layers slide windows."""

from types import SimpleNamespace

import pytest
import torch

from qrt.config import EngineConfig
from qrt.engine.engine import Engine
from qrt.mem import windows
from qrt_eval.quality.forward import PromptReader
from zoo import make


@pytest.mark.parametrize("length", [24, 40])  # up to the original context, and beyond
def test_windows_turn_by_their_length(length, tmp_path):
    theirs = make("phi3-longrope", tmp_path)
    engine = Engine(
        EngineConfig(
            str(tmp_path),
            device="cpu",
            dtype="float32",
            kv_cache_memory_bytes=4 << 20,
            enable_prefix_caching=False,
        )
    )
    ids = torch.randint(4, 512, (length,), generator=torch.Generator().manual_seed(2)).tolist()
    hidden = torch.cat(list(PromptReader(SimpleNamespace(engine=engine), 7).hidden(tuple(ids))))
    with torch.inference_mode():
        wanted = theirs(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    torch.testing.assert_close(engine.model.logits(hidden), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma3", "mistral", "llama"])
def test_states_are_those_of_transformers(name, tmp_path, monkeypatch):
    """A prompt goes through the slots of a window group again and again."""
    monkeypatch.setattr(windows, "MARGIN", 0)
    monkeypatch.setattr(windows, "AHEAD", 8)
    monkeypatch.setattr(windows, "STEP_TOKENS", 24)
    model = make(name, tmp_path)
    config = EngineConfig(str(tmp_path), device="cpu", enable_prefix_caching=False, max_num_seqs=1)
    engine = Engine(config)
    assert engine.pool.slots == ((256,) if name == "llama" else (256, 48))
    ids = tuple(torch.randint(4, 512, (200,), generator=torch.Generator().manual_seed(1)).tolist())
    states = torch.cat(list(PromptReader(SimpleNamespace(engine=engine)).hidden(ids)))
    with torch.inference_mode():
        want = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    torch.testing.assert_close(engine.model.logits(states).float(), want, rtol=1e-4, atol=1e-4)
