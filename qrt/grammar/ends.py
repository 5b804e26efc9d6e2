"""Ends: whether the rules of a grammar in Lark's notation have a finite text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

_TOKEN = re.compile(
    r"""(?P<space>\s+|(?://|\#)[^\n]*)
    |(?P<head>[?!]?[A-Za-z_][\w-]*(?:\[[^\]"]*\])?\s*:(?!:))
    |(?P<other>->\s*[\w-]+|"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\\n])+/[imslux]*|<\[[^\]<>]*\]>|\.\.)
    |(?P<json>%(?:json|llguidance)\s*)(?=\{)
    |(?P<name>[A-Za-z_][\w-]*)
    |(?P<often>[*?]|\{\s*0*\s*,\s*\d*\s*\}|\{\s*0+\s*\}|~\s*0+\s*\.\.\s*\d+)
    |(?P<count>\+|\{[\s\d,]*\}|~\s*\d+(?:\s*\.\.\s*\d+)?)
    |(?P<sign>[()|])""",
    re.VERBOSE,
)
_JSON = json.JSONDecoder()
_NAME = re.compile(r"[A-Za-z_][\w-]*")

Ways = list[set[str]]  # each way to a rule's text needs texts of all its rules


def has_end(rules: str) -> bool:
    """Return whether some finite text follows the rule `start`; True where that is not known.

    Terminals, whose names are in capitals, have texts: the compiler refuses those that refer to themselves.
    """
    try:
        ways = _ways(rules)
    except (ValueError, RecursionError):  # a notation that is not read here
        return True
    return "start" not in ways or "start" in _with_texts(ways)


def _with_texts(ways: dict[str, Ways]) -> set[str]:
    """Return the names of the rules that a finite text follows."""
    users: dict[str, list[tuple[str, set[str]]]] = {}
    found: set[str] = set()
    ready: list[str] = []
    for name, options in ways.items():
        for needed in options:
            needed.intersection_update(ways)
            for each in needed:
                users.setdefault(each, []).append((name, needed))
        if not all(options):
            ready.append(name)
    while ready:
        name = ready.pop()
        if name in found:
            continue
        found.add(name)
        for user, needed in users.get(name, ()):
            needed.discard(name)
            if not needed:
                ready.append(user)
    return found


def _ways(rules: str) -> dict[str, Ways]:
    """Return the ways of each rule, and of each group in parentheses by a name of its own.

    ValueError for what is not read here.
    """
    ways: dict[str, Ways] = {}
    open: list[Ways] = [[set()]]  # of the rule, and of the groups around the present place
    last = ""  # what `often` makes optional: the rule or the group right before it
    for kind, text in _parts(rules):
        if kind == "head":
            open = [ways.setdefault(_named(text), [])]
            open[-1].append(set())
        elif text == "(":
            open.append([set()])
        elif text == ")":
            last = f"({len(ways)})"
            ways[last] = open.pop()
            if not open:
                raise ValueError("a parenthesis too much")
            open[-1][-1].add(last)
        elif text == "|":
            open[-1].append(set())
        elif kind == "name":
            last = "" if text in open[-1][-1] else text  # once more is not needed, but before it is
            open[-1][-1].add(text)
        elif kind == "often":
            open[-1][-1].discard(last)
        if kind not in ("name", "space") and text != ")":
            last = ""
    return ways


def _parts(rules: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(rules):
        found = _TOKEN.match(rules, at)
        if found is None:
            raise ValueError("another notation")
        at = found.end()
        kind = str(found.lastgroup)
        if kind == "json":
            at = _JSON.raw_decode(rules, at)[1]
        if kind != "space":
            yield kind, found[0]


def _named(head: str) -> str:
    found = _NAME.search(head)
    assert found is not None
    return found[0]
