"""`qrt-calibrate`: a Hugging Face checkpoint in, a quantized one out."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import torch
from rich.console import Console

from qrt.cli import ArgumentParser, run_main
from qrt.errors import ConfigError
from qrt.quant.weight import WEIGHT_SCHEMES
from qrt_calibrate.method import METHODS
from qrt_calibrate.pipeline import calibrate
from qrt_calibrate.recipe import SCHEME_OF_BITS, Recipe, default_method, grid_of, scheme_of


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = _parser().parse_args(argv)
    return run_main(lambda: _run(arguments))


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="qrt-calibrate",
        description="Quantize a Hugging Face checkpoint into a new one (compressed-tensors), layer by layer.",
    )
    add = parser.add_argument
    add("--model", required=True, help="checkpoint folder, or 'tiny' for the bundled model")
    add("--out", metavar="DIR", help="folder to make (default: the model's name with -w4, -w8 or -w8a8)")
    add("--device", help="where to compute (default: cuda if there is one, else cpu)")

    grid = parser.add_argument_group("format")
    grid.add_argument("--bits", type=int, choices=SCHEME_OF_BITS, help="short for --scheme w4a16 or w8a16")
    schemes = [name for name in WEIGHT_SCHEMES if name != "fp16"]
    grid.add_argument("--scheme", choices=schemes, help="weight and activation bits (default: w4a16)")
    grid.add_argument("--group-size", type=int, metavar="G", help="inputs per scale (default: 128)")
    zero = grid.add_mutually_exclusive_group()
    zero.add_argument("--sym", action="store_const", const=True, dest="symmetric", help="no zero points")
    zero.add_argument("--asym", action="store_const", const=False, dest="symmetric", help="zero points")
    grid.add_argument(
        "--ignore", action="append", default=[], metavar="PATTERN",
        help="leave Linears as they are: a glob over names, whole or from a dot (down_proj); may be repeated",
    )  # fmt: skip

    method = parser.add_argument_group("method")
    method.add_argument("--method", choices=METHODS, help="default: awq, for w8a8 rtn (needs no text)")
    method.add_argument("--calib", metavar="FILE", help="calibration text (default: Python's own docstrings)")
    method.add_argument(
        "--n-samples", type=int, default=Recipe.n_samples, help="windows (default: %(default)s)"
    )
    method.add_argument(
        "--seqlen", type=int, default=Recipe.seqlen, help="tokens each (default: %(default)s)"
    )
    method.add_argument("--seed", type=int, default=Recipe.seed, help="which windows (default: %(default)s)")
    return parser


def _run(arguments: Namespace) -> None:
    scheme = scheme_of(arguments.bits, arguments.scheme)
    spec = grid_of(scheme, arguments.group_size, arguments.symmetric)
    recipe = Recipe(
        scheme=scheme,
        spec=spec,
        method=arguments.method or default_method(spec),
        ignore=tuple(arguments.ignore),
        calib=arguments.calib,
        n_samples=arguments.n_samples,
        seqlen=arguments.seqlen,
        seed=arguments.seed,
    )
    name = Path(arguments.model).resolve().name
    out = Path(arguments.out or f"{name}-{scheme.removesuffix('a16')}")
    calibrate(arguments.model, recipe, out, _device(arguments.device)).print(Console())


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device: got {name!r}, wanted e.g. cuda, cuda:1 or cpu") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device: got {name!r}, but there is no CUDA device; use --device cpu")
    return device
