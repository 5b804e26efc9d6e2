"""The pairs of `Arch.smooth`, on mixtures: powers of two that move between their parts change no bit."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from hand_steps import Requests
from qrt.arch.read import read_arch
from qrt.definitions.names import place_names
from qrt.definitions.stacks import part_rows
from qrt.model_files.folder import read_config
from qrt.quant.checkpoint import open_checkpoint
from truth import ours, prompt
from zoo import MODELS, make

MIXTURES = [name for name in MODELS if "num_experts_per_tok" in str(MODELS[name].config)]


def move(tensors, arch, layer, pair, random):
    """Divide the source of `pair` by powers of two, and multiply its readers' inputs by them."""
    source = [f"{layer}.{pair.source}.{kind}" for kind in ("weight", "bias")]
    rows = slice(None) if pair.part is None else part_rows(arch, pair.part)
    count = len(tensors[source[0]][rows])
    powers = torch.exp2(torch.randint(-4, 5, (count,), generator=random).float())
    for name in source:
        if name in tensors:
            tensors[name][rows] /= powers if tensors[name].dim() == 1 else powers[:, None]
    if pair.source == arch.names.v:  # each KV head is read by several query heads
        heads = powers.view(arch.num_kv_heads, arch.head_dim)
        powers = heads.repeat_interleave(arch.num_heads // arch.num_kv_heads, 0).flatten()
    for reader in (*pair.readers, *pair.routers):
        tensors[f"{layer}.{reader}.weight"] = tensors[f"{layer}.{reader}.weight"] * powers


def spell_out(tensors, experts, layer):
    """Store the experts of a layer that are two tensors each by itself, as other checkpoints do."""
    own = experts.stacked
    for name in experts.stored:
        whole = tensors.pop(f"{layer}.{name}")
        biases = tensors.pop(f"{layer}.{name}_bias", None)
        for number, weight in enumerate(whole.mT if own.transposed else whole):
            bias = None if biases is None else biases[number]
            gate, up, down = experts.each(number)
            width, parts = experts.width, {down: slice(None)}
            if name == experts.stored[0] and own.pairs:
                parts = {gate: slice(0, None, 2), up: slice(1, None, 2)}
            elif name == experts.stored[0]:
                parts = {gate: slice(0, width), up: slice(width, None)}
            for part, rows in parts.items():
                tensors[f"{layer}.{part}.weight"] = weight[rows].contiguous()
                if bias is not None:
                    tensors[f"{layer}.{part}.bias"] = bias[rows].contiguous()


@torch.inference_mode()
@pytest.mark.parametrize("name", MIXTURES)
def test_powers_of_two_move_between_the_parts_of_a_pair(name, tmp_path):
    make(name, tmp_path)
    arch = place_names(read_arch(read_config(tmp_path), tmp_path), open_checkpoint(tmp_path))
    tokens = prompt(40)
    before = Requests(ours(tmp_path)).run([(0, tokens)])[0]
    tensors = load_file(tmp_path / "model.safetensors")
    random, moved = torch.Generator().manual_seed(0), 0
    for index in range(arch.num_layers):
        own = arch.at(index)
        if own.experts is not None and own.experts.stacked is not None:
            spell_out(tensors, own.experts, f"{arch.names.layers}.{index}")
        for pair in own.smooth:
            move(tensors, own, f"{arch.names.layers}.{index}", pair, random)
            moved += 1
        experts = 0 if own.experts is None else own.experts.count
        shared = own.experts is not None and own.experts.shared is not None
        down = 0 if own.act == "swiglu_oai" else experts + shared if experts else 1
        assert len(own.smooth) == 2 + (own.clip is None) + down
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert moved > arch.num_layers
    assert torch.equal(Requests(ours(tmp_path)).run([(0, tokens)])[0], before)
