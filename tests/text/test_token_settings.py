"""The files beside tokenizer.json are read as transformers reads them, without importing it."""

import json
from base64 import b64encode

import pytest
import tokenizers
from tokenizers import AddedToken, normalizers, processors
from transformers import PreTrainedTokenizerFast, ProcessorMixin

import small_tokenizers
from qrt.assets import model_path
from qrt.errors import CheckpointError
from qrt.text.loading import load
from qrt.text.tokenizer import Tokenizer

OWN = {"__type": "AddedToken", "content": "<own>", "lstrip": True, "normalized": True}
MARK = {"content": "<mark>", "single_word": False, "lstrip": False, "rstrip": True, "normalized": False}
TEXTS = [*small_tokenizers.TEXT, "<s> the <own> dog</s> <mark> <|user|><pad>fox <image> the", "", " "]
ADDED = {"2": {**MARK, "content": "<|user|>", "special": False}, "600": {**MARK, "special": True}}


def _truncating(tokenizer):
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50, pad_token="<pad>")


def _lowering(tokenizer):
    """Added tokens of all kinds, one of which a normalizer changes, and no post-processor of its own."""
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_tokens([AddedToken("<Odd>", normalized=True), AddedToken("<mark>", single_word=True)])


def _ending(tokenizer):
    one = processors.TemplateProcessing(single="$A </s>", pair="$A $B:1 </s>:1", special_tokens=[("</s>", 1)])
    tokenizer.post_processor = one


BACKENDS = [lambda tokenizer: None, _truncating, _lowering, _ending]
# Files of a checkpoint beside tokenizer.json; a dictionary is JSON.
SETTINGS = {
    "none": {"tokenizer_config.json": None},
    "nothing said": {"tokenizer_config.json": {}},
    "a token that is not there": {"tokenizer_config.json": {"eos_token": "<end>", "pad_token": "<pad>"}},
    "a token as a dictionary": {"tokenizer_config.json": {"eos_token": OWN, "bos_token": None}},
    "own names": {"tokenizer_config.json": {"image_token": "<image>", "own_token": OWN, "odd_token": 5}},
    "extra": {"tokenizer_config.json": {"extra_special_tokens": ["<mark>", OWN, "<mark>", "<s>"]}},
    "extra of old": {"tokenizer_config.json": {"additional_special_tokens": ["<mark>", OWN]}},
    "extra of both": {
        "tokenizer_config.json": {"additional_special_tokens": ["<a>"], "extra_special_tokens": ["<b>"]}
    },
    "extra by name": {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<image>"}}},
    "added": {"tokenizer_config.json": {"added_tokens_decoder": ADDED, "eos_token": "<mark>"}},
    "added, and a map that is not read": {
        "tokenizer_config.json": {"added_tokens_decoder": ADDED, "eos_token": "</s>"},
        "special_tokens_map.json": {"eos_token": "<no>"},
        "added_tokens.json": {"<no>": 700},
    },
    "map": {
        "special_tokens_map.json": {
            "eos_token": MARK, "unk_token": "<unk>", "additional_special_tokens": ["<a>"],
            "image_token": "<image>",
        }
    },
    "map of more": {
        "tokenizer_config.json": {"extra_special_tokens": ["<b>"], "image_token": "<c>", "eos_token": "<d>"},
        "special_tokens_map.json": {"extra_special_tokens": ["<b>", MARK], "image_token": "<image>"},
    },
    "map by name": {
        "tokenizer_config.json": {"extra_special_tokens": {"a_token": "<a>"}},
        "special_tokens_map.json": {"extra_special_tokens": {"b_token": "<b>"}, "pad_token": "<pad>"},
    },
    "old added": {
        "tokenizer_config.json": {"eos_token": "<e>", "extra_special_tokens": ["<f>"]},
        "added_tokens.json": {"<e>": 600, "<f>": 601, "<g>": 602, "<|user|>": 2},
    },
    "split": {"tokenizer_config.json": {"split_special_tokens": True, "eos_token": "</s>"}},
    "no eos and bos of old": {"tokenizer_config.json": {"bos_token": "<s>", "add_eos_token": True}},
}  # fmt: skip


def folder_of(path, change, files):
    tokenizer = small_tokenizers.byte_level()
    change(tokenizer)
    small_tokenizers.save(tokenizer, path)
    for name, content in files.items():
        if content is None:
            (path / name).unlink()
        else:
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def assert_equal(folder):
    ours = Tokenizer(folder)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    assert dict(ours.special_tokens) == theirs.special_tokens_map
    assert ours.all_special_ids == set(theirs.all_special_ids) and len(ours) == len(theirs)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    backend = theirs.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    assert ours.backend_tokenizer.to_str() == backend.to_str()
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, special)
            assert ids == theirs(text, add_special_tokens=special)["input_ids"]
            assert ours.encode_all([text] * 2, special) == [ids, ids]
            assert ours.decode(ids, special) == backend.decode(ids, special)


