"""How the whole model is trained on a device, what is refused, and the memory that it needs."""

from dataclasses import replace

import pytest
import torch

from qrt.errors import ConfigError
from qrt.quant.checkpoint import open_checkpoint
from qrt_calibrate import pipeline
from qrt_calibrate.estimate.preflight import preflight
from qrt_calibrate.job.plan import plan
from qrt_calibrate.recipe.recipe_file import recipe_of
from qrt_calibrate.tuning import training

CPU = torch.device("cpu")


@pytest.mark.parametrize("large", [False, True])
def test_gpu_takes_more_windows_of_a_small_model(llama, monkeypatch, large):
    """As many as their keys and values fill `DRAWN_BYTES`; a large model's step is work, not launches."""
    monkeypatch.setattr(training, "DRAWN", 8)
    job = plan(open_checkpoint(llama), recipe_of({"bits": 4, "group_size": 64, "tune": 5}), CPU)
    assert (job.training.batch, job.training.drawn_together) == (training.BATCH, 8)
    job = replace(job, devices=(torch.device("cuda"),))
    window = job.training.cache_bytes
    assert window == 512 * job.arch.num_layers * 2 * job.arch.num_kv_heads * job.arch.head_dim * 4
    monkeypatch.setattr(training, "DRAWN_BYTES", 100 * window)
    monkeypatch.setattr(training, "SMALL", 0 if large else 1 << 30)
    assert job.training.batch == (training.BATCH if large else training.LAUNCHED_BATCH)
    assert job.training.drawn_together == (192 if large else 96)  # 16 bits or 32
    assert preflight(job).tune_bytes > 96 * window


def test_tune_is_refused_without_text_or_weight_only_scheme(llama):
    for entries, reason in (
        ({"method": "rtn"}, "rtn does not read"),
        ({"tune": -1}, "--tune: expected at least 0, got -1"),
    ):
        with pytest.raises(ConfigError, match=reason):
            recipe_of({"bits": 4, "tune": 5, **entries})
    with pytest.raises(ConfigError, match="--tune: expected a weight-only scheme, got w8a8"):
        plan(open_checkpoint(llama), recipe_of({"scheme": "w8a8", "tune": 5}), CPU)
    job = plan(open_checkpoint(llama), recipe_of({"bits": 4, "group_size": 64, "tune": 5}), CPU)
    assert preflight(replace(job, recipe=replace(job.recipe, tune=0))).tune_bytes == 0
    assert "tuning, afterwards" in preflight(job).lines()[0]


def test_training_needs_room_beside_the_hidden_states(llama, calib, tmp_path, monkeypatch):
    """With a byte less than foreseen the run ends before a layer is read."""
    cut = {"calib": str(calib), "n_samples": 4, "seqlen": 64, "eval_samples": 4}
    recipe = recipe_of({"bits": 4, "group_size": 64, "tune": 5, **cut})
    tuning = preflight(plan(open_checkpoint(llama), recipe, CPU)).tune_bytes
    states = 2 * (4 + 4) * 64 * 128 * 4  # exact and rounded, in fp32

    def run(room):
        def stop(*arguments):
            raise KeyboardInterrupt

        monkeypatch.setattr(training, "available_ram", lambda: room)
        monkeypatch.setattr(pipeline, "Run", stop)
        pipeline.calibrate(str(llama), recipe, tmp_path / "out", CPU)

    with pytest.raises(ConfigError, match=r"trains the whole model at once.*cpu has .* GB free"):
        run(tuning + states - 1)
    with pytest.raises(KeyboardInterrupt):
        run(tuning + states)
