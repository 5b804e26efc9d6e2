"""kv_write: RoPE, smoothing, the KV format's basis and the store into token slots, in one pass.

q [T, Hq, D] and k, v [T, Hkv, D] may be views of one fused buffer (heads contiguous, any token stride) of
one dtype, fp32, fp16 or bf16. cos, sin fp32 [P, D/2]; positions, slots int32 [T]; kv: the layer's buffers in
the order of `KVFormat.buffers`; smoothing fp32 [3, Hkv, D] as `qrt.quant.kv.smoothing` defines it, or None;
format: a name in KV_FORMATS.

q and k get RoPE (half-split pairs, as Llama checkpoints have it) and are smoothed, then q, k and v enter the
basis of the format; all three are written back in place in their dtype, and k, v are encoded from fp32 into
`slots`.
The bytes of a token do not depend on the batch it came in or on its slot. Rows that share a slot (padding
rows on the pad slot) leave one of their values there.
"""

from qrt.kernels.kv_write import ref
from qrt.kernels.op import define

kv_write = define(
    ref.kv_write,
    triton="qrt.kernels.kv_write.kernel:kv_write",
    mutates=["q", "k", "v", "kv"],
)
