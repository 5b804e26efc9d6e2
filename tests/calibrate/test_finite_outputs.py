"""A model whose numbers are not finite: an error that names the layer, as early as it can be known."""

import pytest
import torch

import qrt
from qrt.errors import CheckpointError
from tiny_models import altered

LAYER, HEAD = "model.layers.1", "lm_head"
TEXT = {"bits": 4, "n_samples": 4, "seqlen": 32, "group_size": 64, "device": "cpu"}
SETTINGS = [
    {"method": "awq-yaqa", "eval_samples": 0},
    {"method": "awq-gptq", "eval_samples": 0},
    {"method": "awq", "eval_samples": 0},
    {"method": "rtn", "eval_samples": 1},
    {"scheme": "w8a8", "bits": None, "group_size": None, "method": "smoothquant-gptq", "eval_samples": 0},
    {"bits": None, "target_bits": 5.0, "method": "gptq", "eval_samples": 0},
]


def too_large(llama, out, name):
    """A weight of 3e38, which fp32 and bf16 hold, though not its products."""

    def change(tensors):
        tensors[name].view(-1)[7] = 3e38

    return altered(llama, out, change)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("part", ["mlp.up_proj", "self_attn.k_proj"])
def test_a_layer_is_named(settings, part, llama, calib, tmp_path):
    source = too_large(llama, tmp_path / "m", f"{LAYER}.{part}.weight")
    settings = {name: own for name, own in (TEXT | settings).items() if own is not None}
    with pytest.raises(CheckpointError, match=rf"{LAYER}[:,] .*expected finite numbers") as caught:
        qrt.calibrate(source, tmp_path / "out", calib=str(calib), **settings)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name, settings", [
    (f"{HEAD}.weight", SETTINGS[0]), (f"{HEAD}.weight", SETTINGS[3]), ("model.norm.weight", SETTINGS[3]),
])  # fmt: skip
def test_the_head_is_named_where_logits_are_not_finite(name, settings, llama, calib, tmp_path):
    source = too_large(llama, tmp_path / "m", name)
    with pytest.raises(CheckpointError, match=f"{HEAD}: expected finite numbers"):
        qrt.calibrate(source, tmp_path / "out", calib=str(calib), **TEXT | settings)


def test_scales_that_the_dtype_does_not_hold(make_checkpoint, tmp_path):
    source = make_checkpoint("LlamaForCausalLM", dtype=torch.float16)

    def widen(tensors):
        name = f"{LAYER}.mlp.down_proj.weight"
        tensors[name] = tensors[name].to(torch.bfloat16)
        tensors[name].view(-1)[7] = 3e38

    source = altered(source, tmp_path / "m", widen)
    with pytest.raises(
        CheckpointError, match=rf"{LAYER}\.mlp\.down_proj: expected scales that float16 holds"
    ):
        qrt.calibrate(source, tmp_path / "out", method="rtn", eval_samples=0, bits=4, device="cpu")
