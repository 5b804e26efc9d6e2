"""The OpenAI-compatible endpoints: /v1/completions, /v1/chat/completions and /v1/models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from qrt.answers.processor import OutputProcessor
from qrt.compat.fields import FIELDS
from qrt.errors import ConfigError, ContextLengthError
from qrt.model_files.location import model_commit, model_name
from qrt.serve.http.openapi import MODEL, MODELS, events_or
from qrt.serve.http.responses import Deadline, EventReply, answer_events, answer_whole
from qrt.serve.http.service import Service, new_id
from qrt.serve.http.strict_json import StrictJsonRoute
from qrt.serve.routes.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    SamplingFields,
)
from qrt.serve.routes.replies import ChatReply, CompletionReply
from qrt.text.answer import AnswerFormat


def openai_routes(service: Service) -> APIRouter:
    """Make the routes."""
    routes = APIRouter(route_class=StrictJsonRoute)

    @routes.get("/v1/models", responses=MODELS)
    async def models() -> dict[str, Any]:
        service.check_running()
        names = service.config.model_names
        page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return {"object": "list", "data": [_model_card(service, name) for name in names], **page}

    @routes.get("/v1/models/{name:path}", responses=MODEL)
    async def model(name: str) -> dict[str, Any]:
        service.check_running()
        service.check_model(name)
        return _model_card(service, name)

    @routes.post("/v1/completions", response_model=None, responses=events_or("text_completion"))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        arrived = time.monotonic()
        collectors = await completion_collectors(service, body)
        reply = CompletionReply(new_id("cmpl"), body.model or service.model, body, collectors)
        return await answer(service, request, body, collectors, reply, arrived)

    @routes.post("/v1/chat/completions", response_model=None, responses=events_or("chat.completion"))
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        arrived = time.monotonic()
        collectors = await chat_collectors(service, body)
        reply = ChatReply(new_id("chatcmpl"), body.model or service.model, body, collectors)
        return await answer(service, request, body, collectors, reply, arrived)

    return routes


def _model_card(service: Service, name: str) -> dict[str, Any]:
    """Return vLLM's fields, the commit of a model of the Hub, and what Anthropic's clients read."""
    model = service.client.info.model
    commit = model_commit(model)
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "qrt",
        "root": service.model if commit is None else model_name(model),
        "parent": None,
        "revision": commit,
        "max_model_len": service.client.info.max_model_len,
        "permission": [],
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(service.started, UTC).isoformat(),
    }


def _check_body(service: Service, body: SamplingFields) -> None:
    """Raise the error of a body that this server does not run; the model's name is checked too."""
    service.check_running()
    service.check_model(body.model)
    options = body.stream_options
    if options is not None and not body.stream and any(options.model_dump().values()):
        raise ConfigError("stream_options: expected only with stream: true; leave it out or set stream")
    body.refuse_unsupported(FIELDS)
    declared = type(body).model_fields
    for name in declared.keys() & {"logprobs", "top_logprobs", "prompt_logprobs"}:
        wanted = body.given(name) or 0
        if wanted is not True and wanted > service.config.max_logprobs:  # true: only the token's own
            raise ConfigError(f"{name}: expected at most {service.config.max_logprobs}, got {wanted}")
    if body.stream and body.prompt_logprobs is not None:
        raise ConfigError("prompt_logprobs: expected without stream; leave one of the two out")
    if body.stream and (body.best_of or body.n) > body.n:
        raise ConfigError("best_of: expected at most n with stream; leave stream out or lower best_of")


