"""Bodies of the OpenAI-compatible endpoints, and how they become SamplingParams.

Fields that cannot change the result (user, metadata, store, ...) are accepted and ignored. Fields that would
change it, but that qrt does not support, are refused by name (`qrt.compat.fields`).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from qrt.errors import ConfigError
from qrt.request.sampling import MAX_BAD_WORDS, SamplingParams
from qrt.serve.http.body import (
    Body,
    Count,
    Limit,
    LogitBias,
    Penalty,
    Scores,
    Stop,
    Stops,
    TokenList,
    Tokens,
    by_token_id,
)
from qrt.serve.routes.reasoning_fields import BudgetField, ReasoningFields, ThinkingFields
from qrt.serve.routes.shapes import ShapeFields
from qrt.serve.routes.tools import Tool, ToolChoice
from qrt.serve.settings import (
    MAX_DOCUMENTS,
    MAX_MESSAGES,
    MAX_N,
    MAX_PROMPTS,
    MAX_TOOLS,
)
from qrt.text.tool_calls import MAX_CALLS

# Fields of the body that SamplingParams has under the same name.
SAMPLING_FIELDS = (
    "n", "best_of", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "skip_special_tokens",
    "prompt_logprobs",
)  # fmt: skip


class StreamOptions(Body):
    """`stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingFields(ShapeFields, BudgetField):
    """The fields that both endpoints share."""

    model: str | None = None
    n: int = Field(1, ge=1, le=MAX_N)
    best_of: int | None = Field(None, ge=1, le=MAX_N)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stops = None
    stop_token_ids: TokenList | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    logit_bias: LogitBias | None = None
    allowed_token_ids: TokenList | None = None
    bad_words: Annotated[list[Stop], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Count = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = Field(  # or by SGLang's name
        False, validation_alias=AliasChoices("include_stop_str_in_output", "no_stop_trim")
    )
    prompt_logprobs: Scores = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False  # in logprobs
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """Return the field that limits the answer's tokens, and the limit."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    def engine_options(self) -> dict[str, Any]:
        """Return the options of `Engine.add` beside SamplingParams."""
        return {"priority": self.priority or 0, "cache_salt": self.cache_salt}

    def sampling_params(
        self, defaults: dict[str, Any], max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """Make the request's SamplingParams.

        defaults     the model's values for fields that are not given
        max_tokens   from `Service.max_tokens`
        """
        own = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        own["structured_outputs"] = self.shape()
        own["thinking_token_budget"] = self.thinking_budget()
        own = {name: value for name, value in own.items() if value is not None}
        if "logit_bias" in own:
            own["logit_bias"] = by_token_id(own["logit_bias"])
        shared = {name: value for name, value in defaults.items() if name != "max_tokens"}
        return SamplingParams(**{**shared, **own, "max_tokens": max_tokens, "logprobs": logprobs})


Prompts = (
    str
    | Annotated[Tokens, Field(min_length=1)]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    | Annotated[
        list[Annotated[Tokens, Field(min_length=1)]],
        Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True),
    ]
)


def each_prompt(given: Prompts) -> list[str] | list[list[int]]:
    """Return the prompts as a list, whichever of the four forms was given."""
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        return [given]
    return given


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`."""

    prompt: Prompts
    max_tokens: Count | None = 16
    logprobs: Scores = None
    echo: bool = False
    add_special_tokens: bool = True

    def prompts(self) -> list[str] | list[list[int]]:
        """Return the prompts as a list."""
        return each_prompt(self.prompt)


class ChatMessage(BaseModel):
    """One message. `read_messages` checks its content and calls, as it does for LLM.chat."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | dict[str, Any] | list[Any] | None = None
    tool_calls: Annotated[list[Any], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message as it came, for `ChatTemplate.render`."""
        return self.model_dump(exclude_unset=True)


class Conversation(ThinkingFields):
    """The fields that the chat template renders; /tokenize takes them too."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS, fail_fast=True)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=32)] | None = None

    def template_arguments(self, *, tools: bool = True) -> dict[str, Any]:
        """Return the arguments of `Tokenizer.render_chat`.

        Its own names win over chat_template_kwargs, and these over the fields of thinking.
        """
        if self.given("chat_template"):
            raise ConfigError(
                "chat_template: not accepted in a request; start the server with --chat-template"
            )
        named = self.chat_template_kwargs or {}
        asked = "add_generation_prompt" in self.model_fields_set  # with both, the template refuses
        if reserved := RESERVED.intersection(named):
            raise ConfigError(f"chat_template_kwargs: expected the template's own names, got {min(reserved)}")
        return {
            **self.thinking_arguments(),
            **named,
            "tools": [tool.for_template() for tool in self.tools] if tools and self.tools else None,
            "documents": self.documents,
            "add_generation_prompt": self.add_generation_prompt
            and (asked or not self.continue_final_message),
            "continue_final_message": self.continue_final_message,
        }


RESERVED = {
    "messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt",
    "continue_final_message", "range", "raise_exception", "strftime_now", "return_dict", "self", "context",
}  # fmt: skip


class ChatCompletionRequest(ReasoningFields, Conversation, SamplingFields):
    """`POST /v1/chat/completions`."""

    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    logprobs: bool = False
    top_logprobs: Scores = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True

    @property
    def calls(self) -> ToolChoice:
        """What the request says of calls; ConfigError for a wrong `tool_choice`."""
        return ToolChoice.of(self.tool_choice, self.tools or (), self.parallel_tool_calls)
