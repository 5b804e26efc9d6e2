"""kv_write against fp64 RoPE, smoothing and rotation, and its bytes against the format's own encoder."""

import pytest
import torch
from attention_truth import DTYPES, far_slot, rope, to_basis
from operators import check_operator

from backends import COMPILED
from qrt.kernels.kv_write import kernel, many_kernel, ref
from qrt.kernels.rmsnorm import kernel as rmsnorm_kernel
from qrt.kernels.rmsnorm import ref as rmsnorm_ref
from qrt.quant.kv import KV_FORMATS

BOTH = pytest.mark.parametrize("write", [ref.kv_write, kernel.kv_write], ids=["ref", "triton"])
ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


class Step:
    """q, k, v of T tokens in one fused buffer, at scattered positions, for scattered slots."""

    def __init__(self, name, T, Hq, Hkv, D, dtype, device, slots=64, smooth=True, normed=None):
        gen = torch.Generator().manual_seed(T + D)
        self.name, self.heads, self.D = name, (Hq, Hkv, Hkv), D
        self.x = (torch.randn(T, (Hq + 2 * Hkv) * D, generator=gen) * 2).to(device, dtype)
        self.positions = torch.randint(0, 5000, (T,), generator=gen).int().to(device)
        self.slots = torch.randperm(slots - 1, generator=gen)[:T].int().to(device)
        angles = torch.arange(5000)[:, None] * 10000.0 ** (-torch.arange(0, D, 2) / D)
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)
        self.smoothing = (torch.randn(3, Hkv, D, generator=gen) / 4).to(device) if smooth else None
        if smooth:
            self.smoothing[:2].exp_()  # gains
        self.norms = ()
        if normed is not None:  # the dtype of their weights
            self.norms = *(torch.rand(2, D, generator=gen) * 2).to(device, normed), 1e-5
        self.specs = KV_FORMATS[name].buffers(slots, Hkv, D, dtype).values()

    def parts(self, x):
        return x.unflatten(-1, (-1, self.D)).split(self.heads, 1)

    def run(self, write, some=slice(None), slots=None):
        """The written-back buffer and the cache, which held 0x5A."""
        x, slots = self.x[some].clone(), self.slots[some] if slots is None else slots
        kv = [spec.zeros(x.device) for spec in self.specs]
        for buffer in kv:
            buffer.view(torch.uint8).fill_(0x5A)
        write(*self.parts(x), *self.where(some)[:3], slots, kv, self.smoothing, self.name, *self.norms)
        return x, kv

    def where(self, some=slice(None)):
        return self.cos, self.sin, self.positions[some], self.slots[some]

    def truth(self):
        """q, k, v in the basis of the cache, fp64."""
        cos, sin = self.cos[self.positions.long()], self.sin[self.positions.long()]
        q, k, v = self.parts(self.x)
        if self.norms:
            q, k = (_normal(x, weight, self.norms[2]) for x, weight in zip((q, k), self.norms, strict=False))
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        if self.smoothing is not None:
            q_gain, k_gain, shift = self.smoothing.double()
            q = (q.unflatten(1, (len(shift), -1)) * q_gain[:, None]).flatten(1, 2)
            k = k * k_gain - shift
        return [to_basis(self.name, y) for y in (q, k, v)]


def _normal(x, weight, eps):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.pairs
@pytest.mark.ptx(dtype=[torch.bfloat16], write=[kernel.kv_write], D=[64, 80])
@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize(
    "T,Hq,Hkv,D,smooth", [(19, 4, 2, 64, True), (5, 7, 1, 128, False), (1, 6, 6, 80, True)]
)
def test_basis_and_bytes(device, write, name, dtype, T, Hq, Hkv, D, smooth):
    step = Step(name, T, Hq, Hkv, D, dtype, device, smooth=smooth)
    x, kv = step.run(write)
    want = step.truth()
    for got, exact in zip(step.parts(x), want, strict=True):
        assert ((got.double() - exact).abs() <= ROUNDING[dtype] * (exact.abs() + 1)).all()
    fmt, slots = KV_FORMATS[name], step.slots.long()
    stored = fmt.decode_ref(kv, slots)
    if not fmt.quantized:
        assert all(torch.equal(got, y.float()) for got, y in zip(stored, step.parts(x)[1:], strict=True))
        return
    fmt.encode_ref(want[1], want[2], kv, slots)
    grids = (fmt.k, fmt.v)
    for got, exact, true, grid in zip(stored, fmt.decode_ref(kv, slots), want[1:], grids, strict=True):
        # from fp32 instead of fp64 a value at a tie may take the other code, and a half head with two equally
        # good scales the other scale: rarely, by about one step, and with nothing lost
        assert (got != exact).float().mean() < 3e-2
        assert (got - exact).abs().max() <= 2.4 / 2**grid.bits * exact.abs().max()
        lost, least = ((y - true).unflatten(-1, (2, -1)).square().sum(-1) for y in (got, exact))
        assert (lost <= 1.01 * least + 1e-9).all()


