"""Tool calls: the result is the same however the answer is cut into pieces, and nothing is lost."""

import json
import random

import pytest
from split_answers import joined, parse
from templates import TEMPLATES

from qrt.serve.routes.protocol import ChatMessage
from qrt.text.chat_template import ChatTemplate
from qrt.text.tool_calls import FORMATS, MAX_CALLS, ToolCallStream

NAMES = {"f", "g"}
HERMES = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
LLAMA = '{"name": "f", "parameters": {"x": 1}}'
F, G = ("f", {"x": 1}), ("g", {})
HARD = {"x": 'a </tool_call> ]}, "{[(\\ \n'}
# notation, answer, its text (None: all of it), its calls
ANSWERS = [
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {"x": 1}}', "", [F]),
    ("llama3_json", '{"parameters": {"x": 1}, "name": "f"}', "", [F]),
    ("llama3_json", ' \n{ "arguments": {"x": 1}, "id": null, "name": "f"}\n', "", [F]),
    ("llama3_json", '{"answer": {"name": "f"}, "parameters": {}}', None, []),
    ("llama3_json", '{"name": "f", "parameters": "{\\"x\\": "}', None, []),
    ("llama3_json", '{"name": "f", "parameters": "{\\"x\\": 1}"}', "", [F]),
    ("llama3_json", f'{LLAMA}\n{{"name": "g", "parameters": {{}}}};{LLAMA}, {LLAMA}', "", [F, G, F, F]),
    ("llama3_json", f"<|python_tag|>{LLAMA}; <|python_tag|>{LLAMA};", "", [F, F]),
    ("llama3_json", f"{LLAMA}; and {LLAMA}", f"; and {LLAMA}", [F]),
    ("llama3_json", f"{LLAMA}; <|python no tag", "; <|python no tag", [F]),
    ("llama3_json", f"I look. <|python_tag|> {LLAMA} Done.", "I look.  Done.", [F]),
    ("llama3_json", '<|python_tag|>brave_search.call(query="x")', None, []),
    ("llama3_json", '{"name": "f", "parameters": {"x": tr', None, []),
    ("llama3_json", f'{{"name": "f", "parameters": {json.dumps(HARD)}}}', "", [("f", HARD)]),
    ("hermes", HERMES.partition("\n</")[0], "", [F]),
    ("hermes", f"I look it up.\n{HERMES.partition('</')[0]}", "I look it up.", [F]),
    ("hermes", f"{HERMES.partition('</')[0]}{HERMES}\n{HERMES}", "", [F, F, F]),
    ("hermes", f"{HERMES[:-6]}", "", [F]),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": ', None, []),
    ("hermes", '<tool_call>{"name": "f", "arguments": "plain words"}</tool_call>', None, []),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, []),
    # calls without arguments: names that have none are called with {}
    *(
        ("hermes", f"Well.<tool_call>\n{call}\n</tool_call>", "Well.", [("f", {})])
        for call in (
            '{"name": "f"}', '{"name": "f", "arguments": null}', '{"name": "f", "parameters": null}',
            '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": ""}',
            '{"arguments": null, "name": "f"}',
            '{"name": "f", "arguments": "{}"}', '{"type": "function", "name": "f"}', '{"id": 1, "name": "f"}',
            '{"name": "f", "arguments": null, "parameters": {}}', '{"name": "f", "parameters": " "}',
        )
    ),
    ("hermes", '<tool_call>{"name": "f"}', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call> <tool_call>{"name": "g"}', "", [("f", {}), G]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [F]),
    ("hermes", '<tool_call>{"name": "f", "age": 3}</tool_call>', None, []),
    ("hermes", '<tool_call>{"name": "f", "arguments": 5}</tool_call>', None, []),
    ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', None, []),
    ("llama3_json", '{"name": "f"}', "", [("f", {})]),
    ("llama3_json", '{"name": "f"}; {"name": "g", "parameters": null}', "", [("f", {}), G]),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "f"}', "", [("f", {})]),
    ("llama3_json", '{"name": "f", "age": 3}', None, []),
    ("mistral", '[TOOL_CALLS][{"name": "f"}, {"name": "g", "arguments": null}]', "", [("f", {}), G]),
    ("mistral", "[TOOL_CALLS]f[ARGS]{}", "", [("f", {})]),
    ("mistral", "[TOOL_CALLS]f", "", [("f", {})]),
    ("mistral", "[TOOL_CALLS] f[ARGS]\n", "", [("f", {})]),
    ("mistral", '[TOOL_CALLS]g[TOOL_CALLS]f[ARGS]{"x": 1}', "", [G, F]),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS][TOOL_CALLS]g", "", [("f", {}), G]),
    ("mistral", "[TOOL_CALLS]nothing", None, []),
    ("mistral", "[TOOL_CALLS]f and more", None, []),
    ("pythonic", "[f()]", "", [("f", {})]),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {json.dumps(HARD)}}}</tool_call>', "", [("f", HARD)]),
    ("hermes", f"  a {HERMES} b {HERMES} c\n", "  a  b  c", [F, F]),
    ("hermes", f"{HERMES}\n\nThat was it.", "That was it.", [F]),
    ("hermes", f"<tool_call>no {HERMES} </tool_call>", "<tool_call>no  </tool_call>", [F]),
    ("hermes", f"<tool_call>{HERMES}", "<tool_call>", [F]),
    ("hermes", f"<tool_call>[{HERMES[12:-13]}, {HERMES[12:-13]}", "", [F, F]),
    ("hermes", "a < b\n\n", None, []),
    ("hermes", " \n ", None, []),
    ("hermes", "an end that might go on <tool_c", None, []),
    ("mistral", f'[TOOL_CALLS][{{"name": "f", "arguments": {json.dumps(HARD)}}}] x', "x", [("f", HARD)]),
    ("mistral", '[TOOL_CALLS] f [ARGS]{"x": 1}', None, []),
    ("mistral", 'Ok.[TOOL_CALLS]f{"x": 1}[TOOL_CALLS]g[CALL_ID]a1b2c3d4e[ARGS]{}', "Ok.", [F, G]),
    ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {"x": 1}}', "", [F]),
    ("mistral", '[TOOL_CALLS][{"arguments": {"x": 1}, "name": "f"}, {"name": "g", "arg', None, [F]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, ', "", [F]),
    ("mistral", "[TOOL_CALLS][]", None, []),
    ("mistral", "[TOOL_CALLS][1, [2]]", None, []),
    ("pythonic", "[f(x=1), g()]", "", [F, G]),
    ("pythonic", " [ f (x = 1) ]\n", "", [F]),
    ("pythonic", '[f(x="it\'s [g()] \\"so\\""), f(x={"a": [1, (2, 3)]})]', "", None),
    ("pythonic", "[f(x=true, y=null, z=[false])]", "", [("f", {"x": True, "y": None, "z": [False]})]),
    ("pythonic", "[f(x=1), g(", None, [F]),
    ("pythonic", "[f(x=1)", "", [F]),
    ("pythonic", "[f(1)] [f(x=1)]", None, []),
    ("pythonic", "[f b] said [f(x=1)]", None, []),
    ("pythonic", "[f(x=1)]\n[g()] and more", "and more", [F, G]),
    ("pythonic", "[f(x={1, 2})]", None, []),
    ("pythonic", "[]", None, []),
]  # fmt: skip


