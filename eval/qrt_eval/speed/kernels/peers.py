"""Time other projects' kernels at the same sizes, if they are installed: `qrt-eval kernels --compare`.

tinygemm and the int8 product are torch's own. A package that is missing, or that fails here, gives one line
on stderr. All of them run after qrt's rows, so a crash loses none of those.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qrt.arch import Arch
from qrt.kernels.gpu import is_hopper
from qrt_eval.speed.kernels.linear import products, sums
from qrt_eval.speed.kernels.row import KernelRow
from qrt_eval.speed.kernels.timer import Rates, copies, microseconds

GROUP = 128  # weights per scale of int4
PAGE = 16  # tokens per page of flashinfer's cache
WORKSPACE_BYTES = 256 << 20  # which flashinfer needs to split long requests
FP8 = torch.float8_e4m3fn
Sizes = Sequence[tuple[int, int]]


class PeerProduct(NamedTuple):
    """Hold `multiply(x, weight)` for weights [N, K] that `weight()` makes, each of `num_bytes`."""

    multiply: Callable[[Tensor, Any], Tensor]
    weight: Callable[[], Any]
    num_bytes: int


class Peer(NamedTuple):
    """Describe a product of `package`: its name in the tables, `make(k, n, device)`, and what it takes.

    int8          whether its arithmetic is int8
    dtype         dtype of x
    least, most   token counts that it supports, or that are worth the time
    """

    package: str
    what: str
    make: Callable[[int, int, torch.device], PeerProduct]
    int8: bool = False
    dtype: torch.dtype = torch.bfloat16
    least: int = 1
    most: int = 1 << 30


def rows(
    config: Arch,
    ops: Sequence[str],
    tokens: Sequence[int],
    decodes: Sizes,
    prefills: Sizes,
    rates: Rates,
    device: torch.device,
) -> Iterator[KernelRow]:
    """Yield the rows of every peer of the operators `ops`."""
    jobs: list[tuple[str, str, Callable[[], Iterator[KernelRow]]]] = []
    if "linear" in ops:
        for peer in PEERS:
            jobs.append((peer.package, peer.what, partial(linear_rows, peer, config, tokens, rates, device)))
    if "decode" in ops:
        for dtype, name in ((torch.bfloat16, "bf16"), (FP8, "fp8")):
            decode = partial(decode_rows, dtype, name, config, decodes, rates, device)
            jobs.append(("flashinfer", f"flashinfer {name}", decode))
    if "prefill" in ops:
        prefill = partial(prefill_rows, config, prefills, rates, device)
        jobs.append(("flashinfer", "flashinfer prefill", prefill))
    here = {package: _is_here(package) for package in dict.fromkeys(job[0] for job in jobs)}
    for package, what, job in jobs:
        if here[package]:
            yield from _measured(what, job)


def _is_here(package: str) -> bool:
    try:
        import_module(package)
    except Exception as error:  # it is missing, or built for another machine
        print(f"--compare: {package} left out, as it cannot be imported: {error}", file=sys.stderr)
        return False
    return True


def _measured(what: str, job: Callable[[], Iterator[KernelRow]]) -> list[KernelRow]:
    try:
        with torch.no_grad():
            return list(job())
    except Exception as error:  # a peer may fail in any way; the others still run
        print(f"--compare: {what} left out: {type(error).__name__}: {error}", file=sys.stderr)
        return []


def linear_rows(
    peer: Peer, config: Arch, tokens: Sequence[int], rates: Rates, device: torch.device
) -> Iterator[KernelRow]:
    """Yield a row per product and number of tokens that the peer runs, and one for all four."""
    tokens = [m for m in tokens if peer.least <= m <= peer.most]
    cells: list[KernelRow] = []
    for name, (k, n) in products(config).items() if tokens else ():
        product = peer.make(k, n, device)
        weights = [product.weight() for _ in range(copies(product.num_bytes))]
        for m in tokens:
            x = (32 * torch.randn(m, k, device=device)).to(peer.dtype)
            us = microseconds(product.multiply, [(x, weight) for weight in weights])
            flops, num_bytes = 2 * m * n * k, product.num_bytes + m * (k * x.itemsize + 2 * n)
            floor_us = rates.floor_us(num_bytes, flops, peer.int8)
            row = KernelRow("linear", f"{peer.what} {name}", f"M={m}", us, floor_us, num_bytes, flops, False)
            cells.append(row)
        del weights
    yield from cells
    yield from sums(cells, peer.what, tokens)


def _tinygemm(k: int, n: int, device: torch.device) -> PeerProduct:
    def weight() -> tuple[Tensor, Tensor]:
        codes = torch.randint(0, 256, (n, k // 2), device=device, dtype=torch.uint8)
        scale_and_zero = torch.rand(k // GROUP, n, 2, device=device, dtype=torch.bfloat16)
        return torch.ops.aten._convert_weight_to_int4pack(codes, 8), scale_and_zero

    def multiply(x: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm(x, weight[0], GROUP, weight[1])

    return PeerProduct(multiply, weight, n * k // 2 + 4 * n * k // GROUP)


def _int_mm(k: int, n: int, device: torch.device) -> PeerProduct:
    """Multiply int8 by int8 into int32, without quantizing tokens before or scaling after."""

    def weight() -> Tensor:
        return torch.randint(-128, 128, (n, k), device=device, dtype=torch.int8)

    return PeerProduct(lambda x, weight: torch._int_mm(x, weight.T), weight, n * k)


def _torchao(
    name: str, settings: dict[str, Any], bits: int, k: int, n: int, device: torch.device
) -> PeerProduct:
    """Use `torchao.quantization.quantize_` with the config of that name; its int8 is meant to be compiled."""
    quantization = import_module("torchao.quantization")
    config = getattr(quantization, name)(**settings)

    def weight() -> Tensor:
        layer = nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16)
        quantization.quantize_(layer, config)
        return layer.weight

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    if bits == 4:
        return PeerProduct(multiply, weight, n * k // 2 + 4 * n * k // GROUP)
    torch._dynamo.reset()  # torch compiles a function for a few sizes only
    return PeerProduct(torch.compile(multiply, dynamic=False), weight, n * k + 2 * n)


def _gemlite(device: torch.device) -> Any:
    """Import gemlite with its H100 block sizes on any Hopper; it finds them only by that GPU's name."""
    gemlite = import_module("gemlite")
    if is_hopper(device):
        gemlite.load_config(str(Path(str(gemlite.__file__)).parent / "configs" / "h100.json"))
    return gemlite