@pytest.mark.parametrize("D", [96, 256])
@pytest.mark.parametrize("name", KV_FORMATS)
def test_other_head_dims(device, name, D):
    step = Step(name, 3, 2, 1, D, torch.float16, device)
    (x, kv), (x_ref, kv_ref) = step.run(kernel.kv_write), step.run(ref.kv_write)
    torch.testing.assert_close(x, x_ref, atol=4e-3, rtol=0)
    for got, want in zip(kv, kv_ref, strict=True):
        assert (got != want).float().mean() < 3e-2


def behind_norms(write, rmsnorm):
    """`write` as two steps: the norms of q and k, rounded to their dtype, then the rest of it."""

    def both(q, k, *others):
        *others, q_norm, k_norm, eps = others
        q.copy_(rmsnorm(q, q_norm, eps))
        k.copy_(rmsnorm(k, k_norm, eps))
        write(q, k, *others)

    return both


@pytest.mark.pairs
@pytest.mark.ptx(
    dtype=[torch.bfloat16], write=[kernel.kv_write], name=["fp16", "int8"], D=[64, 80], weight=[torch.float32]
)
@BOTH
@pytest.mark.parametrize("dtype, weight", [
    (torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float16, torch.float32),
    *[(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)] * COMPILED,
])  # fmt: skip
@pytest.mark.parametrize("D", [64, 80, 128, 256])
@pytest.mark.parametrize("name", KV_FORMATS)
def test_norms_are_those_of_rmsnorm(device, write, name, D, dtype, weight):
    """The same bytes as with norms before it, of numbers whose squares add up exactly in any order."""
    step = Step(name, 5, 4, 2, D, dtype, device, normed=weight)
    step.x = (step.x * 8).round() / 8
    x, kv = step.run(write)
    rmsnorm = rmsnorm_ref.rmsnorm if write is ref.kv_write else rmsnorm_kernel.rmsnorm
    wanted, cache = step.run(behind_norms(write, rmsnorm))
    assert torch.equal(x, wanted)
    assert all(torch.equal(a, b) for a, b in zip(kv, cache, strict=True))


@pytest.mark.ptx(write=[kernel.kv_write], D=[80])
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # by the interpreter
@BOTH
@pytest.mark.parametrize("D", [64, 80, 256])
def test_norms_of_small_and_large_values(device, write, D):
    """Also of nothing, of one large value among small ones, and where squares are infinite."""
    step = Step("fp16", 6, 4, 2, D, torch.float32, device, smooth=False, normed=torch.float32)
    step.x *= torch.tensor([0.0, 1e-19, 1e-3, 1.0, 1e15, 1e25], device=device)[:, None]
    step.x[3, ::D] = 3e4
    (x, _), q_and_k = step.run(write), step.heads[0] + step.heads[1]
    want = torch.cat(step.truth(), 1)[:, :q_and_k]
    want[5] = 0.0  # 1 / infinity
    got = x.unflatten(-1, (-1, D))[:, :q_and_k].double()
    assert ((got - want).abs() <= 2e-6 * want.abs().amax(-1, keepdim=True)).all()


@pytest.mark.pairs
@pytest.mark.ptx(write=[kernel.kv_write], name=["fp16", "int8"], normed=[torch.float32])
@BOTH
@pytest.mark.parametrize("normed", [None, torch.float32], ids=["bare", "normed"])
@pytest.mark.parametrize("name", KV_FORMATS)
def test_bytes_depend_on_the_token_alone(device, write, name, normed, monkeypatch):
    """Prefilled with others or decoded by itself, here or there: the same bits.

    fp32 shows the last bit of the norms' sums.
    """
    monkeypatch.setattr(kernel, "FEW_TOKENS", 8)  # other programs for 21 tokens than for 1
    if write is ref.kv_write:
        device = torch.device("cpu")  # cuBLAS sums in another order for another batch
    step = Step(name, 21, 2, 2, 64, normed or torch.float16, device, normed=normed)
    x, kv = step.run(write)
    where = step.slots.long()
    for i in (0, 7, 20):
        y, other = step.run(write, slice(i, i + 1), torch.tensor([63 - i], dtype=torch.int32, device=device))
        assert torch.equal(y[0], x[i])
        for a, b in zip(kv, other, strict=True):
            assert torch.equal(a[where[i]], b[63 - i])


