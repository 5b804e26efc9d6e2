"""Vocabularies of tokenizers of several kinds: the library's bytes of each token are the tokenizer's."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grammar_walks import TINY, vocabulary
from qrt.errors import UnsupportedError
from qrt.grammar.compiled import Grammars
from qrt.grammar.spec import Grammar
from qrt.grammar.vocabulary import Vocabulary
from qrt.text.tokenizer import Tokenizer
from small_tokenizers import byte_fallback, byte_level, metaspace, save

KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}
TEXTS = ['{"name": "the dog", "n": [1, 2]}', "Grüße", " the", "a\n  b"]


def load(kind, folder):
    return Tokenizer(save(KINDS[kind](), folder))


def bits(row):
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_the_tokenizers(kind, tmp_path):
    tokenizer = load(kind, tmp_path)
    found = Vocabulary.of(tmp_path, len(tokenizer.hf) + 50, tokenizer.eos_token_ids)
    for token_id in set(range(len(tokenizer.hf))) - tokenizer.special_ids:
        own = tokenizer.token_bytes(
            token_id
        )  # the library keeps FF, which no UTF-8 holds, for special tokens
        assert found.library.decode_bytes([token_id]) == own.replace(b"\xff", b""), token_id
    assert all(found.library.is_special_token(token_id) for token_id in tokenizer.special_ids)
    assert bits(found.known) == set(range(len(tokenizer.hf)))


@pytest.mark.parametrize("kind", KINDS)
def test_texts_pass_and_are_forced_as_they_are_written(kind, tmp_path):
    """A choice of one text is forced as a whole, and the forced tokens are that text again."""
    tokenizer = load(kind, tmp_path)
    found = Vocabulary.of(tokenizer, len(tokenizer.hf), tokenizer.eos_token_ids)
    grammars = Grammars(found)
    known = {text for text in TEXTS if tokenizer.hf.unk_token_id not in tokenizer.encode(text)}
    for text in sorted(known):
        if "\ufffd" in text or text not in tokenizer.decode(tokenizer.encode("x" + text)):
            continue  # the tokenizer has no token for a part of it
        matcher = grammars.get(Grammar("choice", json.dumps([text]))).result()
        row, written = np.zeros(found.words, np.int32), b""
        while not matcher.ended:
            matcher.fill(row)
            token_id = (matcher.forced() or sorted(bits(row)))[0]
            assert token_id in bits(row) and matcher.accept(token_id), matcher.error
            written += found.library.decode_bytes([token_id])
        assert written == text.encode()


@pytest.mark.parametrize("width", [len(TINY.hf) + 1000, len(TINY.hf), len(TINY.hf) - 100])
def test_ids_without_a_logit_or_a_token_are_never_allowed(width):
    """A model has more logits than its tokenizer tokens, as many, or fewer."""
    found = Vocabulary.of(TINY, width, [*TINY.eos_token_ids, width + 5])
    assert found.ends == TINY.eos_token_ids
    matcher = Grammars(found).get(Grammar("lark", "start: <[*]>{1,3}")).result()
    row = np.full(found.words, -1, np.int32)
    matcher.fill(row)
    assert bits(row) and max(bits(row)) < min(width, len(TINY.hf))


def test_all_ends_end():
    """Ids that end an answer are special, also where the tokenizer calls one of them text."""
    (end,) = TINY.eos_token_ids
    (other,) = TINY.encode("b", add_special_tokens=False)
    found = Vocabulary.of(TINY, len(TINY.hf), [end, other])
    grammars = Grammars(found)
    row = np.zeros(found.words, np.int32)
    for last in (end, other):
        matcher = grammars.get(Grammar("regex", "a[ab]*")).result()
        for token_id in TINY.encode("a", add_special_tokens=False):
            assert matcher.accept(token_id)
        matcher.fill(row)
        assert {end, other} <= bits(row) and matcher.may_end and not matcher.ended
        assert matcher.accept(last) and matcher.ended
        matcher.rollback(1)
        assert matcher.may_end and not matcher.ended


def test_gaps_between_ids_are_no_tokens():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: 3 * index for index, token in enumerate([*alphabet, "<s>", "</s>"])}
    backend = Backend(models.BPE(ids, []))
    backend.decoder = decoders.ByteLevel()
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    found = Vocabulary.of(hf, max(ids.values()) + 1, [hf.eos_token_id])
    assert bits(found.known) == set(ids.values())
    row = np.zeros(found.words, np.int32)
    Grammars(found).get(Grammar("regex", "(?s:.)*")).result().fill(row)
    assert bits(row) <= set(ids.values()) and len(bits(row)) > 150


def test_a_tokenizer_without_bytes_is_refused():
    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "</s>": 3}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    with pytest.raises(UnsupportedError, match="WordPiece"):
        Vocabulary.of(hf, 4, [3]).library  # noqa: B018
    with pytest.raises(UnsupportedError, match="a token that ends an answer"):
        Vocabulary(vocabulary().tokenizer, 4096, ()).library  # noqa: B018
