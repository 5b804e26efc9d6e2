"""The routes of models that pool."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from qrt.answers.pooling.pairs import Pairs
from qrt.answers.pooling.processor import PoolingProcessor
from qrt.answers.pooling.task import with_task
from qrt.compat.fields import POOLING_FIELDS
from qrt.request.pooling import PoolingParams
from qrt.serve.http.openapi import RERANKED, listed
from qrt.serve.http.responses import Deadline, answer_whole
from qrt.serve.http.service import Service
from qrt.serve.http.strict_json import StrictJsonRoute
from qrt.serve.routes.pooling import replies
from qrt.serve.routes.pooling.bodies import (
    Chat,
    EmbeddingChatRequest,
    EmbeddingRequest,
    Inputs,
    PoolingChatRequest,
    PoolingFields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    plain_texts,
)
from qrt.text.pooling_inputs import encode, pair_up

NUMBERS = {"anyOf": [{"type": "array"}, {"type": "string"}]}


def pooling_routes(service: Service) -> APIRouter:
    """Make the routes."""
    routes = APIRouter(route_class=StrictJsonRoute)

    @routes.post("/v1/embeddings", response_model=None, responses=listed(embedding=NUMBERS))
    async def embeddings(body: EmbeddingRequest | EmbeddingChatRequest, request: Request) -> Response:
        return await _vectors(
            service,
            request,
            body,
            "embed",
            lambda found: replies.embeddings(body.model or service.model, body.encoding_format, found),
        )

    @routes.post("/pooling", response_model=None, responses=listed(data=NUMBERS))
    async def pooling(body: PoolingRequest | PoolingChatRequest, request: Request) -> Response:
        return await _vectors(
            service,
            request,
            body,
            None,
            lambda found: replies.pooled(body.model or service.model, body.encoding_format, found),
        )

    @routes.post("/classify", response_model=None, responses=listed(label={"type": "string"}))
    async def classify(body: Inputs | Chat, request: Request) -> Response:
        def reply(found: Sequence[PoolingProcessor]) -> dict[str, Any]:
            pooling = service.client.info.pooling
            assert pooling is not None
            return replies.classes(body.model or service.model, pooling.labels, found)

        return await _vectors(service, request, body, "classify", reply)

    @routes.post("/score", response_model=None, include_in_schema=False)
    @routes.post("/v1/score", response_model=None, responses=listed(score={"type": "number"}))
    async def score(body: ScoreRequest, request: Request) -> Response:
        texts = plain_texts(body.text_1), plain_texts(body.text_2)
        return await _scores(
            service,
            request,
            body,
            pair_up(*texts, ("text_1", "text_2")),
            lambda values, found: replies.scores(body.model or service.model, values, found),
        )

    @routes.post("/rerank", response_model=None, include_in_schema=False)
    @routes.post("/v2/rerank", response_model=None, include_in_schema=False)
    @routes.post("/v1/rerank", response_model=None, responses=RERANKED)
    async def rerank(body: RerankRequest, request: Request) -> Response:
        documents = plain_texts(body.documents)
        shown = documents if body.return_documents else None
        most = body.top_n or len(documents)
        return await _scores(
            service,
            request,
            body,
            [(body.query, document) for document in documents],
            lambda values, found: replies.ranked(body.model or service.model, values, shown, most, found),
        )

    return routes


async def _vectors(
    service: Service,
    request: Request,
    body: Chat | Inputs,
    task: str | None,
    reply: Callable[[Sequence[PoolingProcessor]], Any],
) -> Response:
    """Run one request for each prompt of a body and write the reply of its vectors."""
    arrived, params = time.monotonic(), _checked(service, body)
    own = with_task(service.client.info.pooling, params, task, service.client.info.vector_size)
    most = own.most_tokens(service.client.info.max_model_len)
    prompts: Sequence[str | list[int]]
    if isinstance(body, Chat):
        messages = [message.for_template() for message in body.messages]
        prompts = [await service.render_chat(messages, **body.template_arguments())]
    else:
        prompts = body.prompts()
    collectors = []
    for prompt in prompts:
        await asyncio.sleep(0)  # let other requests run: a body may have a thousand prompts
        if isinstance(prompt, str) and most is None:
            ids = await service.encode(prompt, body.add_special_tokens)
        else:
            ids = await service.off_loop(len(prompt), _encoding(service, prompt, own, most, body))
        collectors.append(service.pooled(ids, own, **body.engine_options()))
    return await _answer(service, request, collectors, arrived, lambda: reply(collectors))


def _encoding(
    service: Service, prompt: str | list[int], params: PoolingParams, most: int | None, body: Chat | Inputs
) -> Callable[[], list[int]]:
    return lambda: encode(service.tokenizer, prompt, params, most, body.add_special_tokens)


async def _scores(
    service: Service,
    request: Request,
    body: PoolingFields,
    pairs: Sequence[tuple[str, str]],
    reply: Callable[[Sequence[float], Sequence[PoolingProcessor]], Any],
) -> Response:
    """Score the pairs of a body and write the reply of their scores."""
    arrived, params = time.monotonic(), _checked(service, body)
    info = service.client.info
    pooling = info.pooling
    own = with_task(pooling, params, None if pooling is None else pooling.task, info.vector_size)
    assert pooling is not None
    made = await asyncio.to_thread(
        lambda: Pairs(
            service.tokenizer,
            pooling,
            pairs,
            own,
            max_model_len=info.max_model_len,
            template=service.config.chat_template,
        )
    )
    collectors = [service.pooled(ids, own, **body.engine_options()) for ids in made.prompts]

    def written() -> Any:
        return reply(made.scores([one.data() for one in collectors]), collectors)

    return await _answer(service, request, collectors, arrived, written)


def _checked(service: Service, body: PoolingFields) -> PoolingParams:
    """Return the parameters of a body, after the checks that need no prompt."""
    service.check_running()
    service.check_model(body.model)
    body.refuse_unsupported(POOLING_FIELDS)
    return body.params()


async def _answer(
    service: Service,
    request: Request,
    collectors: Sequence[PoolingProcessor],
    arrived: float,
    body: Callable[[], Any],
) -> Response:
    stream = await service.submit(collectors, arrived, request, whole=True)
    return await answer_whole(request, stream, Deadline(service, arrived), body)
