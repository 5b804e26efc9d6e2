"""The routes /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from qrt.serve.http.openapi import COUNT, MESSAGE
from qrt.serve.http.service import Service
from qrt.serve.http.strict_json import StrictJsonRoute
from qrt.serve.routes.messages.body import NAMES, CountTokensRequest, MessagesRequest
from qrt.serve.routes.messages.reply import MessageReply
from qrt.serve.routes.openai import answer, chat_collectors, count_chat
from qrt.serve.routes.translate.request import naming


def messages_routes(service: Service) -> APIRouter:
    """Make the routes."""
    routes = APIRouter(route_class=StrictJsonRoute)

    @routes.post("/v1/messages", response_model=None, responses=MESSAGE)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        arrived = time.monotonic()
        chat = body.chat(service.reasoning.format is not None)
        with naming(NAMES):
            collectors = await chat_collectors(service, chat, capped=True)
        reply = MessageReply(body.model or service.model, chat, collectors[0], request.state.request_id)
        return await answer(service, request, chat, collectors, reply, arrived)

    @routes.post("/v1/messages/count_tokens", responses=COUNT)
    async def count_tokens(body: CountTokensRequest) -> dict[str, Any]:
        chat = body.chat(service.reasoning.format is not None)
        with naming(NAMES):
            return {"input_tokens": await count_chat(service, chat)}

    return routes
