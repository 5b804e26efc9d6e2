"""Make random weights in canonical form, for the tests of schemes and of kernels."""

import torch
from torch import Tensor

from qrt.quant.affine import choose_qparams, quantize
from qrt.quant.progressive import round_channel
from qrt.quant.spec import Codes, QuantSpec
from qrt.quant.weight import WeightData


def random_weight(
    n: int, k: int, bits: int, group: int | None = None, *, symmetric: bool = True,
    dtype: torch.dtype = torch.float32, perm: bool = False, device: str | torch.device = "cpu", seed: int = 0,
    progressive: bool = False,
) -> WeightData:  # fmt: skip
    """Return random codes and zero points, scales within a factor of 3, weights of about 1 / sqrt(k).

    Progressive scales are any steps that the zero point allows, of a scale of each row.
    """
    gen = torch.Generator(device).manual_seed(seed)
    shape = (n, k // (group or k))
    scale = torch.rand(shape, generator=gen, device=device) + 0.5
    zero = torch.randint(0, 1 << bits, shape, generator=gen, device=device, dtype=torch.uint8)
    scale /= k**0.5 * (1 << (bits - 1))
    if progressive:
        center = torch.full_like(zero, 8) if symmetric else zero
        most = torch.minimum(128 // center.clamp(min=1), 127 // (15 - center).clamp(min=1)).clamp(max=16)
        steps = (torch.rand(shape, generator=gen, device=device) * most).floor() + 1
        scale = steps * round_channel(scale[:, :1] / 8, dtype)
    return WeightData(
        torch.randint(0, 1 << bits, (n, k), generator=gen, device=device, dtype=torch.uint8),
        scale.to(dtype),
        None if symmetric else zero,
        torch.randperm(k, generator=gen, device=device) if perm else None,
        bits=bits,
    )


def round_to_nearest(
    weight: Tensor, spec: QuantSpec, dtype: torch.dtype, bias: Tensor | None = None
) -> WeightData:
    """Round [N, K] on the grid of `spec`; the widest of progressive groups has 8 steps of its row's scale."""
    scale, zero = choose_qparams(weight, spec, dtype)
    if spec.progressive:
        channel = round_channel(scale.float().amax(1, keepdim=True) / 8, dtype)
        scale = ((scale.float() / channel).round().clamp(1, 8) * channel).to(dtype)
    return WeightData(quantize(weight, scale, zero, spec), scale, zero, bias=bias, bits=spec.bits)


def random_mxfp4(n: int, k: int, *, exponents: tuple[int, int] = (-5, 2), device: str | torch.device = "cpu",
                 seed: int = 0) -> WeightData:  # fmt: skip
    """Return random e2m1 codes, and scales of 2 to the power of `exponents`, in bf16."""
    gen = torch.Generator(device).manual_seed(seed)
    powers = torch.randint(*exponents, (n, k // 32), generator=gen, device=device)
    return WeightData(
        torch.randint(0, 16, (n, k), generator=gen, device=device, dtype=torch.uint8),
        torch.exp2(powers.double()).bfloat16(), bits=4, codes=Codes.E2M1,
    )  # fmt: skip


def reference(x: Tensor, weight: WeightData, bias: Tensor | None = None) -> Tensor:
    """Return x @ W.T + bias in fp64 from the canonical weight."""
    y = x.double() @ weight.dequantize().double().T
    return y if bias is None else y + bias.double()


def relative(y: Tensor, want: Tensor) -> float:
    """Return the norm of the error over the norm of the expected value."""
    return ((y.double() - want).norm() / want.norm()).item()
