"""Say which kernel runs each product of a model, and why: `qrt-eval kernels --explain`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

import torch
from rich.table import Table

from qrt.config import EngineConfig
from qrt.engine.build import model_dtype
from qrt.engine.step.graphs import default_rows, default_tokens
from qrt.errors import ConfigError
from qrt.model.decoder import Decoder
from qrt.model.loader import dummy_model
from qrt.model.products import explain_products
from qrt.model.random import random_model
from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.weight import WEIGHT_SCHEMES
from qrt_eval.inputs.shapes import shape
from qrt_eval.results.console import show

LAYERS = 2  # of a shape: the first and one behind another; all others are like the second
TOKENS = (*default_rows(512), *default_tokens(8192))
TIMED = ("op", "decode", "prefill", "compare", "json")  # flags of timings


def run(arguments: Namespace, device: torch.device) -> None:
    """Run `qrt-eval kernels --explain`: print a table for each model, a row per kernel."""
    for name in TIMED:
        if getattr(arguments, name):
            raise ConfigError(f"--{name}: expected timings, got --explain; leave one of them out")
    for title, model in _models(arguments, device):
        show(_table(title, model, arguments.tokens or TOKENS))


def _models(arguments: Namespace, device: torch.device) -> Iterator[tuple[str, Decoder]]:
    """Yield the checkpoint, with random weights, or two layers of a shape in every weight scheme."""
    if arguments.model:
        checkpoint = open_checkpoint(arguments.model, weights=False)
        dtype = model_dtype(EngineConfig(arguments.model), checkpoint, device)
        yield arguments.model, dummy_model(checkpoint, device=device, dtype=dtype)
        return
    config = shape(arguments.shape).of_layers(LAYERS)
    for scheme in WEIGHT_SCHEMES:
        bits = 16 if WEIGHT_SCHEMES[scheme].spec is None else 8
        model = random_model(config, scheme, head_bits=bits, device=device, dtype=torch.bfloat16)
        yield f"{arguments.shape} in {scheme}", model


def _table(title: str, model: Decoder, tokens: tuple[int, ...] | list[int]) -> Table:
    """Return which kernel runs each product, for each range of tokens."""
    table = Table(title=f"{title}, on {_name(model.device)}")
    for heading in ("product", "scheme", "K x N", "tokens", "kernel"):
        table.add_column(heading, ratio=1 if heading == "kernel" else None)
    for product in explain_products(model, tokens):
        table.add_row(product.place, product.scheme, product.size, product.range, product.why)
    return table


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
