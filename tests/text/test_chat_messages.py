"""Messages and tools in clients' forms render as transformers renders the form that templates expect."""

import copy
import json

import pytest
from templates import DEEPSEEK, GEMMA, ITEMS, LLAMA31, MISTRAL, PARTS, QWEN3, QWEN25, TEMPLATES
from transformers.utils.chat_template_utils import render_jinja_template

from qrt.errors import ConfigError
from qrt.serve.routes.protocol import ChatMessage, Tool
from qrt.text.chat_template import ChatTemplate
from qrt.text.messages import read_messages, read_tools

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Das Wetter in Köln",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Größe?  <b>&amp;</b>"},
    {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nTwo  metres "},
    {"role": "user", "content": "And\nyou?"},
]
ARGUMENTS = {"city": "Köln", "days": 2, "deep": {"a": [1.5, None, True]}}
ID = "a1b2c3d4e"
CALL = {"id": ID, "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
CALLED = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": ID, "name": "get_weather", "content": "sunny"},
    {"role": "assistant", "content": "Sunny."},
    {"role": "user", "content": "Thanks"},
]
WITH_TOOLS = ["qwen2.5", "qwen3", "llama3.1", "mistral", "deepseek", "items"]


def transformers_renders(template, messages, tools=None, **options):
    (text,), _ = render_jinja_template(
        [copy.deepcopy(messages)], tools=tools, chat_template=template, **NAMES, **options
    )
    return text


def renders(template, messages, **options):
    return ChatTemplate(template, NAMES).render(messages, **options)


def as_clients_write(messages):
    """Return messages with arguments as JSON text and keys in another order, through the server's models."""
    written = copy.deepcopy(messages)
    for message in written:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return [ChatMessage.model_validate(dict(reversed(m.items()))).for_template() for m in written]


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "parts"])
@pytest.mark.parametrize("generation", [True, False])
def test_plain_chats_render_as_transformers(name, generation):
    wanted = transformers_renders(TEMPLATES[name], TALK, add_generation_prompt=generation)
    assert renders(TEMPLATES[name], TALK, add_generation_prompt=generation) == wanted
    assert renders(TEMPLATES[name], as_clients_write(TALK), add_generation_prompt=generation) == wanted


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_calls_render_as_transformers_renders_mappings(name):
    wanted = transformers_renders(TEMPLATES[name], CALLED, tools=TOOLS, add_generation_prompt=True)
    assert "Köln" in wanted and "sunny" in wanted
    sent = [Tool.model_validate({**tool, "strict": None}).for_template() for tool in TOOLS]
    for messages, tools in ((CALLED, TOOLS), (as_clients_write(CALLED), sent)):
        assert renders(TEMPLATES[name], messages, tools=tools, add_generation_prompt=True) == wanted


@pytest.mark.parametrize("template", [QWEN25, DEEPSEEK, LLAMA31])
def test_null_content_stays_null_if_the_template_reads_it(template):
    messages = [*CALLED[:1], {**CALLED[1], "content": None}, *CALLED[2:]]
    wanted = transformers_renders(template, messages)
    assert renders(template, messages) == renders(template, as_clients_write(messages)) == wanted
    without = [{k: v for k, v in m.items() if v is not None} for m in messages]
    assert renders(template, without) == renders(template, as_clients_write(without)) == wanted


NOT_NONE = (
    "{% for m in messages %}{% if m.tool_calls %}[call]{% endif %}"
    "{% if m.content is not none %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)


def test_a_null_content_brings_no_empty_turn():
    messages = [*CALLED[:1], {**CALLED[1], "content": None}, *CALLED[2:3]]
    assert renders(NOT_NONE, messages) == "<user>Weather?[call]<tool>sunny"
    assert transformers_renders(NOT_NONE, messages) == "<user>Weather?[call]<tool>sunny"


@pytest.mark.parametrize(
    "shown", ["'<' + m.content + '>'", "m.content", "m.content | trim", "m.content ~ ''"]
)
def test_null_content_becomes_empty_text_if_needed(shown):
    template = "{% for m in messages %}{{ " + shown + " }};{% endfor %}"
    messages = [{"role": "user", "content": "None"}, {"role": "assistant", "content": None}]
    empty = [messages[0], {"role": "assistant", "content": ""}]
    assert renders(template, messages) == transformers_renders(template, empty)
    assert renders(template, messages).count("None") == 1, "the user's own word"


@pytest.mark.parametrize("name", WITH_TOOLS)
@pytest.mark.parametrize("arguments", ['{"city": "Par', "plain words", "[1]", "null", '{"a": "\\ud800"}'])
def test_arguments_that_are_no_object_leave_the_chat_usable(name, arguments):
    """They reach the template as text, or as the value of a mapping where the template needs one."""
    function = {"name": "get_weather", "arguments": arguments}
    messages = [*CALLED[:1], {**CALLED[1], "tool_calls": [{**CALL, "function": function}]}, *CALLED[2:]]
    if name == "items":
        function = {**function, "arguments": {"arguments": arguments}}
    wanted = [*CALLED[:1], {**CALLED[1], "tool_calls": [{**CALL, "function": function}]}, *CALLED[2:]]
    text = renders(TEMPLATES[name], messages, tools=TOOLS)
    assert text == transformers_renders(TEMPLATES[name], wanted, tools=TOOLS)
    assert text.encode() and (arguments in text or json.dumps(arguments) in text)


@pytest.mark.parametrize("arguments", ["", "  ", None, {}])
def test_no_arguments_are_an_empty_mapping(arguments):
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    for given in (message, ChatMessage.model_validate(message).for_template()):
        (call,) = read_messages([given])[0]["tool_calls"]
        assert call == {"type": "function", "function": {"name": "f", "arguments": {}}}


def test_arguments_too_deep_for_json_stay_text():
    deep = '{"a":' * 100_000 + "1" + "}" * 100_000
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": deep}}],
    }
    assert read_messages([message])[0]["tool_calls"][0]["function"]["arguments"] == deep


