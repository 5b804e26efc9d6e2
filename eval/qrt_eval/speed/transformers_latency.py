"""What `qrt-eval latency --compare` holds qrt against: transformers in bf16 at the same sizes and lengths.

Greedy decoding with transformers' own K/V cache and default attention, without `generate`'s bookkeeping.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from qrt_eval.inputs.shapes import SHAPES


def random_transformer(name: str, device: torch.device) -> Any:
    """A transformers model of a known shape in bf16, with the weights that transformers initializes."""
    import transformers

    architecture, settings = SHAPES[name]
    model = getattr(transformers, architecture)
    with device:
        return model._from_config(model.config_class(**settings), dtype=torch.bfloat16).eval()


@torch.inference_mode()
def time_steps(model: Any, batch: int, input_len: int, output_len: int) -> tuple[float, list[float]]:
    """Seconds of the prefill of `batch` random prompts, and of each decode step after it."""
    tokens = torch.randint(0, model.config.vocab_size, (batch, input_len), device=model.device)
    cache, seconds = None, []
    for _ in range(output_len):
        started = time.perf_counter()
        tokens, cache = _step(model, tokens, cache)
        seconds.append(time.perf_counter() - started)
    return seconds[0], seconds[1:]


def _step(model: Any, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """tokens [B, n] after those in `cache` -> the likeliest next ones [B, 1], fetched, and the cache."""
    output = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    likeliest = output.logits.argmax(-1)
    likeliest.tolist()  # what a user waits for
    return likeliest, output.past_key_values


def weight_bytes(model: Any) -> int:
    """Read by a step: every Linear, the head included."""
    return sum(module.weight.nbytes for module in model.modules() if isinstance(module, nn.Linear))


def kv_bytes_per_token(model: Any) -> int:
    """K and V of all layers, in bf16."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_hidden_layers * config.num_key_value_heads * head_dim * 2 * 2)
