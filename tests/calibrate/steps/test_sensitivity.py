"""Gradients taken layer by layer are those of transformers' whole model."""

import weakref

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from qrt.quant.checkpoint import open_checkpoint
from qrt_calibrate.job.plan import plan
from qrt_calibrate.model import executor as executor_module
from qrt_calibrate.model import streams as streams_module
from qrt_calibrate.model.executor import LayerExecutor
from qrt_calibrate.model.head import PlainHead
from qrt_calibrate.model.streams import Streams
from qrt_calibrate.recipe.recipe_file import recipe_of
from qrt_calibrate.steps import sensitivity
from qrt_calibrate.steps.sensitivity import gradient_windows, loss_gradients, output_moments

CPU = torch.device("cpu")
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
DOWN = ("mlp.down_proj",)


def whole_model(folder, windows, seed):
    """Gradients at each layer's and some Linears' outputs, of tokens drawn from the model's predictions."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    names = [f"model.layers.{i}{part}" for i in range(2) for part in ("", *(f".{p}" for p in (*QKV, *DOWN)))]
    outputs = {}

    def keep(name):
        def hook(module, arguments, output):
            outputs[name] = output[0] if isinstance(output, tuple) else output
            outputs[name].retain_grad()

        return hook

    for name in names:
        model.get_submodule(name).register_forward_hook(keep(name))
    logits = model(windows).logits
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.multinomial(own.detach().softmax(-1), 1, generator=generator) for own in logits]
    F.cross_entropy(logits.flatten(0, 1), torch.cat(drawn)[:, 0], reduction="sum").backward()
    return {name: output.grad for name, output in outputs.items()}


def gradients_of(executor, windows, folder, devices=(CPU,)):
    """The streams of `windows`, all calibrating, with the loss's gradients."""
    streams = Streams(executor.embed(windows), len(windows), devices, folder)
    loss_gradients(executor, streams, len(windows), 5, folder)
    return streams


def test_the_head_is_freed_behind_the_gradients(llama, tmp_path, monkeypatch):
    """Layers are quantized without it; it is read again for the evaluation."""
    heads = []

    class Head(PlainHead):
        def __init__(self, weight):
            super().__init__(weight)
            heads.append(weakref.ref(self))

    monkeypatch.setattr(executor_module, "PlainHead", Head)
    job = plan(open_checkpoint(llama), recipe_of({"bits": 4, "group_size": 64}), CPU)
    executor = LayerExecutor(job.checkpoint, job.arch, 8, CPU)
    streams = gradients_of(executor, torch.zeros(2, 8, dtype=torch.int64), tmp_path)
    assert len(heads) == 1 and heads[0]() is None
    executor.logits(streams.shares[0].exact[0])
    assert len(heads) == 2


