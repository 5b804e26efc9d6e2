"""The Gluon kernel of `prefill_attention` for Hopper; see the package's docstring for the contract.

It follows FlashAttention-3 (arXiv:2407.08608). One warp asks the copy engine (TMA) for queries and for tiles
of K and V as long as shared memory has room. Two groups of 4 warps attend them, with 64 rows (token, query
head) each; see `hopper_attend_kernel`. A program takes several tiles of rows in turn, and the copies for the
next tile run while the current one is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from qrt.kernels.attention_rule import AttentionRule
from qrt.kernels.descriptor import Descriptor, box, descriptor_at, descriptor_of
from qrt.kernels.gpu import is_hopper, multiprocessors
from qrt.kernels.launch import variant
from qrt.kernels.linear.device import DTYPES, signals
from qrt.kernels.prefill_attention.hopper_attend_kernel import attend, item, place
from qrt.kernels.prefill_attention.tiles import tile_rows

KEYS = 128  # per tile of K or V
RING_BYTES = 128 << 10  # for K and V in shared memory
QUERY_TILES = 2  # in shared memory
GROUP_REGISTERS, COPY_REGISTERS = 232, 40  # per thread that attends, per thread that asks for copies
SWIZZLED = {rank: gl.NVMMASharedLayout(128, 16, rank) for rank in (2, 3)}


@dataclass(frozen=True)
class _Sizes:
    """The constants that a variant of the kernel is compiled for."""

    G: int  # query heads of a KV head
    HKV: int
    D: int
    M: int  # rows of a tile
    N: int  # keys of a tile
    OWN: Any  # dtype of the query, of the chunk's own K and V
    CACHED: Any  # dtype of the cached K and V
    ATTEND_CACHE: bool
    QUERIES: int  # tiles of queries in shared memory
    STAGES: int  # tiles of K in shared memory, and as many of V
    WINDOW: int  # tokens that a query attends, itself included; 0: all
    SEGMENT: int  # tokens of the segments, of which a query attends its own; 0: all

    @property
    def LIMITED(self) -> bool:
        """Return whether a query may attend less than all tokens before it."""
        return self.WINDOW > 0 or self.SEGMENT > 0

    @property
    def TOKENS(self) -> int:
        """Return the tokens of a tile of queries, for the copy engine; 0 if a tile is not whole tokens."""
        return self.M // self.G if self.M % self.G == 0 else 0


@gluon.jit(do_not_specialize=["items"])
def _hopper_prefill(
    q_desc, k_desc, v_desc, cached_k_desc, cached_v_desc, q, tiles, query_start, cached_start, rotation, out,
    scale, softcap, sinks, stride_q, items, S: gl.constexpr, WARPS: gl.constexpr, REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Grid (programs,): the programs take the `items` = Hkv * len(tiles) items in turn.

    softcap is in base 2, sinks are not; each may be None.
    """
    k_smem = gl.allocate_shared_memory(S.OWN, [S.STAGES, S.N, S.D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(S.OWN, [S.STAGES, S.N, S.D], k_desc.layout)
    q_smem = gl.allocate_shared_memory(S.OWN, [S.QUERIES, S.M, S.D], k_desc.layout)
    k_ready, k_empty = signals(S.STAGES, 2)
    v_ready, v_empty = signals(S.STAGES, 2)
    q_ready, q_empty = signals(S.QUERIES, 2)
    cleared = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(cleared, count=1)
    matrix = k_smem
    if rotation is not None:
        H: gl.constexpr = S.D // 2
        matrix = gl.allocate_shared_memory(gl.bfloat16, [H, H], gl.NVMMASharedLayout(2 * H, 16, 2))
        LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
        row = gl.arange(0, H, layout=gl.SliceLayout(1, LOADED))
        column = gl.arange(0, H, layout=gl.SliceLayout(0, LOADED))
        at = gl.expand_dims(row, 1) * H + gl.expand_dims(column, 0)
        matrix.store(gl.load(rotation[0] + at).to(gl.bfloat16))
    fence_async_shared()
    rings = k_smem, v_smem, q_smem, k_ready, k_empty, v_ready, v_empty, q_ready, q_empty
    where = tiles, query_start, cached_start, items
    output = matrix, rotation, out, (scale, softcap, sinks), q, stride_q
    gl.warp_specialize(
        [
            (attend, (0, rings, where, output, S)),
            (attend, (1, rings, where, output, S)),
            (_fetch, (rings, where, q_desc, k_desc, v_desc, cached_k_desc, cached_v_desc, cleared, S)),
        ],
        WARPS, REGISTERS,
    )  # fmt: skip


@gluon.jit
def _fetch(
    rings, where, q_desc, k_desc, v_desc, cached_k_desc, cached_v_desc, cleared, S: gl.constexpr
):  # fmt: skip
    """Ask for the queries, keys and values of this program's items, as long as there is room."""
    k_smem, v_smem, q_smem, k_ready, k_empty, v_ready, v_empty, q_ready, q_empty = rings
    cached_k_smem = k_smem._reinterpret(S.CACHED, [S.STAGES, S.N, S.D], k_desc.layout)
    cached_v_smem = v_smem._reinterpret(S.CACHED, [S.STAGES, S.N, S.D], k_desc.layout)
    signs = k_ready, k_empty, v_ready, v_empty, cleared
    done, clears, queries, turn = 0, 0, 0, 0
    head, first, start, length, _, own_keys, cached_keys = place(where, item(0), S)
    while length > 0:
        if S.TOKENS > 0:
            slot = queries % S.QUERIES
            mbarrier.wait(q_empty.index(slot), (queries // S.QUERIES - 1) & 1, pred=queries >= S.QUERIES)
            mbarrier.expect(q_ready.index(slot), q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                q_desc, [start + first // S.G, head * S.G, 0], q_ready.index(slot),
                q_smem.index(slot).reshape([S.TOKENS, S.G, S.D]),
            )  # fmt: skip
            queries += 1
        own_at, own, _ = own_keys
        cached_at, cached, _ = cached_keys
        valid = length  # rows of V that are this chunk's
        if S.LIMITED:
            valid -= own_at - start
        done, clears = _fetch_keys(
            k_desc, v_desc, k_smem, v_smem, signs, head, own_at, own, valid, done, clears, S
        )
        done, clears = _fetch_keys(
            cached_k_desc, cached_v_desc, cached_k_smem, cached_v_smem, signs, head, cached_at, cached,
            cached, done, clears, S,
        )  # fmt: skip
        turn += 1
        head, first, start, length, _, own_keys, cached_keys = place(where, item(turn), S)


@gluon.jit
def _fetch_keys(
    k_desc, v_desc, k_smem, v_smem, signs, head, start, count, valid, done, clears, S: gl.constexpr
):  # fmt: skip
    """Ask for `count` keys and values from row `start` on, the last tile first.

    `done` counts the tiles before, `clears` those of them with cleared rows. Rows from `valid` on belong to
    another chunk or to nobody. Their weights are zero, but their values may be NaN, so they are cleared.
    """
    k_ready, k_empty, v_ready, v_empty, cleared = signs
    tiles = gl.cdiv(count, S.N)
    for i in range(tiles):
        slot = done % S.STAGES
        first = (tiles - 1 - i) * S.N
        at = [start + first, head * S.D]
        _wait_free(k_empty, done, S)
        mbarrier.expect(k_ready.index(slot), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, at, k_ready.index(slot), k_smem.index(slot))
        _wait_free(v_empty, done, S)
        if first + S.N > valid:
            mbarrier.expect(cleared, v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(v_desc, at, cleared, v_smem.index(slot))
            mbarrier.wait(cleared, clears & 1)
            _clear(v_smem.index(slot), valid - first, S)
            mbarrier.arrive(v_ready.index(slot), count=1)
            clears += 1
        else:
            mbarrier.expect(v_ready.index(slot), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(v_desc, at, v_ready.index(slot), v_smem.index(slot))
        done += 1
    return done, clears


@gluon.jit
def _wait_free(empty, done, S: gl.constexpr):
    """Wait until the slot for tile `done` may be overwritten."""
    slot, turn = done % S.STAGES, done // S.STAGES
    mbarrier.wait(empty.index(slot), (turn - 1) & 1, pred=turn > 0)


@gluon.jit
def _clear(tile, valid, S: gl.constexpr):
    """Write zeros into the rows of a tile from `valid` on; one warp."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // S.D, S.D // 8], [1, 1], [1, 0])
    ROWS: gl.constexpr = 8  # cleared at a time
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    for r in gl.static_range(S.N // ROWS):
        if (r + 1) * ROWS > valid:
            rows = tile.slice(r * ROWS, ROWS)
            kept = gl.expand_dims(row + r * ROWS < valid, 1)
            rows.store(gl.where(kept, rows.load(LAYOUT), 0.0))
    fence_async_shared()
    tl.debug_barrier()


def fits(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> bool:
    """Return whether `hopper_prefill` takes q [T, Hq, D] and k, v [T, Hkv, D] by this rule.

    It needs a 16-bit dtype, a D of 64 or 128, tokens that the copy engine can read, and a GPU with wgmma. It
    has windows, segments, softcaps and sinks, but no slopes.
    """
    D = q.shape[2]
    return (
        is_hopper(q.device)
        and rule.slopes is None
        and q.dtype in DTYPES
        and D in (64, 128)
        and all(_is_readable(x, D) for x in (q, k, v))
    )


def _is_readable(x: Tensor, D: int) -> bool:
    stride, *inner = x.stride()
    return inner == [D, 1] and stride % 8 == 0 and x.data_ptr() % 16 == 0


def _of_keys(x: Tensor) -> Descriptor:
    """Return the TMA descriptor of x [T, heads, D], whose box is a tile's tokens of one head."""
    T, heads, D = x.shape
    boxes = box(x.dtype, (KEYS, D), SWIZZLED[2])
    return descriptor_at(boxes, x.get_device(), x.data_ptr(), (T, heads * D), (x.stride(0), 1))


def hopper_prefill(
    a: Any, cached: Sequence[Tensor], rotation: tuple[Tensor, float] | None, rule: AttentionRule
) -> None:
    """Run `prefill_attention` with its arguments; q, k, v and the rule must be what `fits`.

    `cached` are K and V [C, Hkv, D], contiguous, that the chunks read from the cache, chunk i from row
    cached_start[i] on. `rotation` is `signs`, None if the cache has the model's basis. The rule's scale and
    softcap are in base 2.
    """
    q, k, v, (cached_k, cached_v) = a.q, a.k, a.v, cached
    _, Hq, D = q.shape
    Hkv = k.shape[1]
    if not len(cached_k):  # a descriptor needs at least one row
        cached_k = cached_v = cached_k.new_empty(1, Hkv, D)
    sizes = _Sizes(
        Hq // Hkv, Hkv, D, tile_rows(q.itemsize, D), KEYS, DTYPES[q.dtype], DTYPES[cached_k.dtype],
        a.attend_cache, QUERY_TILES, RING_BYTES // (2 * KEYS * D * q.itemsize), rule.window,
        rule.segment,
    )  # fmt: skip
    own = _of_keys(k)
    queries = own  # unused: if a tile is not whole tokens, the kernel loads its queries itself
    if sizes.TOKENS:
        queries = descriptor_of(q, box(q.dtype, (sizes.TOKENS, sizes.G, D), SWIZZLED[3]))
    kernel = variant(
        _hopper_prefill, S=sizes, WARPS=(4, 1), REGISTERS=(GROUP_REGISTERS, COPY_REGISTERS), num_warps=4,
        maxnreg=168,
    )  # fmt: skip
    items = Hkv * len(a.tiles)
    kernel.launch(
        (min(multiprocessors(q.device), items),), queries, own, _of_keys(v), _of_keys(cached_k),
        _of_keys(cached_v), q, a.tiles, a.query_start, a.cached_start, rotation, a.out, rule.scale,
        rule.softcap or None, rule.sinks, q.stride(0), items,
    )  # fmt: skip
