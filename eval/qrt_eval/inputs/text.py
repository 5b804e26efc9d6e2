"""The texts an evaluator reads: `wikitext`, `pydoc`, a data file, or a folder of them."""

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
    """One document: what the model reads, and the original by whose words and bytes a loss is divided."""

    text: str
    original: str


@dataclass(frozen=True)
class EvalText:
    """A text and where it came from.

    text        all of it; of wikitext the rows joined by a blank line, as GPTQ and most papers read it
    raw         the file as llama.cpp reads it, without a byte order mark; CRLF stays only in wikitext
    documents   its parts, as lm-eval reads them one by one
    """

    name: str
    text: str
    source: str
    raw: str
    documents: tuple[Document, ...]

    @property
    def sha256(self) -> str:
        """Of `raw` in UTF-8, so that two results say whether they read the same."""
        return hashlib.sha256(self.raw.encode()).hexdigest()


def load_text(dataset: str, data_file: str | None = None) -> EvalText:
    """Load `wikitext`, `pydoc`, or the data file or folder at a path.

    A text file is a document, and so is the text of each row.

    data_file   a local copy of `wiki.test.raw`, instead of the download

    ConfigError says what is missing, empty or not text, and the remedy.
    """
    if dataset == "wikitext":
        return _wikitext(data_file)
    if data_file is not None:
        raise ConfigError(f"--data-file goes with the dataset 'wikitext', not with {dataset!r}")
    if dataset == "pydoc":
        return _pydoc()
    path = Path(dataset)
    if not path.exists():
        raise ConfigError(
            f"dataset {dataset!r}: not 'wikitext', not 'pydoc', and no such file or folder; give a file of "
            f"{KINDS}, or a folder of them"
        )
    return _files(path)


def _joined(name: str, parts: list[str], source: str) -> EvalText:
    text = "\n\n".join(parts)
    if not text.strip():
        raise ConfigError(f"{source}: holds no text")
    return EvalText(name, text, source, text, tuple(Document(part, part) for part in parts))


def _pydoc() -> EvalText:
    """The language reference that every Python carries, topics in sorted order."""
    import platform
    from pydoc_data.topics import topics

    source = f"pydoc_data.topics of Python {platform.python_version()}"
    return _joined("pydoc", [topics[name] for name in sorted(topics)], source)


def _wikitext(data_file: str | None) -> EvalText:
    rows, source = wikitext.read_rows(data_file)
    raw = wikitext.raw_text(rows)
    if not raw.strip():
        raise ConfigError(f"{source}: holds no text; {wikitext.HELP}")
    documents = tuple(Document(wikitext.detokenize(page), page) for page in wikitext.pages(raw))
    text = EvalText("wikitext", "\n\n".join(rows), source, raw, documents)
    if text.sha256 != wikitext.SHA256:
        logger.warning(
            "%s is not the canonical %s (sha256 %s...): figures compare with nothing published",
            source, wikitext.FILE, text.sha256[:12],
        )  # fmt: skip
    return text


def _files(path: Path) -> EvalText:
    """Load every text of a file or folder, in the order of paths and rows, without empty ones."""
    found, texts = find_files(path), Texts(render=None)
    parts = list(texts.documents(row for file in found.files for row in read_rows(file)))
    if not parts:
        raise ConfigError(f"{path}: holds no text that can be read ({texts.reasons() or 'it is empty'})")
    for note in texts.notes(str(path), found.left_out):
        logger.warning(note)
    return _joined(found.name, parts, str(path))
