"""One query token per request against the cached tokens of that request.

decode_attention(q, kv, slot_table, rows, kv_lens, parts, out, format, scale, newest=False)

q [B, Hq, D] (heads contiguous, any token stride), in the basis of the cache; kv: the layer's buffers in the
order of `KVFormat.buffers`; slot_table int32 [R, L]: row r, column p holds the slot of position p;
rows, kv_lens int32 [B]: row of the table, tokens to attend; parts int32 [P, 8]: how they are cut (`plan`).
Query head h reads KV head h // (Hq/Hkv). Writes softmax(scale * q K^T) V to out [B, Hq, D], contiguous, in
q's dtype and the model's basis; zeros where kv_lens is 0, and nothing where it is -1.

append_attention(q, k, v, cos, sin, kv, smoothing, slot_table, rows, kv_lens, parts, out, format, scale)

`kv_write` of the newest token of each request, whose q [B, Hq, D] and k, v [B, Hkv, D] are given before RoPE,
at position kv_lens - 1 and the slot of that, and decode_attention of it, in one launch. q, k and v stay as
they are. No request may come twice. out: [as above], or [codes, facts] of it as `Digits`, D = 128. ValueError
for a format whose `KVFormat.appends` is false.

On a GPU whose kernels overlap the one launched before may write q, k, v and tokens of the cache. With
`newest`, by which tiles are loaded before that one is done, and in `append_attention` it may write no tokens
but the last of each request, and no request may come twice. All else must be there before that one starts, as
what a step begins with (`token_inputs`, torch's operators) sees to.

The grid depends on shapes only and parts are read on the device, so a CUDA graph captured once serves
every context length (FlashDecoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""

from __future__ import annotations

from qrt.kernels.decode_attention import ref
from qrt.kernels.op import define

decode_attention = define(
    ref.decode_attention,
    triton="qrt.kernels.decode_attention.kernel:decode_attention",
    mutates=["out"],
)

append_attention = define(
    ref.append_attention,
    triton="qrt.kernels.decode_attention.kernel:append_attention",
    mutates=["kv", "out"],
)
