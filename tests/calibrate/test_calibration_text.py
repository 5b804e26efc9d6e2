"""The default text needs no network; windows are disjoint, seeded, and begin as the tokenizer begins."""

import inspect
import json
import pydoc_data.topics
import textwrap

import pytest
import torch
from transformers import AutoTokenizer

from qrt.assets import model_path
from qrt.errors import CheckpointError, ConfigError
from qrt_calibrate.text import cut_windows, docstrings, load_tokenizer, read_texts


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
    [(None, "--calib: no file '.*'; give a UTF-8 text file"), (b"\xff\xfe\x00a", "is not UTF-8 text")],
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

    def __call__(self, text, add_special_tokens=True, **options):
        ids = self._tokenizer(text, add_special_tokens=False, **options)["input_ids"]
        return {"input_ids": [self.bos_token_id] * (self._bos and add_special_tokens) + ids}


@pytest.mark.parametrize("bos", [True, False])
def test_windows(bos, llama):
    tokenizer = AutoTokenizer.from_pretrained(llama)
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
    with pytest.raises(ConfigError, match=r"3000 tokens, wanted 3030 for 101 samples .* fewer --n-samples"):
        cut_windows([text], Plain(tokenizer, bos), 101, 30 + bos, seed=0)


class Chat:
    chat_template = "{{ messages }}"

    def apply_chat_template(self, messages, tokenize):
        assert not tokenize
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)


def test_folders_and_rows(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "ignored.py").write_text("code")
    rows = ['"a string"', '{"text": "a text"}', "", '{"messages": [{"role": "user", "content": "hi"}]}']
    (tmp_path / "sub/c.jsonl").write_text("\n".join(rows))
    wanted = ["first", "second", "a string", "a text", "<user>hi"]
    assert read_texts(str(tmp_path), Chat()) == (wanted, tmp_path.name)
    Chat.chat_template = None
    for content, message in (
        ('{"messages": [{"role": "user"}]}', "row 1 holds chat messages, but the model has no chat template"),
        ('"fine"\n{"txt": 1}', r"row 2 has keys \['txt'\], wanted one of messages, .*text"),
        ('"fine"\n{', "line 2 is not JSON"),
    ):
        (tmp_path / "sub/c.jsonl").write_text(content)
        with pytest.raises(ConfigError, match=message):
            read_texts(str(tmp_path / "sub/c.jsonl"), Chat())
    odd = "two\u2028lines\x85of\x0bone\x0ctext"
    row = json.dumps({"text": odd}, ensure_ascii=False)
    (tmp_path / "sub/c.jsonl").write_text(f"\ufeff{row}\r\n", newline="")
    assert read_texts(str(tmp_path / "sub/c.jsonl"), Chat())[0] == [odd]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no \.txt, \.md, \.rst or \.jsonl files"):
        read_texts(str(tmp_path / "empty"), Chat())


@pytest.mark.parametrize(("name", "where"), [("c.jsonl", "c.jsonl, line 2 is"), ("c.json", "c.json is")])
def test_half_of_a_surrogate_pair_is_no_text(name, where, tmp_path):
    """As in dumps that cut an emoji in two: tokenizers do not take it. Whole ones are text."""
    path, rows = tmp_path / name, ['{"text": "\\ud83d\\ude00"}', '{"text": "\\ud83d"}']

    def write(rows):
        path.write_text("\n".join(rows) if name == "c.jsonl" else f"[{', '.join(rows)}]")

    write(rows[:1])
    assert read_texts(str(path), Chat())[0] == ["\U0001f600"]
    write(rows)
    with pytest.raises(ConfigError, match=f"{where} not JSON .a string holds half of a surrogate pair"):
        read_texts(str(path), Chat())


