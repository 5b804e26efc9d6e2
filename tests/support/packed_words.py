"""GPTQ's and AWQ's tensors of one Linear as their writers lay them out, from the definition, in numpy.

Codes and zeros are [in, out] and [groups, out], as in docs/checkpoint-formats.md.
"""

from __future__ import annotations

import numpy as np

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # slot i of a word holds this column


def words(codes, bits):
    """uint [R, C] -> int32 words along the last axis, each from its bits, least significant first."""
    bit = (codes[..., None] >> np.arange(bits)) & 1
    stream = bit.reshape(*codes.shape[:-1], -1, 32).astype(np.uint64)
    return (stream << np.arange(32, dtype=np.uint64)).sum(-1).astype(np.uint32).view(np.int32)


def gptq_tensors(codes, zeros, scales, index, bits, version):
    """Return the tensors by suffix; `index` is the group of each input."""
    packed = words(zeros, bits)
    if version == 1:  # one wrapping subtraction a word, as GPTQModel does
        packed = (packed.view(np.uint32) - np.uint32({4: 0x11111111, 8: 0x01010101}[bits])).view(np.int32)
    return {"qweight": words(codes.T, bits).T, "qzeros": packed, "scales": scales, "g_idx": index}


def awq_tensors(codes, zeros, scales):
    """Return the tensors of 4 bits by suffix."""

    def pack(values):
        return words(values.reshape(len(values), -1, 8)[..., AWQ_COLUMNS].reshape(len(values), -1), 4)

    return {"qweight": pack(codes), "qzeros": pack(zeros), "scales": scales}
