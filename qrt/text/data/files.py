"""Find and open data files: kinds, compression, byte order marks, folders."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from qrt.errors import ConfigError

TEXT = (".txt", ".text", ".md", ".rst", ".raw", ".tokens")
MARKUP = (".md", ".rst")  # their names are topics, not splits
ROWS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"
MARKS = (  # UTF-32's come first: UTF-16's are the start of one
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
DATASET_FACTS = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
TRAIN = re.compile(r"(^|[^a-z])train(ing)?([^a-z]|$)")
OTHER_SPLIT = re.compile(r"(^|[^a-z])(test(ing)?|valid(ation)?|val|dev|eval(uation)?)([^a-z]|$)")


def _zstandard(path: Path) -> Any:
    import pyarrow  # takes a second

    return pyarrow.input_stream(str(path), compression="zstd")


OPENERS: dict[str, Callable[[Path], Any]] = {
    "": io.FileIO, ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _zstandard,
}  # fmt: skip
COMPRESSED = tuple(suffix for suffix in OPENERS if suffix)
KINDS = f"text ({', '.join(TEXT)}) or rows ({', '.join(ROWS)}), or either with {', '.join(COMPRESSED)} added"


@dataclass(frozen=True)
class DataFile:
    """One file that can be read.

    kind         the suffix in lower case, without that of a compression; "" for none
    compression  the suffix of the compression; "" for none
    """

    path: Path
    kind: str
    compression: str

    @property
    def has_rows(self) -> bool:
        """Tell whether the file holds rows, not one text."""
        return self.kind in ROWS

    def open(self) -> BinaryIO:
        """Open the file's decompressed bytes; ConfigError for a Git LFS pointer."""
        with open(self.path, "rb") as stream:
            if stream.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ConfigError(
                    f"{self.path}: a Git LFS pointer, not the data; run `git lfs pull` in its folder, or "
                    "get it with `hf download`"
                )
        opened: Any = OPENERS[self.compression](self.path)
        return io.BufferedReader(opened)

    def open_text(self, newline: str | None) -> TextIO:
        """Open the file as text, decoded by its byte order mark or as UTF-8; `newline` is as for `open`.

        A byte that does not decode becomes half a surrogate pair, which `decoding_fault` reports.
        """
        stream: Any = self.open()
        head = stream.peek(4)
        encoding = next((name for mark, name in MARKS if head.startswith(mark)), "utf-8")
        return io.TextIOWrapper(stream, encoding, "surrogateescape", newline)


@dataclass(frozen=True)
class DataFiles:
    """The files of a path, in the order they are read.

    left_out   how many files of the folder are not read, by kind
    """

    name: str
    files: tuple[DataFile, ...]
    left_out: Mapping[str, int] = field(default_factory=dict)


def decoding_fault(text: str) -> str | None:
    """Say what is wrong with a text's Unicode: bytes that did not decode, half a surrogate pair, or None."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        escaped = 0xDC80 <= ord(text[error.start]) <= 0xDCFF
        return "bytes that are not UTF-8" if escaped else "half of a surrogate pair"
    return None


def kind_of(path: Path) -> tuple[str, str]:
    """Return a file's kind and compression: suffixes in lower case, "" for none."""
    suffix = path.suffix.lower()
    if suffix in COMPRESSED:
        return Path(path.stem).suffix.lower(), suffix
    return suffix, ""


def is_known(path: Path) -> bool:
    """Return whether the suffix is one that is read."""
    return kind_of(path)[0] in (*TEXT, *ROWS)


def find_files(path: Path) -> DataFiles:
    """Return the data files at a path; ConfigError where none can be read.

    In a dataset's folder (a clone from the Hub, or made by `save_to_disk`) these are the files of rows. In
    any other folder these are all text and row files, sorted by path. In both, if files of the split `train`
    are there, those of other splits are left out. Hidden files and folders are ignored.
    """
    if path.is_dir():
        return _of_folder(path)
    if not path.is_file():
        raise ConfigError(f"{path}: expected a file or a folder")
    kind, compression = kind_of(path)
    if kind and not is_known(path):
        raise ConfigError(
            f"{path}: expected {KINDS}, got {kind}; convert it, or name it .txt if it is plain text"
        )
    return DataFiles(path.name, (DataFile(path, kind, compression),))


def _of_folder(folder: Path) -> DataFiles:
    def hidden(path: Path) -> bool:
        return any(part.startswith(".") for part in path.relative_to(folder).parts)

    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not hidden(path))
    reasons = {path: reason for path in paths if (reason := _not_data(path))}
    if _is_dataset(folder):
        reasons |= _not_rows([path for path in paths if path not in reasons])
    reasons |= _other_splits(folder, [path for path in paths if path not in reasons])
    files = tuple(DataFile(path, *kind_of(path)) for path in paths if path not in reasons)
    left_out = dict(Counter(reasons.values()).most_common())
    if not files:
        found = ", ".join(f"{kind} ({count})" for kind, count in left_out.items()) or "no files"
        raise ConfigError(f"{folder}: expected files of {KINDS}, got {found}")
    return DataFiles(folder.resolve().name, files, left_out)


def _not_data(path: Path) -> str | None:
    """Return the kind to count a file under if a folder's reader leaves it out; None if it reads it."""
    if path.name in DATASET_FACTS:
        return "facts of a dataset"
    if _is_card(path):
        return "dataset card"
    return None if is_known(path) else kind_of(path)[0] or "no suffix"


def _is_card(path: Path) -> bool:
    """Return whether the file is a README that begins with YAML, as the Hub's dataset cards do."""
    if path.name.lower() != "readme.md":
        return False
    with path.open("rb") as stream:
        return stream.read(8).removeprefix(codecs.BOM_UTF8).startswith((b"---\n", b"---\r\n"))


def _is_dataset(folder: Path) -> bool:
    attributes = folder / ".gitattributes"
    return (
        any((folder / name).is_file() for name in DATASET_FACTS)
        or any(_is_card(path) for path in folder.glob("*.[mM][dD]"))
        or (folder / ".cache" / "huggingface").is_dir()
        or (attributes.is_file() and b"filter=lfs" in attributes.read_bytes())
    )


def _not_rows(paths: list[Path]) -> dict[Path, str]:
    """Return why files of a dataset that hold no rows are left out."""
    rows = [path for path in paths if kind_of(path)[0] in ROWS]
    if not rows:
        return {path: "dataset card" for path in paths if path.stem.lower() == "readme"}
    return {path: kind_of(path)[0] for path in paths if path not in rows}


def _other_splits(folder: Path, paths: list[Path]) -> dict[Path, str]:
    """Return the files of splits other than `train`, if there are files of `train`."""
    names = {
        path: path.relative_to(folder).as_posix().lower() for path in paths if kind_of(path)[0] not in MARKUP
    }
    if not any(TRAIN.search(name) for name in names.values()):
        return {}
    others = [path for path, name in names.items() if OTHER_SPLIT.search(name) and not TRAIN.search(name)]
    return dict.fromkeys(others, "splits other than train")
