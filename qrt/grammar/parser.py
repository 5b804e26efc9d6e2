"""The library's parser of a grammar, with limits on its work."""

from __future__ import annotations

import json
import re

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from qrt.errors import ConfigError
from qrt.grammar.schema import prepared
from qrt.grammar.spec import Grammar
from qrt.grammar.vocabulary import Vocabulary

STACK = 256 * 2**20  # bytes of a compiling thread's stack: the library recurses over references and rules
# Items of a step and of a row, and states of a lexer (0.4 KB each). 640 schemas of JSONSchemaBench need up to
# 2,500 and 670 items; ambiguous rules meet one of these limits, or that of slow steps (`matcher`).
LIMITS = llguidance.LLParserLimits(
    step_max_items=4000, max_items_in_row=750, max_lexer_states=50_000, verbose_errors=False
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
        return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    return lark(grammar.text)


def lark(text: str) -> str:
    """Return rules in Lark's notation: EBNF (`root ::= ...`) is converted."""
    try:
        return str(any_to_lark(text))
    except Exception as error:  # the converter raises bare Exceptions, and RecursionError
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"structured_outputs.grammar: expected Lark with a `start` rule or EBNF with a `root` rule, got "
            f"{text!r:.80} ({reason:.200})"
        ) from error


def parser_of(grammar: Grammar, vocabulary: Vocabulary) -> llguidance.LLMatcher:
    """Return the parser of a grammar; ConfigError names the keyword or the reason that it has none.

    A thread with a stack of `STACK` bytes calls it. A hostile grammar may end the process: `check.Checker`
    tries it in another one first.
    """
    parser = llguidance.LLMatcher(vocabulary.library, source(grammar), log_level=0, limits=LIMITS)
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
