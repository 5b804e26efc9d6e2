"""Run a checkpoint one decoder layer at a time, with transformers' own modules.

The model is built on the meta device, so it has no memory; one layer is filled with weights, run, and freed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from qrt.arch import Arch
from qrt.errors import CheckpointError
from qrt.quant.checkpoint import Checkpoint
from qrt_calibrate.model.experts import spell_out
from qrt_calibrate.model.head import HEAD_ROWS, AnyHead, PlainHead

BATCH_TOKENS = 4096  # tokens a layer takes at a time: bounds the activations inside it


class LayerExecutor:
    """Run the decoder layers of one checkpoint, for windows of `seqlen` tokens, in fp32.

    Layers are loaded on `device`; a copy on another device runs there.
    """

    def __init__(self, checkpoint: Checkpoint, arch: Arch, seqlen: int, device: torch.device) -> None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                _config(checkpoint.path), dtype=torch.float32, attn_implementation="sdpa"
            )
            if arch.experts is not None:
                for layer in model.get_submodule(arch.names.layers):
                    spell_out(layer, arch)
        model.eval().requires_grad_(False)  # no dropout, no noise on routers
        self._checkpoint = checkpoint
        self._arch = arch
        self.device = device
        self._layers = model.get_submodule(arch.names.layers)
        self._norm = model.get_submodule(arch.names.norm)
        self._head: tuple[nn.Module, PlainHead] | None = None
        self._arguments = {device: _layer_arguments(model, arch, seqlen, device)}

    def embed(self, windows: Tensor) -> Tensor:
        """Embed token ids [B, T]: hidden states [B, T, H], fp32 on the CPU."""
        table = read(self._checkpoint, f"{self._arch.names.embed}.weight")
        if int(windows.max()) >= table.shape[0]:
            raise CheckpointError(
                f"{self._checkpoint.path}: the tokenizer gives id {int(windows.max())}, "
                f"but the embedding has {table.shape[0]} rows; download the tokenizer's files again"
            )
        return nn.functional.embedding(windows, table).float()

    def load(self, index: int, tensors: Mapping[str, Tensor]) -> nn.Module:
        """Return layer `index` with weights `tensors`, named relative to it, in fp32 on the device."""
        layer = copy.deepcopy(self._layers[index])
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
        return layer

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self._arguments[self.device])

    def layer_name(self, index: int) -> str:
        """Return the full name of layer `index`."""
        return f"{self._arch.names.layers}.{index}"

    def load_stored(self, index: int) -> nn.Module:
        """Return layer `index` as the checkpoint stores it, in fp32 on the device."""
        return self.load(index, read_layer(self._checkpoint, self.layer_name(index)))

    def run(self, index: int, layer: nn.Module, hidden: Tensor) -> Tensor:
        """Run a layer on hidden states [B, T, H]; its output is fp32 on the layer's device."""
        device = _device(layer)
        if device not in self._arguments:  # a copy in every call would make devices wait for each other
            self._arguments[device] = _moved(self._arguments[self.device], device, {})
        return layer(hidden.to(device), **self._arguments[device][index])

    def backward(self, index: int, layer: nn.Module, hidden: Tensor, gradient: Tensor) -> Tensor:
        """Return the loss's gradient at a layer's input `hidden` [B, T, H], given that at its output."""
        with torch.enable_grad():
            leaf = hidden.to(_device(layer)).detach().requires_grad_()
            self.run(index, layer, leaf).backward(gradient.to(leaf.device))
        assert leaf.grad is not None
        return leaf.grad

    def loss_gradient(self, hidden: Tensor, generator: torch.Generator) -> Tensor:
        """Return the loss's gradient [T, H], fp32, at the hidden states after the last layer.

        The loss is a sum over tokens; next tokens are drawn from the predictions themselves.
        """
        with torch.enable_grad():
            leaf = hidden.to(self.device).detach().requires_grad_()
            norm, head = self._final()
            normed = norm(leaf)
            with torch.no_grad():
                wrong = self.logits(hidden).softmax(-1)
                drawn = torch.multinomial(wrong, 1, generator=generator)
                wrong.scatter_add_(-1, drawn, wrong.new_full(drawn.shape, -1.0))
                parts = zip(wrong.split(HEAD_ROWS, -1), head.weight.split(HEAD_ROWS), strict=True)
                pull = sum((part @ rows.float() for part, rows in parts), torch.zeros_like(normed))
            normed.backward(pull)
        assert leaf.grad is not None
        return leaf.grad

    def logits(self, hidden: Tensor, other: AnyHead | None = None) -> Tensor:
        """Return logits [T, V], fp32 on the device, of hidden states [T, H] after the last layer.

        Uses the checkpoint's head unless `other` gives one.
        """
        norm, head = self._final()
        return (other or head).logits(norm(hidden.to(self.device)))

    def _final(self) -> tuple[nn.Module, PlainHead]:
        """Return the last norm and the head of the checkpoint."""
        if self._head is None:
            norm = copy.deepcopy(self._norm)
            weight = read(self._checkpoint, f"{self._arch.names.norm}.weight")
            norm.load_state_dict({"weight": weight.to(self.device, torch.float32)}, assign=True)
            stored = self._checkpoint.has(f"{self._arch.names.head}.weight")
            head = read(
                self._checkpoint, f"{self._arch.names.head if stored else self._arch.names.embed}.weight"
            )
            self._head = norm, PlainHead(head.to(self.device))
        return self._head


