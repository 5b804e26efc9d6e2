"""Turn text into tokens and back: /tokenize, /detokenize and /tokenizer_info, as in vLLM and llama.cpp."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import Field

from qrt.compat.fields import PROMPT_FIELDS
from qrt.errors import ConfigError
from qrt.serve.http.body import Body, Tokens
from qrt.serve.http.events import encode
from qrt.serve.http.openapi import errors
from qrt.serve.http.service import Service
from qrt.serve.http.strict_json import StrictJsonRoute
from qrt.serve.routes.protocol import Conversation

MAX_TOKENS_DECODED = 2**20


class TokenizeText(Body):
    """`POST /tokenize` of a text, by vLLM's name or llama.cpp's."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: None = None  # a body with messages is a TokenizeChat
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @property
    def text(self) -> str:
        """Return the text to tokenize."""
        text = self.content if self.prompt is None else self.prompt
        if text is None:
            raise ConfigError("prompt: expected a text, or messages, got neither")
        return text


class TokenizeChat(Conversation):
    """`POST /tokenize` of a conversation."""

    model: str | None = None
    return_token_strs: bool = False


class Detokenize(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[Tokens, Field(max_length=MAX_TOKENS_DECODED)]


def token_routes(service: Service) -> APIRouter:
    """Make the routes."""
    routes = APIRouter(route_class=StrictJsonRoute)

    @routes.post("/tokenize", response_model=dict[str, Any], responses=errors())
    async def tokenize(body: TokenizeChat | TokenizeText) -> Response:
        service.check_running()
        service.check_model(body.model)
        body.refuse_unsupported(PROMPT_FIELDS)
        if isinstance(body, TokenizeChat):
            messages = [message.for_template() for message in body.messages]
            text = await service.render_chat(messages, **body.template_arguments())
        else:
            text = body.text
        ids = await service.encode(text, body.add_special_tokens, counted=True)

        def reply() -> bytes:
            strings = [service.tokenizer.token_text(id) for id in ids] if body.return_token_strs else None
            head = {"count": len(ids), "max_model_len": service.client.info.max_model_len}
            return encode({**head, "tokens": ids, "token_strs": strings})

        return Response(await service.off_loop(len(ids), reply), media_type="application/json")

    @routes.post("/detokenize", response_model=dict[str, Any], responses=errors())
    async def detokenize(body: Detokenize) -> Response:
        service.check_running()
        service.check_model(body.model)

        def reply() -> bytes:
            return encode({"prompt": service.tokenizer.decode(body.tokens, False)})

        return Response(await service.off_loop(len(body.tokens), reply), media_type="application/json")

    @routes.get("/tokenizer_info", responses=errors())
    async def tokenizer_info() -> dict[str, Any]:
        tokenizer = service.tokenizer
        template = tokenizer.chat_template()
        return {**tokenizer.special_tokens, "vocab_size": len(tokenizer), "chat_template": template}

    return routes
