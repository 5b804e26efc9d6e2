"""Ranks of quantized checkpoints: what they read of every format, and what they compute together.

test_families.py does the same with every architecture unquantized.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hand_steps import Requests
from qrt.arch.read import read_arch
from qrt.arch.shard import Shard
from qrt.errors import CheckpointError, ConfigError
from qrt.model.loader import dummy_model, load_model
from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.checkpoint.cut import Slices
from qrt.quant.weight import WEIGHT_SCHEMES
from qrt.quant.weight.tiles import TiledWeight
from ranks import Ranks, loaded
from tiny_models import quantize_checkpoint, random_checkpoint
from tool_files import TOOLS, quantize_as
from truth import ours, prompt, relative
from zoo import make

PROMPT = prompt(30)
GROUP = 64  # as many inputs of o as each of 4 ranks has


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Four query heads on two KV heads, and 5 units of 128 channels, with biases: and its Linears."""
    folder = random_checkpoint(
        tmp_path_factory.mktemp("ranks") / "llama", "LlamaForCausalLM", num_hidden_layers=1,
        intermediate_size=640, attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    arch = read_arch(open_checkpoint(folder).config, folder)
    return folder, [f"model.layers.{i}.{own}" for i in range(arch.num_layers) for own in arch.projections]


def distance(folder, ranks):
    """The distance of the logits of ranks from those of the whole."""
    models = loaded(folder, ranks)
    got, want = (each.run([(0, PROMPT)])[0] for each in (Ranks(models), Requests(ours(folder))))
    return relative(got, want)


def rounded(source, scheme, folder, group=GROUP):
    """Round a checkpoint in `scheme`, in groups if it has them; return the folder."""
    spec = WEIGHT_SCHEMES[scheme].spec
    spec = replace(spec, group_size=group) if spec.group_size else spec
    quantize_checkpoint(source[0], folder, scheme, spec, source[1])
    return folder


def test_plain_weights_on_uneven_ranks(llama):
    assert distance(llama[0], 4) < 1e-5


@pytest.mark.parametrize("scheme", ["w4a16", "w8a16"])
def test_compressed_tensors(llama, scheme, tmp_path):
    assert distance(rounded(llama, scheme, tmp_path / "q"), 4) < 1e-5


def test_int8_ranks_have_the_codes_and_the_scales_of_the_whole(llama, tmp_path):
    """Their sums differ a little: each rounds its own inputs of o and down by a scale of its own."""
    folder = rounded(llama, "w8a8", tmp_path / "q")
    assert distance(folder, 4) < 0.05
    layers, whole = [model.layers[0] for model in loaded(folder, 4)], ours(folder).layers[0]
    for own, parts in (
        (whole.attention.o, [layer.attention.o for layer in layers]),
        (whole.mlp.down, [layer.mlp.down for layer in layers]),
    ):
        assert torch.equal(torch.cat([part.tensors[0] for part in parts], 1), own.tensors[0])
        assert all(torch.equal(part.tensors[1], own.tensors[1]) for part in parts)
        assert torch.equal(parts[0].bias, own.bias) and not any(part.bias.any() for part in parts[1:])


@pytest.mark.parametrize("group", [GROUP, 128])
def test_progressive_ranks_have_the_weights_of_the_whole(llama, group, tmp_path):
    """Also where a cut parts a group; a part may have a larger scale and smaller steps than the whole."""
    folder = rounded(llama, "w4a8", tmp_path / "q", group)
    assert distance(folder, 4) < 0.05
    layers, whole = [model.layers[0] for model in loaded(folder, 4)], ours(folder).layers[0]
    for own, parts in (
        (whole.attention.o, [layer.attention.o for layer in layers]),
        (whole.mlp.down, [layer.mlp.down for layer in layers]),
    ):
        values = [codes * channel[:, None] for codes, channel, _ in (one.tensors for one in (own, *parts))]
        assert torch.equal(torch.cat(values[1:], 1), values[0])


@pytest.mark.parametrize("tool", TOOLS)
def test_gptq_and_awq(llama, tool, tmp_path):
    quantize_as(tool, llama[0], tmp_path / "q", tmp_path / "plain", llama[1], group=GROUP)
    assert distance(tmp_path / "q", 4) < 1e-5


@pytest.mark.parametrize("tool", ["gptq-v1-asym-order", "awq-asym"])
def test_a_group_that_a_cut_parts(llama, tool, tmp_path):
    """128 inputs share a scale, and a rank has 64 of them: it repeats the scale."""
    folder, modules = llama
    quantize_as(tool, folder, tmp_path / "q", tmp_path / "plain", modules, group=128)
    assert distance(tmp_path / "q", 4) < 1e-5


def test_experts_with_orders_of_their_own(tmp_path):
    make("qwen2_moe", tmp_path / "source")
    arch = read_arch(open_checkpoint(tmp_path / "source").config, tmp_path)
    modules = [f"model.layers.{i}.{own}" for i in range(arch.num_layers) for own in arch.at(i).projections]
    folders = tmp_path / "q", tmp_path / "plain"
    quantize_as("gptq-v1-asym-order", tmp_path / "source", *folders, modules, group=32)
    assert distance(tmp_path / "q", 2) < 1e-5


def test_order_of_down_moves_into_gate_and_up(llama, tmp_path):
    """So that down gathers nothing, at one rank too; what o reads has an order of its own."""
    folder, modules = llama
    quantize_as("gptq-v1-asym-order", folder, tmp_path / "q", tmp_path / "plain", modules, group=GROUP)
    for model in (ours(tmp_path / "q"), *loaded(tmp_path / "q", 2)):
        for layer in model.layers:
            down, o = (TiledWeight(*own.tensors) for own in (layer.mlp.down, layer.attention.o))
            assert down.perm.numel() == 0 and o.perm.numel() >= model.arch.num_heads * model.arch.head_dim


def bytes_read(folder, shard, monkeypatch):
    """The bytes of Linears that a rank reads, by the tensor."""
    read: dict[str, int] = {}
    own = Slices.tensor

    def tensor(self, name, *args, **sizes):
        found = own(self, name, *args, **sizes)
        read[name] = read.get(name, 0) + found.nbytes
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Slices, "tensor", tensor)
        load_model(folder, device=torch.device("cpu"), dtype=torch.float32, shard=shard)
    return read


