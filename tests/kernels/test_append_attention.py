"""append_attention against kv_write, byte for byte, and fp64 attention on what the cache then holds."""

import pytest
import torch
from attention_truth import DTYPES, attend, bound, cache, error, from_basis, rope, to_basis
from operators import check_operator

from backends import COMPILED
from cases import one_in
from qrt.kernels.decode_attention import append_attention, kernel, ref
from qrt.kernels.decode_attention.blocks import MEASURED, UNMEASURED, block_of, measured_block
from qrt.kernels.decode_attention.plan import cut
from qrt.kernels.kv_write import kernel as write_kernel
from qrt.kernels.kv_write import ref as write_ref
from qrt.kernels.rmsnorm.ref import rmsnorm
from qrt.quant.digits import GROUP, Digits
from qrt.quant.kv import KV_FORMATS

REF = ref.append_attention, write_ref.kv_write
TRITON = kernel.append_attention, write_kernel.kv_write
BOTH = pytest.mark.parametrize("append, write", [REF, TRITON], ids=["ref", "triton"])
APPENDS = [name for name in KV_FORMATS if KV_FORMATS[name].appends]
FORMATS = pytest.mark.parametrize("name", APPENDS)
SIXTEEN = torch.bfloat16 if COMPILED else torch.float16
pytestmark = pytest.mark.usefixtures("poisoned_memory")


