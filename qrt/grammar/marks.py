"""Marks: the tokens that are no text in a grammar, and how Lark's rules name them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from qrt.errors import ConfigError

# Comments, with the lines before them as in Lark, and names; between them what may hold a # or < of its own:
# strings, expressions and schemas.
_PARTS = re.compile(
    r"""(?P<comment>\s*(?://|\#)[^\n]*)
    |(?P<other>"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/)
    |(?P<json>%json\s*)(?=\{)
    |(?P<name><[^\[\]<>\s"][^<>\s"]*>)""",
    re.VERBOSE,
)
_JSON = json.JSONDecoder()


def is_mark(content: str, special: bool) -> bool:
    """Return whether an added token is a mark: one flagged special, or one in angle brackets.

    Many tokenizers do not flag `<tool_call>` or `<think>`. A mark stands in an answer where a rule names it;
    text that spells it is made of ordinary tokens.
    """
    return special or (content.startswith("<") and content.endswith(">"))


def quoted(text: str) -> str:
    """Write text in a rule; nothing in it is a mark."""
    return json.dumps(text) if text else '""'


def plain_rules(rules: str, marks: Mapping[str, int], schema: Callable[[str], str]) -> str:
    """Return Lark's rules with the id of each mark for its name, <[3]> for <|user|>, and without comments.

    `schema` rewrites each JSON schema behind `%json`. ConfigError for a name in <...> that is no mark.
    """
    rules, made, at = rules.replace("\r\n", "\n"), list[str](), 0
    while found := _PARTS.search(rules, at):
        made.append(rules[at : found.start()])
        at = found.end()
        if found["json"]:
            text, at = _json_at(rules, at)
            made.append(found[0] + schema(text))
        elif found["name"]:
            made.append(_numbered(found[0], marks))
        elif found["other"]:
            made.append(found[0])
    return "".join(made) + rules[at:]


def _json_at(rules: str, start: int) -> tuple[str, int]:
    try:
        end = _JSON.raw_decode(rules, start)[1]
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            "structured_outputs.grammar: expected JSON behind %json, got "
            f"{rules[start : start + 80]!r} ({error})"
        ) from error
    return rules[start:end], end


def _numbered(name: str, marks: Mapping[str, int]) -> str:
    if name not in marks:
        raise ConfigError(
            f"structured_outputs.grammar: expected the name of a special token, got {name!r:.80}; "
            "write it in quotes if it is text"
        )
    return f"<[{marks[name]}]>"
