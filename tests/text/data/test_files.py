"""The suffix in any case decides a file's kind; files of unknown kinds are refused by name."""

import bz2
import codecs
import gzip
import json
import lzma

import pyarrow
import pytest

from qrt.errors import ConfigError
from qrt.text.data.files import find_files
from qrt.text.data.rows import read_rows

TEXT = "One line,\nand a caf\u00e9 \U0001f600.\n"


def values(path):
    return [row.value for file in find_files(path).files for row in read_rows(file)]


@pytest.mark.parametrize("name", ["a.txt", "a.TXT", "a.Md", "a.rst", "a.raw", "a.tokens", "a.text", "README"])
def test_text_is_read_unchanged(name, tmp_path):
    (tmp_path / name).write_text(TEXT)
    assert values(tmp_path / name) == [TEXT]


@pytest.mark.parametrize("name", ["a.pdf", "a.html", "a.py", "a.docx", "a.zip", "a.safetensors", "a.zip.gz"])
def test_other_kinds_are_refused_by_name(name, tmp_path):
    (tmp_path / name).write_text("words")
    suffix = name.removesuffix(".gz")[1:]
    with pytest.raises(
        ConfigError, match=rf"{name}: expected text \(\.txt, .*\.parquet.*\.zst added, got {suffix};"
    ):
        find_files(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "kind"),
    [('{"text": 1}\n', "JSON"), ("[\n {", "JSON"), ("<!DOCTYPE html>", "HTML"), ("%PDF-1.7 x", "PDF")],
)
def test_file_without_suffix_may_not_look_like_another_kind(content, kind, tmp_path):
    (tmp_path / "a").write_text(content)
    with pytest.raises(ConfigError, match=f"a: expected text, .*looks like {kind}.*add the suffix"):
        values(tmp_path / "a")
    (tmp_path / "a.txt").write_text(content)
    assert values(tmp_path / "a.txt") == [content]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"ab\n\xff\xfe", "bytes that are not UTF-8 in line 2"),
        (b"x" * 70_000 + b"\n\n\xe9", "bytes that are not UTF-8 in line 3"),
        ("text".encode("utf-16-le"), "a NUL character in line 1"),
        (b"\x7fELF\x00\x01", "a NUL character"),
    ],
)
@pytest.mark.parametrize("name", ["a", "a.txt"])
def test_bytes_that_are_no_text_are_refused(content, fault, name, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        ConfigError, match=f"{name}: not UTF-8 text .{fault}.*UTF-16 with its byte order mark"
    ):
        values(tmp_path / name)


def packed_zst(data):
    return pyarrow.compress(data, codec="zstd", asbytes=True)


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [(".gz", gzip.compress), (".BZ2", bz2.compress), (".xz", lzma.compress), (".zst", packed_zst)],
)
def test_compressed_files(suffix, pack, tmp_path):
    text, rows, damaged = (tmp_path / f"{name}{suffix}" for name in ("a.txt", "a.jsonl", "b.txt"))
    text.write_bytes(pack(codecs.BOM_UTF8 + TEXT.encode()))
    assert values(text) == [TEXT]
    rows.write_bytes(pack(b'{"a": 1}\n') + pack(b'{"a": 2}\n'))  # two files put together, as dumps are
    assert values(rows) == [{"a": 1}, {"a": 2}]
    damaged.write_bytes(pack(bytes(range(256)).hex().encode() * 100)[:-20])
    with pytest.raises(ConfigError, match="b.txt.*cannot be read"):
        values(damaged)


MARKED = [
    codecs.BOM_UTF8 + TEXT.encode(),
    TEXT.encode("utf-16"),
    codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"),
    TEXT.encode("utf-32"),
]


@pytest.mark.parametrize("content", MARKED)
def test_a_byte_order_mark_is_no_text(content, tmp_path):
    (tmp_path / "a.txt").write_bytes(content)
    assert values(tmp_path / "a.txt") == [TEXT]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv", "a.tsv"])
