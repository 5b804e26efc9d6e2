"""Calibration data and the token windows cut from it; the default text needs no network."""

from __future__ import annotations

import ast
import hashlib
import logging
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qrt.errors import ConfigError
from qrt.text.loading import load
from qrt_calibrate.lines import parse, read_rows, read_text
from qrt_calibrate.plan import Job

logger = logging.getLogger(__name__)

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data"}
TEXT_FILES = (".txt", ".md", ".rst")
FILES = (*TEXT_FILES, ".jsonl", ".json", ".csv", ".parquet")  # other dots are of datasets' names
CHAT_KEYS = ("messages", "conversations")
TEXT_KEYS = ("text", "content", "prompt")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}  # other names are roles as they are
MAX_ROWS = 20_000  # of a dataset by name: more than any calibration needs


@dataclass(frozen=True)
class Calibration:
    """Token ids int64 [B, T] of the windows that calibrate, then of those that evaluate; and what the
    checkpoint's config records of them."""

    windows: Tensor
    metadata: dict[str, Any]


def calibration(job: Job) -> Calibration:
    """The windows of a job, by the checkpoint's own tokenizer."""
    recipe = job.recipe
    tokenizer = load_tokenizer(job.checkpoint.path)
    texts, source = read_texts(recipe.calib, tokenizer)
    count = sum(recipe.windows)
    windows = cut_windows(texts, tokenizer, count, recipe.seqlen, recipe.seed)
    sha256 = hashlib.sha256("\n\n".join(texts).encode()).hexdigest()
    shape = {"n_samples": recipe.windows[0], "seqlen": recipe.seqlen, "seed": recipe.seed}
    return Calibration(windows, {"calibration": {"text": source, "sha256": sha256, **shape}})


def read_texts(calib: str | None, tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], str]:
    """Texts and the name of their source: a text file, JSONL (a text a line, or chat messages, which pass
    through the chat template), a folder of them, a .json that is a list of such rows, a datasets name
    ("org/name", "org/name:config:split"), or the standard library's docstrings.
    """
    if calib is None:
        return list(docstrings(Path(sysconfig.get_paths()["stdlib"]))), "python-docstrings"
    path = Path(calib)
    name = path.name
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in (*TEXT_FILES, ".jsonl") and p.is_file())
        if not files:
            raise ConfigError(f"--calib: no {', '.join(TEXT_FILES)} or .jsonl files in {calib!r}")
        found = [text for file in files for text in _file_texts(file, tokenizer)]
    elif path.is_file():
        found = list(_file_texts(path, tokenizer))
    elif path.suffix in FILES or calib.startswith((".", "/", "~")):
        raise ConfigError(f"--calib: no file {calib!r}; give a UTF-8 text file, or leave the flag out")
    else:
        name, found = calib, list(_row_texts(_dataset(calib), calib, tokenizer))
    texts = [text for text in found if text is not None]
    if not texts:
        raise ConfigError(
            f"--calib: of {len(found)} rows in {calib!r} none has text; give data that has some"
        )
    if len(texts) < len(found):
        left_out = len(found) - len(texts)
        logger.warning(
            "--calib: %d of the %d texts of %s are conversations without messages, and left out",
            left_out, len(found), calib,
        )  # fmt: skip
    return texts, name