def found(calls):
    return [(call.name, json.loads(call.arguments)) for call in calls]


def in_pieces(name, text, cuts):
    stream, shown, calls = ToolCallStream(FORMATS[name], NAMES), "", []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        piece, new = joined(stream.feed(text[start:end]))
        shown, calls = shown + piece, calls + new
    piece, new = joined(stream.finish())
    return shown + piece, found(calls + new)


def check_all_cuts(name, text):
    """Yield the text whole, in pieces of each size, and cut in two at each place."""
    whole, calls = parse(FORMATS[name], NAMES, text)
    wanted = whole, found(calls)
    for size in range(1, len(text)):
        assert in_pieces(name, text, range(size, len(text), size)) == wanted, size
        assert in_pieces(name, text, [size]) == wanted, size
    assert wanted[1] or whole == text, "without calls all is text"
    return wanted


@pytest.mark.parametrize("name, text, shown, calls", ANSWERS)
def test_result_does_not_depend_on_the_cuts(name, text, shown, calls):
    whole, read = check_all_cuts(name, text)
    if calls is not None:
        assert read == calls
    if shown is not None or not read:
        assert whole == (text if shown is None else shown)


FRAGMENTS = {
    "hermes": [
        HERMES,
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": {',
        "<",
        '{"',
        "tool_call>",
    ],
    "llama3_json": [LLAMA, "<|python_tag|>", ";", "{", '{"name"', ': "f", "parameters": {}', "<|python"],
    "mistral": ["[TOOL_CALLS]", LLAMA, "[", "]", ",", "f[ARGS]", '{"x": 1}', "[CALL_ID]a", "[TOOL"],
    "pythonic": ["[f(x=1)]", "[", "f(", "x=", "g()", '"""', "'", "(", ")]", "]", "#", ", ", "\\"],
}
ANYWHERE = [" ", "\n", "a", "}", '"', "\\", "1", "Kö", "}}", "null"]


