"""PoolingParams: what is made of one prompt by a model that pools, by vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, replace

from qrt.checks import at_least, one_of, yes_or_no
from qrt.errors import ConfigError

TASKS = ("embed", "classify", "token_embed", "token_classify")
SIDES = ("right", "left")


@dataclass(frozen=True)
class PoolingParams:
    """What is made of one prompt. None: as the model's files say.

    task                     one of TASKS; those of tokens give a vector for each token
    dimensions               cut embeddings to this length, before they are normalized; only of models that
                             were trained for it
    normalize                scale embeddings to length 1
    use_activation           turn numbers of labels into probabilities; of embeddings, `normalize` by vLLM's
                             newer name
    truncate_prompt_tokens   cut longer prompts to this many tokens, -1: to the context; None: refuse them
    truncation_side          the side that is cut: "right" or "left"
    """

    task: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None

    def __post_init__(self) -> None:
        if self.task is not None:
            one_of("task", self.task, TASKS)
        if self.dimensions is not None:
            at_least("dimensions", self.dimensions, 1)
        if self.truncate_prompt_tokens is not None:
            at_least("truncate_prompt_tokens", self.truncate_prompt_tokens, -1)
            if self.truncate_prompt_tokens == 0:
                raise ConfigError("truncate_prompt_tokens: expected 1 or more, or -1, got 0")
        if self.truncation_side is not None:
            one_of("truncation_side", self.truncation_side, SIDES)
        for name in ("normalize", "use_activation"):
            if getattr(self, name) is not None:
                yes_or_no(name, getattr(self, name))

    def clone(self) -> PoolingParams:
        """Return a copy."""
        return replace(self)

    def most_tokens(self, max_model_len: int) -> int | None:
        """Return how many tokens a prompt is cut to; None: it is not cut."""
        wanted = self.truncate_prompt_tokens
        if wanted is not None and wanted > max_model_len:
            raise ConfigError(
                f"truncate_prompt_tokens: expected at most {max_model_len}, the model's context, got {wanted}"
            )
        return max_model_len if wanted == -1 else wanted
