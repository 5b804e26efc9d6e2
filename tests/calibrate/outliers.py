"""Function-preserving outlier injection: a checkpoint that computes the same and is hard to quantize.

    from outliers import make_hard
    folder = make_hard(model_path("tiny"), tmp_path / "hard", "w4-hard")

Some channels are multiplied by a power of two where they are written and divided where they are read, so in
bf16 and fp32 the logits do not change by one bit, while activations grow outliers and weight groups mix large
columns with small ones. Rounding to nearest breaks on it; a method that moves scales back does not. The cure
is in the search space of the disease: this tests folds, pairs and searches, it does not rank algorithms.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from qrt.arch import Arch
from qrt.arch.read import read_arch
from qrt.quant.checkpoint import open_checkpoint


@dataclass(frozen=True)
class Profile:
    """`factor`: a power of two. `channels`: how many of each norm's and MLP's channels grow, the ones that
    matter most. `heads`: whether a value channel and a RoPE pair of keys grow in every KV head."""

    factor: float
    channels: int
    heads: bool


PROFILES = {
    "w4-hard": Profile(64.0, 32, heads=True),
    "w8a8-hard": Profile(256.0, 16, heads=True),
    "kv-hard": Profile(64.0, 0, heads=True),
}
WEIGHTS = "model.safetensors"


def make_hard(source: str | Path, out: str | Path, profile: str | Profile, seed: int = 7) -> Path:
    """Copy checkpoint `source` to the new folder `out` with the outliers of `profile`; returns `out`."""
    chosen = PROFILES[profile] if isinstance(profile, str) else profile
    checkpoint, out = open_checkpoint(source), Path(out)
    arch = config = read_arch(checkpoint.config, checkpoint.path)
    tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.names()}
    generator = torch.Generator().manual_seed(seed)
    for index in range(config.num_layers):
        layer = Layer(tensors, f"{arch.names.layers}.{index}", config)
        for pair in arch.smooth:
            if pair.source.endswith("norm"):
                layer.grow_norm(pair.source, pair.readers, chosen)
        layer.grow_mlp(chosen)
        if chosen.heads:
            layer.grow_values(chosen.factor, generator)
            layer.grow_keys(chosen.factor, generator)
    out.mkdir(parents=True)
    for path in checkpoint.path.iterdir():
        if path.is_file() and "safetensors" not in path.name:
            shutil.copyfile(path, out / path.name)
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    return out


class Layer:
    """The tensors of one decoder layer, changed in place."""

    def __init__(self, tensors: dict[str, Tensor], prefix: str, config: Arch) -> None:
        self._tensors, self._prefix, self._config = tensors, prefix, config

    def weight(self, module: str) -> Tensor:
        return self._tensors[f"{self._prefix}.{module}.weight"]

    def scale_rows(self, module: str, rows: Tensor, factor: float) -> None:
        """Outputs `rows` of a Linear or norm, its bias included."""
        for part in ("weight", "bias"):
            name = f"{self._prefix}.{module}.{part}"
            if name in self._tensors:
                self._tensors[name][rows] *= factor

    def grow_norm(self, norm: str, readers: tuple[str, ...], profile: Profile) -> None:
        """A norm writes large channels, its readers read them small."""
        columns = sum(self.weight(reader).float().square().sum(0) for reader in readers)
        rows = (self.weight(norm).float().abs() * columns.sqrt()).topk(profile.channels).indices
        self.scale_rows(norm, rows, profile.factor)
        for reader in readers:
            self.weight(reader)[:, rows] /= profile.factor

    def grow_mlp(self, profile: Profile) -> None:
        """up_proj writes large channels (the gate cannot: it passes through SiLU), down_proj reads them."""
        up, down = self.weight("mlp.up_proj").float(), self.weight("mlp.down_proj").float()
        rows = (up.norm(dim=1) * down.norm(dim=0)).topk(profile.channels).indices
        self.scale_rows("mlp.up_proj", rows, profile.factor)
        self.weight("mlp.down_proj")[:, rows] /= profile.factor

    def grow_values(self, factor: float, generator: torch.Generator) -> None:
        """One value channel of each KV head grows; every query head that reads it takes it back."""
        for head in range(self._config.num_kv_heads):
            channel = torch.randint(self._config.head_dim, (1,), generator=generator)
            self.scale_rows("self_attn.v_proj", head * self._config.head_dim + channel, factor)
            self.weight("self_attn.o_proj")[:, self.query_rows(head, channel)] /= factor

    def grow_keys(self, factor: float, generator: torch.Generator) -> None:
        """One RoPE pair of each KV head's keys grows (of the norm over heads, where there is one)."""
        half = self._config.head_dim // 2
        for head in range(1 if self._config.qk_norm else self._config.num_kv_heads):
            channel = torch.randint(half, (1,), generator=generator)
            pair = torch.cat([channel, channel + half])
            if self._config.qk_norm:
                self.scale_rows("self_attn.k_norm", pair, factor)
                self.scale_rows("self_attn.q_norm", pair, 1 / factor)
            else:
                self.scale_rows("self_attn.k_proj", head * self._config.head_dim + pair, factor)
                self.scale_rows("self_attn.q_proj", self.query_rows(head, pair), 1 / factor)

    def query_rows(self, kv_head: int, channels: Tensor) -> Tensor:
        """Rows of q_proj, or columns of o_proj, of the query heads that share a KV head."""
        group = self._config.num_heads // self._config.num_kv_heads
        heads = kv_head * group + torch.arange(group)
        return (heads[:, None] * self._config.head_dim + channels).flatten()
