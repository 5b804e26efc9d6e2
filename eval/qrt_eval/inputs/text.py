"""Load the text that an evaluator reads: `wikitext`, `pydoc`, a data file, or a folder of data files."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

from qrt.errors import ConfigError
from qrt.text.data.files import KINDS, find_files
from qrt.text.data.rows import read_rows
from qrt.text.data.texts import Texts
from qrt_eval.inputs import wikitext

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Document:
    """Hold one document: the text a model reads, and the original, whose words and bytes divide the loss."""

    text: str
    original: str


@dataclass(frozen=True)
class EvalText:
    """Hold a text and say where it came from.

    text        all of it; for wikitext the rows joined by a blank line, as GPTQ and most papers read it
    raw         the file as llama.cpp reads it, without a byte order mark; only wikitext keeps CRLF line ends
    documents   its parts, which lm-eval reads one by one
    """

    name: str
    text: str
    source: str
    raw: str
    documents: tuple[Document, ...]

    @property
    def sha256(self) -> str:
        """Return the hash of `raw` in UTF-8. It shows whether two results read the same text."""
        return hashlib.sha256(self.raw.encode()).hexdigest()


def load_text(dataset: str, data_file: str | None = None) -> EvalText:
    """Load `wikitext`, `pydoc`, or the data file or folder at a path.

    A text file is one document; in other files the text of each row is one. `data_file` is a local copy of
    `wiki.test.raw`, used instead of the download. ConfigError if something is missing, empty or not text.
    """
    if dataset == "wikitext":
        return _wikitext(data_file)
    if data_file is not None:
        raise ConfigError(f"--data-file: expected the dataset wikitext, got {dataset}; omit it")
    if dataset == "pydoc":
        return _pydoc()
    path = Path(dataset)
    if not path.exists():
        raise ConfigError(
            f"dataset: expected wikitext, pydoc, or a file or folder that exists, got {dataset!r}; a file is "
            f"{KINDS}"
        )
    return _files(path)


def _joined(name: str, parts: list[str], source: str) -> EvalText:
    text = "\n\n".join(parts)
    if not text.strip():
        raise ConfigError(f"{source}: expected text, got none; give another file")
    return EvalText(name, text, source, text, tuple(Document(part, part) for part in parts))


def _pydoc() -> EvalText:
    """Return Python's language reference, which every installation carries, with topics in sorted order."""
    import platform
    from pydoc_data.topics import topics

    source = f"pydoc_data.topics of Python {platform.python_version()}"
    return _joined("pydoc", [topics[name] for name in sorted(topics)], source)


def _wikitext(data_file: str | None) -> EvalText:
    rows, source = wikitext.read_rows(data_file)
    raw = wikitext.raw_text(rows)
    if not raw.strip():
        raise ConfigError(f"{source}: expected text, got none; {wikitext.HELP}")
    documents = tuple(Document(wikitext.detokenize(page), page) for page in wikitext.pages(raw))
    text = EvalText("wikitext", "\n\n".join(rows), source, raw, documents)
    if text.sha256 != wikitext.SHA256:
        logger.warning(
            "%s is not the canonical %s (sha256 %s...); do not compare its figures with published ones",
            source, wikitext.FILE, text.sha256[:12],
        )  # fmt: skip
    return text


def _files(path: Path) -> EvalText:
    """Load every text of a file or folder, in the order of paths and rows. Empty texts are left out."""
    found, texts = find_files(path), Texts(render=None)
    parts = list(texts.documents(row for file in found.files for row in read_rows(file)))
    if not parts:
        reasons = texts.reasons() or "it is empty"
        raise ConfigError(f"{path}: expected text, got none that can be read ({reasons})")
    for note in texts.notes(str(path), found.left_out):
        logger.warning(note)
    return _joined(found.name, parts, str(path))
