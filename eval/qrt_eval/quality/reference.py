"""Keep the distributions of a baseline over a text as hidden states, in memory or in a file.

The logits of a position are head @ state. So the final hidden states and the head hold all distributions
exactly, with H numbers per position instead of V. The file holds:

    safetensors   hidden [R, H], head [V, H]; ids int32 of all windows, one after the other, and windows
                  int32 [W, 3]: tokens, first scored, bytes. Metadata "qrt_reference": JSON with the text,
                  the protocol, the model and hashes
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
from qrt.offline.llm import LLM
from qrt_eval.quality.protocol import Window

KEY = "qrt_reference"


@dataclass(frozen=True)
class ReferenceLogprobs:
    """Hold the distributions of one model over `windows`.

    facts     the model, the text and the protocol
    hidden    [n, H] per window, for its scored positions, in host memory; None if it is not needed
    head      [V, H] on the device that compares
    """

    facts: Mapping[str, Any]
    windows: Sequence[Window]
    hidden: Sequence[Tensor | None]
    head: Tensor

    @property
    def longest(self) -> int:
        """Return how many tokens a model reads of the longest window: all but the last."""
        return max(len(window.ids) for window in self.windows) - 1

    def logits(self, states: Tensor) -> Tensor:
        """Turn some rows of `hidden` into logits [n, V], as the model's own head does."""
        return F.linear(states.to(self.head.device), self.head)

    def save(self, path: str | Path) -> None:
        """Write the file, which appears whole or not at all; every window must have its states.

        Makes folders as needed. QrtError if the disk refuses.
        """
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
    """Return the head [V, H] of a model; UnsupportedError if it is quantized or has a bias."""
    head = llm.engine.model.head
    if head.scheme != "fp16" or head.bias is not None:
        raise UnsupportedError(
            f"{llm.engine.config.model}: expected an unquantized head without bias in a baseline, got "
            f"{head.scheme}{'' if head.bias is None else ' with a bias'}; give the model it was made from"
        )
    return head.tensors[0]


def load(path: str | Path, device: torch.device) -> ReferenceLogprobs:
    """Read a file that `ReferenceLogprobs.save` wrote; ConfigError if it is something else."""
    if not Path(path).is_file():
        raise ConfigError(
            f"--base-file: expected a file of qrt-eval kld --save-base, got {path}, which does not exist"
        )
    try:
        with safe_open(path, "pt") as file:
            facts = json.loads((file.metadata() or {})[KEY])
            hidden, head = file.get_tensor("hidden"), file.get_tensor("head")
            ids, sizes = file.get_tensor("ids").tolist(), file.get_tensor("windows").tolist()
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ConfigError(f"--base-file: expected a file of --save-base, got {path} ({error})") from error
    windows, start = [], 0
    for length, first, num_bytes in sizes:
        windows.append(Window(tuple(ids[start : start + length]), first, num_bytes))
        start += length
    return ReferenceLogprobs(facts, windows, hidden.split([w.num_scored for w in windows]), head.to(device))
