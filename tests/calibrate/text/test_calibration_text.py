"""The default text needs no network; windows are disjoint, seeded, and begin as the tokenizer begins."""

import inspect
import json
import pydoc_data.topics
import textwrap

import pytest
import torch

from qrt.errors import CheckpointError, ConfigError
from qrt.text.tokenizer import Tokenizer
from qrt_calibrate.text.text import cut_windows, docstrings, read_texts


def test_docstrings_in_order_and_without_tests(tmp_path):
    source = (
        '"""Module."""\nclass A:\n    """Class."""\n    def f(self):\n        """Method."""\ndef g(): pass\n'
    )
    root = tmp_path / "tests"  # of Python itself, wherever it is installed
    for name in ("b.py", "a/z.py", "test/hidden.py", "a/tests/hidden.py", "pydoc_data/topics.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source.replace("Module", name))
    wanted = ["a/z.py.", "Class.", "Method.", "b.py.", "Class.", "Method."]
    assert list(docstrings(root)) == wanted


def test_default_text_is_long_and_not_the_evaluation_text(default_text):
    texts, name = default_text
    text = "\n\n".join(texts)
    assert name == "python-docstrings" and len(text) > 1_000_000
    assert "Orthogonal projection" not in text and inspect.getdoc(textwrap.dedent) in text
    long_lines = {line.strip() for topic in pydoc_data.topics.topics.values() for line in topic.splitlines()}
    shared = [line for line in text.splitlines() if len(line) > 60 and line.strip() in long_lines]
    assert len(shared) < 20, shared


@pytest.mark.parametrize(
    "content, message",
    [(None, "--calib: no file '.*'; give a data file"), (b"\xe9\x00a", "not UTF-8 text .* in line 1")],
)
def test_files_that_are_no_text(content, message, tmp_path):
    path = tmp_path / "ultrachat.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_texts(str(path), None)


class Plain:
    """The byte-level tokenizer, with or without BOS in front of every text."""

    def __init__(self, tokenizer, bos):
        self._tokenizer, self.bos_token_id, self._bos = tokenizer, tokenizer.bos_token_id, bos

    def encode(self, text):
        return [self.bos_token_id] * self._bos + self._tokenizer.encode(text, False)

    def encode_all(self, texts, add_special_tokens):
        assert not add_special_tokens
        return self._tokenizer.encode_all(texts, False)


@pytest.mark.parametrize("bos", [True, False])
def test_windows(bos, llama):
    tokenizer = Tokenizer(llama)
    text = "".join(f"{number:03d}" for number in range(1000))  # every 3 tokens are unique
    windows = cut_windows([text], Plain(tokenizer, bos), count=50, seqlen=30 + bos, seed=3)
    assert windows.shape == (50, 30 + bos) and windows.dtype == torch.int64
    if bos:
        assert (windows[:, 0] == tokenizer.bos_token_id).all()
    pieces = [tokenizer.decode(row[int(bos) :].tolist()) for row in windows]
    assert len(set(pieces)) == 50 and all(text.find(piece) % 30 == 0 for piece in pieces)
    again = cut_windows([text], Plain(tokenizer, bos), count=50, seqlen=30 + bos, seed=3)
    other = cut_windows([text], Plain(tokenizer, bos), count=50, seqlen=30 + bos, seed=4)
    assert torch.equal(windows, again) and not torch.equal(windows, other)
    assert cut_windows([text], Plain(tokenizer, bos), 100, 30 + bos, seed=0).shape[0] == 100
    found = r"expected 3030 tokens for 101 samples .*, got 3000; .* fewer --n-samples"
    with pytest.raises(ConfigError, match=found):
        cut_windows([text], Plain(tokenizer, bos), 101, 30 + bos, seed=0)


def test_a_folder_of_texts_and_rows(tmp_path, caplog):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.md").write_text("\ufefffirst")
    (tmp_path / "ignored.py").write_text("code")
    rows = ['"a string"', '{"text": "a text"}', "", '{"messages": [{"role": "user", "content": "hi"}]}']
    (tmp_path / "sub/c.jsonl").write_text("\n".join(rows))
    tokenizer = Tokenizer("tiny")
    *plain, chat = read_texts(str(tmp_path), tokenizer)[0]
    assert plain == ["first", "second", "a string", "a text"]
    assert chat == tokenizer.hf.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert caplog.messages == [f"--calib: {tmp_path.name}: files left out: .py (1)"]


def test_chats_are_written_by_the_models_template(tmp_path):
    """Chats in OpenAI's form, in parts and in ShareGPT's form all render as transformers renders them."""
    tokenizer, path = Tokenizer("tiny"), tmp_path / "c.jsonl"
    said = [("system", "Be brief."), ("user", "How many?"), ("assistant", "Seven.")]
    names = {"user": "human", "assistant": "gpt"}
    parts = [(role, [{"type": "text", "text": text}]) for role, text in said]
    rows = [
        {"messages": [{"role": role, "content": text} for role, text in said]},
        {"messages": [{"role": role, "content": text} for role, text in parts]},
        {"conversations": [{"from": names.get(role, role), "value": text} for role, text in said]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    wanted = tokenizer.hf.apply_chat_template(rows[0]["messages"], tokenize=False)
    assert read_texts(str(path), tokenizer)[0] == [wanted] * 3
    assert all(text in wanted for _, text in said)


def test_rows_that_are_left_out_are_counted(tmp_path, caplog):
    tokenizer, path = Tokenizer("tiny"), tmp_path / "c.jsonl"
    said = {"messages": [{"role": "user", "content": "How many?"}]}
    empty = [{"conversations": []}, {"messages": [], "prompt": "unsaid"}, {"messages": None}]
    rows = [empty[0], said, *empty[1:], {"messages": None, "text": "a text"}, {"text": None}]
    path.write_text("\n".join([*map(json.dumps, rows), "{"]))
    chat, text = read_texts(str(path), tokenizer)[0]
    assert "How many?" in chat and text == "a text"
    (warning,) = caplog.messages
    assert "5 of the 7 rows" in warning and "3: a conversation without messages (row 1 of c.jsonl)" in warning
    assert "1: 'text' is null" in warning and "1: a line that is not JSON" in warning
    path.write_text("\n".join(map(json.dumps, empty)))
    with pytest.raises(
        ConfigError, match=r"no row of '.*c\.jsonl' can be used .3: a conversation without mess"
    ):
        read_texts(str(path), tokenizer)


def by_name(monkeypatch, rows):
    """Replace `datasets` by one that has a single dataset; return the names that are asked for."""
    import datasets

    asked = []

    def load(path, config, split, revision, streaming):
        assert streaming
        asked.append((path, config, split, revision))
        return datasets.IterableDataset.from_generator(rows)

    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked


def test_a_dataset_by_name(monkeypatch):
    asked = by_name(monkeypatch, lambda: iter([{"text": "one"}, {"text": "two"}]))
    assert read_texts("org/name:config:validation", None) == (["one", "two"], "org/name:config:validation")
    assert read_texts("wikitext", None)[0] == ["one", "two"]
    assert read_texts("org/Name-2.5", None)[1] == "org/Name-2.5"
    assert read_texts("org/name:20231101.en", None)[1] == "org/name:20231101.en"
    assert read_texts("org/name@refs/convert/parquet::test[:5%]", None)[0] == ["one", "two"]
    assert asked == [
        ("org/name", "config", "validation", None), ("wikitext", None, "train", None),
        ("org/Name-2.5", None, "train", None), ("org/name", "20231101.en", "train", None),
        ("org/name", None, "test[:5%]", "refs/convert/parquet"),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="expected a file, a folder or a dataset"):
        read_texts("my data", None)


def test_a_dataset_that_cannot_be_read_is_one_line(monkeypatch):
    def rows():
        raise ConnectionError("no route\nto the host")
        yield

    by_name(monkeypatch, rows)
    with pytest.raises(
        ConfigError,
        match="neither a file nor a dataset .* 'org/name' .no route to the host.; give a dataset as ORG",
    ):
        read_texts("org/name", None)


def test_no_tokenizer(llama, tmp_path):
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="no usable tokenizer") as error:
        Tokenizer(tmp_path)
    assert "\n" not in str(error.value) and "one of" not in str(error.value)
