"""A folder without a usable tokenizer gets an error with a remedy that works."""

import base64
import json
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

import qrt.text.loading as loading
import small_tokenizers
from qrt.errors import CheckpointError, UnsupportedError
from qrt.text.loading import load
from qrt.text.tokenizer import Tokenizer

SENTENCEPIECE = b"\x0a\x09\x0a\x05<unk>\x18\x02"
TIKTOKEN = b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256))
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 9085657\n"
OWN_CODE = {"tokenizer_class": "QWenTokenizer", "auto_map": {"AutoTokenizer": ["own.QWenTokenizer", None]}}
BPE = {"vocab.json": json.dumps({"t": 0, "h": 1, "th": 2}), "merges.txt": "#version\nt h\n"}
LLAMA = {"tokenizer_class": "LlamaTokenizer"}
QWEN = {"tokenizer_class": "Qwen2Tokenizer"}


@pytest.fixture
def none_installed(monkeypatch):
    """Hide the packages that read other vocabularies, as in a fresh environment."""
    monkeypatch.setattr(loading, "find_spec", lambda name: None)


@pytest.mark.parametrize(
    "files, config, told",
    [
        ({"tokenizer.model": SENTENCEPIECE}, LLAMA, "SentencePiece's; pip install sentencepiece protobuf"),
        ({"tokenizer.model": SENTENCEPIECE}, None, "SentencePiece's; pip install sentencepiece protobuf"),
        ({"tokenizer.model": TIKTOKEN}, LLAMA, "is tiktoken's; pip install tiktoken, or add"),
        ({"tekken.json": "{"}, None, "tekken.json cannot be read .*not JSON"),
        ({"qwen.tiktoken": TIKTOKEN}, None, "qwen.tiktoken is read by the checkpoint's own code"),
        ({"qwen.tiktoken": TIKTOKEN}, OWN_CODE, "the checkpoint's own code, which qrt does not run"),
        ({"vocab.txt": "the\ndog\n"}, None, "vocab.txt is not read by the class that"),
        (BPE, LLAMA, "vocab.json is not read by the class that"),
        ({"vocab.json": BPE["vocab.json"]}, QWEN, "vocab.json without merges.txt; add merges.txt, or"),
        ({}, None, "expected a tokenizer.json, got no file of a tokenizer; add"),
        ({}, QWEN, "expected a tokenizer.json, got no file of a tokenizer; add"),
        ({"tokenizer.json": "{ damaged"}, None, r"tokenizer.json cannot be read \(Exception: key must be"),
        ({"tokenizer.json": "[]"}, None, r"tokenizer.json cannot be read \(.*\); download it again"),
        ({"tokenizer.json": '{"model": {"type": "New"}}'}, None, "or update the package tokenizers"),
        ({"tokenizer.json": POINTER}, None, "tokenizer.json is a Git LFS pointer, not the file; run git"),
        ({"tokenizer.model": POINTER}, LLAMA, "tokenizer.model is a Git LFS pointer, not the file; run"),
    ],
)  # fmt: skip
def test_the_remedy_fits_the_files(files, config, told, tmp_path, none_installed):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    if config:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"no usable tokenizer: .*{told}") as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"])
@pytest.mark.parametrize(
    "content, told", [("{ damaged", "not JSON"), ("[]", "expected a JSON object, got list")]
)
def test_damaged_settings_are_named(name, content, told, tmp_path):
    folder = small_tokenizers.save(small_tokenizers.byte_level(), tmp_path)
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=f"no usable tokenizer: {name}: {told}"):
        load(folder)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json"])
def test_a_byte_order_mark_is_named(name, tmp_path):
    folder = small_tokenizers.save(small_tokenizers.byte_level(), tmp_path)
    (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
    with pytest.raises(
        CheckpointError, match=f"{name} begins with a byte order mark; save it as UTF-8 without"
    ):
        load(folder)


def test_vocabularies_that_transformers_reads_are_read(tmp_path):
    for name, content in BPE.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(QWEN))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    assert (
        Tokenizer(tmp_path).encode("thth")
        == AutoTokenizer.from_pretrained(tmp_path)("thth")["input_ids"]
        != []
    )


def test_a_tokenizer_without_a_fast_backend_is_refused(tmp_path, monkeypatch):
    slow = SimpleNamespace(is_fast=False, get_vocab=lambda: {"a": 0}, all_special_tokens=[])
    slow.added_tokens_decoder = {}
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: slow)
    with pytest.raises(UnsupportedError, match="SimpleNamespace has no fast backend; add the tokenizer.json"):
        load(tmp_path)
