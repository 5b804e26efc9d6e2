"""Rows equal those of `json`, `csv` and `datasets`; a broken row is one row in every kind of file."""

import io
import json

import pytest

from qrt.errors import ConfigError
from qrt.text.data import json_rows
from qrt.text.data import rows as rows_module
from qrt.text.data.files import find_files
from qrt.text.data.json_rows import Broken
from qrt.text.data.rows import pieces, read_lines, read_rows

ROWS = [
    {"text": 'quotes " and, commas'},
    {"text": "lines\nand \u2028 others\x85"},
    {"text": "\U0001f600 caf\u00e9 \\ \\u0041"},
    {"text": "12345"},
    {"text": "NA"},
]


def values(path):
    (file,) = find_files(path).files
    return [row.value for row in read_rows(file)]


CHAT = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("chunk", [1, 7, 2**20])
@pytest.mark.parametrize("ascii", [True, False])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_list_is_read_element_by_element(chunk, ascii, indent, monkeypatch, tmp_path):
    """The rows equal those of `json.load`, wherever a chunk ends."""
    monkeypatch.setattr(json_rows, "CHUNK", chunk)
    held = [*ROWS, 1.5, -17, 10**12, True, None, "a string", [], {"a": [{"b": "\U0001f600"}]}, 2.5e10, 5]
    path = tmp_path / "a.json"
    path.write_text("\n " + json.dumps(held, ensure_ascii=ascii, indent=indent) + "\n")
    assert values(path) == json.loads(path.read_text())


@pytest.mark.parametrize("chunk", [1, 50, 2**20])
def test_a_broken_element_is_named(chunk, monkeypatch, tmp_path):
    monkeypatch.setattr(json_rows, "CHUNK", chunk)
    whole = json.dumps([{"text": "x" * 30}] * 3)
    for content, message in (
        (whole[:-1], "row 3: the file ends too early at character 132"),
        (whole[:-5], "row 3: the file ends too early at character"),
        (whole.replace("}, {", "} {", 1), "row 1: expected , or ] at character 45"),
        (whole + "[]", "text follows its list"),
        ('[{"text": nul}, "' + "x" * 100 + '"]', "row 1: Expecting value at character 11"),
    ):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(
            ConfigError, match=r"a\.json: expected a list of rows, .* got broken JSON"
        ) as error:
            values(tmp_path / "a.json")
        assert message in str(error.value) and "download it again" in str(error.value)


def test_a_long_list_takes_the_memory_of_a_chunk(monkeypatch):
    """No more than two chunks of 2 MB are read ahead."""
    monkeypatch.setattr(json_rows, "CHUNK", 2**12)
    stream = io.StringIO(json.dumps([{"text": "x" * 1000}] * 2000))
    ahead = [stream.tell() - 1014 * n for n, _ in enumerate(json_rows.read_json_rows(stream, False, ""), 1)]
    assert len(ahead) == 2000 and max(ahead) < 2**14


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.ndjson", "a.NDJSON"])
def test_json_lines_under_any_suffix(name, tmp_path):
    (tmp_path / name).write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS), newline="")
    assert values(tmp_path / name) == ROWS


def test_rows_stay_as_they_are_written(tmp_path):
    """None takes keys or types from others, as `datasets` would have it."""
    rows = [{"text": "2024-01-01"}, {"id": "007"}, {"id": 7}, {"messages": [{"content": "12:30:00"}]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "a.json").write_text(json.dumps({"data": rows}))
    assert values(tmp_path / "a.jsonl") == values(tmp_path / "a.json") == rows


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_a_list_under_either_suffix(name, tmp_path):
    (tmp_path / name).write_text(json.dumps(ROWS, indent=1))
    assert values(tmp_path / name) == ROWS
    turns = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
    (tmp_path / name).write_text("\n".join(map(json.dumps, turns)))
    assert values(tmp_path / name) == turns


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ({"version": "1.0", "data": ROWS}, ROWS),
        ({"text": ["one", "two"]}, ["one", "two"]),
        ({"text": "one"}, [{"text": "one"}]),
        ({"text": "one", "tags": ["x"]}, [{"text": "one", "tags": ["x"]}]),
        ({"messages": CHAT, "tools": [{}]}, [{"messages": CHAT, "tools": [{}]}]),
        ({"prompt": "a", "answers": ["b"]}, [{"prompt": "a", "answers": ["b"]}]),
        ({"architectures": ["X"], "size": 1}, [{"architectures": ["X"], "size": 1}]),
        ({"messages": CHAT}, [{"messages": CHAT}]),
    ],
)
def test_a_json_object_holds_rows_or_is_one(content, wanted, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(content, indent=2))
    assert values(tmp_path / "a.json") == wanted


def test_objects_one_behind_the_other(tmp_path):
    """jq prints values in this form."""
    (tmp_path / "a.json").write_text("\n".join(json.dumps(row, indent=2) for row in ROWS))
    assert values(tmp_path / "a.json") == ROWS


def test_an_object_of_several_lists_is_refused(tmp_path):
    (tmp_path / "a.json").write_text('{\n"train": ["a"], "test": ["b"]}')
    with pytest.raises(
        ConfigError, match="expected one list of rows, got an object with lists under 'train', 'test'"
    ):
        values(tmp_path / "a.json")


