"""Reasoning is told from the answer, in every format and however the answer is cut."""

import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qrt.errors import ConfigError
from qrt.text.answer import AnswerFormat, ContentText, ReasoningText
from qrt.text.parts import joined
from qrt.text.reasoning import FORMATS, Reasoning, reasoning_format
from qrt.text.reasoning.reading import Marks
from qrt.text.tool_calls import FORMATS as TOOLS
from qrt.text.tool_calls import LISTED, ToolCall

MARKS = Marks((1,), (2,), (2,), (2,), hidden=False, exact=True), str
CALL = '{"name": "f", "arguments": {"x": 1}}'
NOTATIONS = {
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>",
    "llama3_json": '{"name": "f", "parameters": {"x": 1}}',
    "mistral": f"[TOOL_CALLS][{CALL}]",
    "pythonic": "[f(x=1)]",
}
F = ("f", {"x": 1})
START = "<|start|>assistant"
HARMONY = (
    "<|channel|>analysis<|message|>Look.<|end|>"
    f'{START}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"x": 1}}<|call|>'
)
# format, whether the prompt begins the thinking, answer, its parts
CASES = [
    ("qwen3", False, "<think>\nOkay.\n</think>\n\nYes.", ["r:Okay.", "c:Yes."]),
    ("qwen3", False, "Yes.\n", ["c:Yes.\n"]),
    ("qwen3", False, " \n<think>a</think>b", ["r:a", "c:b"]),
    ("qwen3", False, "I write <think> and </think>.", ["c:I write <think> and </think>."]),
    ("qwen3", False, "<think>\n\n</think>\n\nYes.", ["c:Yes."]),
    ("qwen3", False, "<think>cut off </thi", ["r:cut off </thi"]),
    ("qwen3", False, "<thin", ["c:<thin"]),
    ("qwen3", False, " " * 80 + "<think>a</think>b", ["c:" + " " * 80 + "<think>a</think>b"]),
    ("qwen3", True, "Okay.\n</think>\n\nYes.", ["r:Okay.", "c:Yes."]),
    ("qwen3", True, "<think>Okay.</think>Yes. </think>", ["r:Okay.", "c:Yes. </think>"]),
    ("qwen3", True, "</think>Yes.", ["c:Yes."]),
    ("qwen3", True, "one\n\n two", ["r:one\n\n two"]),
    ("deepseek_r1", True, "a < b </think>\n<b>", ["r:a < b", "c:<b>"]),
    ("granite", False, "Here is my thought process:\n\na\n\nHere is my response:\n\nb", ["r:a", "c:b"]),
    ("granite", False, "Here's my thought process: a Here's my response: b", ["r:a", "c:b"]),
    ("granite", False, "Here is my answer", ["c:Here is my answer"]),
    ("mistral", False, "[THINK]a [THIN[/THINK]b", ["r:a [THIN", "c:b"]),
    ("seed_oss", False, "<seed:think>a</seed:think>b", ["r:a", "c:b"]),
    ("gpt-oss", True, f"<|channel|>analysis<|message|>a <b\n<|end|>{START}<|channel|>final<|message|> b",
     ["r:a <b\n", "c: b"]),
    ("gpt-oss", True, HARMONY, ["r:Look.", F]),
    ("gpt-oss", True, HARMONY.removesuffix("<|call|>"), ["r:Look.", F]),
    ("gpt-oss", True, HARMONY.removesuffix("}<|call|>"), ["r:Look.", 'c:{"x": 1']),
    ("gpt-oss", True, HARMONY.replace("functions.f", "functions.g"), ["r:Look.", 'c:{"x": 1}']),
    ("gpt-oss", True, ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>', [F]),
    ("gpt-oss", True,
     f"<|channel|>commentary<|message|>First.<|end|>{START}<|channel|>final<|message|>b<|return|>",
     ["c:First.\nb"]),
    ("gpt-oss", True, "<|channel|>final<|message|>b", ["c:b"]),
    ("gpt-oss", True, "<|channel|>analysis<|message|>a<|end|><|start|>assist", ["r:a"]),
    ("gpt-oss", True, "no channel", ["c:no channel"]),
    ("gpt-oss", True,
     f"<|channel|>analysis<|message|>a<|end|>{START}<|channel|>analysis to=python<|message|>1+1",
     ["r:a\n1+1"]),
]  # fmt: skip


def answer_format(name, inside, tools=None, begun=""):
    reasoning = Reasoning(FORMATS[name], *MARKS, inside, begun)
    return AnswerFormat(TOOLS[tools] if tools else None, frozenset({"f"}), reasoning)


def shown(parts):
    """Parts in a form that can be compared: ids of calls differ."""
    kinds = {ReasoningText: "r:", ContentText: "c:"}
    return [
        (part.name, json.loads(part.arguments))
        if isinstance(part, ToolCall)
        else kinds[type(part)] + part.text
        for part in joined(parts)
    ]


def in_pieces(format, text, cuts):
    stream, parts = format.stream(), []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parts += stream.feed(text[start:end])
    return shown(parts + stream.finish())


def check_cuts(format, text, wanted):
    """The text whole, in pieces of one size, cut in two at each place, and at random."""
    assert shown(format.split(text)) == wanted
    for size in (*range(1, 8), 20):
        assert in_pieces(format, text, range(size, len(text), size)) == wanted, size
    for cut in range(len(text)):
        assert in_pieces(format, text, [cut]) == wanted, cut
    rng = random.Random(len(text))
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(text)), min(3, len(text))))
        assert in_pieces(format, text, cuts) == wanted, cuts


