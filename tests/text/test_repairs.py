"""Conversations in an order that a chat template refuses become ones that it takes, and lose no text."""

import json
from itertools import product

import jinja2
import pytest
from templates import DEEPSEEK, GEMMA, LLAMA31, MISTRAL, QWEN3, QWEN25
from transformers.utils.chat_template_utils import render_jinja_template

from qrt.errors import ConfigError
from qrt.text.chat_template import ChatTemplate
from qrt.text.repairs import repaired

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
LINE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}{% endfor %}"
)
# Each refuses what a family of templates refuses.
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}" + LINE
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% endfor %}" + LINE
)
ONE_TURN_EACH = (
    "{% set ns = namespace(last='') %}{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('Unknown role') }}{% endif %}"
    "{% if m.tool_calls %}{{ raise_exception('no tools') }}{% endif %}"
    "{% if m.role == ns.last or (m.role == 'system' and not loop.first) %}"
    "{{ raise_exception('Two in a row') }}{% endif %}"
    "{% set ns.last = m.role %}{% endfor %}" + LINE
)
USER_NEEDED = (
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ raise_exception('No user query found in messages.') }}{% endif %}" + LINE
)
STRICT = {
    "system_first": SYSTEM_FIRST,
    "no_system": NO_SYSTEM,
    "one_turn_each": ONE_TURN_EACH,
    "user_needed": USER_NEEDED,
    "mistral": MISTRAL,
    "gemma": GEMMA,
}
FREE = {"qwen2.5": QWEN25, "qwen3": QWEN3, "llama3.1": LLAMA31, "deepseek": DEEPSEEK}


def chat(roles):
    """A conversation of these roles (c: an assistant's call, t: its result), with numbered texts."""
    names = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    messages = []
    for place, role in enumerate(roles):
        if role == "c":
            function = {"name": "look", "arguments": {"place": f"text{place}."}}
            call = {"id": "a1b2c3d4e", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        else:
            messages.append({"role": names[role], "content": f"text{place}."})
            if role == "t":
                messages[-1]["tool_call_id"] = "a1b2c3d4e"
    return messages


def renders(template, messages, **options):
    return ChatTemplate(template, NAMES).render(messages, **options)


def plain(template, messages):
    """What transformers renders; raises what the template raises."""
    (text,), _ = render_jinja_template([messages], chat_template=template, **NAMES)
    return text


def as_roles(text):
    """The roles and texts of a prompt of LINE."""
    return [tuple(part.split(">", 1)) for part in text.split("<")[1:]]


CASES = [
    # (template, roles, what it becomes)
    ("system_first", "sus", "s0 u1 u2"),
    ("system_first", "us", "u0 u1"),
    ("system_first", "suasus", "s0 u1 a2 u3 u4 u5"),
    ("system_first", "ssu", "s0+1 u2"),
    ("system_first", "sdu", "s0+1 u2"),
    ("system_first", "sudu", "s0 u1 u2 u3"),
    ("system_first", "ssusu", "s0+1 u2+3+4"),
    ("no_system", "su", "u0+1"),
    ("no_system", "ssu", "u0+1+2"),
    ("no_system", "suasu", "u0+1 a2 u3+4"),
    ("no_system", "uu", "u0+1"),
    ("no_system", "uaau", "u0 a1+2 u3"),
    ("no_system", "au", "u a0 u1"),
    ("no_system", "sau", "u0 a1 u2"),
    ("one_turn_each", "uu", "u0+1"),
    ("one_turn_each", "suuaau", "s0 u1+2 a3+4 u5"),
    ("one_turn_each", "susu", "s0 u1+2+3"),
    ("user_needed", "s", "u0"),
    ("user_needed", "sa", "s0 u a1"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "roles", "wanted"), CASES)
def test_roles_become_those_that_the_template_takes(name, roles, wanted):
    messages = chat(roles)
    with pytest.raises(jinja2.TemplateError):
        plain(STRICT[name], [{**m, "role": m["role"].replace("developer", "system")} for m in messages])
    long = {"s": "system", "u": "user", "a": "assistant"}
    turns = [
        (long[turn[0]], "\n\n".join(f"text{place}." for place in turn[1:].split("+") if place))
        for turn in wanted.split()
    ]
    assert as_roles(renders(STRICT[name], messages)) == turns


@pytest.mark.parametrize("name", STRICT | FREE)
def test_no_order_of_roles_is_refused(name):
    """Every order of up to four turns renders, with each text once and in its place."""
    for count in (1, 2, 3, 4):
        for roles in product("sua", repeat=count):
            text = renders((STRICT | FREE)[name], chat(roles), add_generation_prompt=True)
            if name in ("system_first", "no_system", "one_turn_each", "user_needed"):
                places = [text.index(f"text{place}.") for place in range(count)]
                assert places == sorted(places) and text.count("text") == count, roles


CALLED = ["uct", "uctu", "uctau", "uctuau", "ctu", "sctu", "ucu", "uctctu", "suctsu", "uctsa"]


@pytest.mark.parametrize("roles", CALLED)
@pytest.mark.parametrize("name", STRICT)
def test_calls_in_any_order_are_rendered(name, roles):
    """A template that has tools keeps its own form of calls; one that has none shows them as text."""
    text = renders(STRICT[name], chat(roles))
    taken = "t" not in roles and name in ("no_system", "gemma")  # by a template that does not look at calls
    shown = taken or name in ("system_first", "user_needed")  # LINE shows a call's name alone
    for place, role in enumerate(roles):
        assert f"text{place}." in text or (shown and role == "c") or (name == "mistral" and role == "s"), role
    if name == "mistral":
        assert "[TOOL_CALLS]" in text and "[TOOL_RESULTS]" in text or roles == "ucu"
    if name == "one_turn_each":
        assert json.dumps({"name": "look", "arguments": {"place": f"text{roles.index('c')}."}}) in text


@pytest.mark.parametrize("name", STRICT)
@pytest.mark.parametrize("roles", ["sua", "u", "uau", "suau"])
def test_what_a_template_takes_stays_as_it_is(name, roles):
    try:
        wanted = plain(STRICT[name], chat(roles))
    except jinja2.TemplateError:
        return
    assert renders(STRICT[name], chat(roles), tools=None) == wanted


def test_the_final_message_is_continued_behind_a_repair():
    text = renders(NO_SYSTEM, chat("suaa"), continue_final_message=True)
    assert text == "<user>text0.\n\ntext1.<assistant>text2.\n\ntext3."


def test_joined_turns_keep_thoughts_and_calls():
    (call,) = chat("c")
    said = {"role": "assistant", "content": "Look.", "reasoning_content": "one"}
    versions = repaired([chat("u")[0], said, {**call, "reasoning_content": "two"}])
    joined = [version for version in versions if len(version) == 2]
    assert {
        "reasoning_content": "one\n\ntwo",
        "content": "Look.",
        "tool_calls": call["tool_calls"],
    }.items() <= joined[0][1].items()


def test_parts_and_nulls_are_joined_as_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    talk = [
        {"role": "user", "content": parts},
        {"role": "user", "content": None},
        {"role": "user", "content": "c"},
    ]
    assert renders(NO_SYSTEM, talk) == "<user>a\nb\n\nc"


def test_the_error_is_of_the_messages_as_they_came():
    template = "{{ raise_exception(messages | map(attribute='role') | join(' ')) }}"
    with pytest.raises(ConfigError, match="refuses these messages: system user system$"):
        renders(template, chat("sus"))
