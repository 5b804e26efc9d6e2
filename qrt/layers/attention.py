"""Self-attention over the token-granular KV cache: store K and V, attend.

The only layer that touches the cache. Queries, and K and V on their way to the cache, are in the basis of
the KV format from `kv_write` on; the attention operators return to the model's basis. For few requests that
decode one operator does both (`DecodeBlock.appends`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.kernels.decode_attention import append_attention, decode_attention
from qrt.kernels.decode_attention.blocks import block_of
from qrt.kernels.gpu import aside, together
from qrt.kernels.kv_write import kv_write
from qrt.kernels.prefill_attention import prefill_attention
from qrt.kernels.step import DecodeMeta, StepMeta
from qrt.layers.linear import Linear
from qrt.layers.norm import RMSNorm
from qrt.layers.rope import RopeTables
from qrt.mem.storage import KVLayer
from qrt.quant.digits import GROUP, Digits
from qrt.quant.kv import KV_FORMATS


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
        self.width = num_heads * head_dim  # of what `o` reads
        self.scale = head_dim**-0.5

    def __call__(
        self, qkv: Tensor, step: StepMeta, kv: KVLayer, rope: RopeTables, room: int = 0
    ) -> Tensor | Digits:
        """What `self.qkv` gave [T, (Hq + 2*Hkv)*D] -> what `self.o` takes [T, Hq*D], or with `room` as
        Digits, if that costs no launch; writes K and V of the step's tokens into `kv`."""
        q, k, v = self.heads(qkv)
        cos, sin = rope
        if decode := self._newest(q, step, kv):
            out: Tensor | Digits
            if room and self.head_dim == GROUP:
                out = Digits.empty(len(q), self.width, room, q.device)
            else:
                out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            append_attention(
                q,
                k,
                v,
                cos,
                sin,
                kv.buffers,
                kv.smoothing,
                step.slot_table,
                decode.rows,
                decode.kv_lens,
                decode.parts,
                [out] if isinstance(out, Tensor) else [out.codes, out.facts],
                kv.format,
                self.scale,
            )
            return out.flatten(1) if isinstance(out, Tensor) else out
        kv_write(q, k, v, cos, sin, step.positions, step.slots, kv.buffers, kv.smoothing, kv.format)
        return self._attend(q, k, v, step, kv).flatten(1)

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, Hq, D], k and v [T, Hkv, D], q and k before RoPE; without norms, views."""
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).split(self.qkv_heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def _newest(self, q: Tensor, step: StepMeta, kv: KVLayer) -> DecodeMeta | None:
        """The decodes, if there is nothing else and `append_attention` is the fastest for them."""
        if step.prefill is not None or step.decode is None or not step.decode.newest:
            return None
        block = KV_FORMATS[kv.format].block(len(q), *self.qkv_heads[:2])
        return step.decode if block_of(block, self.head_dim, q.dtype).appends else None

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, step: StepMeta, kv: KVLayer) -> Tensor:
        """[T, Hq, D]: the first `num_decodes` tokens attend the cache, those of chunks prefix and chunk.

        Where there are both, they run side by side: the former wait for memory, the latter for products.
        """
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
        return out

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
