"""Attention and RoPE from their definitions in fp64, and a cache to test kernels on."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from backends import COMPILED
from qrt.kernels.prefill_attention.tiles import Queries, plan_tiles
from qrt.quant import rotation
from qrt.quant.kv import KV_FORMATS

# the interpreter has no bf16 dot
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * COMPILED
WITH_KERNELS = [name for name in KV_FORMATS if KV_FORMATS[name].has_device]  # the others run on a CPU alone


def error(got: Tensor, want: Tensor) -> float:
    """Largest error of a vector, relative to the typical size of the wanted ones."""
    return ((got.double() - want).norm(dim=-1).max() / want.norm(dim=-1).square().mean().sqrt()).item()


def bound(name: str, dtype: torch.dtype) -> float:
    """What a kernel may lose against fp64 on the same cache: dots in fp16 or in the dtype, one rounding."""
    exact = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    return exact if name == "fp16" else max(exact, 3e-3)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D] as D/2 complex numbers (i, i + D/2), turned by cos + i sin [T, D/2]; fp64."""
    lo, hi = x.double().chunk(2, -1)
    turned = torch.complex(lo, hi) * torch.complex(cos.double(), sin.double())[:, None]
    return torch.cat((turned.real, turned.imag), -1)


def to_basis(name: str, x: Tensor) -> Tensor:
    """x [..., D] fp64 in the basis of the cache."""
    return _turn(name, x, whole_rotation(x.shape[-1]))


def from_basis(name: str, x: Tensor) -> Tensor:
    """The inverse of `to_basis`."""
    return _turn(name, x, whole_rotation(x.shape[-1]).T)


def whole_rotation(head_dim: int) -> Tensor:
    """R [D, D] fp64 with rotate(x) = x @ R: M for each half, after the halves are crossed if D < 128."""
    m = rotation.matrix(head_dim).double()
    if head_dim >= 128:
        return torch.block_diag(m, m)
    return torch.cat((torch.cat((m, m), 1), torch.cat((m, -m), 1))) / 2**0.5


def _turn(name: str, x: Tensor, matrix: Tensor) -> Tensor:
    if not KV_FORMATS[name].rotated:
        return x.double()
    return x.double() @ matrix.to(x.device)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0, softcap: float = 0.0,
    slopes: Tensor | None = None, sinks: Tensor | None = None, segment: int = 0,
) -> Tensor:  # fmt: skip
    """q [n, Hq, D], the last n of the positions of k, v [L, Hkv, D], causally -> [n, Hq, D] fp64."""
    n, group = len(q), q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    hidden = torch.ones(n, len(k), dtype=torch.bool, device=q.device).triu(len(k) - n + 1)
    if window:
        hidden |= torch.ones_like(hidden).tril(len(k) - n - window)
    token = torch.arange(len(k), device=q.device)
    if segment:
        hidden |= token // segment != token[len(k) - n :, None] // segment
    if slopes is not None:
        ahead = token - token[len(k) - n :, None]
        scores = scores + slopes.double()[:, None, None] * ahead
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:  # a key of that score whose value is 0
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, n, 1)), -1)
        v = torch.cat((v, torch.zeros_like(v[:1])))
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), v)


@dataclass
class Cache:
    """Requests of the given lengths in scattered slots, K and V in the basis of the cache.

    What is not theirs is poisoned: other slots hold NaN (or the largest words with NaN scales), columns of
    the slot table past a request's end are no slots at all.
    """

    name: str
    buffers: list[Tensor]
    slot_table: Tensor
    rows: Tensor
    kv_lens: Tensor
    k: list[Tensor]
    v: list[Tensor]

    def decoded(self, request: int) -> tuple[Tensor, Tensor]:
        """K, V fp64 [L, Hkv, D] of a request as the cache holds them."""
        slots = self.slot_table[self.rows[request], : self.kv_lens[request]].long()
        k, v = KV_FORMATS[self.name].decode_ref(self.buffers, slots)
        return k.double(), v.double()


