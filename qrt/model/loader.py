"""Fill a decoder from a checkpoint: every tensor used, checked against the config, moved layer by layer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from qrt.arch import Arch
from qrt.arch.read import read_arch
from qrt.arch.shard import Shard
from qrt.checks import first_few
from qrt.definitions.names import CORRECTION, check_names, place_names
from qrt.definitions.stacks import Stack
from qrt.errors import CheckpointError, UnsupportedError
from qrt.kernels.tensor_parallel import TensorParallelGroup
from qrt.layers.experts import ExpertLinear
from qrt.layers.linear import Linear
from qrt.model.build import XIELU_PARTS, build
from qrt.model.decoder import Decoder
from qrt.model.random import RandomWeights
from qrt.quant.checkpoint import Checkpoint, open_checkpoint
from qrt.quant.checkpoint.cut import Cut, InsideGroup
from qrt.quant.checkpoint.folder import WEIGHT, mismatch
from qrt.quant.checkpoint.format import FLOATS, LEFT_OVER, PACKED, is_plain
from qrt.quant.weight import partition
from qrt.quant.weight.base import WeightData, fuse

logger = logging.getLogger(__name__)


def dummy_model(
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    headless: bool = False,
    shard: Shard | None = None,
    peers: TensorParallelGroup | None = None,
) -> Decoder:
    """Make random weights of the sizes, schemes and grids in `checkpoint`'s config.json; read no tensor.

    `headless`, `shard` and `peers` are as in `load_model`.
    """
    arch = _architecture(checkpoint, headless)
    weights = RandomWeights(checkpoint.grid, device, dtype)
    return build(arch, weights, shard, peers=peers, progress="Making weights")


def load_model(
    source: str | Path | Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    headless: bool = False,
    shard: Shard | None = None,
    peers: TensorParallelGroup | None = None,
) -> Decoder:
    """Load a checkpoint folder (or "tiny") on `device`; what is not quantized is cast to `dtype`.

    `headless` leaves out the head of the vocabulary, for a model that pools. With a `shard` the decoder is a
    rank's (`build`), which reads its part of the Linears alone; `peers` are the ranks of which it is one.

    Raises UnsupportedError for an architecture or scheme qrt does not run and for a quantized norm,
    CheckpointError for tensors that are missing, left over or of another shape than config.json says, each by
    name, and ConfigError for ranks that cannot share the model.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    arch = _untie(place_names(_architecture(checkpoint, headless), checkpoint), checkpoint)
    check_names(arch, checkpoint)
    weights = CheckpointWeights(checkpoint, device, dtype)
    decoder = build(arch, weights, shard, peers=peers, progress="Loading weights")
    left = [module for module in weights.unquantized if module != arch.names.head]
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

    def linear(self, stack: Stack) -> Linear:
        """Read, check and stack the Linears of `stack`.

        Raises CheckpointError when the parts are not quantized alike, UnsupportedError for a grid that no
        kernel runs.
        """
        return self._pack(stack, *self._read(stack))

    def experts(self, stacks: Sequence[Stack]) -> ExpertLinear:
        """Read and check the Linears of all experts, one after the other; raises as `linear` does."""
        if stacks[0].expert is not None:
            for module in filter(None, (*stacks[0].modules, stacks[0].reader)):
                self.checkpoint.expect_experts(module, len(stacks))
        first, model = self._read(stacks[0])
        reordered = not stacks[0].ordered and any(map(self._is_reordered, stacks))

        def each() -> Iterator[WeightData]:
            for stack in stacks:
                scheme, weight = self._read(stack)
                if (scheme, *weight.grid) != (first, *model.grid):
                    raise CheckpointError(
                        f"{self.checkpoint.path}: {stack.modules[0]}: expected {first} on the grid of "
                        f"{stacks[0].modules[0]}, got {scheme}{' on another' if scheme == first else ''}; "
                        "quantize or ignore all experts together"
                    )
                if reordered and weight.perm is None:  # one layout for all
                    weight = replace(weight, perm=torch.arange(weight.in_features))
                yield weight

        try:
            return ExpertLinear.pack(first, each(), len(stacks), self.device, self.dtype)
        except UnsupportedError as error:
            raise UnsupportedError(f"{self.checkpoint.path}: {stacks[0].modules[0]}: {error}") from error

    def head(self, stack: Stack, *, unit: bool) -> Linear:
        """Read and check the head."""
        scheme, weight = self._read(stack)
        return self._pack(stack, scheme, _unit_rows(weight) if unit else weight)

    def _read(self, stack: Stack) -> tuple[str, WeightData]:
        """Return the scheme and the canonical weight of `stack`, its rows in run-time order."""
        rows = self._rows(stack)
        schemes, parts, read, first = [], [], [], 0
        for module, out in zip(stack.modules, stack.outs, strict=True):
            own = None if rows is None else rows[(rows >= first) & (rows < first + out)] - first
            scheme, part, found = self._stored(stack, module, out, own)
            schemes.append(scheme)
            parts.append(part)
            read.append(first + found)
            first += out
        remedy = "fused projections must be quantized alike; quantize or ignore them together"
        if len(set(schemes)) > 1:
            came = ", ".join(f"{m} is {s}" for m, s in zip(stack.modules, schemes, strict=True))
            raise CheckpointError(f"{self.checkpoint.path}: {came}: {remedy}")
        try:
            weight = fuse(parts)
        except ValueError as error:
            raise CheckpointError(
                f"{self.checkpoint.path}: {', '.join(stack.modules)}: {error}: {remedy}"
            ) from error
        self.unquantized += stack.modules if weight.scale is None else ()
        if not stack.bias:
            weight = replace(weight, bias=None)  # zeros: check_names
        stacked = torch.cat(read)
        if rows is None or torch.equal(rows, stacked):
            return schemes[0], weight
        return schemes[0], weight.rows(torch.searchsorted(stacked, rows))

    def _rows(self, stack: Stack) -> Tensor | None:
        """Return the stacked rows of `stack` in run-time order, with which its reader needs no order."""
        order = None if stack.reader is None else self.checkpoint.order(stack.reader, stack.expert)
        return stack.rows(order)

    def _is_reordered(self, stack: Stack) -> bool:
        """Return whether a Linear of `stack` takes its inputs in another order than they come."""
        return any(self.checkpoint.order(module, stack.expert) is not None for module in stack.modules)

    def _stored(
        self, stack: Stack, module: str, out: int, rows: Tensor | None
    ) -> tuple[str, WeightData, Tensor]:
        """Return one of the Linears of `stack`, which has `out` outputs, with the inputs of `stack`.

        Returns the scheme, the canonical weight, and its rows: `rows` and a few beside them, int64; all if
        None.
        """
        sizes, inputs = (out, stack.in_features), stack.inputs
        if inputs is None or self._is_reordered(stack):
            scheme, weight = self._linear(stack, module, cut := Cut.of(sizes, rows))
        else:
            try:
                scheme, weight = self._linear(stack, module, cut := Cut.of(sizes, rows, inputs))
                inputs = None
            except InsideGroup:
                scheme, weight = self._linear(stack, module, cut := Cut.of(sizes, rows))
        if stack.ordered:
            weight = replace(weight, perm=None)
        return scheme, weight if inputs is None else partition.inputs(weight, *inputs), cut.rows

    def _linear(self, stack: Stack, module: str, cut: Cut) -> tuple[str, WeightData]:
        """Read a `cut` of one of the Linears of `stack`."""
        if stack.expert is None:
            return self.checkpoint.linear(module, transposed=stack.transposed, cut=cut)
        return self.checkpoint.expert(module, stack.expert, transposed=stack.transposed, cut=cut)

    def _pack(self, stack: Stack, scheme: str, weight: WeightData) -> Linear:
        try:
            return Linear.pack(scheme, weight, self.device, self.dtype)
        except UnsupportedError as error:
            raise UnsupportedError(f"{self.checkpoint.path}: {', '.join(stack.modules)}: {error}") from error

    def has(self, name: str) -> bool:
        """Return whether the checkpoint holds a tensor `name`."""
        return self.checkpoint.has(name)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read and check an embedding, a router, a norm or a bias; a matrix of codes is decoded."""
        module = name.rpartition(".")[0]
        beside: tuple[str, ...] = (
            "weight",
            "bias",
            CORRECTION,
            *XIELU_PARTS,
        )  # one that nothing reads is zero: check_names
        if name.endswith(WEIGHT) and len(shape) == 2:
            scheme, weight = self.checkpoint.linear(module, beside=beside)
            tensor = weight.values if weight.scale is None else weight.dequantize().to(self.dtype)
            if weight.scale is not None:
                logger.warning(
                    "%s: %s is stored in %s and runs in 16 bits", self.checkpoint.path, module, scheme
                )
        else:
            tensor = self.checkpoint.tensor(name)
            beside += () if name.endswith(WEIGHT) else (*PACKED, *LEFT_OVER)  # those of the matrix
            self.checkpoint.expect_no_more(module, [name, *(f"{module}.{part}" for part in beside)])
        if tensor.dtype not in FLOATS:
            raise UnsupportedError(
                f"{self.checkpoint.path}: {name}: expected {' or '.join(map(str, FLOATS))}, "
                f"got {tensor.dtype}; quantize the Linears only"
            )
        if tuple(tensor.shape) != shape:
            raise mismatch(self.checkpoint.path, name, tensor.shape, shape)
        return tensor.to(self.device)


def _unit_rows(weight: WeightData) -> WeightData:
    """Return `weight` with rows of length 1: of a quantized one the scales are divided, and stay in fp32."""
    length = weight.dequantize().norm(dim=1, keepdim=True).clamp(min=1e-12)
    if weight.scale is None:
        return replace(weight, values=(weight.values.float() / length).to(weight.values.dtype))
    return replace(weight, scale=weight.scale.float() / length)


def _architecture(checkpoint: Checkpoint, headless: bool) -> Arch:
    if checkpoint.config.get("auto_map"):
        logger.warning("config.json names code of the model's own (auto_map); it is not run")
    arch = read_arch(checkpoint.config, checkpoint.path)
    return arch.without_head() if headless and not arch.headless else arch


def _untie(arch: Arch, checkpoint: Checkpoint) -> Arch:
    """Untie a head that is stored and differs from the embedding, whatever the config says."""
    stored = [name for name in checkpoint.names() if name.startswith(f"{arch.names.head}.")]
    stored = [name for name in stored if not (arch.head_bias and name.endswith(".bias"))]
    embedding = f"{arch.names.embed}.weight"
    if arch.headless or not arch.tied_embeddings or not stored:
        return arch
    if stored == [f"{arch.names.head}.weight"] and is_plain(checkpoint, arch.names.embed):
        if torch.equal(checkpoint.tensor(stored[0]), checkpoint.tensor(embedding)):
            return arch
    logger.warning(
        "%s is stored apart from the embedding: used, though config.json says they are tied", arch.names.head
    )
    return replace(arch, tied_embeddings=False)
