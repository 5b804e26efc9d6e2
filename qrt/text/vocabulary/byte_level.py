"""Byte-level BPE: each byte of a text is written as a visible character, and pairs are merged by rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

# GPT-2's bytes_to_unicode: a byte's own character if that is visible, or one from U+0100 on.
_SEEN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_UNSEEN = sorted(set(range(256)).difference(_SEEN))
BYTE_CHARACTERS = {chr(byte): byte for byte in _SEEN} | {chr(256 + i): byte for i, byte in enumerate(_UNSEEN)}
_VISIBLE = {byte: character for character, byte in BYTE_CHARACTERS.items()}


def ranked_bpe(ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int]) -> tokenizers.Tokenizer:
    """Return a tokenizer as tiktoken's: `pattern` splits a text, and in a part pairs of low rank merge first.

    A part that is a token is that token, whatever its pairs. The ids of `ranks` follow those of `special`.
    """
    order = sorted(ranks, key=lambda token: ranks[token])
    merges = [(_visible(left), _visible(right)) for token in order for left, right in _pairs(token, ranks)]
    vocabulary = {_visible(token): len(special) + ranks[token] for token in order}
    backend = tokenizers.Tokenizer(models.BPE({**vocabulary, **special}, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _pairs(token: bytes, ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the pairs of tokens that make up `token`, those of low rank first."""
    cuts = ((token[:end], token[end:]) for end in range(1, len(token)))
    yield from sorted(
        (pair for pair in cuts if pair[0] in ranks and pair[1] in ranks),
        key=lambda pair: (ranks[pair[0]], ranks[pair[1]]),
    )


def _visible(token: bytes) -> str:
    return token.decode("latin-1").translate(_VISIBLE)
