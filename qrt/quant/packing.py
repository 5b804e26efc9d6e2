"""Dense little-endian bit streams in int32 words, which every checkpoint format packs with.

Element i of the packed axis occupies bits [i*b, (i+1)*b) of the stream. Word w holds bits [32w, 32w+32), the
least significant first. compressed-tensors, GPTQ and AWQ differ only in the axis, the offset and (AWQ) the
order of columns (docs/checkpoint-formats.md#one-packer).

    4-bit codes 0..7  ->  0x76543210        8-bit codes 1,2,3,4  ->  0x04030201
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

WORD_BITS = 32


def packed_words(n: int, bits: int) -> int:
    """Return how many words hold `n` elements of `bits` bits."""
    return -(-n * bits // WORD_BITS)


def pack(codes: Tensor, bits: int, axis: int = -1) -> Tensor:
    """Pack codes (any integer dtype, 0..2^bits-1) into int32 words along `axis`, contiguous."""
    stream = codes.movedim(axis, -1)
    n = stream.shape[-1]
    words = packed_words(n, bits)
    if 8 % bits == 0:  # whole codes per byte: one shift-and-or per lane, and bytes in order are the words
        lanes = pad(stream.to(torch.uint8), (0, words * WORD_BITS // bits - n)).unflatten(-1, (-1, 8 // bits))
        octets = lanes[..., 0].clone(memory_format=torch.contiguous_format)
        for lane in range(1, 8 // bits):
            octets |= lanes[..., lane] << (lane * bits)
        return octets.view(torch.int32).movedim(-1, axis).contiguous()
    wide = torch.zeros(*stream.shape[:-1], words + 1, dtype=torch.int64, device=codes.device)
    for i in range(n):
        word, offset = divmod(i * bits, WORD_BITS)
        value = stream[..., i].to(torch.int64) << offset
        wide[..., word] |= value & 0xFFFFFFFF
        wide[..., word + 1] |= value >> WORD_BITS
    return wide[..., :-1].to(torch.int32).movedim(-1, axis).contiguous()  # the low 32 bits


def unpack(words: Tensor, bits: int, n: int, axis: int = -1) -> Tensor:
    """Unpack the first `n` codes of int32 words along `axis`: uint8 (bits <= 8), contiguous."""
    stream = words.movedim(axis, -1)
    mask = (1 << bits) - 1
    if 8 % bits == 0:
        octets = stream.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        codes = torch.stack([octets >> shift & mask for shift in range(0, 8, bits)], dim=-1).flatten(-2)
        return codes[..., :n].movedim(-1, axis).contiguous()
    position = torch.arange(n, device=words.device) * bits
    word, offset = position // WORD_BITS, position % WORD_BITS
    wide = pad(stream.to(torch.int64) & 0xFFFFFFFF, (0, 1))
    codes = ((wide[..., word] | (wide[..., word + 1] << WORD_BITS)) >> offset) & mask
    return codes.to(torch.uint8).movedim(-1, axis).contiguous()
