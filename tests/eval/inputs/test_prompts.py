"""Read prompts and conversations from files."""

import json

import pytest

from errors import assert_names
from qrt.errors import ConfigError
from qrt.text.tokenizer import Tokenizer
from qrt_eval.inputs.prompts import read_conversations, read_prompts


def test_prompts_of_files(tmp_path):
    tokenizer = Tokenizer("tiny")
    (tmp_path / "a.txt").write_text("one line\n\nand another\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "one line"}) + "\n")
    first, second = read_prompts("--prompts", str(tmp_path / "a.txt"), tokenizer)
    assert read_prompts("--prompts", str(tmp_path / "b.jsonl"), tokenizer) == [first]
    assert tokenizer.decode(second) == "and another"
    (tmp_path / "f.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "one line"}\r\n')
    assert read_prompts("--prompts", str(tmp_path / "f.jsonl"), tokenizer) == [first]
    odd = "two\u2028lines\x85of\x0bone\x0cprompt"
    (tmp_path / "g.jsonl").write_text(json.dumps({"prompt": odd}, ensure_ascii=False))
    assert read_prompts("--prompts", str(tmp_path / "g.jsonl"), tokenizer) == [tokenizer.encode(odd)]
    for name, content, message in (
        ("c.jsonl", b'{"text": 1}', 'expected text, or rows with a "prompt"'),
        ("d.jsonl", b"{", "JSON"),
        ("e.txt", b"\n", "expected text"),
        ("h.jsonl", b'\n{"prompt": 5}', "expected text"),
        ("i.txt", b"caf\xe9", "UTF-8.* line 1"),
        ("j.pdf", b"words", r"\.pdf"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=f"{name}.*{message}"):
            read_prompts("--prompts", str(tmp_path / name), tokenizer)
    with pytest.raises(ConfigError, match="--prompts.*none"):
        read_prompts("--prompts", str(tmp_path / "none"), tokenizer)


def test_prompts_of_rows_in_any_kind_of_file(tmp_path, caplog):
    """A row without a prompt is skipped and counted."""
    tokenizer = Tokenizer("tiny")
    wanted = [tokenizer.encode("one line"), tokenizer.encode("and another")]
    rows = [{"prompt": "one line"}, {"prompt": None}, {"prompt": "\ud83d"}, {"prompt": "and another"}]
    (tmp_path / "a.JSONL").write_text("\n".join([*map(json.dumps, rows), "{"]))
    assert read_prompts("--prompts", str(tmp_path / "a.JSONL"), tokenizer) == wanted
    (warning,) = caplog.messages
    assert_names(warning, "3 of 5 rows", '"prompt"', "row 2 of a.JSONL")
    (tmp_path / "b.csv").write_text("id,prompt\n1,one line\n2,and another\n")
    assert read_prompts("--prompts", str(tmp_path / "b.csv"), tokenizer) == wanted
    (tmp_path / "c.json").write_text('["one line", "and another"]')
    assert read_prompts("--prompts", str(tmp_path / "c.json"), tokenizer) == wanted


def test_conversations_end_with_the_user(tmp_path, caplog):
    """This holds for every form of row; what only the assistant says is skipped."""
    asked, answered = {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}
    again = {"role": "user", "content": "three"}
    rows = [
        {"prompt": "one"}, "one", [asked, answered, again], {"messages": [asked, answered, again, answered]},
        {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]},
        {"prompt": "one", "completion": "two"}, {"messages": [answered]}, {"text": "a document"},
    ]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = read_conversations("--prompts", str(tmp_path / "a.jsonl"))
    assert found == [[asked], [asked], [asked, answered, again], [asked, answered, again], [asked], [asked]]
    assert "2 of 8 rows" in caplog.text
    (tmp_path / "b.txt").write_text("one\n")
    assert read_conversations("--prompts", str(tmp_path / "b.txt")) == [[asked]]
