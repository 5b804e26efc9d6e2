"""StepMeta: the tensors that describe one ragged step. Built by `qrt.engine`, read by attention.

A step holds B requests and T tokens. Requests with one token to compute (decodes) come first, so tokens
[0, num_decodes) are theirs and the rest belong to prefill chunks, packed one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DecodeMeta:
    """The decoding requests, one query token each.

    rows     [Bd] int32     each request's row of the slot table
    kv_lens  [Bd] int32     tokens to attend, the new one included (0: a padding row, output unspecified)
    parts    [P, 8] int32   what the KV is cut into, from `decode_attention.plan`, once per step
    newest   each is its request's newest token and the only one of it in the step
    """

    rows: Tensor
    kv_lens: Tensor
    parts: Tensor
    newest: bool = False


@dataclass(frozen=True)
class PrefillMeta:
    """The prefill chunks, packed.

    rows            [Bp] int32     each request's row of the slot table
    kv_lens         [Bp] int32     context length after the chunk: cached prefix + chunk
    query_start     [Bp+1] int32   where each chunk starts among the step's tokens, behind those that decode
    cached_start    [Bp+1] int32   where its cached tokens start when those of all are packed; starts at 0
    max_query_len   longest chunk, on the host
    num_cached      cached tokens of all chunks, on the host
    max_cached_len  most cached tokens of one chunk, on the host
    attend_cache    read the chunk's own K/V back from the cache instead of attending it raw

    The cached tokens are what a chunk attends through the cache: its prefix or, with attend_cache, all of
    its context.
    """

    rows: Tensor
    kv_lens: Tensor
    query_start: Tensor
    cached_start: Tensor
    max_query_len: int
    num_cached: int
    max_cached_len: int
    attend_cache: bool = False


@dataclass(frozen=True)
class StepMeta:
    """One step.

    tokens       [T] int64   token ids
    positions    [T] int32   position of each token in its sequence
    slots        [T] int32   where each token's K/V is written (padding rows: the pad slot)
    slot_table   [R, Lmax] int32   row r, column p: slot of position p of the request in row r
    decode       None when no request decodes
    prefill      None when no chunk is prefilled
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    slot_table: Tensor
    decode: DecodeMeta | None
    prefill: PrefillMeta | None

    @property
    def num_decodes(self) -> int:
        """Tokens (and requests) that decode; the first of the T."""
        return 0 if self.decode is None else self.decode.rows.shape[0]
