"""How the checkpoint's Linears of a layer become the run-time ones: stacked, and with rows in another order.

Everything that is a permutation of rows ends here: q, k and v that are stored as one weight, stacked for each
KV head or not, and the channels that RoPE turns together (`qrt.layers.rope.channel_order`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qrt.arch import Arch
from qrt.layers.rope import channel_order


@dataclass(frozen=True)
class Stack:
    """One run-time Linear.

    modules      the checkpoint's Linears that are stacked in it, in order
    outs         the rows of each
    in_features  the inputs that they share
    bias         whether they have a bias
    order        the stacked row that goes to each place, int64, or None: as they are stacked
    transposed   the checkpoint stores them [in, out]
    """

    modules: tuple[str, ...]
    outs: tuple[int, ...]
    in_features: int
    bias: bool = False
    order: Tensor | None = None
    transposed: bool = False


def stacks(arch: Arch, index: int) -> dict[str, Stack]:
    """Return the run-time Linears of layer `index`: "qkv", "o", "gate_up" and "down"."""
    names, hidden, inner = arch.names, arch.hidden_size, arch.intermediate_size
    q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    qkv: tuple[tuple[str, ...], tuple[int, ...]] = (names.q, names.k, names.v), (q, kv, kv)
    if arch.qkv != "parts":
        qkv = (names.qkv,), (q + 2 * kv,)
    gate_up = {
        "parts": ((names.gate, names.up), (inner, inner)),
        "stacked": ((names.gate_up,), (2 * inner,)),
        "plain": ((names.up,), (inner,)),
    }[arch.gate_up]
    at = f"{arch.names.layers}.{index}"
    found = {
        "qkv": Stack(*qkv, hidden, arch.qkv_bias, _qkv_order(arch, index)),
        "o": Stack((names.o,), (hidden,), q, arch.o_bias),
        "gate_up": Stack(*gate_up, hidden, arch.mlp_bias),
        "down": Stack((names.down,), (hidden,), inner, arch.mlp_bias),
    }
    return {
        role: Stack(
            tuple(f"{at}.{module}" for module in stack.modules), stack.outs, stack.in_features, stack.bias,
            stack.order, arch.transposed,
        )
        for role, stack in found.items()
    }  # fmt: skip


def part_rows(arch: Arch, part: str) -> Tensor:
    """Return the rows of `part`, "v" or "up", in the stacked Linear that holds it, int64 [N]."""
    if part == "up":
        return torch.arange(arch.intermediate_size, 2 * arch.intermediate_size)
    rows = torch.arange((arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim).view(-1, arch.head_dim)
    if arch.qkv == "grouped":
        return rows.view(arch.num_kv_heads, -1, arch.head_dim)[:, -1].flatten()
    return rows[-arch.num_kv_heads :].flatten()


def head_channels(arch: Arch, index: int) -> Tensor | None:
    """Return the channel that goes to each place of q's and k's heads in layer `index`; None: as they are."""
    key = arch.layers[index].rope
    return None if key is None else channel_order(arch.ropes[key], arch.head_dim)


def _qkv_order(arch: Arch, index: int) -> Tensor | None:
    """Return the order of rows that makes q, k and v of what is stored, None where nothing moves."""
    channels = head_channels(arch, index)
    if channels is None and arch.qkv != "grouped":
        return None
    heads, kv_heads, dim = arch.num_heads, arch.num_kv_heads, arch.head_dim
    rows = torch.arange((heads + 2 * kv_heads) * dim).view(-1, dim)
    if arch.qkv == "grouped":  # for each KV head its query heads, k, v
        groups = rows.view(kv_heads, -1, dim)
        rows = torch.cat((groups[:, :-2].reshape(-1, dim), groups[:, -2], groups[:, -1]))
    if channels is not None:
        turning = heads + kv_heads
        rows = torch.cat((rows[:turning, channels], rows[turning:]))
    return rows.flatten()
