"""How the checkpoint's Linears of a layer become the run-time ones: stacked, and with rows in another order.

Everything that is a permutation of rows ends here: q, k and v that are stored as one weight, stacked for each
KV head or not, and the channels that RoPE rotates together (`rope.channel_order`). So does what a rank has of
them: whole heads, and channels of the mlps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qrt.arch import Arch
from qrt.arch.shard import WHOLE, Shard, channels, heads
from qrt.definitions.rope import channel_order


@dataclass(frozen=True)
class Stack:
    """One run-time Linear, or a rank's part of it.

    modules      the checkpoint's Linears that are stacked in it, in order
    outs         the rows of each
    in_features  the inputs that they share
    bias         whether they have a bias
    order        the stacked row that goes to each place, int64, or None: as they are stacked
    transposed   the checkpoint stores them [in, out]
    expert       the checkpoint stores all experts in one tensor [E, ...], and this is one of them; or None
    places       the places that a rank has, int64, or None: all
    inputs       the first input that a rank has and the one behind its last, or None: all
    reader       the Linear that alone reads the outputs, one output after the other: they may come in the
                 order of its codes; or None
    ordered      its inputs come in the order of its codes
    """

    modules: tuple[str, ...]
    outs: tuple[int, ...]
    in_features: int
    bias: bool = False
    order: Tensor | None = None
    transposed: bool = False
    expert: int | None = None
    places: Tensor | None = None
    inputs: tuple[int, int] | None = None
    reader: str | None = None
    ordered: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """The outputs and the inputs of what a rank has."""
        first, last = self.inputs or (0, self.in_features)
        return sum(self.outs) if self.places is None else len(self.places), last - first

    def rows(self, read: Tensor | None = None) -> Tensor | None:
        """Return the stacked row of each output that a rank has, int64; None: all, as they are stacked.

        `read` is the order int64 [K] in which the codes of `reader` take their inputs, or None.
        """
        order = self.order
        if read is not None:
            rows = torch.arange(sum(self.outs)) if order is None else order
            order = rows.view(-1, len(read))[:, read].flatten()
        if order is None or self.places is None:
            return order if self.places is None else self.places
        return order[self.places]


def stacks(arch: Arch, index: int, shard: Shard = WHOLE) -> dict[str, Stack]:
    """Return the run-time Linears of layer `index`: "qkv", "o", "gate_up" and "down".

    The last two are those of the mlp; in a sparse layer of its shared mlp, if it has one. `arch` is that of
    the whole model, of which `shard` is a rank's.
    """
    names, hidden, dim = arch.names, arch.hidden_size, arch.head_dim
    q, kv = arch.num_heads * dim, arch.num_kv_heads * dim
    qkv: tuple[tuple[str, ...], tuple[int, ...]] = (names.q, names.k, names.v), (q, kv, kv)
    if arch.qkv != "parts":
        qkv = (names.qkv,), (q + 2 * kv,)
    found = {
        "qkv": Stack(*qkv, hidden, arch.qkv_bias, _qkv_order(arch, index)),
        "o": Stack((names.o,), (hidden,), q, arch.o_bias),
    }
    if shard != WHOLE:
        own = heads(arch, shard)[0]
        found["qkv"] = replace(found["qkv"], places=_qkv_places(arch, shard))
        found["o"] = replace(found["o"], inputs=(own.start * dim, own.stop * dim))
    return _placed(arch, index, found | _mlp(arch.at(index), shard))


def _mlp(arch: Arch, shard: Shard) -> dict[str, Stack]:
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
    return _of_shard(
        Stack(*parts, hidden, arch.mlp_bias), Stack((down,), (hidden,), inner, arch.mlp_bias), shard
    )


def expert_stacks(arch: Arch, index: int, number: int, shard: Shard = WHOLE) -> dict[str, Stack]:
    """Return the Linears of expert `number` of the sparse layer `index`: "gate_up" and "down"."""
    experts = arch.experts
    assert experts is not None
    (gate, up, down), hidden, inner = experts.each(number), arch.hidden_size, experts.width
    if (own := experts.stacked) is None:
        first = Stack((gate, up), (inner, inner), hidden, experts.bias)
        second = Stack((down,), (hidden,), inner, experts.bias)
    else:
        turns = torch.arange(2 * inner).view(-1, 2).T.flatten() if own.pairs else None
        (gate_up, down), turned = experts.stored, bool(own.transposed)
        first = Stack((gate_up,), (2 * inner,), hidden, experts.bias, turns, turned, number)
        second = Stack((down,), (hidden,), inner, experts.bias, None, turned, number)
    return _placed(arch, index, _of_shard(first, second, shard))


def _of_shard(gate_up: Stack, down: Stack, shard: Shard) -> dict[str, Stack]:
    """Return the Linears of an mlp with the rank's channels."""
    gate_up, down = replace(gate_up, reader=down.modules[0]), replace(down, ordered=True)
    if shard != WHOLE:
        inner = down.in_features
        own = channels(inner, shard)
        places = torch.arange(sum(gate_up.outs)).view(-1, inner)[:, own.start : own.stop].flatten()
        gate_up = replace(gate_up, places=places)
        down = replace(down, inputs=(own.start, own.stop))
    return {"gate_up": gate_up, "down": down}


def _placed(arch: Arch, index: int, found: dict[str, Stack]) -> dict[str, Stack]:
    """Return stacks of layer `index` with whole names, stored as the architecture stores weights."""
    at = f"{arch.names.layers}.{index}"
    return {
        role: replace(
            stack,
            modules=tuple(f"{at}.{module}" for module in stack.modules),
            transposed=stack.transposed or arch.transposed,
            reader=None if stack.reader is None else f"{at}.{stack.reader}",
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
        rotary_dim = heads + kv_heads
        rows = torch.cat((rows[:rotary_dim, channels], rows[rotary_dim:]))
    return rows.flatten()


def _qkv_places(arch: Arch, shard: Shard) -> Tensor:
    """Return the places of the rank's heads behind `_qkv_order`, int64."""
    q, kv = heads(arch, shard)
    keys, values = arch.num_heads, arch.num_heads + arch.num_kv_heads
    own = [*q, *(keys + head for head in kv), *(values + head for head in kv)]
    return torch.arange((values + arch.num_kv_heads) * arch.head_dim).view(-1, arch.head_dim)[own].flatten()