@pytest.mark.gpu
@pytest.mark.ptx(D=[128])
@pytest.mark.ptx(D=[64], normed=[torch.float32], alone=[True], name=["int8"])
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("dtype, Hq, Hkv, D, smooth, normed", [
    (torch.bfloat16, 4, 2, 128, True, None), (torch.float32, 7, 1, 64, True, None),
    (torch.float16, 3, 3, 64, False, None), (torch.float32, 4, 2, 128, True, torch.bfloat16),
    (torch.bfloat16, 4, 2, 64, False, torch.bfloat16), (torch.float32, 7, 1, 64, True, torch.float32),
])  # fmt: skip
@pytest.mark.parametrize("name", ["int8", "int4", "k8v4"])
def test_many_tokens_get_the_bytes_of_few(
    device, name, dtype, Hq, Hkv, D, smooth, normed, alone, monkeypatch
):  # fmt: skip
    """Whether a program takes all heads of its tokens or some."""
    step = Step(name, 19, Hq, Hkv, D, dtype, device, smooth=smooth, normed=normed)
    x, kv = step.run(kernel.kv_write)
    monkeypatch.setattr(kernel, "FEW_TOKENS", 0)
    monkeypatch.setattr(many_kernel, "WARPS_PER_SM", 0 if alone else 1000)
    many, cache = step.run(kernel.kv_write)
    assert torch.equal(many, x)
    assert all(torch.equal(a, b) for a, b in zip(cache, kv, strict=True))


@BOTH
@pytest.mark.parametrize("name", KV_FORMATS)
def test_other_slots_keep_their_bytes(device, write, name):
    step = Step(name, 6, 3, 3, 80, torch.float32, device)
    _, kv = step.run(write)
    others = torch.tensor([s for s in range(64) if s not in step.slots.tolist()], device=device)
    for buffer in kv:
        assert (buffer[others].view(torch.uint8) == 0x5A).all()
        mine = buffer[step.slots.long()]
        assert not (mine.view(torch.uint8) == 0x5A).all(-1).any()


@BOTH
@pytest.mark.parametrize("name, lost", [("fp16", 1e-6), ("int8", 0.012), ("int4", 0.12), ("k8v4", 0.12)])
def test_small_and_large_values_survive(device, write, name, lost):
    """V of 1e-4 needs subnormal scales, V of 1e4 must not overflow on the way."""
    for scale in (1e-4, 1e4):
        step = Step(name, 4, 2, 2, 64, torch.float32, device)
        step.x *= scale
        _, kv = step.run(write)
        want = step.truth()
        for got, exact in zip(KV_FORMATS[name].decode_ref(kv, step.slots.long()), want[1:], strict=True):
            assert (got - exact).norm() < lost * exact.norm()


def test_each_tensor_has_its_own_stride(device):
    """q and k come from their norms, v is still a view of the projection."""
    step = Step("int8", 5, 4, 2, 64, torch.float16, device)
    x, kv = step.run(kernel.kv_write)
    q, k, v = step.parts(step.x)
    apart = [q.contiguous(), k.contiguous(), v]
    other = [spec.zeros(device) for spec in step.specs]
    kernel.kv_write(*apart, *step.where(), other, step.smoothing, "int8")
    assert all(torch.equal(y, z) for y, z in zip(apart, step.parts(x), strict=True))
    where = step.slots.long()
    assert all(torch.equal(y[where], z[where]) for y, z in zip(other, kv, strict=True))


@BOTH
def test_no_tokens(device, write):
    step = Step("int4", 1, 2, 1, 64, torch.float32, device)
    _, kv = step.run(write, slice(0, 0))
    assert all((buffer.view(torch.uint8) == 0x5A).all() for buffer in kv)


