"""Running layer by layer gives what transformers' whole model gives, masks, windows and RoPE included.

transformers computes angles in fp32, we in fp64.
"""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from qrt.arch.read import read_arch
from qrt.errors import CheckpointError
from qrt.quant.checkpoint import open_checkpoint
from qrt_calibrate.model import executor as executor_module
from qrt_calibrate.model.executor import LayerExecutor
from qrt_calibrate.rounding.observe import Moments, inputs_of, norm_weights
from tiny_models import LLAMA3_ROPE

FACTORS = {"short_factor": [1.0 + i / 32 for i in range(32)], "long_factor": [2.0 + i for i in range(32)]}
LONGROPE = {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4} | FACTORS, "pad_token_id": 0}
LONGROPE |= {"num_attention_heads": 2}  # heads of 64
CASES = [
    ("LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE, "attention_bias": True}),
    ("MistralForCausalLM", {"sliding_window": 16}),
    ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    ("Phi3ForCausalLM", LONGROPE | {"original_max_position_embeddings": 40}),  # all fits
    ("Phi3ForCausalLM", LONGROPE | {"original_max_position_embeddings": 39}),
]


def layer_tensors(checkpoint, index):
    prefix = f"model.layers.{index}."
    names = [name for name in checkpoint.names() if name.startswith(prefix)]
    return {name.removeprefix(prefix): checkpoint.tensor(name) for name in names}


@torch.no_grad()
@pytest.mark.parametrize("architecture, config", CASES)
def test_hidden_states_are_those_of_transformers(architecture, config, make_checkpoint, monkeypatch):
    monkeypatch.setattr(executor_module, "HEAD_ROWS", 200)
    folder = make_checkpoint(architecture, dtype=torch.float32, **config)
    checkpoint = open_checkpoint(folder)
    windows = torch.randint(0, 512, (3, 40), generator=torch.Generator().manual_seed(0))
    executor = LayerExecutor(checkpoint, read_arch(checkpoint.config, "model"), 40, torch.device("cpu"))
    hidden = executor.embed(windows)
    wanted = AutoModelForCausalLM.from_pretrained(folder)(windows, output_hidden_states=True).hidden_states
    assert torch.equal(hidden, wanted[0])
    layer = executor.load(0, layer_tensors(checkpoint, 0))
    for part in hidden.split(2):
        part.copy_(executor.run(0, layer, part))
    torch.testing.assert_close(hidden, wanted[1], rtol=1.3e-6, atol=5e-5)
    last = executor.load(1, layer_tensors(checkpoint, 1))
    whole = AutoModelForCausalLM.from_pretrained(folder).model
    whole.norm = nn.Identity()
    behind = executor.run(1, last, hidden)
    torch.testing.assert_close(behind, whole(windows).last_hidden_state, rtol=1.3e-6, atol=5e-5)
    logits = AutoModelForCausalLM.from_pretrained(folder)(windows).logits
    torch.testing.assert_close(executor.logits(behind[0]), logits[0], rtol=1.3e-6, atol=5e-5)


@torch.no_grad()
def test_layer_inputs_and_their_mean_moments(llama):
    checkpoint = open_checkpoint(llama)
    executor = LayerExecutor(checkpoint, read_arch(checkpoint.config, "model"), 40, torch.device("cpu"))
    hidden = executor.embed(torch.randint(0, 512, (4, 40)))
    layer = executor.load(0, layer_tensors(checkpoint, 0))
    names = ["post_attention_layernorm", "mlp.down_proj"]
    wanted: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    hooks = [
        layer.get_submodule(name).register_forward_pre_hook(
            lambda module, args, name=name: wanted[name].append(args[0].flatten(0, 1))
        )
        for name in names
    ]
    executor.run(0, layer, hidden)
    for hook in hooks:
        hook.remove()
    weight = torch.randn(128, 256)
    free, moments = (Moments(256, own, torch.device("cpu")) for own in (None, weight))
    for half, part in enumerate(hidden.split(2)):
        stream, x = inputs_of(layer, names, lambda part=part: executor.run(0, layer, part))
        free.add(x, 2 * x, 160, half)
        moments.add(x, 2 * x, 160, half, (stream, stream + 1))
    x = wanted["mlp.down_proj"][0].double()

    def check(x, weight):
        def same(got, wanted):
            torch.testing.assert_close(got, wanted.float(), rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))

        same(moments.mean_abs, x.abs().mean(0))
        same(moments.max_abs, x.abs().amax(0))
        same(moments.hessian, x.T @ x / 160)
        for half, own in enumerate(x.split(80)):
            same(free.drift[half], own.T @ own / 160)
            same(moments.drift[half], (weight.double() @ own.T + 1) @ own / 160)

    check(x, weight)
    scales = torch.rand(256) + 0.5
    moments.divide(scales)
    free.divide(scales)
    check(x / scales, weight * scales)


