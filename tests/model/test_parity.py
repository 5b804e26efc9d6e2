"""The decoder against transformers, fp32 on CPU: the same logits and the same greedy tokens."""

import json
from pathlib import Path

import pytest
import torch

from hand_steps import Requests
from qrt.model.decoder import Decoder
from tiny_models import LLAMA3_ROPE, random_checkpoint
from truth import ours, prompt, relative, theirs

STEPS = 64
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "llama-gqa": ("LlamaForCausalLM", {}),
    "llama-mha-tied": ("LlamaForCausalLM", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-3.1": ("LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE, "head_dim": 128}),
    "llama-linear-rope": ("LlamaForCausalLM", {"rope_parameters": LINEAR_ROPE}),
    "qwen3-yarn": ("Qwen3ForCausalLM", {"rope_parameters": YARN_ROPE}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None, "head_dim": 128}),
    "mistral-mqa-in-window": ("MistralForCausalLM", {"sliding_window": 128, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2ForCausalLM", {"hidden_size": 256}),
    "qwen2-tied": ("Qwen2ForCausalLM", {"hidden_size": 512, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 128, "rms_norm_eps": 0.02}),
    "qwen3-tied-biases": ("Qwen3ForCausalLM", {"tie_word_embeddings": True, "attention_bias": True}),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory) -> tuple[Path, Decoder]:
    architecture, config = CASES[request.param]
    folder = random_checkpoint(tmp_path_factory.mktemp(request.param), architecture, **config)
    return folder, ours(folder)


def test_logits_and_greedy_tokens_are_those_of_transformers(case):
    """64 tokens decoded one by one; one forward of transformers over all of them checks every choice."""
    folder, model = case
    start = prompt(37)
    requests = Requests(model)
    first = requests.run([(0, start)])[0]
    tokens, logits = [int(first[-1].argmax())], [first]
    for _ in range(STEPS - 1):
        logits.append(requests.run([(0, tokens[-1:])])[0])
        tokens.append(int(logits[-1][-1].argmax()))
    truth = theirs(folder, start + tokens[:-1])
    assert relative(torch.cat(logits), truth) < 1e-4
    assert truth[len(start) - 1 :].argmax(-1).tolist() == tokens


def test_chunked_prefill_in_odd_pieces_is_the_same(case):
    _, model = case
    start = prompt(61, seed=1)
    whole = Requests(model).run([(0, start)])[0]
    for attend_cache in (False, True):
        requests, at, pieces = Requests(model, attend_cache=attend_cache), 0, []
        for size in (7, 1, 2, 19, 1, 31):
            pieces += requests.run([(0, start[at : at + size])])
            at += size
        assert at == len(start)
        assert relative(torch.cat(pieces), whole) < 1e-5
        assert torch.cat(pieces).argmax(-1).tolist() == whole.argmax(-1).tolist()


def test_a_ragged_step_equals_its_requests_one_by_one(case):
    """Three decodes and three chunks (two of them with a cached prefix) in one step."""
    _, model = case
    prefixes = [prompt(n, seed=n) for n in (5, 40, 1, 17, 3)] + [[]]
    nexts = [prompt(n, seed=100 + n) for n in (1, 1, 1, 9, 30, 12)]
    together = Requests(model, num=6)
    for row, prefix in enumerate(prefixes):
        if prefix:
            together.run([(row, prefix)])
    mixed = together.run(list(enumerate(nexts)))
    for prefix, tokens, logits in zip(prefixes, nexts, mixed, strict=True):
        alone = Requests(model)
        if prefix:
            alone.run([(0, prefix)])
        assert relative(logits, alone.run([(0, tokens)])[0]) < 1e-5


@pytest.mark.model
def test_the_bundled_model(tmp_path):
    from qrt.assets import model_path

    folder = model_path("tiny")
    tokens = prompt(100, vocab=4096)
    model = ours(folder)
    chosen, _ = Requests(model, max_len=256).greedy(tokens, STEPS)
    truth = theirs(folder, tokens + chosen[:-1])
    assert truth[len(tokens) - 1 :].argmax(-1).tolist() == chosen
    assert relative(Requests(model, max_len=256).run([(0, tokens)])[0], truth[: len(tokens)]) < 1e-4


def test_entries_left_out_are_those_of_the_family(tmp_path):
    """Missing entries get the family's defaults: 128 channels in Qwen3's heads, 8 KV heads in Mistral."""
    for architecture, entry, sizes in (
        ("Qwen3ForCausalLM", "head_dim", {"head_dim": 128}),
        ("MistralForCausalLM", "num_key_value_heads", {"num_key_value_heads": 8, "num_attention_heads": 16}),
    ):
        folder = random_checkpoint(tmp_path / entry, architecture, **sizes)
        config = json.loads((folder / "config.json").read_text())
        del config[entry]
        (folder / "config.json").write_text(json.dumps(config))
        tokens = prompt(40)
        assert relative(Requests(ours(folder)).run([(0, tokens)])[0], theirs(folder, tokens)) < 1e-4