@pytest.mark.parametrize(
    "ids", [("call_0123456789", "call_0123456789"), (None, None), ("", ""), ("é" * 9, None)]
)
def test_ids_of_other_servers_become_those_that_mistral_takes(ids):
    """Mistral's templates refuse calls and results unless their ids are nine letters and digits."""
    call, result = copy.deepcopy(CALL), dict(CALLED[2])
    call["id"], result["tool_call_id"] = ids
    messages = [*CALLED[:1], {**CALLED[1], "tool_calls": [call]}, result, *CALLED[3:]]
    text = renders(MISTRAL, as_clients_write(messages))
    before = text.partition('"id": "')[2][:9]
    assert f'"call_id": "{before}"' in text and before.isalnum() and before.isascii()
    assert text == renders(MISTRAL, messages), "and always the same"


def test_results_without_ids_belong_to_the_calls_in_order():
    calls = [{k: v for k, v in CALL.items() if k != "id"}] * 2
    results = [{"role": "tool", "content": content} for content in ("sunny", "rain")]
    text = renders(MISTRAL, [*CALLED[:1], {"role": "assistant", "tool_calls": calls}, *results])
    ids = [part[:9] for part in text.split('"id": "')[1:]]
    assert [part[:9] for part in text.split('"call_id": "')[1:]] == ids and len(set(ids)) == 2


def test_parallel_calls_are_split_for_single_call_templates():
    """Llama 3.1's template refuses two calls, but its model can make them."""
    calls = [{**CALL, "id": id} for id in ("1", "2")]
    results = [{"role": "tool", "tool_call_id": id, "content": f"result {id}"} for id in ("2", "1")]
    messages = [CALLED[0], {"role": "assistant", "content": None, "tool_calls": calls}, *results, *CALLED[3:]]
    one = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls]
    wanted = [CALLED[0], one[0], results[1], one[1], results[0], *CALLED[3:]]
    assert renders(LLAMA31, messages, tools=TOOLS) == transformers_renders(LLAMA31, wanted, tools=TOOLS)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_openais_older_form_of_a_call_is_a_call(name):
    asked = {"role": "assistant", "content": None, "function_call": CALL["function"]}
    result = {"role": "function", "name": "get_weather", "content": "sunny"}
    older = [CALLED[0], asked, result, *CALLED[3:]]
    newer = [CALLED[0], {**CALLED[1], "content": None, "tool_calls": [{"function": CALL["function"]}]}]
    newer.append({k: v for k, v in CALLED[2].items() if k != "tool_call_id"})
    wanted = renders(TEMPLATES[name], [*newer, *CALLED[3:]], tools=TOOLS)
    assert renders(TEMPLATES[name], older, tools=TOOLS) == wanted
    assert "Köln" in wanted and "sunny" in wanted


@pytest.mark.parametrize("calls", [[], None])
def test_an_empty_list_of_calls_is_none(calls):
    messages = [*TALK[1:2], {**TALK[2], "tool_calls": calls}, *TALK[3:]]
    for name in WITH_TOOLS:
        wanted = transformers_renders(TEMPLATES[name], TALK[1:])
        assert (
            renders(TEMPLATES[name], messages)
            == renders(TEMPLATES[name], as_clients_write(messages))
            == wanted
        )


@pytest.mark.parametrize("template", [QWEN25, QWEN3, LLAMA31, MISTRAL, ITEMS])
def test_parts_are_joined_where_the_template_reads_text(template):
    parts = [{"type": "text", "text": "Größe?"}, {"type": "text", "text": "In metres."}]
    messages = [{"role": "system", "content": parts}, {"role": "user", "content": parts}]
    joined = [{**m, "content": "Größe?\nIn metres."} for m in messages]
    assert renders(template, messages) == transformers_renders(template, joined)
    assert renders(template, as_clients_write(messages)) == transformers_renders(template, joined)


