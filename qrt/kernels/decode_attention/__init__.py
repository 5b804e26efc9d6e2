"""`decode_attention` and `append_attention`: one query token per request attends its request's cached tokens.

decode_attention(q, kv, slot_table, rows, kv_lens, kv_splits, out, format, scale, newest=False, window=0,
                 softcap=0.0, slopes=None, sinks=None, segment=0)

q            [B, Hq, D] in the basis of the cache; heads contiguous, any token stride
kv           the layer's buffers, in the order of `KVFormat.buffers`
slot_table   int32 [R, L]: row r, column p holds the slot of position p of the request in row r; positions
             that are not attended need not have one
rows         int32 [B]: each request's row of the table
kv_lens      int32 [B]: tokens to attend; 0 writes zeros, -1 writes nothing
kv_splits    int32 [P, 8]: how the tokens are cut into splits (`plan`)
out          [B, Hq, D], contiguous, in q's dtype: receives softmax(scale * q K^T) V in the model's basis
newest       True if the kernel before keeps the promise below
window       only the last `window` tokens are attended; 0: all. The kernel takes them from `kv_splits`, which
             must be planned for that window
softcap      c: scaled scores become c * tanh(score / c); 0: they stay
slopes       fp32 [Hq]: what each head's scores lose for each token of distance (ALiBi), or None
sinks        fp32 [Hq]: a score of each head that joins the softmax and has no value, or None
segment      tokens before the last multiple of this that is not beyond the query are not attended; 0: all
             are. As for `window`, the kernel takes them from `kv_splits`

Query head h reads KV head h // (Hq/Hkv).

append_attention(q, k, v, cos, sin, kv, smoothing, slot_table, rows, kv_lens, kv_splits, out, format, scale,
                 window=0, softcap=0.0, slopes=None, sinks=None, rope_positions=None, segment=0,
                 q_norm=None,
                 k_norm=None, eps=0.0)

Does `kv_write` of each request's newest token and then `decode_attention`, in one launch. q [B, Hq, D] and
k, v [B, Hkv, D] are given before norms and RoPE, and stay as they are. q_norm, k_norm and eps are those of
`kv_write`. The token has position kv_lens - 1 and that position's slot. It is rotated by that row of cos and
sin too, or by row `rope_positions` int32 [B]. No request may come twice. `out` is [out as above], or [codes,
facts] of it as `Digits` if D is 128. Raises ValueError for a format whose `KVFormat.appends` is false.

Where kernels overlap (`gpu.overlaps`), the kernel launched just before may still be writing q, k, v and
tokens of the cache. With `newest`, and in `append_attention`, tiles are loaded before that kernel is done. It
must then write only the last token of each request, and no request may come twice. Everything else must be
written before that kernel starts. The operators that begin a step ensure this (`token_inputs`, and torch's).

The grid depends on shapes only and splits are read on the device, so a CUDA graph captured once serves every
context length (FlashDecoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
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