def _config(folder: Path) -> Any:
    """Return the config as transformers reads it; CheckpointError if it cannot."""
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # a missing or unknown model_type, an entry of the wrong kind
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{folder}/config.json: transformers, which calibration runs, does not read it ({reason})"
        ) from error


def _device(layer: nn.Module) -> torch.device:
    return next(layer.parameters()).device


def _moved(value: Any, device: torch.device, known: dict[int, Tensor]) -> Any:
    """Copy the tensors in lists, tuples and dicts to `device`; shared tensors stay shared."""
    if isinstance(value, Tensor):
        return known.setdefault(id(value), value.to(device))
    if isinstance(value, dict):
        return {key: _moved(own, device, known) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved(own, device, known) for own in value)
    return value


def read(checkpoint: Checkpoint, name: str) -> Tensor:
    """Read a tensor as stored; CheckpointError when a value is not finite."""
    tensor = checkpoint.tensor(name)
    blocks = tensor.flatten().split(1 << 24)  # isfinite copies, and a whole lm_head is larger than a layer
    if not all(torch.isfinite(block).all() for block in blocks):
        raise CheckpointError(
            f"{checkpoint.path}: {name} holds NaN or infinity; the checkpoint is damaged, download it again"
        )
    return tensor


def read_layer(checkpoint: Checkpoint, layer: str) -> dict[str, Tensor]:
    """Read all tensors of a decoder layer, by their names inside it."""
    prefix = f"{layer}."
    names = [name for name in checkpoint.names() if name.startswith(prefix)]
    return {name.removeprefix(prefix): read(checkpoint, name) for name in names}


def _layer_arguments(model: Any, arch: Arch, seqlen: int, device: torch.device) -> list[dict[str, Any]]:
    """Return the arguments that the model passes to each layer besides hidden states: RoPE tables, masks.

    The model's own forward runs with layers that only record, because families differ in masks and sliding
    windows.
    """
    body = model.base_model
    body.rotary_emb = type(body.rotary_emb)(model.config).to(device)
    layers = model.get_submodule(arch.names.layers)
    recorded: list[dict[str, Any]] = []

    def record(hidden: Tensor, **arguments: Any) -> Tensor:
        recorded.append(arguments)
        return hidden

    idle = [*layers, model.get_submodule(arch.names.norm)]
    for module in idle:
        module.forward = record
    body(inputs_embeds=torch.zeros(1, seqlen, model.config.hidden_size, device=device), use_cache=False)
    for module in idle:
        del module.forward
    return recorded[: len(layers)]