@pytest.mark.parametrize("template", [GEMMA, PARTS])
def test_parts_reach_a_template_that_reads_them(template):
    parts = [{"type": "text", "text": "Größe?"}, {"type": "text", "text": "In metres."}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": parts[:1]}]
    assert renders(template, messages) == transformers_renders(template, messages)
    assert "Größe?\n" not in renders(template, messages)


def test_text_is_a_part_where_the_template_reads_nothing_else():
    """Transformers shows nothing of the text, because the template looks for parts in its characters."""
    wrapped = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in TALK]
    assert renders(PARTS, TALK) == transformers_renders(PARTS, wrapped)
    assert TALK[3]["content"] in renders(PARTS, TALK) and TALK[3]["content"] not in transformers_renders(
        PARTS, TALK
    )


def test_a_role_is_read_by_its_own_branch():
    """The template reads text of the system and parts of others, as Llama's template for images does."""
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content | trim }}"
        "{% elif m.content is string %}{{ m.content }}"
        "{% else %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endif %};{% endfor %}"
    )
    parts = [{"type": "text", "text": "a"}, "b", {"type": "refusal", "refusal": "c"}]
    messages = [{"role": role, "content": parts} for role in ("system", "user")]
    assert renders(template, messages) == renders(template, as_clients_write(messages)) == "a\nb\nc;abc;"


def test_other_keys_are_kept():
    thought = {"role": "assistant", "content": "Two.", "reasoning_content": "Hm.", "name": "Ada"}
    messages = [TALK[1], thought]
    assert renders(QWEN3, messages) == transformers_renders(QWEN3, messages)
    assert "<think>\nHm.\n</think>" in renders(QWEN3, messages)
    assert renders("{{ messages[0].name }}", as_clients_write([thought])) == "Ada"


def test_a_result_may_be_a_mapping():
    messages = [*CALLED[:2], {**CALLED[2], "content": {"degrees": 21}}]
    wanted = transformers_renders(LLAMA31, messages)
    assert renders(LLAMA31, messages) == renders(LLAMA31, as_clients_write(messages)) == wanted
    assert '{"degrees": 21}' in wanted


def test_the_final_message_goes_on_as_in_transformers():
    parts = [{"type": "text", "text": text} for text in ("Two ", "metres ")]
    for name, template in TEMPLATES.items():
        last = {"role": "assistant", "content": parts if name == "parts" else "Two  metres "}
        chat = [TALK[1] if name != "parts" else {"role": "user", "content": [dict(parts[0])]}, last]
        wanted = transformers_renders(template, chat, continue_final_message=True)
        assert renders(template, chat, continue_final_message=True) == wanted, name


@pytest.mark.parametrize(
    "messages, told",
    [
        ("hi", "messages: expected a list of messages, got str"),
        ([], "messages: expected at least one message"),
        (["hi"], "messages.0: expected a mapping such as"),
        ([{"content": "x"}], "messages.0.role: expected text, got None"),
        (
            [TALK[0], {"role": "user", "content": 5}],
            "messages.1.content: expected text, or parts of text, got 5",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages.0.content.0: .* type 'image_url'; qrt",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages.0.content.0: expected a part with a text",
        ),
        ([{"role": "user", "content": [5]}], "messages.0.content.0: expected a part of type 'text', got 5"),
        ([{"role": "user", "content": {"a": 1}}], "messages.0.content.0: expected a part with a text"),
        ([{"role": "assistant", "tool_calls": {}, "content": "x"}], None),
        (
            [{"role": "assistant", "tool_calls": "f()"}],
            "messages.0.tool_calls: expected a list of calls, got str",
        ),
        (
            [{"role": "assistant", "tool_calls": ["f()"]}],
            "messages.0.tool_calls.0: expected a mapping, got str",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "f"}}]}],
            "messages.0.tool_calls.0: expected a function's name and arguments, got .*custom",
        ),
        ([{"role": "assistant", "function_call": "f"}], "messages.0.function_call: expected a function's"),
    ],
)
def test_invalid_message_is_named(messages, told):
    if told is None:
        assert read_messages(messages) == [{"role": "assistant", "content": "x"}]
        return
    with pytest.raises(ConfigError, match=told):
        renders(QWEN25, messages)


@pytest.mark.parametrize("tools, told", [("f", "expected a list"), ([print], "tools.0: expected a mapping")])
def test_invalid_tool_is_named(tools, told):
    assert read_tools(None) is None and read_tools([]) is None
    with pytest.raises(ConfigError, match=told):
        renders(QWEN25, TALK, tools=tools)
