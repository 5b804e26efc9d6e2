"""Vocabulary: the tokens of a model as grammars are matched with them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from qrt.errors import UnsupportedError
from qrt.grammar.marks import is_mark

_SENTENCE_PIECE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}  # its decoders
_making = Lock()


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model as grammars see them. A mark (`marks.is_mark`) counts by its id, never as text.

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

    @property
    def marks(self) -> dict[str, int]:
        """Return the ids of the marks by their text: the tokens that rules name, ends included."""
        return self._made[2]

    @cached_property
    def _made(self) -> tuple[llguidance.LLTokenizer, NDArray[np.int32], dict[str, int]]:
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
            marks = {end: ids[end] for end in self.ends if end in ids}
            marks |= {
                t["id"]: t["content"] for t in state["added_tokens"] if is_mark(t["content"], t["special"])
            }
            text = json.dumps(_adapted(state, ids, marks))
            made = llguidance.LLTokenizer(text, n_vocab=most, eos_token=list(self.ends))
            words = np.packbits(known, bitorder="little").view("<i4").astype(np.int32)
            return made, words, {name: token_id for token_id, name in marks.items() if token_id < self.width}


def _ids(state: dict[str, Any]) -> dict[int, str]:
    """Return the tokens of a tokenizer.json by their ids."""
    vocab = state["model"]["vocab"]
    pieces = enumerate(piece[0] for piece in vocab) if isinstance(vocab, list) else _turned(vocab)
    return dict(pieces) | {token["id"]: token["content"] for token in state["added_tokens"]}


def _turned(vocab: dict[str, int]) -> Iterator[tuple[int, str]]:
    return ((token_id, token) for token, token_id in vocab.items())


def _adapted(state: dict[str, Any], ids: dict[int, str], marks: Collection[int]) -> dict[str, Any]:
    """Return a tokenizer.json that the library reads right.

    The library tells from the decoder how tokens are written as bytes, and fails at an id without a token.
    Text that a grammar forces stands inside an answer: no space is put in front of it, and its tokens are
    those of the very same bytes. So no normalizer changes it, no token swallows spaces around it, and the
    marks have names that it does not spell.
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
    kept = [part for part in _parts(state["normalizer"]) if part.get("content") == "▁"]
    state["normalizer"] = {"type": "Sequence", "normalizers": kept} if kept else None
    _rename(state, ids, marks)
    for token_id in range(max(ids)):
        if token_id not in ids:
            _fill_gap(state["model"]["vocab"], token_id)
    return state | {"truncation": None, "padding": None, "post_processor": None}


def _rename(state: dict[str, Any], ids: dict[int, str], marks: Collection[int]) -> None:
    """Give the marks names that no text has, and let all added tokens be found as they are."""
    model, plain = state["model"], dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    text = [token | plain for token in state["added_tokens"] if token["id"] not in marks]
    special = [plain | {"id": mark, "content": _hidden(mark), "special": True} for mark in marks]
    state["added_tokens"] = sorted(text + special, key=lambda token: token["id"])
    vocab, names = model["vocab"], {ids[mark] for mark in marks}
    for mark in marks:
        if not isinstance(vocab, dict):
            if mark < len(vocab):
                vocab[mark] = [_hidden(mark), vocab[mark][1]]
        elif vocab.pop(ids[mark], None) is not None:
            vocab[_hidden(mark)] = mark
    if "merges" in model:
        pairs = ((m, m.split(" ", 1) if isinstance(m, str) else m) for m in model["merges"])
        model["merges"] = [m for m, (a, b) in pairs if not (a in names or b in names or a + b in names)]
    if model.get("unk_token") in names:
        model["unk_token"] = next(_hidden(mark) for mark in marks if ids[mark] == model["unk_token"])


def _hidden(mark: int) -> str:
    return f"\uffff{mark}"  # no character


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