@pytest.mark.parametrize("devices", [(CPU,), (CPU, CPU), (CPU,) * 9])
def test_gradients_and_their_moments(devices, make_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(executor_module, "HEAD_ROWS", 200)
    for module in (sensitivity, streams_module):
        monkeypatch.setattr(module, "BATCH_TOKENS", 80)
    monkeypatch.setattr(sensitivity, "STORED", torch.float32)
    monkeypatch.setattr(sensitivity, "COUPLED", 96)  # of q's 128 rows, k's 64 and v's 64
    folder = make_checkpoint("LlamaForCausalLM", dtype=torch.float32)
    job = plan(open_checkpoint(folder), recipe_of({"bits": 4, "group_size": 64}), CPU)
    windows = torch.randint(0, 512, (5, 40), generator=torch.Generator().manual_seed(0))
    wanted = whole_model(folder, windows, 5)
    executor = LayerExecutor(job.checkpoint, job.arch, 40, CPU)
    streams = gradients_of(executor, windows, tmp_path, devices)
    assert [share.numbers.tolist() for share in streams.shares] == {
        1: [[0, 1, 2, 3, 4]],
        2: [[0, 1, 4], [2, 3]],
        9: [[0, 1], [2, 3], [4]],
    }[len(devices)]
    for share in streams.shares:
        for index in range(2):
            layer_wanted = wanted[f"model.layers.{index}"][share.numbers]
            torch.testing.assert_close(share.gradients[index], layer_wanted, rtol=1e-3, atol=1e-4)
    layer = executor.load_stored(0)

    def measure(share, layer):
        batches = share.batches(share.exact, share.gradients[0])
        return output_moments(executor, 0, layer, [QKV, DOWN], batches)

    found, *others = streams.each(measure, layer)
    for parts, moments in found.items():
        for other in others:
            moments.join(other[parts])
        g = torch.cat([wanted[f"model.layers.0.{part}"].flatten(0, 1) for part in parts], 1)
        blocks = [own.T @ own for own in g.split(96, 1)]
        assert len(blocks) == len(moments.blocks)
        for block, own in zip(blocks, moments.blocks, strict=True):
            torch.testing.assert_close(own.sum(0), block, rtol=1e-3, atol=1e-4 * float(block.abs().max()))


def test_gradients_are_kept_in_bf16(make_checkpoint, tmp_path):
    """Of inputs and gradients so kept the moments are those of fp32 to a hundredth."""
    folder = make_checkpoint("LlamaForCausalLM", dtype=torch.float32)
    job = plan(open_checkpoint(folder), recipe_of({"bits": 4, "group_size": 64}), CPU)
    windows = torch.randint(0, 512, (5, 40), generator=torch.Generator().manual_seed(0))
    wanted = whole_model(folder, windows, 5)
    executor = LayerExecutor(job.checkpoint, job.arch, 40, CPU)
    (share,) = gradients_of(executor, windows, tmp_path).shares
    gradients = share.gradients
    assert gradients.dtype == torch.bfloat16
    for index in range(2):
        exact, kept = (g.flatten(0, 1).float() for g in (wanted[f"model.layers.{index}"], gradients[index]))
        assert (kept.T @ kept - exact.T @ exact).norm() < 0.01 * (exact.T @ exact).norm()


def test_number_of_gradient_windows():
    def windows(**entries):
        return gradient_windows(recipe_of({"bits": 4, **entries}))

    assert windows(n_samples=512, seqlen=512) == 64 and windows(n_samples=16, seqlen=512) == 16
    assert windows(method="awq-gptq") == 0


def test_moments_are_trusted_as_far_as_both_halves_agree():
    """Gradients of correlated outputs are believed, those of independent ones are not; diagonals always."""
    torch.manual_seed(0)
    mixed = torch.eye(64) + 0.5 * torch.randn(64, 64)
    for tokens, mix, low, high in ((100_000, mixed, 0.98, 1.0), (40, torch.eye(64), 0.0, 0.3)):
        moments = sensitivity.OutputMoments(64, CPU)
        for half in (0, 1):
            moments.add(torch.randn(tokens, 64) @ mix, half)
        plain, (trusted,) = moments.blocks[0].sum(0), moments.trusted(torch.ones(64, dtype=torch.bool))
        torch.testing.assert_close(trusted.diagonal(), plain.diagonal())
        beside = ~torch.eye(64, dtype=torch.bool)
        ratio = trusted[beside] / plain[beside]
        assert ratio.min() == ratio.max() or torch.allclose(ratio, ratio.mean().expand_as(ratio), atol=1e-5)
        assert low <= float(ratio.mean()) <= high


def test_dead_rows_stand_alone():
    moments = sensitivity.OutputMoments(8, CPU)
    torch.manual_seed(0)
    gradients = torch.randn(1000, 8) @ torch.randn(8, 8)
    moments.add(gradients, 0)
    moments.add(gradients, 1)
    alive = torch.arange(8) != 3
    (trusted,) = moments.trusted(alive)
    assert trusted[3, alive].abs().max() == 0 and trusted[alive, 3].abs().max() == 0
    torch.testing.assert_close(trusted[alive][:, alive], 2 * (gradients.T @ gradients)[alive][:, alive])
    assert trusted[3, 3] == pytest.approx(float(2 * gradients[:, 3].square().sum()), rel=1e-5)
