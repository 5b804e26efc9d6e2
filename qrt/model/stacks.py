"""How the checkpoint's Linears of a layer become the run-time ones: stacked, and with rows in another order.

Everything that is a permutation of rows ends here: q, k and v that are stored as one weight, stacked for each
KV head or not, and the channels that RoPE turns together (`qrt.layers.rope.channel_order`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    expert       the checkpoint stores all experts in one tensor [E, ...], and this is one of them; or None
    """

    modules: tuple[str, ...]
    outs: tuple[int, ...]
    in_features: int
    bias: bool = False
    order: Tensor | None = None
    transposed: bool = False
    expert: int | None = None


def stacks(arch: Arch, index: int) -> dict[str, Stack]:
    """Return the run-time Linears of layer `index`: "qkv", "o", "gate_up" and "down".

    The last two are those of the mlp; in a sparse layer of its shared mlp, if it has one.
    """
    q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    names, hidden = arch.names, arch.hidden_size
    qkv: tuple[tuple[str, ...], tuple[int, ...]] = (names.q, names.k, names.v), (q, kv, kv)
    if arch.qkv != "parts":
        qkv = (names.qkv,), (q + 2 * kv,)
    found = {
        "qkv": Stack(*qkv, hidden, arch.qkv_bias, _qkv_order(arch, index)),
        "o": Stack((names.o,), (hidden,), q, arch.o_bias),
    }
    return _placed(arch, index, found | _mlp(arch.at(index)))


def _mlp(arch: Arch) -> dict[str, Stack]:
    """Return the Linears of the mlp that all tokens go through, if there is one."""
    names, hidden, inner, stored = arch.names, arch.hidden_size, arch.intermediate_size, arch.gate_up
    gate, up, gate_up, down = names.gate, names.up, names.gate_up, names.down
    if arch.experts is not None:
        if arch.experts.shared is None:
            return {}
        (*inside, down), inner = arch.experts.shared_parts, arch.experts.shared_width
        gate_up, (gate, up) = inside[0], (inside[0], inside[-1])
        stored = "parts" if arch.experts.shared_stacked is None else "stacked"
    parts = {
        "parts": ((gate, up), (inner, inner)),
        "stacked": ((gate_up,), (2 * inner,)),
        "plain": ((up,), (inner,)),
    }[stored]
    return {
        "gate_up": Stack(*parts, hidden, arch.mlp_bias),
        "down": Stack((down,), (hidden,), inner, arch.mlp_bias),
    }


def expert_stacks(arch: Arch, index: int, number: int) -> dict[str, Stack]:
    """Return the Linears of expert `number` of the sparse layer `index`: "gate_up" and "down"."""
    experts = arch.experts
    assert experts is not None
    (gate, up, down), hidden, inner = experts.each(number), arch.hidden_size, experts.width
    if (own := experts.stacked) is None:
        found = {
            "gate_up": Stack((gate, up), (inner, inner), hidden, experts.bias),
            "down": Stack((down,), (hidden,), inner, experts.bias),
        }
        return _placed(arch, index, found)
    turns = torch.arange(2 * inner).view(-1, 2).T.flatten() if own.pairs else None
    (gate_up, down), turned = experts.stored, bool(own.transposed)
    found = {
        "gate_up": Stack((gate_up,), (2 * inner,), hidden, experts.bias, turns, turned, number),
        "down": Stack((down,), (hidden,), inner, experts.bias, None, turned, number),
    }
    return _placed(arch, index, found)


def _placed(arch: Arch, index: int, found: dict[str, Stack]) -> dict[str, Stack]:
    """Return stacks of layer `index` with whole names, stored as the architecture stores weights."""
    at = f"{arch.names.layers}.{index}"
    return {
        role: replace(
            stack,
            modules=tuple(f"{at}.{module}" for module in stack.modules),
            transposed=stack.transposed or arch.transposed,
        )
        for role, stack in found.items()
    }


def part_rows(arch: Arch, part: str) -> Tensor:
    """Return the rows of `part`, "v" or "up", in the stacked Linear that holds it, int64 [N]."""
    if part == "up":
        inner = arch.intermediate_size if arch.experts is None else arch.experts.shared_width
        return torch.arange(inner, 2 * inner)
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
