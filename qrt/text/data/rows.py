"""Read the rows of data files one at a time: JSON, CSV, Parquet, Arrow; a text file's rows are its pieces."""

from __future__ import annotations

import csv
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from qrt.errors import ConfigError
from qrt.text.data.files import DataFile, decoding_fault
from qrt.text.data.json_rows import Broken, read_json_rows

PIECE = 2**16  # most characters of a piece of text
BATCH = 64  # rows of a Parquet or Arrow file that are converted to Python at once
LOOKS_LIKE = {  # formats, other than plain text, that a file without a suffix may have
    "JSON": re.compile(r'\s*(\{\s*"|\[\s*[\[{"])'),
    "HTML or XML": re.compile(r"\s*<(\?xml|!doctype|html)", re.IGNORECASE),
    "PDF": re.compile("%PDF"),
}


@dataclass(frozen=True, slots=True)
class DataRow:
    """A row of a data file, or a piece of a text.

    value    what was read: a string, a dictionary, ...; a `Broken` where it cannot be read
    file     the name of the file
    number   the place in the file, from 1
    ends     whether a text ends here; False where the next piece continues it
    """

    value: Any
    file: str
    number: int
    ends: bool = True

    @property
    def place(self) -> str:
        """Name the row in messages."""
        return f"row {self.number} of {self.file}"


def read_rows(file: DataFile) -> Iterator[DataRow]:
    """Yield the rows of a file; ConfigError where it is damaged or not what its suffix says."""
    try:
        if file.has_rows:
            for number, value in enumerate(_values(file), 1):
                yield DataRow(value, file.path.name, number)
        else:
            yield from _text_rows(file)
    except (OSError, EOFError, zlib.error, lzma.LZMAError, UnicodeError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"{file.path}: cannot be read ({reason}); download it again, or give another file"
        ) from None


def read_lines(file: DataFile) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file that are not blank, with their numbers from 1; only "\\n" ends one."""
    rest = ""
    number = 1
    for row in read_rows(file):
        *lines, rest = (rest + row.value).split("\n")
        yield from ((number + i, line) for i, line in enumerate(lines) if line.strip())
        number += len(lines)
    if rest.strip():
        yield number, rest


def pieces(chunks: Iterable[str]) -> Iterator[str]:
    """Cut a text that comes in chunks into pieces of at most PIECE characters.

    A piece ends where a line ends, or else before a space; tokens end there too.
    """
    rest = ""
    for chunk in chunks:
        rest, at = rest + chunk, 0
        while len(rest) - at > PIECE:
            piece = rest[at : at + PIECE]
            size = piece.rstrip("\n").rfind("\n") + 1 or max(piece.rfind(" "), 0) or PIECE
            yield piece[:size]
            at += size
        rest = rest[at:]
    if rest:
        yield rest


def _text_rows(file: DataFile) -> Iterator[DataRow]:
    before: DataRow | None = None
    for number, piece in enumerate(pieces(_chunks(file)), 1):
        if before is not None:
            yield before
        before = DataRow(piece, file.path.name, number, ends=False)
    if before is not None:
        yield DataRow(before.value, before.file, before.number)


def _chunks(file: DataFile) -> Iterator[str]:
    """Yield the characters of a text file, with "\\n" as line ends; ConfigError where it is not text."""
    line = 1
    with file.open_text(newline=None) as stream:
        while chunk := stream.read(PIECE):
            if line == 1 and not file.kind:
                _expect_text(file, chunk)
            if fault := "a NUL character" if "\0" in chunk else decoding_fault(chunk):
                wrong = next(i for i, c in enumerate(chunk) if c == "\0" or "\ud800" <= c <= "\udfff")
                line += chunk.count("\n", 0, wrong)
                raise ConfigError(
                    f"{file.path}: not UTF-8 text ({fault} in line {line}); give it in UTF-8, or in UTF-16 "
                    "with its byte order mark"
                )
            line += chunk.count("\n")
            yield chunk


def _expect_text(file: DataFile, chunk: str) -> None:
    for kind, begins in LOOKS_LIKE.items():
        if begins.match(chunk):
            raise ConfigError(
                f"{file.path}: expected text, as it has no suffix, got what looks like {kind}; add the "
                "suffix of its kind, or .txt if it is text"
            )


def _values(file: DataFile) -> Iterator[Any]:
    if file.kind in (".json", ".jsonl", ".ndjson"):
        with file.open_text(newline="\n") as stream:
            yield from read_json_rows(stream, file.kind != ".json", str(file.path))
    elif file.kind in (".csv", ".tsv"):
        yield from _table(file, "," if file.kind == ".csv" else "\t")
    else:
        yield from _columns(file)


def _table(file: DataFile, delimiter: str) -> Iterator[Any]:
    """Yield the rows of CSV or TSV as dictionaries with the first line's names as keys."""
    csv.field_size_limit(2**31 - 1)
    with file.open_text(newline="") as stream:
        rows = csv.DictReader(stream, delimiter=delimiter, strict=True)
        while True:
            try:
                row: dict[Any, Any] = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield Broken(f"a row that is not {file.kind[1:].upper()} ({error})")
                continue
            yield Broken("a row with more fields than the first line names") if None in row else row


def _columns(file: DataFile) -> Iterator[Any]:
    """Yield the rows of Parquet or Arrow, with one batch in memory at a time."""
    import pyarrow  # takes a second

    with file.open() as stream:
        try:
            for batch in _batches(file, stream):
                for start in range(0, batch.num_rows, BATCH):
                    yield from _to_python(batch.slice(start, BATCH))
        except pyarrow.ArrowException as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"{file.path}: not a {file.kind[1:].title()} file ({reason}); download it again"
            ) from None


def _batches(file: DataFile, stream: Any) -> Iterator[Any]:
    import pyarrow

    if file.kind == ".parquet":
        import pyarrow.parquet

        yield from pyarrow.parquet.ParquetFile(stream, pre_buffer=False).iter_batches(batch_size=BATCH)
        return
    try:  # the form that `datasets` writes
        reader: Any = pyarrow.ipc.open_stream(stream)
    except pyarrow.ArrowInvalid:
        stream.seek(0)
        table = pyarrow.ipc.open_file(stream)
        reader = (table.get_batch(i) for i in range(table.num_record_batches))
    yield from reader


def _to_python(batch: Any) -> Iterator[Any]:
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for i in range(batch.num_rows):
            try:
                yield batch.slice(i, 1).to_pylist()[0]
            except UnicodeDecodeError:
                yield Broken("bytes that are not UTF-8")
