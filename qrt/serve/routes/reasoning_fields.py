"""Fields by which the clients of other servers ask for thinking, limit it, and choose how it is shown."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field

from qrt.errors import ConfigError
from qrt.serve.http.body import Body

_Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None
Effort = Annotated[_Effort, BeforeValidator(lambda given: None if given == "" else given)]
Budget = Annotated[int, Field(ge=-1, lt=2**31)]


class BudgetField(Body):
    """vLLM's `thinking_token_budget`, and its name on other servers; -1 is no limit."""

    thinking_token_budget: Budget | None = Field(
        None,
        validation_alias=AliasChoices(
            "thinking_token_budget", "thinking_budget", "thinking_budget_tokens", "reasoning_budget"
        ),
    )

    def thinking_budget(self) -> int | None:
        """Return the most tokens that the model may think; None: any."""
        return None if self.thinking_token_budget == -1 else self.thinking_token_budget


class ThinkingChoice(Body):
    """`thinking`, as in the APIs of GLM, DeepSeek and Anthropic."""

    type: Literal["enabled", "disabled", "adaptive", "auto"] | None = None
    budget_tokens: Budget | None = None


class ReasoningChoice(Body):
    """`reasoning`, as in the APIs of OpenRouter and SGLang."""

    effort: Effort = None
    enabled: bool | None = None
    max_tokens: Budget | None = None
    exclude: bool = False


class ThinkingFields(Body):
    """The fields of a conversation that say whether and how the model thinks."""

    enable_thinking: bool | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    thinking: ThinkingChoice | None = None
    reasoning: ReasoningChoice | None = None
    reasoning_effort: Effort = None

    def thinking_arguments(self) -> dict[str, Any]:
        """Return what the chat template learns of it, by the names that templates have.

        An effort, as in vLLM, also says whether to think. ConfigError for two fields that differ.
        """
        efforts, choices = self._efforts(), self._choices()
        effort = _agreed(efforts)
        if effort is not None:
            choices = choices or {name: value != "none" for name, value in efforts.items()}
        choice = _agreed(choices)
        found: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        if choice is not None:
            found |= {"enable_thinking": choice, "thinking": choice}
        return found

    def _efforts(self) -> dict[str, Any]:
        found = {
            "reasoning_effort": self.reasoning_effort,
            "reasoning.effort": self.reasoning and self.reasoning.effort,
            "think": self.think if isinstance(self.think, str) else None,
        }
        return {name: value for name, value in found.items() if value is not None}

    def _choices(self) -> dict[str, Any]:
        kind = self.thinking and self.thinking.type
        found = {
            "enable_thinking": self.enable_thinking,
            "think": self.think if isinstance(self.think, bool) else None,
            "thinking.type": {"enabled": True, "disabled": False}.get(kind or ""),
            "reasoning.enabled": self.reasoning and self.reasoning.enabled,
        }
        return {name: value for name, value in found.items() if value is not None}


class ReasoningFields(ThinkingFields, BudgetField):
    """The fields of a chat: those of a conversation, a budget, and how the thinking is shown.

    separate_reasoning   False: it is part of the content, with its marks
    stream_reasoning     False: a stream has it in one piece, when it has ended
    """

    include_reasoning: bool = True
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    reasoning_format: Literal["none", "raw", "auto", "deepseek", "parsed", "hidden"] | None = None

    @property
    def shows_reasoning(self) -> bool:
        """Whether the reply has the thinking."""
        excluded = self.reasoning is not None and self.reasoning.exclude
        return self.include_reasoning and self.reasoning_format != "hidden" and not excluded

    @property
    def separates_reasoning(self) -> bool:
        """Whether the thinking is told apart from the content."""
        return self.separate_reasoning and self.reasoning_format not in ("none", "raw")

    def thinking_budget(self) -> int | None:
        """Return the most tokens that the model may think; None: any. ConfigError for two that differ."""
        given = {
            "thinking_token_budget": self.thinking_token_budget,
            "thinking.budget_tokens": self.thinking and self.thinking.budget_tokens,
            "reasoning.max_tokens": self.reasoning and self.reasoning.max_tokens,
        }
        budget = _agreed({name: value for name, value in given.items() if value is not None})
        return None if budget == -1 else budget


def _agreed(given: dict[str, Any]) -> Any:
    """Return the value that all fields have; None if there are none."""
    if len(set(given.values())) > 1:
        names = " and ".join(given)
        got = " and ".join(map(repr, given.values()))
        raise ConfigError(f"{names}: expected one value, got {got}; leave the rest out")
    return next(iter(given.values()), None)
