"""Strict tools in gpt-oss's channels: whatever a model likes to write, its calls are read back and fit."""

import json
import random

import jsonschema
import numpy as np
import pytest
from test_reasoning_reader import CHANNEL_TOKENS, tokenizer

from qrt.engine.constrain.constraint import Constraint, Rules
from qrt.errors import ConfigError, UnsupportedError
from qrt.grammar.compiled import Grammars
from qrt.grammar.spec import Grammar
from qrt.grammar.vocabulary import Vocabulary
from qrt.request.sampling import SamplingParams
from qrt.request.structured_outputs import StructuredOutputsParams
from qrt.text.answer import AnswerFormat, ContentText, ReasoningText
from qrt.text.reasoning import ReasoningReader
from qrt.text.tool_calls import Callee, Calls, ToolCall, channel_grammar

SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["unit"],
    "additionalProperties": False,
}
ASSISTANT = "<|start|>assistant"
ANALYSIS = "<|channel|>analysis<|message|>"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"unit": "C"}'


def functions(*names):
    return [Callee.of(f"tools.{i}.function", name, SCHEMA, exact=True) for i, name in enumerate(names)]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    return tokenizer(tmp_path_factory.mktemp("channels"), special=[*CHANNEL_TOKENS, "<|return|>"])


@pytest.fixture(scope="module")
def vocabulary(here):
    return Vocabulary.of(
        here, len(here.hf), [here.special_names[name] for name in ("<|call|>", "<|return|>")]
    )


@pytest.fixture(scope="module")
def grammars(vocabulary):
    return Grammars(vocabulary)


@pytest.fixture
def answers(here, vocabulary, grammars):
    """Makes the reader and the constraint of an answer behind a prompt."""
    reader = ReasoningReader("gpt-oss", "", here)

    def make(prompt=ASSISTANT, budget=None, answer=None, appends=False):
        calls = Calls(functions("weather", "now"), forced=False, answer=answer)
        shape = StructuredOutputsParams(grammar=channel_grammar(calls, here.special_names))
        params = SamplingParams(max_tokens=500, structured_outputs=shape, thinking_token_budget=budget)
        reasoning = reader.read(prompt)
        assert reasoning.opens
        thinking = reasoning.thinking(params, calls=True, channels=True)
        matcher = grammars.get(Grammar.of(shape)).result()
        rules = Rules(vocabulary.ends, appends=appends)
        format = AnswerFormat(None, frozenset({"weather", "now"}), reasoning)
        return format, Constraint(vocabulary.words, rules, thinking, matcher)

    return make


def allowed(constraint, vocabulary):
    row = np.zeros(vocabulary.words, np.int32)
    constraint.fill(row)
    assert constraint.error is None
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def accepts(constraint, here, vocabulary, text):
    """Whether a whole answer is allowed, token by token."""
    for token in here.encode(text, add_special_tokens=False):
        if token not in allowed(constraint, vocabulary):
            return False
        constraint.take(token)
    return not allowed(constraint, vocabulary).isdisjoint(vocabulary.ends)


@pytest.mark.parametrize("prompt", [ASSISTANT, ASSISTANT + ANALYSIS])
@pytest.mark.parametrize("budget", [None, 4])
def test_calls_of_any_answer_fit_their_schemas(answers, here, vocabulary, prompt, budget):
    kinds, liked = set(), {*here.special_names.values(), *here.encode('"}CF')}
    for seed in range(40):
        rng, tokens = random.Random(seed), []
        format, constraint = answers(prompt, budget, appends=seed % 2 == 0)
        while len(tokens) < 400:
            free = sorted(allowed(constraint, vocabulary))
            some = [token for token in free if token in liked]
            token = rng.choice(some if some and rng.random() < 0.4 else free)
            if token in vocabulary.ends:
                break
            tokens += [token, *constraint.take(token).then]
        else:
            continue
        text = here.decode(tokens, skip_special_tokens=False)
        parts = format.split(text)
        kinds |= {type(part) for part in parts}
        for part in parts:
            if isinstance(part, ToolCall):
                jsonschema.validate(json.loads(part.arguments), SCHEMA)
        assert ("to=functions." in text) == any(isinstance(part, ToolCall) for part in parts)
    assert kinds == {ToolCall, ContentText, ReasoningText}


NEXT = f"<|end|>{ASSISTANT}"
GOOD = [
    CALL,
    f"{ANALYSIS}Hm, <b>.{NEXT}{CALL}",
    f"{ANALYSIS}Hm.{NEXT}{ANALYSIS}So.{NEXT}<|channel|>commentary<|message|>One moment.{NEXT}{CALL}",
    f"{ANALYSIS}Hm.{NEXT}<|channel|>final<|message|>It rains.",
    ' to=functions.now<|channel|>commentary json<|message|>{"unit": "F", "days": 3}',
    '<|channel|>commentary to=functions.now<|message|>{"unit":"F"}',
]
BAD = [
    CALL.replace('"C"', '"K"'),
    f"{ANALYSIS}Hm.{NEXT}" + CALL.replace('{"unit": "C"}', "{}"),
    CALL.replace("weather", "other"),
    "<|channel|>analysis to=functions.weather<|message|>{}",
    "It rains.",
]


def test_what_gpt_oss_writes_is_allowed(answers, here, vocabulary):
    assert all(accepts(answers()[1], here, vocabulary, text) for text in GOOD)
    assert not any(accepts(answers()[1], here, vocabulary, text) for text in BAD)


def test_a_mark_that_text_spells_is_none(answers, here, vocabulary):
    _, constraint = answers()
    text = f"{ANALYSIS}Hm.{NEXT}<|channel|>final<|message|>a <| b <"
    for token in (*here.encode(text, add_special_tokens=False), *here.encode("|end|", False)):
        assert token in allowed(constraint, vocabulary)
        constraint.take(token)
    (closing,) = here.encode(">", add_special_tokens=False)
    assert closing not in allowed(constraint, vocabulary)


def test_the_final_message_may_have_a_shape(answers, here, vocabulary):
    shape = StructuredOutputsParams(choice=["yes", "no"])
    for text, right in (("yes", True), ("maybe", False)):
        found = f"{ANALYSIS}Hm.{NEXT}<|channel|>final<|message|>{text}"
        assert accepts(answers(answer=shape)[1], here, vocabulary, found) is right
    assert accepts(answers(answer=shape)[1], here, vocabulary, CALL)


def test_what_no_grammar_can_be_made_of(here):
    with pytest.raises(UnsupportedError, match=r"tools: .*strict: true, as <\|start\|> is no token"):
        channel_grammar(Calls(functions("f"), forced=False), {})
    with pytest.raises(ConfigError, match="tools.0.function.name: expected letters"):
        channel_grammar(Calls(functions("a b"), forced=False), here.special_names)
    reader = ReasoningReader("gpt-oss", "", here)
    assert not reader.read(f"{ASSISTANT}<|channel|>final<|message|>It", True).opens
