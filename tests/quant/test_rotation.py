"""The rotation of quantized KV: orthogonal, per half head, the same for every batch and on every machine."""

import pytest
import torch

from qrt.quant import rotation

HEAD_DIMS = [32, 64, 80, 96, 128, 256]


def vectors(head_dim: int, n: int = 50) -> torch.Tensor:
    return torch.randn(n, 2, head_dim, generator=torch.Generator().manual_seed(head_dim))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_matrix_is_a_scaled_sign_matrix_and_orthogonal(head_dim):
    m = rotation.matrix(head_dim).double()
    half = head_dim // 2
    block = half & -half
    torch.testing.assert_close(m @ m.T, torch.eye(half, dtype=torch.float64), atol=1e-7, rtol=0)
    entries = m.abs() * block**0.5
    inside = torch.block_diag(*[torch.ones(block, block)] * (half // block))
    torch.testing.assert_close(entries, inside.double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_unrotate_inverts_and_scores_stay(head_dim):
    x, y = vectors(head_dim), vectors(head_dim).flip(0)
    torch.testing.assert_close(rotation.unrotate(rotation.rotate(x)), x, atol=1e-5, rtol=0)
    turned = (rotation.rotate(x) * rotation.rotate(y)).sum(-1)
    torch.testing.assert_close(turned, (x * y).sum(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("head_dim", [d for d in HEAD_DIMS if d < 128])
def test_an_outlier_of_a_narrow_head_reaches_both_halves(head_dim):
    x = torch.zeros(head_dim)
    x[3] = 8.0
    y = rotation.rotate(x)
    block = (head_dim // 2) & -(head_dim // 2)
    assert (y != 0).sum() == 2 * block
    torch.testing.assert_close(y[y != 0].abs(), torch.full((2 * block,), 8.0 / (2 * block) ** 0.5))


@pytest.mark.parametrize("head_dim", [d for d in HEAD_DIMS if d >= 128])
def test_halves_of_a_wide_head_do_not_mix(head_dim):
    x = vectors(head_dim)
    other = x.clone()
    other[..., : head_dim // 2] += 1
    a, b = rotation.rotate(x), rotation.rotate(other)
    assert torch.equal(a[..., head_dim // 2 :], b[..., head_dim // 2 :])
    assert not torch.equal(a[..., : head_dim // 2], b[..., : head_dim // 2])


def test_an_outlier_channel_is_spread_evenly():
    x = torch.zeros(128)
    x[70] = 8.0
    y = rotation.rotate(x)
    torch.testing.assert_close(y[64:].abs(), torch.ones(64))
    assert not y[:64].any()


def test_a_constant_vector_does_not_become_an_outlier():
    """What the random signs are for: a plain Hadamard would gather it in one channel."""
    assert rotation.rotate(torch.ones(128)).abs().max() < 4


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_a_token_rotates_the_same_in_every_batch(head_dim, tokens):
    x = vectors(head_dim)
    assert torch.equal(rotation.rotate(x[:tokens]), rotation.rotate(x)[:tokens])


def test_signs_are_these():
    """Cached K and V are in this basis, in every process that shares them."""
    first = (rotation.matrix(64)[:16, 0] > 0).tolist()
    assert "".join("+" if s else "-" for s in first) == "+--+++-++---+--+"
