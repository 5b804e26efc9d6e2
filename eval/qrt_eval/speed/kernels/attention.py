"""Time decode and prefill attention and kv_write in every KV format, at the sizes of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from qrt.arch import Arch
from qrt.definitions.rope import rope_tables
from qrt.kernels.decode_attention import decode_attention
from qrt.kernels.decode_attention.blocks import measured_block
from qrt.kernels.decode_attention.plan import plan_kv_splits
from qrt.kernels.kv_write import kv_write
from qrt.kernels.prefill_attention import prefill_attention
from qrt.kernels.prefill_attention.tiles import Queries, plan_tiles
from qrt.quant.kv import KV_FORMATS, KVFormat
from qrt_eval.speed.kernels.row import KernelRow
from qrt_eval.speed.kernels.timer import Rates, activation_dtype, copies, microseconds

Buffers = list[Tensor]


def _cache(fmt: KVFormat, slots: int, config: Arch, device: torch.device) -> Buffers:
    """Return random K and V in the format."""
    specs = fmt.buffers(slots, config.num_kv_heads, config.head_dim, activation_dtype(device)).values()
    buffers = [spec.zeros(device) for spec in specs]
    randomize(buffers, fmt)
    return buffers


def randomize(buffers: Buffers, fmt: KVFormat) -> None:
    """Fill a layer's tensors with random K and V, in place."""
    for tensor in buffers:
        if tensor.dtype.is_floating_point:
            tensor.normal_()
            if fmt.quantized:  # scales
                tensor.abs_()
        else:
            tensor.random_(-(1 << 15), 1 << 15)


def decode_rows(
    config: Arch,
    sizes: Sequence[tuple[int, int]],
    rates: Rates,
    device: torch.device,
    compare: bool,
) -> Iterator[KernelRow]:
    """Yield a row per KV format and (batch, context), with the merge; `compare` adds torch's SDPA."""
    heads, dim, scale = config.num_heads, config.head_dim, config.head_dim**-0.5
    for batch, context in sizes:
        tokens, flops = batch * context, 4 * batch * context * heads * dim
        table = torch.randperm(tokens, device=device).to(torch.int32).view(batch, context)
        index = torch.arange(batch, device=device, dtype=torch.int32)
        lens = torch.full_like(index, context)
        q = torch.randn(batch, heads, dim, device=device, dtype=activation_dtype(device))
        for name in KV_FORMATS:
            fmt = KV_FORMATS[name]
            num_bytes = tokens * fmt.bytes_per_slot(config.num_kv_heads, dim, q.dtype)
            caches = [_cache(fmt, tokens, config, device) for _ in range(copies(num_bytes))]
            block = measured_block(fmt, batch, heads, config.num_kv_heads)
            kv_splits = plan_kv_splits(index, lens, config.num_kv_heads, block.heads_per_sm)
            out = torch.empty_like(q)
            operands = [(q, kv, table, index, lens, kv_splits, out, name, scale, True) for kv in caches]
            us = microseconds(decode_attention, operands)
            floor = rates.floor_us(num_bytes + 2 * q.nbytes, flops)
            yield KernelRow("decode", name, f"{batch} x {context}", us, floor, num_bytes, flops)
            del caches, operands
        if compare:
            shape = (batch, config.num_kv_heads, context, dim)
            kv_bytes = 2 * tokens * config.num_kv_heads * dim * q.itemsize
            pairs = [
                [torch.randn(shape, device=device, dtype=q.dtype) for _ in range(2)]
                for _ in range(copies(kv_bytes))
            ]
            sdpa = partial(F.scaled_dot_product_attention, enable_gqa=True)
            us = microseconds(sdpa, [(q[:, :, None], k, v) for k, v in pairs])
            floor, at = rates.floor_us(kv_bytes + 2 * q.nbytes, flops), f"{batch} x {context}"
            yield KernelRow("decode", "torch SDPA, contiguous", at, us, floor, kv_bytes, flops, False)


