"""Every row is used whole, or left out and counted with its reason."""

import json

import pytest

from qrt.errors import ConfigError
from qrt.text.chat_template import ChatTemplate
from qrt.text.data.chats import Unused
from qrt.text.data.json_rows import Broken
from qrt.text.data.rows import DataRow
from qrt.text.data.texts import Texts, text_of

LOOP = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
# prints nothing of a role that it does not know, as Qwen's does
QUIET = LOOP.replace("{{ m.role }}>", "{{ m.role }}>").replace(
    "messages %}", "messages if m.role in ('system', 'user', 'assistant', 'tool') %}", 1
)
TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{% endfor %}"
)
# what comes before </think> is left out of all turns but the last, as Qwen3's does
THINKS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{{ (m.content if loop.last else m.content.split('</think>')[-1]) | trim }}"
    "{% endfor %}"
)


def writer(template):
    return lambda messages, tools: ChatTemplate(template, {}).render(messages, tools=tools or None)


def said(row, template=QUIET):
    return text_of(row, template and writer(template))


def reason(row, template=QUIET):
    with pytest.raises(Unused) as unused:
        said(row, template)
    return str(unused.value)


ASKED, ANSWERED = "What is a heap?", "A tree."
CHAT = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}]
WHOLE = f"<user>{ASKED}<assistant>{ANSWERED}"


@pytest.mark.parametrize("role", ["gpt", "chatgpt", "bing", "bard", "assistant", "model", "GPT"])
@pytest.mark.parametrize("user", ["human", "user", "Human"])
def test_sharegpt_names_of_the_two_sides(role, user):
    turns = [{"from": user, "value": ASKED}, {"from": role, "value": ANSWERED}]
    assert said({"id": "x", "conversations": turns}) == WHOLE


@pytest.mark.parametrize("role", ["tool", "observation", "function_response", "function"])
def test_names_of_a_tool(role):
    turns = [*CHAT, {"from": role, "value": "7 degrees"}]
    assert said({"conversations": turns}) == f"{WHOLE}<tool>7 degrees"


def test_a_function_call_is_the_assistants():
    call = {"name": "weather", "arguments": {"city": "Rome"}}
    turns = [CHAT[0], {"from": "function_call", "value": json.dumps(call)}]
    assert said({"conversations": turns}, TOOLS) == f"<user>{ASKED}<assistant>{json.dumps(call)}"
    older = [CHAT[0], {"role": "assistant", "content": None, "function_call": call}]
    assert said({"messages": older}, TOOLS) == said({"conversations": turns}, TOOLS)
    assert (
        reason({"conversations": turns}, QUIET)
        == "the chat template does not show a message of the role 'assistant'"
    )
    turns[1]["value"] = "weather(Rome)"
    assert reason({"conversations": turns}, TOOLS) == "a function call that is not JSON"


def test_unknown_role_is_named():
    turns = [*CHAT, {"from": "narrator", "value": "Night falls."}]
    assert reason({"conversations": turns}) == "a message of the unknown role 'narrator'"


def test_a_developers_message_is_not_lost():
    turns = [{"role": "developer", "content": "Be brief."}, *CHAT]
    assert said({"messages": turns}) == f"<system>Be brief.{WHOLE}"


@pytest.mark.parametrize("key", ["messages", "conversations", "conversation"])
def test_a_chat_under_any_key_or_none(key):
    assert said({key: CHAT, "source": "x"}) == said(CHAT) == WHOLE
    assert said({key: [{"input": ASKED, "output": ANSWERED}]}) == WHOLE


@pytest.mark.parametrize("key", ["system", "system_prompt", "system_message"])
def test_a_rows_system_prompt(key):
    assert said({key: "Be brief.", "messages": CHAT}) == f"<system>Be brief.{WHOLE}"
    own = {"role": "system", "content": "Be brief."}
    assert said({key: "Be brief.", "messages": [own, *CHAT]}) == f"<system>Be brief.{WHOLE}"
    assert said({key: "", "messages": CHAT}) == said({key: None, "messages": CHAT}) == WHOLE
    assert said({key: "Be brief.", "question": ASKED, "response": ANSWERED}) == f"<system>Be brief.{WHOLE}"
    assert reason({key: 5, "messages": CHAT}) == f"a {key!r} that is a number, not text"


