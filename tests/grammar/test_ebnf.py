"""EBNF as in llama.cpp: which texts a grammar has, written down by hand."""

import re

import pytest

from grammar_walks import accepts, matcher_of
from qrt.errors import ConfigError
from qrt.grammar.ebnf import is_ebnf, lark_of
from qrt.grammar.spec import Grammar

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::= "[" ws ( value ("," ws value)* )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ws

# nothing, or a space
ws ::= | " " | "\n" [ \t]{0,20}
"""
# rules: texts of the grammar, texts of another
GRAMMARS = {
    r'root ::= "\u0041"': (["A"], ["B", "", "u0041"]),
    r'root ::= "\x41\U0001F600\U00000042\xe9"': (["A\U0001f600B\u00e9"], ["A"]),
    r'root ::= "\uD83D\uDE00"': (["\U0001f600"], [""]),
    r'root ::= "\[\]\"\n\t\r\\"': (['[]"\n\t\r\\'], ["[]"]),
    r"root ::= [\u0041-\u0043\]\[\"\-^]+": (["ABC", "][", '"-^'], ["D", "\\", "a"]),
    r"root ::= [\x41\x43-\x45]": (["A", "D"], ["B", "x"]),
    r"root ::= [\U0001F600-\U0001F64F]": (["\U0001f601"], ["a"]),
    "root ::= [^a]": (["\n", "b", "\u00e9"], ["a", ""]),
    "root ::= [^]": (["\n", "]"], [""]),
    "root ::= .": (["\n", "x"], ["", "xx"]),
    "root ::= [a&&b]+": (["a&b&"], ["c"]),
    "root ::= [x~~y]+ [[]": (["x~y["], ["z["]),
    "root ::= [a-] [-a]": (["a-", "-a"], ["b"]),
    'root ::= [/]+ "//" "/*" "#"': (["////*#"], ["//"]),
    'root ::= [a-z]+ "a"': (["ba", "aaa"], ["b", "ab"]),
    'root ::= x |\nx ::= "a"': (["a", ""], ["b"]),
    'root ::= ("a" | ) "b"': (["ab", "b"], ["a"]),
    'root ::= ( | "a") "b" ""': (["ab", "b"], ["a"]),
    'root ::=\n  "a" |\n  "b"\n': (["a", "b"], ["ab"]),
    'root ::= "a"\n     | "b"\n': (["a", "b"], ["ab"]),
    'root ::= start\nstart ::= "x"': (["x"], ["y"]),
    'root ::= a-b a_b aB\na-b ::= "1"\na_b ::= "2"\naB ::= "3"\n': (["123"], ["321"]),
    '# "x" ::=\nroot ::= "a" # c\n# d\nb ::= "q"': (["a"], ["q"]),
    'root ::= "a" ("b" ("c") | ")"){0} "d"{ 0, 00 } [)]': (["a)"], ["ab)", "ad)", "a"]),
    'root ::= "a"{2} "b"{1,} "c"{ 0 , 2 }': (["aab", "aabbcc"], ["ab", "aabccc"]),
    'root ::= "a" "b"?\r\nx ::= "y"\r\n': (["a", "ab"], ["b"]),
    'root ::= "(" root ")" | "x"': (["x", "((x))"], ["(x"]),
    'root ::= ws "a" ws\nws ::= [ \\t\\n]*': (["a", " a ", "\na"], ["b"]),
    JSON: (['{"a": [1, 2.5, "x\\n\\u00e9", true]}', "{}"], ['{"a"}', '{"a":01}', '["\x01"]']),
}
# Lark's own ways to write rules
LARK = {
    '?start: "a"': (["a"], ["b"]),
    '!start: x\n?x: "a"': (["a"], ["b"]),
    '// c <x> "\nstart: "a" // <y>\n  // z\n  | "b" # <k>\n': (["a", "b"], ["c"]),
    'start: "\\u0041" /\\u0042/': (["AB"], ["u0041"]),
    '%ignore / +/\n?start: sum\n?sum: n\n | sum "+" n   -> add\nn: /[0-9]+/\n': (["1+2", "1 + 2"], ["1+"]),
    "%import common.NUMBER\nstart : NUMBER": (["12", "1.5"], ["a"]),
    'start: "a ::= b"\r\n': (["a ::= b"], ["a"]),
    'start: "a" /#/ "b" // x': (["a#b"], ["ab"]),
}


@pytest.mark.parametrize("rules", [*GRAMMARS, *LARK])
def test_texts_of_a_grammar(rules):
    good, bad = {**GRAMMARS, **LARK}[rules]
    grammar = Grammar("lark", rules)
    assert is_ebnf(rules) == (rules in GRAMMARS)
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    "rules, message",
    [
        (r'root ::= "\q"', "expected escapes of characters"),
        (r"root ::= [\d]", "expected escapes of characters"),
        (r'root ::= "\uD83D"', "expected escapes of characters"),
        (r'root ::= "\u41"', "expected EBNF, got"),
        (r'root ::= "\x4"', "expected EBNF, got"),
        ("root ::= [z-a]", "expected a range of characters"),
        ("root ::= []", "expected a class of characters"),
        ('root ::= "a', "in line 1"),
        ('root ::= "a" x', "expected a rule `x ::= ...`, got none"),
        ('x ::= "a"', "expected a rule `root ::= ...`, got none"),
        ('root ::= "a" )', "does not compile"),
    ],
)
def test_what_is_no_ebnf_is_named(rules, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        matcher_of(Grammar("lark", rules))


def test_rules_without_recursion_are_terminals():
    rules = lark_of('root ::= list\nlist ::= word ("," list)?\nword ::= [a-z]+')
    assert "\nR_WORD_2: " in rules and "\nr_list_1: R_WORD_2" in rules
