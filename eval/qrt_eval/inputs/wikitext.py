"""WikiText-2's test split in its three readings: joined rows, the raw file, detokenized pages.

The canonical `wiki.test.raw` has 4,358 lines with LF ends. A copy with CRLF ends or without its blank lines
tokenizes differently and gives figures that compare with nothing published.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path

from qrt import hub
from qrt.config import ENV
from qrt.errors import ConfigError
from qrt.text.data.files import DataFile, decoding_fault, kind_of
from qrt.text.data.rows import read_rows as read_data

FILE = "wiki.test.raw"
SHA256 = "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08"
HELP = (
    f"give the file with --data-file PATH, or name a folder that holds {FILE} in QRT_DATA, "
    "or connect to the Hugging Face Hub"
)
BLANK = " \n"  # what a blank row is in the file; in the dataset it is empty

# What lm-eval's task `wikitext` (version 2) replaces to undo WikiText's tokenization, in this order. The
# second pattern holds slashes by mistake, there too.
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
    """The rows as the dataset has them (blank ones empty), and where they came from.

    From `data_file`, else from the folder named by QRT_DATA, else from the Hub; ConfigError says how to give
    a file when there is none.
    """
    path = Path(data_file) if data_file else _find()
    if path is None:
        return _download(), "Salesforce/wikitext, wikitext-2-raw-v1, test"
    if not path.is_file():
        raise ConfigError(f"--data-file {path}: no such file; {HELP}")
    file = DataFile(path, *kind_of(path))
    if file.has_rows:
        return _rows_of(file), str(path)
    with file.open_text(newline="") as stream:
        raw = stream.read()
    if fault := decoding_fault(raw):
        raise ConfigError(f"{path}: not UTF-8 text ({fault}); {HELP}")
    return [row if row.strip() else "" for row in StringIO(raw)], str(path)  # ends at "\n" alone


def raw_text(rows: Sequence[str]) -> str:
    """The file that `rows` came from."""
    return "".join(row or BLANK for row in rows)


def pages(raw: str) -> Iterator[str]:
    """The articles, as `EleutherAI/wikitext_document_level` cuts them: before each first-level heading."""
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
    """A page as lm-eval's task gives it to the model: `wikitext_detokenizer` of version 2."""
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
            raise ConfigError(f"{file.path}: row {row.number} has no text under 'text'; {HELP}")
        rows.append(text)
    return rows


def _find() -> Path | None:
    """The raw file in the folder named by QRT_DATA, if it is there."""
    if not ENV.data_folder:
        return None
    folder = Path(ENV.data_folder)
    if not folder.is_dir():
        raise ConfigError(f"QRT_DATA: {folder} is not a folder; {HELP}")
    return next(iter(sorted(folder.rglob(FILE))), None)


def _download() -> list[str]:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import datasets

    try:
        with hub.dataset("Salesforce/wikitext"):
            rows = datasets.load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="test")
    except Exception as error:  # the library raises its own, its HTTP client's and OSError kinds here
        raise ConfigError(f"wikitext could not be downloaded ({type(error).__name__}); {HELP}") from error
    return list(rows["text"])
