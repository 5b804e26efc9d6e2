"""Hostile and random grammars: each is refused by name or compiled, and nothing but a fork ever dies."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grammar_walks import TINY, allowed, vocabulary, walked
from qrt.errors import ConfigError
from qrt.grammar.check import Checker
from qrt.grammar.compiled import Grammars
from qrt.grammar.spec import Grammar

MANY = int(os.environ.get("QRT_TEST_GRAMMARS", "10000"))  # of the exhaustive fuzz


def references(count):
    """A chain of `count` references, which the library follows by recursion."""
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)} | {
        f"d{count}": {"type": "integer"}
    }
    return json.dumps({"$ref": "#/$defs/d0", "$defs": chain})


def rules(count):
    return "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(count)) + f'r{count}: "x"\n'


def words(count):
    return [f"w{i:05d}" for i in range(count)]


HOSTILE = {
    "long dots": Grammar("regex", ".{0,100000}"),
    "long string": Grammar("json", '{"type": "string", "maxLength": 1000000}'),
    "nested counts": Grammar("regex", "((a{1,100}){1,100}){1,100}"),
    "many counts": Grammar("regex", "([a-z]{1,5000} ?){1,100}"),
    "many stars": Grammar("regex", "(.*a.*b.*){12}"),
    "many states": Grammar("regex", "(.|\n)*a(.|\n){200}"),
    "alternatives": Grammar("regex", "|".join(words(18_000))),
    "enum": Grammar("json", json.dumps({"enum": words(10_000)})),
    "optional": Grammar("json", json.dumps({"properties": {word: {} for word in words(4_000)}})),
    "depth": Grammar("json", '{"items": ' * 1000 + "{}" + "}" * 1000),
    "parentheses": Grammar("regex", "(" * 20_000 + "a" + ")" * 20_000),
    "ambiguous": Grammar("lark", 'start: s\ns: s s | "a"'),
    "references": Grammar("json", references(900)),
    "rules": Grammar("lark", rules(3_000)),
    "EBNF backwards": Grammar(
        "lark",
        "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(4_000)) + 'r4000 ::= "a"\n',
    ),
    "EBNF nested": Grammar("lark", "root ::= " + "(" * 5_000 + '"a"' + ")" * 5_000),
    "itself": Grammar("lark", "start: start"),
    "reference to itself": Grammar("json", '{"$ref": "#"}'),
    "no regex": Grammar("regex", "(?=a)("),
    "surrogate": Grammar("regex", "\ud800"),
    "empty": Grammar("regex", "()"),
    "nothing": Grammar("json", "false"),
    "not JSON": Grammar("json", '{"type": '),
    "numbers": Grammar("json", '{"minimum": NaN, "multipleOf": 1e-300, "type": "number"}'),
    "wrong types": Grammar("json", '{"properties": [1], "required": 3, "enum": {}, "type": 5}'),
    "backtracking": Grammar("lark", 'start: a "x"\na[stop="b"]: /.*/'),
    "every token": Grammar("lark", "start: <[*]>{1,4}"),
}


@pytest.fixture(scope="module")
def checker():
    found = Checker(vocabulary())
    yield found
    found.close()


@pytest.fixture(scope="module")
def engine():
    return Grammars(vocabulary())


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_or_bounded(name, checker, engine):
    """What the checker lets through compiles in this process too, and is walked to an end or to an error."""
    process = checker._process
    try:
        grammar = checker.check(HOSTILE[name])
    except ConfigError as error:
        assert str(error).startswith("structured_outputs.") and len(str(error)) < 600
        return
    assert process is None or checker._process is process
    walked(engine.get(grammar).result(), random.Random(0), 200)


def test_the_kept_verdict_is_the_same(checker):
    for grammar in (Grammar("json", '{"not": {}}'), Grammar("lark", 'root ::= "a"')):
        first, second = (outcome(checker, grammar) for _ in range(2))
        assert first == second


def outcome(checker, grammar):
    try:
        return checker.check(grammar)
    except ConfigError as error:
        return str(error)


def test_a_fork_that_costs_too_much_is_named(checker):
    backwards = HOSTILE["EBNF backwards"]
    assert "takes over 2 s" in outcome(checker, backwards)
    assert checker.check(Grammar("lark", 'root ::= "b"')).text.startswith("%llguidance")


def test_another_process_starts_where_one_was_killed(checker):
    checker.start()
    before = checker._process.pid
    os.kill(before, signal.SIGKILL)
    assert checker.check(Grammar("regex", "abc|d")) == Grammar("regex", "abc|d")
    assert checker._process.pid != before


def test_another_fork_starts_where_one_was_killed(checker):
    """Whoever killed it, the grammar that comes next is not blamed."""
    checker.start()
    checker.check(Grammar("regex", "first"))
    (fork,) = forks(checker._process.pid)
    os.kill(fork, signal.SIGKILL)
    assert checker.check(Grammar("regex", "second")) == Grammar("regex", "second")
    (other,) = forks(checker._process.pid)
    assert other != fork


def forks(process):
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(child) for child in children]


def test_no_process_outlives_its_parent(tmp_path):
    (tmp_path / "tokenizer.json").write_text(vocabulary().tokenizer)
    code = (
        "import sys, time\n"
        "from qrt.grammar.check import Checker; from qrt.grammar.vocabulary import Vocabulary\n"
        "checker = Checker(Vocabulary(open(sys.argv[1]).read(), 4096, (1,))); checker.start()\n"
        "from qrt.grammar.spec import Grammar; checker.check(Grammar('regex', 'a'))\n"
        "print(checker._process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "tokenizer.json"], stdout=subprocess.PIPE, text=True
    )
    child = int(parent.stdout.readline())
    family = [child, *forks(child)]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert len(family) == 2
    while any(is_alive(process) for process in family):
        time.sleep(0.05)


def is_alive(process):
    """Whether a process runs; one that has ended but was not waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def random_schema(rng, depth=3):
    kinds = [
        "string",
        "integer",
        "number",
        "boolean",
        "null",
        "enum",
        "const",
        "odd",
        "object",
        "array",
        "any",
    ]
    kind = rng.choice(kinds if depth else kinds[:8])
    if kind == "object":
        names = rng.sample(["a", "b", "c", "name", "é", ""], rng.randint(0, 4))
        schema = {"type": "object", "properties": {name: random_schema(rng, depth - 1) for name in names}}
        schema["required"] = rng.sample(names, rng.randint(0, len(names)))
        return schema | rng.choice(
            [{}, {"additionalProperties": False}, {"minProperties": 1}, {"title": "x"}]
        )
    if kind == "array":
        sizes = rng.choice([{}, {"minItems": 2}, {"maxItems": 3}, {"minItems": 3, "maxItems": 2}])
        return {"type": "array", "items": random_schema(rng, depth - 1)} | sizes
    if kind == "any":
        key = rng.choice(["anyOf", "oneOf", "allOf"])
        return {key: [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    odd = [
        {},
        {"not": {}},
        {"type": "thing"},
        {"pattern": "["},
        {"format": "x"},
        {"$ref": "#/nowhere"},
        7,
        True,
    ]
    return {
        "string": {"type": "string", "maxLength": rng.randint(0, 20)},
        "integer": {"type": "integer", "minimum": rng.randint(-99, 9), "maximum": rng.randint(-9, 999)},
        "number": {"type": "number"} | rng.choice([{}, {"multipleOf": 0.5}, {"exclusiveMaximum": 1}]),
        "enum": {"enum": rng.sample([1, "a", None, True, 2.5, [1], {"a": 1}], 3)},
        "const": {"const": rng.choice([0, "x", [], {}])},
        "odd": rng.choice(odd),
    }.get(kind, {"type": kind})


def random_text(rng, parts, most=12):
    return "".join(rng.choice(parts) for _ in range(rng.randint(1, most)))


REGEX_PARTS = [*"abc.*+?|()[]{}^$-\\", "[a-z]", "{2,9}", "(?:", "\\d", "\\p{L}", "(?i)", "é", "\n", "{0,99}"]
LARK_PARTS = [
    "start: ", "a: ", "B: ", "a ", "B ", '"x" ', "/[a-z]+/ ", "| ", "( ", ") ", "* ", "{2,3} ", "\n",
    "<|user|> ", '%json {"type": "integer"} ', "root ::= ", "? ", "%ignore ", "<[1-9]> ", "& ", "~",
]  # fmt: skip


def random_grammar(rng):
    kind = rng.choice(["json", "regex", "lark"])
    if kind == "json":
        return Grammar(kind, json.dumps(random_schema(rng)), r"[ \n]{1,8}")
    return Grammar(kind, random_text(rng, REGEX_PARTS if kind == "regex" else LARK_PARTS))


def compile_many(seed, count, engine):
    """Compile random grammars and walk those that compile; return how many did."""
    rng, compiled = random.Random(seed), 0
    for _ in range(count):
        try:
            matcher = engine.get(random_grammar(rng)).result()
        except ConfigError:
            continue
        compiled += 1
        walked(matcher, rng, 20)
    return compiled


def test_random_grammars_compile_or_are_refused(engine):
    assert compile_many(0, 400, engine) > 100


@pytest.mark.exhaustive
def test_ten_thousand_random_grammars(engine):
    assert compile_many(1, MANY, engine) > MANY // 4


def test_specials_count_by_id_and_gaps_never(engine):
    """Text that spells a special token is ordinary; the token itself stands where a rule names it."""
    (mark,) = (i for i in TINY.special_ids if TINY.hf.convert_ids_to_tokens(i) == "<|user|>")
    named = engine.get(Grammar("lark", 'start: "a" <|user|> "b"')).result()
    for token in [*TINY.encode("a", add_special_tokens=False), mark]:
        assert named.accept(token)
    text = engine.get(Grammar("regex", r"[<|>a-z]+")).result()
    assert mark not in allowed(text)
    everything = engine.get(Grammar("lark", "start: <[*]>{1,4}")).result()
    assert allowed(everything) <= set(range(len(TINY.hf)))
