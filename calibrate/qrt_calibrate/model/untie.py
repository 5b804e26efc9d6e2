"""A checkpoint whose head is not tied to the embedding, so that the head can be rounded."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qrt.arch import Arch
from qrt.quant.checkpoint import Checkpoint
from qrt.quant.spec import TensorSpec


class UntiedCheckpoint(Checkpoint):
    """A view of `base` whose config.json ties nothing.

    If `base` stores no head, the head is the embedding's tensor under the head's name.
    """

    def __init__(self, base: Checkpoint, arch: Arch) -> None:
        self.path, self.base = base.path, base
        self.entry, self.quantization = base.entry, base.quantization
        self.config = {**base.config, "tie_word_embeddings": False}
        if isinstance(text := base.config.get("text_config"), dict):
            self.config["text_config"] = {**text, "tie_word_embeddings": False}
        self._shard_of = dict(base._shard_of)
        self._head, self._embedding = f"{arch.names.head}.weight", f"{arch.names.embed}.weight"
        if not base.has(self._head):
            self._shard_of[self._head] = base.shard(self._embedding)

    @property
    def adds_head(self) -> bool:
        """Whether `base` stores no head."""
        return not self.base.has(self._head)

    def spec(self, name: str) -> TensorSpec:
        """Return shape and dtype as stored."""
        return self.base.spec(self._stored_name(name))

    def tensor(self, name: str, *checks: Any, **sizes: Any) -> Tensor:
        """Return the tensor as stored."""
        return self.base.tensor(self._stored_name(name), *checks, **sizes)

    def _stored_name(self, name: str) -> str:
        return self._embedding if name == self._head and not self.base.has(name) else name
