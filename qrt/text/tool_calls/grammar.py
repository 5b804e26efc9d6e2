"""Write the grammar of an answer that may call functions, in Lark's rules as llguidance reads them.

`ToolCallStream` reads back all calls that such a grammar allows, and no others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any

from qrt.errors import ConfigError, UnsupportedError
from qrt.grammar.marks import quoted
from qrt.grammar.schema import check_schema, prepared
from qrt.grammar.spec import SPACES, Grammar
from qrt.request.numbers import json_text
from qrt.request.structured_outputs import StructuredOutputsParams
from qrt.text.tool_calls.formats import FORMATS, LISTED, ToolFormat
from qrt.text.tool_calls.stream import MAX_CALLS

ARGUMENTS = "[ARGS]"  # a special token of Mistral's newer tokenizers, whose models write no list
IN_HEADER = re.compile(r"[\w.-]+")
IN_PYTHON = re.compile(r"[A-Za-z_]\w*", re.ASCII)
DECLARING = (
    "$ref", "additionalProperties", "allOf", "anyOf", "const", "enum", "if", "minProperties", "not", "oneOf",
    "patternProperties", "properties", "propertyNames", "required",
)  # fmt: skip
COMPOSED = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties")
OF_REFERENCES = ("$defs", "definitions")


@dataclass(frozen=True)
class Callee:
    """A function that an answer may call.

    place     where the request names it, such as "tools.0.function"
    schema    the JSON schema of its arguments, an object
    exact     whether the arguments fit the schema; else they are any object
    """

    place: str
    name: str
    schema: Mapping[str, Any]
    exact: bool

    @property
    def bare(self) -> bool:
        """Whether its calls have no arguments."""
        return (
            self.exact
            and self.schema.get("additionalProperties") is False
            and not self.schema.get("properties")
        )

    @classmethod
    def of(cls, place: str, name: str, parameters: Mapping[str, Any] | None, *, exact: bool) -> Callee:
        """Make it of a tool; one that declares no arguments takes none. ConfigError if out of bounds."""
        schema = dict(parameters or {})
        if schema.get("type") is None:
            schema["type"] = "object"
        if schema["type"] != "object":
            raise ConfigError(f"{place}.parameters.type: expected object, got {schema['type']!r:.50}")
        if not any(schema.get(keyword) not in (None, {}, []) for keyword in DECLARING):
            schema = {**schema, "properties": {}, "additionalProperties": False}
        check_schema(f"{place}.parameters", json_text(schema))
        return cls(place, name, schema, exact)


@dataclass(frozen=True)
class Calls:
    """What calls an answer holds.

    functions   those that it may call
    forced      whether it is calls and nothing else; else text may stand around them, or `answer` for them
    parallel    whether it may hold several
    answer      the shape of an answer without calls; None: any text
    """

    functions: Sequence[Callee]
    forced: bool = True
    parallel: bool = True
    answer: StructuredOutputsParams | None = None


@dataclass(frozen=True)
class _Notation:
    """How calls are written: blocks of them, in text where the answer is not forced.

    function   returns the rules of one call; the first has the given name
    marker     begins each block; "" if blocks begin an answer
    begin, between, end    stand around and between the calls of a block; without `between` it has one
    blocks     stands between two blocks; None if all calls stand in one
    opening    without a marker: the first character of a block
    tag        without a marker: what may begin the calls behind some text
    """

    function: Callable[[Callee, str, RuleMarks], list[str]]
    marker: str = ""
    begin: str = ""
    between: str | None = None
    end: str = ""
    blocks: str | None = None
    opening: str = ""
    tag: str = ""


class RuleMarks:
    """Writes the marks of a notation in rules. Special tokens are no text: a rule names them by id."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        longest = sorted(filter(None, special), key=len, reverse=True)
        self._names = re.compile(f"({'|'.join(map(re.escape, longest)) or '(?!)'})")

    def __call__(self, text: str) -> str:
        found = (
            f"<[{self._special[part]}]>" if part in self._special else quoted(part)
            for part in self._names.split(text)
            if part
        )
        return " ".join(found)

    def __contains__(self, text: str) -> bool:
        return text in self._special