def test_tokens_count_as_the_next_norm_sees_them():
    """A squared error behind RMSNorm is one before it times the weight, and moments weigh tokens by it."""
    torch.manual_seed(0)
    stream, error = torch.randn(40, 16, dtype=torch.float64), torch.randn(40, 16, dtype=torch.float64)
    stream[0] *= 200  # a massive token
    weights = norm_weights(stream, 1e-5)
    error -= stream * (error * stream).sum(-1, keepdim=True) / stream.square().sum(-1, keepdim=True)
    normed = [nn.functional.rms_norm(stream + own, (16,), eps=1e-5) for own in (0, 1e-6 * error)]
    felt = (normed[1] - normed[0]).square().sum(-1) / 1e-12
    torch.testing.assert_close(felt, (error.square() * weights).sum(-1), rtol=1e-4, atol=0)
    x, exact = torch.randn(40, 8), torch.randn(40, 8)
    x[0] *= 100
    weight = torch.randn(16, 8)
    moments = Moments(8, weight, torch.device("cpu"))
    before, exact_before = torch.randn(40, 16), torch.randn(40, 16)
    moments.add(x, exact, 40, 1, (before, exact_before), weights.float())
    lacking = (exact - x) @ weight.T + exact_before - before
    torch.testing.assert_close(moments.hessian, x.T @ (x * weights.float()) / 40)
    torch.testing.assert_close(moments.drift[1], lacking.T @ (x * weights.float()) / 40)
    torch.testing.assert_close(moments.max_abs, x.abs().amax(0))


def corrected(noise, tokens, seed):
    """Moments of `tokens` whose output lacks C x and noise: the correction found, its trust, and C."""
    torch.manual_seed(seed)
    mixing, wanted = torch.eye(24) + 0.1 * torch.randn(24, 24), torch.randn(8, 24)
    weight = torch.randn(8, 24, generator=torch.Generator().manual_seed(seed))
    moments = Moments(24, weight, torch.device("cpu"))
    for half in (0, 1, 0):  # shares of different sizes
        x = torch.randn(tokens // 3, 24) @ mixing
        lacking = x @ wanted.T + noise * torch.randn(len(x), 8)
        moments.add(x, x, 3 * len(x), half, (torch.zeros_like(lacking), lacking))
    found, trust = moments.take_correction(weight, lambda rows: torch.linalg.solve(moments.hessian, rows.T).T)
    metric = mixing.T @ mixing
    return found, trust, wanted, metric


def test_a_correction_is_trusted_as_far_as_it_helps():
    found, trust, wanted, _ = corrected(noise=0.0, tokens=6000, seed=0)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert trust > 0.97
    assert sum(corrected(noise=1e4, tokens=600, seed=seed)[1] for seed in range(8)) / 8 < 0.2
    for noise in (5.0, 20.0, 60.0):  # against the factor of least error, which knows the truth
        for seed in range(4):
            found, trust, wanted, metric = corrected(noise, tokens=600, seed=seed)

            def error(t, found=found, wanted=wanted, metric=metric):
                wrong = t * found - wanted
                return float((wrong @ metric * wrong).sum())

            best = min(error(t / 50) for t in range(51))
            assert error(trust) < 1.15 * best, (noise, trust)


def test_one_share_alone_is_not_trusted():
    moments = Moments(4, None, torch.device("cpu"))
    x = torch.randn(50, 4)
    moments.add(x, 2 * x, 50, 0)
    assert moments.take_correction(torch.randn(3, 4), lambda rows: rows)[1] == 0.0


def test_tensors_that_do_not_fit_are_named(llama):
    checkpoint = open_checkpoint(llama)
    executor = LayerExecutor(checkpoint, read_arch(checkpoint.config, "model"), 8, torch.device("cpu"))
    tensors = layer_tensors(checkpoint, 1)
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight: expected .*, got \[3, 128\]"
    ):
        executor.load(1, {**tensors, "mlp.up_proj.weight": torch.zeros(3, 128)})
    del tensors["mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        executor.load(1, tensors)
    with pytest.raises(CheckpointError, match="the tokenizer gives id 512, but the embedding has 512 rows"):
        executor.embed(torch.tensor([[0, 512]]))
