"""The library's parser of a grammar, with limits on its work."""

from __future__ import annotations

import json
import re

import llguidance

from qrt.errors import ConfigError
from qrt.grammar.ebnf import is_ebnf, lark_of
from qrt.grammar.ends import has_end
from qrt.grammar.marks import plain_rules, quoted
from qrt.grammar.schema import inner, prepared
from qrt.grammar.spec import Grammar
from qrt.grammar.vocabulary import Vocabulary

STACK = 256 * 2**20  # bytes of a compiling thread's stack: the library recurses over references and rules
# Items of a step and of a row, and states of a lexer (0.4 KB each). 640 schemas of JSONSchemaBench need up to
# 2,500 and 670 items, and an object of 1,000 optional properties (`schema`) 20,000 and 4,000; ambiguous rules
# meet one of these limits, or that of slow steps (`matcher`).
LIMITS = llguidance.LLParserLimits(
    step_max_items=40_000, max_items_in_row=5000, max_lexer_states=50_000, verbose_errors=False
)


def source(grammar: Grammar) -> str:
    """Return a grammar in the library's notation; ConfigError for one that cannot be read."""
    if grammar.kind == "json":
        schema = prepared(grammar.field, grammar.text, grammar.whitespace)
        return '{"grammars": [{"json_schema": ' + schema + "}]}"
    if grammar.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "choice":
        texts = dict.fromkeys(json.loads(grammar.text))
        return "start: " + " | ".join(map(quoted, texts))
    return lark_of(grammar.text) if is_ebnf(grammar.text) else grammar.text


def parser_of(grammar: Grammar, vocabulary: Vocabulary) -> llguidance.LLMatcher:
    """Return the parser of a grammar; ConfigError names the keyword or the reason that it has none.

    A thread with a stack of `STACK` bytes calls it. A hostile grammar may end the process: `check.Checker`
    tries it in another one first.
    """
    rules = source(grammar)
    if grammar.kind == "lark":
        rules = plain_rules(rules, vocabulary.marks, inner)
        if not has_end(rules):
            raise ConfigError(
                f"{grammar.field}: expected a grammar that some finite text follows, got one that needs "
                "itself without end; give it another way"
            )
    parser = llguidance.LLMatcher(vocabulary.library, rules, log_level=0, limits=LIMITS)
    if parser.is_error():
        raise ConfigError(_refusal(grammar.field, parser.get_error()))
    if parser.is_stopped():
        raise ConfigError(f"{grammar.field}: expected a grammar of at least one token, got one of none")
    return parser


def _refusal(field: str, error: str) -> str:
    """Say what a grammar holds that is not supported, by the library's error."""
    if keys := re.search(r"Unimplemented keys: \[(.*?)\]", error):
        words = keys[1].replace('"', "'")
        return f"{field}: expected a supported schema, got keyword {words}; leave it out"
    if "oneOf constraints are not supported" in error:
        return (
            f"{field}: expected a supported schema, got keyword 'oneOf' with options that may overlap; "
            "write anyOf"
        )
    reason = " ".join(error.split())
    return f"{field}: expected a supported grammar, got one that does not compile: {reason:.300}"
