"""The packer against Python's own big integers, and the words of docs/checkpoint-formats.md#one-packer."""

import pytest
import torch

from qrt.quant.packing import pack, packed_words, unpack


def words(*unsigned: int) -> torch.Tensor:
    return torch.tensor([w - (1 << 32) if w >> 31 else w for w in unsigned], dtype=torch.int32)


GOLDEN = {
    "4-bit codes 0..7": (list(range(8)), 4, words(0x76543210)),
    "8-bit codes 1..4": ([1, 2, 3, 4], 8, words(0x04030201)),
    "3-bit codes i%8": ([i % 8 for i in range(32)], 3, words(0x88FAC688, 0xC688FAC6, 0xFAC688FA)),
    "AWQ order": ([0, 2, 4, 6, 1, 3, 5, 7], 4, words(0x75316420)),
    "AWQ symmetric zeros": ([8] * 8, 4, words(0x88888888)),
    "GPTQ v1 4-bit zeros": ([7] * 8, 4, words(0x77777777)),
    "GPTQ v1 8-bit zeros": ([127] * 4, 8, words(0x7F7F7F7F)),
    "GPTQ v1 2-bit zeros": ([1] * 16, 2, words(0x55555555)),
    "GPTQ zeros": ([8, 0, 7, 3, 15, 1, 0, 9], 4, words(0x901F3708)),
    "q = -8 and q = 7": ([-8 + 8, 7 + 8] * 4, 4, words(0xF0F0F0F0)),
}


@pytest.mark.parametrize("codes, bits, golden", GOLDEN.values(), ids=GOLDEN.keys())
def test_golden_words(codes, bits, golden):
    codes = torch.tensor(codes, dtype=torch.uint8)
    assert pack(codes, bits).tolist() == golden.tolist()
    assert unpack(golden, bits, len(codes)).tolist() == codes.tolist()


def stream(codes: list[int], bits: int) -> list[int]:
    """The definition: element i is bits [i*b, (i+1)*b) of one big integer, cut into words."""
    number = sum(code << (i * bits) for i, code in enumerate(codes))
    count = -(-len(codes) * bits // 32)
    return [(number >> (32 * w)) & 0xFFFFFFFF for w in range(count)]


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("n", [1, 7, 8, 31, 32, 33, 100])
def test_rows_are_the_defined_stream(bits, n):
    codes = torch.randint(0, 1 << bits, (3, n), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (3, packed_words(n, bits)) and packed.dtype == torch.int32
    for row, want in zip(packed, codes.tolist(), strict=True):
        assert [w & 0xFFFFFFFF for w in row.tolist()] == stream(want, bits)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("shape", [(1, 1), (8, 1), (1, 8), (24, 40), (33, 50), (4, 128)])
def test_round_trip(bits, axis, shape):
    codes = torch.randint(0, 1 << bits, shape, dtype=torch.uint8)
    packed = pack(codes, bits, axis)
    back = unpack(packed, bits, shape[axis], axis)
    assert packed.is_contiguous() and back.is_contiguous()
    assert back.dtype == torch.uint8 and torch.equal(back, codes)


@pytest.mark.parametrize("bits", range(2, 9))
def test_axis_0_is_axis_1_of_the_transpose(bits):
    codes = torch.randint(0, 1 << bits, (40, 6), dtype=torch.uint8)
    assert torch.equal(pack(codes, bits, 0), pack(codes.T.contiguous(), bits, 1).T)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_any_integer_dtype_and_strides(dtype):
    codes = torch.randint(0, 16, (32, 16)).to(dtype)
    assert torch.equal(pack(codes.T, 4), pack(codes.T.contiguous().to(torch.uint8), 4))
