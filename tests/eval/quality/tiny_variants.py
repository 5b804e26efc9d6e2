"""Copies of the bundled model with one difference."""

import json
import shutil

import torch

from qrt.assets import model_path
from tiny_models import altered


def shorter_context(folder):
    """The bundled model with a context of 64 tokens."""
    shutil.copytree(model_path("tiny"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    return folder


def fewer_merges(folder):
    """The bundled model with a tokenizer that lacks the last merges of its own."""
    shutil.copytree(model_path("tiny"), folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-200]
    path.write_text(json.dumps(tokenizer))
    return folder


def noisy(folder):
    """The bundled model with noise in one projection."""

    def change(tensors):
        weight = tensors["model.layers.2.mlp.down_proj.weight"]
        torch.manual_seed(1)
        weight += 0.02 * torch.randn_like(weight)

    return altered(model_path("tiny"), folder, change)
