"""`token_inputs` and `advance`: what a step reads from the table of requests, and what it writes there.

token_inputs(inputs int32 [3, T], length int32 [R], last_token int64 [R], slot_table int32 [R, L], decodes,
             num_kv_heads, heads_per_sm, windows, segments)
-> ids int64 [T], positions, slots int32 [T], kv_lens int32 [decodes], kv_splits int32 [W, P, 8]

Returns what the model needs of a step of T tokens, of which the first `decodes` may decode. It takes one
launch per step; torch would take three dozen.

inputs      three rows: rows, given and tokens. Token t belongs to row rows[t] of the tables of R requests.
            Its position is given[t] and its id tokens[t]. Where these are negative, the request decodes its
            last token: the position is length - 1, the id last_token
slots       the slots of the positions
kv_lens     positions + 1 of the first `decodes` tokens; -1 where the position is given; 0 where the row has
            no tokens, whose position is then 0
kv_splits   `plan_kv_splits` of kv_lens for each of the W windows and segments; empty if `decodes` is 0

advance(rows int64 [S], tokens int64 [S], counts int32 [S] | None, last_token int64 [R], length int32 [R])

Sets last_token[rows] = tokens and length[rows] += counts (1 if counts is None). If a row comes twice, its
counts must be 0. Of a negative token, which is none, last_token becomes 0, so that the next step can read it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qrt.kernels.op import define
from qrt.kernels.token_inputs import ref
from qrt.kernels.token_inputs.ref import empty_inputs


def _fake(
    inputs: Tensor,
    decodes: int,
    num_kv_heads: int,
    heads_per_sm: int,
    windows: Sequence[int],
) -> tuple[Tensor, ...]:
    return empty_inputs(inputs[0], decodes, num_kv_heads, heads_per_sm, len(windows))


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
