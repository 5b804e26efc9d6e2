"""Time transformers in bf16 at the same sizes and lengths, for `qrt-eval latency --compare`.

It decodes greedily with transformers' own K/V cache and default attention, without `generate`'s bookkeeping.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from qrt_eval.inputs.shapes import SHAPES


def random_transformer(name: str, device: torch.device) -> Any:
    """Make a transformers model of a known shape in bf16, with the weights that transformers initializes."""
    import transformers

    architecture, settings = SHAPES[name]
    model = getattr(transformers, architecture)
    with device:
        return model._from_config(model.config_class(**settings), dtype=torch.bfloat16).eval()


@torch.inference_mode()
def time_steps(model: Any, batch: int, input_len: int, output_len: int) -> tuple[float, list[float]]:
    """Return the seconds of the prefill of `batch` random prompts, and of each decode step after it."""
    tokens = torch.randint(0, model.config.vocab_size, (batch, input_len), device=model.device)
    cache, seconds = None, []
    for _ in range(output_len):
        started = time.perf_counter()
        tokens, cache = _step(model, tokens, cache)
        seconds.append(time.perf_counter() - started)
    return seconds[0], seconds[1:]


def _step(model: Any, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """Return the likeliest next tokens [B, 1] after tokens [B, n], fetched to the host, and the cache."""
    output = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    likeliest = output.logits.argmax(-1)
    likeliest.tolist()  # a user waits for the tokens
    return likeliest, output.past_key_values


def weight_bytes(model: Any) -> int:
    """Return the bytes that a step reads: every Linear, with the head."""
    return sum(module.weight.nbytes for module in model.modules() if isinstance(module, nn.Linear))


def kv_bytes_per_token(model: Any) -> int:
    """Return the bytes of K and V of all layers, in bf16."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_hidden_layers * config.num_key_value_heads * head_dim * 2 * 2)
