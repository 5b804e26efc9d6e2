"""Check that a checkpoint stores what its config.json asks for, before the work begins."""

from __future__ import annotations

from collections.abc import Iterator

from qrt.arch import Arch
from qrt.definitions.names import check_names, modules
from qrt.errors import CheckpointError, UnsupportedError
from qrt.quant.checkpoint import Checkpoint
from qrt.quant.checkpoint.format import FLOATS


def check_stored(checkpoint: Checkpoint, arch: Arch) -> None:
    """Check that a checkpoint stores what its config.json asks for, and nothing else.

    CheckpointError: weights that are missing or, outside of layers, of other sizes, and tensors that the
    architecture does not use, zero biases apart. UnsupportedError: weights that are not FLOATS.
    """
    check_names(arch, checkpoint)
    where = checkpoint.path
    for name in sorted(_parameters(arch, checkpoint)):
        if checkpoint.spec(name).dtype not in FLOATS:
            raise UnsupportedError(
                f"{where}: {name}: expected {' or '.join(map(str, FLOATS))}, "
                f"got {checkpoint.spec(name).dtype}; save the model in one of them"
            )
    for name, shape in _outer_shapes(arch).items():
        if checkpoint.has(name) and (came := checkpoint.spec(name).shape) != shape:
            raise CheckpointError(
                f"{where}: {name}: expected shape {list(shape)}, as config.json says, got {list(came)}; "
                "correct config.json (vocab_size, hidden_size) or download the checkpoint again"
            )


def _parameters(arch: Arch, checkpoint: Checkpoint) -> Iterator[str]:
    """Names of the stored weights and biases of the architecture's modules."""
    for module in (*modules(arch), arch.names.head):
        yield from (name for part in ("weight", "bias") if checkpoint.has(name := f"{module}.{part}"))


def _outer_shapes(arch: Arch) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights outside the layers; others are checked when a layer is loaded."""
    table = arch.vocab_size, arch.hidden_size
    shapes: dict[str, tuple[int, ...]] = {arch.names.embed: table, arch.names.head: table}
    shapes |= {name: (arch.hidden_size,) for name in (arch.names.norm, arch.names.embed_norm) if name}
    if arch.names.positions is not None:
        shapes[arch.names.positions] = arch.max_position + (arch.positions or 0), arch.hidden_size
    return {f"{module}.weight": shape for module, shape in shapes.items()}