@pytest.mark.parametrize("name, inside, text, wanted", CASES)
def test_parts_do_not_depend_on_the_cuts(name, inside, text, wanted):
    check_cuts(answer_format(name, inside), text, wanted)


@pytest.mark.parametrize("tools", NOTATIONS)
@pytest.mark.parametrize("name", ["qwen3", "granite", "mistral"])
def test_calls_behind_the_thinking(name, tools):
    """What looks like a call in the thinking is text."""
    start, end, call = FORMATS[name].starts[0], FORMATS[name].ends[0], NOTATIONS[tools]
    format = answer_format(name, False, tools)
    check_cuts(format, f"{start}\n{call} or not{end}\n\n{call}", [f"r:{call} or not", F])
    check_cuts(format, f"{start}{call}", [f"r:{call}"])
    check_cuts(format, call, [F])
    if tools in ("hermes", "mistral"):
        check_cuts(format, f"{start}a{end} It is {call} ", ["r:a", "c:It is", F])


def test_a_thinking_that_is_not_told_apart():
    reasoning = Reasoning(FORMATS["qwen3"], *MARKS, inside=False)
    format = AnswerFormat(TOOLS["hermes"], frozenset({"f"}), reasoning, separate=False)
    text = "<think>\nOkay.\n</think>\n\n"
    assert shown(format.split(text + NOTATIONS["hermes"])) == ["c:" + text.rstrip(), F]


PIECES = {
    "qwen3": ["<think>", "</think>", "<", "</thi", "nk>", "think>"],
    "granite": ["Here is my thought process:", "Here's my response:", "Here", " is my ", "response:"],
    "mistral": ["[THINK]", "[/THINK]", "[", "[/THI", "NK]"],
    "gpt-oss": [
        "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|>", START, "<|message|>",
        "<|channel|>commentary to=functions.f<|message|>", "<|", "|>", "<|call|>", '{"x": 1}', "to=",
    ],
}  # fmt: skip


def by_definition(name, inside, text):
    """Reasoning and content by one expression over the whole answer."""
    starts, ends = ("|".join(map(re.escape, texts)) for texts in (FORMATS[name].starts, FORMATS[name].ends))
    begin = rf"\s{{0,64}}(?:{starts})"
    found = re.fullmatch(rf"(?:{begin}|{'' if inside else '(?!)'})(.*?)(?:(?:{ends})(.*))?", text, re.DOTALL)
    if not found:
        return "", text
    return found[1].strip(), (found[2] or "").lstrip()


@settings(max_examples=100, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", PIECES)
def test_any_text_cut_anywhere(name, data):
    parts = st.sampled_from([*PIECES[name], "a", " ", "\n", "\n\n", "é🦄"])
    text = "".join(data.draw(st.lists(parts, max_size=8)))
    inside = data.draw(st.booleans())
    format = answer_format(name, inside)
    whole = shown(format.split(text))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    assert in_pieces(format, text, cuts) == whole
    if name != "gpt-oss":
        reasoning, content = by_definition(name, inside, text)
        wanted = [f"r:{reasoning}"] * bool(reasoning) + [f"c:{content}"] * bool(content)
        assert whole == wanted


@pytest.mark.parametrize(
    "template, name",
    [
        ("<|im_start|>{{ x.split('</think>') }}", "qwen3"),
        ("<|Assistant|>{{ x.split('</think>') }}", "glm45"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "gpt-oss"),
        ("[THINK]{{ x }}[/THINK]", "mistral"),
        ("after 'Here is my thought process:' and", "granite"),
        ("<seed:think>", "seed_oss"),
        ("<|im_start|>{{ x }}", None),
        ("", None),
    ],
)
def test_the_format_comes_from_the_template(template, name):
    assert reasoning_format("auto", template) is (FORMATS[name] if name else None)
    assert reasoning_format("none", template) is None
    assert reasoning_format("granite", template) is FORMATS["granite"]


def test_an_unknown_parser_is_refused():
    with pytest.raises(ConfigError, match="reasoning_parser: expected one of .*'qwen2'.*qwen3"):
        reasoning_format("qwen2", "")


def test_forced_calls_of_channels_are_in_the_final_one():
    reasoning = Reasoning(FORMATS["gpt-oss"], *MARKS, inside=True)
    text = f"<|channel|>analysis<|message|>a<|end|>{START}<|channel|>final<|message|>[{CALL}]"
    check_cuts(AnswerFormat(LISTED, frozenset({"f"}), reasoning), text, ["r:a", F])
