"""Self-attention over the token-granular KV cache: store K and V, attend.

This is the only layer that touches the cache. `kv_write` normalizes heads and rotates queries, and K and V on
their way to the cache, into the basis of the KV format. The attention operators return to the model's basis.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qrt.definitions.rope import RopeTables, rotate
from qrt.kernels.attention import attend_chunks, attend_decodes, store
from qrt.kernels.attention_rule import AttentionRule
from qrt.kernels.gpu import aside, together
from qrt.kernels.head_norms import HeadNorms
from qrt.kernels.step import KVLayer, StepMeta
from qrt.layers.linear import Linear
from qrt.layers.norm import NormLayer, RMSNorm, WholeNorm

HeadNorm = NormLayer | WholeNorm


@dataclass(frozen=True)
class Heads:
    """How many heads there are and what is done to them before the cache.

    num_heads        of q
    num_kv_heads     of k and v
    dim              channels of each
    scores           how they weigh the tokens that they attend
    q_norm, k_norm   over the heads of q and k before RoPE, or None
    early_rope       the RoPE of the layer where those norms stand behind it; then none follows
    clip             q, k and v are clamped to at most this magnitude behind the norms, or None
    q_scale          fp32 [P]: what q of each position is multiplied by, or None
    """

    num_heads: int
    num_kv_heads: int
    dim: int
    scores: AttentionRule
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    early_rope: RopeTables | None = None
    clip: float | None = None
    q_scale: Tensor | None = None

    def normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norms of q and k."""
        if self.q_norm is None or self.k_norm is None:
            return q, k
        return self.q_norm(q), self.k_norm(k)

    def before_rope(self) -> HeadNorms | None:
        """Return the norms if RoPE comes right behind them and kernels do both at once, else None."""
        q, k = self.q_norm, self.k_norm
        if self.early_rope is not None or self.clip is not None or self.q_scale is not None:
            return None
        if type(q) is not RMSNorm or type(k) is not RMSNorm:  # a subclass computes something else
            return None
        if (q.eps, q.weight.dtype) != (k.eps, k.weight.dtype):
            return None
        return HeadNorms(q.weight, k.weight, q.eps)


class Attention:
    """Grouped-query attention: query head h reads KV head h // (Hq/Hkv).

    qkv    stacks q [Hq*D], k [Hkv*D] and v [Hkv*D]
    o      [Hq*D] -> [H]
    """

    def __init__(self, qkv: Linear, o: Linear, heads: Heads) -> None:
        self.qkv = qkv
        self.o = o
        self.spec = heads
        self.qkv_heads = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
        self.head_dim = heads.dim
        self.scores = heads.scores
        self.norms = heads.before_rope()  # `attend` does them

    def __call__(self, x: Tensor, step: StepMeta, kv: KVLayer, rope: RopeTables) -> Tensor:
        """x [T, H] -> [T, H]; writes K and V of the step's tokens into `kv`."""
        q, k, v = self.parts(self.qkv(x), step)
        return self.o(self.attend(q, k, v, step, kv, rope))

    def heads(self, qkv: Tensor, step: StepMeta) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [T, Hq, D], k and v [T, Hkv, D] of the step's tokens, as RoPE takes them."""
        q, k, v = self.parts(qkv, step)
        if self.norms is not None:
            q, k = self.spec.normed(q, k)
        return q, k, v

    def parts(self, qkv: Tensor, step: StepMeta) -> tuple[Tensor, Tensor, Tensor]:
        """Return `heads` without the norms that `attend` does."""
        own = self.spec
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).split(self.qkv_heads, dim=1)
        if own.early_rope is not None:
            rows = step.positions if step.rope_positions is None else step.rope_positions
            q, k = rotate(q, own.early_rope, rows), rotate(k, own.early_rope, rows)
        if self.norms is None:
            q, k = own.normed(q, k)
        if own.clip is not None:
            q, k, v = (part.clamp(-own.clip, own.clip) for part in (q, k, v))
        if own.q_scale is not None:
            q = (q * own.q_scale[step.positions.long(), None, None]).to(q.dtype)
        return q, k, v

    def parameters(self) -> list[Tensor]:
        """Every weight tensor outside its Linears."""
        norms = [norm for norm in (self.spec.q_norm, self.spec.k_norm) if norm is not None]
        sinks = [] if self.scores.sinks is None else [self.scores.sinks]
        return [tensor for norm in norms for tensor in norm.parameters()] + sinks

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, step: StepMeta, kv: KVLayer, rope: RopeTables
    ) -> Tensor:
        """Store K and V, and return what each head attends, [T, Hq*D]; changes q, k and v in place.

        They are from `parts`. The first `num_decodes` tokens attend the cache, those of chunks prefix and
        chunk. Where there are both, they run side by side: the former wait for memory, the latter for
        products.
        """
        store(q, k, v, self.norms, rope, step, kv)
        out = step.attended
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if step.decode is None or step.prefill is None:
            attend_chunks(q, k, v, step, kv, out, self.scores)
            attend_decodes(q, step, kv, out, self.scores)
        else:
            with aside(q.device):
                attend_chunks(q, k, v, step, kv, out, self.scores)
            attend_decodes(q, step, kv, out, self.scores)
            together(q.device)
        return out.flatten(1)