def test_sharegpt_is_the_same_chat(tmp_path):
    """By the bundled model's own template; what it would print nothing of is named."""
    tokenizer, path = load_tokenizer(model_path("tiny")), tmp_path / "c.jsonl"
    said = [("system", "Be brief."), ("user", "How many?"), ("assistant", "Seven.")]
    names = {"user": "human", "assistant": "gpt"}
    parts = [(role, [{"type": "text", "text": text}]) for role, text in said]
    rows = [
        {"messages": [{"role": role, "content": text} for role, text in said]},
        {"messages": [{"role": role, "content": text} for role, text in parts]},
        {"conversations": [{"from": names.get(role, role), "value": text} for role, text in said]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    openai, in_parts, sharegpt = read_texts(str(path), tokenizer)[0]
    assert (
        openai == in_parts == sharegpt == tokenizer.apply_chat_template(rows[0]["messages"], tokenize=False)
    )
    assert all(text in sharegpt for _, text in said)
    for entry in ({"user": "hi"}, {"from": "human"}, {"from": ["gpt"], "value": "a"}, {"role": "user"}, "hi",
                  {"role": "user", "content": ["hi"]}):  # fmt: skip
        path.write_text(json.dumps({"text": "fine"}) + "\n" + json.dumps({"conversations": [entry]}))
        with pytest.raises(ConfigError, match="row 2, message 1: got .*, wanted a role and a content"):
            read_texts(str(path), tokenizer)
    path.write_text(json.dumps({"conversations": "hi"}))
    with pytest.raises(ConfigError, match="row 1: got str, wanted a list of chat messages"):
        read_texts(str(path), tokenizer)


def test_a_json_file_is_a_list_of_rows(tmp_path):
    """As ShareGPT's dumps are; markup is not text."""
    tokenizer, path = load_tokenizer(model_path("tiny")), tmp_path / "c.json"
    said = [{"from": "human", "value": "How many?"}, {"from": "gpt", "value": "Seven."}]
    path.write_text(
        "\ufeff" + json.dumps([{"id": "a", "conversations": said}, {"text": "a text"}, "a string"])
    )
    chat, *others = read_texts(str(path), tokenizer)[0]
    assert chat.index("How many?") < chat.index("Seven.") and "conversations" not in chat
    assert others == ["a text", "a string"]
    for content, message in (
        ('{"text": "one"}', r"c\.json holds dict, wanted a list of rows"),
        ('"one"\n"two"', r"c\.json is not JSON \(Extra data.*name it \.jsonl if it is a JSON value a line"),
        ('[{"txt": 1}]', r"c\.json, row 1 has keys \['txt'\], wanted one of messages"),
        ("[]", r"of 0 rows in '.*c\.json' none has text"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=message):
            read_texts(str(path), tokenizer)


def test_conversations_without_messages_are_left_out(tmp_path, caplog):
    tokenizer, path = load_tokenizer(model_path("tiny")), tmp_path / "c.jsonl"
    said = {"messages": [{"role": "user", "content": "How many?"}]}
    empty = [{"conversations": []}, {"messages": [], "prompt": "unsaid"}, {"messages": None}]
    rows = [empty[0], said, *empty[1:], {"messages": None, "text": "a text"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    chat, text = read_texts(str(path), tokenizer)[0]
    assert "How many?" in chat and text == "a text"
    (warning,) = caplog.messages
    assert "3 of the 5 texts of" in warning and "are conversations without messages" in warning
    path.write_text("\n".join(map(json.dumps, empty)))
    with pytest.raises(ConfigError, match=r"--calib: of 3 rows in '.*c\.jsonl' none has text"):
        read_texts(str(path), tokenizer)


def test_a_dataset_by_name(monkeypatch):
    import datasets

    asked = []

    def load(path, config, split, streaming):
        asked.append((path, config, split))
        return datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read_texts("org/name:config:validation", Chat()) == (["one", "two"], "org/name:config:validation")
    assert read_texts("wikitext", Chat())[0] == ["one", "two"]
    assert read_texts("org/Name-2.5", Chat())[1] == "org/Name-2.5"
    assert read_texts("org/name:20231101.en", Chat())[1] == "org/name:20231101.en"
    assert asked == [
        ("org/name", "config", "validation"), ("wikitext", None, "train"), ("org/Name-2.5", None, "train"),
        ("org/name", "20231101.en", "train"),
    ]  # fmt: skip


def test_no_tokenizer(llama, tmp_path):
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="no usable tokenizer") as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value) and "one of" not in str(error.value)