def prefill_rows(
    config: Arch, sizes: Sequence[tuple[int, int]], rates: Rates, device: torch.device, compare: bool
) -> Iterator[KernelRow]:
    """Yield a row per KV format and (chunk, cached prefix) of one request; `compare` adds torch's SDPA."""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    for chunk, prefix in sizes:
        total, at = chunk + prefix, f"{chunk} + {prefix}"
        flops = 4 * heads * dim * (chunk * prefix + chunk * (chunk + 1) // 2)
        q, k, v = (
            torch.randn(chunk, n, dim, device=device, dtype=activation_dtype(device))
            for n in (heads, kv_heads, kv_heads)
        )
        table = torch.randperm(total, device=device).to(torch.int32)[None]
        row = torch.zeros(1, dtype=torch.int32, device=device)
        starts = torch.tensor([[0, chunk], [0, prefix]], dtype=torch.int32, device=device)
        queries = Queries.of(heads, kv_heads, dim, q.itemsize)
        tiles = torch.from_numpy(plan_tiles([chunk], [prefix], queries)).to(device)
        for name in KV_FORMATS if prefix else ("fp16",):
            fmt = KV_FORMATS[name]
            kv = _cache(fmt, total, config, device)
            operands = (
                q, k, v, kv, table, row, *starts, tiles, torch.empty_like(q), prefix, False, name, dim**-0.5
            )  # fmt: skip
            us = microseconds(prefill_attention, [operands] * 2)
            num_bytes = 2 * (q.nbytes + k.nbytes) + prefix * fmt.bytes_per_slot(kv_heads, dim, q.dtype)
            floor = rates.floor_us(num_bytes, flops)
            yield KernelRow("prefill", name, at, us, floor, num_bytes, flops)
        if compare:
            num_bytes = 2 * (q.nbytes + k.nbytes + prefix * kv_heads * dim * k.itemsize)
            us, floor = _sdpa_chunk(q, total, kv_heads), rates.floor_us(num_bytes, flops)
            yield KernelRow("prefill", "torch SDPA, contiguous", at, us, floor, num_bytes, flops, False)


def _sdpa_chunk(q: Tensor, total: int, kv_heads: int) -> float:
    """Time torch's attention of q [T, Hq, D], the last of `total` tokens, in q's dtype."""
    k, v = torch.randn(2, 1, kv_heads, total, q.shape[-1], device=q.device, dtype=q.dtype)
    queries, mask = q.transpose(0, 1)[None], causal_lower_right(len(q), total)
    return microseconds(
        partial(F.scaled_dot_product_attention, attn_mask=mask, enable_gqa=True), [(queries, k, v)] * 2
    )


def write_rows(
    config: Arch, tokens: Sequence[int], rates: Rates, device: torch.device
) -> Iterator[KernelRow]:
    """Yield rows of kv_write in every KV format: norms, RoPE, smoothing, rotation, quantization, store."""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    cos, sin = rope_tables(config.ropes["all"], dim, 4096, device)
    smoothing = torch.ones(3, kv_heads, dim, device=device)
    weight = torch.ones(dim, device=device, dtype=activation_dtype(device))
    norms = (weight, weight, config.norm.eps) if config.qk_norm == "head" else ()
    for count in tokens:
        positions = torch.arange(count, device=device, dtype=torch.int32) % 4096
        slots = torch.randperm(count, device=device).to(torch.int32)
        for name in KV_FORMATS:
            fmt = KV_FORMATS[name]
            width = (heads + 2 * kv_heads) * dim
            x = torch.randn(count, width, device=device, dtype=activation_dtype(device))
            num_bytes = 2 * x.nbytes + count * fmt.bytes_per_slot(kv_heads, dim, x.dtype)
            table = smoothing if fmt.rotated else None
            operands = []
            for _ in range(copies(num_bytes)):
                q, k, v = x.clone().unflatten(-1, (-1, dim)).split((heads, kv_heads, kv_heads), 1)
                kv = _cache(fmt, count, config, device)
                operands.append((q, k, v, cos, sin, positions, slots, kv, table, name, *norms))
            us = microseconds(kv_write, operands)
            floor = rates.floor_us(num_bytes)
            yield KernelRow("kv_write", name, f"T={count}", us, floor, num_bytes, 0)
