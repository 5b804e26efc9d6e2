"""`kv_write`: RMSNorm of heads, RoPE, smoothing, the KV format's basis and the store into slots, in one pass.

kv_write(q, k, v, cos, sin, positions, slots, kv, smoothing, format, q_norm=None, k_norm=None, eps=0.0)

q [T, Hq, D], k, v [T, Hkv, D]   all fp32, fp16 or bf16; may be views of one fused buffer: heads contiguous,
                                 any token stride
cos, sin     fp32 [P, D/2], one row per position
positions    int32 [T]
slots        int32 [T]: where each token is stored
kv           the layer's buffers, in the order of `KVFormat.buffers`
smoothing    fp32 [3, Hkv, D] as `qrt.quant.kv.smoothing` defines it, or None
format       a name in KV_FORMATS
q_norm, k_norm   weights [D] of one dtype, or None: each head of q and of k is first normalized as
                 `qrt.kernels.rmsnorm` does it with `eps`

q and k get their norms, RoPE (half-split pairs, as in Llama checkpoints) and smoothing. Then q, k and v enter
the format's basis and are written back in place, in their dtype. k and v are also encoded, from fp32, into
`slots`. A norm is rounded to that dtype as if it had been stored. It adds squares as
integers, in 23 bits of the largest or more, so the last bits of their sum may differ from those of `rmsnorm`.

A token's bytes depend neither on its batch nor on its slot. If rows share a slot (padding rows share the pad
slot), the slot holds the values of one of them.
"""

from qrt.kernels.kv_write import ref
from qrt.kernels.op import define

kv_write = define(
    ref.kv_write,
    triton="qrt.kernels.kv_write.kernel:kv_write",
    mutates=["q", "k", "v", "kv"],
)
