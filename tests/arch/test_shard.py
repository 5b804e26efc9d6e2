"""What each rank has of a model: together they have all of it, in whole units."""

import pytest

from qrt.arch.read import read_arch
from qrt.arch.shard import WHOLE, Shard, channels, head_rows, heads, of_rank, rank_counts
from qrt.errors import ConfigError


def llama(**changes):
    sizes = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 2, "num_attention_heads": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
    }  # fmt: skip
    return read_arch(sizes | changes, "folder")


@pytest.mark.parametrize(
    "size, unit", [(29568, 128), (14336, 128), (13696, 128), (11008, 128), (192, 64), (96, 32)]
)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_channels_are_cut_in_units(size, unit, ranks):
    own = [channels(size, Shard(rank, ranks)) for rank in range(ranks)]
    assert [number for part in own for number in part] == list(range(size))
    assert all(part.start % unit == 0 for part in own)
    assert max(map(len, own)) - min(map(len, own)) <= unit


@pytest.mark.parametrize("vocab, ranks", [(32000, 2), (50257, 4), (50257, 3), (151936, 8), (100, 2)])
def test_rows_of_the_head_are_cut_in_64s(vocab, ranks):
    own = [head_rows(vocab, Shard(rank, ranks)) for rank in range(ranks)]
    assert [row for part in own for row in part] == list(range(vocab)) and all(own)
    assert all(part.start % 64 == 0 for part in own)


@pytest.mark.parametrize("kv_heads, ranks", [(8, 2), (8, 8), (2, 4), (1, 2), (32, 4), (2, 32)])
def test_query_heads_stay_with_their_kv_heads(kv_heads, ranks):
    arch = llama(num_key_value_heads=kv_heads)
    seen = []
    for rank in range(ranks):
        shard = Shard(rank, ranks)
        q, kv = heads(arch, shard)
        own = of_rank(arch, shard)
        assert (
            (own.num_heads, own.num_kv_heads) == (len(q), len(kv)) == (32 // ranks, max(1, kv_heads // ranks))
        )
        assert {head * kv_heads // 32 for head in q} == set(kv)
        seen += q
    assert seen == list(range(32))


def test_a_rank_is_a_smaller_model():
    arch = llama()
    own = of_rank(arch, Shard(1, 4))
    assert (own.num_heads, own.num_kv_heads, own.intermediate_size, own.vocab_size) == (8, 2, 3584, 32000)
    assert of_rank(arch, WHOLE) == arch


def test_ranks_that_cannot_share_a_model_are_told_which_can():
    assert rank_counts(llama()) == [1, 2, 4, 8, 16, 32]
    text = (
        "tensor_parallel_size: expected one of 1, 2, 4, 8, 16, 32, got 3; LlamaForCausalLM has 32 heads and 8"
    )
    with pytest.raises(ConfigError, match=text):
        of_rank(llama(), Shard(0, 3))
    narrow = llama(intermediate_size=384)  # three units
    assert rank_counts(narrow) == [1, 2]
    with pytest.raises(
        ConfigError, match="expected one of 1, 2, got 4; .* and mlps of 384 channels in units of 128"
    ):
        of_rank(narrow, Shard(0, 4))
