"""tekken.json alone is a tokenizer: as transformers converts it, and as its definition says."""

import base64
import json
from itertools import pairwise

import pytest
import regex
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations.mistral.tokenizer import MistralConverter

import small_tokenizers
from qrt.errors import CheckpointError
from qrt.text.loading import load
from qrt.text.tokenizer import Tokenizer
from qrt.text.vocabulary.tekken import OLDER_SPECIAL

# Mistral's own, and one that splits nothing: all merges are by rank.
PATTERNS = [
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[\s\S]+",
]
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]
TEXTS = [
    *small_tokenizers.TEXT,
    "",
    " ",
    "a\r\n\n  b",
    "the the  the",
    "\x00\x7f\u00ad",
    "HTTPServer 12345 //\n",
]


def tokens():
    """Return the bytes of tokens by rank: those of a trained vocabulary, and one that no two others make."""
    written = {character: byte for byte, character in bytes_to_unicode().items()}
    vocabulary = small_tokenizers.byte_level().get_vocab()
    learned = sorted(set(vocabulary) - set(small_tokenizers.SPECIAL), key=vocabulary.get)
    learned = [bytes(written[character] for character in token) for token in learned]
    return [*(bytes([byte]) for byte in range(256)), *(t for t in learned if len(t) > 1), b"Koln xyz"]


TOKENS = tokens()


def content(pattern=PATTERNS[0], special=SPECIAL, count=20, size=None, **config):
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(TOKENS)
    ]
    settings = {"pattern": pattern, "version": "v13", "default_num_special_tokens": count}
    settings |= {"default_vocab_size": count + len(TOKENS) if size is None else size, **config}
    listed = [
        {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(special or ())
    ]
    return {"config": settings, "vocab": vocabulary} | ({"special_tokens": listed} if special else {})


def write(folder, content, **files):
    (folder / "tekken.json").write_text(json.dumps(content))
    (folder / "config.json").write_text('{"model_type": "mistral"}')
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def by_definition(text, pattern, first):
    """Merge the neighbours that make the token of the lowest rank, the leftmost first, until none do."""
    ranks, found = {token: rank for rank, token in enumerate(TOKENS)}, []
    for part in regex.findall(pattern, text):
        pieces = [part.encode()]
        if pieces[0] not in ranks:
            pieces = [bytes([byte]) for byte in part.encode()]
        while made := [(ranks[a + b], at) for at, (a, b) in enumerate(pairwise(pieces)) if a + b in ranks]:
            at = min(made)[1]
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        found += [first + ranks[piece] for piece in pieces]
    return found


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("count", [len(SPECIAL), 20])
def test_ids_are_those_of_the_definition(pattern, count, tmp_path):
    tokenizer = Tokenizer(write(tmp_path, content(pattern, count=count)))
    for text in [*TEXTS, "Koln xyz"]:
        ids = by_definition(text, pattern, count)
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.encode(text) == tokenizer.encode_all([text])[0] == [1, *ids]
        assert tokenizer.decode([1, *ids, 2]) == text
    assert [tokenizer.token_bytes(count + rank) for rank in range(len(TOKENS))] == TOKENS


@pytest.mark.parametrize("size", [None, 400])
def test_backend_is_that_of_transformers(size, tmp_path):
    """Tokens beyond `default_vocab_size` are left out, with their merges."""
    folder = write(tmp_path, content(size=size))
    ours = json.loads(Tokenizer(folder).backend_tokenizer.to_str())
    theirs = json.loads(MistralConverter(str(folder / "tekken.json")).converted().to_str())
    for part in ("model", "pre_tokenizer", "decoder"):
        assert ours[part] == theirs[part]
    names = [[(token["id"], token["content"]) for token in each["added_tokens"]] for each in (ours, theirs)]
    assert names[0] == names[1] and len(Tokenizer(folder)) == (size or 20 + len(TOKENS))


def test_special_tokens_are_known_by_name(tmp_path):
    tokenizer = Tokenizer(write(tmp_path, content(special=["<unk>", "</s>", "<s>", "[INST]"])))
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.special_tokens == tokenizer.hf.special_tokens_map == named
    assert tokenizer.bos_token_id == 2 and tokenizer.eos_token_ids == (1,)
    assert tokenizer.encode("[INST]the</s>")[:2] == [2, 3] and tokenizer.special_ids == set(range(20))
    assert tokenizer.encode_pair("a", "b")[0] == 2
    chat = "{{ bos_token }}[INST]{{ messages[0].content }}{{ eos_token }}"
    ids = tokenizer.encode_chat([{"role": "user", "content": "the"}], chat_template=chat)
    assert ids == [2, 3, *tokenizer.encode("the", add_special_tokens=False), 1]


def test_files_without_a_list_have_the_older_tokens(tmp_path):
    tokenizer = Tokenizer(write(tmp_path, content(special=None, count=30, version="v3")))
    assert tokenizer.special_names == {
        text: rank
        for rank, text in enumerate([*OLDER_SPECIAL, *(f"<SPECIAL_{rank}>" for rank in range(20, 30))])
    }
    assert tokenizer.special_names["[TOOL_CALLS]"] == 9 and tokenizer.special_tokens["pad_token"] == "<pad>"


def test_settings_beside_the_file_count(tmp_path):
    settings = {
        "chat_template": "x",
        "eos_token": "[/INST]",
        "pad_token": None,
        "extra_special_tokens": ["[INST]"],
    }
    tokenizer = Tokenizer(write(tmp_path, content(), tokenizer_config=settings, special_tokens_map={}))
    assert tokenizer.chat_template() == tokenizer.hf.chat_template == "x"
    assert tokenizer.eos_token_ids == (4,) and tokenizer.bos_token_id == 1
    assert tokenizer.all_special_ids == set(tokenizer.hf.all_special_ids)


def test_the_transformers_tokenizer_is_the_same(tmp_path):
    tokenizer = Tokenizer(write(tmp_path, content()))
    for text in TEXTS:
        assert tokenizer.hf(text)["input_ids"] == tokenizer.encode(text)
    assert tokenizer.hf.eos_token == "</s>"


def test_a_tokenizer_json_beside_it_wins(tmp_path):
    folder = small_tokenizers.save(small_tokenizers.byte_level(), write(tmp_path, content()))
    assert Tokenizer(folder).special_names == {"<s>": 0, "</s>": 1, "<|user|>": 2}


@pytest.mark.parametrize(
    "damaged, told",
    [
        ({}, "KeyError: 'config'"),
        ({"config": {}, "vocab": []}, "no special_tokens"),
        (content(special=None, version="v11"), "no special_tokens"),
        (content(special=["<s>", "<s>"]), "special tokens twice"),
        (content(count=3), "of another rank than 0 to 2"),
        ({**content(), "vocab": content()["vocab"][1:]}, "ranks of vocab"),
        ({**content(), "vocab": [content()["vocab"][0]] * 2}, "ranks of vocab"),
        (content(pattern="("), "Oniguruma error"),
        ({**content(), "vocab": []}, "no vocabulary"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said(damaged, told, tmp_path):
    with pytest.raises(CheckpointError, match=f"tekken.json cannot be read .*{told}.*; download it again"):
        load(write(tmp_path, damaged))
