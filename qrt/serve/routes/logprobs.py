"""Write log-probabilities in the shapes of the two OpenAI endpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qrt.text.collector import RequestCollector
from qrt.text.detokenizer import INCOMPLETE, TokenPlaces
from qrt.text.output import Logprob, TokenLogprobs

LEAST_LOGPROB = -9999.0  # JSON has no -Infinity


def prompt_logprobs(collector: RequestCollector) -> list[dict[str, Any] | None]:
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


def completion_logprobs(
    rows: list[TokenLogprobs], places: TokenPlaces, by_id: bool = False
) -> dict[str, Any]:
    """Return tokens' log-probabilities in the shape of `text_completion`: four parallel lists.

    by_id   show tokens by `token_name`
    """
    if by_id:
        rows = [
            {id: replace(entry, decoded_token=token_name(id)) for id, entry in row.items()} for row in rows
        ]
    chosen = [next(iter(row.values())) for row in rows]
    return {
        "tokens": [entry.decoded_token for entry in chosen],
        "token_logprobs": [_number(entry) for entry in chosen],
        "top_logprobs": [_by_text(row) for row in rows],
        "text_offset": places.feed(next(iter(row)) for row in rows),
    }


def _by_text(row: TokenLogprobs) -> dict[str, float]:
    """Return a row by text; of several tokens with one text (parts of characters), the likeliest counts."""
    likeliest: dict[str, float] = {}
    for entry in row.values():
        text, value = entry.decoded_token or "", _number(entry)
        likeliest[text] = max(value, likeliest.get(text, value))
    return likeliest


def chat_logprobs(
    rows: list[TokenLogprobs] | None, num_top: int, collector: RequestCollector, by_id: bool = False
) -> dict[str, Any] | None:
    """Return tokens' log-probabilities in the shape of `chat.completion`: each with the likeliest ones.

    by_id   show tokens by `token_name`; their bytes stay
    """
    if rows is None:
        return None
    content = []
    for row in rows:
        (chosen, *_), ranked = row.items(), sorted(row.items(), key=lambda item: item[1].rank)
        top = [_chat_token(*item, collector, by_id) for item in ranked if item[1].rank <= num_top]
        content.append({**_chat_token(*chosen, collector, by_id), "top_logprobs": top})
    return {"content": content}


def _chat_token(token_id: int, entry: Logprob, collector: RequestCollector, by_id: bool) -> dict[str, Any]:
    text = entry.decoded_token or ""
    own = collector.token_bytes(token_id) if INCOMPLETE in text else text.encode()
    return {"token": token_name(token_id) if by_id else text, "logprob": _number(entry), "bytes": list(own)}
