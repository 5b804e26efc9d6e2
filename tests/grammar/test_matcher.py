"""Matchers of the tiny model's vocabulary: what is accepted, copied, taken back, and what an error does."""

import gc
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import llguidance
import pytest

from grammar_walks import TINY, accepts, allowed, matcher_of, vocabulary
from qrt.errors import ConfigError
from qrt.grammar.check import Checker
from qrt.grammar.compiled import Grammars
from qrt.grammar.matcher import Root
from qrt.grammar.parser import parser_of
from qrt.grammar.spec import Grammar, check_bounds
from qrt.request.structured_outputs import StructuredOutputsParams

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "params, good, bad",
    [
        ({"regex": "[a-f]{3}x+"}, ["abcx", "fedxxx"], ["abc", "abcxy", "xabcx"]),
        ({"choice": ["yes", "no", 'a "b"\n', "é\\😀"]}, ["yes", "no", 'a "b"\n', "é\\😀"], ["ye", "maybe"]),
        ({"json_object": True}, ["{}", '{ "a" : [1, null] }'], ["[]", "1", "{", '{"a":1,}']),
        ({"json": PERSON}, ['{"name": "é", "age": 3}'], ['{"age": 3, "name": "a"}', '{"name": "a"}']),
        ({"grammar": 'start: "a" B*\nB: "c" | "dd"'}, ["a", "acddc"], ["ad", "ca"]),
        ({"grammar": 'root ::= "a" b*\nb ::= "c" | "dd"'}, ["a", "acddc"], ["ad", "ca"]),
        (
            {"json": PERSON, "disable_any_whitespace": True},
            ['{"name":"a","age":3}'],
            ['{"name": "a","age":3}'],
        ),
        (
            {"json": PERSON, "whitespace_pattern": " ?"},
            ['{"name": "a", "age":3}'],
            ['{"name":  "a","age":3}'],
        ),
    ],
)
def test_accepts_what_the_grammar_means(params, good, bad):
    grammar = Grammar.of(StructuredOutputsParams(**params))
    assert all(accepts(grammar, text) for text in good)
    assert not any(accepts(grammar, text) for text in bad)


def test_whitespace_is_never_endless():
    any_object = Grammar.of(StructuredOutputsParams(json_object=True))
    assert accepts(any_object, "{" + " " * 40 + "}")
    assert not accepts(any_object, "{" + " " * 41 + "}")


def test_an_error_allows_nothing_and_stays():
    matcher = matcher_of(Grammar("regex", "ab+"))
    (wrong,) = TINY.encode("x", add_special_tokens=False)
    assert not matcher.accept(wrong) and matcher.error
    assert not allowed(matcher) and not matcher.ended and not matcher.may_end and not matcher.forced()
    assert not matcher.accept(vocabulary().ends[0])
    assert not matcher_of(Grammar("regex", "ab+")).error  # others of the grammar go on


def test_a_spent_limit_is_an_error_and_no_end(monkeypatch):
    """The library's limit of items, which no machine's speed changes."""
    monkeypatch.setattr("qrt.grammar.matcher.MOST_SLOW_S", math.inf)
    limits = llguidance.LLParserLimits(step_max_items=4000, max_items_in_row=750, verbose_errors=False)
    monkeypatch.setattr("qrt.grammar.parser.LIMITS", limits)
    parser = parser_of(Grammar("lark", 'start: s\ns: s s | "a"'), vocabulary())
    matcher = Root(parser, vocabulary()).matcher()
    (a,) = TINY.encode("a", add_special_tokens=False)
    for _ in range(500):
        if not (matcher.accept(a) and allowed(matcher)):
            break
    assert "items" in matcher.error and not matcher.ended and not allowed(matcher)


def test_slow_steps_have_a_limit_together(monkeypatch):
    """A grammar that forces a long text has it written again for every mask."""
    monkeypatch.setattr("qrt.grammar.matcher.SLOW_S", 0.0)
    monkeypatch.setattr("qrt.grammar.matcher.MOST_SLOW_S", 0.02)
    matcher = matcher_of(Grammar("regex", "(ab){20000}"))
    assert not matcher.forced()
    for _ in range(1000):
        if not (ids := allowed(matcher)):
            break
        assert matcher.accept(min(ids))
    assert "slow steps" in matcher.error


def test_copies_of_a_root_are_used_from_many_threads():
    """All threads see the masks that one thread sees."""
    grammar = Grammar.of(StructuredOutputsParams(json=PERSON))
    tokens = TINY.encode('{"name": "Ada Lovelace", "age": 36}', add_special_tokens=False)

    def masks(_):
        matcher, found = matcher_of(grammar), []
        for token in tokens:
            found.append(allowed(matcher))
            assert matcher.accept(token), matcher.error
        return found

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(masks, range(24)))
    assert all(each == masks(0) for each in found)


def test_threads_end_with_their_grammars():
    before = set(threading.enumerate())
    grammars = Grammars(vocabulary())
    mine = set(threading.enumerate()) - before
    matcher = grammars.get(Grammar("regex", "ab")).result()
    assert len(mine) == 2
    del grammars
    gc.collect()
    for thread in mine:
        thread.join(30)
        assert not thread.is_alive()
    assert matcher.accept(*TINY.encode("a", add_special_tokens=False))


def test_rollback_and_copies_return_to_the_same_masks():
    matcher = matcher_of(Grammar.of(StructuredOutputsParams(json=PERSON)))
    tokens = TINY.encode('{"name": "Ada", "age": 36}', add_special_tokens=False) + [vocabulary().ends[0]]
    masks, copies = [], []
    for token in tokens:
        masks.append(allowed(matcher))
        copies.append(matcher.copy())
        assert matcher.accept(token)
    assert matcher.ended
    for back, (mask, copy) in enumerate(zip(reversed(masks), reversed(copies), strict=True), start=1):
        matcher.rollback(1)
        assert allowed(matcher) == mask == allowed(copy), back


def test_the_checker_names_the_keyword_and_outlives_its_process():
    checker = Checker(vocabulary())
    try:
        with pytest.raises(ConfigError, match=r"structured_outputs.json.*keyword 'not'"):
            checker.check(Grammar("json", '{"not": {}}'))
        checker._process.kill()
        assert checker.check(Grammar("regex", "a")) == Grammar("regex", "a")
    finally:
        checker.close()


def test_bounds_refuse_before_anything_is_compiled():
    for text, words in [
        ('{"title": "' + "x" * 2**17 + '"}', "bytes"),
        ('{"items": ' * 200 + "{}" + "}" * 200, "levels"),
        ('{"enum": [' + ",".join("1" * 10_001) + "]}", "enum"),
    ]:
        with pytest.raises(ConfigError, match=words):
            check_bounds(Grammar("json", text))