def calls_grammar(format: ToolFormat, calls: Calls, special: Mapping[str, int]) -> str:
    """Return the rules of an answer.

    special    the id of each special token of the tokenizer

    ConfigError for a function that the notation cannot write, UnsupportedError for arguments.
    """
    marks = RuleMarks(special)
    notation = _notation(format, marks)
    names = [f"function_{number}" for number in range(len(calls.functions))]
    rules = ["%llguidance {}", *_start(notation, calls, marks), "call: " + " | ".join(names)]
    for function, name in zip(calls.functions, names, strict=True):
        rules += notation.function(function, name, marks)
    return "\n".join(rules) + "\n"


def _start(notation: _Notation, calls: Calls, marks: RuleMarks) -> list[str]:
    """Return the rules around `call`."""
    inner, outer = notation.between, notation.blocks
    more = _repeated(marks(inner) + " call", calls) if inner is not None else ""
    block = f"{marks(notation.begin)} call {more} {marks(notation.end)}"
    marked = f"{marks(notation.marker)} block"
    several = _repeated(f"{marks(outer)} {marked}", calls) if outer is not None else ""
    rules = [f"block: {block}", f"calls: {marked} {several}"]
    if calls.forced:
        return ["start: calls", *rules]
    if calls.answer is not None:
        return ["start: calls | answer", *answer_rules(calls.answer), *rules]
    rules.append(f"TEXT: /{_text(notation.opening)}/")
    if mark := notation.marker or notation.tag:
        rules += [f"spelled[lazy]: TEXT {quoted(mark)}", "head: spelled"]
        if mark in marks:
            rules[-1] += f" | TEXT {marks(mark)}"
    if notation.marker:
        return ["start: (head block)* TEXT" if calls.parallel else "start: head block | TEXT", *rules]
    return ["start: calls | TEXT" + (" | head calls" if notation.tag else ""), *rules]


def _repeated(rule: str, calls: Calls) -> str:
    """Return the rule of further calls; without arguments, one of each function says all."""
    bare = all(function.bare for function in calls.functions)
    most = 0 if not calls.parallel else len(calls.functions) - 1 if bare else MAX_CALLS - 1
    return f"({rule}){{0,{most}}}" if most else ""


def _text(opening: str) -> str:
    """Return the expression of text, which does not begin as calls do."""
    return rf"\s*([^\s\{opening}](?s:.*))?" if opening else "(?s:.*)"


