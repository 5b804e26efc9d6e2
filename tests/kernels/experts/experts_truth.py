"""What tests of the experts compare with: a loop over experts in fp64 on canonical weights."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qrt.quant.spec import Codes
from qrt.quant.weight import WEIGHT_SCHEMES, WeightData
from random_weights import random_weight

DISTINCT = 17  # experts whose weights differ; those of more repeat
BITS = {"fp16": 0, "w4a16": 4, "w8a16": 8, "w8a8": 8, "w4a8": 4, "mxfp4": 4}


@dataclass
class Mixture:
    """Experts in canonical form, and what `experts` takes beside x, chosen and weights."""

    gate_up: list[WeightData]
    down: list[WeightData]
    scheme: str
    act: str = "silu"
    on_input: bool = False
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def args(self, dtype, device="cpu", cpu=False):
        """Return the arguments behind `weights`."""

        def stacked(parts):
            kind = WEIGHT_SCHEMES[self.scheme]
            made = [
                kind.prepare_cpu(part, dtype) if cpu else kind.prepare(part, torch.device(device), dtype)
                for part in parts[:DISTINCT]
            ]
            each = [made[e % DISTINCT] for e in range(len(parts))]
            return [torch.stack(tensors) for tensors in zip(*each, strict=True)]

        biases = [None if b is None else b.to(device, dtype) for b in (self.gate_up_bias, self.down_bias)]
        pairs = stacked(self.gate_up), biases[0], stacked(self.down), biases[1]
        return [*pairs, self.scheme, self.act, self.on_input]


def mixture(
    experts: int, hidden: int, inner: int, scheme: str, dtype=torch.float32, group=32, symmetric=True,
    perm=False, biased=False, device="cpu", **others,
) -> Mixture:  # fmt: skip
    """Return random experts; with `perm` each product has an order of inputs of its own."""

    def weight(n, k, seed):
        bits = BITS[scheme]
        if not bits:
            return WeightData((torch.randn(n, k, device=device) / k**0.5).to(dtype))
        if scheme == "mxfp4":
            return _floats(n, k, seed, device)
        size = None if scheme == "w8a8" else group
        return random_weight(
            n, k, bits, size, symmetric=symmetric, dtype=dtype, perm=perm, device=device, seed=seed,
            progressive=scheme == "w4a8",
        )  # fmt: skip

    def weights(n, k, seed):
        made = [weight(n, k, seed + e) for e in range(min(experts, DISTINCT))]
        return [made[e % DISTINCT] for e in range(experts)]

    found = Mixture(weights(2 * inner, hidden, 0), weights(hidden, inner, 1000), scheme, **others)
    if biased:
        found.gate_up_bias = torch.randn(experts, 2 * inner, device=device).to(dtype)
        found.down_bias = torch.randn(experts, hidden, device=device).to(dtype)
    return found


def _floats(n, k, seed, device) -> WeightData:
    """Return random floats of four bits, with powers of two for scales."""
    weight = random_weight(n, k, 4, 32, device=device, seed=seed)
    scale = (weight.scale / 2).log2().round().exp2().bfloat16()
    return replace(weight, scale=scale, codes=Codes.E2M1)


def inputs(tokens, hidden, experts, top_k, dtype=torch.float32, device="cpu", among=None):
    """Return x, chosen and weights; every token chooses different experts, `among` those listed."""
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    pool = torch.arange(experts) if among is None else torch.tensor(among)
    chosen = pool[torch.rand(tokens, len(pool)).argsort(1)[:, :top_k]].int().to(device)
    return x, chosen, torch.rand(tokens, top_k, device=device) + 0.1


def activated(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """Return act(gate) * up by the definition."""
    if act == "swiglu_oai":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    return {"silu": torch.nn.functional.silu, "relu": torch.relu}[act](gate) * up


def in_int8(x: Tensor) -> Tensor:
    """Return tokens as int8 codes stand for them: 127 steps to the largest."""
    step = x.abs().amax(1, keepdim=True) / 127
    return (x / step).round() * step


def truth(x: Tensor, chosen: Tensor, weights: Tensor, found: Mixture) -> Tensor:
    """Return what each expert adds, fp64 [k, T, H]. Both products of w8a8 and w4a8 read tokens in int8."""
    read_as = in_int8 if WEIGHT_SCHEMES[found.scheme].int8_tokens else torch.Tensor.double
    partial_sums = torch.zeros(chosen.shape[1], *x.shape, dtype=torch.float64, device=x.device)
    for expert in chosen.unique().tolist():
        gate_up, down = (part[expert].dequantize().double() for part in (found.gate_up, found.down))
        token, place = (chosen == expert).nonzero(as_tuple=True)
        weight, read = weights[token, place].double()[:, None], x[token].double()
        inner = read_as(read * weight if found.on_input else read) @ gate_up.T
        if found.gate_up_bias is not None:
            inner = inner + found.gate_up_bias[expert].double()
        y = read_as(activated(*inner.chunk(2, 1), found.act)) @ down.T
        if found.down_bias is not None:
            y = y + found.down_bias[expert].double()
        partial_sums[place, token] = y if found.on_input else y * weight
    return partial_sums
