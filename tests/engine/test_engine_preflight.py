"""What is told of an EngineConfig before torch is imported or a weight is read."""

import json
import shutil

import pytest

from qrt.assets import model_path
from qrt.config import EngineConfig
from qrt.engine.engine import Engine
from qrt.engine.preflight import preflight
from qrt.errors import CheckpointError, ConfigError, UnsupportedError
from tiny_models import SIZES


@pytest.fixture
def folder(tmp_path):
    """config.json and nothing else: who goes on to the weights says that there are none."""
    entries = {"architectures": ["MistralForCausalLM"], **SIZES, "sliding_window": 100}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    return tmp_path


def test_valid_settings_go_on_to_the_weights(folder):
    config = EngineConfig(str(folder), kv="bf16", max_model_len=512, kv_skip_layers=(0, 1), device="cpu")
    assert preflight(config)[1].reaches == ((100, 0),)
    with pytest.raises(CheckpointError, match="no weights"):
        Engine(config)


@pytest.mark.parametrize(
    "settings, error, message",
    [
        ({"kv": "int5"}, UnsupportedError, "unknown KV format 'int5'"),
        ({"device": "tpu"}, ConfigError, "device: expected cuda, cuda:N or cpu, got 'tpu'"),
        ({"max_model_len": 513}, ConfigError, "max_model_len: expected at most the model's 512, got 513"),
        ({"kv_skip_layers": (1, 2)}, ConfigError, "kv_skip_layers: expected 0 to 1, .*, got 2"),
        ({"tokenizer": "no/such"}, CheckpointError, "no/such: no such folder"),
    ],
)
def test_wrong_setting_fails_before_weights_load(folder, settings, error, message):
    for check in (preflight, Engine):
        with pytest.raises(error, match=message):
            check(EngineConfig(str(folder), **settings))


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"architectures": ["BertModel"]}, UnsupportedError, "unknown architecture 'BertModel'"),
        (
            {"architectures": None, "model_type": None},
            CheckpointError,
            "config.json: architectures: expected",
        ),
        ({"architectures": [["LlamaForCausalLM"]]}, CheckpointError, "config.json: architectures: expected"),
        ({"architectures": 5}, CheckpointError, "config.json: architectures: expected"),
        ({"num_hidden_layers": 0}, CheckpointError, "num_hidden_layers: expected a positive integer, got 0"),
    ],
)
def test_unsupported_model_fails_before_weights_load(folder, change, error, message):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(error, match=message):
        preflight(EngineConfig(str(folder)))


def test_a_folder_that_holds_no_model(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        preflight(EngineConfig(str(tmp_path / "nowhere")))
    with pytest.raises(CheckpointError, match="no config.json"):
        preflight(EngineConfig(str(tmp_path)))
    file = shutil.copy(model_path("tiny") / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="config.json: not a folder"):
        preflight(EngineConfig(file))


def test_preflight_result_is_not_checked_again(monkeypatch):
    checked = preflight(EngineConfig("tiny", kv="int8", kv_cache_memory_bytes=1 << 22))
    monkeypatch.setattr("qrt.engine.build.preflight", None)
    engine = Engine(checked)
    assert engine.config == checked.config and engine.model.arch == checked.sizes
