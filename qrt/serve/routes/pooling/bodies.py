"""Bodies of the routes for models that pool."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from qrt.request.pooling import TASKS, PoolingParams
from qrt.serve.http.body import Body, Count, Limit
from qrt.serve.routes.protocol import Conversation, Prompts, each_prompt
from qrt.serve.settings import MAX_PROMPTS

Task = Literal["embed", "classify", "token_embed", "token_classify"]
assert Task.__args__ == TASKS  # type: ignore[attr-defined]


class PoolingFields(Body):
    """The fields that all of them share."""

    model: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    def params(self) -> PoolingParams:
        """Make the request's PoolingParams."""
        return PoolingParams(
            task=self.given("task"),
            dimensions=self.given("dimensions"),
            normalize=self.normalize,
            use_activation=self.use_activation,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
        )

    def engine_options(self) -> dict[str, Any]:
        """Return the options of `Engine.add` beside the parameters."""
        return {"priority": self.priority or 0, "cache_salt": self.cache_salt}


class Inputs(PoolingFields):
    """Texts, or lists of token ids."""

    input: Prompts
    messages: None = None  # a body with messages is a chat
    add_special_tokens: bool = True

    def prompts(self) -> list[str] | list[list[int]]:
        """Return the prompts as a list."""
        return each_prompt(self.input)


class Chat(Conversation, PoolingFields):
    """A conversation, which the chat template makes one prompt of."""

    add_generation_prompt: bool = False


class EmbeddingFields(Body):
    """How embeddings are given."""

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Limit | None = None


class EmbeddingRequest(Inputs, EmbeddingFields):
    """`POST /v1/embeddings`."""


class EmbeddingChatRequest(Chat, EmbeddingFields):
    """`POST /v1/embeddings` of a conversation."""


class PoolingRequest(Inputs, EmbeddingFields):
    """`POST /pooling`."""

    task: Task | None = None


class PoolingChatRequest(Chat, EmbeddingFields):
    """`POST /pooling` of a conversation."""

    task: Task | None = None


class RerankDocument(BaseModel):
    """A document as Jina and Cohere have it."""

    model_config = ConfigDict(extra="ignore", strict=True)

    text: str


Texts = (
    str | Annotated[list[str | RerankDocument], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
)


def plain_texts(given: Texts) -> list[str]:
    """Return texts and documents as a list of texts."""
    listed = [given] if isinstance(given, str) else given
    return [one if isinstance(one, str) else one.text for one in listed]


class ScoreRequest(PoolingFields):
    """`POST /v1/score`, by any of vLLM's names of the two sides."""

    text_1: Texts = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: Texts = Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))


class RerankRequest(PoolingFields):
    """`POST /v1/rerank`, of Jina and Cohere."""

    query: str
    documents: Texts
    top_n: Count | None = None
    return_documents: bool = True
