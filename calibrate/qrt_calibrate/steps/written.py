"""The finished steps of a run: write layers, head and trained weights, and read them back."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from qrt.quant.checkpoint.writer import CheckpointWriter
from qrt.quant.weight import WeightData
from qrt_calibrate.job.plan import Job
from qrt_calibrate.rounding.rtn import for_writer
from qrt_calibrate.steps.layer import LayerResult
from qrt_calibrate.tuning.parameters import Tuned, is_tuned_norm

REST = "rest"  # the step that ends with what is outside the layers written
TUNED = "tuned"  # the step that ends with trained codes, scales and norms written


class Written:
    """The finished steps of a run, in the folder of its writer."""

    def __init__(self, job: Job, writer: CheckpointWriter) -> None:
        self._writer = writer
        self._head = job.arch.names.head if job.recipe.head is not None else None
        names = job.checkpoint.names()
        self._layers = [job.layer_name(index) for index in range(job.arch.num_layers)]
        self._linears = [list(job.layer_grids(index)) for index in range(job.arch.num_layers)]
        self._names = {layer: [n for n in names if n.startswith(f"{layer}.")] for layer in self._layers}

    @property
    def all_layers(self) -> bool:
        """Whether every layer is written."""
        return all(self.has(label(index)) for index in range(len(self._layers)))

    def has(self, step: str) -> bool:
        """Whether a step is finished."""
        return step in self._writer.finished

    def write_layer(self, index: int, result: LayerResult, figures: Mapping[str, float]) -> None:
        """Write a layer and the report's figures of it."""
        layer = self._layers[index]
        for name, weight in result.linears.items():
            self._writer.add_linear(f"{layer}.{name}", weight)
        for name, tensor in result.tensors.items():
            self._writer.add_tensor(f"{layer}.{name}", tensor)
        self._writer.finish_step(label(index), dict(figures))

    def write_tuned(self, tuned: Tuned, linears: Mapping[str, WeightData]) -> None:
        """Replace `linears` by trained weights, which keep the biases, and note the KL of the training."""
        for name, weight in tuned.linears.items():
            self._writer.add_linear(name, for_writer(weight, linears[name].bias), again=True)
        for name, norm in tuned.norms.items():
            self._writer.add_tensor(name, norm, again=True)
        self._writer.finish_step(TUNED, {"kl_first": tuned.kl_first, "kl_last": tuned.kl_last})

    def figures(self, step: str) -> dict[str, float]:
        """Return the figures that a finished step was written with."""
        return dict(self._writer.notes(step))

    def layer(self, index: int, tuned: bool = False) -> LayerResult:
        """Read a layer back; with `tuned` its Linears and norms are the trained ones."""
        own, layer = label(index), self._layers[index]
        step = TUNED if tuned else own
        linears = {name: self._writer.read_linear(step, f"{layer}.{name}") for name in self._linears[index]}
        parts = {f"{layer}.{name}.{part}" for name in linears for part in ("weight", "bias")}
        rest = {
            name.removeprefix(f"{layer}."): self._writer.read_tensor(
                step if is_tuned_norm(name) else own, name
            )
            for name in self._names[layer]
            if name not in parts
        }
        return LayerResult(linears, rest, {})

    def model(self) -> tuple[dict[str, WeightData], dict[str, Tensor]]:
        """Read all layers back: their Linears and their other tensors, by full names."""
        linears: dict[str, WeightData] = {}
        rest: dict[str, Tensor] = {}
        for index, name in enumerate(self._layers):
            layer = self.layer(index)
            linears |= {f"{name}.{part}": weight for part, weight in layer.linears.items()}
            rest |= {f"{name}.{part}": tensor for part, tensor in layer.tensors.items()}
        return linears, rest

    def head(self) -> WeightData | None:
        """Read the head back; None if it is not quantized."""
        return None if self._head is None else self._writer.read_linear(REST, self._head)


def label(index: int) -> str:
    """Name the step that ends with layer `index` written."""
    return f"layer-{index:05d}"
