"""Which Linears are quantized: the architecture's projections less --ignore, in whole fused groups."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from qrt.arch import Arch
from qrt.errors import ConfigError
from qrt.quant.checkpoint import Checkpoint
from qrt.quant.spec import QuantSpec
from qrt.registry import nearest


@dataclass(frozen=True)
class Selection:
    """Full names of the Linears to quantize, and of those that stay as they are (lm_head always does)."""

    quantized: tuple[str, ...]
    ignored: tuple[str, ...]


def select(arch: Arch, num_layers: int, patterns: tuple[str, ...]) -> Selection:
    """Apply --ignore patterns: globs over whole names, or over what follows a dot ("down_proj").

    ConfigError: a pattern matches nothing, nothing is left to quantize, or a fused group is split.
    """
    layers = [f"{arch.layers}.{index}" for index in range(num_layers)]
    linears = [f"{layer}.{projection}" for layer in layers for projection in arch.projections]
    ignored = {arch.head}
    for pattern in patterns:
        matching = {name for name in [*linears, arch.head] if _matches(name, pattern)}
        if not matching:
            known = [arch.head, *(projection.rpartition(".")[2] for projection in arch.projections)]
            raise ConfigError(
                f"--ignore {pattern!r} matches no Linear{nearest(pattern, known)} (e.g. {linears[0]})"
            )
        ignored |= matching
    quantized = tuple(name for name in linears if name not in ignored)
    if not quantized:
        raise ConfigError("--ignore leaves nothing to quantize; remove a pattern")
    for layer in layers:
        for fused, parts in arch.fuse:
            left_out = [part for part in parts if f"{layer}.{part}" in ignored]
            if left_out and len(left_out) < len(parts):
                raise ConfigError(
                    f"--ignore leaves out {', '.join(left_out)} of {layer}.{fused}, which engines run as one "
                    f"Linear; ignore all of {', '.join(parts)} or none"
                )
    return Selection(quantized, (arch.head, *(name for name in linears if name in ignored)))


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def check_groups(checkpoint: Checkpoint, names: tuple[str, ...], spec: QuantSpec) -> None:
    """ConfigError naming the first Linear whose input features the groups do not divide."""
    for name in names:
        shape = checkpoint.spec(f"{name}.weight").shape
        try:
            spec.group_of(shape[-1])
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
