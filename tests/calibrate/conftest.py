"""Random checkpoints with a tokenizer, and a small calibration text."""

import argparse
import gc
import inspect

import pytest
import torch

from byte_tokenizer import save_tokenizer
from qrt_calibrate.estimate import duration
from qrt_calibrate.rounding import gptq
from qrt_calibrate.text.text import read_texts
from tiny_models import random_checkpoint


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory):
    """make_checkpoint("LlamaForCausalLM", dtype=..., **config) -> a folder with weights and tokenizer."""

    def make(architecture, **config):
        folder = tmp_path_factory.mktemp(architecture)
        save_tokenizer(random_checkpoint(folder, architecture, **{"dtype": torch.bfloat16, **config}))
        return folder

    return make


@pytest.fixture(scope="session")
def llama(make_checkpoint):
    """A bf16 Llama with grouped-query attention."""
    return make_checkpoint("LlamaForCausalLM")


@pytest.fixture(scope="session")
def calib(tmp_path_factory):
    """A text file of some 100 kB."""
    path = tmp_path_factory.mktemp("text") / "calib.txt"
    path.write_text(inspect.getsource(argparse))
    return path


@pytest.fixture(scope="session")
def default_text():
    """The text that calibration reads unless it is given one, and its name: Python is parsed for it."""
    return read_texts(None, None)


@pytest.fixture
def frozen():
    """What was there before is out of the collector's sight: `live_bytes` neither counts nor visits it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def row_blocks():
    """Walk over 8 blocks of rows: a CPU takes as long for each. Yields how many there are else."""
    with pytest.MonkeyPatch.context() as patch:
        own = gptq.ROW_BLOCKS
        patch.setattr(gptq, "ROW_BLOCKS", 8)
        yield own


@pytest.fixture(autouse=True)
def short_timing(monkeypatch):
    """Time each part of an estimate by the fewest calls."""
    monkeypatch.setattr(duration, "ENOUGH", 0.0)
