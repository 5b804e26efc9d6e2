"""Bodies of /v1/messages and /v1/messages/count_tokens, and the chat request that they become."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from qrt.compat.settings import named, refuse
from qrt.errors import ConfigError, UnsupportedError
from qrt.serve.http.body import Body, Limit, Stop
from qrt.serve.routes.messages.blocks import InputMessage, TextBlocks, messages_of
from qrt.serve.routes.protocol import ChatCompletionRequest
from qrt.serve.routes.translate.request import chat_request
from qrt.serve.settings import MAX_MESSAGES, MAX_STOPS, MAX_TOOLS

# The fields of the chat's body that this one names otherwise.
NAMES = {
    "stop": "stop_sequences",
    "response_format.json_schema.schema": "output_config.format.schema",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}
FIELDS = named(
    ("mcp_servers container", "qrt runs no tools of its own; give tools and run them yourself", ()),
)
CLEARED = "clear_thinking"  # begins the edit of a context that chat templates make by themselves


class MessagesTool(Body):
    """A tool; those that Anthropic runs or defines have another type."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class MessagesToolChoice(Body):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class MessagesThinking(Body):
    """`thinking`."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Limit | None = None


def _given(settings: Any) -> Any:
    """Read an object without settings as none."""
    return None if settings == {} else settings


class MessagesFormat(Body):
    """`output_config.format`, or `output_format` of the beta API."""

    type: Literal["json_schema"]
    given_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """`output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: MessagesFormat | None = None


class CountTokensRequest(Body):
    """`POST /v1/messages/count_tokens`; some clients send the whole body of a message."""

    model: str | None = None
    max_tokens: Limit | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: str | TextBlocks | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Annotated[MessagesToolChoice | None, BeforeValidator(_given)] = None
    thinking: Annotated[MessagesThinking | None, BeforeValidator(_given)] = None
    output_config: OutputConfig | None = None
    output_format: MessagesFormat | None = None
    context_management: dict[str, Any] | None = None

    def chat(self, thinks: bool) -> ChatCompletionRequest:
        """Return the request as one of /v1/chat/completions; `thinks` tells whether the model can think.

        If it cannot, no budget is exceeded, and clients such as Claude Code give one to every model.
        """
        refuse(FIELDS, dict(self), self.model_extra or ())
        self._check_edits()
        return chat_request(self, {**self._own(), "thinking": self._thinking(thinks)})

    def _own(self) -> dict[str, Any]:
        """Return the fields of the chat's body."""
        messages = messages_of(self.system, self.messages)
        last = messages[-1]
        continues = last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last
        config = self.output_config
        return {
            "model": self.model,
            "messages": messages,
            "continue_final_message": continues
            or None,  # as Anthropic's API goes on with an assistant's text
            "add_generation_prompt": False if continues else None,
            "tools": [_tool(tool, f"tools.{index}") for index, tool in enumerate(self.tools or ())] or None,
            "tool_choice": self.tool_choice and _choice(self.tool_choice),
            "parallel_tool_calls": not (self.tool_choice and self.tool_choice.disable_parallel_tool_use),
            "reasoning_effort": config and config.effort,
            "response_format": _format((config and config.format) or self.output_format),
        }

    def _thinking(self, thinks: bool) -> dict[str, Any] | None:
        if self.thinking is None:
            return None
        kind = self.thinking.type
        budget = self.thinking.budget_tokens if thinks else None
        return {"type": "adaptive" if kind == "between_tools" else kind, "budget_tokens": budget}

    def _check_edits(self) -> None:
        edits = (self.context_management or {}).get("edits") or []
        for edit in edits if isinstance(edits, list) else [edits]:
            kind = edit.get("type") if isinstance(edit, dict) else edit
            if not isinstance(kind, str) or not kind.startswith(CLEARED):
                raise UnsupportedError(
                    f"context_management.edits: expected none but {CLEARED}, got {kind!r:.50}; "
                    "shorten the messages yourself"
                )


class MessagesRequest(CountTokensRequest):
    """`POST /v1/messages`."""

    max_tokens: Limit
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    metadata: dict[str, Any] | None = None
    stream: bool = False

    def _own(self) -> dict[str, Any]:
        return {
            **super()._own(),
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stream": self.stream,
        }


def _tool(tool: MessagesTool, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise UnsupportedError(
            f"{where}.type: expected custom, got {tool.type!r:.50}; qrt runs no tools of its own and knows "
            "none by type, so give its input_schema"
        )
    if tool.input_schema is None:
        raise ConfigError(f"{where}.input_schema: expected a JSON schema, got none")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    given = {key: value for key, value in {**function, "strict": tool.strict}.items() if value is not None}
    return {"type": "function", "function": given}


def _choice(choice: MessagesToolChoice) -> str | dict[str, Any]:
    """Return `tool_choice` as /v1/chat/completions has it."""
    if choice.type == "tool":
        if choice.name is None:
            raise ConfigError("tool_choice.name: expected a tool's name, got none")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _format(format: MessagesFormat | None) -> dict[str, Any] | None:
    if format is None:
        return None
    return {"type": format.type, "json_schema": {"name": "answer", "schema": format.given_schema}}
