"""Self-attention over the token-granular KV cache: store K and V, attend.

The only layer that touches the cache. Queries, and K and V on their way to the cache, are in the basis of
the KV format from `kv_write` on; the attention operators return to the model's basis.
"""

from __future__ import annotations

from torch import Tensor

from qrt.kernels.decode_attention import decode_attention
from qrt.kernels.kv_write import kv_write
from qrt.kernels.prefill_attention import prefill_attention
from qrt.kernels.step import StepMeta
from qrt.layers.linear import Linear
from qrt.layers.norm import RMSNorm
from qrt.layers.rope import RopeTables
from qrt.mem.storage import KVLayer


class Attention:
    """Grouped-query attention: query head h reads KV head h // (Hq/Hkv).

    qkv              stacks q [Hq*D], k [Hkv*D] and v [Hkv*D]
    o                [Hq*D] -> [H]
    q_norm, k_norm   RMSNorm over each head of q and k before RoPE, or None
    """

    def __init__(
        self,
        qkv: Linear,
        o: Linear,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        self.qkv = qkv
        self.o = o
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.qkv_heads = (num_heads, num_kv_heads, num_kv_heads)
        self.head_dim = head_dim
        self.scale = head_dim**-0.5

    def __call__(self, qkv: Tensor, step: StepMeta, kv: KVLayer, rope: RopeTables) -> Tensor:
        """What `self.qkv` gave [T, (Hq + 2*Hkv)*D] -> what `self.o` takes [T, Hq*D]; writes K and V of the
        step's tokens into `kv`."""
        q, k, v = self.heads(qkv)
        cos, sin = rope
        kv_write(q, k, v, cos, sin, step.positions, step.slots, kv.buffers, kv.smoothing, kv.format)
        return self._attend(q, k, v, step, kv).flatten(1)

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, Hq, D], k and v [T, Hkv, D], q and k before RoPE; without norms, views."""
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).split(self.qkv_heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, step: StepMeta, kv: KVLayer) -> Tensor:
        """[T, Hq, D]: the first `num_decodes` tokens attend the cache, the rest their prefix and chunk."""
        if step.prefill is None:
            return self._decode(q, step, kv)
        chunk = step.prefill
        out: Tensor = prefill_attention(
            q,
            k,
            v,
            kv.buffers,
            step.slot_table,
            chunk.rows,
            chunk.query_start,
            chunk.cached_start,
            chunk.max_query_len,
            chunk.num_cached,
            chunk.max_cached_len,
            chunk.attend_cache,
            kv.format,
            self.scale,
        )
        if step.decode is not None:
            out[: step.num_decodes] = self._decode(q[: step.num_decodes], step, kv)
        return out

    def _decode(self, q: Tensor, step: StepMeta, kv: KVLayer) -> Tensor:
        """[B, Hq, D] of the tokens that decode."""
        decode = step.decode
        assert decode is not None
        out: Tensor = decode_attention(
            q, kv.buffers, step.slot_table, decode.rows, decode.kv_lens, decode.parts, kv.format, self.scale
        )
        return out
