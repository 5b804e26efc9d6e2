"""Rotations: orthogonal, folded so that the function stays; the result is a plain checkpoint."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from qrt.arch import ARCHS
from qrt.errors import CheckpointError, ConfigError, QrtError, UnsupportedError
from qrt.quant.checkpoint import open_checkpoint
from qrt_calibrate import cli, rotate
from qrt_calibrate.decoder import read_layer
from qrt_calibrate.pipeline import Run
from qrt_calibrate.recipe_file import recipe_of
from qrt_calibrate.rotate import Gate, RotatedCheckpoint, turn
from qrt_calibrate.text import cut_windows, load_tokenizer
from tiny_models import random_checkpoint

CASES = [
    ("LlamaForCausalLM", {"hidden_size": 96, "head_dim": 48}),  # 3 x 32 and 3 x 16: no powers of two
    ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("MistralForCausalLM", {"num_attention_heads": 8, "num_key_value_heads": 1, "hidden_size": 320}),
    ("Qwen2ForCausalLM", {}),
    ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
]
BOTH = ["--rotations", "R1", "R2"]
IDS = torch.randint(0, 512, (2, 40), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)(IDS % 258).logits


@pytest.mark.parametrize("size", [1, 2, 48, 64, 80, 96, 128, 448, 1024])
def test_orthogonal_and_spread(size):
    matrix = turn(torch.eye(size))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-12)
    assert float(matrix.abs().max()) <= (2 / size) ** 0.5 + 1e-12, "one channel is spread over all"
    x = torch.randn(3, 2, size, dtype=torch.float64)
    torch.testing.assert_close(turn(x), x @ matrix)


def rotated(folder, architecture, *rotations):
    return RotatedCheckpoint(open_checkpoint(folder), ARCHS[architecture], rotations)


@pytest.mark.parametrize("rotations", [("R1",), ("R2",), ("R1", "R2")], ids="+".join)
@pytest.mark.parametrize("architecture, config", CASES)
def test_logits_stay(architecture, config, rotations, tmp_path):
    """Of transformers' model, filled with the rotated tensors."""
    folder = random_checkpoint(tmp_path, architecture, **config)
    before = logits(folder)
    checkpoint = rotated(folder, architecture, *rotations)
    model = AutoModelForCausalLM.from_pretrained(
        folder, tie_word_embeddings=checkpoint.config["tie_word_embeddings"]
    )
    state = {name: checkpoint.rotated(name, torch.float32) for name in checkpoint.names()}
    model.load_state_dict(state, strict=checkpoint.config["tie_word_embeddings"] is False)
    with torch.no_grad():
        after = model(IDS % 258).logits
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5 * float(before.abs().max()))
    moved = [
        name
        for name in state
        if checkpoint.base.has(name) and not state[name].equal(checkpoint.base.tensor(name))
    ]
    gate = Gate(checkpoint, ARCHS[architecture], torch.device("cpu"))
    for index in range(2):
        gate.check(index, read_layer(checkpoint, f"model.layers.{index}"))
    kinds = {name.rpartition(".layers.")[2].partition(".")[2] for name in moved if ".layers." in name}
    assert {"self_attn.v_proj.weight", "self_attn.o_proj.weight"} <= kinds
    assert ("mlp.gate_proj.weight" in kinds) == ("model.norm.weight" in moved) == ("R1" in rotations)


def test_dtypes_and_the_head(tmp_path):
    """What is to be rounded comes in fp32, all else as it is stored; a tied head is there and differs."""
    folder = random_checkpoint(tmp_path, "Qwen3ForCausalLM", dtype=torch.bfloat16, tie_word_embeddings=True)
    base, name = open_checkpoint(folder), "model.layers.0.mlp.up_proj.weight"
    checkpoint = RotatedCheckpoint(base, ARCHS["Qwen3ForCausalLM"], ("R1",), frozenset({name}))
    assert checkpoint.tensor(name).dtype == torch.float32
    assert all(checkpoint.tensor(n).dtype == base.tensor(n).dtype for n in base.names() if n != name)
    assert set(checkpoint.names()) - set(base.names()) == {"lm_head.weight"}
    head, embedding = (checkpoint.tensor(f"{n}.weight") for n in ("lm_head", "model.embed_tokens"))
    assert head.shape == embedding.shape and not head.equal(embedding)
    assert checkpoint.num_bytes == base.num_bytes + head.nbytes
    assert base.config["tie_word_embeddings"] and not checkpoint.config["tie_word_embeddings"]
    with pytest.raises(CheckpointError, match=name):  # as a reader asks for it
        checkpoint.tensor(name, "N K", N=3)


def test_rows_are_turned_block_by_block(tmp_path, monkeypatch):
    checkpoint = rotated(random_checkpoint(tmp_path, "LlamaForCausalLM"), "LlamaForCausalLM", "R1")
    whole = {name: checkpoint.rotated(name, torch.float32) for name in checkpoint.names()}
    monkeypatch.setattr(rotate, "BLOCK", 1000)
    for name, tensor in whole.items():
        torch.testing.assert_close(checkpoint.rotated(name, torch.float32), tensor, rtol=1e-6, atol=1e-7)


