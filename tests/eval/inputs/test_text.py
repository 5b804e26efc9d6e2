"""Load evaluation texts: the canonical wikitext, pydoc and files; report those that are missing."""

import hashlib
from pathlib import Path

import pytest

from errors import assert_names
from qrt.errors import ConfigError
from qrt_eval.inputs import text as texts
from qrt_eval.inputs import wikitext

RAW = Path(__file__).parents[4] / "shared" / "corpus" / "wikitext-2" / "wiki.test.raw"


@pytest.fixture(autouse=True)
def progress_bars(monkeypatch):
    """Restore a variable that a download sets for the whole process, where later tests would inherit it."""
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@pytest.mark.skipif(not RAW.is_file(), reason=f"{RAW} is not beside the checkout")
def test_wikitext_is_the_text_of_the_papers():
    assert hashlib.sha256(RAW.read_bytes()).hexdigest() == wikitext.SHA256
    text = texts.load_text("wikitext", str(RAW))
    assert len(text.text) == 1_294_336  # the rows of Salesforce/wikitext joined by "\n\n"
    assert text.sha256 == wikitext.SHA256 and len(text.documents) == 62


def test_wikitext_rows_join_like_the_dataset(tmp_path, caplog):
    (tmp_path / "w").write_text(" \n = A = \n \n b c \n")
    text = texts.load_text("wikitext", str(tmp_path / "w"))
    assert "not the canonical" in caplog.text
    assert text.text == "\n\n = A = \n\n\n\n\n b c \n" and text.raw == " \n = A = \n \n b c \n"


def test_only_newlines_end_a_row(tmp_path):
    """The dataset is cut that way too: U+2028, U+0085 and the like do not end a row."""
    raw = " a\u2028b \x85 c \x1c d \n \n e\x0b\x0c f \n"
    (tmp_path / "w").write_text(raw, newline="")
    text = texts.load_text("wikitext", str(tmp_path / "w"))
    assert text.raw == raw
    assert text.text == " a\u2028b \x85 c \x1c d \n\n\n\n\n e\x0b\x0c f \n"


def test_dataset_rows_restore_the_raw_file(monkeypatch):
    import datasets

    rows = {"text": ["", " = A = \n", "", " b c \n"]}
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: rows)
    monkeypatch.setattr(wikitext, "ENV", wikitext.ENV.__class__())
    text = texts.load_text("wikitext")
    assert text.raw == " \n = A = \n \n b c \n" and text.documents[0].text == " = A =\n\nb c\n"


def test_folder_joins_its_text_files_in_order(tmp_path):
    for name, content in (("b.md", "second"), ("a.txt", "first"), ("c.bin", "\x00"), ("d.txt", " \n")):
        (tmp_path / name).write_text(content)
    (tmp_path / "folder.md").mkdir()
    text = texts.load_text(str(tmp_path))
    assert text.text == "first\n\nsecond" and [d.original for d in text.documents] == ["first", "second"]


def test_empty_text_is_refused(tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    for arguments, message in (
        ((str(empty),), "empty.txt"),
        ((str(tmp_path),), r"empty text .*row 1 of empty\.txt"),
        (("wikitext", str(empty)), r"empty\.txt.*--data-file"),
    ):
        with pytest.raises(ConfigError, match=message):
            texts.load_text(*arguments)


@pytest.fixture(scope="module", autouse=True)
def short_pydoc():
    """Leave pydoc whole."""


def test_pydoc_needs_no_download():
    text = texts.load_text("pydoc")
    assert len(text.text) > 300_000 and "assignment" in text.text
    assert text.sha256 == texts.load_text("pydoc").sha256


def test_a_file_and_a_folder_named_by_the_environment(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some words\n")
    assert texts.load_text(str(tmp_path / "a.txt")).text == "some words\n"
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / wikitext.FILE).write_text("x\n")
    monkeypatch.setattr(wikitext, "ENV", wikitext.ENV.__class__(data_folder=str(tmp_path)))
    assert texts.load_text("wikitext").text == "x\n"


@pytest.mark.parametrize(
    ("dataset", "data_file", "message"),
    [
        ("no-such-file", None, "no-such-file"),
        ("wikitext", "/no/such/file", "--data-file"),
        ("pydoc", "/some/file", "--data-file"),
    ],
)
def test_missing_files_are_named(dataset, data_file, message):
    with pytest.raises(ConfigError, match=message):
        texts.load_text(dataset, data_file)


def test_binary_is_refused(tmp_path):
    (tmp_path / "b").write_bytes(b"ab\xff\xfe")
    with pytest.raises(ConfigError, match="b: .*UTF-8.*line 1"):
        texts.load_text(str(tmp_path / "b"))


def test_failed_download_suggests_a_local_file(monkeypatch):
    import datasets

    def offline(*args, **options):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    monkeypatch.setattr(wikitext, "ENV", wikitext.ENV.__class__())
    with pytest.raises(ConfigError, match="--data-file.*QRT_DATA"):
        texts.load_text("wikitext")


def test_file_rows_are_documents(tmp_path, caplog):
    rows = tmp_path / "rows.CSV"
    rows.write_text('text,label\n"One, with a comma",1\n,2\nTwo,3\n')
    text = texts.load_text(str(rows))
    assert text.name == "rows.CSV" and text.text == "One, with a comma\n\nTwo"
    assert [d.original for d in text.documents] == ["One, with a comma", "Two"]
    assert_names(caplog.text, "1 of the 3 rows", "row 2 of rows.CSV")


def test_chats_are_refused_as_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl.*1: chat messages"):
        texts.load_text(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_byte_order_mark_is_removed(encoding, tmp_path):
    """A wikitext loses it too, but keeps its line ends."""
    (tmp_path / "a.txt").write_bytes("one\r\ntwo\r\n".encode(encoding))
    assert texts.load_text(str(tmp_path / "a.txt")).raw == "one\ntwo\n"
    (tmp_path / "wiki").write_bytes(" = A = \r\n b \n".encode(encoding))
    assert texts.load_text("wikitext", str(tmp_path / "wiki")).raw == " = A = \r\n b \n"


def test_wikitext_from_gzip_and_parquet(tmp_path):
    import gzip

    import datasets

    rows = ["", " = A = \n", "", " b c \n"]
    raw = " \n = A = \n \n b c \n"
    (tmp_path / "wiki.test.raw.gz").write_bytes(gzip.compress(raw.encode()))
    datasets.Dataset.from_dict({"text": rows}).to_parquet(tmp_path / "test.parquet")
    for name in ("wiki.test.raw.gz", "test.parquet"):
        text = texts.load_text("wikitext", str(tmp_path / name))
        assert text.raw == raw and text.text == "\n\n".join(rows)
    (tmp_path / "a.jsonl").write_text('{"txt": "a"}')
    with pytest.raises(ConfigError, match="row 1.*'text'.*--data-file"):
        texts.load_text("wikitext", str(tmp_path / "a.jsonl"))


def test_files_of_other_kinds_are_counted_or_refused(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "b.py").write_text("code")
    assert texts.load_text(str(tmp_path)).text == "words"
    assert "files left out: .py (1)" in caplog.text
    with pytest.raises(ConfigError, match=r"b\.py: .*\.py"):
        texts.load_text(str(tmp_path / "b.py"))
