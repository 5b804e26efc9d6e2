"""The ranks of a model in one process: their layers run in turn, and what they compute is summed here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hand_steps import Requests
from qrt.arch.shard import Shard
from qrt.kernels.step import StepMeta
from qrt.layers.attention import Attention
from qrt.layers.norm import WholeNorm, normed
from qrt.model.decoder import Decoder
from qrt.model.loader import load_model


def loaded(folder: Path, ranks: int, dtype: torch.dtype = torch.float32) -> list[Decoder]:
    """Load every rank's decoder of a folder."""
    cpu = torch.device("cpu")
    return [load_model(folder, device=cpu, dtype=dtype, shard=Shard(rank, ranks)) for rank in range(ranks)]


class Ranks:
    """Requests of `hand_steps`, run by all ranks of a model."""

    def __init__(self, models: Sequence[Decoder], kv: str = "fp16") -> None:
        self.models = models
        self.requests = [Requests(model, kv) for model in models]

    def run(self, work: list[tuple[int, list[int]]]) -> list[Tensor]:
        """Do as `Requests.run`: the logits of all rows of the head."""
        steps = [own._meta(work) for own in self.requests]
        first = self.models[0]
        x = first.embed(steps[0].tokens, steps[0].positions)
        for index in range(len(first.layers)):
            x = self._layer(index, x, steps)
        x = first.norm(x)
        logits = torch.cat([model.logits(x) for model in self.models], -1).float()
        return list(logits.split([len(tokens) for _, tokens in work]))

    def _layer(self, index: int, x: Tensor, steps: list[StepMeta]) -> Tensor:
        """`DecoderLayer.__call__` with sums over the ranks."""
        layers = [model.layers[index] for model in self.models]
        own = layers[0]
        n, m, read = own.norms, own.residual_scale, normed(own.norms.attention_in, x)
        with shared_norms([layer.attention for layer in layers], read):
            attended = [
                layer.attention(read, step, requests.storage.layer(index), model.ropes[index])
                for layer, step, requests, model in zip(
                    layers, steps, self.requests, self.models, strict=True
                )
            ]
        y = x + m * normed(n.attention_out, sum(attended))
        read = normed(n.mlp_in, x if own.parallel else y)
        return y + m * normed(n.mlp_out, sum(layer.mlp(read) for layer in layers))


@contextmanager
def shared_norms(attentions: list[Attention], x: Tensor):
    """Give norms over the heads of all ranks the mean of the ranks' mean squares."""
    specs = [attention.spec for attention in attentions]
    if isinstance(specs[0].q_norm, WholeNorm):
        parts = [
            attention.qkv(x).unflatten(-1, (-1, attention.head_dim)).split(attention.qkv_heads, 1)
            for attention in attentions
        ]
        for attention, spec in zip(attentions, specs, strict=True):
            norms = [
                _with_mean(norm, torch.stack([part[i].square().mean((1, 2)) for part in parts]).mean(0))
                for i, norm in enumerate((spec.q_norm, spec.k_norm))
            ]
            attention.spec = replace(spec, q_norm=norms[0], k_norm=norms[1])
    yield
    for attention, spec in zip(attentions, specs, strict=True):
        attention.spec = spec


def _with_mean(norm: WholeNorm, mean: Tensor):
    assert norm.ranks > 1
    weight, eps = norm.norm.weight, norm.norm.eps
    return lambda x: x * torch.rsqrt(mean + eps)[:, None, None] * weight.view(x.shape[1:])
