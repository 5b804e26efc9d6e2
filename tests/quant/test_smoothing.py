"""Smoothing of K: attention does not change, scores of quantized K come out better."""

from dataclasses import replace

import pytest
import torch

from qrt.arch.rope import RopeConfig
from qrt.definitions.rope import rope_tables
from qrt.quant.kv import KV_FORMATS, smoothing

T, HQ, HKV, D = 256, 6, 2, 64
CONFIG = RopeConfig(10000.0, 64)
ROPE = rope_tables(CONFIG, D, 512, torch.device("cpu"))
PAIRS = torch.arange(D // 2)


def sample(seed, bias=0.0):
    """q and k before RoPE, with channels of uneven size, k about a mean that is large in every channel."""
    gen = torch.Generator().manual_seed(seed)
    mean = torch.randn(HKV, D, generator=torch.Generator().manual_seed(99)) * bias
    q = torch.randn(T, HQ, D, generator=gen) * torch.linspace(0.2, 3, D // 2).repeat(2)
    return q, torch.randn(T, HKV, D, generator=gen) * torch.linspace(2, 0.5, D // 2).repeat(2) + mean


def turn(x, rope=ROPE):
    """RoPE at positions 0, 1, ...: pairs (i, i + D/2) as complex numbers."""
    lo, hi = x.double().chunk(2, -1)
    turned = torch.complex(lo, hi) * torch.complex(*(table[:T, None].double() for table in rope))
    return torch.cat((turned.real, turned.imag), -1)


def scores(q, k):
    """[Hq, T, T], less what is the same for all keys of a query."""
    scores = torch.einsum("thd,shd->hts", q.double(), k.double().repeat_interleave(HQ // HKV, 1))
    return scores - scores.mean(-1, keepdim=True)


def smoothed(table, q, k):
    q_gain, k_gain, shift = table.double()
    return q * q_gain.repeat_interleave(HQ // HKV, 0), k * k_gain - shift


def through(name, k):
    """k as a KV format gives it back."""
    fmt = KV_FORMATS[name]
    buffers = [spec.zeros("cpu") for spec in fmt.buffers(T, HKV, D, torch.float32).values()]
    rotated, slots = fmt.to_basis(k), torch.arange(T)
    fmt.encode_ref(rotated, rotated, buffers, slots)
    return fmt.from_basis(fmt.decode_ref(buffers, slots)[0])


def lost(name, q, k):
    return float((scores(q, through(name, k)) - scores(q, k)).norm())


def test_scores_stay_but_for_a_constant_of_the_query():
    q, k = sample(0, bias=3.0)
    table = smoothing.fit(q, k, *ROPE)
    assert table.dtype == torch.float32 and table.shape == (3, HKV, D)
    other_q, other_k = (turn(x) for x in sample(1))
    torch.testing.assert_close(
        scores(*smoothed(table, other_q, other_k)), scores(other_q, other_k), rtol=1e-5, atol=1e-4
    )


def test_quantized_scores_lose_less():
    table = smoothing.fit(*sample(0, bias=3.0), *ROPE)
    q, k = (turn(x) for x in sample(1, bias=3.0))
    for name in ("int8", "int4"):
        assert lost(name, *smoothed(table, q, k)) < 0.5 * lost(name, q, k)
    q, k = (turn(x) for x in sample(1))  # the gain alone
    table = smoothing.fit(*sample(0), *ROPE)
    assert lost("int4", *smoothed(table, q, k)) < 0.9 * lost("int4", q, k)


@pytest.mark.parametrize("length", [1.0, 1.5])
@pytest.mark.parametrize("bias", [0.0, 3.0])
def test_the_energies_of_every_pair_are_balanced(bias, length):
    """Also where RoPE stretches what it turns, and where other channels of the second KV head are large."""
    rope = rope_tables(replace(CONFIG, length=length), D, T, torch.device("cpu"))
    q, k = sample(0, bias)
    q[:, HQ // HKV :] = q[:, HQ // HKV :].flip(-1)
    q, k = smoothed(smoothing.fit(q, k, *rope), turn(q, rope), turn(k, rope))
    q, k = q.square().mean(0).unflatten(0, (HKV, -1)).mean(1), (k - k.mean(0)).square().mean(0)
    ratio = (q[:, PAIRS] + q[:, PAIRS + D // 2]) / (k[:, PAIRS] + k[:, PAIRS + D // 2])
    assert (ratio / ratio.log().mean(-1, keepdim=True).exp()).log().abs().max() < 0.15


def test_only_what_stays_over_the_context_is_shifted():
    """A mean that turns many times has no part in K's mean: taking it away anywhere would hurt elsewhere."""
    q, k = sample(0, bias=3.0)
    q_gain, k_gain, shift = smoothing.fit(q, k, *ROPE)
    mean = k.mean(0).unflatten(-1, (2, -1)).norm(dim=1)
    left = (shift / k_gain).unflatten(-1, (2, -1)).norm(dim=1)
    assert (left[:, :4] < 0.02 * mean[:, :4]).all() and (left[:, -4:] > 0.98 * mean[:, -4:]).all()


@pytest.mark.parametrize("short", [0, 100])
def test_the_shift_is_the_mean_over_positions_by_their_weight(short):
    """Return the rest of K's mean after the shift, computed at every position and not from the average.

    Where the first positions turn in a second way, their rows stand in front.
    """
    q, k = sample(0, bias=3.0)
    slower = rope_tables(replace(CONFIG, theta=CONFIG.theta / 10), D, short, torch.device("cpu"))
    rope = [torch.cat(both) for both in zip(slower, ROPE, strict=True)]
    q_gain, k_gain, shift = smoothing.fit(q, k, *rope, long_rope_switch=short)
    mean = torch.complex(*k.double().mean(0).chunk(2, -1))
    rows = [*range(short), *range(512)]  # the position of each row
    turned = sum(
        mean * torch.complex(*(table[row].double() for table in rope)) / (p + 512)
        for row, p in enumerate(rows)
    )
    want = turned / sum(1 / (p + 512) for p in rows)
    torch.testing.assert_close(
        (shift / k_gain).double(), torch.cat((want.real, want.imag), -1), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", ["int8", "int4", "k8v4", "fp16"])
def test_a_settled_table_stores_the_first_k_without_an_error(name):
    """And K that is a little beside it as well as before; the scores stay; the shift moves by one error."""
    q, k = sample(0, bias=3.0)
    fmt, table = KV_FORMATS[name], smoothing.fit(q, k, *ROPE)
    settled = smoothing.settle(table, k[0], fmt)
    assert torch.equal(settled[:2], table[:2])
    moved = (settled[2] - table[2]).norm() / (k[0] * table[1] - table[2]).norm()
    assert moved == 0 if name == "fp16" else 1e-4 < moved < 0.2
    held = k[:T] * settled[1] - settled[2]
    error = (through(name, held) - held).norm(dim=(1, 2)) / held.norm(dim=(1, 2))
    assert error[0] < 1e-5 and (name == "fp16" or error[0] < 0.01 * error[1:].min())
    other_q, other_k = (turn(x) for x in sample(1))
    torch.testing.assert_close(
        scores(*smoothed(settled, other_q, other_k)), scores(other_q, other_k), rtol=1e-5, atol=1e-4
    )


def test_dead_channels_and_heads_give_a_finite_table():
    q, k = sample(0)
    q[..., 3], k[..., 3 + D // 2], k[..., 5] = 0, 0, 0
    k[:, 1] = 0
    table = smoothing.fit(q, k, *ROPE)
    assert table.isfinite().all() and (table[:2] > 0).all()
    scaled = smoothing.fit(1e-3 * q, 1e3 * k, *ROPE)  # balances channels, whatever the size of q and k
    torch.testing.assert_close(scaled[:2], table[:2], rtol=5e-3, atol=0)
    torch.testing.assert_close(scaled[2], 1e3 * table[2], rtol=5e-3, atol=1e-3)
    assert smoothing.settle(table, k[0], KV_FORMATS["int4"]).isfinite().all()
    assert smoothing.fit(torch.zeros_like(q), torch.zeros_like(k), *ROPE).isfinite().all()
