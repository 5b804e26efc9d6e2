"""How the linear kernels are launched where nothing was measured."""

import pytest

from qrt.kernels.linear.int8 import plans as int8_plans
from qrt.kernels.linear.tiles import plans as tile_plans


@pytest.mark.parametrize("tokens", [1, 8, 16, 32, 64])
@pytest.mark.parametrize(
    "blocks, tiles", [(1, 1), (96, 16), (64, 16), (448, 16), (64, 56), (896, 32), (3, 112)]
)
def test_plan_covers_k(blocks, tiles, tokens):
    width = tile_plans.width_of(tokens)
    chosen = tile_plans.fused_plan(width, blocks, tiles)
    assert width >= tokens and 1 <= chosen.splits <= min(tiles, 16)
    share = -(-tiles // chosen.splits)
    assert (chosen.splits - 1) * share < tiles <= chosen.splits * share


def test_plan_is_the_measured_one():
    """Splits of qkv, o, gate_up, down of Llama-3-8B in int4."""
    shapes = [(96, 16), (64, 16), (448, 16), (64, 56)]
    assert [tile_plans.fused_plan(8, *shape).splits for shape in shapes] == [4, 4, 1, 8]
    assert [tile_plans.fused_plan(64, *shape).splits for shape in shapes] == [2, 4, 1, 4]


@pytest.mark.parametrize("sms", [78, 114, 132])
@pytest.mark.parametrize("tokens", [65, 128, 512, 2048])
@pytest.mark.parametrize("blocks, tiles", [(1, 1), (96, 16), (64, 56), (448, 16), (3, 112)])
def test_plans_of_many_tokens_leave_no_sm_idle_that_could_work(blocks, tiles, tokens, sms):
    """K is split while all shares find an SM, and into at least four tiles; large blocks only where they are
    enough for all SMs."""
    width = tile_plans.width_of(tokens)
    wide = tile_plans.wide_plan(width, blocks, tiles, sms)
    programs = -(-blocks // wide.blocks) * -(-width // wide.tokens)
    share = -(-tiles // wide.splits)
    assert wide.splits == 1 or (programs * wide.splits <= sms and share >= 4)
    assert (wide.splits - 1) * share < tiles <= wide.splits * share
    assert wide.blocks == 1 or blocks * -(-width // wide.tokens) > sms
    int8 = tile_plans.wide_int8_plan(width, blocks, tiles, sms)
    programs = -(-blocks // int8.blocks) * -(-width // int8.tokens)
    assert int8.tokens == min(width, 128) and -(-tiles // -(-tiles // int8.splits)) == int8.splits
    assert int8.splits == 1 or (programs * int8.splits <= sms and -(-tiles // int8.splits) >= 4)
    outputs = blocks * -(-width // int8.tokens)  # row blocks of 64; at worst SMs wait for one large block
    assert int8.blocks * -(-programs // sms) <= -(-outputs // sms) + int8.blocks - 1
    narrow = int8_plans.hopper_plan(tokens, blocks * 64, sms)
    if tokens <= 128:
        assert narrow is None
    else:
        large = -(-tokens // 128) * -(-blocks * 64 // 256)
        assert narrow.outputs == (256 if large >= sms else 128) and narrow.splits == 1


@pytest.mark.parametrize("assignments, experts, block, of_int8", [
    (1, 128, 32, 32), (1408, 128, 32, 32), (2048, 128, 32, 64), (8192, 128, 64, 64), (12800, 128, 128, 64),
    (65536, 128, 128, 128), (16384, 8, 256, 128),
])  # fmt: skip
def test_blocks_follow_the_tokens_of_an_expert(assignments, experts, block, of_int8):
    assert tile_plans.expert_block(assignments, experts) == block
    assert tile_plans.expert_block(assignments, experts, True) == of_int8


@pytest.mark.parametrize("block", [32, 64, 128, 256])
@pytest.mark.parametrize("planes, words", [(4, 64), (4, 32), (2, 64), (2, 32)])
@pytest.mark.parametrize("owners, rows", [(128, 24), (8, 448), (2, 3)])
def test_plans_of_experts_are_persistent(block, planes, words, owners, rows):
    """They may have a gate and its up, and a stage of x is a part of a tile."""
    plan = tile_plans.expert_plan(block, owners, rows, words, 132)
    assert plan.tokens == block and plan.persistent and plan.gates and planes % plan.x_planes == 0
    assert plan.group_blocks * plan.groups == plan.blocks
