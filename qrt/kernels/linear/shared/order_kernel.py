"""The order in which programs take the blocks of an output."""

import triton
import triton.language as tl


@triton.jit
def in_panels(block, token_blocks, row_blocks, PANEL: tl.constexpr):
    """(token block, row block) of number `block`: PANEL token blocks take a row block before the next one, so
    that their tokens stay in the L2 cache while all weights pass."""
    size = PANEL * row_blocks
    panel = block // size
    width = tl.minimum(token_blocks - panel * PANEL, PANEL)
    place = block % size
    return panel * PANEL + place % width, place // width
