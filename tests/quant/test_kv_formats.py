"""Every KV format: bits by hand, half a step of error, exact bytes, no slot but the one written."""

import pytest
import torch

from qrt.errors import UnsupportedError
from qrt.quant import affine
from qrt.quant.kv import KV_FORMATS

QUANTIZED = [name for name in KV_FORMATS if KV_FORMATS[name].quantized]
HKV, SLOTS = 3, 40


def vectors(tokens: int, head_dim: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, tokens, HKV, head_dim, generator=gen)
    return k * 3, v + 0.5


def empty(name: str, head_dim: int, dtype=torch.float32, fill: int = 0) -> list[torch.Tensor]:
    specs = KV_FORMATS[name].buffers(SLOTS, HKV, head_dim, dtype).values()
    return [torch.full((spec.num_bytes,), fill, dtype=torch.uint8).view(spec.dtype).view(spec.shape)
            for spec in specs]  # fmt: skip


def stored(name: str, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """k, v written to scattered slots and read back."""
    buffers = empty(name, k.shape[-1], fill=0x5A)
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(9))[: len(k)].int()
    KV_FORMATS[name].encode_ref(k, v, buffers, slots)
    return KV_FORMATS[name].decode_ref(buffers, slots)


def half_absmax(x: torch.Tensor) -> torch.Tensor:
    """absmax of each half head, at every element."""
    halves = x.unflatten(-1, (2, -1))
    return halves.abs().amax(-1, keepdim=True).expand_as(halves).flatten(-2)


@pytest.mark.parametrize("name,kv_bytes", [("fp16", 512), ("int8", 264), ("int4", 136), ("k8v4", 200)])
def test_bytes_per_slot(name, kv_bytes):
    assert KV_FORMATS[name].bytes_per_slot(1, 128, torch.bfloat16) == kv_bytes
    assert KV_FORMATS[name].bytes_per_slot(8, 128, torch.float16) == 8 * kv_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_unquantized_keeps_the_models_dtype(dtype, head_dim):
    k, v = vectors(5, head_dim)
    buffers = empty("fp16", head_dim, dtype)
    KV_FORMATS["fp16"].encode_ref(k, v, buffers, torch.arange(5))
    for got, want in zip(KV_FORMATS["fp16"].decode_ref(buffers, torch.arange(5)), (k, v), strict=True):
        assert got.dtype == torch.float32 and torch.equal(got, want.to(dtype).float())


@pytest.mark.parametrize("head_dim", [64, 128])
def test_int4_never_errs_more_than_plain_absmax_scales(head_dim):
    x = vectors(200, head_dim)[0].unflatten(-1, (2, -1))
    scale = x.abs().amax(-1, keepdim=True) / 8
    plain = ((torch.floor(x / scale).clamp(-8, 7) + 0.5) * scale - x).square().sum(-1)
    codes, scales = affine.quantize_midrise4(x.flatten(-2), head_dim // 2)
    found = affine.decode_groups(codes, scales, 7.5).unflatten(-1, (2, -1)) - x
    ratio = found.square().sum(-1) / plain
    assert ratio.max() < 1.01  # fp16 scales
    assert ratio.mean() < 0.99


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e4])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(
    "name,k_steps,v_steps", [("int8", 127, 127), ("int4", 7, 7), ("k8v4", 127, 7)]
)  # int4: 7 to 8
def test_error_is_half_a_step(name, k_steps, v_steps, head_dim, scale):
    """Whatever the size of the values: a V of 1e-4 has subnormal scales."""
    k, v = (x * scale for x in vectors(20, head_dim))
    for got, want, steps in zip(stored(name, k, v), (k, v), (k_steps, v_steps), strict=True):
        step = half_absmax(want) / steps
        # the scale is rounded to fp16 (2^-11, or 2^-25 where subnormal), which moves the last level
        slack = half_absmax(want) * 2**-11 + steps * 2**-25
        assert ((got - want).abs() <= 0.5 * step + slack).all()


@pytest.mark.parametrize(
    "name,largest", [("fp16", 0.0), ("int8", 0.0), ("int4", 2.0**-24), ("k8v4", 2.0**-24)]
)
def test_zeros_decode_to_nothing(name, largest):
    zeros = torch.zeros(4, HKV, 64)
    for got in stored(name, zeros, zeros):
        assert got.abs().max() <= largest


@pytest.mark.parametrize("name", QUANTIZED)
def test_huge_values_saturate(name):
    """Beyond what an fp16 scale holds values are clipped, never infinite."""
    k, v = vectors(4, 64)
    for got, want in zip(stored(name, k * 1e9, v * 1e9), (k, v), strict=True):
        assert got.isfinite().all()
        large = want.abs() > 0.5
        assert torch.equal(got.sign()[large], want.sign()[large])


def test_int8_words_by_hand():
    """Dims j and j + 2 of a head of 4 share word j; u = round(x / s) + 128; (k_lo, k_hi, v_lo, v_hi)."""
    buffers = [*torch.zeros(2, 2, 1, 2, dtype=torch.int16), torch.zeros(2, 1, 4, dtype=torch.float16)]
    k = torch.tensor([[[127.0, -127.0, 0.0, 254.0]]])
    v = torch.tensor([[[63.5, 0.3, -1.0, 12.7]]])
    KV_FORMATS["int8"].encode_ref(k, v, buffers, torch.tensor([1]))
    k_words, v_words, scale = buffers
    assert scale[:, 0].tolist() == [[0.0] * 4, [1.0, 2.0, 0.5, torch.tensor(0.1).half().item()]]
    words = [(x[1, 0].int() & 0xFFFF).tolist() for x in (k_words, v_words)]
    assert words == [[255 | 128 << 8, 1 | 255 << 8], [255 | 118 << 8, 129 | 255 << 8]]
    assert not k_words[0].any() and not v_words[0].any()


