"""`qrt-calibrate`: a Hugging Face checkpoint in, a quantized one out; `convert`: from format to format."""

from __future__ import annotations

import logging
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from qrt.cli import ArgumentParser, add_hub_flags, run_main
from qrt.location import EXPECTED, short_name

if TYPE_CHECKING:
    from qrt_calibrate.recipe.recipe import Recipe

WIDTH = 110  # of the table in a file or a pipe, where there is no terminal to fit


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    return run_main(lambda: _main(words))  # what needs torch is imported in there: Ctrl-C may come meanwhile


def _main(words: list[str]) -> int:
    if words[:1] == ["convert"]:
        from qrt_calibrate import convert

        return convert.main(words[1:])
    _run(_parser().parse_args(words))
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="qrt-calibrate",
        description="Quantize a Hugging Face checkpoint into a new one (compressed-tensors), layer by layer. "
        "`qrt-calibrate convert --help` is about changing the format of a quantized checkpoint.",
    )
    add = parser.add_argument
    add("--model", required=True, help=EXPECTED)
    add_hub_flags(parser)
    add("--out", metavar="DIR", help="folder to make (default: the model's name with -w4, -w8 or -w8a8); an "
        "interrupted run goes on from DIR.partial")  # fmt: skip
    add(
        "--device",
        help="cpu, a GPU as cuda:1, or several that share the windows, as cuda:0,cuda:2 (default: cuda, "
        "which is all GPUs, or else cpu)",
    )
    add(
        "--recipe",
        metavar="FILE",
        help="YAML file with flags' names as keys; flags win over it (default: none)",
    )
    add(
        "--dry-run",
        action="store_true",
        help="say what it takes, time too, and where the result loads; then stop",
    )
    add(
        "--push-to-hub",
        metavar="ORG/NAME",
        help="upload the result; wants a token, of `hf auth login` or HF_TOKEN (default: no upload)",
    )
    _add_grid(parser)
    _add_method(parser)
    return parser


def _add_grid(parser: ArgumentParser) -> None:
    from qrt.quant.weight import WEIGHT_ONLY, WEIGHT_SCHEMES
    from qrt.quant.weight.head import HEAD_BITS

    grid = parser.add_argument_group("format")
    grid.add_argument(
        "--bits", type=int, choices=WEIGHT_ONLY, help="4, 8: short for --scheme w4a16, w8a16 (default: 4)"
    )
    schemes = [name for name in WEIGHT_SCHEMES if name != "fp16"]
    grid.add_argument("--scheme", choices=schemes, help="weight and activation bits (default: w4a16)")
    grid.add_argument(
        "--group-size",
        type=int,
        metavar="G",
        help="inputs per scale, -1: one per channel (default: the largest of 128, 64 and 32 that divides the "
        "inputs of all Linears to quantize)",
    )
    grid.add_argument(
        "--head-bits", type=int, choices=HEAD_BITS,
        help="8: the head in int8 too, one scale per channel, rounded to nearest (unties it; default: 16)",
    )  # fmt: skip
    specs = {name: spec for name in schemes if (spec := WEIGHT_SCHEMES[name].spec)}
    symmetric, asymmetric = (
        [name for name, spec in specs.items() if spec.symmetric is kind] for kind in (True, False)
    )
    zero = grid.add_mutually_exclusive_group()
    zero.add_argument(
        "--sym",
        action="store_const",
        const=True,
        dest="symmetric",
        help=f"no zero points (default for {', '.join(symmetric)} and mixtures of experts)",
    )
    zero.add_argument(
        "--asym",
        action="store_const",
        const=False,
        dest="symmetric",
        help=f"zero points (default for {', '.join(asymmetric)})",
    )
    grid.add_argument(
        "--ignore", action="extend", nargs="+", metavar="PATTERN",
        help="leave Linears as they are: globs over names, whole or from a dot (down_proj), or re:<regex> "
        "(default: none)",
    )  # fmt: skip
    grid.add_argument(
        "--override", action="extend", nargs="+", metavar="PATTERN=SCHEME",
        help="Linears in another scheme, on its default grid, or fp16; of several that match the last counts "
        "(default: none)",
    )  # fmt: skip
    budget = grid.add_mutually_exclusive_group()
    budget.add_argument(
        "--target-bits", type=float, metavar="B",
        help="4, 8 or 16 bits for each fused Linear by its measured cost, at most B bits per weight on "
        "average; counts scales and zero points of all Linears in the layers, ignored ones too, but no "
        "embedding, head, norms or biases (default: none, all are of --scheme)",
    )  # fmt: skip
    budget.add_argument(
        "--max-size",
        type=float,
        metavar="GB",
        help="the same with a budget in 10^9 bytes for all tensors of the result, embedding and head "
        "included; the index's total_size and the report count them in the same way (default: none)",
    )


def _add_method(parser: ArgumentParser) -> None:
    from qrt.text.data.files import KINDS
    from qrt_calibrate.recipe.method import METHODS
    from qrt_calibrate.recipe.recipe import Recipe

    method = parser.add_argument_group("method")
    method.add_argument(
        "--method",
        choices=METHODS,
        help="default: awq-yaqa for w4a16, awq-gptq for w8a16, smoothquant-gptq for w8a8; rtn reads no text "
        "(unless --eval-samples, --target-bits or --max-size asks for a measurement)",
    )
    method.add_argument(
        "--calib", metavar="DATA",
        help=f"file of {KINDS}, folder of such files, or dataset, ORG/NAME[@REVISION][:CONFIG[:SPLIT]]; a "
        "row holds a text, a chat, or a question and its answer (default: Python's own docstrings)",
    )  # fmt: skip
    for flag, kind, field, what in (
        ("--n-samples", int, "n_samples", "windows of text"),
        ("--seqlen", int, "seqlen", "tokens of a window"),
        ("--seed", int, "seed", "of the choice of windows"),
        ("--damp", float, "damping", "share of the Hessian's mean diagonal that GPTQ adds to it"),
    ):
        method.add_argument(
            flag, type=kind, dest=field, help=f"{what} (default: {getattr(Recipe, field)})", metavar="N"
        )
    method.add_argument(
        "--eval-samples", type=int, metavar="N",
        help=f"further windows that measure the cost, 0: none (default: {Recipe.eval_samples}; 0 for rtn)",
    )  # fmt: skip
    method.add_argument(
        "--tune", type=int, metavar="STEPS",
        help="then train codes, scales and norms of the whole model on text that the original writes; "
        "hundreds of steps, best on a GPU (default: 0)",
    )  # fmt: skip
    method.add_argument(
        "--no-exact-fold", action="store_const", const=False, dest="exact_folds",
        help="scales that are no powers of two: folds round norms and biases",
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
    from rich.console import Console  # here, because transformers takes seconds

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
        print(f"time: {takes} on {where} with nothing else running, by a try of some parts of a layer")
        return
    name = short_name(arguments.model)
    out = Path(arguments.out or f"{name}-{recipe.scheme.removesuffix('a16')}")
    width = None if sys.stdout.isatty() else WIDTH
    calibrate(arguments.model, recipe, out, *devices).print(Console(width=width))
    if arguments.push_to_hub:
        hub.push(out, arguments.push_to_hub)


if __name__ == "__main__":
    sys.exit(main())