def _file_texts(path: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[str | None]:
    if path.suffix == ".json":
        yield from _row_texts(_list(path), str(path), tokenizer)
    elif path.suffix == ".jsonl":
        yield from _row_texts((row for _, row in read_rows(path, "--calib")), str(path), tokenizer)
    else:
        yield read_text(path, "--calib")


def _list(path: Path) -> list[Any]:
    """The rows of a .json file; ConfigError where it is no list."""
    content = read_text(path, "--calib", "utf-8-sig")
    try:
        rows = parse(content)
    except ValueError as error:
        raise ConfigError(
            f"--calib: {path} is not JSON ({error}); name it .jsonl if it is a JSON value a line"
        ) from None
    if not isinstance(rows, list):
        raise ConfigError(f"--calib: {path} holds {type(rows).__name__}, wanted a list of rows")
    return rows


def _row_texts(rows: Iterable[Any], source: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[str | None]:
    """The text of each row: a string, {"text": ...}, {"messages": [{"role", "content"}, ...]}, or ShareGPT's
    {"conversations": [{"from", "value"}, ...]}; None for a conversation without messages."""
    for number, row in enumerate(rows, 1):
        if isinstance(row, str):
            yield row
            continue
        row = row if isinstance(row, Mapping) else {}
        messages = next((row[key] for key in CHAT_KEYS if row.get(key) is not None), None)
        text = next((row[key] for key in TEXT_KEYS if isinstance(row.get(key), str)), None)
        if messages:
            yield _rendered(messages, f"--calib: {source}, row {number}", tokenizer)
        elif messages is None and text is not None:
            yield text
        elif not row.keys().isdisjoint(CHAT_KEYS):
            yield None
        else:
            raise ConfigError(
                f"--calib: {source}, row {number} has keys {sorted(row)}, wanted one of "
                f"{', '.join((*CHAT_KEYS, *TEXT_KEYS))}"
            )


def _rendered(messages: Any, where: str, tokenizer: PreTrainedTokenizerBase) -> str:
    if tokenizer.chat_template is None:
        raise ConfigError(f"{where} holds chat messages, but the model has no chat template; give plain text")
    if not isinstance(messages, list):
        raise ConfigError(f"{where}: got {type(messages).__name__}, wanted a list of chat messages")
    chat = [_message(entry, f"{where}, message {number}") for number, entry in enumerate(messages, 1)]
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False))
    except Exception as error:  # the template is the model's own code, and raises what it likes
        raise ConfigError(f"{where}: the chat template refuses it ({error})") from None


def _message(entry: Any, where: str) -> dict[str, Any]:
    """A chat message as templates read it; ConfigError where they would print nothing of it."""
    message = dict(entry) if isinstance(entry, Mapping) else {}
    if "role" not in message:
        sender = message.get("from")
        message = {"role": SHAREGPT_ROLES.get(str(sender), sender), "content": message.get("value")}
    parts = message.get("content")
    if isinstance(parts, list) and parts:  # joined, as the server does
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
        message["content"] = "\n".join(map(str, texts)) if all(isinstance(t, str) for t in texts) else None
    has_content = isinstance(message.get("content"), str) or message.get("tool_calls")
    if not isinstance(message.get("role"), str) or not has_content:
        raise ConfigError(
            f"{where}: got {entry!r:.80}, wanted a role and a content that are text, or ShareGPT's from "
            "and value"
        )
    return message


def _dataset(name: str) -> Iterable[Any]:
    """Rows of a dataset of the Hub or of its cache: "path", "path:config" or "path:config:split"."""
    import datasets

    path, _, rest = name.partition(":")
    config, _, split = rest.partition(":")
    try:
        rows = datasets.load_dataset(path, config or None, split=split or "train", streaming=True)
        return list(rows.take(MAX_ROWS))
    except Exception as error:  # no network, no such dataset, another split: many kinds
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"--calib: neither a file nor a dataset that can be read: {name!r} ({reason}); give a local one, "
            "or leave the flag out for the built-in text"
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
    """Load the checkpoint's own tokenizer, as the server does."""
    tokenizer: PreTrainedTokenizerBase = load(folder)
    return tokenizer


def cut_windows(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, count: int, seqlen: int, seed: int
) -> Tensor:
    """Token ids int64 [count, seqlen]: disjoint windows of the texts, packed one after the other, chosen and
    ordered by `seed`; more of them begin with the same ones.

    Each window begins with BOS when the tokenizer puts one before a text. ConfigError: text too short.
    """
    ids = tokenizer("\n\n".join(texts), add_special_tokens=False, verbose=False)["input_ids"]
    bos = [tokenizer.bos_token_id] if tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id else []
    width = seqlen - len(bos)
    slots = len(ids) // width
    if slots < count:
        raise ConfigError(
            f"calibration text: {len(ids)} tokens, wanted {count * width} for {count} samples "
            f"of {seqlen}; give a longer --calib, or fewer --n-samples or a shorter --seqlen"
        )
    chosen = torch.randperm(slots, generator=torch.Generator().manual_seed(seed))[:count]
    windows = torch.tensor(ids)[: slots * width].view(slots, width)[chosen]
    return torch.cat([torch.tensor(bos, dtype=torch.long).expand(count, -1), windows], dim=1)
