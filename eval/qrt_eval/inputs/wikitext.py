"""Read WikiText-2's test split in three ways: as joined rows, as the raw file, and as detokenized pages.

The canonical `wiki.test.raw` has 4,358 lines that end with LF. A copy with CRLF line ends or without the
blank lines tokenizes differently, so its figures compare with nothing published.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path

from qrt.config import ENV
from qrt.errors import ConfigError
from qrt.model_files import hub
from qrt.text.data.files import DataFile, decoding_fault, kind_of
from qrt.text.data.rows import read_rows as read_data

FILE = "wiki.test.raw"
SHA256 = "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08"
HELP = (
    f"give the file with --data-file PATH, or name a folder that holds {FILE} in QRT_DATA, "
    "or connect to the Hugging Face Hub"
)
BLANK = " \n"  # how the file writes a blank row; the dataset has an empty string

# lm-eval's task `wikitext` (version 2) undoes WikiText's tokenization with these replacements, in this order.
# The pattern with slashes in `detokenize` is a mistake there that is copied here.
_BEFORE_BRACKETS = (
    ("s '", "s'"), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."), (" : ", ": "), (" ; ", "; "),
    (" . ", ". "), (" ! ", "! "), (" ? ", "? "), (" , ", ", "),
)  # fmt: skip
_ENCLOSED = tuple(
    (re.compile(rf"{left}\s*([^{right}]*?)\s*{right}"), pair)
    for left, right, pair in (
        (r"\(", r"\)", r"(\1)"), (r"\[", r"\]", r"[\1]"), ("{", "}", r"{\1}"),
        ('"', '"', r'"\1"'), ("'", "'", r"'\1'"),
    )
)  # fmt: skip
_AFTER_BRACKETS = (
    ("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"),
    (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s"),
)  # fmt: skip


def read_rows(data_file: str | None) -> tuple[list[str], str]:
    """Return the rows as the dataset has them (blank rows are empty), and where they came from.

    The source is `data_file`, else the folder in QRT_DATA, else the Hub. ConfigError, with the ways to give a
    file, if none of them has the text.
    """
    path = Path(data_file) if data_file else _find()
    if path is None:
        return _download(), "Salesforce/wikitext, wikitext-2-raw-v1, test"
    if not path.is_file():
        raise ConfigError(f"--data-file: expected a file, got {path}, which does not exist; {HELP}")
    file = DataFile(path, *kind_of(path))
    if file.has_rows:
        return _rows_of(file), str(path)
    with file.open_text(newline="") as stream:
        raw = stream.read()
    if fault := decoding_fault(raw):
        raise ConfigError(f"{path}: expected UTF-8 text, got {fault}; {HELP}")
    return [row if row.strip() else "" for row in StringIO(raw)], str(path)  # ends at "\n" alone


def raw_text(rows: Sequence[str]) -> str:
    """Return the file that `rows` came from."""
    return "".join(row or BLANK for row in rows)


def pages(raw: str) -> Iterator[str]:
    """Yield the articles, cut before each first-level heading like `EleutherAI/wikitext_document_level`."""
    page: list[str] = []
    for line in raw.split("\n"):
        heading = line.replace("= = =", "===").replace("= =", "==").strip()
        if heading.startswith("= ") and heading.endswith(" ="):
            if "\n".join(page).strip():
                yield "\n".join(page)
            page = []
        page.append(line)
    yield "\n".join(page)


def detokenize(page: str) -> str:
    """Return a page as lm-eval's task gives it to the model: `wikitext_detokenizer` of version 2."""
    head, *others = _BEFORE_BRACKETS
    page = page.replace(*head)
    page = re.sub(r"/' [0-9]/", r"/'[0-9]/", page)
    for old, new in others:
        page = page.replace(old, new)
    for pattern, pair in _ENCLOSED:
        page = pattern.sub(pair, page)
    for old, new in _AFTER_BRACKETS:
        page = page.replace(old, new)
    return page


def _rows_of(file: DataFile) -> list[str]:
    """Return the rows of the dataset's own file, wikitext-2-raw-v1/test-00000-of-00001.parquet."""
    rows = []
    for row in read_data(file):
        text = row.value.get("text") if isinstance(row.value, dict) else None
        if not isinstance(text, str):
            raise ConfigError(f"{file.path}: row {row.number}: expected text under 'text', got none; {HELP}")
        rows.append(text)
    return rows


def _find() -> Path | None:
    """Return the raw file in the folder that QRT_DATA names, or None if it is not there."""
    if not ENV.data_folder:
        return None
    folder = Path(ENV.data_folder)
    if not folder.is_dir():
        raise ConfigError(f"QRT_DATA: expected a folder, got {folder}; {HELP}")
    return next(iter(sorted(folder.rglob(FILE))), None)


def _download() -> list[str]:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import datasets

    try:
        with hub.dataset("Salesforce/wikitext"):
            rows = datasets.load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="test")
    except Exception as error:  # datasets raises errors of its own, of its HTTP client and of the system
        raise ConfigError(f"wikitext: the download failed ({type(error).__name__}); {HELP}") from error
    return list(rows["text"])
