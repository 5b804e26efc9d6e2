"""A mixture of experts in the mlp's place (Shazeer et al. 2017, arXiv:1701.06538)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from qrt.arch.experts import RouterConfig
from qrt.errors import UnsupportedError
from qrt.kernels.experts import experts, experts_partial
from qrt.kernels.linear import prepare
from qrt.kernels.linear.weight import Weight
from qrt.kernels.route import route
from qrt.kernels.route.counters import counters_of
from qrt.layers.linear import Linear
from qrt.layers.mlp import MLP
from qrt.quant.weight import WeightData


class ExpertLinear:
    """One product of all experts.

    scheme    a name in WEIGHT_SCHEMES
    tensors   the scheme's run-time tensors of each expert, stacked: [E, ...]
    bias      [E, N] in the model dtype, or None
    """

    def __init__(self, scheme: str, tensors: Iterable[Tensor], bias: Tensor | None = None) -> None:
        self.scheme = scheme
        self.tensors = Weight(tensors)
        self.bias = bias

    @classmethod
    def pack(
        cls, scheme: str, weights: Iterable[WeightData], count: int, device: torch.device, dtype: torch.dtype
    ) -> ExpertLinear:
        """Lay out the weights of `count` experts, one at a time; raises as `WeightScheme.prepare` does."""
        stacked: list[Tensor] = []
        biases = []
        for number, weight in enumerate(weights):
            tensors = prepare(scheme, weight, device, dtype)
            if not stacked:
                stacked = [own.new_empty(count, *own.shape) for own in tensors]
            for whole, own in zip(stacked, tensors, strict=True):
                if (own.shape, own.dtype) != (whole.shape[1:], whole.dtype):
                    raise UnsupportedError(
                        f"expert {number}: expected {whole.dtype} {list(whole.shape[1:])} in {scheme}, as of "
                        f"expert 0, got {own.dtype} {list(own.shape)}; quantize all experts alike"
                    )
                whole[number] = own
            if weight.bias is not None:
                biases.append(weight.bias.to(device, dtype))
        return cls(scheme, stacked, torch.stack(biases) if biases else None)

    def parameters(self) -> list[Tensor]:
        """Every tensor it holds."""
        return self.tensors if self.bias is None else [*self.tensors, self.bias]


class ExpertRouter:
    """Chooses the experts of a token.

    gate        [E, H]; bias [E] or None
    correction  fp32 [E], added to the scores by which experts are chosen, or None
    """

    def __init__(
        self, rules: RouterConfig, gate: Tensor, bias: Tensor | None = None, correction: Tensor | None = None
    ) -> None:
        self.rules, self.gate, self.bias, self.correction = rules, gate, bias, correction
        counters_of(gate)  # graphs of steps may be recorded before this layer runs

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> weights fp32 [T, k] and experts int32 [T, k]."""
        r = self.rules
        return route(
            x, self.gate, self.bias, self.correction, r.top_k, r.score, r.renormalize, r.factor, r.groups,
            r.kept, r.group_top, r.jitter,
        )  # fmt: skip

    def parameters(self) -> list[Tensor]:
        """Every tensor it holds."""
        return [tensor for tensor in (self.gate, self.bias, self.correction) if tensor is not None]


class MoE:
    """y = sum of weight * down(act(gate) * up) over a token's experts, and a shared mlp that all pass.

    choose       gives each token its experts and their weights
    gate_up      of each expert gate over up, N = 2I; down reads I
    act          as in `MLP`
    shared       an mlp that is added, or None
    shared_gate  a Linear of one output whose sigmoid multiplies it, or None
    """

    def __init__(
        self,
        choose: ExpertRouter,
        gate_up: ExpertLinear,
        down: ExpertLinear,
        act: str = "silu",
        *,
        shared: MLP | None = None,
        shared_gate: Linear | None = None,
    ) -> None:
        self.choose = choose
        self.gate_up = gate_up
        self.down = down
        self.act = act
        self.shared = shared
        self.shared_gate = shared_gate

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        y = experts(x, *self._operands(x))
        if self.shared is None:
            return y
        shared = self.shared(x)
        return y + (shared if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * shared)

    def summands(self, x: Tensor) -> Tensor:
        """Return what the experts of each token add, without the shared mlp: fp32 [k, T, H]."""
        return experts_partial(x, *self._operands(x))

    def _operands(self, x: Tensor) -> tuple[Any, ...]:
        weights, chosen = self.choose(x)
        gate_up, down = self.gate_up, self.down
        products = gate_up.tensors, gate_up.bias, down.tensors, down.bias, gate_up.scheme
        return chosen, weights, *products, self.act, self.choose.rules.on_input

    @property
    def dense(self) -> MLP | None:
        """The mlp that all tokens go through, or None."""
        return self.shared

    def linears(self) -> tuple[Linear | ExpertLinear, ...]:
        """Every product with a weight scheme."""
        return self.gate_up, self.down, *(() if self.shared is None else self.shared.linears())

    def parameters(self) -> list[Tensor]:
        """Every tensor outside `linears`."""
        own = self.choose.parameters()
        return own if self.shared_gate is None else [*own, *self.shared_gate.parameters()]