def test_heads_that_are_not_contiguous_are_refused(device):
    step = Step("int8", 2, 2, 2, 64, torch.float32, device)
    q, k, v = step.parts(step.x)
    kv = [spec.zeros(device) for spec in step.specs]
    with pytest.raises(ValueError, match=r"q: expected contiguous heads .*got \("):
        turned = q.transpose(1, 2).contiguous().transpose(1, 2)
        kernel.kv_write(turned, k, v, *step.where(), kv, None, "int8")


def test_smoothing_of_another_model_is_refused(device):
    step = Step("int8", 2, 2, 2, 64, torch.float32, device)
    kv = [spec.zeros(device) for spec in step.specs]
    with pytest.raises(ValueError, match=r"smoothing"):
        kernel.kv_write(*step.parts(step.x), *step.where(), kv, step.smoothing[:, :1], "int8")


@pytest.mark.parametrize("norms, message", [
    ((torch.ones(64), None), "k_norm: expected a weight beside q_norm, got None"),
    ((None, torch.ones(64)), "q_norm: expected a weight beside k_norm, got None"),
    ((torch.ones(128), torch.ones(128)), r"q_norm: expected shape \[D\] with D=64, got \[128\]"),
    ((torch.ones(64), torch.ones(64).half()), "k_norm: expected dtype torch.float32, got torch.float16"),
])  # fmt: skip
def test_norms_that_do_not_suit_are_refused(device, norms, message):
    step = Step("int8", 2, 2, 2, 64, torch.float32, device)
    step.norms = *norms, 1e-5
    with pytest.raises(ValueError, match=message):
        step.run(kernel.kv_write)


@pytest.mark.parametrize("normed", [None, torch.float32], ids=["bare", "normed"])
def test_operator(device, normed):
    """Registered with its true mutations: torch's own check."""
    step = Step("int4", 3, 2, 1, 64, torch.float32, device, normed=normed)
    kv = [spec.zeros(device) for spec in step.specs]
    args = (*(y.clone() for y in step.parts(step.x)), *step.where(), kv, step.smoothing)
    check_operator("kv_write", (*args, "int4", *step.norms))


@pytest.mark.gpu
@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("D", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("normed", [None, torch.bfloat16], ids=["bare", "normed"])
def test_a_prefill_of_8192_tokens(device, name, D, normed):
    """With norms, of numbers whose squares add up exactly in any order: their rounding is the same then."""
    step = Step(name, 8192, 32, 8, D, torch.bfloat16, device, slots=10000, normed=normed)
    step.x = (step.x * 8).round() / 8 if normed else step.x
    reference = behind_norms(ref.kv_write, rmsnorm_kernel.rmsnorm) if normed else ref.kv_write
    (x, kv), (x_ref, kv_ref) = step.run(kernel.kv_write), step.run(reference)
    torch.testing.assert_close(x, x_ref, atol=2e-5, rtol=2 * ROUNDING[torch.bfloat16])
    for got, want in zip(kv, kv_ref, strict=True):
        assert (got != want).float().mean() < {"fp16": 0.05, "int8": 2e-3}.get(name, 3e-2)
    alone, one = step.run(kernel.kv_write, slice(8000, 8001))
    assert torch.equal(alone[0], x[8000])
    for a, b in zip(kv, one, strict=True):
        assert torch.equal(a[step.slots[8000].long()], b[step.slots[8000].long()])


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("name", KV_FORMATS)
def test_pool_beyond_2_to_the_31_elements(device, name):
    """The same bits into slots at its end as into the first ones, and nothing below them."""
    slots = far_slot(name, 8, 128) + 1000
    step = Step(name, 301, 32, 8, 128, torch.bfloat16, device, slots=slots)
    near = torch.randperm(400, device=device)[:301].int()
    far = near + slots - 400
    x, kv = step.run(kernel.kv_write, slots=far)
    assert kv[0].numel() > 2**31
    for buffer in kv:
        for part in buffer[: slots - 400].view(torch.uint8).split(100_000):
            assert (part == 0x5A).all()
    step.specs = KV_FORMATS[name].buffers(400, 8, 128, torch.bfloat16).values()
    y, low = step.run(kernel.kv_write, slots=near)
    assert torch.equal(x, y)
    for there, here in zip(kv, low, strict=True):
        there, here = there[far.long()], here[near.long()]
        assert torch.equal(there.view(torch.uint8), here.view(torch.uint8))
