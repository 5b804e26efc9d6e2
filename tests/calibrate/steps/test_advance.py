"""A run that goes on behind a written layer has the hidden states of the run that wrote it, bit for bit."""

import pytest
import torch

from qrt.quant.checkpoint import open_checkpoint
from qrt_calibrate import pipeline
from qrt_calibrate.job.plan import plan
from qrt_calibrate.recipe.recipe_file import recipe_of


@pytest.mark.parametrize(
    ("architecture", "entries"),
    [
        ("LlamaForCausalLM", {"bits": 4}),
        ("LlamaForCausalLM", {"scheme": "w4a8", "ignore": ["down_proj"]}),
        ("LlamaForCausalLM", {"bits": 4, "exact_folds": False}),
        ("LlamaForCausalLM", {"scheme": "w8a8", "exact_folds": False}),
        ("CohereForCausalLM", {"bits": 4}),  # attention and mlp read the same states
        ("Olmo2ForCausalLM", {"scheme": "w8a8"}),  # norms behind the blocks
        ("Qwen2MoeForCausalLM", {"bits": 4}),
    ],
)
def test_streams_are_those_that_written_layers_give(architecture, entries, make_checkpoint, calib, tmp_path):
    """A run takes them through a layer block by block; one that goes on reads the layer and runs it whole."""
    sizes = {"num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    source = make_checkpoint(architecture, num_hidden_layers=1, **(sizes if "Moe" in architecture else {}))
    groups = {} if entries.get("scheme") == "w8a8" else {"group_size": 32}
    text = {"calib": str(calib), "n_samples": 4, "seqlen": 32, "eval_samples": 3}
    job = plan(open_checkpoint(source), recipe_of({**text, **groups, **entries}), torch.device("cpu"))
    calibration, _ = pipeline.prepare(job)
    states = []
    with pipeline._writer(job, tmp_path / "out", calibration) as writer:
        for _ in range(2):
            run = pipeline.Run(job, writer, calibration)
            (share,) = run._windows.streams.shares
            before = share.exact.clone()
            run.layer(0)
            assert not torch.isclose(share.exact, before).any(-1).all(-1).any()  # every window has gone on
            states.append((share.exact, share.rounded))
        run.rest()
    (exact, rounded), (exact_again, rounded_again) = states
    assert torch.equal(exact, exact_again) and torch.equal(rounded, rounded_again)
    assert not torch.equal(exact, rounded)
