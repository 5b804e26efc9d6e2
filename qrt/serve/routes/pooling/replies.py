"""Write reply bodies of models that pool from the collectors' vectors."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from qrt.answers.pooling.processor import PoolingProcessor
from qrt.engine.schedule.logprobs import Floats
from qrt.serve.http.service import new_id

Collectors = Sequence[PoolingProcessor]


def listed(kind: str, model: str, data: list[dict[str, Any]], collectors: Collectors) -> dict[str, Any]:
    """Return a body with one entry an input; `kind` begins its id."""
    return {
        "id": new_id(kind),
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": {**usage(collectors), "completion_tokens": 0},
    }


def usage(collectors: Collectors) -> dict[str, Any]:
    """Return the token counts over all prompts."""
    count = sum(len(collector.prompt_ids) for collector in collectors)
    cached = sum(collector.num_cached_tokens for collector in collectors)
    return {
        "prompt_tokens": count,
        "total_tokens": count,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def embeddings(model: str, encoding: str, collectors: Collectors) -> dict[str, Any]:
    """Return the body of /v1/embeddings."""
    data = [
        {"index": index, "object": "embedding", "embedding": numbers(one.data(), encoding)}
        for index, one in enumerate(collectors)
    ]
    return listed("embd", model, data, collectors)


def pooled(model: str, encoding: str, collectors: Collectors) -> dict[str, Any]:
    """Return the body of /pooling."""
    data = [
        {"index": index, "object": "pooling", "data": numbers(one.data(), encoding)}
        for index, one in enumerate(collectors)
    ]
    return listed("pool", model, data, collectors)


def classes(model: str, labels: Sequence[str], collectors: Collectors) -> dict[str, Any]:
    """Return the body of /classify, with the likeliest label of each input."""
    data = []
    for index, one in enumerate(collectors):
        values = one.data()
        label = labels[int(values.argmax())]
        data.append(
            {
                "index": index,
                "object": "classification",
                "label": label,
                "probs": values.tolist(),
                "num_classes": len(labels),
            }
        )
    return listed("classify", model, data, collectors)


def scores(model: str, values: Sequence[float], collectors: Collectors) -> dict[str, Any]:
    """Return the body of /v1/score."""
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(values)]
    return listed("score", model, data, collectors)


def ranked(
    model: str, values: Sequence[float], documents: Sequence[str] | None, most: int, collectors: Collectors
) -> dict[str, Any]:
    """Return the body of /v1/rerank: the `most` relevant documents first, with their texts if given."""
    order = sorted(range(len(values)), key=lambda index: -values[index])[:most]
    results = []
    for index in order:
        shown = {} if documents is None else {"document": {"text": documents[index]}}
        results.append({"index": index, **shown, "relevance_score": values[index]})
    return {"id": new_id("rerank"), "model": model, "results": results, "usage": usage(collectors)}


def numbers(values: Floats, encoding: str) -> Any:
    """Return numbers as lists, or as base64 of little-endian fp32."""
    if encoding == "float":
        return values.tolist()
    return base64.b64encode(values.astype(np.dtype("<f4")).tobytes()).decode()
