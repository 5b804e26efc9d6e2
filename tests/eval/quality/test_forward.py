"""PromptReader beside transformers, where the length of a window decides how it turns."""

from types import SimpleNamespace

import pytest
import torch

from qrt import EngineConfig
from qrt.engine.engine import Engine
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
