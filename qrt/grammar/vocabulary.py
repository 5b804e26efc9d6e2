"""Vocabulary: the tokens of a model as grammars are matched with them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from qrt.errors import UnsupportedError

_SENTENCE_PIECE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}  # its decoders
_making = Lock()


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model as grammars see them. A special token counts by its id, never as text.

    tokenizer   the model's tokenizer.json
    width       how many logits the model has; ids without a token are never allowed
    ends        the ids that end an answer
    """

    tokenizer: str = field(repr=False)
    width: int
    ends: tuple[int, ...]

    @classmethod
    def of(cls, source: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
        """Read the vocabulary of a model.

        source          its folder, a fast tokenizer of transformers, or a `qrt.text.tokenizer.Tokenizer`
        vocab_size      how many logits the model has: ids from there on are left out
        eos_token_ids   the ids that end an answer; those without a logit are left out
        """
        if isinstance(source, str | Path):
            from qrt.text.tokenizer import Tokenizer  # here: the process that checks needs no jinja2

            source = Tokenizer(source)
        ends = tuple(end for end in dict.fromkeys(eos_token_ids) if 0 <= end < vocab_size)
        return cls(source.backend_tokenizer.to_str(), vocab_size, ends)

    @property
    def words(self) -> int:
        """Return how many int32 a mask has: a bit an id."""
        return -(-self.width // 32)

    @property
    def known(self) -> NDArray[np.int32]:
        """Return the mask of the ids that have a token, int32 [words]."""
        return self._made[1]

    @property
    def library(self) -> llguidance.LLTokenizer:
        """Return it as the library knows it; UnsupportedError for a tokenizer whose tokens are no bytes.

        It is made at the first call, which takes 2 s for 150,000 tokens.
        """
        return self._made[0]

    @cached_property
    def _made(self) -> tuple[llguidance.LLTokenizer, NDArray[np.int32]]:
        with _making:
            if "_made" in self.__dict__:  # another thread was first
                return self._made
            if not self.ends:
                raise UnsupportedError(
                    "structured_outputs: expected a model with a token that ends an answer"
                )
            state = json.loads(self.tokenizer)
            ids = _ids(state)
            known = np.zeros(32 * self.words, dtype=np.uint8)
            known[[each for each in ids if each < self.width]] = 1
            most = max(self.width, *(each + 1 for each in ids))
            text = json.dumps(_adapted(state, ids, self.ends))
            made = llguidance.LLTokenizer(text, n_vocab=most, eos_token=list(self.ends))
            return made, np.packbits(known, bitorder="little").view("<i4").astype(np.int32)


def _ids(state: dict[str, Any]) -> dict[int, str]:
    """Return the tokens of a tokenizer.json by their ids."""
    vocab = state["model"]["vocab"]
    pieces = enumerate(piece[0] for piece in vocab) if isinstance(vocab, list) else _turned(vocab)
    return dict(pieces) | {token["id"]: token["content"] for token in state["added_tokens"]}


def _turned(vocab: dict[str, int]) -> Iterator[tuple[int, str]]:
    return ((token_id, token) for token, token_id in vocab.items())


def _adapted(state: dict[str, Any], ids: dict[int, str], ends: Sequence[int]) -> dict[str, Any]:
    """Return a tokenizer.json that the library reads right.

    The library tells from the decoder how tokens are written as bytes, and fails at an id without a token.
    Text that a grammar forces stands inside an answer: no space is put in front of it.
    """
    kinds = {part["type"] for part in _parts(state["decoder"])}
    if "ByteLevel" in kinds:
        state["decoder"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    elif kinds and kinds <= _SENTENCE_PIECE:
        spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        state["decoder"] = {
            "type": "Sequence",
            "decoders": [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}],
        }
    else:
        raise UnsupportedError(
            "structured_outputs: expected a tokenizer of bytes (byte-level or SentencePiece), got one with "
            f"the decoder {' and '.join(sorted(kinds)) or None}"
        )
    for part in _parts(state["pre_tokenizer"]):
        if "add_prefix_space" in part:
            part["add_prefix_space"] = False
    for token_id in range(max(ids)):
        if token_id not in ids:
            _fill_gap(state["model"]["vocab"], token_id)
    added = {token["id"]: token for token in state["added_tokens"]}
    for end in set(ends) & ids.keys():
        if end not in added:
            plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            state["added_tokens"].append(plain | {"id": end, "content": ids[end], "special": True})
        else:
            added[end]["special"] = True
    state["added_tokens"].sort(key=lambda token: token["id"])
    return state | {"truncation": None, "padding": None, "post_processor": None}


def _fill_gap(vocab: Any, token_id: int) -> None:
    name = f"\0{token_id}"  # no mask allows it: `known`
    if isinstance(vocab, list):
        vocab.append([name, -1e9])
    else:
        vocab[name] = token_id


def _parts(step: Any) -> list[dict[str, Any]]:
    """Return the steps that a step of a tokenizer.json is made of; itself if it is no sequence."""
    if step is None:
        return []
    inner = next((step[key] for key in ("decoders", "pretokenizers", "normalizers") if key in step), None)
    return [step] if inner is None else [part for each in inner for part in _parts(each)]
