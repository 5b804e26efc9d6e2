"""PoolingRequestOutput and its kin: the results of models that pool, shaped as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from torch import Tensor  # which a server's API processes do without


@dataclass(frozen=True, eq=False)
class PoolingOutput:
    """`data` fp32 on the CPU: [D] for a prompt, [tokens, D] with a vector for each token."""

    data: Tensor


@dataclass(frozen=True)
class EmbeddingOutput:
    """The vector of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The vector's length."""
        return len(self.embedding)


@dataclass(frozen=True)
class ClassificationOutput:
    """A number for each label: probabilities, or without activation what the head gave."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """The number of labels."""
        return len(self.probs)


@dataclass(frozen=True)
class ScoringOutput:
    """How well two texts fit each other."""

    score: float


Output = TypeVar("Output")


@dataclass(frozen=True)
class PoolingRequestOutput(Generic[Output]):
    """A prompt and what was made of it."""

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """What `LLM.embed` returns."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """What `LLM.classify` returns."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """What `LLM.score` returns for a pair."""
