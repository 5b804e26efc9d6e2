"""Read tekken.json, the vocabulary file of Mistral's own library."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from qrt.model_files.folder import read_json
from qrt.text.vocabulary.byte_level import ranked_bpe

TEKKEN = "tekken.json"
NAMED = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
# Files up to version 7 may lack a list of special tokens. These are theirs, by rank.
OLDER_VERSIONS = ("v1", "v2", "v3", "v7")
OLDER_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip


def read_tekken(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Return the tokenizer of a tekken.json, and what a tokenizer_config.json would say about it.

    A special token's id is its rank among the special tokens. The other tokens come behind these, as many as
    `default_vocab_size` has room for. Every text begins with `<s>`. ValueError for a file that contradicts
    itself, KeyError for one that lacks an entry.
    """
    content = read_json(path)
    config = content["config"]
    special = _special(config, content.get("special_tokens"))
    room = (config.get("default_vocab_size") or len(content["vocab"]) + len(special)) - len(special)
    listed = sorted(content["vocab"], key=lambda token: int(token["rank"]))[:room]
    ranks = {b64decode(token["token_bytes"]): int(token["rank"]) for token in listed}
    if [*ranks.values()] != [*range(len(listed))]:
        raise ValueError("ranks of vocab that are no numbers from 0 on, or a token twice")
    backend = ranked_bpe(ranks, config["pattern"], special)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return backend, {name: text for name, text in NAMED.items() if text in special} | {"add_bos_token": True}


def _special(config: Mapping[str, Any], listed: Sequence[Mapping[str, Any]] | None) -> dict[str, int]:
    """Return the special tokens and their ids, with `<SPECIAL_20>` for one that has an id but no text."""
    if listed is not None:
        texts = {int(token["rank"]): str(token["token_str"]) for token in listed}
    elif config.get("version") in OLDER_VERSIONS:
        texts = dict(enumerate(OLDER_SPECIAL))
    else:
        raise ValueError("no special_tokens")
    count = int(config.get("default_num_special_tokens") or len(texts))
    special = {texts.get(rank, f"<SPECIAL_{rank}>"): rank for rank in range(count)}
    if texts.keys() - range(count) or len(special) < count or len(texts) < len(listed or ()):
        raise ValueError(f"special tokens twice, or of another rank than 0 to {count - 1}")
    return special
