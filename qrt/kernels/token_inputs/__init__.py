"""What a step takes from the table of requests, and what it leaves there.

token_inputs: what the model needs of a step of T tokens, of which the first may decode.

token_inputs(inputs int32 [3, T], length int32 [R], last_token int64 [R], slot_table int32 [R, L], decodes,
             num_kv_heads, heads_per_sm)
-> ids int64 [T], positions, slots int32 [T], kv_lens int32 [decodes], parts int32 [P, 8]

The inputs are rows, given and tokens. Token t belongs to row rows[t] of tables of R requests. given[t] is its
position and tokens[t] itself; where they are negative it is the last token of the request, which decodes:
position length - 1, id last_token.
slots are those of the positions. Of the first `decodes` tokens kv_lens are positions + 1, but -1 where the
position is given, and 0 where the row has no tokens (position 0 then); parts are `plan_parts` of them, none
where `decodes` is 0. One launch where torch would take three dozen, in every step.

advance(rows int64 [S], tokens int64 [S], drawn int32 [S] | None, last_token int64 [R], length int32 [R])

last_token[rows] = tokens and length[rows] += drawn, 1 where it is None; a row that comes twice has drawn 0.
"""

from __future__ import annotations

from torch import Tensor

from qrt.kernels.op import define
from qrt.kernels.token_inputs import ref
from qrt.kernels.token_inputs.ref import empty_inputs


def _fake(inputs: Tensor, decodes: int, num_kv_heads: int, heads_per_sm: int) -> tuple[Tensor, ...]:
    return empty_inputs(inputs[0], decodes, num_kv_heads, heads_per_sm)


token_inputs = define(
    ref.token_inputs,
    triton="qrt.kernels.token_inputs.kernel:token_inputs",
    fake=_fake,
)

advance = define(
    ref.advance,
    triton="qrt.kernels.token_inputs.kernel:advance",
    mutates=["last_token", "length"],
)
