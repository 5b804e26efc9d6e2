"""Fill a decoder from a checkpoint: every tensor used, checked against the config, moved layer by layer."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from qrt.arch import Arch, ModelConfig
from qrt.arch.runnable import runnable
from qrt.checks import first_few
from qrt.errors import CheckpointError, UnsupportedError
from qrt.layers.linear import Linear
from qrt.model.build import LinearShape, build, layer_norms, layer_shapes
from qrt.model.decoder import Decoder
from qrt.model.random import RandomWeights
from qrt.quant.checkpoint import Checkpoint, open_checkpoint
from qrt.quant.checkpoint.format import FLOATS
from qrt.quant.checkpoint.reader import is_unread
from qrt.quant.weight.base import fuse

logger = logging.getLogger(__name__)


def dummy_model(checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Make random weights of the sizes, schemes and grids in `checkpoint`'s config.json; read no tensor."""
    arch = _architecture(checkpoint)
    config = _cap_to_window(ModelConfig.from_hf(checkpoint.config, arch))
    return build(config, arch, RandomWeights(checkpoint.grid, device, dtype), progress="Making weights")


def load_model(source: str | Path | Checkpoint, *, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Load a checkpoint folder (or "tiny") on `device`; what is not quantized is cast to `dtype`.

    Raises UnsupportedError for an architecture or scheme qrt does not run and for a quantized embedding or
    norm, CheckpointError for tensors that are missing, left over or of another shape than config.json says,
    each by name.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    arch = _architecture(checkpoint)
    config = _cap_to_window(ModelConfig.from_hf(checkpoint.config, arch))
    config = _untie(config, arch, checkpoint)
    _check_names(config, arch, checkpoint)
    weights = CheckpointWeights(checkpoint, device, dtype)
    decoder = build(config, arch, weights, progress="Loading weights")
    left = [module for module in weights.unquantized if module != arch.head]
    if left and len(decoder.schemes) > 1:
        logger.warning("left unquantized by the checkpoint: %s", first_few(left))
    return decoder


class CheckpointWeights:
    """The WeightSource of a checkpoint.

    unquantized    names of the Linears that turned out to be plain weights
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self.checkpoint = checkpoint
        self.device = device
        self.dtype = dtype
        self.unquantized: list[str] = []

    def linear(self, modules: tuple[str, ...], shape: LinearShape) -> Linear:
        """Read, check and stack the Linears `modules`.

        Raises CheckpointError when the parts are not quantized alike, UnsupportedError for a grid that no
        kernel runs.
        """
        schemes, parts = [], []
        for module, out in zip(modules, shape.outs, strict=True):
            scheme, part = self.checkpoint.linear(module)
            if part.values.shape != (out, shape.in_features):
                raise self._mismatch(module, part.values.shape, (out, shape.in_features))
            schemes.append(scheme)
            parts.append(part)
        remedy = "fused projections must be quantized alike; quantize or ignore them together"
        if len(set(schemes)) > 1:
            came = ", ".join(f"{m} is {s}" for m, s in zip(modules, schemes, strict=True))
            raise CheckpointError(f"{self.checkpoint.path}: {came}: {remedy}")
        try:
            weight = fuse(parts)
        except ValueError as error:
            raise CheckpointError(
                f"{self.checkpoint.path}: {', '.join(modules)}: {error}: {remedy}"
            ) from error
        self.unquantized += modules if weight.scale is None else ()
        if not shape.bias:
            weight = replace(weight, bias=None)  # zeros: _check_names
        try:
            return Linear.pack(schemes[0], weight, self.device, self.dtype)
        except UnsupportedError as error:
            raise UnsupportedError(f"{self.checkpoint.path}: {', '.join(modules)}: {error}") from error

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read and check an embedding or a norm."""
        tensor = self.checkpoint.tensor(name)
        if tensor.dtype not in FLOATS:
            raise UnsupportedError(
                f"{self.checkpoint.path}: {name}: expected {' or '.join(map(str, FLOATS))}, "
                f"got {tensor.dtype}; quantize the Linears only"
            )
        if tuple(tensor.shape) != shape:
            raise self._mismatch(name, tensor.shape, shape)
        module = name.rpartition(".")[0]
        self.checkpoint.expect_no_more(module, (name, f"{module}.bias"))  # a bias is zero: _check_names
        return tensor.to(self.device, self.dtype)

    def _mismatch(self, name: str, came: Iterable[int], expected: Iterable[int]) -> CheckpointError:
        return CheckpointError(
            f"{self.checkpoint.path}: {name}: expected shape {list(expected)}, as config.json says, "
            f"got {list(came)}; correct config.json or download the checkpoint again"
        )


def _architecture(checkpoint: Checkpoint) -> Arch:
    if checkpoint.config.get("auto_map"):
        logger.warning("config.json names code of the model's own (auto_map); it is not run")
    return runnable(checkpoint.config, checkpoint.path)


def _cap_to_window(config: ModelConfig) -> ModelConfig:
    context, longest = config.context, config.max_position
    if context < longest:
        logger.warning("context capped at the model's sliding window: %d of %d tokens", context, longest)
    return replace(config, max_position=context)


def _untie(config: ModelConfig, arch: Arch, checkpoint: Checkpoint) -> ModelConfig:
    """Untie a head that is stored and differs from the embedding, whatever the config says."""
    stored = [name for name in checkpoint.names() if name.startswith(f"{arch.head}.")]
    embedding = f"{arch.embed}.weight"
    if not config.tied_embeddings or not stored or not checkpoint.has(embedding):
        return config
    if stored == [f"{arch.head}.weight"]:
        if torch.equal(checkpoint.tensor(stored[0]), checkpoint.tensor(embedding)):
            return config
    logger.warning(
        "%s is stored apart from the embedding: used, though config.json says they are tied", arch.head
    )
    return replace(config, tied_embeddings=False)


def _check_names(config: ModelConfig, arch: Arch, checkpoint: Checkpoint) -> None:
    """Check that every module and bias which the config asks for is there, and nothing else."""
    wanted, biases = _modules(config, arch), _biases(config, arch)
    names = checkpoint.names()
    found = {name.rpartition(".")[0] for name in names}
    if missing := sorted(wanted - found) + sorted(biases - set(names)):
        raise CheckpointError(
            f"{checkpoint.path}: {len(missing)} missing that config.json asks for: {first_few(missing)}; "
            "correct config.json or download the checkpoint again"
        )
    known = wanted | {arch.head} if config.tied_embeddings else wanted
    unused = [n for n in names if n.rpartition(".")[0] not in known and not is_unread(n)]
    extra = [n for n in names if n.endswith(".bias") and n not in biases and n not in unused]
    unused += [n for n in extra if checkpoint.tensor(n).any()]  # GPTQ tools store zeros where no bias is
    if unused:
        raise CheckpointError(
            f"{checkpoint.path}: {len(unused)} tensors that {config.architecture} with this config.json "
            f"does not use: {first_few(unused)}; correct config.json or delete them"
        )


def _modules(config: ModelConfig, arch: Arch) -> set[str]:
    """Names of every module of the checkpoint that holds a weight."""
    inside = (*arch.projections, *layer_norms(config))
    layers = {f"{arch.layers}.{i}.{name}" for i in range(config.num_layers) for name in inside}
    return layers | {arch.embed, arch.norm} | (set() if config.tied_embeddings else {arch.head})


def _biases(config: ModelConfig, arch: Arch) -> set[str]:
    """Names of every bias."""
    shapes = layer_shapes(config)
    biased = [part for role, parts in arch.fuse if shapes[role].bias for part in parts]
    return {f"{arch.layers}.{i}.{part}.bias" for i in range(config.num_layers) for part in biased}
