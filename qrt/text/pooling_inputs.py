"""Turn texts, and pairs of texts, into prompts of a model that pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qrt.errors import ConfigError
from qrt.request.pooling import PoolingParams
from qrt.text.tokenizer import Tokenizer


def encode(
    tokenizer: Tokenizer,
    prompt: str | list[int],
    params: PoolingParams,
    most: int | None,
    special: bool = True,
) -> list[int]:
    """Return the token ids of a prompt, at most `most`; `special`: with those that the tokenizer adds.

    A text is cut between these, token ids as they are.
    """
    side = params.truncation_side or "right"
    if isinstance(prompt, str):
        if most is None:
            return tokenizer.encode(prompt, special)
        return tokenizer.encode_within(prompt, most, side=side, add_special_tokens=special)
    if most is None or len(prompt) <= most:
        return prompt
    return prompt[:most] if side == "right" else prompt[-most:]


def pair_up(first: Any, second: Any, names: tuple[str, str] = ("data_1", "data_2")) -> list[tuple[str, str]]:
    """Return the pairs of two lists of texts: one with each of the second, or each with its own."""
    ones, others = (texts_of(given, name) for given, name in zip((first, second), names, strict=True))
    if len(ones) == 1:
        ones = ones * len(others)
    if len(ones) != len(others) or not ones:
        raise ConfigError(
            f"{names[0]}: expected one text, or as many as {names[1]} has, got {len(ones)} and {len(others)}"
        )
    return list(zip(ones, others, strict=True))


def texts_of(given: Any, name: str) -> list[str]:
    """Return one text, or a list of texts, as a list; a text may be the member `text` of a mapping."""
    listed = [given] if isinstance(given, (str, Mapping)) else given
    if isinstance(listed, bytes) or not isinstance(listed, Sequence):
        raise ConfigError(f"{name}: expected a text, or a list of texts, got {given!r:.80}")
    texts = []
    for one in listed:
        text = one.get("text") if isinstance(one, Mapping) else one
        if not isinstance(text, str):
            raise ConfigError(f"{name}: expected texts, got {text!r:.80}")
        texts.append(text)
    return texts
