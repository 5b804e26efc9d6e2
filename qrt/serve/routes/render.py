"""Show the prompt and parameters that a body becomes, without running it: vLLM's two `/render` routes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from qrt.answers.processor import OutputProcessor
from qrt.serve.http.events import encode
from qrt.serve.http.openapi import errors
from qrt.serve.http.service import Service
from qrt.serve.http.strict_json import StrictJsonRoute
from qrt.serve.routes.openai import chat_collectors, completion_collectors
from qrt.serve.routes.protocol import ChatCompletionRequest, CompletionRequest, SamplingFields


def render_routes(service: Service) -> APIRouter:
    """Make the routes."""
    routes = APIRouter(route_class=StrictJsonRoute)

    @routes.post("/v1/completions/render", response_model=list[dict[str, Any]], responses=errors())
    async def completions(body: CompletionRequest) -> Response:
        collectors = await completion_collectors(service, body)
        service.check_size(collectors)
        return await _reply(service, collectors, lambda: [_rendered(body, each) for each in collectors])

    @routes.post("/v1/chat/completions/render", response_model=dict[str, Any], responses=errors())
    async def chat_completions(body: ChatCompletionRequest) -> Response:
        collectors = await chat_collectors(service, body)
        service.check_size(collectors)
        return await _reply(service, collectors, lambda: _rendered(body, collectors[0]))

    return routes


async def _reply(service: Service, collectors: list[OutputProcessor], data: Any) -> Response:
    num_tokens = sum(len(collector.prompt_ids) for collector in collectors)
    return Response(await service.off_loop(num_tokens, lambda: encode(data())), media_type="application/json")


def _rendered(body: SamplingFields, collector: OutputProcessor) -> dict[str, Any]:
    """Return the request that the engine would get, in vLLM's shape and with the prompt's text."""
    return {
        "request_id": collector.request_id,
        "prompt": collector.prompt,
        "token_ids": collector.prompt_ids,
        "features": None,
        "sampling_params": asdict(collector.params),
        "model": body.model,
        "stream": body.stream,
        "stream_options": body.stream_options and body.stream_options.model_dump(),
        "cache_salt": body.cache_salt,
        "priority": body.priority or 0,
    }