class Step:
    """The newest token of each request: q, k and v of it before RoPE, its slot poisoned."""

    def __init__(
        self, name, lens, Hq, Hkv, D, dtype, device, *, smooth=False, apart=False, norms=None,
        rope_offsets=None,
    ):  # fmt: skip
        gen = torch.Generator().manual_seed(sum(lens) + D)
        self.held = held = cache(name, lens, Hkv, D, dtype, device)
        self.slots = held.slot_table[held.rows.long(), held.kv_lens.long() - 1]
        for buffer in held.buffers:
            buffer[self.slots.long()] = torch.nan if buffer.is_floating_point() else -1
        fused = torch.randn(len(lens), (Hq + 2 * Hkv) * D, generator=gen).to(device, dtype) * 1.5
        self.heads = fused.unflatten(1, (-1, D)).split((Hq, Hkv, Hkv), 1)
        if apart:  # q and k of their own, as behind norms over all heads
            self.heads = self.heads[0].contiguous(), self.heads[1].contiguous(), self.heads[2]
        angles = torch.arange(max(lens))[:, None] * 10000.0 ** (-torch.arange(0, D, 2) / D)
        self.rope_positions, at = None, held.kv_lens.long() - 1
        if rope_offsets is not None:  # the rows of the tables at which the requests begin
            angles = torch.cat((angles, 0.3 * angles, 0.1 * angles))
            at += torch.tensor(rope_offsets, device=device)
            self.rope_positions = at.int()
        self.turned_at = at
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)
        self.smoothing = None
        if smooth and KV_FORMATS[name].rotated:
            self.smoothing = (torch.randn(3, Hkv, D, generator=gen) / 4).to(device)
            self.smoothing[:2].exp_()  # gains
        self.norms = ()
        if norms is not None:  # the dtype of their weights
            self.norms = *(torch.rand(2, D, generator=gen) * 2).to(device, norms), 1e-5

    def pad(self, rows):
        """Leave these requests without tokens, like the rows that pad a CUDA graph."""
        self.held.kv_lens[rows] = 0
        self.held.slot_table[self.held.rows[rows].long()] = 2**30

    def written(self, write):
        """The buffers as `kv_write` leaves them."""
        held, live = self.held, self.held.kv_lens > 0
        own, buffers = [x[live] for x in self.heads], [x.clone() for x in held.buffers]
        where = self.cos, self.sin, self.turned_at[live].int(), self.slots[live]
        write(*own, *where, buffers, self.smoothing, held.name, *self.norms)
        return buffers

    def run(self, append, cuts, digits=None):
        """What was attended, each request cut into so many parts."""
        held, q = self.held, self.heads[0]
        cuts = torch.tensor(cuts, device=q.device).expand(len(q))
        kv_splits = cut(held.rows, held.kv_lens, -(-held.kv_lens // cuts), int(cuts.sum()) + 2)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        append(
            *self.heads, self.cos, self.sin, held.buffers, self.smoothing, held.slot_table, held.rows,
            held.kv_lens, kv_splits, [out] if digits is None else [digits.codes, digits.facts], held.name,
            q.shape[-1] ** -0.5, 0, 0.0, None, None, self.rope_positions, 0, *self.norms,
        )  # fmt: skip
        return out if digits is None else digits

    def truth(self):
        """Of requests with tokens, in fp64, from the cache's own K and V."""
        held, (rows,) = self.held, self.held.kv_lens.nonzero(as_tuple=True)
        at, q = self.turned_at[rows], self.heads[0][rows]
        if self.norms:
            q = rmsnorm(q, self.norms[0], self.norms[2])
        q = rope(q, self.cos[at], self.sin[at])
        if self.smoothing is not None:
            gain = self.smoothing[0].double()
            q = (q.unflatten(1, (len(gain), -1)) * gain[:, None]).flatten(1, 2)
        q = to_basis(held.name, q)
        each = [attend(q[i : i + 1], *held.decoded(row), q.shape[-1] ** -0.5) for i, row in enumerate(rows)]
        return from_basis(held.name, torch.cat(each))


def bits(buffers):
    return [buffer.view(torch.uint8) for buffer in buffers]


def check(step, append, write, cuts):
    """The cache is what `kv_write` makes of it, and so is what was attended, nothing of no tokens; q, k and v
    are left alone."""
    before, wanted = [x.clone() for x in step.heads], step.written(write)
    out = step.run(append, cuts)
    assert all(map(torch.equal, bits(step.held.buffers), bits(wanted)))
    assert all(map(torch.equal, step.heads, before))
    live = step.held.kv_lens > 0
    # q is rounded to its dtype behind RoPE and rotation, as kv_write rounds it
    assert error(out[live], step.truth()) < 1.5 * bound(step.held.name, out.dtype)
    assert not out[~live].any()


@pytest.mark.pairs
@pytest.mark.ptx(dtype=[torch.bfloat16], append=[kernel.append_attention])
@BOTH
@FORMATS
@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_around_a_tile(device, append, write, name, dtype):
    tile = block_of(measured_block(KV_FORMATS[name], 7, 4, 2), 64, dtype).tokens
    lens = [1, tile - 1, tile, tile + 1, 2 * tile + 1, 3 * tile + 5, 4 * tile + 3]
    step = Step(name, lens, 4, 2, 64, dtype, device, smooth=True)
    check(step, append, write, [1, 2, 1, 2, 1, 3, 1])


@pytest.mark.pairs
@pytest.mark.parametrize("name, heads", one_in(2, ["fp16", "int8"], [
    (3, 1, 80), (16, 1, 64), (7, 7, 96), (14, 2, 128), (4, 2, 256), (6, 2, 80), (8, 2, 128),
]))  # fmt: skip
def test_heads_and_head_dims(device, name, heads):
    Hq, Hkv, D = heads
    step = Step(name, [40, 7], Hq, Hkv, D, torch.float16, device, smooth=True, apart=True)
    check(step, *TRITON, 2)


@pytest.mark.pairs
@pytest.mark.ptx(append=[kernel.append_attention], D=[64], name=["fp16"])
@pytest.mark.ptx(append=[kernel.append_attention], D=[80], name=["int8"])
@BOTH
@FORMATS
@pytest.mark.parametrize("dtype, norms", [
    (torch.float32, torch.float32), (SIXTEEN, SIXTEEN), (SIXTEEN, torch.float32)
])  # fmt: skip
@pytest.mark.parametrize("Hq, Hkv, D", [(4, 2, 64), (3, 1, 80), (8, 2, 128), (4, 2, 256)])
def test_norms_of_heads(device, append, write, name, Hq, Hkv, D, dtype, norms):
    """K is stored byte for byte as by `kv_write`; fp32 shows the last bit of sums."""
    step = Step(name, [70, 3, 33], Hq, Hkv, D, dtype, device, smooth=True, norms=norms)
    check(step, append, write, [2, 1, 1])


@pytest.mark.parametrize("requests", [1, 2, 4, 16, 47, 48, 200])
@FORMATS
def test_every_block(device, name, requests):
    """Also those for which nobody calls it."""
    measured = MEASURED.get(KV_FORMATS[name].widths, UNMEASURED)
    if device.type == "cpu" and requests not in measured.single:
        pytest.skip("the interpreter takes a block once, with the fewest requests it is for")
    step = Step(name, [1 + i % 89 for i in range(requests)], 8, 2, 64, torch.float16, device)
    if device.type == "cpu":  # where many take long
        step.pad(torch.arange(requests) % -(-requests // 12) != 0)
    check(step, *TRITON, 1)


@pytest.mark.ptx(append=[kernel.append_attention])
@BOTH
@FORMATS
def test_as_digits(device, append, write, name):
    """Of what is rounded to bf16, and zeros of a request without tokens."""
    lens, heads = [70, 3, 130], 8
    step = Step(name, lens, heads, 2, GROUP, SIXTEEN, device)
    wanted = step.written(write)
    out = step.run(append, [2, 1, 3]).bfloat16().float().flatten(1)
    digits = step.run(append, [2, 1, 3], Digits.empty(3, heads * GROUP, 8, device))
    assert all(map(torch.equal, bits(step.held.buffers), bits(wanted)))
    half = digits.facts[0, :, :3].T.repeat_interleave(GROUP, 1) / 2
    rounded = 0 if COMPILED else 2**-7 * out.abs()  # by way of fp16; the interpreter cuts bf16 off
    assert ((digits.read() - out).abs() <= 1.01 * half + rounded).all()
    step.held.kv_lens[1] = 0
    again = step.run(append, [2, 1, 3], Digits.empty(3, heads * GROUP, 8, device)).read()
    assert not again[1].any() and torch.equal(again[[0, 2]], digits.read()[[0, 2]])


@BOTH
@FORMATS
def test_rows_without_tokens_store_nothing(device, append, write, name):
    step = Step(name, [33, 5, 8], 4, 2, 64, torch.float32, device)
    step.pad([1])
    check(step, append, write, [2, 1, 1])


@pytest.mark.ptx(append=[kernel.append_attention])
@BOTH
@FORMATS
def test_requests_turn_by_rows_of_their_own(device, append, write, name):
    """The tables hold three ways to turn, one behind the other; padding among the requests."""
    rope_offsets = [70, 0, 140, 0, 140]
    step = Step(name, [70, 3, 69, 5, 33], 4, 2, 64, SIXTEEN, device, smooth=True, rope_offsets=rope_offsets)
    step.pad([3])
    check(step, append, write, [2, 1, 3, 1, 1])


def test_smoothing_of_another_model_is_refused(device):
    step = Step("int8", [9], 4, 2, 64, torch.float32, device, smooth=True)
    step.smoothing = step.smoothing[:, :1]
    with pytest.raises(ValueError, match="smoothing"):
        step.run(kernel.append_attention, 1)


@BOTH
@pytest.mark.parametrize("name", [name for name in KV_FORMATS if name not in APPENDS])
def test_other_formats_are_refused(device, append, write, name):
    with pytest.raises(ValueError, match=f"expected one of {', '.join(APPENDS)}, got {name}; call kv_write"):
        Step(name, [9], 4, 2, 64, torch.float32, device).run(append, 1)


def test_digits_of_narrow_heads_are_refused(device):
    step = Step("int8", [9], 4, 2, 64, torch.float32, device)
    with pytest.raises(ValueError, match="out: expected heads of 128 for Digits, got heads of 64"):
        step.run(kernel.append_attention, 1, Digits.empty(1, 256, 8, device))


def test_a_norm_of_other_heads_is_refused(device):
    step = Step("int8", [9], 4, 2, 64, torch.float32, device)
    step.norms = torch.ones(128, device=device), torch.ones(128, device=device), 1e-5
    with pytest.raises(ValueError, match=r"q_norm: expected shape \[D\] with D=64, got \[128\]"):
        step.run(kernel.append_attention, 1)


@pytest.mark.parametrize("norms", [None, torch.float32], ids=["bare", "normed"])
def test_operator(device, norms):
    step = Step("int8", [20, 3], 4, 2, 64, torch.float32, device, norms=norms)
    check(step, append_attention, (REF if device.type == "cpu" else TRITON)[1], 1)
    held, out = step.held, torch.empty_like(step.heads[0])
    kv_splits = cut(held.rows, held.kv_lens, held.kv_lens, 2)
    args = (
        *step.heads, step.cos, step.sin, held.buffers, None, held.slot_table, held.rows,
        held.kv_lens, kv_splits,
        [out], "int8", 0.125, 0, 0.0, None, None, None, 0, *step.norms,
    )  # fmt: skip
    check_operator("append_attention", args)


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("lens, Hq, Hkv, D", [
    ([1100] * 16, 32, 8, 128), ([1, 4096, 64, 65, 1280] * 3, 32, 8, 128),
    ([1 + 97 * i for i in range(47)], 28, 4, 128), ([300] * 9, 20, 20, 80), ([2048] * 5, 16, 2, 256),
])  # fmt: skip
@pytest.mark.parametrize("norms", [None, torch.bfloat16], ids=["bare", "normed"])
def test_sizes_of_users(device, name, lens, Hq, Hkv, D, norms):
    step = Step(name, lens, Hq, Hkv, D, torch.bfloat16, device, norms=norms)
    check(step, *TRITON, 4)