@pytest.mark.parametrize("change", BACKENDS)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_those_of_transformers(name, change, tmp_path):
    assert_equal(folder_of(tmp_path, change, SETTINGS[name]))


@pytest.mark.parametrize("make", [small_tokenizers.byte_fallback, small_tokenizers.metaspace])
def test_other_kinds_are_those_of_transformers(make, tmp_path):
    assert_equal(small_tokenizers.save(make(), tmp_path))


def test_bundled_tokenizer_is_that_of_transformers():
    assert_equal(model_path("tiny"))


LIST = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"chat_template": LIST}},
        {"tokenizer_config.json": {"chat_template": LIST[:1]}},
        {"tokenizer_config.json": {"chat_template": ""}},
        {"chat_template.jinja": "file {{ x }}\r\n"},
        {"chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "tools of a file"},
        {"chat_template.jinja": "file", "additional_chat_templates/rag.jinja": "other"},
        {"chat_template.jinja": "", "tokenizer_config.json": {"chat_template": LIST}},
    ],
)
def test_chat_templates_are_those_of_transformers(files, tmp_path):
    folder = folder_of(tmp_path, BACKENDS[0], files)
    ours, theirs = Tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for tools in ([{}], None):
        assert (ours.chat_template(tools=bool(tools)) or "") == theirs.get_chat_template(tools=tools)


def in_file(template):
    return {"chat_template": template}


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.json": in_file("legacy")},
        {"processor_config.json": in_file("config")},
        {"processor_config.json": in_file("config"), "chat_template.json": in_file("legacy")},
        {"processor_config.json": {}, "chat_template.json": in_file("legacy")},
        {"processor_config.json": in_file(None), "chat_template.json": in_file("legacy")},
        {"processor_config.json": in_file({"default": "d", "tool_use": "t"})},
        {"chat_template.jinja": "file"},
        {"chat_template.jinja": "file", "additional_chat_templates/rag.jinja": "other"},
    ],
)
@pytest.mark.parametrize("kind", ["tokenizer.json", "fix_mistral_regex", "tekken.json"])
def test_templates_of_processors_are_read(kind, files, tmp_path):
    """Where the tokenizer has none, LLM and transformers' tokenizer render as a processor does."""
    entries = {"fix_mistral_regex": False} if kind == "fix_mistral_regex" else {}
    folder = folder_of(tmp_path, BACKENDS[0], {"tokenizer_config.json": entries, **files})
    if kind == "tekken.json":
        (folder / "tokenizer.json").unlink()
        vocabulary = [{"rank": at, "token_bytes": b64encode(bytes([at])).decode()} for at in range(256)]
        config = {"pattern": ".", "version": "v3"}
        (folder / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocabulary}))
    wanted = ProcessorMixin.get_processor_dict(folder)[0]["chat_template"]
    ours = Tokenizer(folder)
    several = {"default": wanted} if isinstance(wanted, str) else wanted
    for tools in ([{}], None):
        chosen = several.get("tool_use" if tools else "default", several["default"])
        assert ours.chat_template(tools=bool(tools)) == ours.hf.get_chat_template(tools=tools) == chosen


def test_an_own_template_comes_before_the_processors(tmp_path):
    files = {"tokenizer_config.json": in_file("own"), "chat_template.json": in_file("legacy")}
    assert Tokenizer(folder_of(tmp_path, BACKENDS[0], files)).chat_template() == "own"


@pytest.mark.parametrize("name", ["chat_template.json", "processor_config.json"])
def test_damaged_files_of_processors_are_named(name, tmp_path):
    folder = folder_of(tmp_path, BACKENDS[0], {"tokenizer_config.json": {}, name: "{ damaged"})
    with pytest.raises(CheckpointError, match=f"no usable tokenizer: {name}: not JSON"):
        load(folder)


@pytest.mark.parametrize("entry", ["fast_tokenizer_files", "fix_mistral_regex"])
def test_rare_entries_are_left_to_transformers(entry, tmp_path):
    files = {"tokenizer_config.json": {entry: ["tokenizer.4.0.0.json"], "eos_token": "</s>"}}
    folder = folder_of(tmp_path, BACKENDS[0], files)
    other = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    other.add_tokens(["the quick"])
    other.save(str(folder / "tokenizer.4.0.0.json"))
    assert_equal(folder)


@pytest.mark.parametrize("token", [5, ["</s>"], {"text": "</s>"}])
def test_values_that_are_no_tokens_are_refused(token, tmp_path):
    folder = folder_of(tmp_path, BACKENDS[0], {"tokenizer_config.json": {"eos_token": token}})
    with pytest.raises(CheckpointError, match="no usable tokenizer"):
        load(folder)


def test_calls_of_callers_change_nothing(tmp_path):
    tokenizer = Tokenizer(folder_of(tmp_path, BACKENDS[0], {}))
    tokenizer.hf(TEXTS[0], truncation=True, max_length=2)
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]
