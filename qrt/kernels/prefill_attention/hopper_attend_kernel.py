"""What the two groups of warps of `hopper_kernel` do: attend the keys that arrive, and store the results.

A group asks for the scores of the next keys before it multiplies the weights of the current ones with V, so
that the tensor cores work during the softmax. It attends the chunk's own keys first, then the cached ones,
each from the last to the first, so that masked keys come first. If the cached keys have another dtype, the
group converts its queries in place before them.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qrt.kernels.device import capped, in_base_2, with_sink


@gluon.jit
def item(turn):
    """Return a program's item in this turn.

    Every other turn goes backwards, so a program that gets a long tile in one turn gets a short one next.
    """
    programs, program = gl.num_programs(0), gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)


@gluon.jit
def place(where, number, S: gl.constexpr):
    """Return what an item attends.

    That is its KV head and first row, its chunk's first token and length, how far its first row is into its
    segment, the first of the chunk's own keys that it attends and how many, and the same of the cached keys.
    Entries without a tile come last and have length 0, so a program is done when it meets one.

    Keys are attended from the first one that the first row sees. Behind it, of the own keys and of the cached
    ones, stands which key that is, or a negative number: so many keys fewer than the first row attends.
    """
    tiles, query_start, cached_start, items = where
    head, tile = number % S.HKV, number // S.HKV
    chunk = gl.load(tiles + 2 * tile, mask=number < items, other=-1)
    first = gl.load(tiles + 2 * tile + 1, mask=number < items, other=0)
    request = gl.maximum(chunk, 0)
    start = gl.load(query_start + request)
    length = gl.where(chunk < 0, 0, gl.load(query_start + request + 1) - start)
    cached_at = gl.load(cached_start + request)
    cached = gl.where(chunk < 0, 0, gl.load(cached_start + request + 1) - cached_at)
    own = gl.minimum((first + S.M - 1) // S.G + 1, length)
    lowest, prefix = first // S.G, cached
    if S.ATTEND_CACHE:
        prefix = cached - length
        cached, own = cached - length + own, 0
    own_at, own_low, cached_low, within = start, 0, 0, 0
    if S.SEGMENT > 0:
        within = (prefix + lowest) % S.SEGMENT
    if S.LIMITED:
        skipped, cached_low = _skipped(prefix + lowest, within, cached, S)
        cached_at, cached = cached_at + skipped, cached - skipped
        if not S.ATTEND_CACHE:
            skipped, own_low = _skipped(lowest, within, own, S)
            own_at, own = own_at + skipped, own - skipped
    return head, first, start, length, within, (own_at, own, own_low), (cached_at, cached, cached_low)


@gluon.jit
def _skipped(position, within, count, S: gl.constexpr):
    """Return how many of `count` keys come before what a row attends, and where that begins then."""
    if S.SEGMENT > 0:
        reach = position - within
    else:
        reach = position - (S.WINDOW - 1)
    skipped = gl.minimum(gl.maximum(reach, 0), count)
    return skipped, reach - skipped


@gluon.jit
def attend(GROUP: gl.constexpr, rings, where, output, S: gl.constexpr):
    """Attend half of the rows of this program's items as their keys arrive, and store the results."""
    k_smem, v_smem, q_smem, k_ready, k_empty, v_ready, v_empty, q_ready, q_empty = rings
    matrix, rotation, out, rule, q, stride_q = output
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.D, 16])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.N, 16])
    HALF: gl.constexpr = S.M // 2
    cached_k_smem = k_smem._reinterpret(S.CACHED, [S.STAGES, S.N, S.D], k_smem.layout)
    cached_v_smem = v_smem._reinterpret(S.CACHED, [S.STAGES, S.N, S.D], k_smem.layout)
    cached_q_smem = q_smem._reinterpret(S.CACHED, [S.QUERIES, S.M, S.D], q_smem.layout)
    signs = k_ready, k_empty, v_ready, v_empty
    row = gl.arange(0, HALF, layout=gl.SliceLayout(1, SCORES))
    done, queries, turn = 0, 0, 0
    head, first, start, length, within, own_keys, cached_keys = place(where, item(0), S)
    while length > 0:
        own_at, own, own_low = own_keys
        _, cached, cached_low = cached_keys
        lowest = first // S.G
        first += GROUP * HALF
        slot = queries % S.QUERIES
        query = q_smem.index(slot).slice(GROUP * HALF, HALF)
        if S.TOKENS > 0:
            mbarrier.wait(q_ready.index(slot), queries // S.QUERIES & 1)
        else:
            _load_query(q, query, stride_q, start, head, first, length, S)
        token = (first + row) // S.G
        m = gl.full([HALF], -float("inf"), gl.float32, gl.SliceLayout(1, SCORES))
        l = gl.full([HALF], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
        acc = gl.full([HALF, S.D], 0.0, gl.float32, SUMS)
        if own > 0:
            state = m, l, acc
            skipped = 0
            if S.LIMITED:
                skipped = own_at - start
            last, free = gl.minimum(token - skipped, own - 1), gl.minimum(first // S.G + 1 - skipped, own)
            low, top = _lows(token, first, length, (lowest, within), own_low, S)
            m, l, acc, done = _attend_keys(
                query, k_smem, v_smem, signs, state, own, free, (last, low, top), rule, done, S.TOKENS == 0, S
            )
        if cached > 0:
            state = m, l, acc
            converted = cached_q_smem.index(slot).slice(GROUP * HALF, HALF)
            seen = gl.minimum((first - GROUP * HALF + S.M - 1) // S.G + 1, length)
            lows = _lows(token, first, length, (lowest, within), cached_low, S)
            m, l, acc, done = _attend_cached(
                query, converted, cached_k_smem, cached_v_smem, signs, state, cached, seen, token, first,
                lows, rule, done, S,
            )  # fmt: skip
        if S.TOKENS > 0:
            mbarrier.arrive(q_empty.index(slot), count=1)
        queries += 1
        factor = _factor(m, l, rule, (first + row) % S.G + head * S.G)
        acc *= gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, SUMS)), 1)
        at = start, head, first, length
        turn += 1
        head, first, start, length, within, own_keys, cached_keys = place(where, item(turn), S)
        _store(acc, matrix, rotation, out, at, S)


@gluon.jit
def _factor(m, l, rule, head):
    """Return what the weighted sums of rows must be multiplied by, with the sink of each row's query head."""
    sinks = rule[2]
    if sinks is None:
        return 1.0 / l
    else:
        _, kept, l = with_sink(in_base_2(gl.load(sinks + head)), m, l)
        return kept / l


@gluon.jit
def _lows(token, first, length, begin, low, S: gl.constexpr):
    """Return the first key that each row attends, and that of the group's last row.

    `begin` is the item's first token and how far it is into its segment, `low` the first key that it attends.
    """
    lowest, within = begin
    last = gl.minimum((first + S.M // 2 - 1) // S.G, length - 1)
    if S.SEGMENT > 0:
        before = within - lowest
        return low + _floored(token + before, S), low + _floored(last + before, S)
    elif S.WINDOW > 0:
        return token + (low - lowest), last + (low - lowest)
    else:
        return token, 0


@gluon.jit
def _floored(x, S: gl.constexpr):
    """Return the last multiple of a segment up to x, which is not below 0."""
    return x // S.SEGMENT * S.SEGMENT


@gluon.jit
def _attend_cached(
    query, converted, k_smem, v_smem, signs, state, count, seen, token, first, lows, rule, done,
    S: gl.constexpr,
):  # fmt: skip
    """Go on from `state` through `count` cached keys. If ATTEND_CACHE, the last `seen` are the chunk's."""
    if S.CACHED != S.OWN:
        _convert(query, converted, S)
    last, free = token * 0 + count - 1, count
    if S.ATTEND_CACHE:
        last = gl.minimum(count - seen + token, count - 1)
        free = gl.minimum(count - seen + first // S.G + 1, count)
    low, top = lows
    return _attend_keys(
        converted, k_smem, v_smem, signs, state, count, free, (last, low, top), rule, done, S.ATTEND_CACHE, S
    )


@gluon.jit
def _load_query(q, query, stride, start, head, first, length, S: gl.constexpr):
    """Load a group's queries into shared memory, and zeros into rows that are no query."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // S.D, S.D // 8], [4, 1], [1, 0])
    row = first + gl.arange(0, query.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, S.D, layout=gl.SliceLayout(0, LAYOUT))
    at = (start + row // S.G).to(gl.int64) * stride + (head * S.G + row % S.G) * S.D
    live = gl.expand_dims(row < length * S.G, 1)
    tile = gl.load(q + gl.expand_dims(at, 1) + gl.expand_dims(column, 0), mask=live, other=0.0)
    tl.debug_barrier()  # all warps are done with the queries before these
    query.store(tile)
    fence_async_shared()
    tl.debug_barrier()


@gluon.jit
def _convert(query, converted, S: gl.constexpr):
    """Convert a group's queries to the dtype of the cached keys, where they lie."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // S.D, S.D // 8], [4, 1], [1, 0])
    tl.debug_barrier()  # all warps have their scores
    tile = query.load(LAYOUT)
    tl.debug_barrier()
    converted.store(tile.to(S.CACHED))
    fence_async_shared()
    tl.debug_barrier()


@gluon.jit
def _weigh(scores, m, l, rule, seen, first, MASKED: gl.constexpr, S: gl.constexpr):
    """Return the weights of keys from `first` on, the new maximum and sum, and the factor of old sums.

    `rule` is the scale, the softcap and the sinks, of which the last two may be None. `seen` is last, low and
    more: if MASKED, row r sees the keys up to last[r], and if LIMITED those from low[r] on.
    """
    scale, softcap, _ = rule
    if softcap is not None:
        scores, scale = capped(scores * scale, softcap), 1.0
    if MASKED:
        key = first + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, scores.type.layout))
        visible = gl.expand_dims(key, 0) <= gl.expand_dims(seen[0], 1)
        if S.LIMITED:
            visible &= gl.expand_dims(key, 0) >= gl.expand_dims(seen[1], 1)
        scores = gl.where(visible, scores, -float("inf"))
    m_new = gl.maximum(m, gl.max(scores, 1) * scale)
    shift = m_new
    if MASKED:
        shift = gl.where(m_new == -float("inf"), 0.0, m_new)  # rows that have not seen a key yet
    p = gl.exp2(scores * scale - gl.expand_dims(shift, 1))
    alpha = gl.exp2(m - shift)
    return p, m_new, l * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _free(empty, done, S: gl.constexpr):
    """Release the slot of tile `done`, as far as this group is concerned."""
    mbarrier.arrive(empty.index(done % S.STAGES), count=1)


@gluon.jit
def _wait(ready, done, wanted, S: gl.constexpr):
    """Wait until tile `done` has arrived, if it is wanted."""
    mbarrier.wait(ready.index(done % S.STAGES), done // S.STAGES & 1, pred=wanted)


@gluon.jit
def _scores(query, k_smem, done, S: gl.constexpr):
    """Ask for the scores of tile `done`."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.N, 16])
    keys = k_smem.index(done % S.STAGES).permute((1, 0))
    none = gl.full([S.M // 2, S.N], 0.0, gl.float32, LAYOUT)
    return warpgroup_mma(query, keys, none, use_acc=False, is_async=True)


@gluon.jit
def _here(x):
    """Return x, and make the compiler compute it before what follows."""
    return gl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=2)


@gluon.jit
def _attend_keys(
    query, k_smem, v_smem, signs, state, count, free, seen, rule, done, STRADDLED: gl.constexpr,
    S: gl.constexpr,
):  # fmt: skip
    """Go on from `state` through `count` keys, the last tile first.

    `seen` is last, low and top: row r sees the keys up to last[r], and if LIMITED those from low[r] on.
    Every row sees keys before `free`, and if LIMITED from `top` on. Unless STRADDLED, only the last tile
    has keys behind some row. `done` counts the tiles before these.
    """
    k_ready, k_empty, v_ready, v_empty = signs
    m, l, acc = state
    SUM: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    end = done + gl.cdiv(count, S.N) - 1
    first = (end - done) * S.N

    _wait(k_ready, done, True, S)
    scores = _scores(query, k_smem, done, S)
    scores = warpgroup_mma_wait(0, deps=[scores])
    _free(k_empty, done, S)
    p, m, l, alpha = _weigh(scores, m, l, rule, seen, first, True, S)
    acc *= gl.expand_dims(gl.convert_layout(alpha, SUM), 1)
    weights = gl.convert_layout(p.to(k_smem.dtype), WEIGHTS)
    running = m, l, acc, weights, done, first
    _wait(k_ready, done + 1, done < end, S)
    if STRADDLED:
        masked = gl.minimum((first + S.N - 1 - free) // S.N, end - done)
        running = _attend_tiles(
            query, k_smem, v_smem, signs, running, done + masked, end, seen, rule, True, S
        )
    if S.LIMITED:
        whole = end - (gl.maximum(seen[2], 0) + S.N - 1) // S.N
        running = _attend_tiles(query, k_smem, v_smem, signs, running, whole, end, seen, rule, False, S)
        running = _attend_tiles(query, k_smem, v_smem, signs, running, end, end, seen, rule, True, S)
    else:
        running = _attend_tiles(query, k_smem, v_smem, signs, running, end, end, seen, rule, False, S)
    m, l, acc, weights, done, first = running
    _wait(v_ready, done, True, S)
    acc = warpgroup_mma(weights, v_smem.index(done % S.STAGES), acc, is_async=True)
    acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
    _free(v_empty, done, S)
    return m, l, acc, done + 1


@gluon.jit
def _attend_tiles(
    query, k_smem, v_smem, signs, running, to, end, seen, rule, MASKED: gl.constexpr, S: gl.constexpr
):  # fmt: skip
    """Go on until the weights of tile `to` are computed; tile `end` is the last one.

    Each turn asks for the scores of a tile, then for the weighted values of the tile before. It waits for the
    values only after it has computed the new weights. The wait for the next keys enforces that order: ptxas
    puts a wait for products as early as it can, but not across the loop of another wait.
    """
    k_ready, k_empty, v_ready, v_empty = signs
    m, l, acc, weights, done, first = running
    SUM: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    while done < to:
        first -= S.N
        scores = _scores(query, k_smem, done + 1, S)
        _wait(v_ready, done, True, S)
        acc = warpgroup_mma(weights, v_smem.index(done % S.STAGES), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        _free(k_empty, done + 1, S)
        p, m, l, alpha = _weigh(scores, m, l, rule, seen, first, MASKED, S)
        following = _here(gl.convert_layout(p.to(k_smem.dtype), WEIGHTS))
        _wait(k_ready, done + 2, done + 1 < end, S)
        acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
        _free(v_empty, done, S)
        acc *= gl.expand_dims(gl.convert_layout(alpha, SUM), 1)
        weights = following
        done += 1
    return m, l, acc, weights, done, first


@gluon.jit
def _store(acc, matrix, rotation, out, at, S: gl.constexpr):
    """Store the results [64, D] of a group, turned out of the cache's basis."""
    start, head, first, length = at
    H: gl.constexpr = S.D // 2
    ROWS: gl.constexpr = acc.shape[0]
    if rotation is not None:
        lo, hi = gl.split(acc.reshape([ROWS, 2, H]).permute((0, 2, 1)))
        if S.D < 128:
            lo, hi = lo + hi, lo - hi
        lo, hi = _turned(lo, matrix) * rotation[1], _turned(hi, matrix) * rotation[1]
        acc = gl.join(lo, hi).permute((0, 2, 1)).reshape([ROWS, S.D])
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // S.D, S.D // 8], [4, 1], [1, 0])
    y = gl.convert_layout(acc.to(out.dtype.element_ty), LAYOUT)
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, S.D, layout=gl.SliceLayout(0, LAYOUT))
    at = ((start + row // S.G).to(gl.int64) * S.HKV * S.G + head * S.G + row % S.G) * S.D
    live = gl.expand_dims(row < length * S.G, 1)
    gl.store(out + gl.expand_dims(at, 1) + gl.expand_dims(column, 0), y, mask=live)


@gluon.jit
def _turned(x, matrix):
    """Return x [64, H] fp32 times the transposed signs [H, H]. Two bf16 terms hold 16 of its 24 bits."""
    H: gl.constexpr = x.shape[1]
    TURNED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, H, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, TURNED, 2)
    x = gl.convert_layout(x, TURNED)
    high = x.to(gl.bfloat16)
    low = (x - high.to(gl.float32)).to(gl.bfloat16)
    high, low = gl.convert_layout(high, OPERAND), gl.convert_layout(low, OPERAND)
    y = gl.full([x.shape[0], H], 0.0, gl.float32, TURNED)
    y = warpgroup_mma(high, matrix.permute((1, 0)), y, is_async=True)
    y = warpgroup_mma(low, matrix.permute((1, 0)), y, is_async=True)
    y, high, low = warpgroup_mma_wait(0, deps=[y, high, low])
    return y
