"""The notations in which models write tool calls.

    hermes        <tool_call>{"name": "f", "arguments": {...}}</tool_call>          (Hermes, Qwen 2.5 and 3)
    llama3_json   {"name": "f", "parameters": {...}}, after <|python_tag|> or first  (Llama 3.1)
    mistral       [TOOL_CALLS][{"name": "f", "arguments": {...}}] or [TOOL_CALLS]f[ARGS]{...}
    pythonic      [f(x=1), g(y="a")], first                                          (Llama 3.2 and 4)

Calls are parsed and never evaluated.
"""

from __future__ import annotations

import ast
import re
import uuid
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

from qrt.errors import ConfigError
from qrt.registry import nearest
from qrt.text.tool_calls.call import ToolCall, finite, named_call, read_calls
from qrt.text.tool_calls.outline import Outline, json_at

SPACE = re.compile(r"\s*")
NAMED = re.compile(r"([\w.-]+)(\[CALL_ID\]\w+)?(\[ARGS\])?\s*(?=\{|\[TOOL_CALLS\]|\Z)")
CALLED = re.compile(r"\[\s*([A-Za-z_][\w.]*\s*(\(.*)?)?\Z", re.DOTALL)  # a list of calls, or its beginning
LONGEST_NAME = 1000
CONSTANTS = {"true": True, "false": False, "null": None}

Taken = tuple[list[ToolCall], int]


class ToolFormat(ABC):
    """One notation.

    marker    the text that begins a call anywhere
    opening   the character that begins a call at the start of the text or after another call
    closing   the tag that may follow a call
    python    whether calls are Python, not JSON
    """

    marker: str | None = None
    opening: str | None = None
    closing: str | None = None
    python: bool = False

    @abstractmethod
    def take(self, text: str, start: int) -> Taken | None:
        """Read the calls at `start`, after the marker; return them and where they end.

        None where the text so far may still become calls. ValueError where it cannot, however it continues.
        The result must not depend on where the text is cut.
        """

    def take_last(self, text: str, start: int) -> Taken | None:
        """Read the call that only the end of the answer completes; None if there is none."""
        return None


class JsonFormat(ToolFormat):
    """A notation whose calls are JSON."""

    def take(self, text: str, start: int) -> Taken | None:
        """See ToolFormat."""
        start = SPACE.match(text, start).end()  # type: ignore[union-attr]  # it matches everywhere
        if start == len(text):
            return None
        if text[start] not in "{[":
            raise ValueError("neither an object nor a list")
        decoded = json_at(text, start)
        return None if decoded is None else (read_calls(decoded[0]), decoded[1])


class Hermes(JsonFormat):
    """JSON between tags; the closing tag may be missing."""

    marker = "<tool_call>"
    closing = "</tool_call>"


class Llama3Json(JsonFormat):
    """JSON objects, separated by ; or a new line."""

    marker = "<|python_tag|>"
    opening = "{"


class Mistral(JsonFormat):
    """A JSON list, or a name and JSON arguments."""

    marker = "[TOOL_CALLS]"

    def take(self, text: str, start: int) -> Taken | None:
        """See ToolFormat. Ids have nine letters and digits: Mistral's templates refuse all others."""
        start = SPACE.match(text, start).end()  # type: ignore[union-attr]  # it matches everywhere
        taken = super().take(text, start) if text[start : start + 1] in "{[" else self._named(text, start)
        if taken is None:
            return None
        return [replace(call, id=uuid.uuid4().hex[:9]) for call in taken[0]], taken[1]

    def take_last(self, text: str, start: int) -> Taken | None:
        """See ToolFormat: a name alone, whose arguments might have followed."""
        start = SPACE.match(text, start).end()  # type: ignore[union-attr]  # it matches everywhere
        named = NAMED.match(text, start)
        if named is None or named.end() < len(text):
            return None
        return [replace(named_call(named[1], None), id=uuid.uuid4().hex[:9])], len(text)

    @staticmethod
    def _named(text: str, start: int) -> Taken | None:
        """Read a name and its arguments; none where the next call follows."""
        named = NAMED.match(text, start)
        if named is None:
            if "{" in text[start : start + LONGEST_NAME] or len(text) - start > LONGEST_NAME:
                raise ValueError("no call")
            return None
        if named.end() == len(text):
            if len(text) - start > LONGEST_NAME:
                raise ValueError("no call")
            return None
        if text[named.end()] == "[":
            return [named_call(named[1], None)], named.end()
        decoded = json_at(text, named.end())
        return None if decoded is None else ([named_call(named[1], decoded[0])], decoded[1])


class ListedCalls(JsonFormat):
    """A JSON list and nothing else: how calls are forced where the model's own notation is unknown."""

    opening = "["


class Pythonic(ToolFormat):
    """A list of calls in Python's notation."""

    opening = "["
    python = True

    def take(self, text: str, start: int) -> Taken | None:
        """See ToolFormat."""
        if not CALLED.match(text, start):
            raise ValueError("no list of calls")
        outline = Outline(start, python=True)
        outline.feed(text)
        if outline.end is None:
            return None
        try:
            tree = ast.parse(text[start : outline.end], mode="eval").body
        except (SyntaxError, MemoryError) as error:
            raise ValueError("not Python") from error
        if not isinstance(tree, ast.List):
            raise ValueError("no list")
        return [_python_call(node) for node in tree.elts], outline.end


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
        raise ValueError("no call with named arguments")
    name = ast.unparse(node.func)
    if not re.fullmatch(r"[\w.]+", name):
        raise ValueError("no function's name")
    return named_call(
        name, {str(k.arg): ast.literal_eval(_Constants().visit(k.value)) for k in node.keywords}
    )


class _Constants(ast.NodeTransformer):
    """Turns the words true, false and null into constants: models write JSON's words in Python too.

    Its numbers are as finite as JSON's.
    """

    def visit_Name(self, node: ast.Name) -> Any:
        """See ast.NodeVisitor."""
        return ast.Constant(CONSTANTS[node.id]) if node.id in CONSTANTS else node

    def visit_Constant(self, node: ast.Constant) -> Any:
        """See ast.NodeVisitor."""
        return ast.Constant(finite(str(node.value))) if isinstance(node.value, float) else node


FORMATS: dict[str, ToolFormat] = {
    "hermes": Hermes(),
    "llama3_json": Llama3Json(),
    "mistral": Mistral(),
    "pythonic": Pythonic(),
}
LISTED = ListedCalls()

NO_NOTATION = ("none", "openai")  # vLLM names gpt-oss's calls openai; they are read with its channels


def tool_format(name: str, chat_template: str) -> ToolFormat | None:
    """Return the notation `name`; for "auto" the one with a marker that the chat template has, or None."""
    if name in NO_NOTATION:
        return None
    if name != "auto":
        if name not in FORMATS:
            known = [*FORMATS, "auto", *NO_NOTATION]
            raise ConfigError(
                f"tool_call_parser: expected one of {', '.join(known)}, got {name!r}{nearest(name, known)}"
            )
        return FORMATS[name]
    if "<function=" in chat_template:  # XML, not JSON, between Hermes' tags
        return None
    return next((f for f in FORMATS.values() if f.marker and f.marker in chat_template), None)
