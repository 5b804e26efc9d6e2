"""Write a quantized checkpoint in another format; every weight keeps its value."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from qrt.arch import Arch
from qrt.arch.pooling import read_model
from qrt.arch.read import read_arch
from qrt.cli import ArgumentParser, add_flags, run_main
from qrt.config import EngineConfig
from qrt.definitions.names import place_names, unread
from qrt.errors import CheckpointError, UnsupportedError
from qrt.model_files.folder import read_config
from qrt.model_files.location import EXPECTED, model_folder, model_name
from qrt.quant.checkpoint import Checkpoint, awq, gptq, open_checkpoint
from qrt.quant.checkpoint.compressed_tensors import quantization_config, targets_of
from qrt.quant.checkpoint.config_group import layout_of
from qrt.quant.checkpoint.format import FLOATS, LEFT_OVER, codes_of, is_plain
from qrt.quant.checkpoint.making.output import OutputFolder
from qrt.quant.module_names import HEAD, REGEX, inner_names, inside_pattern, patterns_of
from qrt.quant.packing import WORD_BITS
from qrt.quant.spec import Codes, Granularity, QuantSpec
from qrt.quant.weight import WEIGHT_SCHEMES, WeightData
from qrt.quant.weight import weight_only as schemes_of_weights

TARGETS = ("compressed-tensors", "awq", "gptq")
Grids = Mapping[str, tuple[str, QuantSpec]]


def main(argv: list[str]) -> int:
    """Entry point of the subcommand; returns the exit code."""
    parser = ArgumentParser(prog="qrt-calibrate convert", description=__doc__)
    parser.add_argument("--model", required=True, help=f"quantized checkpoint: {EXPECTED}")
    add_flags(parser, EngineConfig, "revision download_dir")
    parser.add_argument("--to", required=True, choices=TARGETS, help="format to write; gptq means gptq_v2")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to make")
    parser.add_argument(
        "--weight-only", action="store_true",
        help="leave activations as they are: w4a8 becomes w4a16, and w8a8 w8a16 (default: off)",
    )  # fmt: skip
    arguments = parser.parse_args(argv)

    def work() -> None:
        place = {"revision": arguments.revision, "download_dir": arguments.download_dir}
        model = model_folder(arguments.model, check=_check, **place)
        count = convert(model, arguments.to, Path(arguments.out), weight_only=arguments.weight_only)
        print(f"{count} Linears written to {arguments.out}")

    return run_main(work)


def _check(folder: Path) -> None:
    read_arch(read_config(folder), model_name(folder))


def convert(model: str | Path, target: str, out: Path, *, weight_only: bool = False) -> int:
    """Write checkpoint `model` into the new folder `out` in format `target`; return how many Linears changed.

    With `weight_only` Linears that round their tokens are written as ones that do not, of as many bits.

    Raises UnsupportedError, naming the Linear and the reason, where the format cannot hold a weight exactly:

    compressed-tensors  act-order, or a scale in another dtype than the model's
    awq                 other than 4 bits, or act-order
    awq and gptq        a quantized head, Linears on different grids, scales that fp16 does not hold, or sizes
                        that do not fill their 32-bit words
    """
    source = open_checkpoint(model)
    if not source.quantization:
        raise UnsupportedError(f"{source.path}: not quantized; qrt-calibrate --model quantizes it")
    arch = place_names(read_model(source.config, source.path), source)
    modules, dtype = _linears(source, arch), _dtype(source, arch)
    _expect_plain(source, arch)
    if target != "compressed-tensors" and arch.names.head in modules:
        if source.linear(arch.names.head)[1].scale is not None:
            why = "engines read its head in 16 bits; calibrate the original again, with --head-bits 16"
            raise _refusal(arch.names.head, target, why)
    folder = OutputFolder(out, source, None, max_shard_bytes=5_000_000_000)
    folder.begin()
    try:
        grids = _write_linears(folder, source, modules, target, dtype, weight_only)
        own = tuple(f"{module}." for module in grids)
        kept = {name for name in source.names() if not name.startswith(own) and not _is_left(source, name)}
        for name in sorted(kept):
            folder.add({name: source.tensor(name)})
        if arch.names.head in grids:  # not the embedding any more, whatever the source said
            source.config["tie_word_embeddings"] = False
        routers = [f"{layer}.{name}" for layer, own in _layers(arch) for name in own.routers]
        heads = () if arch.names.head in grids else (HEAD, arch.names.head)
        others = dict.fromkeys((*heads, *modules, *routers))
        left_out = [module for module in others if module not in grids]
        settings = settings_of(target, grids, left_out, unread(arch, source))
    except BaseException:
        folder.abandon()
        raise
    folder.publish(settings, {*source.names()} - kept)
    return len(grids)


def _linears(source: Checkpoint, arch: Arch) -> list[str]:
    """Return the full names of the Linears in the layers, and of a head that is stored."""
    modules = [f"{layer}.{name}" for layer, own in _layers(arch) for name in own.projections]
    stored = {name.rpartition(".")[0] for name in source.names()}
    if arch.experts is not None and (missing := [module for module in modules if module not in stored]):
        raise UnsupportedError(
            f"{source.path}: expected a Linear {missing[0]}; experts in one tensor are not converted"
        )
    if any(name.startswith(f"{arch.names.head}.") for name in source.names()):
        modules.append(arch.names.head)
    return modules


def _expect_plain(source: Checkpoint, arch: Arch) -> None:
    """Raise UnsupportedError for an embedding or a router that is quantized."""
    routers = (f"{layer}.{name}" for layer, own in _layers(arch) for name in own.routers)
    for module in (arch.names.embed, *routers):
        if (codes := codes_of(source, module)) is not None:
            raise UnsupportedError(
                f"{source.path}: {codes}: expected quantized Linears, got a quantized {module}, which "
                "engines read in 16 bits; calibrate the unquantized model"
            )


def _is_left(source: Checkpoint, name: str) -> bool:
    """Return whether a tensor is left over beside a plain weight."""
    module, _, ending = name.rpartition(".")
    return ending in LEFT_OVER and is_plain(source, module)


def _layers(arch: Arch) -> list[tuple[str, Arch]]:
    """Return the name of each layer, and the architecture as that layer has it."""
    return [(f"{arch.names.layers}.{index}", arch.at(index)) for index in range(arch.num_layers)]


def _dtype(source: Checkpoint, arch: Arch) -> torch.dtype:
    """Return the model's dtype; CheckpointError for one that scales cannot have."""
    dtype = getattr(torch, arch.dtype, None)
    if dtype not in FLOATS:
        raise CheckpointError(
            f"{source.path}/config.json: expected dtype float16, bfloat16 or float32, got {arch.dtype!r}"
        )
    return dtype


