"""generation_config.json: what is taken from it and what is said about the rest."""

import json
import logging

import pytest

from qrt.engine.generation import GenerationConfig
from qrt.errors import CheckpointError
from qrt.request.sampling import SamplingParams


def read(folder, **entries):
    (folder / "generation_config.json").write_text(json.dumps(entries))
    return GenerationConfig.read(folder)


def test_neutral_without_a_file(tmp_path):
    assert GenerationConfig.read(tmp_path) == GenerationConfig((), SamplingParams())


def test_broken_link_is_an_error(tmp_path):
    (tmp_path / "generation_config.json").symlink_to(tmp_path / "blobs/gone")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: a link to .*gone"):
        GenerationConfig.read(tmp_path)


def test_settings_that_are_read(tmp_path, caplog):
    config = read(tmp_path, eos_token_id=[5, 6], temperature=0.6, top_k=20, top_p=0.95, do_sample=True)
    assert config.eos_token_ids == (5, 6)
    assert config.sampling == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    assert read(tmp_path, eos_token_id=7, temperature=None, repetition_penalty=1.0).eos_token_ids == (7,)
    assert not caplog.records


def test_settings_that_are_not_read_are_logged(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        read(tmp_path, typical_p=0.9, no_repeat_ngram_size=3, num_beams=1, suppress_tokens=[3])
    assert [r.getMessage() for r in caplog.records] == [
        "generation_config.json: typical_p 0.9 is not supported; ignored",
        "generation_config.json: no_repeat_ngram_size 3 is not supported; ignored",
        "generation_config.json: suppress_tokens [3] is not supported; ignored",
    ]


def test_vllm_config_reads_only_the_end_tokens(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7, "top_k": 50.0}')
    assert GenerationConfig.read(tmp_path, sampling=False) == GenerationConfig((7,), SamplingParams())
