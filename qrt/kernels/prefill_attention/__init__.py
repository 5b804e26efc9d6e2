"""prefill_attention: packed chunks of prompts against their cached tokens and themselves, causally.

q [T, Hq, D] and k, v [T, Hkv, D] (heads contiguous, any token stride) as `kv_write` leaves them: after RoPE
and in the basis of the cache. Chunk i is tokens query_start[i] to query_start[i+1] (int32 [B+1]) and reads
the first cached_start[i+1] - cached_start[i] (int32 [B+1]) positions of slot_table[rows[i]] from the cache:
its prefix, and it attends its own k and v as they are. With `attend_cache` these positions are its whole
context, the chunk included, and its own k and v are not read, so that a perplexity sees what the format
loses. kv, slot_table, rows: as for decode_attention.

On the host: max_query_len, the longest chunk; num_cached, the last of cached_start; max_cached_len, the most
positions that one chunk reads from the cache.

The kernel rounds what it reads from the cache to q's dtype, but to fp16, and q with it, where q is bf16 and
the format quantized: bf16 would round as coarsely as int8 does. fp16 ends at 65504; what is larger is
infinite there. The reference computes in fp32.

Returns [T, Hq, D] in q's dtype and the model's basis; tokens before query_start[0], of no chunk, may be
anything there.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qrt.kernels.op import define
from qrt.kernels.prefill_attention import ref


def _fake(q: Tensor, *args: Any) -> Tensor:
    return q.new_empty(q.shape)


prefill_attention = define(
    "prefill_attention(Tensor q, Tensor k, Tensor v, Tensor[] kv, Tensor slot_table, Tensor rows, "
    "Tensor query_start, Tensor cached_start, int max_query_len, int num_cached, int max_cached_len, "
    "bool attend_cache, str format, float scale) -> Tensor",
    ref=ref.prefill_attention,
    triton="qrt.kernels.prefill_attention.kernel:prefill_attention",
    fake=_fake,
)
