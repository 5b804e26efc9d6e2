"""A mixture of experts by its definition, in torch: every expert is a module under the checkpoint's names."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from qrt.arch import Arch
from qrt.arch.experts import Experts as Spec
from qrt.definitions.activations import act_times
from qrt.definitions.router import SCORES, route
from qrt_calibrate.model.blocks import Mlp, nest, nest_parameter
from qrt_calibrate.model.norms import META


class Expert(nn.Module):
    """One expert, a gated mlp; `parts` are the names of its Linears: gate, up and down."""

    def __init__(self, spec: Spec, hidden: int, act: str) -> None:
        super().__init__()
        self._parts, self._act = spec.parts, act
        shapes = (hidden, spec.width), (hidden, spec.width), (spec.width, hidden)
        for part, shape in zip(spec.parts, shapes, strict=True):
            nest(self, part, nn.Linear(*shape, bias=spec.bias, device=META))

    def inside(self, x: Tensor) -> Tensor:
        """Return the input [T, I] of the last Linear for x [T, H]."""
        gate, up, _ = (self.get_submodule(part) for part in self._parts)
        return act_times(gate(x), up(x), self._act)

    def forward(self, x: Tensor) -> Tensor:
        """Run the expert on x [T, H]: [T, H]."""
        return cast(Tensor, self.get_submodule(self._parts[2])(self.inside(x)))


class ReferenceExperts(nn.Module):
    """All experts of a layer, by their numbers; a token goes through those that are chosen for it."""

    def __init__(self, spec: Spec, hidden: int, act: str) -> None:
        super().__init__()
        self._count, self._on_input = spec.count, spec.router.on_input
        for number in range(spec.count):
            self.add_module(str(number), Expert(spec, hidden, act))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Run x [T, H] through experts `chosen` [T, k] and sum by `weights` [T, k]: [T, H]."""
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self._count).tolist()
        read = x[order // chosen.shape[1]]
        if self._on_input:
            read = read * weights.flatten()[order, None]
        parts = enumerate(read.split(counts))
        found = torch.cat([self.get_submodule(str(number))(part) for number, part in parts if len(part)])
        each = found[order.argsort()].view(*chosen.shape, -1)
        return (each if self._on_input else each * weights[..., None]).sum(1)


class ReferenceMoE(nn.Module):
    """The mixture of layer `index`, whose names begin with `prefix`."""

    def __init__(self, arch: Arch, index: int, prefix: str) -> None:
        super().__init__()
        spec = arch.experts
        assert spec is not None
        self._spec, layer = spec, f"{arch.names.layers}.{index}."

        def inside(name: str) -> str:
            return f"{layer}{name}".removeprefix(prefix)

        self._experts, self._gate = inside(spec.module), inside(spec.gate)
        nest(self, self._experts, ReferenceExperts(spec, arch.hidden_size, arch.act))
        nest(self, self._gate, nn.Linear(arch.hidden_size, spec.count, spec.gate_bias, device=META))
        self._correction = None if spec.correction is None else inside(spec.correction)
        if self._correction is not None:
            nest_parameter(self, self._correction, *spec.correction_shape)
        self._shared = None if spec.shared is None else inside(spec.shared)
        if self._shared is not None:
            nest(self, self._shared, Mlp(arch, index, f"{layer}{spec.shared}."))
        self._shared_gate = None if spec.shared_gate is None else inside(spec.shared_gate)
        if self._shared_gate is not None:
            nest(self, self._shared_gate, nn.Linear(arch.hidden_size, 1, bias=False, device=META))

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return for x [T, H] the weights [T, k] and the experts int64 [T, k] of its tokens."""
        gate, r = cast(nn.Linear, self.get_submodule(self._gate)), self._spec.router
        weights, chosen = route(
            x, gate.weight, gate.bias, self._corrected(), r.top_k, r.score, r.renormalize, r.factor, r.groups,
            r.kept, r.group_top, r.jitter,
        )  # fmt: skip
        return weights, chosen.long()

    def judged(self, x: Tensor) -> Tensor:
        """Return what each expert is judged by for x [T, H] before groups are left out: [T, E]."""
        logits = cast(Tensor, self.get_submodule(self._gate)(x))
        if (correction := self._corrected()) is None:
            return logits
        return SCORES[self._spec.router.score](logits) + correction

    def on_input(self, x: Tensor) -> Tensor | None:
        """Return what multiplies x [T, H] before each expert reads it, [T, E]; None: nothing does."""
        r = self._spec.router
        if not r.on_input:
            return None
        return SCORES[r.score](cast(Tensor, self.get_submodule(self._gate)(x))) * r.factor

    def read(self, number: int, x: Tensor, scores: Tensor | None, inner: bool) -> Tensor:
        """Return the input of the last Linear of an expert if `inner`, else that of its first ones.

        x [T, H] enters the mixture; `scores` [T, E] are its rows of `on_input`.
        """
        x = x if scores is None else x * scores[:, number, None]
        expert = cast(Expert, self.get_submodule(f"{self._experts}.{number}"))
        return expert.inside(x) if inner else x

    def _corrected(self) -> Tensor | None:
        return None if self._correction is None else self.get_parameter(self._correction).flatten()

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, H] -> [B, T, H]."""
        flat = x.flatten(0, -2)
        weights, chosen = self.choose(flat)
        y = cast(Tensor, self.get_submodule(self._experts)(flat, chosen, weights))
        if self._shared is not None:
            shared = self.get_submodule(self._shared)(flat)
            if self._shared_gate is not None:
                shared = torch.sigmoid(self.get_submodule(self._shared_gate)(flat)) * shared
            y = y + shared
        return y.view(x.shape)
