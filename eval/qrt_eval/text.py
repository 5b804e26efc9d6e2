"""The texts a perplexity is taken on: `wikitext`, `pydoc`, or a file."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from qrt.config import ENV
from qrt.errors import ConfigError

WIKITEXT_FILE = "wiki.test.raw"
# GPTQ's wikitext: the 4,358 rows of the test split joined by a blank line. A file with CRLF line ends or
# without its blank lines tokenizes differently and gives figures that compare with nothing published.
WIKITEXT_SHA256 = "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08"
WIKITEXT_HELP = (
    f"give the file with --data-file PATH, or name a folder that holds {WIKITEXT_FILE} in QRT_DATA, "
    "or connect to the Hugging Face Hub"
)


@dataclass(frozen=True)
class EvalText:
    """A text and where it came from."""

    name: str
    text: str
    source: str

    @property
    def sha256(self) -> str:
        """Of the text in UTF-8, so that two results say whether they read the same."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def load_text(dataset: str, data_file: str | None = None) -> EvalText:
    """`wikitext`, `pydoc` or the path of a UTF-8 text file; ConfigError says what is missing and the remedy.

    data_file   a local copy of `wiki.test.raw`, instead of the download
    """
    if dataset == "wikitext":
        return _wikitext(data_file)
    if data_file is not None:
        raise ConfigError(f"--data-file goes with the dataset 'wikitext', not with {dataset!r}")
    if dataset == "pydoc":
        return _pydoc()
    if not Path(dataset).is_file():
        raise ConfigError(f"dataset {dataset!r}: not 'wikitext', not 'pydoc', and no such file")
    return EvalText(Path(dataset).name, _read(Path(dataset)), str(dataset))


def _pydoc() -> EvalText:
    """The language reference that every Python carries, topics in sorted order."""
    import platform
    from pydoc_data.topics import topics

    source = f"pydoc_data.topics of Python {platform.python_version()}"
    return EvalText("pydoc", "\n\n".join(topics[name] for name in sorted(topics)), source)


def _wikitext(data_file: str | None) -> EvalText:
    path = Path(data_file) if data_file else _find_wikitext()
    if path is not None:
        if not path.is_file():
            raise ConfigError(f"--data-file {path}: no such file; {WIKITEXT_HELP}")
        return EvalText("wikitext", join_rows(_read(path)), str(path))
    rows = _download_wikitext()
    return EvalText("wikitext", "\n\n".join(rows), "Salesforce/wikitext, wikitext-2-raw-v1, test")


def join_rows(raw: str) -> str:
    """`wiki.test.raw` as the GPTQ protocol reads it: one row a line, blank rows empty, joined by "\\n\\n"."""
    rows = raw.splitlines(keepends=True)
    return "\n\n".join(row if row.strip() else "" for row in rows)


def _find_wikitext() -> Path | None:
    """The raw file in the folder named by QRT_DATA, if it is there."""
    if not ENV.data_folder:
        return None
    folder = Path(ENV.data_folder)
    if not folder.is_dir():
        raise ConfigError(f"QRT_DATA: {folder} is not a folder; {WIKITEXT_HELP}")
    return next(iter(sorted(folder.rglob(WIKITEXT_FILE))), None)


def _download_wikitext() -> list[str]:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import datasets

    try:
        rows = datasets.load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="test")
    except Exception as error:  # the library raises its own, its HTTP client's and OSError kinds here
        raise ConfigError(
            f"wikitext could not be downloaded ({type(error).__name__}); {WIKITEXT_HELP}"
        ) from error
    return list(rows["text"])


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from error
