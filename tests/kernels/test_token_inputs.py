"""A step's inputs: the tables' entries by plain indexing, the plan of parts as `plan_kv_splits` makes it."""

import pytest
import torch
from operators import check_operator

from qrt.kernels.decode_attention.plan import plan_kv_splits
from qrt.kernels.token_inputs import kernel, ref

BOTH = pytest.mark.parametrize("inputs", [ref.token_inputs, kernel.token_inputs], ids=["ref", "triton"])


@pytest.mark.pairs
@BOTH
@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 33, 130, 300, 1500])
@pytest.mark.parametrize("longest", [1, 150, 30_000])
def test_tables_are_read_and_parts_planned(device, inputs, tokens, longest):
    """Parts are of the first tokens alone, and of those whose position is not given."""
    decodes = tokens * 2 // 3
    gen = torch.Generator().manual_seed(tokens + longest)

    def draw(high, *shape, dtype=torch.int32):
        return torch.randint(0, high, shape, generator=gen).to(dtype)

    length, last, table = draw(longest + 1, 9), draw(1000, 9, dtype=torch.int64), draw(10**6, 9, 30_016)
    length[8] = 0  # a padding row
    rows, position, ids = draw(9, tokens), draw(longest, tokens), draw(1000, tokens)
    given = torch.rand(tokens, generator=gen) < 0.5
    position, ids = torch.where(given, position, -1), torch.where(given, ids, -1)
    each = tuple(x.to(device) for x in (torch.stack((rows, position, ids)), length, last, table))
    windows, segments = [0, 100, 4096, 0, 0], [0, 0, 0, 100, 128]
    got = inputs(*each, decodes, 8, 8, windows, segments)
    lens = [int(p) + 1 if p >= 0 else int(length[r]) for r, p in zip(rows, position, strict=True)]
    places = [max(n - 1, 0) for n in lens]
    assert got[0].tolist() == [int(i if i >= 0 else last[r]) for i, r in zip(ids, rows, strict=True)]
    alone = [n if p < 0 else -1 for n, p in zip(lens, position.tolist(), strict=True)][:decodes]
    assert got[1].tolist() == places and got[3].tolist() == alone
    assert got[2].tolist() == [int(table[r, p]) for r, p in zip(rows, places, strict=True)]
    assert [x.dtype for x in got] == [torch.int64] + [torch.int32] * 4
    if not decodes:
        assert not got[4].numel()
        return
    for window, segment, planned in zip(windows, segments, got[4], strict=True):
        kv_splits = plan_kv_splits(each[0][0, :decodes], got[3], 8, 8, window, segment)
        assert planned.shape == kv_splits.shape
        live = kv_splits[:, 0] >= 0
        assert torch.equal(planned[:, 0], kv_splits[:, 0]) and torch.equal(
            planned[live, :6], kv_splits[live, :6]
        )


@pytest.mark.parametrize("advance", [ref.advance, kernel.advance], ids=["ref", "triton"])
@pytest.mark.parametrize("count", [0, 1, 40, 300])
def test_tables_are_advanced(device, advance, count):
    """All rows but the last, which stands for padding and comes often."""
    gen = torch.Generator().manual_seed(count)
    last, length = torch.randint(1000, (2, 310), generator=gen)
    rows = torch.randperm(309, generator=gen)[:count]
    tokens = torch.randint(1000, (count + 5,), generator=gen)
    padded = torch.cat((rows, torch.full((5,), 309)))
    drawn = torch.cat((torch.ones(count), torch.zeros(5))).int()
    for own, new, given in ((padded, tokens, drawn.to(device)), (rows, tokens[:count], None)):
        got = last.to(device), length.int().to(device)
        advance(own.to(device), new.to(device), given, *got)
        want_last, want_length = last.clone(), length.clone()
        want_last[rows], want_length[rows] = tokens[:count], length[rows] + 1
        assert torch.equal(got[0][:-1].cpu(), want_last[:-1])
        assert torch.equal(got[1].cpu(), want_length.int())


def test_the_operator_is_registered_as_it_behaves(device):
    args = [torch.zeros(3, 3, dtype=torch.int32, device=device)]
    args += [torch.ones(2, dtype=torch.int32, device=device), torch.ones(2, dtype=torch.int64, device=device)]
    args += [torch.zeros(2, 64, dtype=torch.int32, device=device), 2, 2, 4, [0, 64, 0], [0, 0, 64]]
    check_operator("token_inputs", args)
    args = [torch.arange(2, device=device), torch.ones(2, dtype=torch.int64, device=device), None]
    args += [torch.ones(2, dtype=torch.int64, device=device), torch.ones(2, dtype=torch.int32, device=device)]
    check_operator("advance", args)