def test_a_rows_tools_are_the_templates():
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    for given in (tools, json.dumps(tools)):
        assert said({"messages": CHAT, "tools": given}, TOOLS) == json.dumps(tools) + WHOLE
        assert reason({"messages": CHAT, "tools": given}) == "tools that the chat template does not show"
    ignores = QUIET + "{# tools #}"
    assert reason({"messages": CHAT, "tools": tools}, ignores) == "tools that the chat template does not show"
    assert said({"messages": CHAT, "tools": []}) == said({"messages": CHAT, "tools": None}) == WHOLE
    assert reason({"messages": CHAT, "tools": "weather"}, TOOLS) == "tools that are not JSON"


def test_functions_and_bare_tools_are_tools():
    function = {"name": "weather", "parameters": {}}
    shown = json.dumps([{"type": "function", "function": function}]) + WHOLE
    assert said({"messages": CHAT, "functions": [function]}, TOOLS) == shown
    assert said({"conversations": CHAT, "tools": json.dumps([function])}, TOOLS) == shown
    assert reason({"messages": CHAT, "functions": [function]}) == "tools that the chat template does not show"


def test_an_entry_with_its_own_system_prompt():
    entry = {"system": "Be brief.", "input": ASKED, "output": ANSWERED}
    assert said({"conversation": [entry]}) == f"<system>Be brief.{WHOLE}"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASKED, "completion": ANSWERED},
        {"prompt": ASKED, "response": ANSWERED},
        {"question": ASKED, "answer": ANSWERED, "id": 3},
        {"instruction": ASKED, "input": "", "output": ANSWERED},
        {"prompt": ASKED, "chosen": ANSWERED, "rejected": "No."},
        {"prompt": ASKED, "chosen": CHAT, "rejected": CHAT},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
        {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": CHAT[1:]},
        {"chosen": CHAT, "rejected": CHAT},
        {"prompt": CHAT},
        {"messages": CHAT[:1], "completion": ANSWERED},
        {"conversations": CHAT[:1], "chosen": {"from": "gpt", "value": ANSWERED}, "rejected": CHAT[1]},
        {"messages": CHAT[:1], "chosen": CHAT, "rejected": CHAT},
        {"messages": CHAT, "answer": "a tree"},
    ],
)
def test_question_and_answer_become_a_chat(row):
    assert said(row) == WHOLE


def test_an_instruction_with_its_input_and_history():
    row = {"instruction": "Sort.", "input": "3 1 2", "output": "1 2 3"}
    assert said(row) == "<user>Sort.\n\n3 1 2<assistant>1 2 3"
    assert said({**row, "history": [[ASKED, ANSWERED]]}) == f"{WHOLE}<user>Sort.\n\n3 1 2<assistant>1 2 3"
    assert reason({**row, "history": "before"}).startswith("a history that is not a list")


def test_question_and_answer_are_joined_without_a_template():
    row = {"system": "Be brief.", "instruction": "Sort.", "input": "3 1", "output": "1 3"}
    assert said(row, None) == "Be brief.\n\nSort.\n\n3 1\n\n1 3"
    assert said({"prompt": "2 + 2 =", "completion": " 4"}, None) == "2 + 2 = 4"
    assert reason({"messages": CHAT}, None) == "chat messages, without a chat template to write them"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"text": None}, "'text' is null, not text"),
        ({"text": 5}, "'text' is a number, not text"),
        ({"text": ["a"]}, "'text' is a list, not text"),
        ({"text": " \n"}, "an empty text"),
        ({"txt": "a", "id": 1}, "no key that holds a text or a conversation among its keys (txt, id)"),
        ({}, "no key that holds a text or a conversation among its keys (none)"),
        (5, "a row that is a number, not an object or text"),
        (None, "a row that is null, not an object or text"),
        (["a"], "a row that is a list, not an object or text"),
        ({"text": "cut \ud83d"}, "half of a surrogate pair"),
        ({"text": "caf\udce9"}, "bytes that are not UTF-8"),
        (Broken("a line that is not JSON"), "a line that is not JSON"),
        ({"messages": []}, "a conversation without messages"),
        ({"messages": None}, "a conversation without messages"),
        ({"messages": "hi"}, "a conversation that is text, not a list of messages"),
        ({"messages": ["hi"]}, "a message that is text, not an object"),
        ({"messages": [{"user": "hi"}]}, "a message without a role"),
        ({"messages": [{"from": ["gpt"], "value": "a"}]}, "a message without a role"),
        ({"messages": [{"role": "user"}]}, "a message without content"),
        (
            {"messages": [{"role": "user", "content": {"a": 1}}]},
            "a message of another form: expected a part with a text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "a message of another form: expected a part of type 'text'",
        ),
        (
            {"messages": [{"role": "user", "content": "What is it?", "images": ["AA=="]}]},
            "a message with 'images', which is not text",
        ),
        ({"messages": [{"role": "user", "content": "cut \ud83d"}]}, "half of a surrogate pair"),
        ({"prompt": "a", "completion": " "}, "an empty 'completion'"),
        ({"question": "a", "answer": {"text": "b"}}, "a 'answer' that is an object, not text"),
        (
            {"messages": [{"role": "user", "content": "a", "tool_calls": "b"}]},
            "a message of another form: expected a list of calls",
        ),
        ({"messages": CHAT, "tools": [{"function": "a"}]}, "tools that the chat template does not show"),
    ],
)
def test_odd_rows_have_a_reason(row, why):
    assert reason(row) == why


