"""Write log-probabilities in the shapes of the two OpenAI endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from qrt.answers.content_tokens import TokenText
from qrt.answers.output import Logprob, TokenLogprobs
from qrt.answers.processor import OutputProcessor
from qrt.text.detokenizer import INCOMPLETE

LEAST_LOGPROB = -9999.0  # JSON has no -Infinity


def prompt_logprobs(collector: OutputProcessor) -> list[dict[str, Any] | None]:
    """Return the prompt's log-probabilities in vLLM's shape: per token, by token id; null for the first."""
    return [
        None if row is None else {str(token): _prompt_entry(entry) for token, entry in row.items()}
        for row in collector.prompt_logprobs
    ]


def _prompt_entry(entry: Logprob) -> dict[str, Any]:
    return {"logprob": _number(entry), "rank": entry.rank, "decoded_token": entry.decoded_token}


def _number(entry: Logprob) -> float:
    return max(entry.logprob, LEAST_LOGPROB)


def token_name(token_id: int) -> str:
    """Return what `return_tokens_as_token_ids` shows in place of a token's text, as in vLLM."""
    return f"token_id:{token_id}"


def completion_logprobs(tokens: Sequence[TokenText], by_id: bool = False) -> dict[str, Any]:
    """Return tokens' log-probabilities in the shape of `text_completion`: four parallel lists.

    by_id   show tokens by `token_name`
    """
    rows = [one.row for one in tokens]
    texts = [one.text for one in tokens]
    if by_id:
        rows = [
            {id: replace(entry, decoded_token=token_name(id)) for id, entry in row.items()} for row in rows
        ]
        texts = [token_name(next(iter(row))) for row in rows]
    return {
        "tokens": texts,
        "token_logprobs": [_number(next(iter(row.values()))) for row in rows],
        "top_logprobs": [_by_text(row) for row in rows],
        "text_offset": [one.place for one in tokens],
    }


def _by_text(row: TokenLogprobs) -> dict[str, float]:
    """Return a row by text; of several tokens with one text (parts of characters), the likeliest counts."""
    likeliest: dict[str, float] = {}
    for entry in row.values():
        text, value = entry.decoded_token or "", _number(entry)
        likeliest[text] = max(value, likeliest.get(text, value))
    return likeliest


def chat_logprobs(
    tokens: Sequence[TokenText], num_top: int, collector: OutputProcessor, by_id: bool = False
) -> list[dict[str, Any]]:
    """Return tokens' log-probabilities in the shape of `chat.completion`: each with the likeliest ones.

    by_id   show tokens by `token_name`; their bytes stay
    """
    content = []
    for one in tokens:
        (chosen, entry), *_ = one.row.items()
        ranked = sorted(one.row.items(), key=lambda item: item[1].rank)
        top = [
            _chat_token(id, other, one.text if id == chosen else other.decoded_token or "", collector, by_id)
            for id, other in ranked
            if other.rank <= num_top
        ]
        content.append({**_chat_token(chosen, entry, one.text, collector, by_id), "top_logprobs": top})
    return content


def _chat_token(
    token_id: int, entry: Logprob, text: str, collector: OutputProcessor, by_id: bool
) -> dict[str, Any]:
    part = INCOMPLETE in (entry.decoded_token or "")  # of a character: the text comes with its last part
    own = collector.token_bytes(token_id) if part else text.encode()
    return {"token": token_name(token_id) if by_id else text, "logprob": _number(entry), "bytes": list(own)}
