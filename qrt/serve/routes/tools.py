"""Tools of a request, and which of them its answer may or must call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from qrt.errors import ConfigError
from qrt.request.sampling import SamplingParams
from qrt.request.structured_outputs import StructuredOutputsParams
from qrt.text.tool_calls import LISTED, Callee, Calls, ToolFormat, calls_grammar, channel_grammar


class Function(BaseModel):
    """A tool's definition; `parameters` is a JSON schema."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool that the model may call."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: Function
    _given: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, given: Any, handler: Any) -> Tool:
        tool: Tool = handler(given)
        tool._given = given
        return tool

    def for_template(self) -> dict[str, Any]:
        """Return the tool as it came, for `ChatTemplate.render`: templates print its keys in their order."""
        return self._given


@dataclass(frozen=True)
class ToolChoice:
    """What a request says of calls, by `tools`, `tool_choice` and `parallel_tool_calls`.

    names     the functions that may be called; none: the answer has no calls
    forced    whether the answer is calls and nothing else
    named     whether it is the call of one function that the request names
    """

    tools: Sequence[Tool] = ()
    names: frozenset[str] = frozenset()
    forced: bool = False
    named: bool = False
    parallel: bool = True

    @classmethod
    def of(cls, choice: Any, tools: Sequence[Tool], parallel: bool) -> ToolChoice:
        """Read the fields; ConfigError for a wrong `tool_choice`, or a function that is none of `tools`."""
        choice = None if choice in ("", {}) else choice
        if choice == "none" or (choice in (None, "auto") and not tools):
            return cls()
        if not tools:
            raise ConfigError("tool_choice: expected only with tools; add tools, or leave it out")
        names = frozenset(tool.function.name for tool in tools)
        if choice in (None, "auto", "required"):
            return cls(tools, names, choice == "required", False, parallel)
        kind = choice.get("type") if isinstance(choice, Mapping) else None
        if kind == "function":
            return cls(tools, frozenset({_name(choice, "tool_choice", names)}), True, True, False)
        if kind == "allowed_tools":
            allowed, forced = _allowed(choice.get("allowed_tools", choice), names)
            return cls(tools, allowed, forced, False, parallel)
        raise ConfigError(
            f"tool_choice: expected none, auto, required or a function's name, got {choice!r:.50}"
        )

    def format(self, own: ToolFormat | None) -> ToolFormat | None:
        """Return the notation of the calls: the model's own, or a list in JSON if calls are forced."""
        if not self.names:
            return None
        return own or (LISTED if self.forced else None)

    @property
    def strict(self) -> bool:
        """Whether the schemas of some tools hold where the answer may call them."""
        functions = [tool.function for tool in self.tools]
        return any(function.strict for function in functions if function.name in self.names)

    def shaped(
        self, params: SamplingParams, format: ToolFormat | None, special: Mapping[str, int]
    ) -> SamplingParams:
        """Return `params` with the shape that calls need.

        format     the notation of the calls; None: they are messages in channels
        special    the id of each special token

        Calls are shaped where they are forced, where a tool is strict, and beside the shape of an answer.
        ConfigError for a tool whose calls have no grammar.
        """
        answer: Any = params.structured_outputs
        if not (self.forced or answer or self.strict):
            return params
        callees = [
            Callee.of(
                f"tools.{place}.function",
                function.name,
                function.parameters,
                exact=self.forced or bool(function.strict),
            )
            for place, function in enumerate(tool.function for tool in self.tools)
            if function.name in self.names
        ]
        calls = Calls(callees, self.forced, self.parallel, None if self.forced else answer)
        rules = calls_grammar(format, calls, special) if format else channel_grammar(calls, special)
        return replace(params, structured_outputs=StructuredOutputsParams(grammar=rules))


def _allowed(given: Any, names: frozenset[str]) -> tuple[frozenset[str], bool]:
    """Return the functions that `allowed_tools` names, and whether one must be called."""
    place = "tool_choice.allowed_tools"
    mode = given.get("mode") if isinstance(given, Mapping) else None
    listed = given.get("tools") if isinstance(given, Mapping) else None
    if mode not in ("auto", "required"):
        raise ConfigError(f"{place}.mode: expected auto or required, got {mode!r:.50}")
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"{place}.tools: expected a list of functions, got {listed!r:.50}")
    chosen = (_name(tool, f"{place}.tools.{index}", names) for index, tool in enumerate(listed))
    return frozenset(chosen), mode == "required"


def _name(given: Any, place: str, names: frozenset[str]) -> str:
    """Return the name of {"type": "function", "function": {"name": ...}}, or of its newer, flat form."""
    inner = given.get("function", given) if isinstance(given, Mapping) else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str):
        raise ConfigError(f"{place}.function.name: expected a function's name, got {name!r:.50}")
    if name not in names:
        raise ConfigError(f"{place}.function.name: expected the name of one of tools, got {name!r:.80}")
    return name
