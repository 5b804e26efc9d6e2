"""Self-attention over the token-granular KV cache: store K and V, attend.

This is the only layer that touches the cache. `kv_write` turns queries, and K and V on their way to the
cache, into the basis of the KV format; the attention operators return to the model's basis.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.kernels.attention import attend_chunks, attend_decodes, store
from qrt.kernels.gpu import aside, together
from qrt.kernels.step import KVLayer, StepMeta
from qrt.layers.linear import Linear
from qrt.layers.norm import RMSNorm
from qrt.layers.rope import RopeTables


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
        store(q, k, v, rope, step, kv)
        out = step.attended
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if step.decode is None or step.prefill is None:
            attend_chunks(q, k, v, step, kv, out, self.scale)
            attend_decodes(q, step, kv, out, self.scale)
        else:
            with aside(q.device):
                attend_chunks(q, k, v, step, kv, out, self.scale)
            attend_decodes(q, step, kv, out, self.scale)
            together(q.device)
        return out.flatten(1)
