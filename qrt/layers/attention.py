"""Self-attention over the token-granular KV cache: store K and V, attend.

This is the only layer that touches the cache. `kv_write` turns queries, and K and V on their way to the
cache, into the basis of the KV format; the attention operators return to the model's basis.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.kernels.decode_attention import decode_attention
from qrt.kernels.gpu import aside, together
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

    def __call__(self, x: Tensor, step: StepMeta, kv: KVLayer, rope: RopeTables) -> Tensor:
        """x [T, H] -> [T, H]; writes K and V of the step's tokens into `kv`."""
        q, k, v = self.heads(self.qkv(x))
        return self.o(self.attend(q, k, v, step, kv, rope))

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, Hq, D], k and v [T, Hkv, D], q and k before RoPE; without norms, views."""
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).split(self.qkv_heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, step: StepMeta, kv: KVLayer, rope: RopeTables
    ) -> Tensor:
        """Store K and V, and return what each head attends, [T, Hq*D]; changes q, k and v in place.

        The first `num_decodes` tokens attend the cache, those of chunks prefix and chunk. Where there are
        both, they run side by side: the former wait for memory, the latter for products.
        """
        cos, sin = rope
        kv_write(q, k, v, cos, sin, step.positions, step.slots, kv.buffers, kv.smoothing, kv.format)
        out = step.attended
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if step.decode is None or step.prefill is None:
            self._attend_chunks(q, k, v, step, kv, out)
            self._attend_decodes(q, step, kv, out)
        else:
            with aside(q.device):
                self._attend_chunks(q, k, v, step, kv, out)
            self._attend_decodes(q, step, kv, out)
            together(q.device)
        return out.flatten(1)

    def _attend_decodes(self, q: Tensor, step: StepMeta, kv: KVLayer, out: Tensor) -> None:
        """Write what the tokens that decode, if there are any, attend to out [T, Hq, D]."""
        if decode := step.decode:
            decode_attention(
                q[: step.num_decodes],
                kv.buffers,
                step.slot_table,
                decode.rows,
                decode.kv_lens,
                decode.parts,
                out[: step.num_decodes],
                kv.format,
                self.scale,
                decode.newest,
            )

    def _attend_chunks(
        self, q: Tensor, k: Tensor, v: Tensor, step: StepMeta, kv: KVLayer, out: Tensor
    ) -> None:
        """Write what the tokens of chunks, if there are any, attend to out [T, Hq, D]."""
        if chunks := step.prefill:
            prefill_attention(
                q,
                k,
                v,
                kv.buffers,
                step.slot_table,
                chunks.rows,
                chunks.query_start,
                chunks.cached_start,
                chunks.tiles,
                out,
                chunks.num_cached,
                chunks.attend_cache,
                kv.format,
                self.scale,
            )