def test_int4_words_by_hand():
    """Dims j, j + 2, j + 4, j + 6 of a head of 8 share word j, lowest bits first; x = (n - 7.5) s."""
    buffers = [*torch.zeros(2, 1, 1, 2, dtype=torch.int16), torch.zeros(1, 1, 4, dtype=torch.float16)]
    k = torch.tensor([[[7.5, -7.5, 0.5, 3.5, 15.0, -1.0, 1.0, -15.0]]])  # on the grid of scales 1 and 2
    KV_FORMATS["int4"].encode_ref(k, -k, buffers, torch.tensor([0]))
    k_words, v_words, scale = buffers
    assert scale[0, 0].tolist() == [1.0, 2.0, 1.0, 2.0]
    words = [(x[0, 0].int() & 0xFFFF).tolist() for x in (k_words, v_words)]
    assert words[0] == [15 | 8 << 4 | 15 << 8 | 8 << 12, 0 | 11 << 4 | 7 << 8 | 0 << 12]
    assert words[1] == [0 | 7 << 4 | 0 << 8 | 7 << 12, 15 | 4 << 4 | 8 << 8 | 15 << 12]


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("name", KV_FORMATS)
def test_writing_touches_its_slots_only_and_twice_is_once(name, head_dim):
    k, v = vectors(6, head_dim)
    buffers = empty(name, head_dim, fill=0xA5)
    before = [b.clone() for b in buffers]
    slots = torch.tensor([7, 0, 39, 12, 13, 20])
    for _ in range(2):
        KV_FORMATS[name].encode_ref(k, v, buffers, slots)
        first = [b.clone() for b in buffers]
    others = torch.tensor([s for s in range(SLOTS) if s not in slots])
    for now, was, once in zip(buffers, before, first, strict=True):
        assert torch.equal(*(x[others].view(torch.uint8) for x in (now, was)))
        assert torch.equal(now.view(torch.uint8), once.view(torch.uint8))


@pytest.mark.parametrize("name", KV_FORMATS)
def test_bytes_do_not_depend_on_batch_or_slot(name):
    fmt = KV_FORMATS[name]
    k, v = vectors(9, 64)
    together, alone = empty(name, 64), empty(name, 64)
    fmt.encode_ref(k, v, together, torch.arange(9))
    for i in range(9):
        fmt.encode_ref(k[i : i + 1], v[i : i + 1], alone, torch.tensor([30 - i]))
    for got, want in zip(
        fmt.decode_ref(alone, 30 - torch.arange(9)), fmt.decode_ref(together, torch.arange(9)), strict=True
    ):
        assert torch.equal(got, want)


def test_k8v4_is_int8s_k_and_int4s_v():
    """Bit for bit: values and words."""
    k, v = vectors(9, 64)
    got, int8, int4 = (stored(name, k, v) for name in ("k8v4", "int8", "int4"))
    assert torch.equal(got[0], int8[0]) and torch.equal(got[1], int4[1])
    mixed, eight, four = (empty(name, 64) for name in ("k8v4", "int8", "int4"))
    for name, buffers in (("k8v4", mixed), ("int8", eight), ("int4", four)):
        KV_FORMATS[name].encode_ref(k, v, buffers, torch.arange(9))
    assert torch.equal(mixed[0], eight[0]) and torch.equal(mixed[1], four[1])
    assert torch.equal(mixed[2], torch.cat((eight[2][..., :2], four[2][..., 2:]), -1))


def test_a_head_that_fills_no_word_is_refused():
    with pytest.raises(UnsupportedError, match=r"int4: expected head_dim a multiple of 4, got 66"):
        KV_FORMATS["int4"].buffers(8, 1, 66, torch.float16)


def attention_error(name: str, rotated: bool) -> float:
    """Relative error of attention over a cache of `name`, K and V with outlier channels."""
    fmt, gen = KV_FORMATS[name], torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(n, 1, 128, generator=gen) for n in (48, 512, 512))
    k[..., 50] += 12
    k[..., 114] -= 9
    v[..., 7] *= 6
    to, back = (fmt.to_basis, fmt.from_basis) if rotated else (torch.clone, torch.clone)
    buffers = [spec.zeros("cpu") for spec in fmt.buffers(512, 1, 128, torch.float32).values()]
    fmt.encode_ref(to(k), to(v), buffers, torch.arange(512))
    got_k, got_v = (back(x)[:, 0].double() for x in fmt.decode_ref(buffers, torch.arange(512)))
    q, k, v = (x[:, 0].double() for x in (q, k, v))
    want = torch.softmax(q @ k.T * 128**-0.5, -1) @ v
    got = torch.softmax(q @ got_k.T * 128**-0.5, -1) @ got_v
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("name,bound", [("int8", 0.01), ("int4", 0.2)])
def test_rotation_halves_the_error_of_outlier_channels(name, bound):
    rotated = attention_error(name, True)
    assert rotated < bound
    assert rotated < 0.5 * attention_error(name, False)
