"""EBNF as in llama.cpp (GBNF), in Lark's notation.

A rule goes on until the next `name ::=`, however its lines are broken. A rule of texts and classes alone that
does not refer to itself becomes one expression (a terminal), so that the compiler may match it however its
parts overlap.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from qrt.errors import ConfigError

_START = re.compile(r"(\s|#[^\n]*|//[^\n]*)*[\w-]+\s*::=")
_ESCAPE = r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[^xuU])"
_TOKEN = re.compile(
    rf"""(?P<space>\s+|\#[^\n]*)
    |(?P<head>[\w-]+\s*::=)
    |(?P<name>[\w-]+)
    |(?P<text>"(?:{_ESCAPE}|[^"\\])*")
    |(?P<klass>\[\^?(?:{_ESCAPE}|[^\]\\])*\])
    |(?P<mark><[^<>\s]+>)
    |(?P<count>\{{\s*\d+\s*(?:,\s*\d*\s*)?\}}|[*+?])
    |(?P<sign>[.()|])""",
    re.VERBOSE,
)
_CHARACTER = re.compile(rf"{_ESCAPE}|.", re.DOTALL)
_LETTERS = {
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "0": "\0",
    "e": "\x1b",
}
_ANY = "/(?s:.)/"
_NEVER = re.compile(r"\{\s*0+\s*(?:,\s*0+\s*)?\}")

Part = tuple[str, str]  # the kind of a part of a rule, and its text


def is_ebnf(text: str) -> bool:
    """Return whether rules begin as EBNF's do: `name ::=`."""
    return _START.match(text) is not None


def lark_of(text: str) -> str:
    """Return EBNF's rules in Lark's notation; ConfigError says where it cannot be read."""
    rules = _rules(text)
    missing = [
        name for parts in rules.values() for kind, name in parts if kind == "name" and name not in rules
    ]
    if missing or "root" not in rules:
        name = "root" if "root" not in rules else missing[0]
        raise _error(f"a rule `{name} ::= ...`", "none; add it")
    terminals = _terminals(rules)
    names = {name: _plain(name, number, name in terminals) for number, name in enumerate(rules)}
    lines = [f"{names[name]}: {_body(parts, names)}" for name, parts in rules.items()]
    return "\n".join(["%llguidance {}", f"start: {names['root']}", *lines]) + "\n"


def _rules(text: str) -> dict[str, list[Part]]:
    """Return the parts of each rule by its name; of two rules of one name the last one counts."""
    rules: dict[str, list[Part]] = {}
    parts: list[Part] | None = None
    for kind, part in _parts(text):
        if kind == "head":
            parts = rules[part.removesuffix("::=").rstrip()] = []
        elif parts is None:
            raise _error("a rule `name ::= ...`", f"{part!r:.80}")
        else:
            parts.append((kind, part))
    return rules


def _parts(text: str) -> Iterator[Part]:
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise _error("EBNF", f"{text[at : at + 40]!r} in line {text.count(chr(10), 0, at) + 1}")
        at = found.end()
        kind = str(found.lastgroup)
        if kind != "space":
            yield kind, found[0]


def _terminals(rules: dict[str, list[Part]]) -> set[str]:
    """Return the rules that are expressions: without marks, references to themselves, and others such."""
    waiting = {
        name: {part for kind, part in parts if kind == "name"}
        for name, parts in rules.items()
        if not any(kind == "mark" for kind, _ in parts)
    }
    found: set[str] = set()
    while ready := [name for name, needed in waiting.items() if needed <= found]:
        found.update(ready)
        for name in ready:
            del waiting[name]
    return found


def _plain(name: str, number: int, terminal: bool) -> str:
    """Return a name that Lark's notation has for a rule or a terminal."""
    made = f"r_{re.sub(r'[^a-z0-9]', '_', name.lower())}_{number}"
    return made.upper() if terminal else made


def _body(parts: list[Part], names: dict[str, str]) -> str:
    made: list[str] = []
    for place, (kind, part) in enumerate(parts):
        before = parts[place - 1][1] if place else "|"
        if part in ("|", ")") and kind == "sign" and before in ("|", "("):
            made.append('""')
        if kind == "count" and _NEVER.fullmatch(part):
            _drop_last(made)
        else:
            made.append(_written(kind, part, names))
    if not parts or parts[-1] == ("sign", "|"):
        made.append('""')
    return " ".join(made)


def _drop_last(made: list[str]) -> None:
    """Write nothing for the last part, which may be a group in parentheses: it stands there 0 times."""
    depth = 0
    while made:
        depth += {")": 1, "(": -1}.get(made.pop(), 0)
        if depth == 0:
            break
    made.append('""')


def _written(kind: str, part: str, names: dict[str, str]) -> str:
    if kind == "name":
        return names[part]
    if kind == "text":
        return json.dumps(_joined(part, _CHARACTER.findall(part[1:-1])))
    if kind == "klass":
        return _class(part)
    if kind == "count":
        return re.sub(r"\s", "", part)
    return _ANY if part == "." else part


def _class(part: str) -> str:
    """Write a class of characters as an expression, each of them by its number."""
    inner = part[1:-1]
    negative = inner.startswith("^")
    spelled = _CHARACTER.findall(inner[negative:])
    if not spelled and not negative:
        raise _error("a class of characters", f"{part}, which has none")
    if not spelled:
        return _ANY
    ranges, at = "", 0
    while at < len(spelled):
        first = last = _joined(part, spelled[at : at + 1])
        if spelled[at + 1 : at + 2] == ["-"] and at + 2 < len(spelled):
            at += 2
            last = _joined(part, spelled[at : at + 1])
        if ord(first) > ord(last):
            raise _error("a range of characters", f"{part:.80}, whose first is behind its last")
        ranges += rf"\u{{{ord(first):x}}}" + (rf"-\u{{{ord(last):x}}}" if last != first else "")
        at += 1
    return f"/[{'^' * negative}{ranges}]/"


def _joined(part: str, spelled: list[str]) -> str:
    """Return the text of characters as they are spelled; two escapes may spell one character's surrogates."""
    try:
        text = "".join(map(_character, spelled))
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except (UnicodeDecodeError, ValueError, OverflowError) as error:
        raise _error("escapes of characters", f"{part:.80}") from error


def _character(spelled: str) -> str:
    if not spelled.startswith("\\"):
        return spelled
    letter = spelled[1]
    if letter in "xuU":
        return chr(int(spelled[2:], 16))
    if letter in _LETTERS:
        return _LETTERS[letter]
    if letter.isalnum():
        raise ValueError(f"no escape {spelled}")
    return letter


def _error(expected: str, got: str) -> ConfigError:
    return ConfigError(f"structured_outputs.grammar: expected {expected}, got {got}")
