"""The routes /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from qrt.serve.http.openapi import INPUT_TOKENS, RESPONSE
from qrt.serve.http.service import Service
from qrt.serve.http.strict_json import StrictJsonRoute
from qrt.serve.routes.openai import answer, chat_collectors, count_chat
from qrt.serve.routes.responses.body import NAMES, ResponsesRequest
from qrt.serve.routes.responses.reply import ResponseReply
from qrt.serve.routes.translate.request import naming


def responses_routes(service: Service) -> APIRouter:
    """Make the routes."""
    routes = APIRouter(route_class=StrictJsonRoute)

    @routes.post("/v1/responses", response_model=None, responses=RESPONSE)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        arrived = time.monotonic()
        chat = body.chat()
        with naming(NAMES):
            collectors = await chat_collectors(service, chat)
        model = body.model or service.model
        reply = ResponseReply(f"resp_{uuid.uuid4().hex}", model, body, chat, collectors[0])
        return await answer(service, request, chat, collectors, reply, arrived)

    @routes.post("/v1/responses/input_tokens", responses=INPUT_TOKENS)
    async def input_tokens(body: ResponsesRequest) -> dict[str, Any]:
        chat = body.chat()
        with naming(NAMES):
            return {"object": "response.input_tokens", "input_tokens": await count_chat(service, chat)}

    return routes
