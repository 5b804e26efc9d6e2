"""Grammars without an end: refused, as no answer could be complete; all others are taken."""

import random

import pytest

from grammar_walks import matcher_of
from qrt.errors import ConfigError
from qrt.grammar.ends import has_end
from qrt.grammar.spec import Grammar

ENDLESS = [
    'root ::= "a" root', 'root ::= a\na ::= "x" b\nb ::= "y" a', 'root ::= [a-z] root', "root ::= root",
    'root ::= root "a"', 'root ::= ("a" | "b") root | "c" root', 'root ::= "x" (root | "y" root)',
    'root ::= a root? a\na ::= "x" a', 'start: "a" start', "start: start", 'start: "a" b+\nb: "c" start',
    'start: "a" b{2}\nb: b "c" -> name', '?start: /[a-z]/ start // | "x"\n',
    'start[max_tokens=9]: A start\nA: "x"',
]  # fmt: skip
ENDING = [
    'root ::= "a" root | ""', 'root ::= "a" root?', 'root ::= "a" root*', 'root ::= "(" root{0,2} ")"',
    'root ::= "x" ("y" root)?', 'root ::= root "a" | "b"', 'root ::= "a" (root | "c")', "root ::= [a-z]+",
    'root ::= "x" | "a" b\nb ::= "b" b', 'start: "a" start | B\nB: "x"', 'start: "a" start~0..2',
    'start: "x" (start "y")* | start', 'start: a\na: %json {"type": "object"} | "x"', 'start: "#|" | start',
    'start: /[|(]/ // "\n', 'start: <[7]> | start', 'start: "a" start\nstart: "x"', 'start: a a?\na: "x"',
]  # fmt: skip


@pytest.mark.parametrize("rules", ENDLESS)
def test_rules_without_an_end_are_refused(rules):
    with pytest.raises(ConfigError, match="structured_outputs.grammar: expected a grammar that some finite"):
        matcher_of(Grammar("lark", rules))


@pytest.mark.parametrize("rules", ENDING)
def test_rules_with_an_end_have_it(rules):
    assert has_end(rules.replace("root ::=", "start:").replace(" ::=", ":"))


@pytest.mark.parametrize(
    "rules", ["", "start", 'start: x::y "a" start', 'start: "a" start) ', "start: @ start"]
)
def test_of_other_notations_nothing_is_said(rules):
    assert has_end(rules)


def test_random_rules_against_the_definition():
    """A rule has a text if one of its options needs nothing, or only rules that have one."""
    rng = random.Random(0)
    names = ["start", "a", "b", "c"]
    seen = set()
    for _ in range(300):
        options = {
            name: [[rng.choice(names) for _ in range(rng.randint(0, 3))] for _ in range(2)] for name in names
        }
        found = set()
        for _ in names:
            found |= {name for name in names if any(found.issuperset(option) for option in options[name])}
        lines = [f"{n}: " + " | ".join(" ".join(['"x"', *o]) for o in options[n]) for n in names]
        assert has_end("\n".join(lines)) == ("start" in found)
        seen.add("start" in found)
    assert seen == {True, False}
