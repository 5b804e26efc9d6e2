"""Bodies of the OpenAI-compatible endpoints, and what of them becomes SamplingParams.

Fields that cannot change the result (user, metadata, store, ...) are accepted and ignored; fields that would
and are not run are refused by name, never dropped.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from qrt.config import SamplingParams

MAX_PROMPTS = 1024
MAX_N = 128
MAX_STOPS = 16
MAX_LOGPROBS = 20

Tokens = list[Annotated[int, Field(ge=0)]]


class StreamOptions(BaseModel):
    """`stream_options`."""

    include_usage: bool = False


class Sampling(BaseModel):
    """The fields both endpoints share."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str | None = None
    n: int = Field(1, ge=1, le=MAX_N)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=1024)] = []
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None

    def unsupported(self) -> list[str]:
        """Names of given fields that would change the result and are not run."""
        extra = self.model_extra or {}
        return [name for name, neutral in NOT_RUN.items() if extra.get(name, neutral) not in (neutral, None)]

    def sampling_params(
        self, defaults: SamplingParams, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """The request's SamplingParams; what it leaves out comes from the model's generation config."""

        def given(value: Any, default: Any) -> Any:
            return default if value is None else value

        return SamplingParams(
            n=self.n,
            temperature=given(self.temperature, defaults.temperature),
            top_p=given(self.top_p, defaults.top_p),
            top_k=given(self.top_k, defaults.top_k),
            seed=self.seed,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            skip_special_tokens=self.skip_special_tokens,
        )


class CompletionRequest(Sampling):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Annotated[Tokens, Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list, whichever of the four forms came."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class TextPart(BaseModel):
    """A part of a message's content; images and audio are refused by their `type`."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One chat message; content is a string or a list of text parts."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[TextPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it, with the parts joined."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content or ""}


class ChatCompletionRequest(Sampling):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool = True


NOT_RUN: dict[str, Any] = {
    "suffix": None,
    "best_of": None,
    "logit_bias": None,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "tools": None,
    "functions": None,
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "prompt_logprobs": None,
    "modalities": ["text"],
    "audio": None,
}
