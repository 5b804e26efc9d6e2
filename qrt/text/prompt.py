"""Prompts of the Python API: text, token ids, or a dictionary of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qrt.checks import is_integer, plain
from qrt.compat.fields import PROMPT_FIELDS
from qrt.compat.settings import refuse
from qrt.errors import ConfigError
from qrt.registry import nearest
from qrt.text.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any] | Sequence[int]
KEYS = ("prompt", "prompt_token_ids", "cache_salt")


def split_prompts(
    prompts: Sequence[Prompt], tokenizer: Tokenizer
) -> list[tuple[str | None, list[int], str | None]]:
    """Return text, if there is one, token ids, and the cache salt or None of each prompt.

    ConfigError for anything else, UnsupportedError for other keys of vLLM's prompts that ask for something.
    """
    parts = [prompt_parts(prompt) for prompt in prompts]
    encoded = iter(tokenizer.encode_all([text for text, ids, _ in parts if text is not None and ids is None]))
    return [(text, next(encoded) if ids is None else ids, salt) for text, ids, salt in parts]


def listed_prompts(prompts: Prompt | Sequence[Prompt] | None) -> Sequence[Prompt]:
    """Return the prompts as a list, also if it is a single prompt; token ids may be arrays or tensors."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    prompts = plain(prompts)
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        got = type(prompts).__name__
        raise ConfigError(f"prompts: expected text, token ids or a dictionary, or a list of them, got {got}")
    if len(prompts) > 0 and is_integer(plain(prompts[0])):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def prompt_parts(prompt: Prompt) -> tuple[str | None, list[int] | None, str | None]:
    """Return text, token ids where they are given, and the cache salt; raises as `split_prompts`."""
    salt = None
    if isinstance(prompt, Mapping):
        others = {key: value for key, value in prompt.items() if key not in KEYS}
        if unknown := [key for key in others if key not in PROMPT_FIELDS]:
            raise ConfigError(f"prompt: unknown key {unknown[0]!r}{nearest(unknown[0], list(KEYS))}")
        refuse(PROMPT_FIELDS, others, others)
        salt = prompt.get("cache_salt")
        if "prompt_token_ids" in prompt:
            return prompt.get("prompt"), plain_ids(prompt["prompt_token_ids"]), salt
        prompt = prompt.get("prompt", ())
    if isinstance(prompt, str):
        return prompt, None, salt
    return None, plain_ids(prompt), salt


def plain_ids(given: Any) -> list[int]:
    """Return token ids as a list: they may be an array or a tensor, or a list of its numbers."""
    ids = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
        got = type(given).__name__
        raise ConfigError(f"prompt: expected text, token ids or a dictionary, got {got}")
    ids = [plain(id) for id in ids]
    if wrong := [id for id in ids if not is_integer(id)]:
        raise ConfigError(f"prompt: expected a list of token ids, got {wrong[0]!r:.50} in it")
    return ids
