"""`prefill_attention`: packed chunks of prompts attend their cached tokens and themselves, causally.

prefill_attention(q, k, v, kv, slot_table, rows, query_start, cached_start, tiles, out, num_cached,
                  attend_cache, format, scale, window=0, softcap=0.0, slopes=None, sinks=None, segment=0)

q [T, Hq, D], k, v [T, Hkv, D]   as `kv_write` leaves them: after RoPE and in the basis of the cache; heads
                                 contiguous, any token stride
kv, slot_table, rows             as for `decode_attention`
query_start    int32 [B+1]: chunk i is the tokens query_start[i] to query_start[i+1]; it may be empty
cached_start   int32 [B+1]: chunk i reads the first cached_start[i+1] - cached_start[i] positions of
               slot_table[rows[i]] from the cache
tiles          int32 [N, 2]: `tiles.plan_tiles` of the chunks
out            [T, Hq, D] in q's dtype: receives the chunks' tokens, in the model's basis; others stay as are
num_cached     int, at least cached_start[B]; a CUDA graph recorded with it serves all chunks that fit in it
attend_cache   False: the cached positions are a chunk's prefix, and it attends its own k and v as they are.
               True: they are its whole context, the chunk included, and its own k and v are not read, so that
               a perplexity includes what the format loses

window, softcap, slopes, sinks and segment are those of `decode_attention`. Tiles of keys that no query of a
program sees are skipped. With slopes the portable kernel runs, on Hopper too.

The kernels round what they read from the cache to q's dtype. If q is bf16 and the format is quantized, they
round both to fp16 instead, since bf16 would round as coarsely as int8 does. fp16 ends at 65504; larger values
become infinite. The reference computes in fp32.
"""

from __future__ import annotations

from qrt.kernels.op import define
from qrt.kernels.prefill_attention import ref

prefill_attention = define(
    ref.prefill_attention,
    triton="qrt.kernels.prefill_attention.kernel:prefill_attention",
    mutates=["out"],
)
