"""Calibration text and the token windows cut from it; the default text needs no network."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from qrt.errors import CheckpointError, ConfigError

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data"}


def read_text(calib: str | None) -> tuple[str, str]:
    """The calibration text and its name: a local file, or the standard library's docstrings."""
    if calib is None:
        return "\n\n".join(docstrings(Path(sysconfig.get_paths()["stdlib"]))), "python-docstrings"
    path = Path(calib)
    if not path.is_file():
        raise ConfigError(f"--calib: no file {calib!r}; give a UTF-8 text file, or leave the flag out")
    try:
        return path.read_text(encoding="utf-8"), path.name
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--calib: {calib!r} is not UTF-8 text ({error.reason} at byte {error.start})"
        ) from None


def docstrings(root: Path) -> Iterator[str]:
    """Docstrings of the modules, classes and functions under `root`, in the order of the paths.

    English about programming that every Python installation carries; tests are skipped, and so is
    `pydoc_data`, which evaluation reads.
    """
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            yield from _docstrings(ast.parse(path.read_bytes()))


def _docstrings(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    if text := ast.get_docstring(node):
        yield text
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(child)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The checkpoint's own tokenizer; never runs code of the checkpoint."""
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises many kinds here, most of them several lines long
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{folder}: no usable tokenizer, which calibration needs ({reason})") from error


def cut_windows(
    text: str, tokenizer: PreTrainedTokenizerBase, n_samples: int, seqlen: int, seed: int
) -> Tensor:
    """Token ids int64 [n_samples, seqlen]: disjoint windows of the text, chosen and ordered by `seed`.

    Each window begins with BOS when the tokenizer puts one before a text. ConfigError: text too short.
    """
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    bos = [tokenizer.bos_token_id] if tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id else []
    width = seqlen - len(bos)
    slots = len(ids) // width
    if slots < n_samples:
        raise ConfigError(
            f"calibration text: {len(ids)} tokens, wanted {n_samples * width} for {n_samples} samples "
            f"of {seqlen}; give a longer --calib file, or fewer --n-samples or a shorter --seqlen"
        )
    chosen = torch.randperm(slots, generator=torch.Generator().manual_seed(seed))[:n_samples]
    windows = torch.tensor(ids)[: slots * width].view(slots, width)[chosen]
    return torch.cat([torch.tensor(bos, dtype=torch.long).expand(n_samples, -1), windows], dim=1)