@pytest.mark.parametrize("kind", ["fp16", "w4a16", "awq-asym", "gptq-v2-asym"])
def test_ranks_read_only_their_slices(llama, kind, tmp_path, monkeypatch):
    """Together they read each byte once, but biases of sums, heads that ranks share, shapes and orders."""
    if kind in TOOLS:
        quantize_as(kind, llama[0], tmp_path / "q", tmp_path / "plain", llama[1], group=GROUP)
    elif kind != "fp16":
        rounded(llama, kind, tmp_path / "q")
    folder = llama[0] if kind == "fp16" else tmp_path / "q"
    checkpoint = open_checkpoint(folder)
    each = [bytes_read(folder, Shard(rank, 4), monkeypatch) for rank in range(4)]
    whole = ("weight_shape", "g_idx", "o_proj.bias", "down_proj.bias")
    for name in each[0]:
        if not name.endswith(whole):
            times = 2 if ".k_proj." in name or ".v_proj." in name else 1
            assert sum(read[name] for read in each) == times * checkpoint.spec(name).num_bytes, name


@pytest.mark.parametrize("scheme, group", [("w4a16", 64), ("w4a16", 128), ("w8a8", None), ("w4a8", 128)])
def test_dummy_ranks_are_as_large_as_loaded_ones(llama, scheme, group, tmp_path):
    folder = rounded(llama, scheme, tmp_path / "q", group)
    how = {"device": torch.device("cpu"), "dtype": torch.float32}
    models = [dummy_model(open_checkpoint(folder), shard=Shard(rank, 4), **how) for rank in range(4)]
    for made, read in zip(models, loaded(folder, 4), strict=True):
        assert made.arch == read.arch
        assert [t.shape for t in made.parameters()] == [t.shape for t in read.parameters()]
        assert torch.equal(made.embed.weight, models[0].embed.weight)


def test_a_tied_head_is_a_view_of_the_embedding(tmp_path):
    """Whose bytes count once."""
    folder = random_checkpoint(
        tmp_path / "m", "LlamaForCausalLM", num_hidden_layers=1, tie_word_embeddings=True
    )
    for model in loaded(folder, 2):
        table, (head,) = model.embed.weight, model.head.tensors
        assert head.untyped_storage().data_ptr() == table.untyped_storage().data_ptr()
        others = sum(t.nbytes for t in model.parameters()) - table.nbytes - head.nbytes
        assert head.shape == (256, 128) and model.num_bytes == table.nbytes + others


def test_whole_sizes_are_checked_on_every_rank(llama, tmp_path):
    folder, _ = llama
    checkpoint = open_checkpoint(folder)
    checkpoint.config["intermediate_size"] = 1280
    with pytest.raises(
        CheckpointError, match=r"gate_proj: expected shape \[1280, 128\], .* got \[640, 128\]"
    ):
        load_model(checkpoint, device=torch.device("cpu"), dtype=torch.float32, shard=Shard(0, 2))
    with pytest.raises(
        ConfigError, match="tensor_parallel_size: expected one of 1, 2, 4, got 8; LlamaForCausalLM"
    ):
        load_model(folder, device=torch.device("cpu"), dtype=torch.float32, shard=Shard(0, 8))