def test_a_byte_order_mark_is_no_row(name, encoding, tmp_path):
    rows = [{"text": "caf\u00e9"}, {"text": "two"}]
    content = {
        "a.json": json.dumps(rows),
        "a.jsonl": "\n".join(map(json.dumps, rows)),
        "a.csv": "text\r\ncaf\u00e9\r\ntwo\r\n",
        "a.tsv": "text\ncaf\u00e9\ntwo\n",
    }[name]
    (tmp_path / name).write_bytes(content.encode(encoding))
    assert values(tmp_path / name) == rows


def test_lines_of_a_text_end_with_lf(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\n\r\n")
    assert values(tmp_path / "a.txt") == ["one\ntwo\nthree\n\n"]


def test_a_git_lfs_pointer_is_refused(tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    for name in ("a.parquet", "a.jsonl", "a.txt", "a.csv.gz", "a"):
        (tmp_path / name).write_text(pointer)
        with pytest.raises(ConfigError, match=f"{name}: a Git LFS pointer.*`git lfs pull`"):
            values(tmp_path / name)


CARD = "---\nlicense: mit\n---\n# A card\n"


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    files = {
        "b.txt": "second", "a.md": "first", "c/rows.JSONL": '{"text": "third"}', "code.py": "x", "d.PY": "y",
        "LICENSE": "z", ".git/config.txt": "hidden", ".notes.txt": "hidden",
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert values(tmp_path) == ["first", "second", {"text": "third"}]
    found = find_files(tmp_path)
    assert found.name == tmp_path.name and found.left_out == {".py": 2, "no suffix": 1}


def test_rows_of_a_hub_clone_are_read(tmp_path):
    (tmp_path / "data").mkdir()
    files = {
        "README.md": CARD,
        "notes.md": "x",
        "dataset_infos.json": "{}",
        "data/train.json": '[{"text": "a"}]',
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert values(tmp_path) == [{"text": "a"}]
    assert find_files(tmp_path).left_out == {"dataset card": 1, ".md": 1, "facts of a dataset": 1}
    (tmp_path / "data/train.json").unlink()
    (tmp_path / "wiki.txt").write_text("a text")
    assert values(tmp_path) == ["a text", "x"][::-1]  # a dataset of texts


def test_train_is_read_from_several_splits(tmp_path):
    (tmp_path / ".gitattributes").write_text("*.parquet filter=lfs diff=lfs merge=lfs -text\n")
    for name in (
        "train-00000-of-00002.jsonl",
        "train-00001-of-00002.jsonl",
        "test.jsonl",
        "validation.jsonl",
    ):
        (tmp_path / name).write_text(json.dumps(name))
    assert values(tmp_path) == ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"]
    assert find_files(tmp_path).left_out == {"splits other than train": 2}
    (tmp_path / "constrained.jsonl").write_text('"no split by its name"')
    assert "no split by its name" in values(tmp_path)


def test_other_splits_are_left_out_of_any_folder(tmp_path):
    for name in (
        "wiki.train.raw",
        "wiki.test.raw",
        "data/train.jsonl",
        "data/val.jsonl",
        "train.md",
        "test.md",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(name))
    read = [json.loads(value) if value.startswith('"') else value for value in values(tmp_path)]
    assert read == ["data/train.jsonl", "test.md", "train.md", "wiki.train.raw"]
    (tmp_path / "wiki.train.raw").unlink()
    (tmp_path / "data/train.jsonl").unlink()
    assert len(values(tmp_path)) == 4  # without a split `train` all are read


def test_a_dataset_saved_to_disk(tmp_path):
    import datasets

    saved = datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}])
    datasets.DatasetDict({"train": saved, "test": saved.select([0])}).save_to_disk(tmp_path / "d")
    assert values(tmp_path / "d") == [{"text": "one"}, {"text": "two"}]
    saved.save_to_disk(tmp_path / "e")
    assert values(tmp_path / "e") == [{"text": "one"}, {"text": "two"}]


def test_a_folder_without_data_says_what_it_holds(tmp_path):
    with pytest.raises(ConfigError, match="expected files of text .*, got no files"):
        find_files(tmp_path)
    for name in ("a.png", "b.png", "c"):
        (tmp_path / name).write_text("x")
    (tmp_path / "README.md").write_text(CARD)
    with pytest.raises(ConfigError, match=r"got \.png \(2\), dataset card \(1\), no suffix \(1\)"):
        find_files(tmp_path)
