"""What a model is compared with: another model's distributions over a text, kept as hidden states.

The logits of a position are head @ state, so the final hidden states and the head hold all distributions
exactly, in H numbers a position instead of V. In memory or in a file:

    safetensors   hidden [R, H], head [V, H]; ids int32 of all windows, one after the other, and windows
                  int32 [W, 3]: tokens, first scored, bytes. Metadata "qrt_reference": JSON, of text,
                  protocol, model and hashes
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from qrt.errors import ConfigError, QrtError, UnsupportedError
from qrt.llm import LLM
from qrt_eval.quality.protocol import Window

KEY = "qrt_reference"


@dataclass(frozen=True)
class Reference:
    """Distributions of one model over `windows`.

    facts     what it is: of the model, the text and the protocol
    hidden    [n, H] a window, of its scored positions, in host memory; None where it is not needed
    head      [V, H] where the comparison runs
    """

    facts: Mapping[str, Any]
    windows: Sequence[Window]
    hidden: Sequence[Tensor | None]
    head: Tensor

    @property
    def longest(self) -> int:
        """Tokens that a model reads of the longest window: all but the last."""
        return max(len(window.ids) for window in self.windows) - 1

    def logits(self, states: Tensor) -> Tensor:
        """Some rows of `hidden` -> [n, V], as the model's own head computes them."""
        return F.linear(states.to(self.head.device), self.head)

    def save(self, path: str | Path) -> None:
        """Write the file, of a reference that has all states; folders are made as needed. It appears whole or
        not at all; QrtError where the disk refuses."""
        assert all(states is not None for states in self.hidden)
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        sizes = [(len(w.ids), w.first, w.num_bytes) for w in self.windows]
        tensors = {
            "hidden": torch.cat([states for states in self.hidden if states is not None]),
            "head": self.head.cpu().contiguous(),
            "ids": torch.tensor([token for w in self.windows for token in w.ids], dtype=torch.int32),
            "windows": torch.tensor(sizes, dtype=torch.int32),
        }
        part = target.with_name(target.name + ".writing")
        try:
            save_file(tensors, part, metadata={KEY: json.dumps(self.facts)})
            part.replace(target)
        except (SafetensorError, OSError) as error:
            part.unlink(missing_ok=True)
            raise QrtError(f"--save-base {target}: cannot be written ({error})") from None


def head_of(llm: LLM) -> Tensor:
    """The unquantized head [V, H] of a model; UnsupportedError where it is quantized."""
    head = llm.engine.model.head
    if head.scheme != "fp16" or head.bias is not None:
        raise UnsupportedError(
            f"{llm.engine.config.model}: a baseline needs a plain unquantized head, this one is {head.scheme}"
            f"{'' if head.bias is None else ' with a bias'}; compare with the model it was made from"
        )
    return head.tensors[0]


def load(path: str | Path, device: torch.device) -> Reference:
    """Read a file of `Reference.save`; ConfigError when it is not one."""
    if not Path(path).is_file():
        raise ConfigError(
            f"--base-file {path}: no such file; write it with qrt-eval kld ... --save-base FILE"
        )
    try:
        with safe_open(path, "pt") as file:
            facts = json.loads((file.metadata() or {})[KEY])
            hidden, head = file.get_tensor("hidden"), file.get_tensor("head")
            ids, sizes = file.get_tensor("ids").tolist(), file.get_tensor("windows").tolist()
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ConfigError(f"--base-file {path}: not a file of --save-base ({error})") from error
    windows, start = [], 0
    for length, first, num_bytes in sizes:
        windows.append(Window(tuple(ids[start : start + length]), first, num_bytes))
        start += length
    return Reference(facts, windows, hidden.split([w.num_scored for w in windows]), head.to(device))
