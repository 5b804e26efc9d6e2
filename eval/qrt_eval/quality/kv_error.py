"""Measure the error of decode attention in a KV format, on synthetic heads: `qrt-eval kv-error`.

Keys have a constant part and a few large channels, as real ones do (KIVI, arXiv:2402.02750). `diffuse` heads
spread their attention over the whole context; `peaked` heads put most of it on a handful of keys anywhere in
it. K is smoothed with a table that is fitted to another sample of the heads, as the runtime does at load.

The truth is attention in fp32 over the original K and V. The error is the norm of the output's difference
over the norm of the truth: mean and worst over heads and queries. `entropy` is that of the true weights, in
nats, and shows what a head is like.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from qrt.errors import ConfigError
from qrt.kernels.decode_attention import decode_attention
from qrt.kernels.decode_attention.plan import plan_kv_splits
from qrt.mem.storage import KVStorage
from qrt.quant.kv import KV_FORMATS, smoothing
from qrt_eval.results.console import show
from qrt_eval.results.record import save

SHARPNESS = {"diffuse": 0.3, "peaked": 3.0}  # standard deviation of the scores
QUERIES, SAMPLE_TOKENS = 8, 512
OUTLIER_CHANNELS, OUTLIER = 4, 8.0
ENCODED_AT_ONCE = 1 << 14  # tokens; bounds the memory of the reference encoders


def run(arguments: Namespace) -> None:
    """Run `qrt-eval kv-error`: every format, kind of head and length; write the JSON, print a table."""
    heads, kv_heads = arguments.num_heads, arguments.num_kv_heads
    if arguments.head_dim % 2:
        raise ConfigError(
            f"--head-dim: expected an even number, as RoPE turns pairs, got {arguments.head_dim}"
        )
    if heads % kv_heads:
        raise ConfigError(f"--num-heads: expected a multiple of --num-kv-heads {kv_heads}, got {heads}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cells = []
    for length in arguments.context:
        for kind in SHARPNESS:
            generator = torch.Generator().manual_seed(arguments.seed)
            made = SyntheticHeads.make(kind, heads, kv_heads, arguments.head_dim, generator)
            table, first = (x.to(device) for x in fitted(made, generator))
            drawn = (made.queries(QUERIES, generator), made.keys(length, generator))
            values = torch.randn(length, kv_heads, arguments.head_dim, generator=generator)
            q, k, v = (x.to(device, dtype) for x in (*drawn, values))
            truth, entropy = exact(q, k, v)
            for name in arguments.kv:
                stored = "fp16" if name == "bf16" else name
                settled = smoothing.settle(table, first, KV_FORMATS[stored])
                found = attend(q, k, v, settled, stored)
                cells.append({"kv": name, "heads": kind, "context_tokens": length, **errors(found, truth)})
                cells[-1]["entropy"] = entropy
    about = {"head_dim": arguments.head_dim, "num_heads": heads, "num_kv_heads": kv_heads}
    save(arguments, {**about, "seed": arguments.seed, "cells": cells})
    print_table(cells)


@dataclass(frozen=True)
class SyntheticHeads:
    """Hold synthetic attention heads, which draw q [n, Hq, D] and k [n, Hkv, D] any number of times.

    spread, constant   [Hkv, D] standard deviation and mean of K's channels
    """

    sharpness: float
    spread: Tensor
    constant: Tensor
    groups: int

    @classmethod
    def make(
        cls, kind: str, heads: int, kv_heads: int, dim: int, generator: torch.Generator
    ) -> SyntheticHeads:
        """Make heads of a kind of SHARPNESS."""
        spread = torch.ones(kv_heads, dim)
        for head in range(kv_heads):
            spread[head, torch.randperm(dim, generator=generator)[:OUTLIER_CHANNELS]] = OUTLIER
        constant = torch.randn(kv_heads, dim, generator=generator) * spread
        return cls(SHARPNESS[kind], spread, constant, heads // kv_heads)

    def keys(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw keys [count, Hkv, D]."""
        return torch.randn(count, *self.spread.shape, generator=generator) * self.spread + self.constant

    def queries(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw queries [count, Hq, D]. All channels weigh alike in a score.

        The standard deviation of the scores is `sharpness`.
        """
        spread = self.spread.repeat_interleave(self.groups, 0)
        return torch.randn(count, *spread.shape, generator=generator) / spread * self.sharpness


def fitted(heads: SyntheticHeads, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a sample's smoothing table fp32 [3, Hkv, D], without RoPE, and its first K [Hkv, D]."""
    cos = torch.ones(1, heads.spread.shape[1] // 2)
    q, k = heads.queries(SAMPLE_TOKENS, generator), heads.keys(SAMPLE_TOKENS, generator)
    return smoothing.fit(q, k, cos, torch.zeros_like(cos)), k[0]


def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, float]:
    """Return attention in fp32, [QUERIES, Hq, D], and the mean entropy of its weights."""
    groups = q.shape[1] // k.shape[1]
    out, entropies = [], []
    for head in range(q.shape[1]):
        scores = q[:, head].float() @ k[:, head // groups].float().T * q.shape[-1] ** -0.5
        logp = scores.log_softmax(-1)
        entropies.append(-(logp.exp() * logp).sum(-1).mean())
        out.append(logp.exp() @ v[:, head // groups].float())
    return torch.stack(out, 1), float(torch.stack(entropies).mean())


def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor, name: str) -> Tensor:
    """Return attention [QUERIES, Hq, D] over K and V that were stored in the KV format."""
    fmt, length, device = KV_FORMATS[name], len(k), q.device
    dtype = q.dtype
    storage = KVStorage([fmt], length, k.shape[1], k.shape[2], dtype, device)
    buffers = storage.layer(0).buffers
    slots = torch.arange(length, dtype=torch.int32, device=device)
    if fmt.rotated:
        gain, inverse, shift = table
        q, k = q.float() * gain.repeat_interleave(q.shape[1] // k.shape[1], 0), k.float() * inverse - shift
    for some in slots.long().split(ENCODED_AT_ONCE):
        fmt.encode_ref(fmt.to_basis(k[some]), fmt.to_basis(v[some]), buffers, some)
    rows = torch.zeros(len(q), dtype=torch.int32, device=device)
    kv_lens = torch.full_like(rows, length)
    parts = plan_kv_splits(rows, kv_lens, k.shape[1], storage.heads_per_sm(*q.shape[:2]))
    turned = fmt.to_basis(q).to(dtype)
    scale = q.shape[-1] ** -0.5
    out = torch.empty_like(turned)
    decode_attention(turned, buffers, slots[None], rows, kv_lens, parts, out, name, scale)
    return out.float()


def errors(found: Tensor, truth: Tensor) -> dict[str, float]:
    """Return the relative error of the output vectors: mean and worst."""
    error = (found - truth).norm(dim=-1) / truth.norm(dim=-1)
    return {"relative_error": float(error.mean()), "max_error": float(error.max())}


def print_table(cells: list[dict[str, Any]]) -> None:
    """Print a row per kind of head and length, with a column per format."""
    formats = list(dict.fromkeys(cell["kv"] for cell in cells))
    table = Table(title="relative error of attention, mean (worst)", title_justify="left")
    for name in ("heads", "context", "entropy", *formats):
        table.add_column(name, justify="left" if name == "heads" else "right")
    for kind, length in dict.fromkeys((cell["heads"], cell["context_tokens"]) for cell in cells):
        some = [c for c in cells if (c["heads"], c["context_tokens"]) == (kind, length)]
        texts = (f"{100 * c['relative_error']:.3f} % ({100 * c['max_error']:.2f})" for c in some)
        table.add_row(kind, f"{length:,}", f"{some[0]['entropy']:.2f}", *texts)
    show(table)
