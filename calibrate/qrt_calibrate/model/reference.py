"""A decoder layer by its definition, in torch: what the calibrator runs.

Parameters have the names, shapes and order of rows of the checkpoint, so that what is changed in them can be
written back. Everything that reorders them happens as they are used. See `qrt.arch.base` for the equation.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from os.path import commonprefix
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qrt.arch import Arch
from qrt.definitions.stacks import head_channels, stacks
from qrt_calibrate.model.around import Around, rotated
from qrt_calibrate.model.blocks import Block, Mlp, nest, nest_parameter
from qrt_calibrate.model.mixture import ReferenceMoE
from qrt_calibrate.model.norms import ReferenceNorm, head_norm

ATTENTION, MLP = 0, 1  # the blocks of a layer whose mlp reads what attention has added


def blocks(arch: Arch) -> tuple[int | None, ...]:
    """Return the parts of a layer that can run one after the other: two blocks, or None, the whole layer."""
    return (None,) if arch.parallel else (ATTENTION, MLP)


def _head_norms(arch: Arch) -> tuple[str, ...]:
    """Return the names of the norms over q and k that have weights."""
    return () if arch.qk_norm in (None, "unit") else (arch.names.q_norm, arch.names.k_norm)


class ReferenceAttention(Block):
    """The attention of layer `index`, whose names begin with `prefix`."""

    order: Tensor | None

    def __init__(self, arch: Arch, index: int, prefix: str, stored: Collection[str], device: torch.device):
        super().__init__()
        found = stacks(arch, index)
        self._arch, self._prefix, self._qkv, self._o = arch, prefix, found["qkv"], found["o"]
        self.add(self._qkv, prefix)
        self.add(self._o, prefix)
        order = self._qkv.order
        self.register_buffer("order", None if order is None else order.to(device), persistent=False)
        self._after, self._unit = arch.qk_norm_after_rope, arch.qk_norm == "unit" and arch.layers[index].rope
        channels = head_channels(arch, index)
        channels = None if channels is None else channels.to(device)
        layer, self._norms = f"{arch.names.layers}.{index}.", list[str]()
        self._sinks = None if arch.names.sinks is None else f"{layer}{arch.names.sinks}".removeprefix(prefix)
        if self._sinks is not None:
            nest_parameter(self, self._sinks, arch.num_heads)
        for name, heads in zip(_head_norms(arch), (arch.num_heads, arch.num_kv_heads), strict=False):
            self._norms.append(f"{layer}{name}".removeprefix(prefix))
            nest(self, self._norms[-1], head_norm(arch, heads, f"{name}.bias" in stored, channels))

    def forward(self, x: Tensor, at: Around) -> Tensor:
        """x [B, T, H] -> [B, T, H]."""
        arch = self._arch
        parts = self.outputs(self._qkv, self._prefix, x)
        if len(parts) == 1 or self.order is not None:
            qkv = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
            qkv = qkv if self.order is None else qkv[..., self.order]
            heads = arch.num_heads, arch.num_kv_heads, arch.num_kv_heads
            parts = [*qkv.split([count * arch.head_dim for count in heads], -1)]
        q, k, v = (part.unflatten(-1, (-1, arch.head_dim)) for part in parts)
        q, k = (rotated(part, at) for part in (q, k)) if self._after else (q, k)
        if self._norms:
            q, k = (self.get_submodule(name)(own) for name, own in zip(self._norms, (q, k), strict=True))
        if self._unit:
            q, k = (F.rms_norm(own, own.shape[-1:], eps=arch.norm.eps) for own in (q, k))
        if arch.clip is not None:
            q, k, v = (part.clamp(-arch.clip, arch.clip) for part in (q, k, v))
        if at.q_scale is not None:
            q = q * at.q_scale[:, None, None]
        q, k = (q, k) if self._after else (rotated(part, at) for part in (q, k))
        return cast(Tensor, self.get_submodule(self._o.modules[0].removeprefix(self._prefix))(
            self._attended(q, k, v, at.mask)
        ))  # fmt: skip

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q [B, T, Hq, D], k, v [B, T, Hkv, D] -> [B, T, Hq * D]."""
        arch = self._arch
        q, k, v = (own.transpose(1, 2) for own in (q, k, v))
        k, v = (own.repeat_interleave(arch.num_heads // arch.num_kv_heads, 1) for own in (k, v))
        scale = arch.head_dim**-0.5 if arch.attention_scale is None else arch.attention_scale
        if arch.softcap is None and self._sinks is None:
            out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale)
            return out.transpose(1, 2).flatten(2)
        scores = q @ k.mT * scale
        if arch.softcap is not None:
            scores = arch.softcap * torch.tanh(scores / arch.softcap)
        if mask is None:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        hidden = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
        if self._sinks is not None:  # a score of each head that has no value
            sinks = self.get_parameter(self._sinks)[:, None, None].expand(*hidden.shape[:-1], 1)
            hidden = torch.cat((hidden, sinks), -1)
        return (hidden.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2).flatten(2)


class ReferenceLayer(nn.Module):
    """Layer `index` of an architecture; parameters have no memory yet, buffers are on `device`.

    stored   names of the tensors that the checkpoint has of it
    """

    def __init__(self, arch: Arch, index: int, stored: Collection[str], device: torch.device) -> None:
        super().__init__()
        self._arch, names, layer = arch, arch.names, f"{arch.names.layers}.{index}."
        found = stacks(arch, index)
        attention = [*found["qkv"].modules, *found["o"].modules]
        attention += [f"{layer}{name}" for name in _head_norms(arch)]
        self.attend = self._placed(
            layer, prefix := block_prefix(attention), ReferenceAttention(arch, index, prefix, stored, device)
        )
        self.feed = self._feed(arch.at(index), index, layer)
        for name in (names.attention_in, names.attention_out, names.mlp_in, names.mlp_out):
            if name is not None:
                nest(self, name, ReferenceNorm(arch, arch.hidden_size, bias=f"{name}.bias" in stored))

    def _feed(self, arch: Arch, index: int, layer: str) -> Reference:
        """Return the mlp of layer `index`, or its mixture."""
        spec = arch.experts
        if spec is not None:
            own = [spec.module, *spec.routers, spec.correction, spec.shared]
            prefix = block_prefix([f"{layer}{name}" for name in own if name is not None])
            return self._placed(layer, prefix, ReferenceMoE(arch, index, prefix))
        found = stacks(arch, index)
        mlp = [*found["gate_up"].modules, *found["down"].modules]
        mlp += [f"{layer}{arch.names.activation}"] if arch.act == "xielu" else []
        return self._placed(layer, prefix := block_prefix(mlp), Mlp(arch, index, prefix))

    def _placed(self, layer: str, prefix: str, block: nn.Module) -> Reference:
        """Register a block under its prefix; where its parts have none in common, the parts themselves."""
        if inside := prefix.removeprefix(layer).removesuffix("."):
            nest(self, inside, block)
        else:
            for name, part in block.named_children():
                self.add_module(name, part)
        return Reference(block)

    def _normed(self, name: str | None, x: Tensor) -> Tensor:
        return x if name is None else self.get_submodule(name)(x)

    def forward(self, x: Tensor, at: Around, block: int | None = None) -> Tensor:
        """x [B, T, H] -> [B, T, H], by the whole layer or one of its `blocks`."""
        names, m = self._arch.names, self._arch.residual_scale
        if self._arch.parallel:
            normed = self._normed(names.attention_in, x)
            y = x + m * self._normed(names.attention_out, self.attend(normed, at))
            if names.mlp_in != names.attention_in:
                normed = self._normed(names.mlp_in, x)
            return y + m * self._normed(names.mlp_out, self.feed(normed))
        if block != MLP:
            attended = self.attend(self._normed(names.attention_in, x), at)
            x = x + m * self._normed(names.attention_out, attended)
        if block != ATTENTION:
            x = x + m * self._normed(names.mlp_out, self.feed(self._normed(names.mlp_in, x)))
        return x


class Reference:
    """A module that its owner calls without being its parent."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *arguments: object) -> Tensor:
        """Call the module."""
        return cast(Tensor, self.module(*arguments))


def mixture_of(layer: nn.Module) -> ReferenceMoE:
    """Return the mixture of a sparse layer."""
    return cast(ReferenceMoE, cast(ReferenceLayer, layer).feed.module)


def block_prefix(modules: Sequence[str]) -> str:
    """Return the beginning that full names share, with its dot: "model.layers.0.self_attn."."""
    return ".".join([*commonprefix([name.split(".")[:-1] for name in modules]), ""])
