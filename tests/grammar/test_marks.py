"""Marks: added tokens count by their id, and text that spells them is made of ordinary tokens."""

import json
import unicodedata

import numpy as np
import pytest
from tokenizers import AddedToken, normalizers

from qrt.errors import ConfigError
from qrt.grammar.compiled import Grammars
from qrt.grammar.marks import is_mark, plain_rules
from qrt.grammar.spec import Grammar
from qrt.grammar.vocabulary import Vocabulary
from qrt.text.tokenizer import Tokenizer
from small_tokenizers import byte_fallback, byte_level, metaspace, save

KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}
UNFLAGGED = ("<tool_call>", "</tool_call>", "<think>", "<\uff5ccall\uff5c>")


@pytest.fixture(scope="module", params=KINDS)
def marked(request, tmp_path_factory):
    """A tokenizer with marks that are not flagged special, as Qwen's have them, and its vocabulary."""
    backend = KINDS[request.param]()
    backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in UNFLAGGED])
    backend.add_tokens([AddedToken("[name]", lstrip=True, rstrip=True), AddedToken("<pad>", rstrip=True)])
    tokenizer = Tokenizer(save(backend, tmp_path_factory.mktemp(request.param)))
    width = len(tokenizer.hf)
    found = Vocabulary.of(tokenizer, width, tokenizer.eos_token_ids)
    return tokenizer, found, Grammars(found)


def written(found, grammars, grammar):
    """The tokens of the one answer that a grammar allows, by its masks and by what it forces."""
    matcher, tokens = grammars.get(grammar).result(), []
    row = np.zeros(found.words, np.int32)
    while not matcher.ended:
        matcher.fill(row)
        bits = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        forced = matcher.forced()
        assert bits and not matcher.error, matcher.error
        tokens.append(forced[0] if forced else bits[0])
        assert tokens[-1] in bits and matcher.accept(tokens[-1]), matcher.error
    return tokens


def test_one_rule_for_library_and_names(marked):
    """What the library takes as special is what rules may name, ends included."""
    tokenizer, found, _ = marked
    special = {i for i in range(found.width) if found.library.is_special_token(i)}
    special = {i for i in special if tokenizer.token_bytes(i) != b"\xff"}  # which no UTF-8 holds
    assert special == set(found.marks.values()) == set(tokenizer.marks.values()) | set(found.ends)
    assert set(tokenizer.marks) >= {*UNFLAGGED, "<pad>", "<|user|>"} and "[name]" not in tokenizer.marks
    assert not is_mark("  ", False) and is_mark("[TOOL_CALLS]", True) and is_mark("<h1>", False)


@pytest.mark.parametrize("mark", [*UNFLAGGED, "<|user|>", "</s>", "<pad>", "[name]"])
def test_text_that_spells_a_mark_is_ordinary(mark, marked):
    tokenizer, found, grammars = marked
    text = f"the {mark} dog"
    if found.library.decode_bytes(tokenizer.encode('a"<|>/', False))[-5:] != b'"<|>/':
        pytest.skip("the tokenizer has no tokens of these signs")
    shapes = [
        Grammar("choice", json.dumps([text])),
        Grammar("json", json.dumps({"const": text})),
        Grammar("json", json.dumps({"enum": [text]})),
        Grammar("regex", "".join(f"[{c}]" if c.isalpha() or c in "<>|/\uff5c " else "\\" + c for c in text)),
        Grammar("lark", f"root ::= {json.dumps(text)}"),
        Grammar("lark", f"?start: {json.dumps(text)}"),
    ]
    for grammar in shapes:
        tokens = written(found, grammars, grammar)
        shown = b"".join(found.library.decode_bytes([token]) for token in tokens).decode()
        assert shown == (json.dumps(text, ensure_ascii=False) if grammar.kind == "json" else text)
        assert not set(tokens) & set(found.marks.values())


def test_rules_name_marks_by_text_or_id(marked):
    _, found, grammars = marked
    for mark in ("<tool_call>", "<|user|>"):
        number = found.marks[mark]
        for rules in (f'start: "a" {mark} "b"', f'start: "a" <[{number}]> "b"', f'root ::= "a" {mark} "b"'):
            assert written(found, grammars, Grammar("lark", rules))[1] == number
    with pytest.raises(ConfigError, match="expected the name of a special token, got '<nothing>'"):
        grammars.get(Grammar("lark", "start: <nothing>")).result()


def test_names_stand_outside_of_texts_and_comments():
    marks, schema = {"<a>": 7, "<b>": 8}, str.upper
    rules = (
        'start: "<a>" <a> /<a>/ <[3]> // <a>\n  # <b>\n  | %json {"const": "<a> // x"} <b> "//" "\\"<a>"\r\n'
    )
    assert plain_rules(rules, marks, schema) == (
        'start: "<a>" <[7]> /<a>/ <[3]>\n  | %json {"CONST": "<A> // X"} <[8]> "//" "\\"<a>"\n'
    )


def test_forced_text_is_not_normalized(tmp_path):
    """Qwen's tokenizers compose characters; what a shape says is written as it stands."""
    backend = byte_level()
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer = Tokenizer(save(backend, tmp_path))
    found = Vocabulary.of(tokenizer, len(tokenizer.hf), tokenizer.eos_token_ids)
    text = unicodedata.normalize("NFD", "Caf\u00e9 \ufb01 \u212b")
    tokens = written(found, Grammars(found), Grammar("choice", json.dumps([text])))
    assert b"".join(found.library.decode_bytes([token]) for token in tokens).decode() == text


def test_choices_of_any_characters(tmp_path):
    tokenizer = Tokenizer(save(byte_level(), tmp_path))
    found = Vocabulary.of(tokenizer, len(tokenizer.hf), tokenizer.eos_token_ids)
    grammars = Grammars(found)
    for text in ("\x7f", "a\x00\x1f\x85\u2028b", '"\\/', "\U0001f600"):
        tokens = written(found, grammars, Grammar("choice", json.dumps([text])))
        assert b"".join(found.library.decode_bytes([token]) for token in tokens).decode() == text
