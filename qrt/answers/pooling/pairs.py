"""Pairs: score pairs of texts, by a head that reads both together or by the cosine of two embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qrt.answers.pooling.task import LEAST_LENGTH
from qrt.arch.pooling import Pooling
from qrt.engine.schedule.logprobs import Floats
from qrt.errors import ConfigError
from qrt.request.pooling import PoolingParams
from qrt.text.pooling_inputs import encode
from qrt.text.tokenizer import Tokenizer


class Pairs:
    """The prompts that score pairs of a query and a document, and how their vectors become scores.

    prompts   token ids; of a model that embeds each text comes once
    of_pair   which of `prompts` each pair needs
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        pooling: Pooling,
        pairs: Sequence[tuple[str, str]],
        params: PoolingParams,
        *,
        max_model_len: int,
        template: str | None = None,
    ) -> None:
        """Encode the pairs; ConfigError for a model whose head has several labels.

        template   a chat template that shows messages of the roles query and document; None: the tokenizer
                   joins the two
        """
        most = params.most_tokens(max_model_len)
        if pooling.task == "embed":
            texts = list(dict.fromkeys(text for pair in pairs for text in pair))
            places = {text: index for index, text in enumerate(texts)}
            self.prompts = [encode(tokenizer, text, params, most) for text in texts]
            self.of_pair = [tuple(places[text] for text in pair) for pair in pairs]
            return
        if not pooling.pairs:
            count = len(pooling.labels)
            raise ConfigError(f"score: expected a model with one label, or that embeds, got {count} labels")
        self.prompts = [_encode_pair(tokenizer, *pair, template, most) for pair in pairs]
        self.of_pair = [(index,) for index in range(len(pairs))]

    def scores(self, vectors: Sequence[Floats]) -> list[float]:
        """Return the score of each pair by the vectors [D] of all prompts."""
        scores = []
        for places in self.of_pair:
            own = [vectors[place] for place in places]
            both = _cosine(own[0], own[1]) if len(own) == 2 else own[0][0]
            scores.append(float(both))
        return scores


def _cosine(one: Floats, other: Floats) -> float:
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / max(lengths, LEAST_LENGTH)


def _encode_pair(
    tokenizer: Tokenizer, query: str, document: str, template: str | None, most: int | None
) -> list[int]:
    """Return the prompt of a query and a document, of at most `most` tokens: the document's end is cut."""
    if template is None:
        return tokenizer.encode_pair(query, document, most)
    ids = _rendered(tokenizer, query, document, template)
    if most is not None and len(ids) > most:
        own = tokenizer.encode(document, add_special_tokens=False)
        kept = own[: max(len(own) - (len(ids) - most), 0)]
        ids = _rendered(tokenizer, query, tokenizer.decode(kept, False), template)
    return ids


def _rendered(tokenizer: Tokenizer, query: str, document: str, template: str) -> list[int]:
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    return tokenizer.encode(tokenizer.render_chat(messages, template, add_generation_prompt=True))
