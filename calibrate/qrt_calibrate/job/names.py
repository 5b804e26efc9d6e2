"""Check that a checkpoint stores what its config.json asks for, before the work begins."""

from __future__ import annotations

from qrt.arch import Arch
from qrt.checks import first_few
from qrt.errors import CheckpointError, UnsupportedError
from qrt.quant.checkpoint import Checkpoint
from qrt.quant.checkpoint.format import FLOATS
from qrt.quant.checkpoint.reader import is_unread


def check_names(checkpoint: Checkpoint, arch: Arch) -> None:
    """Check that a checkpoint stores what its config.json asks for, and nothing else.

    CheckpointError: weights that are missing or, outside of layers, of other sizes, and tensors that the
    architecture does not use, zero biases apart. UnsupportedError: weights that are not FLOATS.
    """
    where, names = checkpoint.path, set(checkpoint.names())
    wanted, biases = _weights(arch), _biases(arch)
    if missing := sorted(wanted - names):
        raise CheckpointError(
            f"{where}: {len(missing)} missing that config.json asks for: {first_few(missing)}; correct "
            "config.json (tie_word_embeddings, sizes) or download the checkpoint again"
        )
    known = wanted | biases | {f"{arch.names.head}.weight"}
    for name in sorted(known & names):
        if checkpoint.spec(name).dtype not in FLOATS:
            raise UnsupportedError(
                f"{where}: {name}: expected {' or '.join(map(str, FLOATS))}, "
                f"got {checkpoint.spec(name).dtype}; save the model in one of them"
            )
    for name, shape in _outer_shapes(arch).items():
        if name in names and (came := checkpoint.spec(name).shape) != shape:
            raise CheckpointError(
                f"{where}: {name}: expected shape {list(shape)}, as config.json says, got {list(came)}; "
                "correct config.json (vocab_size, hidden_size) or download the checkpoint again"
            )
    unused = sorted(name for name in names - known if not is_unread(name))
    unused = [name for name in unused if not (_is_bias(name, known) and not checkpoint.tensor(name).any())]
    if unused:
        raise CheckpointError(
            f"{where}: {len(unused)} tensors that {arch.name} with this config.json does not use: "
            f"{first_few(unused)}; correct config.json (num_hidden_layers, attention_bias) or delete them"
        )


def _weights(arch: Arch) -> set[str]:
    """Return the full names of all weights; that of the head only where it is not tied."""
    inside = {*arch.projections, *arch.routers, *(pair.source for pair in arch.smooth)}
    inside |= {"self_attn.q_norm", "self_attn.k_norm"} if arch.qk_norm else set()
    modules = {f"{arch.names.layers}.{index}.{name}" for index in range(arch.num_layers) for name in inside}
    modules |= {arch.names.embed, arch.names.norm} | (set() if arch.tied_embeddings else {arch.names.head})
    return {f"{module}.weight" for module in modules}


def _outer_shapes(arch: Arch) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights outside the layers; others are checked when a layer is loaded."""
    table = arch.vocab_size, arch.hidden_size
    shapes = {arch.names.embed: table, arch.names.head: table, arch.names.norm: (arch.hidden_size,)}
    return {f"{module}.weight": shape for module, shape in shapes.items()}


def _biases(arch: Arch) -> set[str]:
    """Return the full names of the biases that config.json asks for."""
    (_, qkv), (_, o), *rest = arch.fuse
    biased = [*(qkv if arch.qkv_bias else ()), *(o if arch.o_bias else ())]
    if arch.mlp_bias:
        biased += [part for _, parts in rest for part in parts]
    return {f"{arch.names.layers}.{index}.{part}.bias" for index in range(arch.num_layers) for part in biased}


def _is_bias(name: str, known: set[str]) -> bool:
    """Whether a tensor is the bias of a module whose weight is known."""
    module, _, kind = name.rpartition(".")
    return kind == "bias" and f"{module}.weight" in known
