"""The tokenizer wrapper against transformers, and what it refuses."""

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import tokenizers
from transformers import AutoTokenizer

import small_tokenizers
from qrt.errors import CheckpointError, ConfigError
from qrt.text.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "the dog 🎉"}]


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback", "metaspace"])
def folder(request, tmp_path_factory):
    make = getattr(small_tokenizers, request.param)
    return small_tokenizers.save(make(), tmp_path_factory.mktemp(request.param))


def test_encodes_and_decodes_as_transformers(folder):
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in small_tokenizers.TEXT:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert (
            ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
        )
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
    assert ours.eos_token_ids == (1,)


@pytest.mark.parametrize("repeats", [1, 200])  # by themselves, and on all cores
@pytest.mark.parametrize("special", [True, False])
def test_many_texts_are_encoded_as_each_alone(folder, repeats, special):
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    texts = ["", "x", *small_tokenizers.TEXT] * repeats
    wanted = [theirs(text, add_special_tokens=special)["input_ids"] for text in texts]
    assert ours.encode_all(texts, special) == wanted and ours.encode_all([]) == []
    with pytest.raises(ConfigError, match="without lone surrogates, got 'a\\\\ud800'"):
        ours.encode_all([*texts, "a\ud800"])


def test_long_texts_leave_other_threads_their_turns(folder):
    """An event loop among them, in which all streams would stand still; and they are the same ids and text
    as ever."""
    tokenizer, text = Tokenizer(folder), "the quick brown fox " * 30_000
    ids, turns = [], 0
    work = threading.Thread(target=lambda: ids.append(tokenizer.encode(text)))
    work.start()
    while work.is_alive():
        turns += 1
        time.sleep(0.001)
    backend = tokenizer.hf.backend_tokenizer
    assert turns > 20 and ids == [backend.encode(text).ids]
    assert tokenizer.decode(ids[0]) == backend.decode(ids[0])


@pytest.mark.parametrize("named", ["LlamaTokenizerFast", "LlamaTokenizer", "Qwen2Tokenizer", "OwnTokenizer"])
def test_tokenizer_json_is_loaded_unchanged(folder, named, tmp_path):
    """Whatever class is named beside it, the model's own among them: DeepSeek's distilled Llama names
    LlamaTokenizerFast, and its tokens are byte-level."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "config.json").write_text('{"model_type": "llama"}')
    path = copy / "tokenizer_config.json"
    own = {"tokenizer_class": named, "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    own = {**json.loads(path.read_text()), **(own if named == "OwnTokenizer" else {"tokenizer_class": named})}
    path.write_text(json.dumps(own))
    truth = tokenizers.Tokenizer.from_file(str(copy / "tokenizer.json"))
    serving, other = Tokenizer(copy), Tokenizer(copy).hf
    for text in small_tokenizers.TEXT:
        ids = truth.encode(text).ids
        assert serving.encode(text) == other.encode(text) == ids
        assert serving.decode(ids) == truth.decode(ids)


def test_huge_files_are_not_read(folder, tmp_path):
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    os.truncate(copy / "tokenizer.json", 2**40)
    with pytest.raises(CheckpointError, match="tokenizer.json: expected at most .*, got 1099511627776"):
        Tokenizer(copy)


def test_chat_templates_without_a_default_are_reported(folder, tmp_path):
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    path = copy / "tokenizer_config.json"
    several = {"chat_template": [{"name": "rag", "template": "x"}]}
    path.write_text(json.dumps({**json.loads(path.read_text()), **several}))
    with pytest.raises(CheckpointError, match="several and no default"):
        Tokenizer(copy).chat_template(None, tools=True)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
def test_texts_of_tokens_keep_their_space(kind, tmp_path):
    """Which SentencePiece's decoder strips of a token alone, so that two tokens would have one text."""
    tokenizer = Tokenizer(small_tokenizers.save(getattr(small_tokenizers, kind)(), tmp_path))
    ids = tokenizer.encode("the dog, the dog", add_special_tokens=False)
    assert "".join(map(tokenizer.token_text, ids)).lstrip() == "the dog, the dog"
    assert b"".join(map(tokenizer.token_bytes, ids)).lstrip() == b"the dog, the dog"
    assert tokenizer.token_text(0) == "<s>" and tokenizer.token_text(2**31) == ""


def test_ids_that_are_none(folder):
    tokenizer = Tokenizer(folder)
    assert tokenizer.decode([2**31]) == ""
    for ids in ([-1], [2**40], [1.5], ["a"]):
        with pytest.raises(ConfigError, match="token ids: expected integers"):
            tokenizer.decode(ids)


def test_truncation_in_the_file_is_not_obeyed(tmp_path):
    tokenizer = small_tokenizers.byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    loaded = Tokenizer(small_tokenizers.save(tokenizer, tmp_path))
    assert loaded.decode(loaded.encode("the quick brown fox jumps")) == "the quick brown fox jumps"


def test_chat_template(folder):
    tokenizer = Tokenizer(folder)
    assert tokenizer.render_chat(MESSAGES, add_generation_prompt=True) == "<|user|>the dog 🎉</s>"
    ids = tokenizer.encode_chat(MESSAGES, add_generation_prompt=True)
    assert ids[0] == 2 and ids[-1] == 1, "special tokens are ids, and no BOS is added"
    with pytest.raises(ConfigError, match="no system"):
        tokenizer.render_chat(MESSAGES, chat_template="{{ raise_exception('no system') }}")
    other = tokenizer.render_chat(MESSAGES, chat_template="{{ messages[0].content }}!")
    assert other == "the dog 🎉!"


def test_templates_are_sandboxed(folder):
    with pytest.raises(ConfigError, match="unsafe|refuses"):
        Tokenizer(folder).render_chat(
            MESSAGES, chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}"
        )


def test_refusals(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        Tokenizer(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no usable tokenizer"):
        Tokenizer(tmp_path)
    plain = small_tokenizers.save(small_tokenizers.byte_level(), tmp_path / "plain", chat_template=None)
    with pytest.raises(ConfigError, match="no chat template"):
        Tokenizer(plain).render_chat(MESSAGES)