def test_a_conversation_that_the_template_refuses():
    turns = [{"from": "human", "value": "Go on."}, {"from": "gpt", "value": "As I said."}]
    never = "{{ raise_exception('not today') }}"
    assert reason({"conversations": turns}, never) == "the chat template refuses it (not today)"


def test_a_turn_that_the_template_drops_is_noticed():
    turns = [*CHAT, {"role": "user", "content": "And a trie?"}, {"role": "assistant", "content": "Prefixes."}]
    first_two = LOOP.replace("messages %}", "messages[:2] %}")
    assert (
        reason({"messages": turns}, first_two)
        == "the chat template does not show a message of the role 'user'"
    )
    repeated = [*CHAT, *CHAT]
    assert (
        reason({"messages": repeated}, first_two)
        == "the chat template does not show a message of the role 'user'"
    )
    system_last = (
        "{% for m in messages[1:] %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ messages[0].content }}"
    )
    assert said({"messages": [{"role": "system", "content": "Be brief."}, *CHAT]}, system_last)


def test_templates_that_strip_escape_or_join_show_a_message():
    turns = [{"role": "user", "content": f"\n {ASKED} \n"}, {"role": "assistant", "content": 'a "b"\n\u00e9'}]
    for filtered in ("m.content | trim", "m.content | tojson", "m.content"):
        assert said({"messages": turns}, LOOP.replace("m.content", filtered))
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    assert said({"messages": parts}) == "<user>one\ntwo"


def test_reasoning_of_earlier_turns_may_go():
    thought = {"role": "assistant", "content": f"<think>\nLet me see.\n</think>\n\n{ANSWERED}"}
    row = {"messages": [CHAT[0], thought, CHAT[0], thought]}
    text = said(row, THINKS)
    assert text.count("Let me see.") == 1 and text.count(ANSWERED) == 2


def test_rows_left_out_are_counted_by_reason():
    rows = ["fine", {"text": None}, {"txt": 1}, {"text": None}, {"text": "good"}]
    texts = Texts(None)
    assert [text for text, _ in texts.of(DataRow(v, "a.jsonl", n) for n, v in enumerate(rows, 1))] == [
        "fine",
        "good",
    ]
    assert texts.used == 2
    assert texts.left_out == {
        "'text' is null, not text": 2,
        "no key that holds a text or a conversation among its keys (txt)": 1,
    }
    (note,) = texts.notes("a.jsonl", {})
    assert note.startswith("a.jsonl: 3 of the 5 rows read are left out: 2: 'text' is null, not text (row 2 ")
    assert "; 1: no key that holds" in note


def test_most_frequent_reasons_are_listed():
    rows = [DataRow({f"key{n % 20}": 1}, "a", n) for n in range(100)] + [
        DataRow({"text": None}, "a", 100)
    ] * 50
    texts = Texts(None)
    assert not list(texts.of(rows))
    assert texts.reasons().startswith("50: 'text' is null") and texts.reasons().endswith("75: other reasons")


def test_pieces_of_a_text_are_one_document():
    rows = [DataRow("one ", "a", 1, ends=False), DataRow("text", "a", 2), DataRow("another", "b", 1)]
    assert list(Texts(None).documents(rows)) == ["one text", "another"]


def test_a_template_that_is_no_jinja_is_a_reason():
    with pytest.raises(ConfigError):
        ChatTemplate("{% if %}", {})
    assert said({"messages": [*CHAT, {"role": "tool", "content": {"degrees": "seven"}}]}).endswith("'seven'}")
    assert reason({"messages": CHAT}, "{% if %}").startswith("the chat template refuses it")
