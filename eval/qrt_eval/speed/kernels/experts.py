"""Time the router and the experts of a mixture, beside torch's grouped products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qrt.arch import Arch
from qrt.arch.experts import Experts
from qrt.definitions.stacks import expert_stacks
from qrt.kernels.act_mul import act_mul
from qrt.kernels.experts import experts
from qrt.kernels.route import route
from qrt.layers.experts import ExpertLinear
from qrt.model.random import RandomWeights
from qrt.quant.weight import WEIGHT_SCHEMES
from qrt_eval.speed.kernels.linear import in_int8
from qrt_eval.speed.kernels.row import KernelRow
from qrt_eval.speed.kernels.timer import Rates, activation_dtype, copies, microseconds


def rows(config: Arch, tokens: Sequence[int], rates: Rates, device: torch.device) -> Iterator[KernelRow]:
    """Yield a row per number of tokens for the router, each scheme, and torch; none without a mixture."""
    if (own := config.experts) is None:
        return
    yield from _route(config, own, tokens, rates, device)
    for scheme in WEIGHT_SCHEMES:
        layer = _layer(config, own, scheme, device)
        layers = [layer, *(_copy(layer) for _ in range(copies(_num_bytes(layer)) - 1))]
        plain = WEIGHT_SCHEMES[scheme].spec is None
        name = "bf16" if plain and device.type == "cuda" else scheme
        yield from _experts(config, own, name, layers, experts, tokens, rates)
        if plain:
            yield from _experts(config, own, f"{name} by torch", layers, by_torch, tokens, rates)


def _route(
    config: Arch, own: Experts, tokens: Sequence[int], rates: Rates, device: torch.device
) -> Iterator[KernelRow]:
    """Yield the router's rows."""
    dtype, rules = activation_dtype(device), own.router
    gate = torch.randn(own.count, config.hidden_size, device=device, dtype=dtype)
    correction = None if own.correction is None else torch.rand(own.count, device=device)
    bias = gate[:, 0].clone() if own.gate_bias else None
    how = (
        rules.top_k, rules.score, rules.renormalize, rules.factor, rules.groups, rules.kept, rules.group_top,
        rules.jitter,
    )  # fmt: skip
    for m in tokens:
        x = torch.randn(m, config.hidden_size, device=device, dtype=dtype)
        num_bytes = gate.nbytes + x.nbytes + 8 * m * rules.top_k
        calls = [(x, gate.clone(), bias, correction, *how) for _ in range(copies(gate.nbytes))]
        flops = 2 * m * gate.numel()
        us = microseconds(route, calls)
        yield KernelRow("experts", "route", f"M={m}", us, rates.floor_us(num_bytes, flops), num_bytes, flops)


Layer = tuple[ExpertLinear, ExpertLinear]


def _layer(config: Arch, own: Experts, scheme: str, device: torch.device) -> Layer:
    """Make the experts of a layer, on the scheme's default grid, in smaller groups where its do not fit."""
    spec = WEIGHT_SCHEMES[scheme].spec
    if spec is not None and spec.group_size is not None:
        spec = replace(spec, group_size=gcd(spec.group_size, config.hidden_size, own.width))
    weights = RandomWeights(lambda module: (scheme, spec), device, activation_dtype(device))
    sparse = next(index for index in range(config.num_layers) if config.layers[index].sparse)
    each = [expert_stacks(config, sparse, number) for number in range(own.count)]
    gate_up, down = (weights.experts([stacks[name] for stacks in each]) for name in ("gate_up", "down"))
    return gate_up, down


def _copy(layer: Layer) -> Layer:
    gate_up, down = (
        ExpertLinear(one.scheme, [tensor.clone() for tensor in one.tensors], one.bias) for one in layer
    )
    return gate_up, down


def _num_bytes(layer: Layer) -> int:
    return sum(tensor.nbytes for one in layer for tensor in one.tensors)


def _experts(
    config: Arch,
    own: Experts,
    what: str,
    layers: Sequence[Layer],
    multiply: Callable[..., Tensor],
    tokens: Sequence[int],
    rates: Rates,
) -> Iterator[KernelRow]:
    """Yield the rows of one scheme. What a call must read are the experts that its tokens chose."""
    scheme, device, top_k = layers[0][0].scheme, layers[0][0].tensors[0].device, own.router.top_k
    each = _num_bytes(layers[0]) / own.count
    for m in tokens:
        x = torch.randn(m, config.hidden_size, device=device, dtype=activation_dtype(device))
        weights = torch.full((m, top_k), 1 / top_k, device=device)
        count = max(len(layers), copies(round(each * min(own.count, m * top_k))))
        chosen, calls = choices(own.count, top_k, m, count), []
        for number, one in enumerate(chosen):
            gate_up, down = layers[number % len(layers)]
            operands = gate_up.tensors, gate_up.bias, down.tensors, down.bias
            calls.append((x, one.to(device), weights, *operands, scheme, config.act, own.router.on_input))
        us = microseconds(multiply, calls)
        num_bytes = round(each * sum(len(one.unique()) for one in chosen) / count) + 2 * x.nbytes
        flops = 6 * m * top_k * config.hidden_size * own.width
        floor_us = rates.floor_us(num_bytes, flops, in_int8(scheme))
        yield KernelRow("experts", what, f"M={m}", us, floor_us, num_bytes, flops, ours=multiply is experts)


def choices(count: int, top_k: int, tokens: int, calls: int) -> list[Tensor]:
    """Return the experts int32 [tokens, top_k] of each of `calls` calls.

    Any expert is as likely as another. One token's differ from those of the last calls, which may still be in
    the cache.
    """
    if tokens > 1:
        return [torch.rand(tokens, count).argsort(1)[:, :top_k].int() for _ in range(calls)]
    order, each = torch.randperm(count), torch.arange(top_k)
    return [order[(call * top_k + each) % count][None].int() for call in range(calls)]


def by_torch(x: Tensor, chosen: Tensor, weights: Tensor, *others: Any) -> Tensor:
    """Do as `experts` with unquantized weights, by torch's grouped products and a sort."""
    gate_up, gate_up_bias, down, down_bias, _, act, on_input = others
    count, top_k = gate_up[0].shape[0], chosen.shape[1]
    expert, order = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(expert, torch.arange(count, device=x.device, dtype=expert.dtype), right=True)
    offsets, weight = ends.int(), weights.flatten()[order, None]
    read = x[order // top_k]
    if on_input:
        read = (read * weight).to(x.dtype)
    inner = F.grouped_mm(read, gate_up[0].transpose(1, 2), offs=offsets)
    inner = act_mul(inner if gate_up_bias is None else inner + gate_up_bias[expert], act)
    y = F.grouped_mm(inner, down[0].transpose(1, 2), offs=offsets)
    y = y if down_bias is None else y + down_bias[expert]
    summands = torch.empty_like(y)
    summands[order] = y if on_input else (y * weight).to(x.dtype)
    return summands.view(*chosen.shape, -1).sum(1)
