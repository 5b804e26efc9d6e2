"""RoPE tables against transformers' rotary embedding and the definition."""

import math
from dataclasses import replace

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from qrt.arch.rope import RopeConfig
from qrt.definitions.rope import channel_order, frequencies, rope_tables, rotate, tables_by_length

LLAMA3 = RopeConfig(500000.0, 128, "llama3", "halves", 8.0, 1.0, 4.0, 8192)
YARN = RopeConfig(1e6, 64, "yarn", "halves", 4.0, 1.0, 32.0, 32768, length=1.1386)
KINDS = {
    "default": RopeConfig(10000.0, 64),
    "linear": RopeConfig(10000.0, 64, "linear", "halves", 4.0),
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, a band of any width": replace(YARN, factor=2.5, low_freq_factor=2.0, truncate=False, length=0.9),
    "yarn, beyond both ends": RopeConfig(
        10.0, 64, "yarn", "halves", 4.0, 1e-3, 32.0, 100, truncate=False, length=1.1
    ),
    "yarn, a band of no width": RopeConfig(10000.0, 64, "yarn", "halves", 4.0, 1.0, 32.0, 6),
}


def as_transformers(rope: RopeConfig) -> dict:
    entry = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        entry["factor"] = rope.factor
    if rope.kind == "yarn":
        entry |= {"beta_slow": rope.low_freq_factor, "beta_fast": rope.high_freq_factor}
        entry |= {"original_max_position_embeddings": rope.original_max_position}
        entry |= {"truncate": rope.truncate, "attention_factor": rope.length}
    if rope.kind == "llama3":
        entry["low_freq_factor"] = rope.low_freq_factor
        entry["high_freq_factor"] = rope.high_freq_factor
        entry["original_max_position_embeddings"] = rope.original_max_position
    return entry


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_tables_are_those_of_transformers(kind, head_dim):
    rope, positions = replace(KINDS[kind], rotary_dim=head_dim), 2000
    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=16384,
        rope_parameters=as_transformers(rope),
    )
    theirs = LlamaRotaryEmbedding(config)
    cos, sin = theirs(torch.zeros(1), torch.arange(positions)[None])
    ours = rope_tables(rope, head_dim, positions, torch.device("cpu"))
    assert ours.cos.dtype == torch.float32 and ours.cos.shape == (positions, head_dim // 2)
    # their angles are products in fp32: at position p they are off by p * 2^-23
    torch.testing.assert_close(ours.cos, cos[0, :, : head_dim // 2], atol=positions * 2**-22, rtol=0)
    torch.testing.assert_close(ours.sin, sin[0, :, : head_dim // 2], atol=positions * 2**-22, rtol=0)


def test_llama3_bands():
    """Fast channels keep their frequency, slow ones are divided by the factor, none lies outside."""
    plain, scaled = frequencies(RopeConfig(LLAMA3.theta, 128)), frequencies(LLAMA3)
    turns = LLAMA3.original_max_position * plain / (2 * math.pi)
    torch.testing.assert_close(scaled[turns > 4], plain[turns > 4], rtol=1e-15, atol=0)
    torch.testing.assert_close(scaled[turns < 1], plain[turns < 1] / 8, rtol=1e-15, atol=0)
    between = (turns > 1) & (turns < 4)
    assert (
        between.any()
        and (scaled[between] < plain[between]).all()
        and (scaled[between] > plain[between] / 8).all()
    )


def test_far_positions_are_exact():
    """Angles at position 131071 agree with Python's own arithmetic to the last bit of fp32."""
    tables = rope_tables(LLAMA3, 128, 131072, torch.device("cpu"))
    for pair in (0, 1, 17, 63):
        angle = 131071 * frequencies(LLAMA3)[pair].item()
        assert abs(tables.cos[-1, pair].item() - math.cos(angle)) < 1e-7
        assert abs(tables.sin[-1, pair].item() - math.sin(angle)) < 1e-7


def dot_products(q, k, order):
    """q k^T of every pair of positions, for channels in `order`."""
    return torch.einsum("qhd,khd->hqk", q[..., order].double(), k[..., order].double())


@pytest.mark.parametrize("rotary_dim", [16, 32, 64])
def test_moved_channels_turn_as_neighbours_do(rotary_dim):
    """Turned as complex numbers of neighbours, q k^T is what it is after moving and turning halves."""
    q, k = torch.randn(2, 9, 2, 64, generator=torch.Generator().manual_seed(3)).double()
    rope = RopeConfig(10000.0, rotary_dim, pairs="neighbours")
    angles = torch.outer(torch.arange(9).double(), frequencies(rope))
    wheel = torch.polar(torch.ones_like(angles), angles)[:, None]

    def whole(x):
        pairs = torch.view_as_complex(x[..., :rotary_dim].unflatten(-1, (-1, 2)).contiguous()) * wheel
        return torch.cat((torch.view_as_real(pairs).flatten(-2), x[..., rotary_dim:]), -1)

    tables, order = rope_tables(rope, 64, 9, torch.device("cpu")), channel_order(rope, 64)
    ours = [rotate(x[..., order].float(), tables, torch.arange(9)) for x in (q, k)]
    everything = torch.arange(64)
    want = dot_products(whole(q), whole(k), everything)
    torch.testing.assert_close(dot_products(*ours, everything), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rotary_dim", [16, 48])
def test_channels_that_do_not_turn_keep_their_length(rotary_dim):
    rope = RopeConfig(10000.0, rotary_dim, length=1.25)
    tables = rope_tables(rope, 64, 5, torch.device("cpu"))
    length = (tables.cos.square() + tables.sin.square()).sqrt()
    torch.testing.assert_close(length[:, : rotary_dim // 2], torch.full((5, rotary_dim // 2), 1.25))
    assert (length[:, rotary_dim // 2 :] == 1).all()
    assert sorted(channel_order(rope, 64).tolist()) == list(range(64))


def test_tables_of_many_positions_are_made_in_blocks(monkeypatch):
    whole = rope_tables(YARN, 64, 300, torch.device("cpu"))
    monkeypatch.setattr("qrt.definitions.rope.BLOCK", 128)
    for table, wanted in zip(rope_tables(YARN, 64, 300, torch.device("cpu")), whole, strict=True):
        assert torch.equal(table, wanted)


def test_where_nothing_turns_one_row_serves_all_positions():
    """Llama 4 Scout has 10,485,760 positions: a row for each would take 5 GiB."""
    cos, sin = tables_by_length(None, 64, 10_485_760, 0, torch.device("cpu"))
    assert torch.equal(cos, torch.ones(1, 32)) and torch.equal(sin, torch.zeros(1, 32))
