"""Checkpoints of one layer, made once a module, for tests of the readers."""

import shutil
from pathlib import Path

import pytest

from qrt.quant.spec import Granularity, QuantSpec
from tiny_models import quantize_checkpoint, random_checkpoint

W4 = QuantSpec(4, False, Granularity.GROUP, 64)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A plain, a sharded and two quantized checkpoints."""
    folder = tmp_path_factory.mktemp("made")
    random_checkpoint(folder / "plain", "LlamaForCausalLM", num_hidden_layers=1)
    random_checkpoint(folder / "sharded", "LlamaForCausalLM", num_hidden_layers=1, max_shard_size="400KB")
    quantize_checkpoint(folder / "plain", folder / "w4", "w4a16", W4)
    quantize_checkpoint(folder / "plain", folder / "w8a8", "w8a8", QuantSpec(8, True, Granularity.CHANNEL))
    return folder


@pytest.fixture
def copy(made, tmp_path):
    """A copy to damage, by name."""

    def make(name: str) -> Path:
        return Path(shutil.copytree(made / name, tmp_path / name))

    return make