def cache(
    name: str, lens: list[int], Hkv: int, D: int, dtype: torch.dtype, device: torch.device,
    v_scale: float = 1.0, seed: int = 0,
) -> Cache:  # fmt: skip
    """A filled cache; the same K and V for every `seed` of slots."""
    values, places = torch.Generator().manual_seed(D + sum(lens)), torch.Generator().manual_seed(seed)
    total, widest = sum(lens), max(lens)
    num_slots = total + 11
    buffers = [spec.zeros(device) for spec in KV_FORMATS[name].buffers(num_slots, Hkv, D, dtype).values()]
    for buffer in buffers:
        buffer.fill_(torch.nan if buffer.is_floating_point() else -1)
    slots = torch.randperm(num_slots, generator=places)[:total].int()
    table = torch.full((len(lens) + 3, widest + 5), 2**30, dtype=torch.int32)
    rows = torch.randperm(len(table), generator=places)[: len(lens)].int()
    ks, vs, at = [], [], 0
    for row, n in zip(rows, lens, strict=True):
        k, v = torch.randn(2, n, Hkv, D, generator=values)
        ks.append(to_basis(name, k * 1.5).to(dtype).to(device))
        vs.append(to_basis(name, (v + 0.3) * v_scale).to(dtype).to(device))
        table[row, :n] = slots[at : at + n]
        KV_FORMATS[name].encode_ref(ks[-1], vs[-1], buffers, slots[at : at + n].long().to(device))
        at += n
    kv_lens = torch.tensor(lens, dtype=torch.int32)
    return Cache(name, buffers, table.to(device), rows.to(device), kv_lens.to(device), ks, vs)


def far_slot(name: str, Hkv: int, D: int) -> int:
    """The first one of which the format's first buffer has 2^31 elements before it."""
    spec, *_ = KV_FORMATS[name].buffers(1, Hkv, D, torch.float16).values()
    return -(-(2**31) // math.prod(spec.shape))


def queries(n: int, Hq: int, D: int, dtype: torch.dtype, device: torch.device, name: str) -> Tensor:
    """q [n, Hq, D] in the basis of the cache, a strided view as attention gets it."""
    q = torch.randn(n, Hq, D, generator=torch.Generator().manual_seed(n * Hq)) * 1.5
    fused = torch.full((n, (Hq + 2) * D), torch.nan, dtype=dtype, device=device)
    view = fused[:, : Hq * D].unflatten(1, (Hq, D))
    return view.copy_(to_basis(name, q))


class Chunks:
    """The last `own[i]` tokens of each request of a cache, packed."""

    def __init__(self, held: Cache, own: list[int], Hq: int):
        self.held, self.own = held, own
        k = held.k[0]
        self.q = queries(sum(own), Hq, k.shape[-1], k.dtype, k.device, held.name)
        self.k = torch.cat([k[len(k) - n :] for k, n in zip(held.k, own, strict=True)])
        self.v = torch.cat([v[len(v) - n :] for v, n in zip(held.v, own, strict=True)])
        self.start = torch.tensor([0, *own]).cumsum(0).int().to(k.device)
        self.scale = k.shape[-1] ** -0.5

    def args(self, attend_cache=False, rule=()):
        held = self.held
        own = self.start.diff()
        cached = held.kv_lens if attend_cache else held.kv_lens - own
        starts = torch.cat((self.start[:1], cached.cumsum(0).int()))
        shape = Queries.of(self.q.shape[1], self.k.shape[1], self.q.shape[2], self.q.itemsize)
        tiles = plan_tiles(self.own, (held.kv_lens - own).tolist(), shape)
        return (
            self.q, self.k, self.v, held.buffers, held.slot_table, held.rows, self.start, starts,
            torch.from_numpy(tiles).to(self.q.device), torch.empty_like(self.q), int(cached.sum()),
            attend_cache, held.name, self.scale, *rule,
        )  # fmt: skip

    def run(self, attention, attend_cache=False, rule=()):
        args = self.args(attend_cache, rule)
        attention(*args)
        return args[9]

    def truth(self, attend_cache=False, attend=attend):
        """The prefix as the cache holds it, the chunk raw (or from the cache too), in fp64 unless `attend`
        does otherwise."""
        outs = []
        for i, (q, n) in enumerate(zip(self.q.split(self.own), self.own, strict=True)):
            k, v = self.held.decoded(i)
            if not attend_cache:
                prefix = len(k) - n
                k, v = (
                    torch.cat((x[:prefix], y[i][prefix:].double()))
                    for x, y in ((k, self.held.k), (v, self.held.v))
                )
            outs.append(from_basis(self.held.name, attend(q, k, v, self.scale)))
        return torch.cat(outs)


def chunks(name, lens, own, Hq, Hkv, D, dtype, device, **settings) -> Chunks:
    return Chunks(cache(name, lens, Hkv, D, dtype, device, **settings), own, Hq)