def test_a_broken_line_is_one_row(tmp_path):
    lines = ['{"text": "a"}', '{"text": ', "\udce9", '{"text": "b\tc"}', "[" * 100_000, '{"text": "d"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines), errors="surrogateescape")
    found = values(tmp_path / "a.jsonl")
    assert [row for row in found if not isinstance(row, Broken)] == [{"text": t} for t in ("a", "b\tc", "d")]
    assert len(found) == 6 and all("not JSON" in row for row in found if isinstance(row, Broken))


def test_a_file_without_a_line_of_json_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("just\nwords\n")
    with pytest.raises(
        ConfigError, match=r"a\.jsonl: expected a JSON value per line, .* none of its 2 lines is JSON"
    ):
        values(tmp_path / "a.jsonl")


@pytest.mark.parametrize(("suffix", "separator"), [("csv", ","), ("tsv", "\t")])
def test_tables_are_text_by_their_columns(suffix, separator, tmp_path):
    """Every field stays text; pandas would read NA as nothing and 007 as 7."""
    lines = [
        f"text{separator}label",
        f'"a ""quoted""{separator} field\r\nof two lines"{separator}1',
        f"NA{separator}007",
    ]
    (tmp_path / f"a.{suffix}").write_text("\r\n".join(lines), newline="")
    field = f'a "quoted"{separator} field\r\nof two lines'
    assert values(tmp_path / f"a.{suffix}") == [{"text": field, "label": "1"}, {"text": "NA", "label": "007"}]


def test_a_broken_row_of_a_table_is_one_row(tmp_path):
    long = "x" * 200_000
    (tmp_path / "a.csv").write_text(f'text,label\n"a"b,1\ngood,2\nc,3,4\n{long},5\n"open,6\n')
    broken, good, more, last, end = values(tmp_path / "a.csv")
    assert good == {"text": "good", "label": "2"} and last == {"text": long, "label": "5"}
    assert all(isinstance(row, Broken) for row in (broken, more, end))
    assert "not CSV" in broken and "more fields" in more


def test_columns_are_rows(tmp_path):
    import datasets

    rows = [
        {"messages": [{"role": "user", "content": row["text"]}], "id": i} for i, row in enumerate(ROWS * 50)
    ]
    saved = datasets.Dataset.from_list(rows)
    saved.to_parquet(tmp_path / "a.parquet")
    saved.save_to_disk(tmp_path / "d")
    assert values(tmp_path / "a.parquet") == rows
    assert values(tmp_path / "d/data-00000-of-00001.arrow") == rows


def test_an_arrow_file_of_either_form(tmp_path):
    import pyarrow

    table = pyarrow.table({"text": ["one", "two", None]})
    for name, open_writer in (("a.arrow", pyarrow.ipc.new_file), ("b.arrow", pyarrow.ipc.new_stream)):
        with open_writer(tmp_path / name, table.schema) as writer:
            writer.write_table(table)
        assert values(tmp_path / name) == [{"text": "one"}, {"text": "two"}, {"text": None}]


def test_invalid_unicode_is_one_bad_row(tmp_path):
    import pyarrow
    import pyarrow.parquet

    raw = pyarrow.array([b"one", b"caf\xe9", b"three"])
    text = pyarrow.Array.from_buffers(pyarrow.string(), 3, raw.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), tmp_path / "a.parquet")
    one, broken, three = values(tmp_path / "a.parquet")
    assert (one, three) == ({"text": "one"}, {"text": "three"})
    assert isinstance(broken, Broken) and broken == "bytes that are not UTF-8"


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_file_of_another_format_is_refused(name, tmp_path):
    (tmp_path / name).write_text("words " * 100)
    with pytest.raises(ConfigError, match=rf"{name}: not a \w+ file .*; download it again"):
        values(tmp_path / name)


def test_pieces_make_up_the_text_and_end_where_lines_do(monkeypatch):
    monkeypatch.setattr(rows_module, "PIECE", 20)
    text = "a line of words\n\n\nanother\n" * 20 + "x" * 75 + " and the rest of this line"
    for step in (1, 13, 1000):
        found = list(pieces(text[i : i + step] for i in range(0, len(text), step)))
        assert "".join(found) == text and all(0 < len(piece) <= 20 for piece in found)
        assert not any(after.startswith("\n") for after in found)


def test_only_the_last_piece_ends_a_text(monkeypatch, tmp_path):
    monkeypatch.setattr(rows_module, "PIECE", 20)
    (tmp_path / "a.txt").write_text("some words\n" * 10)
    (file,) = find_files(tmp_path / "a.txt").files
    found = list(read_rows(file))
    assert "".join(row.value for row in found) == "some words\n" * 10 and len(found) > 4
    assert [row.ends for row in found] == [False] * (len(found) - 1) + [True]


def test_lines_of_a_text_have_their_numbers(monkeypatch, tmp_path):
    monkeypatch.setattr(rows_module, "PIECE", 8)
    (tmp_path / "a.txt").write_text("\none line\u2028\r\n\n  \nand another\nlast", newline="")
    (file,) = find_files(tmp_path / "a.txt").files
    assert list(read_lines(file)) == [(2, "one line\u2028"), (5, "and another"), (6, "last")]