def _gemlite_int4(k: int, n: int, device: torch.device) -> PeerProduct:
    gemlite = _gemlite(device)

    def weight() -> Any:
        dtype = gemlite.DType.BF16
        layer = gemlite.GemLiteLinear(
            4, group_size=GROUP, in_features=k, out_features=n, input_dtype=dtype, output_dtype=dtype
        )
        codes = torch.randint(0, 16, (n, k), device=device, dtype=torch.uint8)
        scale = torch.rand(n, k // GROUP, device=device, dtype=torch.bfloat16) / k**0.5
        layer.pack(codes, scale, torch.full_like(scale, 8), None)
        return layer

    return PeerProduct(_call, weight, n * k // 2 + 4 * n * k // GROUP)


def _gemlite_int8(k: int, n: int, device: torch.device) -> PeerProduct:
    """Multiply by int8 tokens, which the call quantizes."""
    _gemlite(device)
    helper = import_module("gemlite.helper")

    def weight() -> Any:
        layer = nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16)
        return helper.A8W8_INT8_dynamic(device=device, dtype=torch.bfloat16).from_linear(layer)

    return PeerProduct(_call, weight, n * k + 4 * n)


def _call(x: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
    return layer(x)


_INT4 = {"group_size": GROUP, "int4_packing_format": "tile_packed_to_4d"}
PEERS = (
    Peer("torch", "tinygemm int4", _tinygemm, most=64),
    Peer("torch", "torch._int_mm (without quantizing)", _int_mm, int8=True, dtype=torch.int8, least=17),
    Peer("torchao", "torchao int4", partial(_torchao, "Int4WeightOnlyConfig", _INT4, 4), most=64),
    # for more tokens torch.compile turns it into a reduction, which takes milliseconds
    Peer("torchao", "torchao int8", partial(_torchao, "Int8WeightOnlyConfig", {}, 8), most=1),
    Peer(
        "torchao",
        "torchao int8 dynamic",
        partial(_torchao, "Int8DynamicActivationInt8WeightConfig", {}, 8),
        int8=True,
        least=17,
    ),
    Peer("gemlite", "gemlite w4a16", _gemlite_int4),
    Peer("gemlite", "gemlite w8a8", _gemlite_int8, int8=True),
)


def decode_rows(
    dtype: torch.dtype, name: str, config: Arch, sizes: Sizes, rates: Rates, device: torch.device
) -> Iterator[KernelRow]:
    """Time flashinfer's decode attention over a paged cache of `dtype` with shuffled pages."""
    flashinfer = import_module("flashinfer")
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    for batch, context in sizes:
        per_request = -(-context // PAGE)
        pages = torch.randperm(batch * per_request, device=device).int()
        starts = torch.arange(batch + 1, device=device, dtype=torch.int32) * per_request
        last = torch.full((batch,), (context - 1) % PAGE + 1, device=device, dtype=torch.int32)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(WORKSPACE_BYTES, device=device, dtype=torch.uint8),
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=starts.clone(),
            paged_kv_indices_buffer=pages.clone(),
            paged_kv_last_page_len_buffer=last.clone(),
        )
        types = {"q_data_type": torch.bfloat16, "kv_data_type": dtype}
        wrapper.plan(starts, pages, last, heads, kv_heads, dim, PAGE, **types)
        q = torch.randn(batch, heads, dim, device=device, dtype=torch.bfloat16)
        kv_bytes = 2 * batch * context * kv_heads * dim * dtype.itemsize
        shape = (len(pages), 2, PAGE, kv_heads, dim)
        caches = [
            torch.randn(shape, device=device, dtype=torch.bfloat16).to(dtype) for _ in range(copies(kv_bytes))
        ]
        us = microseconds(wrapper.run, [(q, cache) for cache in caches])
        num_bytes, flops = kv_bytes + 2 * q.nbytes, 4 * batch * context * heads * dim
        floor, at = rates.floor_us(num_bytes, flops), f"{batch} x {context}"
        yield KernelRow(
            "decode", f"flashinfer {name}, pages of {PAGE}", at, us, floor, num_bytes, flops, False
        )
        del caches


def prefill_rows(config: Arch, sizes: Sizes, rates: Rates, device: torch.device) -> Iterator[KernelRow]:
    """Time flashinfer's attention of one chunk after its prefix, over contiguous bf16 K and V."""
    flashinfer = import_module("flashinfer")
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    attend = partial(flashinfer.single_prefill_with_kv_cache, causal=True)
    for chunk, prefix in sizes:
        q, k, v = (
            torch.randn(n, h, dim, device=device, dtype=torch.bfloat16)
            for n, h in ((chunk, heads), (chunk + prefix, kv_heads), (chunk + prefix, kv_heads))
        )
        us = microseconds(attend, [(q, k, v)] * 2)
        flops = 4 * heads * dim * (chunk * prefix + chunk * (chunk + 1) // 2)
        num_bytes = 2 * (q.nbytes + k.nbytes)
        floor, at = rates.floor_us(num_bytes, flops), f"{chunk} + {prefix}"
        yield KernelRow("prefill", "flashinfer, contiguous", at, us, floor, num_bytes, flops, False)
