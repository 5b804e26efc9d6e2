"""What a step takes from the table of requests, and what it leaves there.

token_inputs: what the model needs of a step in which every token attends through the cache on its own.

token_inputs(rows int32 [T], given int32 [T], tokens int32 [T], length int32 [R], last_token int64 [R],
             slot_table int32 [R, L], num_kv_heads, heads_per_sm)
-> ids int64 [T], positions, slots, kv_lens int32 [T], parts int32 [P, 8]

Token t belongs to row rows[t] of tables of R requests. given[t] is its position and tokens[t] itself; where
they are negative it is the last token of the request: position length - 1, id last_token. slots are those of
the positions, kv_lens are positions + 1 (0 for a row without tokens, whose position is 0), parts are
`plan_parts` of them. One launch where torch would take three dozen, in every step.

advance(rows int64 [S], tokens int64 [S], drawn int32 [S] | None, last_token int64 [R], length int32 [R])

last_token[rows] = tokens and length[rows] += drawn, 1 where it is None; a row that comes twice has drawn 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qrt.kernels.decode_attention.plan import FIELDS, max_parts
from qrt.kernels.op import define
from qrt.kernels.token_inputs import ref


def _fake(
    rows: Tensor,
    given: Tensor,
    tokens: Tensor,
    length: Tensor,
    last_token: Tensor,
    slot_table: Tensor,
    num_kv_heads: int,
    heads_per_sm: int,
) -> tuple[Tensor, ...]:
    room = max_parts(len(rows), num_kv_heads, heads_per_sm, rows.device)
    parts = rows.new_empty(room, FIELDS)
    return rows.new_empty(rows.shape, dtype=torch.int64), *(torch.empty_like(rows) for _ in range(3)), parts


token_inputs = define(
    "token_inputs(Tensor rows, Tensor given, Tensor tokens, Tensor length, Tensor last_token, "
    "Tensor slot_table, int num_kv_heads, int heads_per_sm) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    ref=ref.token_inputs,
    triton="qrt.kernels.token_inputs.kernel:token_inputs",
    fake=_fake,
)


def _fake_advance(
    rows: Tensor, tokens: Tensor, drawn: Tensor | None, last_token: Tensor, length: Tensor
) -> None:
    return None


advance = define(
    "advance(Tensor rows, Tensor tokens, Tensor? drawn, Tensor(a!) last_token, Tensor(b!) length) -> ()",
    ref=ref.advance,
    triton="qrt.kernels.token_inputs.kernel:advance",
    fake=_fake_advance,
)
