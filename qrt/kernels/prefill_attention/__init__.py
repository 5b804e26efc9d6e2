"""prefill_attention: packed chunks of prompts against their cached tokens and themselves, causally.

prefill_attention(q, k, v, kv, slot_table, rows, query_start, cached_start, tiles, out, num_cached,
                  attend_cache, format, scale)

q [T, Hq, D] and k, v [T, Hkv, D] (heads contiguous, any token stride) as `kv_write` leaves them: after RoPE
and in the basis of the cache. Chunk i is tokens query_start[i] to query_start[i+1] (int32 [B+1]) and reads
the first cached_start[i+1] - cached_start[i] (int32 [B+1]) positions of slot_table[rows[i]] from the cache:
its prefix, and it attends its own k and v as they are. With `attend_cache` these positions are its whole
context, the chunk included, and its own k and v are not read, so that a perplexity sees what the format
loses. kv, slot_table, rows: as for decode_attention. A chunk may be empty.

tiles int32 [N, 2] are `tiles.plan_tiles` of the chunks. num_cached, on the host, is at least
cached_start[B], so that a CUDA graph that was recorded once serves all chunks that it has room for.

The kernels round what they read from the cache to q's dtype, but to fp16, and q with it, where q is bf16 and
the format quantized: bf16 would round as coarsely as int8 does. fp16 ends at 65504; what is larger is
infinite there. The reference computes in fp32.

Writes the chunks' tokens of out [T, Hq, D], in q's dtype and the model's basis; other tokens stay as they
are.
"""

from __future__ import annotations

from qrt.kernels.op import define
from qrt.kernels.prefill_attention import ref

prefill_attention = define(
    ref.prefill_attention,
    triton="qrt.kernels.prefill_attention.kernel:prefill_attention",
    mutates=["out"],
)