async def completion_collectors(service: Service, body: CompletionRequest) -> list[OutputProcessor]:
    """Check the body, tokenize its prompts and make a collector for each."""
    _check_body(service, body)
    name, limit = body.token_limit
    generate = limit != 0
    if not generate and not body.echo:
        raise ConfigError(f"{name}: expected at least 1, or echo: true, got 0")
    max_tokens = service.max_tokens(limit) if generate else 1
    params = body.sampling_params(service.defaults, max_tokens, body.logprobs)
    if not generate and params.structured_outputs:
        raise ConfigError(f"{name}: expected at least 1 for an answer that has a shape, got 0")
    params = await service.with_checked_shape(params, body.shape_place)
    params = await service.with_bad_words(params)
    service.reasoning.check(params)
    if body.echo and body.logprobs is not None:
        if body.stream and body.n > 1:
            raise ConfigError("echo with logprobs: expected without stream, or with n 1")
        params = replace(params, prompt_logprobs=body.logprobs)
    collectors = []
    for prompt in body.prompts():
        await asyncio.sleep(0)  # let other requests run: a body may have a thousand prompts
        if isinstance(prompt, str):
            text, ids = prompt, await service.encode(prompt, body.add_special_tokens)
        else:
            text, ids = "", prompt
        _check_length(service, len(ids), limit, name)
        if body.echo and prompt is ids:
            text = service.tokenizer.decode(ids, False)
        collector = service.collector(text, ids, params, generate=generate, **body.engine_options())
        collector.thinking = service.reasoning.plain_thinking(ids, params)
        collectors.append(collector)
    return collectors


async def chat_collectors(
    service: Service, body: ChatCompletionRequest, *, capped: bool = False
) -> list[OutputProcessor]:
    """Check the body, render its conversation with the chat template, tokenize it and make its collector.

    A `max_tokens` beyond the context is an error, or with `capped` no more than what the context leaves.
    """
    _check_body(service, body)
    if body.top_logprobs and not body.logprobs:
        raise ConfigError(
            "top_logprobs: expected only with logprobs: true; set it, or leave top_logprobs out"
        )
    text, ids = await _chat_prompt(service, body)
    calls = body.calls
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    name, max_tokens = body.token_limit
    params = body.sampling_params(service.defaults, service.max_tokens(max_tokens), logprobs)
    params = await service.with_bad_words(params)
    service.reasoning.check(params)
    reasoning = service.reasoning.read(text, body.continue_final_message)
    format = AnswerFormat(calls.format(service.tool_format), calls.names, reasoning, body.separates_reasoning)
    channels = format.tools is None and calls.strict and reasoning is not None and reasoning.opens
    if format.tools or channels:
        params = calls.shaped(params, format.tools, service.marks)
    if format.has_hidden_marks(service.tokenizer):
        params = replace(params, skip_special_tokens=False)
    params = await service.with_checked_shape(params, body.shape_place or "tools")
    _check_length(service, len(ids), None if capped else max_tokens, name)
    collector = service.collector(text, ids, params, **body.engine_options())
    collector.answer = format
    collector.thinking = reasoning.thinking(params, bool(calls.names), channels) if reasoning else None
    return [collector]


async def count_chat(service: Service, body: ChatCompletionRequest) -> int:
    """Return the tokens of a conversation's prompt, also where they are more than the context has."""
    _check_body(service, body)
    _, ids = await _chat_prompt(service, body, counted=True)
    return len(ids)


async def _chat_prompt(
    service: Service, body: ChatCompletionRequest, *, counted: bool = False
) -> tuple[str, list[int]]:
    """Return the prompt of a conversation as text and token ids; ConfigError for a wrong `tool_choice`."""
    messages = [message.for_template() for message in body.messages]
    tools = bool(body.calls.names)
    text = await service.render_chat(messages, **body.template_arguments(tools=tools))
    return text, await service.encode(text, body.add_special_tokens, counted=counted)


def _check_length(service: Service, num_prompt: int, max_tokens: int | None, name: str) -> None:
    """Refuse more tokens than the context has, as vLLM; more than are left are cut later."""
    longest = service.client.info.max_model_len
    if max_tokens is not None and max_tokens > longest:
        raise ContextLengthError(name, max_tokens, longest, longest)
    most = longest if max_tokens == 0 else longest - 1  # room for one token of the answer
    if num_prompt > most:
        raise ContextLengthError("prompt", num_prompt, most, longest)


async def answer(
    service: Service,
    request: Request,
    body: SamplingFields,
    collectors: Sequence[OutputProcessor],
    reply: EventReply,
    arrived: float,
) -> Response:
    """Run the collectors' requests, and send their reply whole or as events."""
    deadline = Deadline(service, arrived)
    stream = await service.submit(collectors, arrived, request, whole=not body.stream)
    if body.stream:
        return answer_events(stream, deadline, reply)
    return await answer_whole(request, stream, deadline, reply.body)
