"""decode_attention: one query token per request against the cached tokens of that request.

q [B, Hq, D] (heads contiguous, any token stride), in the basis of the cache; kv: the layer's buffers in the
order of `KVFormat.buffers`; slot_table int32 [R, L]: row r, column p holds the slot of position p;
rows, kv_lens int32 [B]: row of the table, tokens to attend; parts int32 [P, 8]: how they are cut (`plan`).
Query head h reads KV head h // (Hq/Hkv). Returns softmax(scale * q K^T) V, [B, Hq, D] in q's dtype and the
model's basis; zeros where kv_lens is 0.

On a GPU whose kernels overlap the one launched before may write q and each request's last token. All else
must be there before that one starts, as what a step begins with (`token_inputs`, torch's operators) sees to.

The grid depends on shapes only and parts are read on the device, so a CUDA graph captured once serves
every context length (FlashDecoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qrt.kernels.decode_attention import ref
from qrt.kernels.op import define


def _fake(
    q: Tensor,
    kv: Sequence[Tensor],
    slot_table: Tensor,
    rows: Tensor,
    kv_lens: Tensor,
    parts: Tensor,
    format: str,
    scale: float,
) -> Tensor:
    return q.new_empty(q.shape)


decode_attention = define(
    "decode_attention(Tensor q, Tensor[] kv, Tensor slot_table, Tensor rows, Tensor kv_lens, "
    "Tensor parts, str format, float scale) -> Tensor",
    ref=ref.decode_attention,
    triton="qrt.kernels.decode_attention.kernel:decode_attention",
    fake=_fake,
)