def test_a_rotation_that_changes_the_function_is_caught(tmp_path, monkeypatch):
    """Here a writer to the stream that is not turned."""
    checkpoint = rotated(random_checkpoint(tmp_path, "LlamaForCausalLM"), "LlamaForCausalLM", "R1")
    whole = RotatedCheckpoint.rotated

    def forgetful(self, name, dtype):
        return self.base.tensor(name).to(dtype) if "1.mlp.down_proj" in name else whole(self, name, dtype)

    monkeypatch.setattr(RotatedCheckpoint, "rotated", forgetful)
    gate = Gate(checkpoint, ARCHS["LlamaForCausalLM"], torch.device("cpu"))
    gate.check(0, read_layer(checkpoint, "model.layers.0"))
    with pytest.raises(QrtError, match=r"model\.layers\.1: rotating changed what the layer adds"):
        gate.check(1, read_layer(checkpoint, "model.layers.1"))


def test_refusals(llama, tmp_path, capsys):
    for entries, message in (
        ({"rotations": ["R3"]}, "got R3, wanted some of R1, R2"),
        ({"rotations": "R1"}, "a list"),
    ):
        with pytest.raises(ConfigError, match=message):
            recipe_of(entries)
    with pytest.raises(ConfigError, match="each once"):
        recipe_of({"rotations": ["R1", "R1"]})
    checkpoint = open_checkpoint(llama)
    checkpoint._shard_of["model.layers.0.pre_feedforward_layernorm.weight"] = checkpoint._shard_of[
        "model.norm.weight"
    ]
    checkpoint.spec = lambda name: type(checkpoint).spec(checkpoint, "model.norm.weight")
    with pytest.raises(UnsupportedError, match="pre_feedforward_layernorm.weight is a norm whose readers"):
        RotatedCheckpoint(checkpoint, ARCHS["LlamaForCausalLM"], ("R1",))


def command(model, calib, out, *flags):
    words = ["--model", model, "--calib", calib, "--n-samples", "4", "--seqlen", "64", "--eval-samples", "1"]
    return [str(word) for word in (*words, "--out", out, *flags)]


@pytest.mark.parametrize("scheme", ["w4a16", "w8a16", "w8a8"])
def test_the_result_is_a_plain_checkpoint(scheme, make_checkpoint, calib, tmp_path):
    """transformers loads it; random weights, which are spread already, lose what they lose without rotations;
    an ignored Linear keeps its dtype."""
    model = make_checkpoint("LlamaForCausalLM", tie_word_embeddings=True)
    before, off = logits(model), []
    for name, flags in (("plain", []), ("out", BOTH)):
        words = [*flags, "--scheme", scheme, "--ignore", "model.layers.1.mlp.down_proj"]
        assert cli.main(command(model, calib, tmp_path / name, *words)) == 0
        off.append(float((logits(tmp_path / name) - before).norm()))
    assert off[1] < 1.15 * off[0]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert (
        stored["model.layers.1.mlp.down_proj.weight"].dtype
        == stored["lm_head.weight"].dtype
        == torch.bfloat16
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert config["quantization_config"]["qrt"]["rotations"] == ["R1", "R2"]
    report = json.loads((tmp_path / "out" / "qrt_report.json").read_text())
    assert report["recipe"]["rotations"] == ["R1", "R2"] and any(
        "head differs" in f for f in report["findings"]
    )


@torch.no_grad()
@pytest.mark.parametrize("flags", ["", "--ignore o_proj", "--method rtn"])
def test_the_reported_cost_is_that_against_the_original(flags, make_checkpoint, calib, tmp_path):
    """What rotating loses where its result is stored in 16 bits is part of it."""
    source = make_checkpoint("Qwen2ForCausalLM", tie_word_embeddings=True)
    words = [*BOTH, "--bits", "8", "--group-size", "64", *flags.split()]
    assert cli.main(command(source, calib, tmp_path / "out", *words)) == 0
    count = 1 if "rtn" in flags else 5
    windows = cut_windows([calib.read_text()], load_tokenizer(source), count, 64, seed=0)[-1:]
    p, q = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(windows)
        .logits[:, :-1]
        .log_softmax(-1)
        for folder in (source, tmp_path / "out")
    )
    cost = json.loads((tmp_path / "out" / "qrt_report.json").read_text())["cost"]
    assert cost["kl"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=0.02)
    for name, own in (("exact_ppl", p), ("ppl", q)):
        loss = -own.gather(-1, windows[:, 1:, None]).mean()
        assert cost[name] == pytest.approx(float(loss.exp()), rel=1e-3), name


def test_an_interrupted_run_goes_on_to_the_same_bytes(llama, calib, tmp_path, monkeypatch):
    whole = Run.layer

    def stopped(self, index):
        if index:
            raise KeyboardInterrupt
        return whole(self, index)

    assert cli.main(command(llama, calib, tmp_path / "whole", *BOTH)) == 0
    monkeypatch.setattr(Run, "layer", stopped)
    assert cli.main(command(llama, calib, tmp_path / "parts", *BOTH)) == 130
    monkeypatch.undo()
    assert cli.main(command(llama, calib, tmp_path / "parts", *BOTH)) == 0
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "parts" / path.name).read_bytes(), path.name