def _write_linears(
    folder: OutputFolder, source: Checkpoint, modules: Sequence[str], target: str, dtype: torch.dtype,
    weight_only: bool,
) -> dict[str, tuple[str, QuantSpec]]:  # fmt: skip
    """Write those of `modules` that are quantized in format `target`; return the grid of each."""
    grids: dict[str, tuple[str, QuantSpec]] = {}
    for module in tqdm(modules, "Converting", unit="Linear"):
        scheme, weight = source.linear(module)
        if weight_only and WEIGHT_SCHEMES[scheme].int8_tokens:
            scheme = schemes_of_weights()[weight.bits]
        if weight.scale is None:
            if not source.has(f"{module}.weight") or source.spec(f"{module}.weight").dtype.itemsize < 2:
                raise UnsupportedError(f"{module}: fp8 weights are not converted; quantize the original")
            continue
        grids[module] = scheme, spec_of(weight)
        first = next(iter(grids))
        if grids[module] != grids[first] and target != "compressed-tensors":
            raise _refusal(module, target, f"the format holds one grid, and {first} has another")
        bias = {} if weight.bias is None else {"bias": weight.bias}
        tensors = encode(target, module, scheme, weight, dtype) | bias
        folder.add({f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()})
    return grids


def spec_of(weight: WeightData) -> QuantSpec:
    """Return the grid of a quantized weight."""
    assert weight.scale is not None
    groups, kind = weight.scale.shape[1], (weight.bits, weight.zero is None)
    if groups == 1:
        return QuantSpec(*kind, Granularity.CHANNEL, codes=weight.codes)
    return QuantSpec(*kind, Granularity.GROUP, weight.in_features // groups, weight.codes)


def encode(
    target: str, module: str, scheme: str, weight: WeightData, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the tensors of one Linear, by suffix, without its bias."""
    assert weight.scale is not None
    if target == "compressed-tensors":
        if weight.perm is not None:
            raise _refusal(module, target, "its inputs are in activation order, which needs a group index")
        if not torch.equal(weight.scale.to(dtype).to(weight.scale.dtype), weight.scale):
            raise _refusal(
                module, target, f"loaders round its {weight.scale.dtype} scales to the model's {dtype}"
            )
        data = WeightData(weight.values, weight.scale.to(dtype), weight.zero, bits=weight.bits)
        return layout_of(scheme).encode(data)
    if not torch.equal(weight.scale.half().float(), weight.scale.float()):
        raise _refusal(module, target, "fp16, which the format stores, does not hold its scales")
    integers = weight.codes is Codes.INTEGERS and weight.bits in gptq.ONES
    if WEIGHT_SCHEMES[scheme].int8_tokens or not integers:
        remedy = "; --weight-only leaves tokens as they are" if integers else ""
        raise _refusal(module, target, f"the format has no {scheme}{remedy}")
    if target == "awq":
        if weight.bits != awq.BITS or weight.perm is not None or weight.out_features % 8:
            raise _refusal(module, target, "it holds 4-bit weights in input order, 8 outputs a word")
        return awq.encode(weight)
    word = WORD_BITS // weight.bits
    for name, size in (("inputs", weight.in_features), ("outputs", weight.out_features)):
        if size % word:
            raise _refusal(module, target, f"a word holds {word} of its {size} {name}")
    return gptq.encode(weight)


def settings_of(target: str, grids: Grids, left_out: Sequence[str], parts: Sequence[str]) -> dict[str, Any]:
    """Return the quantization_config of the converted checkpoint.

    It leaves out the Linears `left_out`, and `parts` of the model with all that is in them.
    """
    if not grids:
        raise CheckpointError("nothing in the checkpoint is quantized")
    default = next(iter(grids.values()))
    if target == "compressed-tensors":
        others = {module: grid for module, grid in grids.items() if grid != default}
        ignore = [*targets_of(left_out), *(REGEX + inside_pattern(part) for part in parts)]
        return quantization_config(*default, ignore, {}, others, sorted(grids))
    spec = default[1]
    group = spec.group_size or -1
    if target == "awq":
        # as ends, beginnings or parts of names, not as expressions
        names = [name for module in left_out for name in inner_names(module)]
        names += [name for part in parts for name in (part, f"model.{part}")]
        left = list(dict.fromkeys(names))
        settings = {"version": "gemm", "zero_point": not spec.symmetric, "modules_to_not_convert": left}
    else:
        patterns = *patterns_of(left_out), *map(inside_pattern, parts)
        settings = {
            "checkpoint_format": "gptq_v2",
            "sym": spec.symmetric,
            "desc_act": True,  # readers follow g_idx, in whatever order it is
            "lm_head": False,
            "dynamic": {f"-:{pattern}": {} for pattern in patterns},
        }
    return {"quant_method": target, "bits": spec.bits, "group_size": group, **settings}


def _refusal(module: str, target: str, why: str) -> UnsupportedError:
    return UnsupportedError(f"{module}: cannot become {target} without loss: {why}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
