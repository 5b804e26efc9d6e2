"""GPTQ's inner loop on a GPU: one launch rounds a block's columns in turn, its rows in parallel.

From the host, a block of 128 columns would take some thousand launches, which cost more than their work.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32  # rows of a block that one program rounds, with all their columns in registers


@triton.jit
def _round_block_kernel(  # noqa: PLR0913  # a kernel takes its operands one by one
    block_ptr, scales_ptr, zeros_ptr, upper_ptr, codes_ptr, errors_ptr, rows,
    MIDPOINT: tl.constexpr, LEVELS: tl.constexpr, COLUMNS: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Round a tile of rows; the grid is [row tiles, blocks], operands are those of `round_block`."""
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = own < rows
    columns = tl.arange(0, PADDED)
    first = tl.program_id(1).to(tl.int64) * COLUMNS
    tile = (first + columns)[:, None] * rows + own[None, :]
    weight = tl.load(block_ptr + tile, mask=(columns < COLUMNS)[:, None] & inside[None, :], other=0.0)
    for i in range(COLUMNS):
        column = tl.sum(tl.where((columns == i)[:, None], weight, 0.0), 0)
        at = (first + i) * rows + own
        scale = tl.load(scales_ptr + at, mask=inside, other=1.0)
        zero = tl.full([ROWS], MIDPOINT, tl.float32)
        if zeros_ptr is not None:
            zero = tl.load(zeros_ptr + at, mask=inside, other=0.0)
        # adding 1.5 * 2^23 and taking it away rounds to nearest, ties to even
        code = tl.math.div_rn(column, scale) + zero
        code = tl.minimum(tl.maximum((code + 12582912.0) - 12582912.0, 0.0), LEVELS - 1.0)
        factors = (first + i) * COLUMNS
        upper = tl.load(upper_ptr + factors + columns, mask=columns < COLUMNS, other=0.0)
        error = (column - (code - zero) * scale) / tl.load(upper_ptr + factors + i)
        weight -= upper[:, None] * error[None, :]
        tl.store(codes_ptr + at, code, mask=inside)
        tl.store(errors_ptr + at, error, mask=inside)


def round_block(
    block: Tensor, scales: Tensor, zeros: Tensor | None, upper: Tensor, midpoint: int, levels: int
) -> tuple[Tensor, Tensor]:
    """Round `block` [blocks, columns, rows]: codes and errors / U_ii, both fp32 and of its shape.

    scales, zeros   as `block`; without zeros every zero is `midpoint`
    upper           [blocks, columns, columns], upper triangular
    """
    count, columns, rows = block.shape
    block, scales, upper = block.contiguous(), scales.contiguous(), upper.contiguous()
    codes, errors = torch.empty_like(block), torch.empty_like(block)
    with torch.cuda.device_of(block):  # Triton launches on the current device
        _round_block_kernel[(triton.cdiv(rows, ROWS), count)](
            block, scales, zeros, upper, codes, errors, rows, MIDPOINT=midpoint, LEVELS=levels,
            COLUMNS=columns, PADDED=triton.next_power_of_2(columns), ROWS=ROWS,
        )  # fmt: skip
    return codes, errors
