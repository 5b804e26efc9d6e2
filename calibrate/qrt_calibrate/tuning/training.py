"""How the whole model is trained, chosen from the recipe and the device, and the memory that it takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qrt.arch import Arch
from qrt.errors import ConfigError
from qrt_calibrate.model.streams import available_ram
from qrt_calibrate.recipe.recipe import Recipe

BATCH = 4  # windows per step
LAUNCHED_BATCH = 16  # per step of a small model on a GPU, which waits for launches: more windows cost little
WINDOW = 512  # most tokens per window
DRAWN = 128  # fewest windows that are drawn together
DRAWN_BYTES = 8 << 30  # a GPU draws more together, as long as their keys and values fit in this
TEXT_WINDOWS = 4  # drawn windows to one window of the calibration text
MICRO_TOKENS = 2048  # tokens of a step that go through the model together
SMALL = 1 << 30  # a GPU computes in fp32 for models of fewer weights


@dataclass(frozen=True)
class Training:
    """How the whole model is trained.

    steps           steps of the optimizer; 0: the model is not trained
    seed            seed of the drawn text and of the windows cut from the calibration text
    length          tokens per window
    batch           drawn windows per step
    cache_bytes     bytes of one window's keys and values while it is drawn
    dtype           dtype of the computation and of Adam's moments
    device          device that computes
    """

    steps: int
    seed: int
    length: int
    batch: int
    cache_bytes: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, recipe: Recipe, config: Arch, num_weights: int, device: torch.device) -> Training:
        """Choose the training of a model with `num_weights` weights on `device`."""
        on_gpu, small = device.type == "cuda", num_weights < SMALL
        dtype = torch.float32 if small or not on_gpu else torch.bfloat16
        length = min(WINDOW, recipe.seqlen)
        width = 2 * config.num_kv_heads * config.head_dim
        return cls(
            steps=recipe.tune,
            seed=recipe.seed,
            length=length,
            batch=LAUNCHED_BATCH if on_gpu and small else BATCH,
            cache_bytes=length * config.num_layers * width * dtype.itemsize,
            dtype=dtype,
            device=device,
        )

    @property
    def drawn_together(self) -> int:
        """Number of windows that are drawn together."""
        fitting = DRAWN_BYTES // self.cache_bytes if self.device.type == "cuda" else 0
        return max(DRAWN, fitting // LAUNCHED_BATCH * LAUNCHED_BATCH)

    @property
    def text_windows(self) -> int:
        """Number of windows of the calibration text per step."""
        return max(1, self.batch // TEXT_WINDOWS)

    def num_bytes(self, config: Arch, trained: int, others: int) -> int:
        """Return the bytes that training takes, for `trained` weights of Linears and `others` in the model.

        Each trained weight has the original, the rounded one, its gradient and two moments, and its code in
        fp32. Beside them there are the activations of a step, or the keys and values of the drawn windows.
        """
        if not self.steps:
            return 0
        size = self.dtype.itemsize
        per_token = 12 * config.hidden_size + 5 * config.intermediate_size  # activations in one layer
        tokens = max(MICRO_TOKENS, self.length)
        step = tokens * (config.num_layers * per_token * size + 5 * config.vocab_size * 4)
        weights = trained * (5 * size + 4) + others * size
        return weights + max(self.drawn_together * self.cache_bytes, step)


def check_room(wanted: int, device: torch.device) -> None:
    """Raise ConfigError unless `wanted` bytes are free where `device` computes."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_ram()
    if wanted > free:
        raise ConfigError(
            f"--tune: trains the whole model at once, which takes about {wanted / 1e9:.1f} GB; {device} "
            f"has {free / 1e9:.1f} GB free. Leave it out, or use a larger --device"
        )
