"""Run a checkpoint one decoder layer at a time.

A layer has no memory until it is filled with weights; it is run, and freed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from qrt.arch import Arch
from qrt.errors import CheckpointError
from qrt.quant.checkpoint import Checkpoint
from qrt.quant.checkpoint.format import is_finite
from qrt_calibrate.model.around import Around, around
from qrt_calibrate.model.head import HEAD_ROWS, AnyHead, Finish, PlainHead, unit_rows
from qrt_calibrate.model.norms import ReferenceNorm
from qrt_calibrate.model.reference import ReferenceLayer

BATCH_TOKENS = 4096  # tokens a layer takes at a time: bounds the activations inside it


class LayerExecutor:
    """Run the decoder layers of one checkpoint, for windows of `seqlen` tokens, in fp32.

    Layers are loaded on `device`; a copy on another device runs there.
    """

    def __init__(self, checkpoint: Checkpoint, arch: Arch, seqlen: int, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._arch = arch
        self._seqlen = seqlen
        self.device = device
        self._final: tuple[nn.Module, PlainHead, Finish] | None = None
        self._around: dict[torch.device, list[Around]] = {}

    def embed(self, windows: Tensor) -> Tensor:
        """Embed token ids [B, T]: hidden states [B, T, H], fp32 on the CPU."""
        arch = self._arch
        table = read(self._checkpoint, f"{arch.names.embed}.weight")
        if int(windows.max()) >= table.shape[0]:
            raise CheckpointError(
                f"{self._checkpoint.path}: the tokenizer gives id {int(windows.max())}, "
                f"but the embedding has {table.shape[0]} rows; download the tokenizer's files again"
            )
        hidden = nn.functional.embedding(windows, table).float()
        if arch.embed_scale != 1.0:
            hidden *= torch.tensor(arch.embed_scale, dtype=table.dtype).float()
        if arch.names.positions is not None:
            first = arch.positions or 0
            positions = read(self._checkpoint, f"{arch.names.positions}.weight")
            hidden += positions[first : first + windows.shape[1]].float()
        if arch.names.embed_norm is None:
            return hidden
        with torch.no_grad():
            return self._norm(arch.names.embed_norm, torch.device("cpu"))(hidden)

    def load(self, index: int, tensors: Mapping[str, Tensor]) -> nn.Module:
        """Return layer `index` with weights `tensors`, named relative to it, in fp32 on the device."""
        layer = ReferenceLayer(self._arch, index, tensors.keys(), self.device)
        filled = {}
        for name, wanted in layer.state_dict().items():
            full = f"{self.layer_name(index)}.{name}"
            if name not in tensors:
                raise CheckpointError(f"{self._checkpoint.path}: tensor {full} is missing")
            if tensors[name].shape != wanted.shape:
                raise CheckpointError(
                    f"{full}: expected shape {list(wanted.shape)}, as config.json says, "
                    f"got {list(tensors[name].shape)}"
                )
            filled[name] = tensors[name].to(self.device).to(torch.float32, copy=True)
        layer.load_state_dict(filled, assign=True)
        return layer.eval().requires_grad_(False)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return self._arch.num_layers

    def layer_name(self, index: int) -> str:
        """Return the full name of layer `index`."""
        return f"{self._arch.names.layers}.{index}"

    @property
    def head_name(self) -> str:
        """The full name of the head, or of the embedding that it is."""
        names = self._arch.names
        return names.head if self._checkpoint.has(f"{names.head}.weight") else names.embed

    def expect_finite(self, name: str, *states: Tensor) -> None:
        """Raise CheckpointError if what `name` computed, `states`, holds NaN or infinity."""
        if not all(map(is_finite, states)):
            raise CheckpointError(
                f"{self._checkpoint.path}: {name}: expected finite numbers behind it, got NaN or infinity in "
                "float32; its weights are damaged: download the checkpoint again"
            )

    def load_stored(self, index: int) -> nn.Module:
        """Return layer `index` as the checkpoint stores it, in fp32 on the device."""
        return self.load(index, read_layer(self._checkpoint, self.layer_name(index)))

    def run(self, index: int, layer: nn.Module, hidden: Tensor, block: int | None = None) -> Tensor:
        """Run a layer, or one of its blocks, on hidden states [B, T, H].

        The output is fp32 on the layer's device.
        """
        device = _device(layer)
        if device not in self._around:
            self._around[device] = around(self._arch, self._seqlen, device)
        out: Tensor = layer(hidden.to(device), self._around[device][index], block)
        return out

    def backward(self, index: int, layer: nn.Module, hidden: Tensor, gradient: Tensor) -> Tensor:
        """Return the loss's gradient at a layer's input `hidden` [B, T, H], given that at its output."""
        with torch.enable_grad():
            leaf = hidden.to(_device(layer)).detach().requires_grad_()
            self.run(index, layer, leaf).backward(gradient.to(leaf.device))
        assert leaf.grad is not None
        return leaf.grad

    def gradients(
        self, index: int, layer: nn.Module, hidden: Tensor, gradient: Tensor, inside: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the loss's gradients at tensors inside a layer, given that at its output for `hidden`.

        `inside` gets these tensors while the layer runs.
        """
        with torch.enable_grad():
            leaf = hidden.to(_device(layer)).detach().requires_grad_()
            output = self.run(index, layer, leaf)
        found = torch.autograd.grad(output, list(inside.values()), gradient.to(output.device, output.dtype))
        return dict(zip(inside, found, strict=True))

    def loss_gradient(self, hidden: Tensor, generator: torch.Generator) -> Tensor:
        """Return the loss's gradient [T, H], fp32, at the hidden states after the last layer.

        The loss is a sum over tokens; next tokens are drawn from the predictions themselves.
        """
        with torch.enable_grad():
            leaf = hidden.to(self.device).detach().requires_grad_()
            norm, head, finish = self._behind()
            normed = norm(leaf)
            with torch.no_grad():
                logits = self.logits(hidden)
                self.expect_finite(self.head_name, logits)
                wrong = logits.softmax(-1)
                drawn = torch.multinomial(wrong, 1, generator=generator)
                wrong.scatter_add_(-1, drawn, wrong.new_full(drawn.shape, -1.0))
                wrong = finish.backward(logits, wrong)
                parts = zip(wrong.split(HEAD_ROWS, -1), head.weight.split(HEAD_ROWS), strict=True)
                pull = sum((part @ rows.float() for part, rows in parts), torch.zeros_like(normed))
            normed.backward(pull)
        assert leaf.grad is not None
        return leaf.grad

    def logits(self, hidden: Tensor, other: AnyHead | None = None) -> Tensor:
        """Return logits [T, V], fp32 on the device, of hidden states [T, H] after the last layer.

        Uses the checkpoint's head unless `other` gives one.
        """
        norm, head, finish = self._behind()
        return finish((other or head).logits(norm(hidden.to(self.device))))

    def release_head(self) -> None:
        """Free the head; it is read again when it is needed."""
        self._final = None

    def _behind(self) -> tuple[nn.Module, PlainHead, Finish]:
        """Return the last norm, the head of the checkpoint, and what is done to its products."""
        if self._final is None:
            arch, names = self._arch, self._arch.names
            head = read(self._checkpoint, f"{self.head_name}.weight")
            head = head.to(self.device)
            bias = read(self._checkpoint, f"{names.head}.bias").to(self.device) if arch.head_bias else None
            finish = Finish(arch.logit_scale, arch.logit_cap, bias)
            plain = PlainHead(unit_rows(head) if arch.unit_head else head)
            self._final = self._norm(names.norm, self.device), plain, finish
        return self._final

    def _norm(self, name: str, device: torch.device) -> nn.Module:
        """Return a norm outside the layers, in fp32."""
        held = {part: f"{name}.{part}" for part in ("weight", "bias")}
        held = {part: full for part, full in held.items() if self._checkpoint.has(full)}
        norm = ReferenceNorm(self._arch, self._arch.hidden_size, bias="bias" in held)
        tensors = {
            part: read(self._checkpoint, full).to(device, torch.float32) for part, full in held.items()
        }
        norm.load_state_dict(tensors, assign=True)
        return norm.requires_grad_(False)


def _device(layer: nn.Module) -> torch.device:
    return next(layer.parameters()).device


def read(checkpoint: Checkpoint, name: str) -> Tensor:
    """Read a tensor as stored; CheckpointError when a value is not finite."""
    tensor = checkpoint.tensor(name)
    if not is_finite(tensor):
        raise CheckpointError(
            f"{checkpoint.path}: {name} holds NaN or infinity; the checkpoint is damaged, download it again"
        )
    return tensor


def read_layer(checkpoint: Checkpoint, layer: str) -> dict[str, Tensor]:
    """Read all tensors of a decoder layer, by their names inside it."""
    prefix = f"{layer}."
    names = [name for name in checkpoint.names() if name.startswith(prefix)]
    return {name.removeprefix(prefix): read(checkpoint, name) for name in names}
