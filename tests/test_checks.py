import re

import pytest
import torch

from qrt.checks import expect


def test_letters_bind_and_must_agree():
    assert expect(torch.empty(3, 8, 64), "B Hq D") == {"B": 3, "Hq": 8, "D": 64}
    assert expect(torch.empty(3, 8, 64), "B Hq D", D=64)["B"] == 3
    assert expect(torch.empty(4, 4), "K K") == {"K": 4}
    with pytest.raises(ValueError):
        expect(torch.empty(4, 5), "K K")


def test_numbers():
    assert expect(torch.empty(5, 2, 64), "T 2 D") == {"T": 5, "D": 64}
    with pytest.raises(ValueError):
        expect(torch.empty(5, 12), "T 3")


def test_number_of_dimensions():
    for tensor, shape in ((torch.empty(()), "K"), (torch.empty(2, 3), "T"), (torch.empty(2), "T K")):
        with pytest.raises(ValueError):
            expect(tensor, shape)
    assert expect(torch.empty(2, 3), None) == {}


def test_messages_name_tensor_expected_and_got():
    with pytest.raises(ValueError, match=re.escape("q: expected shape [B Hq D] with D=64, got [2, 3, 5]")):
        expect(torch.empty(2, 3, 5), "B Hq D", name="q", D=64)
    with pytest.raises(ValueError, match="slots: expected dtype torch.int32, got torch.int64"):
        expect(torch.empty(2, dtype=torch.int64), "T", torch.int32, name="slots")
    with pytest.raises(
        ValueError, match=r"x: expected dtype torch.float16 or torch.bfloat16, got torch.int8"
    ):
        expect(torch.empty(2, dtype=torch.int8), "T", (torch.float16, torch.bfloat16), name="x")


def test_dtype_alone():
    expect(torch.empty(2, dtype=torch.float16), "T", (torch.float16, torch.bfloat16))
    expect(torch.empty(2), "T", torch.float32)
