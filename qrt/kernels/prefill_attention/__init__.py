"""prefill_attention: packed chunks of prompts against their cached prefix and themselves, causally.

q [T, Hq, D] and k, v [T, Hkv, D] (heads contiguous, any token stride) as `kv_write` leaves them: after RoPE
and in the basis of the cache. Chunk i is tokens query_start[i] to query_start[i+1] (int32 [B+1]); its
context is kv_lens[i] tokens (int32 [B]), of which the last ones are itself, the rest its cached prefix.
kv, slot_table, rows: as for decode_attention. max_query_len: the longest chunk, or more.

The prefix is read through the KV format; the chunk attends its own k and v as they are, or, with
`attend_cache`, reads them back from the cache too, so that a perplexity sees what the format loses.
Returns [T, Hq, D] in q's dtype and the model's basis.
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
    "Tensor query_start, Tensor kv_lens, int max_query_len, bool attend_cache, str format, float scale)"
    " -> Tensor",
    ref=ref.prefill_attention,
    triton="qrt.kernels.prefill_attention.kernel:prefill_attention",
    fake=_fake,
)
