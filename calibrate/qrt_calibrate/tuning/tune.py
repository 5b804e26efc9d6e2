"""Train codes, scales and norms end to end, so that the quantized model predicts as the original does.

The original model itself writes the text, at temperature 1 from a few tokens of the calibration text. Every
step gets new windows (LLM-QAT, arXiv:2305.17888), because weights learn a few repeated windows by heart. The
loss is the KL divergence of the quantized model's predictions from the original's. A hundredth of it is the
cross-entropy of the calibration text itself, because KL alone hardly improves perplexity. Gradients pass
straight through the rounding. The result keeps its format: codes stay on their grid, other tensors in their
dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from qrt.errors import CheckpointError
from qrt.quant.weight import WeightData
from qrt_calibrate.tuning.drawing import cut_windows, drawn_windows
from qrt_calibrate.tuning.parameters import Tuned, TunedNorm, TunedWeight, is_tuned_norm
from qrt_calibrate.tuning.training import MICRO_TOKENS, Training

TEXT_SHARE = 0.01  # the calibration text's share of the loss
TEXT_TOKENS = 1 << 18  # with less text the share is smaller in proportion, so that the text is not learned
WARMUP = 10  # steps


def tune(
    path: Path,
    training: Training,
    linears: Mapping[str, WeightData],
    rest: Mapping[str, Tensor],
    windows: Tensor,
) -> Tuned:
    """Train the quantized Linears and the norms of a model; names are full.

    path      folder of the original model
    linears   all quantized Linears
    rest      other tensors as they are stored: those of the layers beside the Linears, and a quantized head's
              weight, whose rounding stays
    windows   [B, T] calibration text; drawn text continues parts of it
    """
    dtype, device = training.dtype, training.device
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, trust_remote_code=False, local_files_only=True, attn_implementation="sdpa"
    )
    model.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]  # transformers' annotation
    tuned = {name: TunedWeight(data, dtype, device) for name, data in linears.items()}
    norms = {name: TunedNorm(rest[name], dtype, device) for name in rest if is_tuned_norm(name)}
    known = model.state_dict().keys()  # files may hold more, such as RoPE tables
    fixed = {name: tensor.to(device, dtype) for name, tensor in rest.items() if name in known}
    biases = {f"{n}.bias": d.bias.to(device, dtype) for n, d in linears.items() if d.bias is not None}
    steps, costs, windows = training.steps, [], windows.to(device)
    drawn = drawn_windows(model, windows, training.length, training.seed, training.drawn_together)
    batches = (batch for together in drawn for batch in together.split(training.batch))
    text = cut_windows(windows, training.text_windows, training.length, training.seed)
    share = TEXT_SHARE * min(1.0, windows.numel() / TEXT_TOKENS)
    for step in tqdm(range(1, steps + 1), desc="Tuning", unit="step"):
        weights = {f"{n}.weight": own.data().dequantize().to(dtype) for n, own in tuned.items()}
        weights |= {name: norm.data().to(dtype) for name, norm in norms.items()}
        for weight in weights.values():
            weight.requires_grad_()
        costs.append(_backward(model, {**fixed, **biases, **weights}, next(batches), next(text), share))
        if not math.isfinite(costs[-1]):
            raise CheckpointError(
                f"{path}: expected finite predictions, got a KL of {costs[-1]} in step {step} of --tune, in "
                f"{dtype}; leave --tune out"
            )
        rate = min(1.0, step / WARMUP) * 0.5 * (1 + math.cos(math.pi * (step - 1) / steps))
        for name, own in ({f"{n}.weight": own for n, own in tuned.items()} | norms).items():
            gradient = weights.pop(name).grad
            assert gradient is not None
            own.follow(gradient, step, rate)
    few = max(1, steps // 10)
    first, last = (sum(own) / few for own in (costs[:few], costs[-few:]))
    stored = {name: own.data() for name, own in tuned.items()}
    return Tuned(stored, {name: norm.data() for name, norm in norms.items()}, first, last)


def _backward(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], drawn: Tensor, text: Tensor, share: float
) -> float:
    """Return the mean KL per token of `drawn` [B, T] from `model` to the model that `tensors` make of it.

    `tensors` replace the model's own. Adds to their gradients those of the mean KL and of `share` times the
    mean cross-entropy of `text` [C, T].
    """

    def predicted(part: Tensor) -> Tensor:
        # without tie_weights a given head leaves the tied embedding exact
        found = functional_call(model, dict(tensors), (part,), {"use_cache": False}, tie_weights=False)
        logits = found.logits
        return F.log_softmax(logits.float(), -1)

    total = 0.0
    for part in drawn.split(max(1, MICRO_TOKENS // drawn.shape[1])):
        with torch.no_grad():
            wanted = F.log_softmax(model(part, use_cache=False).logits.float(), -1)
        cost = F.kl_div(predicted(part), wanted, reduction="sum", log_target=True) / drawn.numel()
        cost.backward()
        total += float(cost.detach())
    for part in text.split(max(1, MICRO_TOKENS // text.shape[1])):
        cost = F.nll_loss(predicted(part)[:, :-1].flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
        (share / text[:, 1:].numel() * cost).backward()
    return total
