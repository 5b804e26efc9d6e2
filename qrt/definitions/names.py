"""The names of the tensors that an architecture reads, and whether a checkpoint holds just these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from qrt.arch import Arch
from qrt.arch.experts import Experts
from qrt.checks import first_few
from qrt.definitions.stacks import stacks
from qrt.errors import CheckpointError
from qrt.quant.checkpoint import Checkpoint
from qrt.quant.checkpoint.reader import is_unread
from qrt.quant.module_names import below, names_of

CORRECTION = "e_score_correction_bias"  # what families call the tensor that corrects scores of experts


def place_names(arch: Arch, checkpoint: Checkpoint) -> Arch:
    """Return `arch` with the names under which the checkpoint holds it.

    Checkpoints of a body alone leave its first name out ("h.0" for "transformer.h.0"), and those of models
    that read images have been saved with the text half, and the head, in several places.
    """
    names = arch.names
    modules = {name.rpartition(".")[0] for name in checkpoint.names()}
    embed = next((name for name in names_of(names.embed) if name in modules), None)
    if embed is None:
        return arch
    top = embed.removesuffix(below(embed))
    head = next((name for name in names_of(names.head) if name in modules), names.head)
    placed = replace(names.outer(lambda name: top + below(name)), head=head)
    return _stacked(replace(arch, names=placed), checkpoint)


def _stacked(arch: Arch, checkpoint: Checkpoint) -> Arch:
    """Return `arch` with experts stacked as they are stored, if they are so stored."""
    experts, own = arch.experts, None if arch.experts is None else arch.experts.stacked
    if experts is None or own is None:
        return arch
    first = f".{experts.each(0)[0]}."
    if any(first in name for name in checkpoint.names()):
        own = None
    elif own.transposed is None:
        downs = [name for name in checkpoint.names() if name.endswith(f".{experts.stored[1]}")]
        turned = bool(downs) and checkpoint.spec(downs[0]).shape[-1] != experts.width
        own = replace(own, transposed=turned)
    return replace(arch, experts=replace(experts, stacked=own))


def check_names(arch: Arch, checkpoint: Checkpoint) -> None:
    """Check that every module and bias which the config asks for is there, and nothing else."""
    wanted, biases = set(modules(arch)), set(_biases(arch))
    names = [name for name in checkpoint.names() if not is_unread(name)]
    ignored = set(_ignored(arch, names))
    names = [name for name in names if name not in ignored]
    found = {name.rpartition(".")[0] for name in names}
    if missing := sorted(wanted - found) + sorted(biases - set(names)):
        raise CheckpointError(
            f"{checkpoint.path}: {len(missing)} missing that config.json asks for: {first_few(missing)}; "
            "correct config.json or download the checkpoint again"
        )
    known = wanted | {arch.names.head} if arch.tied_embeddings else wanted
    unused = [n for n in names if n.rpartition(".")[0] not in known]
    stacks_in = _stacked_in(arch)
    unused += [n for n in names if not n.startswith(stacks_in.get(n.rpartition(".")[0], ""))]
    if arch.norm.kind == "layer":  # whose norms may have biases
        biases |= {f"{module}.bias" for module in _norms(arch)}
    added = (".bias", f".{CORRECTION}")
    extra = [n for n in names if n.endswith(added) and n not in biases and n not in unused]
    unused += [n for n in extra if checkpoint.tensor(n).any()]  # GPTQ tools store zeros where no bias is
    if unused:
        raise CheckpointError(
            f"{checkpoint.path}: {len(unused)} tensors that {arch.name} with this config.json "
            f"does not use: {first_few(unused)}; correct config.json or delete them"
        )


def unread(arch: Arch, checkpoint: Checkpoint) -> list[str]:
    """Return the parts of a checkpoint with matrices that the architecture does not read: "visual", "score".

    They are what reads images, heads of classes, and layers that predict further tokens ("layers.61").
    """
    layers, found = f"{below(arch.names.layers)}.", []
    for name in _ignored(arch, checkpoint.names()):
        inside = below(name)
        if inside.startswith(layers):
            found.append(layers + inside.removeprefix(layers).partition(".")[0])
        elif len(checkpoint.spec(name).shape) > 1:
            found.append(inside.partition(".")[0])
    return list(dict.fromkeys(found))


def _ignored(arch: Arch, names: list[str]) -> list[str]:
    """Return those of the names of tensors that the architecture does not read, wherever they lie."""
    heads = (f"{name}." for name in names_of(arch.names.head) if arch.headless)
    starts = tuple(map(below, (*arch.ignored, *heads)))
    return [name for name in names if below(name).startswith(starts)]


def modules(arch: Arch) -> Iterator[str]:
    """Names of every module of the checkpoint that holds a weight."""
    names = arch.names
    for index in range(arch.num_layers):
        yield from (f"{names.layers}.{index}.{name}" for name in _inside(arch.at(index)))
        if arch.act == "xielu":
            yield f"{names.layers}.{index}.{names.activation}"
        if names.sinks is not None:
            yield f"{names.layers}.{index}.{names.sinks}".rpartition(".")[0]
    yield from _norms(arch)
    yield names.embed
    yield from (name for name in (names.positions,) if name is not None)
    if not arch.tied_embeddings:
        yield names.head


def _inside(arch: Arch) -> Iterator[str]:
    """Names inside a layer of the modules that hold its projections and what chooses among experts."""
    experts = arch.experts
    if experts is None or experts.stacked is None:
        yield from arch.projections
    else:
        yield from (name for name in arch.projections if not arch.is_expert(name))
        yield from {name.rpartition(".")[0]: None for name in experts.stored}
    if experts is not None:
        yield from experts.routers
        if experts.correction is not None:
            yield experts.correction.rpartition(".")[0]


def _expert_biases(experts: Experts) -> Iterator[str]:
    """Names inside a layer of the biases of all experts."""
    if experts.stacked is None:
        yield from (f"{part}.bias" for own in experts.all for part in own)
    else:
        yield from (f"{name}_bias" for name in experts.stored)


def _stacked_in(arch: Arch) -> dict[str, tuple[str, ...]]:
    """Return the beginnings of stacked experts' names by the module that holds them and nothing else."""
    found: dict[str, tuple[str, ...]] = {}
    for index in range(arch.num_layers):
        experts = arch.at(index).experts
        if experts is not None and experts.stacked is not None:
            for name in experts.stored:
                whole = f"{arch.names.layers}.{index}.{name}"
                parent = whole.rpartition(".")[0]
                found[parent] = (*found.get(parent, ()), whole)
    return found


