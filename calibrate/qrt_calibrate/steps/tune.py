"""After the last layer: codes, scales and norms trained end to end, to predict as the original does.

The text is the original's own, drawn at temperature 1 behind a few tokens of the calibration text, new
windows for every step (LLM-QAT, arXiv:2305.17888): trained on few windows again and again, weights learn
those. The loss is the KL divergence of the quantized model's predictions from the original's and, for a
hundredth, the cross-entropy of the calibration text itself, which perplexity feels and KL does not. Rounding
passes gradients straight through. What is stored keeps its format: codes on their grid, the rest in its
dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoModelForCausalLM, Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from qrt.errors import ConfigError
from qrt.quant.weight import WeightData
from qrt_calibrate.job.plan import Job
from qrt_calibrate.model.streams import available_ram, stream_bytes

BATCH = 4  # windows a step
LAUNCHED_BATCH = 16  # where a step is launches more than work: more windows cost little and are worth much
WINDOW = 512  # tokens of a window, at most
PROMPT = 8  # of them from the calibration text
DRAWN = 128  # windows that are drawn together, at least
DRAWN_BYTES = 8 << 30  # of their keys and values, for more than that on a GPU
TEXT_WINDOWS = 4  # drawn windows to one of the calibration text
# the calibration text's share of the loss; less in proportion for less text, so as not to learn it
TEXT_SHARE = 0.01
TEXT_TOKENS = 1 << 18
MICRO_TOKENS = 2048  # of a step that go through the model together
CODE_RATE, SCALE_RATE = 1e-2, 1e-3  # largest steps: in codes, and relative to a scale or a norm's weight
BETAS, WARMUP = (0.9, 0.95), 10
SMALL = 1 << 30  # weights up to which a GPU computes in fp32 too, and waits for launches


class TunedWeight:
    """A Linear's weight in training.

    place   [N, K] fp32: its codes before they are rounded
    gain    [N, K/G] fp32: what its scales are multiplied by before they are rounded to their dtype
    """

    def __init__(self, data: WeightData, dtype: torch.dtype, device: torch.device) -> None:
        assert data.scale is not None
        self._data = replace(data, scale=data.scale.to(device), zero=_moved(data.zero, device), bias=None)
        self.place = data.values.to(device, torch.float32)
        self.gain = torch.ones(data.scale.shape, device=device)
        self._moments = [
            torch.zeros(2, *own.shape, dtype=dtype, device=device) for own in (self.place, self.gain)
        ]

    def data(self) -> WeightData:
        """Return what would be stored now."""
        scale = self._data.scale
        assert scale is not None
        stored = (scale.float() * self.gain).to(scale.dtype)
        return replace(self._data, values=self.place.round().to(torch.uint8), scale=stored)

    def follow(self, gradient: Tensor, step: int, rate: float) -> None:
        """Take Adam's step number `step`, from 1, at `rate` times the largest step.

        `gradient` [N, K] is that of the loss at the weight.
        """
        data = self.data()
        assert data.scale is not None
        groups = gradient.float().unflatten(1, (data.scale.shape[1], -1))
        scale = data.scale.float()[..., None]
        steps = data.dequantize().view(groups.shape) / scale
        gains = (groups * steps).sum(-1) * scale[..., 0]
        pulls = ((self.place, (groups * scale).flatten(1), CODE_RATE), (self.gain, gains, SCALE_RATE))
        for moments, (own, pull, largest) in zip(self._moments, pulls, strict=True):
            own.sub_(_adam(moments, pull, step), alpha=rate * largest)
        self.place.clamp_(0, (1 << data.bits) - 1)
        self.gain.clamp_(0.5, 2.0)  # far beyond where training goes: a scale stays positive


class TunedNorm:
    """A norm's weight in training.

    gain   [K] fp32: what it is multiplied by before it is rounded to its dtype
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype, device: torch.device) -> None:
        self._weight = weight.to(device)
        self.gain = torch.ones(weight.shape, device=device)
        self._moments = torch.zeros(2, *weight.shape, dtype=dtype, device=device)

    def data(self) -> Tensor:
        """Return what would be stored now."""
        return (self._weight.float() * self.gain).to(self._weight.dtype)

    def follow(self, gradient: Tensor, step: int, rate: float) -> None:
        """As `TunedWeight.follow`; `gradient` [K]."""
        pull = gradient.float() * self._weight.float()
        self.gain.sub_(_adam(self._moments, pull, step), alpha=rate * SCALE_RATE)


