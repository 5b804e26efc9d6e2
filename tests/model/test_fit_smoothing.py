"""The smoothing tables of a model, from transformers' q and k of the same random tokens."""

import pytest
import torch
import transformers

from qrt.errors import QrtError
from qrt.model.smoothing import SEED, TOKENS, fit_smoothing
from qrt.quant.kv import KV_FORMATS
from qrt.quant.kv.smoothing import fit
from tiny_models import random_checkpoint
from truth import ours, relative


def their_q_and_k(folder, tokens):
    """q [T, Hq*D] and k [T, Hkv*D] of each layer before RoPE, after their norms where there are norms."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    seen = []
    for layer in model.model.layers:
        attention = layer.self_attn
        for name in "qk":
            last = getattr(attention, f"{name}_norm", None) or getattr(attention, f"{name}_proj")
            last.register_forward_hook(lambda _, __, out: seen.append(out[0].flatten(1)))
    with torch.inference_mode():
        model(tokens[None])
    return list(zip(seen[::2], seen[1::2], strict=True))


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_tables_are_of_the_models_own_q_and_k(architecture, tmp_path):
    folder = random_checkpoint(tmp_path, architecture, num_hidden_layers=3)
    model = ours(folder)
    vocab, dim = model.arch.vocab_size, model.arch.head_dim
    count = min(TOKENS, model.arch.max_position)
    tokens = torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(SEED))
    tables = fit_smoothing(model, [KV_FORMATS["fp16"]] * 3)
    for table, (q, k) in zip(tables, their_q_and_k(folder, tokens), strict=True):
        want = fit(q.unflatten(1, (-1, dim)), k.unflatten(1, (-1, dim)), *model.ropes[0])
        assert all(relative(got, row) < 1e-4 for got, row in zip(table, want, strict=True))


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_the_first_tokens_k_is_stored_exactly(name, tmp_path):
    """Through the quantizer itself, from transformers' K of the first token, at which RoPE does nothing."""
    folder = random_checkpoint(tmp_path, "Qwen3ForCausalLM", num_hidden_layers=3)
    model = ours(folder)
    dim = model.arch.head_dim
    tokens = torch.randint(model.arch.vocab_size, (9,), generator=torch.Generator().manual_seed(SEED))
    fmt = KV_FORMATS[name]
    for table, (_, k) in zip(fit_smoothing(model, [fmt] * 3), their_q_and_k(folder, tokens), strict=True):
        for token, bound in ((0, 2e-3), (5, 0.5)):  # another token's K has an error that is not small
            rotated = fmt.to_basis(k[token].unflatten(0, (-1, dim)) * table[1] - table[2])
            error = (fmt.k.unpack(*fmt.k.pack(rotated)) - rotated).norm() / rotated.norm()
            assert error < bound if token == 0 else 2e-3 < error < bound


def test_a_model_that_overflows_is_refused(tmp_path):
    model = ours(random_checkpoint(tmp_path, "LlamaForCausalLM", num_hidden_layers=2))
    model.layers[0].norms.mlp_in.weight.fill_(float("inf"))
    with pytest.raises(QrtError, match=r"layer 1: .*--dtype bfloat16, or --kv fp16"):
        fit_smoothing(model, [KV_FORMATS["int4"]] * 2)