@pytest.mark.parametrize("name", FORMATS)
def test_random_answers_have_one_result(name):
    rng = random.Random(7)
    some = 0
    for _ in range(150):
        fragments = rng.choices(FRAGMENTS[name] * 2 + ANYWHERE, k=rng.randint(1, 8))
        some += bool(check_all_cuts(name, "".join(fragments))[1])
    assert some > 5, "and some of them are calls"


@pytest.mark.parametrize("name", FORMATS)
def test_text_and_calls_lose_nothing(name):
    """All text before, between and after calls is kept in order, and so is every call."""
    write = {
        "hermes": lambda x: f'<tool_call>{{"name": "f", "arguments": {{"x": {x}}}}}</tool_call>',
        "llama3_json": lambda x: f'<|python_tag|>{{"name": "f", "parameters": {{"x": {x}}}}}',
        "mistral": lambda x: f'[TOOL_CALLS][{{"name": "f", "arguments": {{"x": {x}}}}}]',
        "pythonic": lambda x: f"[f(x={x})]",
    }[name]
    rng, words = random.Random(3), ["one", "two,", "{", "}", "[", "<b>", "a\n\nb", '"', "f(x=1)"]
    for _ in range(100):
        texts = [rng.choice(words) for _ in range(0 if name == "pythonic" else rng.randint(0, 3))]
        answer = "".join(text + write(at) for at, text in enumerate(texts)) + write(99) + " end"
        shown, calls = parse(FORMATS[name], NAMES, answer)
        assert shown.split() == ("".join(texts) + " end").split()
        assert [call[1]["x"] for call in found(calls)] == [*range(len(texts)), 99]


@pytest.mark.parametrize("template", [name for name in TEMPLATES if name not in ("gemma", "parts")])
@pytest.mark.parametrize("name, text, shown, calls", ANSWERS)
def test_calls_that_qrt_returns_are_accepted_back(template, name, text, shown, calls):
    """The server's models and templates of every kind take the calls back, with a result for each."""
    content, read = parse(FORMATS[name], NAMES, text)
    calls = [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in read
    ]
    answer = {"role": "assistant", "content": content or None, **({"tool_calls": calls} if calls else {})}
    results = [
        {"role": "tool", "tool_call_id": c["id"], "content": f"result {at}"} for at, c in enumerate(calls)
    ]
    messages = [{"role": "user", "content": "x"}, answer, *results]
    sent = [ChatMessage.model_validate(json.loads(json.dumps(m))).for_template() for m in messages]
    prompt = ChatTemplate(TEMPLATES[template], {"bos_token": "<s>", "eos_token": "</s>"}).render(sent)
    places = [prompt.index(result["content"]) for result in results]
    assert places == sorted(places) and prompt.encode()


def test_number_of_calls_is_limited():
    text = "\n".join([HERMES] * (MAX_CALLS + 2))
    shown, calls = parse(FORMATS["hermes"], NAMES, text)
    assert len(calls) == MAX_CALLS and shown == "\n".join([HERMES] * 2)
    text = f"[{', '.join(['g()'] * (MAX_CALLS + 1))}]"
    assert parse(FORMATS["pythonic"], NAMES, text) == (text, [])
