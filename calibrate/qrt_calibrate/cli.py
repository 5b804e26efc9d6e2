"""Command line of `qrt-calibrate`: quantize a Hugging Face checkpoint, or convert a quantized one."""

from __future__ import annotations

import logging
import sys
import time
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from qrt.cli import ArgumentParser, add_flags, run_main
from qrt.config import EngineConfig
from qrt.model_files.location import EXPECTED, short_name

if TYPE_CHECKING:
    from qrt_calibrate.recipe.recipe import Recipe

WIDTH = 110  # columns of the table when the output is a file or a pipe


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    return run_main(lambda: _main(words))  # imports torch inside, because Ctrl-C may come meanwhile


def _main(words: list[str]) -> int:
    if words[:1] == ["convert"]:
        from qrt_calibrate import convert

        return convert.main(words[1:])
    from qrt_calibrate.recipe.recipe import Recipe

    unset = Namespace(override=None, **dict.fromkeys(own.name for own in fields(Recipe)))
    _run(_parser().parse_args(words, unset))  # flags that are not given stay None: a recipe file may set them
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="qrt-calibrate",
        description="Quantize a Hugging Face checkpoint, layer by layer, and write the result as a new "
        "checkpoint (compressed-tensors). To change the format of a quantized checkpoint, see "
        "`qrt-calibrate convert --help`.",
    )
    add = parser.add_argument
    add("--model", required=True, help=EXPECTED)
    add_flags(parser, EngineConfig, "revision download_dir")
    add(
        "--out", metavar="DIR",
        help="folder to make; an interrupted run leaves its finished layers in DIR.partial, and the same "
        "command continues from there (default: the model's name with -w4, -w8, -w8a8 or -w4a8)",
    )  # fmt: skip
    add(
        "--device",
        help="cpu, one GPU (cuda:1), or several that share the windows (cuda:0,cuda:2); cuda means all GPUs "
        "(default: cuda if there is a GPU, else cpu)",
    )
    add(
        "--recipe", metavar="FILE",
        help="YAML file whose keys are the names of flags; flags on the command line win (default: none)",
    )  # fmt: skip
    add(
        "--dry-run", action="store_true",
        help="print memory, sizes, time and where the result will load, then stop; writes nothing",
    )  # fmt: skip
    add(
        "--push-to-hub", metavar="ORG/NAME",
        help="upload the result to the Hub; needs a token from `hf auth login` or HF_TOKEN (default: "
        "no upload)",
    )  # fmt: skip
    _add_grid(parser)
    _add_method(parser)
    return parser


def _add_grid(parser: ArgumentParser) -> None:
    from qrt.quant.weight import quantized, weight_only
    from qrt_calibrate.recipe.recipe import Recipe

    grid = parser.add_argument_group("format")
    add = grid.add_argument
    widths = weight_only()
    short = f"short for --scheme {' or '.join(widths.values())} (default: 4)"
    add("--bits", type=int, choices=widths, help=short)
    specs = quantized()
    add("--scheme", choices=list(specs), help="bits of weights and activations (default: w4a16)")
    add(
        "--group-size", type=int, metavar="G",
        help="inputs that share a scale; -1: all of an output channel (default: the largest of 128, 64 "
        "and 32 that divides the inputs of every Linear to quantize)",
    )  # fmt: skip
    add_flags(grid, Recipe, "head_bits")
    symmetric, asymmetric = (
        ", ".join(name for name, spec in specs.items() if spec.symmetric is kind) for kind in (True, False)
    )
    zero = grid.add_mutually_exclusive_group()
    zero.add_argument(
        "--sym", action="store_const", const=True, dest="symmetric",
        help=f"store no zero points (default for {symmetric} and mixtures of experts)",
    )  # fmt: skip
    zero.add_argument(
        "--asym", action="store_const", const=False, dest="symmetric",
        help=f"store zero points (default for {asymmetric})",
    )  # fmt: skip
    add_flags(grid, Recipe, "ignore", action="extend")
    add_flags(grid, Recipe, "overrides", action="extend", dest="override")
    add_flags(grid.add_mutually_exclusive_group(), Recipe, "target_bits max_size")


def _add_method(parser: ArgumentParser) -> None:
    from qrt_calibrate.recipe.recipe import Recipe

    group = parser.add_argument_group("method")
    names = "method calib n_samples seqlen seed damping eval_samples moe_calibrate_all_experts tune"
    add_flags(group, Recipe, names)
    group.add_argument(
        "--no-exact-fold", action="store_const", const=False, dest="exact_folds",
        help="allow channel scales that are not powers of two, which round norms and biases (default: powers "
        "of two only)",
    )  # fmt: skip


def _run(arguments: Namespace) -> None:
    from qrt_calibrate.job.plan import source_folder
    from qrt_calibrate.recipe.recipe_file import read_recipe, recipe_of, with_flags

    entries = read_recipe(Path(arguments.recipe)) if arguments.recipe else {}
    given = {key: value for key, value in vars(arguments).items() if value is not None}
    for key in ("model", "revision", "download_dir", "out", "device", "recipe", "push_to_hub", "dry_run"):
        given.pop(key, None)
    recipe = recipe_of(with_flags(entries, given))
    if arguments.push_to_hub:
        from qrt_calibrate import hub

        hub.check(arguments.push_to_hub)
    place = {"revision": arguments.revision, "download_dir": arguments.download_dir}
    arguments.model = source_folder(arguments.model, **place)
    _work(arguments, recipe)


def _work(arguments: Namespace, recipe: Recipe) -> None:
    from rich.console import Console  # imported here, because transformers takes seconds

    from qrt.quant.checkpoint import open_checkpoint
    from qrt_calibrate import hub
    from qrt_calibrate.estimate.duration import expected_seconds, in_words
    from qrt_calibrate.estimate.preflight import preflight
    from qrt_calibrate.job.plan import plan
    from qrt_calibrate.model.devices import devices_of
    from qrt_calibrate.pipeline import calibrate, prepare

    devices = devices_of(arguments.device)
    if arguments.dry_run:
        job = plan(open_checkpoint(arguments.model), recipe, *devices)
        began = time.perf_counter()
        _, budget = prepare(job)
        reading = time.perf_counter() - began
        print(*([budget.line(job.recipe.grid)] if budget else []), *preflight(job).lines(), sep="\n")
        takes, where = in_words(reading + expected_seconds(job, budget)), ", ".join(map(str, devices))
        print(f"time: {takes} on {where} with nothing else running, measured on parts of a layer")
        return
    name = short_name(arguments.model)
    out = Path(arguments.out or f"{name}-{recipe.scheme.removesuffix('a16')}")
    width = None if sys.stdout.isatty() else WIDTH
    calibrate(arguments.model, recipe, out, *devices).print(Console(width=width))
    if arguments.push_to_hub:
        hub.push(out, arguments.push_to_hub)


if __name__ == "__main__":
    sys.exit(main())