def _norms(arch: Arch) -> Iterator[str]:
    """Names of every norm that holds a weight."""
    if arch.norm.kind == "unit":
        return
    names = arch.names
    inside = [names.attention_in, names.attention_out, names.mlp_in, names.mlp_out]
    inside += [] if arch.qk_norm in (None, "unit") else [*_head_norms(arch)]
    yield from (name for name in (names.norm, names.embed_norm) if name is not None)
    for index in range(arch.num_layers):
        yield from (f"{names.layers}.{index}.{name}" for name in inside if name is not None)


def _head_norms(arch: Arch) -> Iterator[str]:
    """Names inside a layer of the norms over heads of q and k."""
    for name, heads in ((arch.names.q_norm, arch.num_heads), (arch.names.k_norm, arch.num_kv_heads)):
        if arch.qk_norm == "modules":
            yield from (f"{name}.norms.{i}" for i in range(heads))
        else:
            yield name


def _biases(arch: Arch) -> Iterator[str]:
    """Names of every bias that a Linear has, and of every correction of experts' scores."""
    for index in range(arch.num_layers):
        for stack in stacks(arch, index).values():
            yield from (f"{module}.bias" for module in stack.modules if stack.bias)
        experts = arch.at(index).experts
        if experts is not None and experts.correction is not None:
            yield f"{arch.names.layers}.{index}.{experts.correction}"
        if experts is not None and experts.gate_bias:
            yield f"{arch.names.layers}.{index}.{experts.gate}.bias"
        if experts is not None and experts.bias:
            yield from (f"{arch.names.layers}.{index}.{bias}" for bias in _expert_biases(experts))
    if arch.head_bias:
        yield f"{arch.names.head}.bias"