def answer_rules(shape: StructuredOutputsParams) -> list[str]:
    grammar = Grammar.of(shape)
    if grammar.kind == "json":
        return [f"answer: %json {prepared(grammar.field, grammar.text, grammar.whitespace)}"]
    if grammar.kind == "choice":
        texts = [quoted(text) for text in json.loads(grammar.text)]
        return ["answer: " + " | ".join(texts)]
    if grammar.kind == "regex":
        escaped = re.sub(r"(?s)\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], grammar.text)
        return ["answer: ANSWER", "ANSWER: /" + escaped.replace("\n", r"\n") + "/"]
    raise ConfigError(
        f"{grammar.field}: expected no tools beside a grammar, got some; set tool_choice to none, "
        "or give a JSON schema, an expression or choices"
    )


def _notation(format: ToolFormat, marks: RuleMarks) -> _Notation:
    if format is FORMATS["mistral"] and ARGUMENTS in marks:
        return _Notation(_mistral, marker="[TOOL_CALLS]", blocks="")
    if format not in NOTATIONS:
        raise UnsupportedError("tool_choice: expected auto or none with this model's notation of calls")
    return NOTATIONS[format]


def _json(key: str) -> Callable[[Callee, str, RuleMarks], list[str]]:
    """Return the writer of calls that are objects with a name and, by `key`, arguments."""

    def write(function: Callee, rule: str, marks: RuleMarks) -> list[str]:
        name = json.dumps(function.name, ensure_ascii=False)
        begin = quoted(f'{{"name": {name}, "{key}": ')
        return [f"{rule}: {begin} {arguments(function)} {quoted('}')}"]

    return write


def _mistral(function: Callee, rule: str, marks: RuleMarks) -> list[str]:
    return [f"{rule}: {quoted(plain_name(function))} {marks(ARGUMENTS)} {arguments(function)}"]


def plain_name(function: Callee) -> str:
    """Return the name of a function; ConfigError for one with characters that a header cannot have."""
    if not IN_HEADER.fullmatch(function.name):
        raise ConfigError(
            f"{function.place}.name: expected letters, digits, '_', '-' and '.', got {function.name!r:.80}"
        )
    return function.name


def _object(function: Callee, rule: str, marks: RuleMarks) -> list[str]:
    """Write a call as one JSON object: beside an answer in JSON, only its keys tell which of them it is."""
    place, schema = f"{function.place}.parameters", function.schema if function.exact else {"type": "object"}
    call = {
        "type": "object",
        "properties": {"name": {"const": function.name}, "parameters": schema},
        "required": ["name", "parameters"],
        "additionalProperties": False,
        **{key: schema[key] for key in OF_REFERENCES if key in schema},
    }
    return [f"{rule}: %json {prepared(place, json.dumps(call), SPACES)}"]


def arguments(function: Callee) -> str:
    schema = function.schema if function.exact else {"type": "object"}
    return "%json " + prepared(f"{function.place}.parameters", json.dumps(schema), SPACES)


def _pythonic(function: Callee, rule: str, marks: RuleMarks) -> list[str]:
    """Write f(x=..., y=...), the values in JSON, which Python reads alike.

    `rule_i` is what may come from argument i on if none stands before it, `rule_i_more` if one does.
    """
    place, schema = f"{function.place}.parameters", function.schema
    properties, required = schema.get("properties") or {}, set(schema.get("required") or ())
    properties = {**properties, **{name: {} for name in sorted(required - properties.keys())}}
    if function.exact and (composed := [key for key in COMPOSED if key in schema]):
        raise UnsupportedError(
            f"{place}.{composed[0]}: not supported, as the model's calls name each argument; list them in "
            "properties"
        )
    for name in (*function.name.split("."), *properties):
        if not IN_PYTHON.fullmatch(name) or iskeyword(name):
            raise ConfigError(
                f"{function.place}: expected names that Python's calls may have, got {name!r:.80}; rename it"
            )
    shared = {key: schema[key] for key in OF_REFERENCES if key in schema}
    rules = [f"{rule}: {quoted(function.name + '(')} {rule}_0 {quoted(')')}"]
    for number, (name, own) in enumerate(properties.items()):
        of_any = not function.exact or not isinstance(own, Mapping)
        value = prepared(
            f"{place}.properties.{name}", json.dumps({} if of_any else {**own, **shared}), SPACES
        )
        after = f"%json {value} {rule}_{number + 1}_more"
        optional = not function.exact or name not in required
        first, more = (f"{rule}_{number + 1}", f"{rule}_{number + 1}_more") if optional else ("", "")
        rules.append(f"{rule}_{number}: {quoted(name + '=')} {after}" + (f" | {first}" if first else ""))
        rules.append(f"{rule}_{number}_more: {quoted(f', {name}=')} {after}" + (f" | {more}" if more else ""))
    return [*rules, f'{rule}_{len(properties)}: ""', f'{rule}_{len(properties)}_more: ""']


NOTATIONS = {
    FORMATS["hermes"]: _Notation(
        _json("arguments"), marker="<tool_call>", begin="\n", end="\n</tool_call>", blocks="\n"
    ),
    FORMATS["llama3_json"]: _Notation(_object, between="; ", opening="{", tag="<|python_tag|>"),
    FORMATS["mistral"]: _Notation(
        _json("arguments"), marker="[TOOL_CALLS]", begin="[", between=", ", end="]"
    ),
    FORMATS["pythonic"]: _Notation(_pythonic, begin="[", between=", ", end="]", opening="["),
    LISTED: _Notation(_json("parameters"), begin="[", between=", ", end="]", opening="["),
}
