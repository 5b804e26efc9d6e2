"""The calibrator in Python: `qrt.calibrate` writes a checkpoint, `qrt.quantize` makes one for LLM.

report = qrt.calibrate("Qwen/Qwen3-8B", "Qwen3-8B-w4", bits=4)
llm = qrt.LLM(qrt.quantize(model, tokenizer, bits=8))
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from qrt.errors import ConfigError
from qrt.quant.checkpoint.format import CODES, FP8, LEFT_OVER
from qrt_calibrate.job.plan import source_folder
from qrt_calibrate.model.devices import devices_of
from qrt_calibrate.pipeline import calibrate as run
from qrt_calibrate.recipe.recipe_file import recipe_of
from qrt_calibrate.report.report import Report

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase  # which takes seconds

_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []  # made by `quantize`, removed when the process ends


def calibrate(
    model: str | Path | PreTrainedModel,
    out: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    **settings: Any,
) -> Report:
    """Quantize `model` into the new folder `out`.

    `model` is a checkpoint folder, ORG/NAME[@REVISION] of the Hub (kept in `download_dir`), "tiny", or a
    model in memory.

    `settings` are a recipe's entries, as in a --recipe file: bits, scheme, group_size, symmetric, head_bits,
    method, calib, n_samples, seqlen, eval_samples, seed, damping, exact_folds, tune, target_bits, max_size,
    ignore, override.
    `device` is that of --device: "cuda", and None on a machine with GPUs, means all GPUs.
    A model in memory needs its `tokenizer`, unless method is "rtn" and no eval_samples are asked for. Raises
    QrtError as the command line does; an unknown entry is a ConfigError.
    """
    recipe = recipe_of(settings)
    devices = devices_of(device)
    if isinstance(model, str | Path):
        if tokenizer is not None:
            raise ConfigError("tokenizer: a checkpoint folder carries its own; leave it out")
        source = source_folder(model, revision=revision, download_dir=download_dir)
        return run(source, recipe, Path(out), *devices)
    if tokenizer is None and any(recipe.windows):
        raise ConfigError(
            "tokenizer: expected the model's, to read the calibration text, got none; give it, or take "
            "method='rtn', which reads no text"
        )
    with tempfile.TemporaryDirectory() as folder:
        _save(model, tokenizer, Path(folder))
        return run(folder, recipe, Path(out), *devices)


def quantize(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, **settings: Any
) -> str:
    """Quantize a model in memory; return a folder for `LLM(...)` that is removed when the process ends.

    Settings are those of `calibrate`; unless they name a method, weights are rounded to nearest, which needs
    no text. Without a `tokenizer` here, pass one to LLM.
    """
    settings = {"method": "rtn", "eval_samples": 0, **settings}
    folder = tempfile.TemporaryDirectory(prefix="qrt-")
    _FOLDERS.append(folder)
    out = Path(folder.name) / "quantized"
    calibrate(model, out, tokenizer=tokenizer, **settings)
    return str(out)


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    for name, given in (("model", model), ("tokenizer", tokenizer)):
        if not hasattr(given, "save_pretrained") and (given is not None or name == "model"):
            raise ConfigError(f"{name}: expected one of transformers', got {type(given).__name__}")
    if getattr(model, "hf_quantizer", None) is not None and _holds_integers(model):
        raise ConfigError(
            "model: expected weights in 16 bits or fp8, got integers, already quantized; load the "
            "unquantized one"
        )
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _holds_integers(model: PreTrainedModel) -> bool:
    """Return whether weights of a model in memory are integer codes, and not only left over."""
    kinds = {*CODES} - {*FP8}
    return any(
        own.dtype in kinds and not name.endswith(LEFT_OVER) for name, own in model.state_dict().items()
    )
