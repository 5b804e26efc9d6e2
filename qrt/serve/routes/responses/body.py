"""ResponsesRequest: the body of /v1/responses, and the chat request that it becomes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from qrt.compat.settings import named, refuse
from qrt.errors import ConfigError, UnsupportedError
from qrt.serve.http.body import Body, Limit, Scores
from qrt.serve.routes.protocol import ChatCompletionRequest
from qrt.serve.routes.reasoning_fields import Effort
from qrt.serve.routes.responses.items import Item, messages_of
from qrt.serve.routes.translate.request import chat_request
from qrt.serve.settings import MAX_MESSAGES, MAX_TOOLS

MAX_INCLUDED = 64
LOGPROBS = "message.output_text.logprobs"
# The fields of the chat's body that this one names otherwise.
NAMES = {
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.type": "text.format.type",
    "response_format.json_schema.schema": "text.format.schema",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
_STATELESS = "responses are not stored; send the earlier items as input"
_SERVICE = "qrt only generates text; leave it out"
FIELDS = named(
    ("previous_response_id conversation", _STATELESS, ({},)),
    ("background", "a response comes with its request; use stream", (False,)),
    ("prompt", "prompts are not stored; send their text", ()),
    ("context_management", "nothing is compacted; shorten the input yourself", ({},)),
    ("truncation", "prompts are never cut; leave it out and shorten the input yourself", ("disabled",)),
    ("moderation image", _SERVICE, ()),
)


class TextFormat(Body):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    given_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextSettings(Body):
    """`text`."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningSettings(Body):
    """`reasoning`. A summary is not made: the reasoning itself is in the output."""

    effort: Effort = None
    summary: str | None = None


class ResponseTool(Body):
    """A tool in the flat form of this API."""

    type: str
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesRequest(Body):
    """`POST /v1/responses`. Nothing is stored, whatever `store` says."""

    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    max_output_tokens: Limit | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: Scores = None
    include: Annotated[list[str], Field(max_length=MAX_INCLUDED, fail_fast=True)] | None = None
    truncation: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the texts of the output have log-probabilities."""
        return LOGPROBS in (self.include or ())

    def chat(self) -> ChatCompletionRequest:
        """Return the request as one of /v1/chat/completions."""
        refuse(FIELDS, dict(self), [*(self.model_extra or {}), "truncation"])
        messages = [{"role": "user", "content": self.input}]
        if not isinstance(self.input, str):
            messages = messages_of(self.input)
        if self.instructions is not None:
            messages = [{"role": "system", "content": self.instructions}, *messages]
        if self.top_logprobs and not self.wants_logprobs:
            raise ConfigError(f"top_logprobs: expected only with {LOGPROBS} in include; add it there")
        own = {
            "model": self.model,
            "messages": messages,
            "tools": [_tool(tool, f"tools.{index}") for index, tool in enumerate(self.tools or [])] or None,
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self._response_format(),
            "verbosity": self.text and self.text.verbosity,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "logprobs": self.wants_logprobs or None,
            "top_logprobs": self.top_logprobs if self.wants_logprobs else None,
            "stream": self.stream,
        }
        return chat_request(self, own)

    def _response_format(self) -> dict[str, Any] | None:
        format = self.text and self.text.format
        if not format:
            return None
        if format.type != "json_schema":
            return {"type": format.type}
        schema = {"name": format.name, "schema": format.given_schema, "strict": format.strict}
        return {"type": format.type, "json_schema": schema}


def _tool(tool: ResponseTool, where: str) -> dict[str, Any]:
    if tool.type != "function":
        raise UnsupportedError(
            f"{where}.type: expected function, got {tool.type!r:.50}; qrt runs no tools of its own, "
            "so give a function and run it yourself"
        )
    if tool.name is None:
        raise ConfigError(f"{where}.name: expected a function's name, got none")
    names = ("name", "description", "parameters", "strict")
    function = {name: value for name in names if (value := getattr(tool, name)) is not None}
    return {"type": "function", "function": function}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """Return `tool_choice` as /v1/chat/completions has it."""
    if not choice or not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind == "allowed_tools":
        tools = choice.get("tools")
        allowed = [_named(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": kind, "allowed_tools": {"mode": choice.get("mode"), "tools": allowed}}
    raise UnsupportedError(f"tool_choice.type: expected function or allowed_tools, got {kind!r:.50}")


def _named(tool: Any) -> Any:
    """Return a tool of `allowed_tools` as /v1/chat/completions has it."""
    if isinstance(tool, dict) and tool.get("type") == "function" and "function" not in tool:
        return {"type": "function", "function": {"name": tool.get("name")}}
    return tool