def is_tuned_norm(name: str) -> bool:
    """Whether a layer's tensor beside its Linears is trained with them."""
    return name.endswith("norm.weight")


def _moved(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def _adam(moments: Tensor, gradient: Tensor, step: int) -> Tensor:
    """Return the direction of Adam (arXiv:1412.6980); `moments` [2, ...] are updated."""
    found = []
    for own, value, beta in zip(moments, (gradient, gradient.square()), BETAS, strict=True):
        own.copy_(own.float().lerp_(value, 1 - beta))
        found.append(own.float() / (1 - beta**step))
    return found[0] / found[1].sqrt_().add_(1e-12)


@dataclass(frozen=True)
class Tuned:
    """What training gives.

    linears             by their full names, without biases
    norms               by their full names
    kl_first, kl_last   mean KL per token of the drawn text, in nats, over the first and last tenth of steps
    """

    linears: dict[str, WeightData]
    norms: dict[str, Tensor]
    kl_first: float
    kl_last: float


def tune(job: Job, linears: Mapping[str, WeightData], rest: Mapping[str, Tensor], windows: Tensor) -> Tuned:
    """`linears`, all of a quantized model by their full names, trained for `job.recipe.tune` steps.

    rest      other tensors of the model as they are stored, by their full names: those of the layers beside
              the Linears, and a quantized head's weight, which stays as it was rounded
    windows   [B, T] of calibration text, from which drawn text goes on
    """
    dtype, device = _dtype(job), job.device
    path = job.checkpoint.path
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, trust_remote_code=False, local_files_only=True, attn_implementation="sdpa"
    )
    model.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]  # transformers' annotation
    tuned = {name: TunedWeight(data, dtype, device) for name, data in linears.items()}
    norms = {name: TunedNorm(rest[name], dtype, device) for name in rest if is_tuned_norm(name)}
    known = model.state_dict().keys()  # files may hold more, such as RoPE tables
    fixed = {name: tensor.to(device, dtype) for name, tensor in rest.items() if name in known}
    biases = {f"{n}.bias": d.bias.to(device, dtype) for n, d in linears.items() if d.bias is not None}
    steps, costs = job.recipe.tune, []
    length = min(WINDOW, job.recipe.seqlen)
    drawn = _drawn(model, windows.to(device), length, job.recipe.seed, _drawn_together(job))
    batches = (batch for together in drawn for batch in together.split(windows_a_step(job)))
    text = _cut(windows.to(device), max(1, windows_a_step(job) // TEXT_WINDOWS), length, job.recipe.seed)
    share = TEXT_SHARE * min(1.0, windows.numel() / TEXT_TOKENS)
    for step in tqdm(range(1, steps + 1), desc="Tuning", unit="step"):
        weights = {f"{n}.weight": own.data().dequantize().to(dtype) for n, own in tuned.items()}
        weights |= {name: norm.data().to(dtype) for name, norm in norms.items()}
        for weight in weights.values():
            weight.requires_grad_()
        costs.append(_backward(model, {**fixed, **biases, **weights}, next(batches), next(text), share))
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
    """Return the mean KL to `model` per token of `drawn` [B, T] when it runs with `tensors`.

    `tensors` stand in place of the model's own. The gradients of that and of `share` times the mean cross-
    entropy of `text` [C, T] are added to theirs.
    """

    def predicted(part: Tensor) -> Tensor:
        # a tied embedding stays exact when the head is given
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


def _cut(windows: Tensor, count: int, length: int, seed: int) -> Iterator[Tensor]:
    """[count, length] of the calibration text [B, T], anywhere in it, without end."""
    generator = torch.Generator(windows.device).manual_seed(seed)
    while True:
        rows, starts = _integers((len(windows), windows.shape[1] - length + 1), count, generator)
        yield windows[rows[:, None], starts[:, None] + torch.arange(length, device=windows.device)]


def _integers(bounds: tuple[int, ...], count: int, generator: torch.Generator) -> list[Tensor]:
    """[count] from 0 to each of `bounds`, that left out."""
    device = generator.device
    return [torch.randint(bound, (count,), generator=generator, device=device) for bound in bounds]


def _drawn(
    model: PreTrainedModel, windows: Tensor, length: int, seed: int, together: int
) -> Iterator[Tensor]:
    """[together, length] of text that `model` continues, without end and without repeats."""
    generator = torch.Generator(windows.device).manual_seed(seed)
    prompt = min(PROMPT, length - 1)
    while True:
        rows, starts = _integers((len(windows), windows.shape[1] - prompt), together, generator)
        at = starts[:, None] + torch.arange(prompt, device=windows.device)
        yield _continued(model, windows[rows[:, None], at], length, generator)


@torch.no_grad()
def _continued(model: PreTrainedModel, prompts: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """[B, length] from prompts [B, P], each next token drawn from the model's predictions."""
    cache = Cache(layers=[_Room(length) for _ in range(model.config.num_hidden_layers)])
    found, ids = prompts, prompts
    while found.shape[1] < length:
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        ids = torch.multinomial(logits.float().softmax(-1), 1, generator=generator)
        found = torch.cat([found, ids], 1)
    return found


class _Room(DynamicLayer):
    """A layer's keys and values with room for `length` tokens, so that one more copies none of the others."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        batch, heads, _, width = key_states.shape
        self._room = key_states.new_empty(2, batch, heads, self._length, width)
        self.keys, self.values = self._room[:, :, :, :0]

    def update(
        self, key_states: Tensor, value_states: Tensor, *arguments: Any, **keywords: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin = self.get_seq_length()
        end = begin + key_states.shape[-2]
        self._room[0, :, :, begin:end], self._room[1, :, :, begin:end] = key_states, value_states
        self.keys, self.values = keys, values = self._room[:, :, :, :end]
        return keys, values


# -- before the work ---------------------------------------------------------------------------------------


def _dtype(job: Job) -> torch.dtype:
    """Return the dtype of the computation and of Adam's moments."""
    return torch.float32 if job.device.type == "cpu" or _small(job) else torch.bfloat16


def _small(job: Job) -> bool:
    return job.source.num_bytes / job.scale_dtype.itemsize < SMALL


def windows_a_step(job: Job) -> int:
    """Drawn windows of a step."""
    return LAUNCHED_BATCH if job.device.type == "cuda" and _small(job) else BATCH


def _drawn_together(job: Job) -> int:
    room = DRAWN_BYTES // _cache_bytes(job) if job.device.type == "cuda" else 0
    return max(DRAWN, room // LAUNCHED_BATCH * LAUNCHED_BATCH)


def _cache_bytes(job: Job) -> int:
    """Keys and values of one window."""
    config, length = job.config, min(WINDOW, job.recipe.seqlen)
    width = 2 * config.num_kv_heads * config.head_dim
    return length * config.num_layers * width * _dtype(job).itemsize


def tune_bytes(job: Job) -> int:
    """Return the bytes that `tune` takes.

    Of each quantized weight there are the original, the rounded one, its gradient, two moments, and its place
    in fp32; then the rest of the model, and what a step and the drawing of text hold.
    """
    if not job.recipe.tune:
        return 0
    config, size = job.config, _dtype(job).itemsize
    weights = sum(prod(job.checkpoint.spec(f"{name}.weight").shape) for name in job.quantized)
    others = job.source.num_bytes // job.scale_dtype.itemsize - weights
    if job.recipe.head is not None:  # the rounded one beside the original
        others += prod(job.checkpoint.spec(f"{job.arch.head}.weight").shape)
    length = min(WINDOW, job.recipe.seqlen)
    inside = 12 * config.hidden_size + 5 * config.intermediate_size  # a token's activations in a layer
    step = max(MICRO_TOKENS, length) * (config.num_layers * inside * size + 5 * config.vocab_size * 4)
    return weights * (5 * size + 4) + others * size + max(_drawn_together(job) * _cache_bytes(job), step)


def check_room(job: Job) -> None:
    """ConfigError where the whole model cannot be trained beside the hidden states."""
    states = 2 * stream_bytes(sum(job.recipe.windows), job.recipe.seqlen, job.config.hidden_size)
    wanted = tune_bytes(job) + states // len(set(job.devices))
    free = torch.cuda.mem_get_info(job.device)[0] if job.device.type == "cuda" else available_ram()
    if wanted > free:
        raise ConfigError(
            f"--tune: trains the whole model at once, which takes about {wanted / 1e9:.1f} GB; {job.device} "
            f"has {free / 1e9:.1f} GB free. Leave it out, or use a larger --device"
        )
