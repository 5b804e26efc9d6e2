"""Let `choose` decide as on a GPU that is not here, for meta tensors, which have sizes and no data."""

import json
from types import SimpleNamespace

import torch

from qrt.kernels import chain, tuned
from qrt.kernels.act_mul import kernel as act_mul_kernel
from qrt.kernels.linear import choose, hopper_16bit_kernel
from qrt.kernels.linear.int8 import block_kernel, hopper_kernel, quantize_kernel
from qrt.kernels.linear.tiles import (
    dequantize_kernel,
    digits_kernel,
    fused_kernel,
    int8_kernel,
    make_digits_kernel,
    wide_kernel,
)
from qrt.quant.progressive import Progressive
from qrt.quant.weight import WEIGHT_SCHEMES
from qrt.quant.weight.base import Layout, WeightData
from qrt.quant.weight.tiles import tile

META = torch.device("meta")
MODULES = (
    chain, choose, hopper_16bit_kernel, block_kernel, hopper_kernel, quantize_kernel, dequantize_kernel,
    digits_kernel, fused_kernel, int8_kernel, make_digits_kernel, wide_kernel, act_mul_kernel,
)  # fmt: skip
UNCACHED_VARIANT = wide_kernel._variant.__wrapped__  # the cache would keep what the fake `variant` returns
H200 = json.loads(tuned.path("NVIDIA H200").read_text())


def fake_gpu(monkeypatch, *, hopper=True, multiprocessors=132, measured=H200):
    """Be this GPU where products are chosen and launched; return the kernels' names as they are launched."""
    launched = []

    def variant(kernel, **constants):
        return SimpleNamespace(launch=lambda grid, *args: launched.append(kernel.__name__))

    fakes = {
        "is_hopper": lambda device: hopper,
        "multiprocessors": lambda device: multiprocessors,
        "configs": lambda device: measured,
        "variant": variant,
        "_variant": UNCACHED_VARIANT,
    }
    for module in MODULES:
        for name in fakes.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, fakes[name])
    return launched


def meta_weight(scheme, k=4096, n=6144, dtype=torch.bfloat16):
    """Return the run-time tensors of a weight [n, k] on its scheme's default grid, without data."""
    kind = WEIGHT_SCHEMES[scheme]
    if kind.spec is None:
        return kind.prepare(WeightData(torch.empty(n, k, dtype=dtype, device=META)), META, dtype)
    group = kind.spec.group_size
    groups = 1 if group is None or k % group else k // group
    zero = None if kind.spec.symmetric else torch.empty(n, groups, dtype=torch.uint8, device=META)
    codes, scale = (
        torch.empty(n, k, dtype=torch.uint8, device=META),
        torch.empty(n, groups, dtype=dtype, device=META),
    )
    weight = WeightData(codes, scale, zero, bits=kind.spec.bits, codes=kind.spec.codes)
    if kind.layout is not Layout.TILES:
        return kind.prepare(weight, META, dtype)
    steps = torch.empty(n, groups, dtype=torch.uint8, device=META)
    split = Progressive(steps, steps, torch.empty(n, device=META)) if kind.spec.progressive else None
    return tile(weight, META, split)
